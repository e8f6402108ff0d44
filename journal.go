package main

// The journal: what must survive a kill, one entry a line, in .ai/local/state/mcp/journal.jsonl.
//
//   - Only the leaseholder writes, and one goroutine of it. Whoever has an entry hands it in and waits; everything that
//     came while the disk was busy is written and synced together, and applied to the state only then. So what could
//     not be written has changed nothing, and nobody has seen what might still be lost.
//   - A file is never changed but at its end. To make it smaller, or to bring it back when it is gone or cannot be
//     trusted, the whole state is written into a new file, which gets the name by rename, under the lock and after the
//     look by which leases change hands: a server that slept through a take-over must not put its state in place of its
//     successor's. What it appends goes to a file that has lost the name, and its second look (server.invoke) keeps it
//     from acknowledging that.
//   - What is read is input from outside: links are not followed, the file must be this user's and nobody else's to read,
//     and none that git tracks, for it may have come with the repository; a torn last line is dropped, and a damaged line
//     costs that line. What is not taken over is kept under another name: somebody may want to know what was in it.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	journalName   = "journal.jsonl"
	journalTemp   = ".majordomus-journal-" // then random digits
	journalAside  = journalName + ".aside-"
	asideLimit    = 10        // journals that are kept aside
	journalLine   = 32 << 20  // bytes of a line: a broadcast to a thousand checkouts is one
	journalGrowth = 256 << 10 // bytes by which it may grow before it is looked at whether it could be smaller
)

// lazyTime is how long what is not urgent waits for something that is: a process that starts has better to do than to write.
const lazyTime = 50 * time.Millisecond

// testHookJournal fails a write or a sync of the journal.
var testHookJournal func() error

// durability is how far an entry must have come before the call that makes it goes on.
type durability int

const (
	lazy    durability = iota // it has been applied, and may take lazyTime: who is here, which the next server learns anyway
	prompt                    // it has been applied, and is written at once
	loose                     // nobody waits
	written                   // a kill of the process does not lose it
	synced                    // nor does a power cut; and what cannot be written is refused
)

// commit is an entry on its way into the journal.
type commit struct {
	entry *entry // nil: only a mark in the queue
	how   durability
	of    *session      // whose call it belongs to; nil: nobody's who could go
	done  chan struct{} // closed when it has been applied or refused
	out   applied
	err   error
}

// journal writes the entries of one server.
type journal struct {
	root  string
	path  string
	lease *lease
	log   *slog.Logger
	apply func([]*commit)                      // applies a batch that has been written, all at once
	state func(each func(*entry)) (vital bool) // gives the entries that make the present state
	ready chan struct{}                        // closed when what an earlier server left is written anew, or cannot be
	mine  atomic.Pointer[[2]os.FileInfo]       // what this server has found or put under the name; nil: nothing so far

	mu     sync.Mutex
	queue  []*commit
	closed bool
	wake   chan struct{} // a receive means that there is something in queue, or that closed is set
	ended  chan struct{} // closed when the writer has ended

	// The writer's own.
	file   *os.File
	info   os.FileInfo
	size   int64
	alive  int64 // its size when it held nothing but the state
	behind bool  // the state holds what the file does not
	named  bool  // its name would survive a power cut
	buffer bytes.Buffer
	failed bool // the last write failed, and the log says so
}

func journalPath(root string) string {
	return filepath.Join(root, filepath.FromSlash(leaseDir), journalName)
}

// start begins to write. What an earlier server left has been read already; found says that there was something.
func (j *journal) start(found bool) {
	j.ready, j.wake, j.ended = make(chan struct{}), make(chan struct{}, 1), make(chan struct{})
	if now, err := os.Lstat(j.path); found && err == nil {
		j.mine.Store(&[2]os.FileInfo{now})
	}
	go func() { // ends when closed is set and the queue is empty
		defer close(j.ended)
		if found {
			removeOldJournals(filepath.Dir(j.path))
			j.note(j.rewrite())
		}
		close(j.ready)
		for batch := j.take(); batch != nil; batch = j.take() {
			j.commit(batch)
		}
		if j.file != nil {
			j.file.Close()
		}
	}()
}

// overtaken reports whether another server has put its journal here, which it does only while it has the lease.
func (j *journal) overtaken() bool {
	now, err := os.Lstat(j.path)
	if err != nil {
		return false
	}
	mine := j.mine.Load()
	return mine == nil || !slices.ContainsFunc(mine[:], func(known os.FileInfo) bool { return known != nil && os.SameFile(known, now) })
}

// submit hands an entry in, in the order of the calls.
func (j *journal) submit(c *commit) {
	j.mu.Lock()
	switch {
	case j.closed:
		c.err = errLeaseLost
		close(c.done)
	case c.of != nil && c.of.over.Load(): // looked at here: what comes after it in the queue may be its successor's
		c.err = errSessionEnded
		close(c.done)
	default:
		j.queue = append(j.queue, c)
	}
	j.mu.Unlock()
	signalOn(j.wake)
}

// close has the writer finish, and waits for it.
func (j *journal) close() {
	j.mu.Lock()
	j.closed = true
	j.mu.Unlock()
	signalOn(j.wake)
	<-j.ended
}

// look has a journal that is gone written anew. Without it that would wait for the next entry, and a kill before that one
// would lose what has been acknowledged.
func (j *journal) look() {
	if _, err := os.Lstat(j.path); errors.Is(err, fs.ErrNotExist) {
		j.submit(&commit{how: lazy, done: make(chan struct{})})
	}
}

// drain waits until everything that was handed in before has been written.
func (j *journal) drain() {
	c := &commit{how: written, done: make(chan struct{})}
	j.submit(c)
	<-c.done
}

