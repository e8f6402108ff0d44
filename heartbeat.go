package main

// How a bridge and its server know that the other one is there. The bridge holds a request open, the watch. Its answer
// tells that the server is ending or hands something on; that it breaks off tells either side that the other has died; and
// every ping interval the server answers that it is here, so that one which merely hangs is found out, by a ping.

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"
)

// watchParams says how long the server may hold a watch, in milliseconds; 0:
// for ever. The bridge pings a server that has not answered by then.
type watchParams struct {
	Hold int64 `json:"hold_ms,omitempty"`
}

// watchResult is why a watch has been answered: the server is ending, or the
// client has lost its episode, or it was held for as long as it should be. Of
// the latter two the bridge is to watch on.
type watchResult struct {
	Reason   string           `json:"reason"`             // ending, episode, here
	Episodes []carriedEpisode `json:"episodes,omitempty"` // for the next server
	Lost     *episodeTaken    `json:"lost,omitempty"`
}

// watchDelay leaves the processors to the client's first message: a start, which takes a few milliseconds, is a twentieth faster.
const watchDelay = 10 * time.Millisecond

var testHookBeforeWatch func() // the session is there, nobody watches yet

// watch holds a request open, one after the other. The server answers "here"
// every ping interval, which keeps the session, and "episode" when the client
// has lost that: the bridge asks on. Any other result is a goodbye. A refusal,
// or a broken connection, means that the server is gone, or this session at it (a bridge that
// was stopped for long finds it expired, and attaches anew). A server that has
// handed its lease on says goodbye at once, and still finishes what it began.
func (b *bridge) watch(ctx context.Context) {
	if testHookBeforeWatch != nil {
		testHookBeforeWatch()
	}
	waitAtMost(ctx.Done(), watchDelay)
	c, _, err := dialServer(ctx, b.doc, b.p.set.timing.probe)
	if err != nil {
		b.lose(loss{})
		return
	}
	defer c.close()
	hold := b.p.set.timing.ping
	ask := request("majordomus/watch", mustJSON(watchParams{Hold: max(1, hold.Milliseconds())}))
	for {
		// A timer of its own each time: one that is only put off wakes the process at its old time, too.
		silence := time.AfterFunc(hold+b.p.set.timing.probe/4, b.askForPing)
		r, err := c.exchange(ctx, "POST", "/mcp", b.headers+b.bearer(), ask, maxAnswer)
		silence.Stop()
		b.answers.Add(1)
		goodbye := err == nil && r.status == http.StatusOK
		var news watchResult
		if goodbye {
			json.Unmarshal(member(r.body, "result"), &news)
		}
		switch {
		case news.Lost != nil:
			b.p.client.loseEpisode(*news.Lost)
		case news.Reason == "here":
		default:
			b.p.client.takeAlong(news.Episodes)
			b.lose(loss{goodbye: goodbye, retired: r.retired()})
			return
		}
	}
}

// askForPing has the server asked whether it hangs.
func (b *bridge) askForPing() { signalOn(b.overdue) }

// pingWhenAsked asks a server that has not answered a watch in time whether it
// hangs: it may be this process that did not run, or the server of an older
// release, which holds a watch to its end. Each ping has a connection of its
// own, and so never queues behind a message. It also tells the server which
// parcels have arrived.
func (b *bridge) pingWhenAsked(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.lost:
			return
		case <-b.overdue:
			known := b.answers.Load()
			time.AfterFunc(b.p.set.timing.ping, func() { // for as long as the same watch is held; harmless when the bridge is over
				if b.answers.Load() == known {
					b.askForPing()
				}
			})
		case <-b.parcel:
			// The next message tells it along the way; a client that says nothing more must not leave it untold.
			if pause(ctx, confirmTime, b.lost) != nil || len(b.p.client.unconfirmed()) == 0 {
				continue
			}
		}
		if !b.ping(ctx, "{}") {
			b.lose(loss{})
			return
		}
	}
}

// ping asks on a connection of its own.
func (b *bridge) ping(ctx context.Context, params string) bool {
	ctx, cancel := context.WithTimeout(ctx, b.p.set.timing.probe)
	defer cancel()
	c, _, err := dialHolder(ctx, b.doc, b.p.set.timing.probe)
	if err != nil {
		return false
	}
	defer c.close()
	return b.pingOn(ctx, c, params)
}

