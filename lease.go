package main

// The lease is the file .ai/local/state/mcp/server.json of a checkout, one JSON object (leaseDocument). The process whose file
// bears that name is the checkout's server. This file reads, holds and loses it; election.go decides by it who is to serve.
//
// Everything rests on one step: a file is written in full and its inode flocked under a name nobody looks at, and only then
// gets the lease's name, at once, by link(2) (which fails when the name is taken) or by rename(2) (under server.lock beside it,
// see underNameLock, after looking again that the name still leads to what was judged). So nobody ever sees a lease of ours that
// is half written or not yet held; its bytes never change; the kernel lets go of it however its holder dies; no pid is asked.
//
// The lock says only that a holder lives; the name says who is the server. A server that was stopped for so long that it was
// taken over still locks its old file, which has lost the name. So the server asks (lease.check) before every command and again
// before it answers (server.invoke; a command that may wait asks by itself), and now and then when nobody calls
// (server.lookAtLease): the one that was stopped finds another file under the name, executes no command more and becomes a
// bridge. A command that it was in the middle of runs on, but what it writes is nobody's: the journal has lost its name too
// (journal.go), and the look afterwards acknowledges nothing. Only what it does outside, a process started or ended, stays done.
//
// What an election makes of what it finds, the first row that fits (judge in election.go):
//
//	reading              probe                 verdict     action
//	absent               -                     create      link; who succeeds is the server
//	empty, corrupt       -                     stale       take over, however young: we write neither; serve alone where
//	                                                       the name is a directory's or not to be seen: cannot be replaced
//	document, not held   -                     stale       take over
//	held, another root   -                     foreign     leave it, serve alone
//	held                 refused, another's    wait        for 0.5 s (foreignGrace): it may be dying this instant
//	held                 the same, longer      foreign     leave it, serve alone: a sandbox may hide the port
//	held, file replaced  proven, silent, none  superseded  take over, although it may answer
//	held, older release  proven                superseded  take over
//	held                 proven                attach      bridge to it
//	held, no url         none                  wait        for bind grace, 15 s
//	held, no url         none, longer          abandoned   take over
//	held                 silent                busy        look again; after busy grace, 10 s, take over
//
// A probe is a challenge that only who has read the lease can answer. "Proven" has answered it and holds the lease; "another's"
// has answered without the proof, or has lost the lease; "refused": nobody listens there, or hangs up; "silent": no answer within 2 s
// (probe); "none": there is no url to ask. "File replaced": at the path of our own program file, the holder was started from
// another one. Superseded asks also that ours is still the one that we were started from.
//
// What the system does not promise: whoever deletes the directory by hand takes part in no lock. We notice by lease.check.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"
)

const (
	leaseSchema = "majordomus-mcp-lease/v1"
	leaseDir    = ".ai/local/state/mcp" // relative to the checkout's root, as messages show it
	leaseName   = "server.json"
	leaseFile   = leaseDir + "/" + leaseName
	leaseLimit  = 64 << 10
	tempPrefix  = ".majordomus-lease-" // then random digits; a file of this kind is a lease that has no name yet
	tempMaxAge  = time.Minute          // an older one that nobody holds was left by a kill
)

var (
	errLeaseLost = errors.New("the lease is lost") // for good: elect again
	errGone      = errors.New("the checkout is no longer there")
)

var testHookBeforePublish func() // before publishing looks whether the lease is still ours

type leaseDocument struct {
	Schema     string      `json:"schema"`
	PID        int         `json:"pid"` // for people only
	Token      string      `json:"token"`
	Root       string      `json:"root"`
	URL        *string     `json:"url"`        // nil until the server answers there
	StartedAt  string      `json:"started_at"` // kept as text: a time we cannot read is no reason to call a lease corrupt
	Executable *executable `json:"executable"`
	Version    string      `json:"version"`
}

func leasePath(root string) string { return filepath.Join(root, filepath.FromSlash(leaseFile)) }

type readingState int

const (
	readingAbsent   readingState = iota
	readingEmpty                 // nothing but blanks
	readingCorrupt               // anything that is no lease
	readingDocument              // a lease, held or not
)

// A reading is what the one reader found.
type reading struct {
	state readingState
	why   string // what is wrong, for empty and corrupt; one line
	doc   leaseDocument
	held  bool
	info  os.FileInfo // what the name led to (a link itself, not its target); nil when absent or hidden from us
}

