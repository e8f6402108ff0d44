//go:build unix

package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// blow has everything go wrong that the plan says, and puts right again what it can.
func (s *storm) blow() {
	var undone sync.WaitGroup
	defer undone.Wait()
	next := s.plan.allFaults()
	for until := time.Now().Add(s.plan.life); time.Now().Before(until) && !s.t.Failed(); {
		f := next()
		<-time.After(f.after)
		if s.strike(f, &undone) {
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
	default:
		return s.spoil(f, undone)
	}
	return true
}

// spoil does something to files.
func (s *storm) spoil(f fault, undone *sync.WaitGroup) bool {
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
	if status := r.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != sig && status.Signal() != syscall.SIGKILL {
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
func (s *storm) inMounts(f func()) { f() }

// path is how this process sees a file of the storm's.
func (s *storm) path(p string) string { return p }

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
