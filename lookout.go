package main

// How a server looks after its lease when nobody calls: another process may have taken it over, somebody may have deleted it.

import (
	"time"
)

// lookAtLease notices a lost lease also when nobody calls, and links a new
// file when the lease file has been deleted. Where the system can say that
// something happened to the name, looking is only for what it misses.
func (s *server) lookAtLease(done <-chan struct{}) {
	for {
		changed, closed := watchLease(s.checkout.root)
		again := seldomLookTime
		if changed == nil {
			again = lookTime
		}
		s.putBack() // what happened before it was watched
		t := time.NewTimer(again)
		over := s.lookUntil(done, t.C, changed)
		t.Stop()
		closed()
		if over {
			return
		}
	}
}

// lookUntil looks at the lease on every change; true when that is over, false
// when it must be watched anew.
func (s *server) lookUntil(done <-chan struct{}, again <-chan time.Time, changed <-chan struct{}) bool {
	beat := time.NewTicker(s.set.timing.busyGrace * 6 / 10) // each costs an idle process five wakeups
	defer beat.Stop()
	for {
		watched := true
		select {
		case <-done:
			return true
		case <-s.ending:
			return true
		case <-beat.C:
			if s.lease.noteRunning() {
				continue
			}
		case <-again:
			watched = false
		case _, watched = <-changed:
			// Whoever deletes the directory just now would stumble over a file
			// that comes back at once.
			pause(s.calls, settleTime, s.ending)
		}
		if !watched || !s.lease.checkoutThere() { // a directory that is gone says nothing of the one that comes in its place
			return false
		}
		s.putBack()
	}
}

// putBack puts right what somebody deleted: the lease, and the journal beside it.
func (s *server) putBack() {
	if s.holds() {
		s.mesh.journal.look()
	}
}
