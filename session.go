package main

// A session: one client's connection to a server. How sessions come, are found
// and go, whichever way their client speaks.

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// session is one client's connection to a server: the process's own client,
// a bridge's, or one that speaks HTTP itself.
type session struct {
	id       string // Mcp-Session-Id; "" for the process's own client
	peer     peerID
	attached bool // opened by majordomus/attach: a bridge
	trusted  bool // one of the user's own processes, not just any on loopback

	waiting waitingCalls
	listed  atomic.Bool // it has been shown who is here, and knows the ids that this server gives
	over    atomic.Bool // it has ended: what is still running for it writes no more

	mu        sync.Mutex
	version   string                  // negotiated revision; "" before initialize
	endWait   context.CancelCauseFunc // ends the latest wait for messages
	waitOrder int

	// Kept by the server under its own mutex.
	running   int // requests being answered; such a session is not idle
	lastUsed  time.Time
	ended     context.CancelCauseFunc // ends the session's watch; nil without one
	watches   int                     // so far
	watchedOn *deadlineConn           // where the latest one was answered, and the next one will come
	lost      *episodeTaken           // what its watch is to be told
}

func (n *session) protocol() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.version
}

// errCancelled is the cause of a wait that the client cancelled: it gets no answer.
var errCancelled = errors.New("cancelled by the client")

// waitingCalls are the calls of one client that may wait, by raw id, at the
// server or at a bridge. Where calls run beside the loop that reads the client,
// begin belongs into the loop: the cancellation may be the very next message.
type waitingCalls struct {
	mu    sync.Mutex
	ends  map[string]context.CancelCauseFunc
	begun int
	over  bool // the client has nothing more to say: a call that begins now does not wait
}

// callOrder is the key of a call's place in the order in which its client made
// the calls that may wait.
type callOrder struct{}

// inBatch is the key that marks a call as part of a batch: it does not wait,
// because all that is behind the batch would wait with it, its cancellation and
// the end of the input included.
type inBatch struct{}

// begin registers a call, so that notifications/cancelled can end it. The
// returned function must be called when the call has ended.
func (w *waitingCalls) begin(ctx context.Context, id json.RawMessage) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.begun++; ctx.Value(callOrder{}) == nil {
		ctx = context.WithValue(ctx, callOrder{}, w.begun)
	}
	if w.ends == nil {
		w.ends = map[string]context.CancelCauseFunc{}
	}
	w.ends[string(id)] = cancel
	if w.over || ctx.Value(inBatch{}) != nil {
		cancel(errInputEnded)
	}
	return ctx, func() {
		w.mu.Lock()
		delete(w.ends, string(id))
		w.mu.Unlock()
		cancel(nil)
	}
}

// cancel ends the call that notifications/cancelled names, and reports whether
// there is such a call.
func (w *waitingCalls) cancel(params json.RawMessage) bool {
	w.mu.Lock()
	end := w.ends[string(member(params, "requestId"))]
	w.mu.Unlock()
	if end != nil {
		end(errCancelled)
	}
	return end != nil
}

// end lets every call be answered now, with what there is, and those that are
// still on their way: the client has left or is about to.
func (w *waitingCalls) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	for _, end := range w.ends {
		end(errInputEnded)
	}
}

// open reports whether there are any.
func (w *waitingCalls) open() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ends) > 0
}

// onlyWait makes the latest wait for messages the only one of its session:
// whoever asks again has given up the one before.
func (n *session) onlyWait(ctx context.Context, end context.CancelCauseFunc) {
	order, _ := ctx.Value(callOrder{}).(int)
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.endWait == nil:
	case order < n.waitOrder:
		end(errSessionEnded)
		return
	default:
		n.endWait(errSessionEnded)
	}
	n.endWait, n.waitOrder = end, order
}

type sessionKey struct{}

// withCaller marks a call as coming through a session.
func withCaller(ctx context.Context, n *session) context.Context {
	return context.WithValue(ctx, sessionKey{}, n)
}

