//go:build unix

package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const stormDisk = 16 << 20 // bytes of a disk that can be filled

// blow has everything go wrong that the plan says, and puts right again what it can.
func (s *storm) blow() {
	var undone sync.WaitGroup
	defer undone.Wait()
	next := s.plan.allFaults()
	for until := time.Now().Add(s.plan.life); time.Now().Before(until) && !s.t.Failed(); {
		f := next()
		<-time.After(f.after)
		if s.strike(f, &undone) {
			s.history = append(s.history, fmt.Sprintf("%s %s in w%d, peer%d, %d, %v", time.Now().Format("15:04:05.000"), f.kind, f.worktree, f.client, f.n, f.lasts))
			s.count(f.kind)
		} else {
			s.count("nobody there for " + f.kind)
		}
	}
}

// strike does one of them; false when there is nobody whom it could meet.
func (s *storm) strike(f fault, undone *sync.WaitGroup) bool {
	r := s.peers[f.client].current()
	kind, at := f.kind, f.worktree
	if k, ok := strings.CutSuffix(kind, " server"); ok {
		kind, r = k, s.serverOf(at)
	}
	if r == nil {
		return false
	}
	switch kind {
	case "kill":
		r.doom(syscall.SIGKILL)
	case "kill some": // at once: the server and every other client of its checkout
		if server := s.serverOf(at); server != nil {
			server.doom(syscall.SIGKILL)
		}
		for _, c := range s.peers {
			if c.worktree == at && c.index%2 == f.n%2 {
				if r := c.current(); r != nil {
					r.doom(syscall.SIGKILL)
				}
			}
		}
	case "term":
		sig := []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP}[f.n%3]
		r.doom(sig)
		undone.Go(func() { s.diesOf(r, sig) })
	case "leave":
		r.leave()
	case "stop":
		return s.pause(r, f.lasts, undone)
	case "clock":
		// Mostly on, sometimes back; never by so little that a message would not be late.
		s.now = s.now.Add(time.Duration(f.n%400-60) * time.Second)
		s.setClock(s.now)
	case "lock directory":
		return s.forAWhile(f, undone, func(dir string) error { return lockDir(dir, true) }, func(dir string) { lockDir(dir, false) })
	case "fill disk":
		if !s.plan.tmpfs[at] {
			return false
		}
		return s.forAWhile(f, undone, fillDisk, func(dir string) { os.Remove(filepath.Join(dir, "filler")) })
	case "delete directory":
		return s.deleteDir(at)
	default:
		return s.damage(f)
	}
	return true
}

// forAWhile makes a directory one that cannot be written. Who is alone because of it stays so where no time can mend it,
// and comes back as its client would: by being started again.
func (s *storm) forAWhile(f fault, undone *sync.WaitGroup, spoil func(dir string) error, mend func(dir string)) bool {
	dir := filepath.Dir(leasePath(s.dirs[f.worktree]))
	s.mu.Lock()
	spoiled := s.spoiled[f.worktree]
	s.spoiled[f.worktree] = true
	s.mu.Unlock()
	if spoiled {
		return false
	}
	whole := func() {
		s.mu.Lock()
		s.spoiled[f.worktree] = false
		s.mu.Unlock()
	}
	s.unwell[f.worktree].Store(math.MaxInt64)
	var err error
	s.inMounts(func() { err = spoil(dir) })
	if err != nil {
		s.unwell[f.worktree].Store(0)
		whole()
		return false
	}
	undone.Go(func() {
		<-time.After(f.lasts)
		s.inMounts(func() { mend(dir) })
		s.unwell[f.worktree].Store(time.Now().Add(10 * time.Second).UnixNano())
		whole()
		for _, c := range s.peers {
			if r := c.current(); r != nil && c.worktree == f.worktree && r.alone() {
				s.count("alone for a while")
				r.leave()
			}
		}
	})
	return true
}

// cannotWrite says that the server of a client may not be able to write.
func (s *storm) cannotWrite(name string) bool {
	for _, c := range s.peers {
		if c.name == name {
			return time.Now().UnixNano() < s.unwell[c.worktree].Load()
		}
	}
	return false
}

// hasBeenAlone says that some process of a client has served it alone.
func (s *storm) hasBeenAlone(name string) bool {
	for _, c := range s.peers {
		if r := c.current(); c.name == name {
			log, _ := os.ReadFile(r.log)
			return c.alone.Load() || strings.Contains(string(log), aloneWords)
		}
	}
	return false
}

// lockDir makes a directory unwritable, for root too where the file system knows how.
func lockDir(dir string, lock bool) error {
	mode, flag := os.FileMode(0o700), "-i"
	if lock {
		mode, flag = 0o500, "+i"
	}
	if os.Getuid() == 0 {
		return exec.Command("chattr", flag, dir).Run()
	}
	return os.Chmod(dir, mode)
}

// fillDisk fills what is no larger than a disk of the storm's own.
func fillDisk(dir string) error {
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		return err
	}
	defer f.Close()
	for range 2 * stormDisk >> 16 {
		if _, err = f.Write(make([]byte, 1<<16)); err != nil {
			break
		}
	}
	if !errors.Is(err, syscall.ENOSPC) {
		os.Remove(f.Name())
		return fmt.Errorf("this is another disk: %v", err)
	}
	return nil
}