// same says whether nothing has happened between two readings. The inode alone does not: its number is free for the next lease
// as soon as the file is replaced.
func (r reading) same(o reading) bool {
	return r.info != nil && o.info != nil && os.SameFile(r.info, o.info) && r.info.ModTime().Equal(o.info.ModTime()) &&
		r.state == o.state && r.held == o.held && r.doc.Token == o.doc.Token
}

// readLease is the only reader of a lease, and it never fails. The file is input from outside: it is not followed when it is a
// link, not waited for when it is a pipe, and read to 64 KiB.
func readLease(path string) reading {
	for limit := time.Now().Add(time.Second); ; {
		r, moved := readLeaseOnce(path)
		if !moved {
			return r
		}
		if time.Now().After(limit) {
			r.held = true // somebody alive keeps changing it: fails closed
			return r
		}
		pause(context.Background(), firstDelay, nil)
	}
}

// readLeaseOnce reads once. moved means that nobody holds the file that was read, but that the name leads to another one by
// now: its server has just published, and let go of the old file when the new one was in place. Only a file that is not held
// and still bears the name is a dead server's.
func readLeaseOnce(path string) (r reading, moved bool) {
	f, err := os.OpenFile(path, os.O_RDONLY|openWary, 0)
	if err != nil {
		return readUnopened(path, err), false
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return reading{state: readingCorrupt, why: reasonOf(err)}, false
	case !info.Mode().IsRegular():
		return reading{state: readingCorrupt, why: describe(info.Mode()), info: info}, false
	case othersFile(info, filepath.Dir(path)): // its writer knows the token, and could prove to be the server
		return reading{state: readingCorrupt, why: "it belongs to another user", info: info}, false
	}
	data, err := io.ReadAll(io.LimitReader(f, leaseLimit+1))
	if err != nil {
		return reading{state: readingCorrupt, why: reasonOf(err), info: info}, false
	}
	r = parseLease(data)
	r.info = info
	if r.state != readingDocument {
		return r, false
	}
	// Any answer but "yours" and "no locks here" counts as held: fails closed, a lease is not robbed because we could not ask.
	// Without locks there is no live lease, and taking over fails at server.lock.
	err = flock(f, lockShared)
	r.held = err != nil && !errors.Is(err, errNoLocks)
	if !r.held {
		// While f is open: closed, its inode number may already be the next lease's.
		now, err := os.Lstat(path)
		moved = err != nil || !os.SameFile(now, info)
	}
	return r, moved
}

// readUnopened tells why a lease could not be opened. A link is such a case, and a socket.
func readUnopened(path string, openErr error) reading {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(openErr, fs.ErrNotExist), errors.Is(err, fs.ErrNotExist):
		return reading{state: readingAbsent}
	case info != nil && !info.Mode().IsRegular():
		return reading{state: readingCorrupt, why: describe(info.Mode()), info: info}
	}
	return reading{state: readingCorrupt, why: reasonOf(openErr), info: info}
}

// parseLease tells what the bytes of a lease file are. Unknown keys are ignored, missing ones are zero.
func parseLease(data []byte) reading {
	corrupt := func(format string, args ...any) reading {
		return reading{state: readingCorrupt, why: fmt.Sprintf(format, args...)}
	}
	text := bytes.TrimSpace(data)
	switch {
	case len(data) > leaseLimit:
		return corrupt("it is over %d bytes", leaseLimit)
	case len(text) == 0:
		return reading{state: readingEmpty, why: "it is empty"}
	case !json.Valid(text):
		return corrupt("it is not JSON")
	case text[0] != '{':
		return corrupt("it is not a JSON object")
	}
	var doc leaseDocument
	if err := json.Unmarshal(text, &doc); err != nil {
		var typed *json.UnmarshalTypeError
		if errors.As(err, &typed) {
			return corrupt("its %q is a %s", typed.Field, typed.Value)
		}
		return corrupt("%q", err.Error())
	}
	switch {
	case doc.Schema != leaseSchema:
		return corrupt("its schema is %.40q, not %q", doc.Schema, leaseSchema)
	case doc.URL != nil && !isLeaseURL(*doc.URL):
		return corrupt("its url %.80q is not http://127.0.0.1:PORT", *doc.URL)
	}
	return reading{state: readingDocument, doc: doc}
}