// take waits for something to write; nil when there will be nothing more.
func (j *journal) take() []*commit {
	var late <-chan time.Time // a receive means that what is not urgent has waited for long enough
	for due := false; ; {
		j.mu.Lock()
		batch := j.queue
		urgent := due || j.closed || slices.ContainsFunc(batch, func(c *commit) bool { return c.how != lazy })
		if urgent {
			j.queue = nil
		}
		closed := j.closed
		j.mu.Unlock()
		switch {
		case urgent && len(batch) > 0 || closed:
			return batch
		case len(batch) > 0 && late == nil:
			late = time.After(lazyTime)
		}
		select {
		case <-j.wake:
		case <-late:
			due = true
		}
	}
}

// commit writes a batch and has it applied. What only had to be written, and could not be, counts all the same: a message
// that was read is read, and the file is brought up to it when that can be done again.
func (j *journal) commit(batch []*commit) {
	err := j.append(batch)
	j.note(err)
	if err != nil {
		for _, c := range batch {
			if c.how == synced {
				c.err = err
			} else {
				j.behind = true
			}
		}
	}
	j.apply(batch)
	for _, c := range batch {
		close(c.done)
	}
}

// note tells once that the journal cannot be written, and once that it can be again.
func (j *journal) note(err error) {
	switch failed := err != nil; {
	case failed && !j.failed && !errors.Is(err, errLeaseLost):
		j.log.Warn(fmt.Sprintf("the journal %s/%s cannot be written (%v): messages are refused until it can", leaseDir, journalName, err))
	case !failed && j.failed:
		j.log.Info(fmt.Sprintf("the journal %s/%s is written again", leaseDir, journalName))
	}
	j.failed = err != nil
}

// append writes the lines of a batch, all or none of them.
func (j *journal) append(batch []*commit) error {
	if err := j.stand(); err != nil {
		return err
	}
	sync := false
	j.buffer.Reset()
	for _, c := range batch {
		if c.entry != nil {
			line := mustJSON(c.entry)
			if len(line) > journalLine { // the next server would not read it
				return fmt.Errorf("a line of %d bytes, and at most %d are read", len(line), journalLine)
			}
			j.buffer.Write(line)
			j.buffer.WriteByte('\n')
		}
		sync = sync || c.how == synced
	}
	err := hooked(testHookJournal)
	if err == nil {
		_, err = j.file.Write(j.buffer.Bytes())
	}
	if err == nil && sync {
		j.syncName()
		err = j.file.Sync()
	}
	if err != nil {
		// Half a batch must not be found by the next server: it was refused.
		if j.file.Truncate(j.size) != nil {
			j.behind = true
		}
		return errors.New(reasonOf(err))
	}
	j.size += int64(j.buffer.Len())
	return nil
}

func hooked(hook func() error) error {
	if hook == nil {
		return nil
	}
	return hook()
}

// stand makes sure that the file under the name is ours and as we left it, and not much larger than it need be.
func (j *journal) stand() error {
	now, err := os.Lstat(j.path)
	inPlace := j.file != nil && err == nil && os.SameFile(now, j.info) && now.Size() == j.size && now.Mode().Perm()&0o077 == 0 // the next reader trusts no other
	if inPlace && !j.behind {
		if j.size > 2*j.alive+journalGrowth {
			if err := j.rewrite(); err != nil {
				j.alive = j.size // what there is serves on; try again when it is twice as large
			}
		}
		return nil
	}
	return j.rewrite()
}

// rewrite puts a new file with nothing but the present state in place of what is there, whatever that is.
func (j *journal) rewrite() error {
	if err := j.lease.check(); err != nil { // also brings back a directory that was deleted
		return err
	}
	dir := filepath.Dir(j.path)
	temp := filepath.Join(dir, journalTemp+randomHex(8))
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return errors.New(reasonOf(err))
	}
	defer os.Remove(temp) // after the rename there is nothing to remove
	size, vital, err := j.writeState(f)
	if err == nil && vital {
		err = f.Sync() // before it takes the place of what was synced
	}
	var info os.FileInfo
	if err == nil {
		info, err = f.Stat()
	}
	if err == nil {
		err = underNameLock(context.Background(), dir, func() error {
			if err := j.lease.check(); err != nil {
				return err
			}
			j.mine.Store(&[2]os.FileInfo{j.info, info})
			return os.Rename(temp, j.path)
		})
	}
	if err != nil {
		f.Close()
		if errors.Is(err, errLeaseLost) {
			return err
		}
		return errors.New(reasonOf(err))
	}
	j.mine.Store(&[2]os.FileInfo{info}) // the number of a file that is closed may become another's
	if j.file != nil {
		j.file.Close()
	}
	j.file, j.info, j.size, j.alive, j.behind, j.named = f, info, size, size, false, false
	if vital {
		j.syncName()
	}
	return nil
}

// writeState writes the state into a new file.
func (j *journal) writeState(f *os.File) (size int64, vital bool, err error) {
	if err := hooked(testHookJournal); err != nil {
		return 0, false, err
	}
	var state bytes.Buffer
	vital = j.state(func(e *entry) {
		state.Write(mustJSON(e))
		state.WriteByte('\n')
	})
	n, err := f.Write(state.Bytes())
	return int64(n), vital, err
}

// syncName makes the file's name survive a power cut. Where directories cannot be synced there is nothing better.
func (j *journal) syncName() {
	if j.named {
		return
	}
	j.named = true
	if d, err := os.Open(filepath.Dir(j.path)); err == nil {
		d.Sync()
		d.Close()
	}
}

// removeOldJournals removes what killed servers left between making a file and naming it.
func removeOldJournals(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && strings.HasPrefix(e.Name(), journalTemp) && info.Mode().IsRegular() && time.Since(info.ModTime()) > tempMaxAge {
			os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}