func (b *bridge) pingOn(ctx context.Context, c *conn, params string) bool {
	arrived, header := b.confirm()
	r, err := c.exchange(ctx, "POST", "/mcp", b.headers+b.bearer()+header, request("ping", []byte(params)), maxAnswer)
	if err != nil || r.status != http.StatusOK {
		return false
	}
	b.p.client.confirmed(arrived)
	return true
}

// serveWatch holds the request until the server is ending or hands its
// sessions on; the bridge then elects. When the bridge's end drops instead,
// its process is gone, and its session and peer go at once.
func (s *server) serveWatch(w http.ResponseWriter, r *http.Request, n *session, m message) {
	var p watchParams
	if err := json.Unmarshal(m.params, &p); err != nil || p.Hold < 0 {
		s.failure(w, r, 400, "invalid_input", "majordomus/watch: hold_ms must be a number of milliseconds")
		return
	}
	var held <-chan time.Time
	if p.Hold > 0 {
		t := time.NewTimer(time.Duration(min(p.Hold, int64(24*time.Hour/time.Millisecond))) * time.Millisecond)
		defer t.Stop()
		held = t.C
	}
	// A watch is no sign of a request in progress: it must neither keep its
	// session from expiring nor the server from ending.
	s.release(n)
	s.running.Add(-1)
	defer func() {
		s.running.Add(1)
		s.mu.Lock()
		n.running++
		s.mu.Unlock()
	}()
	http.NewResponseController(w).SetReadDeadline(time.Time{})
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	s.mu.Lock()
	here := s.sessions[n.id] == n
	number := n.watches + 1
	if here {
		if n.ended != nil {
			n.ended(errSessionEnded) // a second watch replaces the first
		}
		n.ended, n.watchedOn = cancel, nil
		n.watches = number
		if n.lost != nil {
			cancel(*n.lost)
		}
	}
	s.mu.Unlock()
	if !here {
		s.sessionNotFound(w, r)
		return
	}
	answer := func(result watchResult) {
		writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(result)))
	}
	watchOn := func(told *episodeTaken) {
		conn, _ := r.Context().Value(connKey{}).(*deadlineConn)
		s.watchOn(n, number, conn, told)
	}
	select {
	case <-s.ending:
		answer(watchResult{Reason: "ending", Episodes: s.handDown()})
	case <-held:
		watchOn(nil)
		answer(watchResult{Reason: "here"})
	case <-ctx.Done():
		if lost := (episodeTaken{}); errors.As(context.Cause(ctx), &lost) {
			watchOn(&lost)
			answer(watchResult{Reason: "episode", Lost: &lost})
			return
		}
		if errors.Is(context.Cause(ctx), errSessionEnded) {
			identity, _, _ := s.board.origin(n.peer)
			if err := s.refuseRetired(identity); err != nil {
				s.refused(w, r, err)
				return
			}
			s.sessionNotFound(w, r)
			return
		}
		s.dismiss(n)
	}
}

// watchOn notes that a watch is about to be answered, of what the bridge is
// told by that, and that the next one is to come on the same connection.
func (s *server) watchOn(n *session, number int, conn *deadlineConn, told *episodeTaken) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if told != nil && n.lost != nil && *n.lost == *told {
		n.lost = nil
	}
	if n.watches == number { // no other one has come
		n.ended, n.watchedOn = nil, conn
		if conn != nil {
			conn.watcher.Store(n)
		}
	}
}

// watchBroke ends the session of a bridge that has died between two watches. One
// that merely does not run keeps its connection, and its session until that expires.
func (s *server) watchBroke(conn *deadlineConn) {
	n := conn.watcher.Load()
	if n == nil {
		return
	}
	s.mu.Lock()
	between := n.watchedOn == conn
	s.mu.Unlock()
	if between {
		s.dismiss(n)
	}
}

// dismissUnwatched ends a bridge's session that never got its watch: the
// process died right after it had attached, or gave up waiting for the answer.
func (s *server) dismissUnwatched(n *session) {
	s.mu.Lock()
	unwatched := n.watches == 0 && n.running == 0
	s.mu.Unlock()
	if unwatched {
		s.dismiss(n)
	}
}