// deleteDir deletes everything of ours in a checkout. What its server had acknowledged is in its memory alone then, so
// nobody else strikes until it has put that back.
func (s *storm) deleteDir(worktree int) bool {
	server := s.serverOf(worktree)
	s.mu.Lock()
	spoiled := s.spoiled[worktree]
	s.mu.Unlock()
	if server == nil || spoiled || !server.safe() {
		return false
	}
	lease := s.path(leasePath(s.dirs[worktree]))
	journal := filepath.Join(filepath.Dir(lease), journalName)
	doc := readLease(lease).doc
	if doc.URL == nil {
		return false // it may be reading what is to be deleted
	}
	before := doc.Token
	s.inMounts(func() { // there a mount is not taken away with its directory
		dir := filepath.Dir(leasePath(s.dirs[worktree]))
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			os.Remove(filepath.Join(dir, e.Name()))
		}
		os.RemoveAll(filepath.Join(s.dirs[worktree], ".ai", "local"))
	})
	for deadline := time.Now().Add(patience); ; <-time.After(10 * time.Millisecond) {
		r := readLease(lease)
		if _, err := os.Stat(journal); err == nil && r.doc.Token == before {
			return true
		}
		switch {
		case r.held && r.doc.Token != before:
			// One that was just starting has not seen what was deleted.
			s.excuse(worktree)
			s.t.Logf("%s: the server of %s changed while its directory was deleted: what waited is given up", time.Now().Format(time.StampMilli), s.dirs[worktree])
			return true
		case time.Now().After(deadline):
			s.t.Errorf("the server of %s has not put back what was deleted", s.dirs[worktree])
			return true
		}
	}
}

// safe says that nothing ends or stops this process.
func (r *stormRun) safe() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.doomed && !r.left && !r.stopped && !r.ended
}

const aloneWords = "serving this client alone"

var lastRole = regexp.MustCompile(aloneWords + `|serving this checkout at|bridging this client`)

// alone says whether a process serves its client alone, by its own words.
func (r *stormRun) alone() bool {
	log, _ := os.ReadFile(r.log)
	roles := lastRole.FindAllString(string(log), -1)
	return len(roles) > 0 && roles[len(roles)-1] == aloneWords
}

// damage does something to a lease.
func (s *storm) damage(f fault) bool {
	path := s.path(leasePath(s.dirs[f.worktree]))
	old, err := os.ReadFile(path)
	switch f.kind {
	case "delete lease":
		return os.Remove(path) == nil
	case "corrupt lease": // in place
		text := [][]byte{nil, []byte("{"), old[:len(old)/2], slices.Concat(old, []byte("x")), make([]byte, leaseLimit+1)}[f.n%5]
		return err == nil && os.WriteFile(path, text, 0o600) == nil
	case "replace lease": // by one that nobody holds: a copy, another checkout's, none
		other, _ := os.ReadFile(s.path(leasePath(s.dirs[f.n%len(s.dirs)])))
		temp := path + ".new"
		if err != nil || os.WriteFile(temp, [][]byte{old, other, []byte("{}")}[f.n%3], 0o600) != nil {
			return false
		}
		return os.Rename(temp, path) == nil
	}
	panic("no such fault: " + f.kind)
}

// serverOf finds the process that holds a checkout's lease.
func (s *storm) serverOf(worktree int) *stormRun {
	r := readLease(s.path(leasePath(s.dirs[worktree])))
	if !r.held {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, run := range s.runs {
		if run.cmd.Process.Pid == r.doc.PID {
			return run
		}
	}
	return nil
}

// pause stops a process for a while.
func (s *storm) pause(r *stormRun, lasts time.Duration, undone *sync.WaitGroup) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped || r.ended {
		return false
	}
	r.stopped = true
	r.cmd.Process.Signal(syscall.SIGSTOP)
	undone.Go(func() {
		waitAtMost(r.over, lasts)
		r.cmd.Process.Signal(syscall.SIGCONT)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.stopped = false
	})
	return true
}

// diesOf waits for the end of a process that was told to.
func (s *storm) diesOf(r *stormRun, sig syscall.Signal) {
	waitAtMost(r.over, 2*patience)
	if !isClosed(r.over) {
		s.t.Errorf("%s has got %v and not ended within %v", r.session, sig, 2*patience)
		r.doom(syscall.SIGQUIT)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// It may have been told twice, and then ends by one of them, or have been about to end anyway: its client had left.
	status := r.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !slices.Contains(r.signals, status.Signal()) && !(r.left && status == 0) {
		s.t.Errorf("%s has got %v and ended with %v", r.session, sig, r.cmd.ProcessState)
	}
}

func (s *storm) setClock(now time.Time) {
	temp := s.clock + ".new"
	must(s.t, os.WriteFile(temp, []byte(stamp(now)), 0o600))
	must(s.t, os.Rename(temp, s.clock))
}

func (s *storm) clockNow() time.Time {
	text, _ := os.ReadFile(s.clock)
	now, err := time.Parse(time.RFC3339, string(text))
	must(s.t, err)
	return now
}

// inMounts runs f where the storm's mounts are seen.
func (s *storm) inMounts(f func()) {
	if s.mounts == nil {
		f()
	} else {
		s.mounts(f)
	}
}

// path is how this process sees a file of the storm's.
func (s *storm) path(p string) string {
	if s.mounts == nil {
		return p
	}
	return s.mountsAt(p)
}

// figures say what happened.
func (s *storm) figures() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []string
	for what, n := range s.done {
		list = append(list, fmt.Sprintf("%d %s", n, what))
	}
	slices.Sort(list)
	s.book.Lock()
	defer s.book.Unlock()
	return fmt.Sprintf("%d messages acknowledged, %d refused, %d unknown; %d arrivals, %d of them marked repeats; %s",
		s.acked, s.refused, s.unknown, s.arrived, s.repeats, strings.Join(list, ", "))
}
