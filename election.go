package main

// Who is the server of a checkout: look at the lease, take it if the table at the top of lease.go says so, look again if
// somebody else was faster. Every loop here ends by a deadline, none by a count.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

type verdict string

const (
	verdictCreate     verdict = "create"
	verdictAttach     verdict = "attach"
	verdictWait       verdict = "wait"
	verdictBusy       verdict = "busy"
	verdictStale      verdict = "stale"
	verdictAbandoned  verdict = "abandoned"
	verdictSuperseded verdict = "superseded"
	verdictForeign    verdict = "foreign"
)

type probeResult int

const (
	probeNone        probeResult = iota // nobody was asked
	probeProven                         // answers for the lease's checkout, with the proof, and holds it
	probeForeign                        // another's: answers without the proof, or has lost the lease
	probeUnreachable                    // refused, or no route
	probeTimeout                        // silent
)

// foreignGrace is how long a held lease whose address is refused, or another's, is looked at before it is called foreign. A
// killed process loses its sockets and its locks one after the other, and bridges elect in just that instant: calling it
// foreign then would leave them alone beside a lease that is free a moment later.
const foreignGrace = 500 * time.Millisecond

var (
	errInputEnded = errors.New("the client's input has ended")
	errLookAgain  = errors.New("look again") // never leaves elect
	errNoLinks    = errors.New("hard links are not supported here")
)

// Each stalls a process where another may overtake it.
var (
	testHookBeforeCreate   func() // absent was read, nothing is made yet
	testHookBeforeTakeOver func() // the verdict is in, the lock not yet taken
)

// A sight is all that a verdict may depend on.
type sight struct {
	reading    reading
	sameRoot   bool // the lease's root is this checkout, however spelled
	probe      probeResult
	detail     string        // how the probe failed; one line
	age        time.Duration // since its holder has had it
	unanswered time.Duration // how long it has been giving this elector the same probe result
	mine, disk *executable   // this program's file when it started, and now; nil when unknown, or gone
	version    string        // this program's
	timing     timings
}

// judge says what a sight means, whether that calls for a take-over, and why, in one line.
func judge(s sight) (v verdict, takeOver bool, why string) {
	r, doc := s.reading, s.reading.doc
	switch {
	case r.state == readingAbsent:
		return verdictCreate, false, "there is no lease"
	case r.state != readingDocument:
		return verdictStale, true, r.why
	case !r.held:
		return verdictStale, true, fmt.Sprintf("no process holds it (process %d wrote it)", doc.PID)

	// From here on somebody lives. Foreign comes before superseded: whoever is in another mount or network namespace sees
	// another program file too, and robs nobody. Fails safe: at worst one client is served alone.
	case !s.sameRoot:
		return verdictForeign, false, fmt.Sprintf("process %d holds it for %q", doc.PID, doc.Root)
	case s.probe == probeForeign || s.probe == probeUnreachable:
		why = fmt.Sprintf("process %d holds it, but %s does not answer for it (%s)", doc.PID, s.address(), s.detail)
		if s.unanswered < foreignGrace {
			return verdictWait, false, why
		}
		return verdictForeign, false, why

	case s.outdatedFile():
		return verdictSuperseded, true, fmt.Sprintf("process %d runs an older file of %q", doc.PID, doc.Executable.Path)
	case s.probe == probeProven && !s.outdatedSelf() && olderRelease(doc.Version, s.version):
		return verdictSuperseded, true, fmt.Sprintf("process %d runs release %s, this is %s", doc.PID, doc.Version, s.version)
	case s.probe == probeProven:
		return verdictAttach, false, "its server answers"
	case doc.URL == nil && s.age < s.timing.bindGrace:
		return verdictWait, false, fmt.Sprintf("process %d holds it and has not published yet", doc.PID)
	case doc.URL == nil:
		return verdictAbandoned, true, fmt.Sprintf("process %d has published nothing for %v", doc.PID, s.timing.bindGrace)
	}
	why = fmt.Sprintf("process %d at %s does not answer", doc.PID, s.address())
	if s.unanswered < s.timing.busyGrace {
		return verdictBusy, false, why
	}
	return verdictBusy, true, fmt.Sprintf("%s for %v", why, s.timing.busyGrace)
}