// callerOf returns the session that a call came through; nil over plain HTTP.
func callerOf(ctx context.Context) *session {
	n, _ := ctx.Value(sessionKey{}).(*session)
	return n
}

// admit takes a session in, or refuses it.
func (s *server) admit(n *session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errLeaseLost
	}
	old := s.sessions[n.id] // when two requests of one worker come at once
	if old == nil && s.count[n.trusted] >= maxSessions {
		s.refusedBusy.Add(1)
		return refuse("busy", "this server has %d such sessions, which is its limit: end one, or wait until an idle one expires", maxSessions)
	}
	if old != nil {
		s.count[old.trusted]--
	} else {
		s.crowd.enter()
	}
	s.sessions[n.id] = n
	s.count[n.trusted]++
	n.lastUsed = time.Now()
	if s.sweep == nil {
		s.sweep = time.AfterFunc(s.set.timing.sessionIdle, s.expire)
	}
	if n.attached {
		time.AfterFunc(2*s.set.timing.probe, func() { s.dismissUnwatched(n) })
	}
	return nil
}

// use finds a session and marks it as in use; release ends that.
func (s *server) use(id string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.sessions[id]
	if n != nil {
		n.running++
	}
	return n
}

func (s *server) release(n *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n.running--
	n.lastUsed = time.Now()
}

// dismiss ends a session, if it is still there, and takes its peer off the
// board. It reports whether it was there.
func (s *server) dismiss(n *session) bool {
	s.mu.Lock()
	was := s.sessions[n.id] == n
	if was {
		s.dropLocked(n)
	}
	s.mu.Unlock()
	if was {
		s.depart(n.peer)
	}
	return was
}

// depart takes a peer off the board, whose session has ended, and detaches its
// episode; unless it has another session by now.
func (s *server) depart(peer peerID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.sessions {
		if n.peer == peer {
			return
		}
	}
	left, _ := s.board.look(peer)
	s.board.detach(peer)
	s.leaveEpisode(left)
}

// dropLocked takes a session from the map and ends its watch. The server is
// empty when that was the last one and its own client has left: decided under
// the mutex that admits, so that nobody is admitted to a server that leaves.
func (s *server) dropLocked(n *session) {
	delete(s.sessions, n.id)
	n.over.Store(true)
	s.count[n.trusted]--
	if n.ended != nil {
		n.ended(errSessionEnded)
	}
	n.waiting.end()
	s.mesh.sessionEnded(n)
	s.crowd.leave()
	s.checkEmptyLocked()
	signalOn(s.quiet)
}

var errSessionEnded = errors.New("the session has ended")

func (s *server) checkEmptyLocked() {
	if s.ownEnded && len(s.sessions) == 0 && !s.closed {
		s.closed = true
		close(s.empty)
	}
}

// replace ends the other sessions of a peer: its process has attached anew,
// and one worker is never two.
func (s *server) replace(n *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.sessions {
		if other.peer == n.peer && other != n {
			s.dropLocked(other)
		}
	}
}

// leaveOwn takes the process's own client off the board; the server goes on
// for the others.
func (s *server) leaveOwn(n *session) {
	s.depart(n.peer)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ownEnded = true
	s.checkEmptyLocked()
}

// expire ends the sessions that have been idle for too long. The timer runs
// only while there are sessions, and seldom.
func (s *server) expire() {
	idle := s.set.timing.sessionIdle
	next := idle
	var expired []*session
	s.mu.Lock()
	for _, n := range s.sessions {
		switch left := idle - time.Since(n.lastUsed); {
		case n.running > 0:
		case left <= 0:
			s.dropLocked(n)
			expired = append(expired, n)
		default:
			next = min(next, left)
		}
	}
	if len(s.sessions) > 0 {
		s.sweep.Reset(max(next, idle/8))
	} else {
		s.sweep = nil
	}
	s.mu.Unlock()
	for _, n := range expired {
		s.depart(n.peer)
	}
}