// placeLease writes the document into a new file, locks it, and gives it the lease's name by place, which is a link or a
// rename. The descriptor it returns holds the lease until it is closed. No other name is left behind, except by a kill.
func placeLease(dir string, doc leaseDocument, place func(from, to string) error) (*os.File, os.FileInfo, error) {
	data, err := json.Marshal(doc)
	if err != nil {
		return nil, nil, err
	}
	temp := filepath.Join(dir, tempPrefix+randomHex(8))
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, nil, err
	}
	defer os.Remove(temp) // after a rename there is nothing to remove
	// Not synced to disk: after a power cut every lease is stale anyway.
	_, err = f.Write(data)
	if err == nil {
		err = flock(f, lockExclusive)
	}
	var info os.FileInfo
	if err == nil {
		info, err = f.Stat()
	}
	if err == nil {
		err = place(temp, filepath.Join(dir, leaseName))
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// A lease is this process's right to be the server. It is held until it is released, lost, or the process dies. All methods
// may be called at the same time. Whoever got it owes it a release, also after publish or check have failed.
type lease struct {
	path string
	id   string // the token, readable without the mutex

	root     string
	rootInfo os.FileInfo
	rootPin  *os.File // open only so that the inode number in rootInfo stays this directory's; nil when it may not be read

	mu   sync.Mutex
	doc  leaseDocument
	file *os.File    // holds the flock; nil once released
	info os.FileInfo // of file, whose inode cannot be another's as long as file is open
	lost error       // set once, then the name is never touched again

	altered bool // somebody has written into file, as far as was looked

	sleepLimit time.Duration // if it has not run for longer, this process may have been taken for dead; 0 before it serves
	lastRan    time.Time     // when it last was seen to run

	overtaken func() bool // see askWhenGone; nil: nobody can say
}

// newLease makes a lease file, gives it the name by place (a link or a rename), and holds it. Errors of place come as they
// are: the elector looks for fs.ErrExist.
func newLease(dir string, doc leaseDocument, place func(from, to string) error) (*lease, error) {
	l := &lease{path: filepath.Join(dir, leaseName), id: doc.Token, root: doc.Root}
	l.rootPin, _ = os.Open(l.root)
	var err error
	if l.rootInfo, err = os.Stat(l.root); err == nil {
		err = l.placeLocked(dir, doc, place) // nobody else knows l yet
	}
	if err != nil {
		l.rootPin.Close()
		return nil, err
	}
	return l, nil
}

// placeLocked makes a new file ours and lets go of the one before it, in this order: a reader who finds the old one open
// must find the name leading elsewhere.
func (l *lease) placeLocked(dir string, doc leaseDocument, place func(from, to string) error) error {
	f, info, err := placeLease(dir, doc, place)
	if err != nil {
		return err
	}
	if l.file != nil {
		l.file.Close()
	}
	l.doc, l.file, l.info = doc, f, info
	return nil
}

// token identifies the lease from link to release, whatever its file. It is a secret.
func (l *lease) token() string { return l.id }

// document is what this process has written, token included.
func (l *lease) document() leaseDocument {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.doc
}

// publish says where the server answers; it must do so already. errLeaseLost: another process was faster, or the file could not be put back: elect.
// *aloneError: the lease is still ours, without a url; release it and serve alone. Any other error: url is not one of ours.
func (l *lease) publish(url string) error {
	if testHookBeforePublish != nil {
		testHookBeforePublish()
	}
	if !isLeaseURL(url) {
		return fmt.Errorf("publishing the lease: %q is not a url of ours", url)
	}
	err := l.publishFile(url)
	if err == nil || errors.Is(err, errLeaseLost) {
		return err
	}
	return aloneFor("publishing "+leaseFile, err)
}

func (l *lease) publishFile(url string) error {
	if err := l.check(); err != nil { // also brings back a directory that was deleted, for the lock to be in
		return err
	}
	dir := filepath.Dir(l.path)
	return underNameLock(context.Background(), dir, func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		doc := l.doc
		doc.URL = &url
		ours, err := l.oursLocked()
		switch {
		case err != nil:
			return err
		case ours:
			return l.placeLocked(dir, doc, os.Rename)
		}
		l.doc = doc // gone since the check: the new file bears the url at once
		return l.relinkLocked()
	})
}

// check says whether the lease is still ours: nil or errLeaseLost. Nearly always that is one lstat. A file that is merely gone,
// or was written into, is put back first; what else was in the directory is not (journal.look). When the checkout is gone too,
// or another directory stands in its place, nothing is put back and the answer is nil: there is nobody to lose to yet.
func (l *lease) check() error {
	l.mu.Lock()
	ours, err := l.oursLocked()
	altered := ours && l.altered
	if !ours && err == nil {
		err = l.relinkLocked()
	}
	l.mu.Unlock()
	if altered {
		l.restore()
		l.mu.Lock()
		err = l.lost // restore may have found another's file
		l.mu.Unlock()
	}
	if errors.Is(err, errGone) {
		return nil
	}
	return err
}