func (s sight) address() string {
	if s.reading.doc.URL == nil {
		return "nothing"
	}
	return *s.reading.doc.URL
}

// outdatedSelf: the program file was replaced or removed since this process started. Such a process robs nobody, or it would
// take turns for ever with one that was started from the new file.
func (s sight) outdatedSelf() bool {
	return s.mine != nil && (s.disk == nil || *s.disk != *s.mine)
}

// outdatedFile: the holder runs what used to be the very file this process runs.
func (s sight) outdatedFile() bool {
	held := s.reading.doc.Executable
	return held != nil && s.mine != nil && held.Path == s.mine.Path && !s.outdatedSelf() && *held != *s.mine
}

// An elector finds the server of one checkout for one process. Not for use by two goroutines at once.
type elector struct {
	root    string
	version string
	exe     *executable // noted when the process started
	timing  timings
	log     *slog.Logger
	// probe asks the server that doc names to prove itself, within the context's deadline. A *conn comes with probeProven
	// only, and must outlive the context. The error says in one line why the result is another.
	probe func(ctx context.Context, doc leaseDocument) (*conn, probeResult, error)
	ended <-chan struct{} // closed when the client's input has ended
	// wasAt says whether the client was at the server of that token, whose lease then came with no repository; nil: at none.
	wasAt func(token string) bool

	won *lease // by an earlier election: the own lease is never probed
}

// An outcome holds either the lease, when this process is to be the server, or a proven connection to the one that is.
type outcome struct {
	lease *lease
	conn  *conn
	doc   leaseDocument // of either
}

// An aloneError is why a client is served without a shared server.
type aloneError struct {
	doing string
	err   error
	hint  string // what the user can do; may be empty
	retry bool   // the cause may pass: elect again every 30 s
}

func (a *aloneError) Unwrap() error { return a.err }
func (a *aloneError) Error() string {
	text := a.doing + ": " + a.err.Error()
	if a.hint != "" {
		text += "; hint: " + a.hint
	}
	return text
}

// aloneFor says what to do about a failure, and whether it may pass by itself. What is not known here may.
func aloneFor(doing string, err error) *aloneError {
	a := &aloneError{doing: doing, err: err, retry: true}
	switch {
	case errors.Is(err, errNoLocks), errors.Is(err, errNoLinks):
		a.hint, a.retry = "keep the checkout on a local file system to share one server", false
	case errors.Is(err, errNotPlain):
		a.hint, a.retry = "move it away; majordomus makes what it needs itself", false
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		a.hint = "give this user write permission on " + leaseDir // to join a server that is there, none is needed
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENAMETOOLONG):
		a.retry = false
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		a.hint = "free some space; this process keeps trying"
	case errors.Is(err, errHeld):
		a.hint = "is a process stopped that holds it? this process keeps trying"
	}
	return a
}

// elect returns when this process is the server or has a connection to it. Otherwise the error is an *aloneError, or
// errInputEnded, or that of the context.
func (e *elector) elect(ctx context.Context) (outcome, error) {
	limited, cancel := context.WithTimeout(ctx, e.timing.join)
	defer cancel()
	var t observed
	for delay := firstDelay; ; delay = nextDelay(delay) {
		found, err := e.look(limited, &t)
		if errors.Is(err, errLookAgain) {
			var ended <-chan struct{}
			if t.contested {
				ended = e.ended
			}
			if err = pause(limited, delay, ended); err == nil {
				continue
			}
		}
		switch {
		case err == nil:
			e.won = found.lease
			return found, nil
		case ctx.Err() != nil:
			return outcome{}, ctx.Err()
		case limited.Err() != nil && errors.Is(err, limited.Err()):
			late := fmt.Errorf("not settled within %v: %s, %s", e.timing.join, t.verdict, t.why)
			return outcome{}, aloneFor("joining the server that "+leaseFile+" names", late)
		}
		return outcome{}, err
	}
}

