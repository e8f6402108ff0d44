package main

// A server: the board of one checkout, the sessions on it, and its life from
// the lease to the closed port. httpmcp.go is how others reach it.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
)

const (
	// maxSessions bounds the sessions over HTTP: those that came with the token, and as many without,
	// so that nobody on this machine keeps a bridge out.
	maxSessions = 1024
	// lookTime is how often the lease is looked at when nobody calls and the
	// system does not say when its name changes; seldomLookTime, when it does.
	lookTime       = 900 * time.Millisecond
	seldomLookTime = 30 * time.Second
	// settleTime is what a deletion that is noticed gets to be finished.
	settleTime = 700 * time.Millisecond
)

// server answers for one checkout, or, when alone, one client.
type server struct {
	checkout checkout
	set      *settings
	log      *slog.Logger
	board    *board
	mesh     *mesh
	docs     *documents // nil when alone
	lease    *lease     // nil when alone
	url      string     // "" when alone; never changes once others can call
	why      string     // why this server is alone, for its own client
	retired  bool       // alone because the client has been ended: it writes to nobody
	started  time.Time
	listing  singleflight.Group // one enumeration of the checkouts at a time
	episodes *episodeTable
	own      *client // the process's own client, ownPeer on the board; set before others can call
	ownPeer  peerID

	running     atomic.Int64 // exchanges being answered, watches not among them
	working     work         // of these, the ones that count against maxWorking
	bridging    work         // likewise, the messages of bridges
	bodies      atomic.Int64 // bytes of the large ones that are coming from strangers, see bodiesLimit
	refusedBusy atomic.Int64
	strangers   strangers
	unused      sync.Map     // connections without a request so far, as keys
	cutOff      atomic.Int64 // connections closed by the read deadline
	open        crowd        // all connections

	mu       sync.Mutex
	sessions map[string]*session
	crowd    crowd        // the same, counted
	count    map[bool]int // of them, by whether they are trusted
	ownEnded bool         // the process's own client has left
	closed   bool         // no session is admitted any more
	handsOn  bool         // once ending: somebody takes the work along to the next server
	endBy    time.Time    // once ending: when what runs is cut
	sweep    *time.Timer  // expires idle sessions; nil until there is one

	released sync.Once
	leaving  atomic.Bool   // the lease is released, or about to be: nothing is lost
	ending   chan struct{} // closed when the server is ending or lost its lease: watches end
	empty    chan struct{} // closed, with closed set, when nobody is left to serve
	quiet    chan struct{} // a receive means that something ended while the server was ending
	calls    context.Context
	cut      context.CancelCauseFunc // ends calls, which are cut when time is up
}

func newServer(set *settings, at checkout, log *slog.Logger, l *lease) *server {
	s := &server{
		checkout: at,
		set:      set,
		log:      log,
		board:    newBoard(),
		lease:    l,
		episodes: newEpisodeTable(),
		started:  time.Now(),
		sessions: map[string]*session{},
		count:    map[bool]int{},
		ending:   make(chan struct{}),
		empty:    make(chan struct{}),
		quiet:    make(chan struct{}, 1),
	}
	s.calls, s.cut = context.WithCancelCause(context.Background())
	s.working.slots = make(chan struct{}, executedLimit)
	s.mesh = newMesh(log)
	s.board.reserved, s.board.private, s.board.changed = s.mesh.reserved, s.mesh.private, s.mesh.nameChanged
	return s
}

// toolTable finds a capability by its tool's name. Bridges use it too, so it
// holds no schema.
var toolTable = sync.OnceValue(func() map[string]*capability {
	byName := map[string]*capability{}
	for _, c := range capabilities() {
		if c.tool != "" {
			byName[c.tool] = &c
		}
	}
	return byName
})

// invoke runs a capability. A command looks at the lease before it runs and
// again before it is answered: a server that slept through a take-over must
// neither execute nor acknowledge what its successor will never know of. What may
// be repeated is sent on to that successor, whether it was executed or not.
func (s *server) invoke(ctx context.Context, c *capability, args []byte) (any, error) {
	if !c.command {
		return c.call(s, ctx, args)
	}
	if !s.holds() {
		return nil, errLeaseLost
	}
	out, err := c.call(s, ctx, args)
	if err == nil && !c.mayWait && !s.holds() { // what waits looks by itself: it may just have been ended with the server
		if c.idempotent {
			return nil, errLeaseLost // as good as not executed: the next server can be asked
		}
		return nil, outcomeUnknown("the server lost its lease while the call ran")
	}
	return out, err
}

// outcomeUnknown is the answer to a call of which nobody can say whether it
// was executed.
func outcomeUnknown(why string) *rpcError {
	return &rpcError{Code: codeInternal, Message: "outcome unknown: " + why + "; look before you repeat it",
		Data: map[string]string{"outcome": "unknown"}}
}