// restore puts a new file in place of our own into which somebody has written: whoever comes would take it for a dead
// one's, and the other checkouts find no server. Where that cannot be done now, the lease is ours all the same.
func (l *lease) restore() {
	dir := filepath.Dir(l.path)
	underNameLock(context.Background(), dir, func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if ours, _ := l.oursLocked(); !ours || !l.altered {
			return nil
		}
		return l.placeLocked(dir, l.doc, os.Rename)
	})
}

// oursLocked looks where the name leads: true to our file, false to nothing we can see, an error to another's (a copy without
// a holder is no more ours than a rival's, and the election will sort it out) or to nothing when another may have had it.
func (l *lease) oursLocked() (bool, error) {
	if l.lost != nil {
		return false, l.lost
	}
	now, err := os.Lstat(l.path)
	switch {
	case err != nil && (l.sleptLocked() || l.overtaken != nil && l.overtaken()):
		// Whoever had taken it over has acknowledged what we know nothing of: fails closed.
		return false, l.loseLocked("it is gone, and while this process slept another may have had it")
	case err != nil:
		return false, nil
	case os.SameFile(now, l.info):
		l.lastRan = time.Now()
		l.altered = now.Size() != l.info.Size() || !now.ModTime().Equal(l.info.ModTime())
		return true, nil
	}
	return false, l.loseLocked("another file has taken its place")
}

// limitSleep says after how long without running this process is taken for dead. noteRunning must be called more often.
func (l *lease) limitSleep(limit time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sleepLimit, l.lastRan = limit, time.Now()
}

func (l *lease) sleptLocked() bool { return l.sleepLimit > 0 && time.Since(l.lastRan) > l.sleepLimit }

// noteRunning notes that this process runs; false when it has slept for so long that only the file can tell whose the lease is.
func (l *lease) noteRunning() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sleptLocked() {
		return false
	}
	l.lastRan = time.Now()
	return true
}

// askWhenGone gives the lease a second witness, the journal: when its file is gone, whether another server was at work here.
func (l *lease) askWhenGone(overtaken func() bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.overtaken = overtaken
}

// relinkLocked puts a new file with the same token in place of one that is gone. Failing is losing: fails closed, a server that
// nobody can find must not take commands.
func (l *lease) relinkLocked() error {
	for limit := time.Now().Add(time.Second); ; {
		if !l.checkoutThere() {
			return errGone
		}
		dir, err := stateDir(l.root)
		if err == nil {
			err = l.placeLocked(dir, l.doc, os.Link)
		}
		if err == nil {
			return nil
		}
		// A git clean at work takes away the directories that were just made, and is soon through.
		if !errors.Is(err, fs.ErrNotExist) || time.Now().After(limit) {
			return l.loseLocked("putting the deleted file back: " + err.Error())
		}
		pause(context.Background(), firstDelay, nil)
	}
}

// checkoutThere says whether the root is still the directory that was leased. A worktree that was removed and added again is
// another one: its server is whoever starts there next, not one that remembers the old one.
func (l *lease) checkoutThere() bool {
	now, err := os.Stat(l.root)
	if err == nil {
		_, err = os.Lstat(filepath.Join(l.root, ".git"))
	}
	return err == nil && os.SameFile(l.rootInfo, now)
}

func (l *lease) loseLocked(why string) error {
	l.lost = fmt.Errorf("%w: %s", errLeaseLost, why)
	return l.lost
}

// release gives the lease up: it removes the file if it is still ours, then lets go of the lock. After that every check and
// publish is errLeaseLost. A second call does nothing. After an error the file may stand; nobody holds it, so it is stale.
func (l *lease) release() error {
	l.mu.Lock()
	ours, _ := l.oursLocked()
	l.mu.Unlock()
	var err error
	if ours {
		err = underNameLock(context.Background(), filepath.Dir(l.path), func() error {
			l.mu.Lock()
			defer l.mu.Unlock()
			if ours, _ := l.oursLocked(); !ours {
				return nil
			}
			l.loseLocked("it was released") // in one step with the removal, or a check would put it back
			removeOldTemps(filepath.Dir(l.path))
			return os.Remove(l.path)
		})
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost == nil {
		l.loseLocked("it was released")
	}
	if l.file != nil {
		l.file.Close()
		l.rootPin.Close()
		l.file = nil
	}
	if err != nil {
		return fmt.Errorf("releasing %s: %w", leaseFile, err)
	}
	return nil
}