// look is one round: read, ask, judge, act. errLookAgain when the verdict says so or somebody else was faster.
func (e *elector) look(ctx context.Context, t *observed) (outcome, error) {
	// A bridge may elect in a checkout that has been removed, where nothing is to be made anew.
	if _, err := os.Lstat(filepath.Join(e.root, ".git")); err != nil {
		return outcome{}, aloneFor("looking for "+leaseFile, errGone)
	}
	dir, err := stateDir(e.root)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(e.root); err == nil {
			return outcome{}, errLookAgain // somebody deletes what is being made
		}
	}
	if err != nil {
		return outcome{}, aloneFor("making "+leaseDir, err)
	}
	r := readLease(filepath.Join(dir, leaseName))
	if r.doc.Root == string([]rune(e.root)) { // JSON bends a path that is not UTF-8; the server's id is of the real one
		r.doc.Root = e.root
	}
	if e.won != nil && r.held && r.doc.Token == e.won.token() && e.won.check() == nil {
		return outcome{lease: e.won, doc: r.doc}, nil
	}
	s := e.sight(r)
	var server *conn
	if r.held && r.doc.URL != nil && s.sameRoot {
		server, s.probe, s.detail = e.ask(ctx, r.doc)
		if server == nil && ctx.Err() != nil {
			return outcome{}, ctx.Err()
		}
		// A refusal is a server's only while the lease is: one that left in between has taken its lease along.
		if (s.probe == probeForeign || s.probe == probeUnreachable) && !r.same(readLease(filepath.Join(dir, leaseName))) {
			t.contested = false
			return outcome{}, errLookAgain
		}
	}
	s.age, s.unanswered = t.observe(r, s.probe, e.timing.probe)

	v, takeOver, why := judge(s)
	t.verdict, t.why, t.contested = v, why, (v == verdictWait || v == verdictBusy) && !takeOver
	if server != nil && v != verdictAttach {
		server.close()
	}
	switch {
	case takeOver:
		return e.takeOver(ctx, dir, r, v, why)
	case v == verdictCreate:
		return e.create(dir)
	case v == verdictAttach:
		return outcome{conn: server, doc: r.doc}, nil
	case v == verdictForeign:
		a := aloneFor(fmt.Sprintf("sharing a server for %q through %s", e.root, leaseFile), errors.New(why))
		a.hint = "stop that process, or work where its address can be reached"
		return outcome{}, a
	}
	return outcome{}, errLookAgain
}

// sight is what can be known without asking the server.
func (e *elector) sight(r reading) sight {
	s := sight{reading: r, mine: e.exe, version: e.version, timing: e.timing}
	if !r.held {
		return s
	}
	if e.exe != nil {
		s.disk = statExecutable(e.exe.Path)
	}
	s.sameRoot = r.doc.Root == e.root || sameDir(r.doc.Root, e.root)
	return s
}

func sameDir(a, b string) bool {
	ai, err1 := os.Stat(a)
	bi, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(ai, bi)
}

func (e *elector) ask(ctx context.Context, doc leaseDocument) (*conn, probeResult, string) {
	ctx, cancel := context.WithTimeout(ctx, e.timing.probe)
	defer cancel()
	server, result, err := e.probe(ctx, doc)
	if err != nil {
		return server, result, err.Error()
	}
	return server, result, ""
}

// observed is what one election has seen of one holder of the lease.
type observed struct {
	token     string
	seen      time.Time // first; zero before there was any
	probe     probeResult
	since     time.Time // when probe began to be the answer
	verdict   verdict   // the latest, for the message when time is up
	why       string
	contested bool
}

// observe takes the latest reading and probe into account and returns how long the holder has had the lease, and how long the same probe has
// failed. The age is the largest of what the lease says, what the file says and what this election has seen itself, so that a
// time in the future holds nobody out for longer than a grace.
func (t *observed) observe(r reading, probe probeResult, asked time.Duration) (age, unanswered time.Duration) {
	if !r.held {
		return 0, 0
	}
	now := time.Now()
	if t.seen.IsZero() || t.token != r.doc.Token {
		t.token, t.seen, t.probe, t.since = r.doc.Token, now, probeNone, now
	}
	if probe != t.probe {
		t.probe, t.since = probe, now
		if probe == probeTimeout {
			// Silent since it was asked. Reckoned by the timeout and not by the clock: this process may itself have been
			// stopped while it asked.
			t.since = now.Add(-asked)
		}
	}
	age = max(now.Sub(t.seen), now.Sub(r.info.ModTime()))
	if started, err := time.Parse(time.RFC3339, r.doc.StartedAt); err == nil {
		age = max(age, now.Sub(started))
	}
	return age, now.Sub(t.since)
}