// holds reports whether this server may still act for its checkout. One that
// is alone always may.
func (s *server) holds() bool {
	if s.lease == nil {
		return true
	}
	if s.gone() {
		return false
	}
	if err := s.lease.check(); err != nil {
		s.lose(err)
		return false
	}
	return true
}

// gone reports whether the server is ending or has lost its lease.
func (s *server) gone() bool {
	return isClosed(s.ending)
}

// lose ends what this server does by right of its lease: watches end, so that
// every bridge elects again, and no session is admitted.
func (s *server) lose(why error) {
	s.mu.Lock()
	s.handsOn = true // our own client moves, too
	s.mu.Unlock()
	leaving := s.leaving.Load() // once it is closed, who ends it may be faster
	if s.close() && !leaving {
		s.log.Warn(fmt.Sprintf("this server lost its lease (%v): its clients move to the next one", why))
	}
}

// close refuses new sessions and ends the watches; false when that is so already.
func (s *server) close() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone() {
		return false
	}
	s.closed = true
	s.endBy = time.Now().Add(endingTime)
	for _, n := range s.sessions {
		s.handsOn = s.handsOn || n.attached
	}
	close(s.ending)
	return true
}

func (s *server) handingOn() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.handsOn
}

// attachOwn puts the process's own client on the board.
func (s *server) attachOwn(c *client) *session {
	a := c.attachment("stdio")
	n := &session{peer: s.board.attach(a), version: c.negotiated(), trusted: true}
	s.own, s.ownPeer = c, n.peer
	s.restoreEpisodes(n.peer, a.Carried, false)
	return n
}

// listen binds the port asked for, or a free one when that is taken.
func (s *server) listen() (net.Listener, error) {
	addr := func(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
	l, err := net.Listen("tcp4", addr(s.set.httpPort))
	if err != nil && s.set.httpPort != 0 {
		s.log.Warn(fmt.Sprintf("port %d cannot be had (%v): taking a free one", s.set.httpPort, err))
		l, err = net.Listen("tcp4", addr(0))
	}
	if err != nil {
		return nil, fmt.Errorf("listening on loopback: %w", err)
	}
	s.url = "http://" + l.Addr().String()
	return l, nil
}

// serve is this process's time as the server of its checkout: bind, answer,
// publish, log; serve its own client and the others; end in order. It returns
// the election that follows, nil when the process is to leave.
func (p *process) serve(ctx context.Context, l *lease) *ballot {
	docs := newDocuments(p.checkout.root, p.set.discovery)
	if p.refuses(ctx, docs) {
		l.release()
		return nil
	}
	s := newServer(p.set, p.checkout, p.log, l)
	s.docs = docs
	s.openMesh()
	own := s.attachOwn(p.client)
	s.mesh.confirm(written, p.client.unconfirmed()...) // by answers of the server before
	ln, err := s.listen()
	if err != nil {
		s.close()
		s.stopEpisodes()
		s.closeMesh()
		l.release()
		return p.alone(ctx, &aloneError{doing: "serving this checkout", err: err, retry: true})
	}
	hs := s.httpServer()
	served := make(chan struct{}) // closed when the listener is closed
	go func() {
		defer close(served)
		hs.Serve(&deadlineListener{ln, s})
	}()
	// The client need not wait for the files of publishing, which take time on a disk, nor
	// publishing for a client that does not read.
	var opened sync.WaitGroup
	opened.Go(func() { // ends when its answer is written
		if f, ok := p.client.opening(); ok {
			s.attendFrame(s.calls, p.client, own, f)
		}
	})
	err = l.publish(s.url)
	if err != nil {
		s.close()
		s.stopEpisodes()
		hs.Close()
		<-served
		s.closeMesh()
		l.release()
		opened.Wait()                     // last: others need not wait for a client that does not read
		if errors.Is(err, errLeaseLost) { // overtaken while binding
			return p.elect(ctx)
		}
		return p.alone(ctx, err)
	}
	p.client.settle(l.token(), s.episodeOf(own.peer))
	s.logServing()
	p.background.Go(s.indexDocuments)     // ends with the index, or with s.calls
	defer context.AfterFunc(ctx, func() { // a signal: first of all, somebody else may serve
		s.releaseLease()
		s.close()
	})()
	l.limitSleep(p.set.timing.busyGrace * 9 / 10) // a server that answers nobody is not taken over before that
	looking := make(chan struct{})                // closed when the lease is not looked at any more
	go s.lookAtLease(looking)
	opened.Wait()
	s.attend(ctx, p.client, own)
	if ctx.Err() == nil && !s.gone() {
		s.leaveOwn(own)
		select {
		case <-s.empty:
		case <-s.ending:
		case <-ctx.Done():
		}
	}
	close(looking)
	lost := s.gone()
	if !lost || p.client.done() || ctx.Err() != nil {
		s.end(hs)
		<-served
		return nil
	}
	// Our own client moves at once; the others are seen off beside it.
	p.background.Go(func() { s.end(hs); <-served })
	return p.elect(ctx)
}

// end is the one order of ending: release the lease, refuse new sessions, end
// the watches, finish what runs, close the port. A bridge that has been told
// (its watch ended) finishes its exchanges and then ends its session, so the
// port stays open until the last of them has done so.
func (s *server) end(hs *http.Server) {
	if !s.gone() && s.mesh.journal != nil {
		s.mesh.journal.drain() // who has left is known to the next server
	}
	s.releaseLease()
	s.close()
	ctx, cancel := context.WithDeadline(context.Background(), s.endBy)
	defer cancel()
	s.closeEpisodes(ctx)
	for !s.finished() && ctx.Err() == nil {
		select {
		case <-s.quiet:
		case <-ctx.Done():
			s.log.Warn(fmt.Sprintf("leaving after %v with something still open: %d calls, %d sessions", endingTime, s.running.Load(), s.connections().Sessions))
		}
	}
	s.stopEpisodes()
	s.cut(errLeaseLost)
	s.closeUnused()
	hs.Shutdown(ctx)
	hs.Close()
	s.closeMesh()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sweep != nil {
		s.sweep.Stop()
	}
	s.crowd.stop()
	s.open.stop()
}

func (s *server) releaseLease() {
	s.released.Do(func() {
		s.leaving.Store(true)
		if err := s.lease.release(); err != nil {
			s.log.Warn(fmt.Sprintf("releasing the lease: %v", err))
		}
	})
}

// finished reports whether nothing runs and every bridge has left, those too
// that have not begun to watch yet: what they send next would meet a port that
// is being closed.
func (s *server) finished() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.sessions {
		if n.attached {
			return false
		}
	}
	return s.running.Load() == 0
}