// create takes a lease that nobody has.
func (e *elector) create(dir string) (outcome, error) {
	if testHookBeforeCreate != nil {
		testHookBeforeCreate()
	}
	return e.win(newLease(dir, e.newDocument(), linkNew))
}

// takeOver puts a new lease in place of the one that was judged, and of no other.
//
// Removing the judged file first and linking then would be simpler, and is how two electors both win: the slow one removes
// what the fast one has just linked. So the name is never free, it changes by one rename, and what it leads to is compared
// once more under the lock by everything that was judged, not by the inode number, which may be in use again.
func (e *elector) takeOver(ctx context.Context, dir string, judged reading, v verdict, why string) (outcome, error) {
	doing := "taking over " + leaseFile
	switch {
	case judged.info == nil: // hidden from us: nothing to compare with later
		return outcome{}, aloneFor(doing, errors.New(judged.why))
	case judged.info.IsDir(): // no rename replaces it
		return outcome{}, aloneFor(doing, fmt.Errorf("%w: %s", errNotPlain, judged.why))
	}
	if testHookBeforeTakeOver != nil {
		testHookBeforeTakeOver()
	}
	var won *lease
	err := underNameLock(ctx, dir, func() (err error) {
		if !judged.same(readLease(filepath.Join(dir, leaseName))) {
			return errLookAgain
		}
		if won, err = newLease(dir, e.newDocument(), os.Rename); err == nil {
			removeOldTemps(dir)
		}
		return err
	})
	found, err := e.win(won, err)
	if err == nil {
		e.log.Warn(fmt.Sprintf("took over %s: %s, %s", leaseFile, v, why))
		if known := judged.doc.Token != "" && e.wasAt != nil && e.wasAt(judged.doc.Token); !known {
			e.warnTracked(ctx)
		}
	}
	return found, err
}

// warnTracked tells who takes over a lease that came with the repository what the next commit would hold. It is not left in
// place for that: every clone would have no server.
func (e *elector) warnTracked(ctx context.Context) {
	if errors.Is(askTracked(ctx, e.root, leaseFile, e.timing.probe), errTracked) {
		e.log.Warn(fmt.Sprintf("git tracks %s: your next commit would hold the token; %s", leaseFile, untrack))
	}
}

// untrack is what to do about that.
const untrack = "hint: git rm -r --cached " + leaseDir

// win sorts out what became of an attempt.
func (e *elector) win(l *lease, err error) (outcome, error) {
	switch {
	case err == nil:
		return outcome{lease: l, doc: l.document()}, nil
	case errors.Is(err, errLookAgain), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return outcome{}, err
	case errors.Is(err, fs.ErrExist), errors.Is(err, fs.ErrNotExist):
		// Somebody was faster, or deletes the directory while we write; looking again makes it anew or says why not.
		return outcome{}, errLookAgain
	}
	return outcome{}, aloneFor("taking "+leaseFile, err)
}

// linkNew is os.Link with a clear error where the file system has no links: two servers are not risked for it.
func linkNew(from, to string) error {
	err := os.Link(from, to)
	for _, cause := range []error{syscall.EPERM, syscall.ENOTSUP, syscall.ENOSYS, syscall.EMLINK} {
		if errors.Is(err, cause) {
			return fmt.Errorf("%w: %v", errNoLinks, err)
		}
	}
	return err
}

func (e *elector) newDocument() leaseDocument {
	return leaseDocument{
		Schema:     leaseSchema,
		PID:        os.Getpid(),
		Token:      randomHex(16),
		Root:       e.root,
		StartedAt:  time.Now().UTC().Format(time.RFC3339Nano),
		Executable: e.exe,
		Version:    e.version,
	}
}

const firstDelay, lastDelay = 2 * time.Millisecond, 25 * time.Millisecond

func nextDelay(d time.Duration) time.Duration { return min(2*d, lastDelay) }

// pause waits; the error says which of the two ended it before its time.
func pause(ctx context.Context, d time.Duration, ended <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-ended:
		return errInputEnded
	}
}