// attend answers the process's own client until its input ends, ctx is done or
// the lease is lost. Calls that may wait do not hold up what comes behind them.
func (s *server) attend(ctx context.Context, c *client, n *session) {
	var waits sync.WaitGroup
	defer waits.Wait()
	waitCtx, endWaits := context.WithCancelCause(s.calls)
	defer func() {
		if s.gone() && ctx.Err() == nil && !c.done() {
			endWaits(errLeaseLost) // the next server goes on waiting
		} else {
			endWaits(errInputEnded)
		}
	}()
	for {
		f, ok := c.next(ctx, s.ending)
		if !ok {
			return
		}
		if f.waits() {
			callCtx, done := n.waiting.begin(waitCtx, f.id)
			waits.Go(func() {
				defer done()
				s.attendFrame(callCtx, c, n, f)
			})
		} else {
			s.attendFrame(s.calls, c, n, f)
		}
	}
}

// attendFrame answers one frame; one that came too late for this server goes
// back, for whoever serves the client next.
func (s *server) attendFrame(ctx context.Context, c *client, n *session, f frame) {
	if f.tooLong {
		c.write(tooLongAnswer())
		return
	}
	x := &exchange{}
	answer, err := s.answerSafely(withExchange(ctx, x), n, f.raw)
	if err != nil || answer == nil {
		s.mesh.unanswered(x)
	}
	if err != nil {
		c.giveBack(f)
		return
	}
	if answer != nil {
		c.remember(f, answer)
		s.mesh.answered(x, c.write(answer))
	}
}

// answerSafely is answerFrame that turns a panic into an error answer: a fault
// in one message never reaches another.
func (s *server) answerSafely(ctx context.Context, n *session, raw []byte) (answer []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			s.logPanic(r)
			if x := exchangeOf(ctx); x != nil {
				s.mesh.unanswered(x)
			}
			id := member(raw, "id")
			if id == nil || !validID(id) {
				id = nil
			}
			answer, err = errorMessage(id, rpcErrorf(codeInternal, "internal error; the log has the details")), nil
		}
	}()
	return s.answerFrame(ctx, n, raw)
}

// surface is one of the places where a server can be looked at.
type surface struct {
	ID    string `json:"id"`
	Title string `json:"title"`
	Path  string `json:"path"`
}

// surfaces lists what routes serves, for the log, the home page and GET /.
func surfaces() []surface {
	return []surface{
		{"home", "Home", "/"},
		{"board", "Board", "/board"},
		{"docs", "Documentation", "/docs/"},
		{"swagger", "API explorer", "/swagger"},
		{"openapi", "OpenAPI document", "/openapi.json"},
		{"api", "REST API", "/api/v1"},
		{"mcp", "MCP over HTTP", "/mcp"},
	}
}

func (s *server) logServing() {
	var b strings.Builder
	for i, f := range surfaces() {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %s%s", f.ID, s.url, f.Path)
	}
	s.log.Info(fmt.Sprintf("serving this checkout at %s: %d surfaces: %s", s.url, len(surfaces()), b.String()))
}

// connections counts for server.status.
func (s *server) connections() connectionCounts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return connectionCounts{Sessions: len(s.sessions), ClosedByDeadline: s.cutOff.Load(), RefusedBusy: s.refusedBusy.Load()}
}
