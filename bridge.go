package main

// A bridge: one client's session when another process is the server.
//
// Rules kept here:
//   - each of the client's messages is one POST, sent in the order read, the next after the previous is answered; calls that
//     may wait have a connection of their own and hold up nobody;
//   - the client gets the bytes that the server sent;
//   - a connection says who it is before it is trusted: every one opens with a challenge (dialServer), so that no frame, session
//     id or token reaches a stranger who found the port free. Attach and ping ask also whether it holds the lease (dialHolder);
//     to a message such a server says so itself;
//   - it is always known how far a message came. Not connected, or refused because the server is busy, is ending or has no such
//     session: anything is sent again. Connected but not answered: only what is safe to repeat (frame.repeatable: queries,
//     idempotent commands, whatever is no call of a tool), otherwise the client is told "outcome unknown", as it is by a server
//     that lost its lease while the call ran;
//   - the server's end is noticed also when the client is silent (heartbeat.go), by a request that is held open, the watch. It is
//     answered "here" every 20 s, and made again. It breaks off or is refused: the server is dead, or our session there has
//     expired. It is answered "ending": the server goes. It is overdue, after 20.5 s: a ping, and again every 20 s; one that is
//     not answered within 2 s: the server hangs;
//   - what peers wrote comes in the answers to calls, as numbered parcels (parcel.go). It counts as read once the server has been
//     told the number: with the next message, or by a ping when the client sends none;
//   - the client has left when it is done: its input has ended (client.ended) and all that it sent has been answered, or nobody
//     reads the answers.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// messageTime bounds each message, on top of the wait it asks for itself.
const messageTime = 60 * time.Second

// confirmTime is how long the server is left untold that a parcel has arrived when the client says nothing by which to tell
// it.
const confirmTime = 250 * time.Millisecond

// bridge is a session at another process's server.
type bridge struct {
	p       *process
	doc     leaseDocument // of the server
	session string        // Mcp-Session-Id
	headers string        // of every message
	main    *conn         // for the messages in order; used by relay only

	overdue  chan struct{} // a receive means that the watch has not been answered in time
	answers  atomic.Int64  // to the watch
	parcel   chan struct{} // a receive means that the server waits to be told what has arrived
	lost     chan struct{} // closed when the server is gone, going or silent
	lostOnce sync.Once
	how      loss // set before lost is closed

	sessionEnded bool // read after relay has returned
}

// loss is how a bridge lost its server.
type loss struct {
	goodbye bool   // the server said that it is going: what is open will be answered
	retired string // not empty: why the server refuses this client for good
}

// lose notes that another server has to be found.
func (b *bridge) lose(how loss) {
	b.lostOnce.Do(func() {
		b.how = how
		close(b.lost)
	})
}

// follow is this process's time as a bridge. It returns the election that follows, nil when the process is to leave.
func (p *process) follow(ctx context.Context, at outcome) *ballot {
	b := &bridge{
		p: p, doc: at.doc, main: at.conn,
		overdue: make(chan struct{}, 1), parcel: make(chan struct{}, 1), lost: make(chan struct{}),
	}
	if err := b.attach(ctx); err != nil {
		b.main.close()
		return p.attachFailed(ctx, err)
	}
	p.attachFailing = time.Time{}
	skew := ""
	if b.doc.Version != p.set.version {
		skew = fmt.Sprintf(" (it runs release %s, this process %s)", b.doc.Version, p.set.version)
	}
	p.log.Info(fmt.Sprintf("a server for this checkout is already running at %s; bridging this client to it%s", *b.doc.URL, skew))

	// The goroutines of a bridge: relay, and one for each call that waits; watch and pingWhenAsked; one for each call of the
	// episode command (cutAfterInput); the election (moveOn); and its goodbye (process.background). exchanges is the context of
	// whatever is open with the server, and cut ends it.
	exchanges, cut := context.WithCancelCause(context.Background())
	relayed := make(chan struct{}) // closed when the client's messages are no longer passed on, and none is open
	var watchers sync.WaitGroup
	watchers.Go(func() { b.watch(exchanges) })         // ends with the server or with exchanges
	watchers.Go(func() { b.pingWhenAsked(exchanges) }) // ends when the server is lost, or with exchanges
	go func() {                                        // ends with the client, the server or ctx; upon a signal leave waits for it for a while
		defer close(relayed)
		b.relay(ctx, exchanges)
	}()
	defer watchers.Wait()
	defer cut(errSessionEnded)

	select {
	case <-relayed:
	case <-b.lost:
	case <-ctx.Done():
	}
	return b.leave(ctx, relayed, cut)
}

// leave ends this process's time as a bridge, by what has ended it: a signal, a server that refuses this client for good, or
// the client, which has left. In all other cases, a goodbye of the server's included, there is an election.
func (b *bridge) leave(ctx context.Context, relayed <-chan struct{}, cut context.CancelCauseFunc) *ballot {
	p := b.p
	switch {
	case ctx.Err() != nil:
		waitAtMost(relayed, endingTime)
		b.end(nil)
		return nil
	case b.isLost() && b.how.retired != "":
		cut(errMovingOn)
		<-relayed
		return p.alone(ctx, retiredError(b.how.retired))
	case b.isLost() && b.how.goodbye:
		waitAtMost(relayed, endingTime)
		p.background.Go(func() { b.end(nil) }) // the server waits for it, our client does not
	}
	if isClosed(relayed) && p.client.done() {
		if !b.sessionEnded {
			b.end(nil)
		}
		return nil
	}
	return b.moveOn(ctx, relayed, cut)
}

// moveOn elects, while what is open may still be answered.
func (b *bridge) moveOn(ctx context.Context, relayed <-chan struct{}, cut context.CancelCauseFunc) *ballot {
	next := b.p.elect(ctx)
	select {
	case <-relayed:
		return next // the election may go on for long, and process.wait answers the client until it is over
	case <-next.done:
	}
	if same := next.err == nil && next.out.conn != nil && next.out.doc.Token == b.doc.Token; !same {
		cut(errMovingOn)
	}
	<-relayed // of the same server, what is open is bounded by its own deadline
	return next
}

func (b *bridge) isLost() bool { return isClosed(b.lost) }

var errMovingOn = errors.New("the bridge moves on to another server")

// attachFailed decides what follows: elections for as long as one may take, then this client is served alone.
func (p *process) attachFailed(ctx context.Context, err error) *ballot {
	if p.attachFailing.IsZero() {
		p.attachFailing = time.Now()
	}
	if errors.As(err, new(retiredError)) {
		return p.alone(ctx, err)
	}
	refusal := (*attachRefusal)(nil)
	if errors.As(err, &refusal) && refusal.final || time.Since(p.attachFailing) > p.set.timing.join {
		p.attachFailing = time.Time{}
		return p.alone(ctx, &aloneError{doing: "attaching to this checkout's server", err: err, retry: true})
	}
	t := time.NewTimer(25 * time.Millisecond) // a server that is ending needs a moment to hand on
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
	return p.elect(ctx)
}

// attachRefusal is a server's answer to attach other than yes.
type attachRefusal struct {
	code, message string
	final         bool // asking again will not help soon
}

func (r *attachRefusal) Error() string { return fmt.Sprintf("%s: %s", r.code, r.message) }

// attach opens the session: one call puts the client on the board, with its name, claims and episode.
func (b *bridge) attach(ctx context.Context) error {
	// Not broken off by a signal: the server would keep a session that nobody
	// knows and nobody ends.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.p.set.timing.probe)
	defer cancel()
	a := b.p.client.attachment("http")
	params := mustJSON(attachParams{Identity: a.Identity, Process: ownProcess(), Address: a.Address, Carried: a.Carried, Again: b.p.client.wasAt(b.doc.Token)})
	if !b.main.stillOpen(b.p.set.timing.read) {
		c, _, err := dialHolder(ctx, b.doc, b.p.set.timing.probe)
		if err != nil {
			return err
		}
		b.main.close()
		b.main = c
	}
	arrived, header := b.confirm()
	r, err := b.main.exchange(ctx, "POST", "/mcp", b.bearer()+header, request("majordomus/attach", params), maxAnswer)
	if err != nil {
		return err
	}
	switch code := r.code(); {
	case code == "retired":
		return retiredError(r.retired())
	case r.status != http.StatusOK:
		return &attachRefusal{code, clip(r.message(), 200), code == "busy" || code == "unauthorized"}
	}
	var result attachResult
	if err := json.Unmarshal(member(r.body, "result"), &result); err != nil || !validIdentity(result.Session) {
		return errors.New("the answer to attach makes no sense")
	}
	b.p.client.confirmed(arrived)
	b.session = result.Session
	b.headers = "Mcp-Session-Id: " + b.session + "\r\n"
	b.p.client.named(result.Name)
	b.p.client.settle(b.doc.Token, result.Episode) // from here on it is this server's; see attachParams.Again
	return nil
}

// bearer is the header that only goes to a server that has given the proof, and only with attach, watch and ping.
func (b *bridge) bearer() string { return "Authorization: Bearer " + b.doc.Token + "\r\n" }

// confirm is the header that tells the server which parcels have arrived.
func (b *bridge) confirm() (numbers []int64, header string) {
	if numbers = b.p.client.unconfirmed(); len(numbers) > 0 {
		header = confirmHeader + ": " + parcelList(numbers) + "\r\n"
	}
	return numbers, header
}

// confirmOn confirms before a connection is closed: parcels given on one that ends are taken for lost.
func (b *bridge) confirmOn(ctx context.Context, c *conn) {
	ctx, cancel := context.WithTimeout(ctx, b.p.set.timing.probe)
	defer cancel()
	if len(b.p.client.unconfirmed()) > 0 && !c.dead {
		b.pingOn(ctx, c, "{}")
	}
}

// endWaits has the server answer what waits, since the client has nothing more to say. Ending the session would do so too,
// but a call that the server has not read yet would then find no session, and be made again at the next one.
func (b *bridge) endWaits(ctx context.Context) bool { return b.ping(ctx, `{"input":"ended"}`) }

// relay passes the client's frames on until the client leaves, the server is lost or ctx is done, and then waits for the
// exchanges that are open. Those of calls that wait are given back when the server is lost: they can be repeated, and must
// not keep the others from moving on.
func (b *bridge) relay(ctx, exchanges context.Context) {
	b.main.live(exchanges)
	defer func() { b.main.close() }()
	var waits sync.WaitGroup
	var waiting waitingCalls
	waitCtx, cutWaits := context.WithCancelCause(exchanges)
	for {
		f, ok := b.p.client.next(ctx, b.lost)
		if !ok {
			break
		}
		if f.waits() {
			callCtx, done := waiting.begin(waitCtx, f.id)
			waits.Go(func() {
				defer done()
				var own *conn
				b.pass(callCtx, &own, f)
				if own != nil {
					b.confirmOn(exchanges, own)
					own.close()
				}
			})
			continue
		}
		if f.method == "notifications/cancelled" && waiting.cancel(f.params) {
			continue // the end of its request tells the server
		}
		if !b.pass(exchanges, &b.main, f) {
			break
		}
	}
	left := ctx.Err() == nil && !b.isLost() && b.p.client.done() // by itself: the client has said all that it had to
	switch {
	case b.isLost():
		cutWaits(errMovingOn)
	case (ctx.Err() != nil || left) && waiting.open() && !b.endWaits(exchanges):
		cutWaits(errMovingOn)
	}
	waits.Wait()
	cutWaits(nil)
	if left && !b.isLost() && b.p.client.done() { // else what waited was given back, for the next server
		b.ignoreLoss()
		b.end(b.main)
		b.sessionEnded = true
	}
}

// ignoreLoss: from here on the end of the session is our own doing, and no loss.
func (b *bridge) ignoreLoss() { b.lostOnce.Do(func() {}) }

// end ends the session at the server, on c when that is good for it; what goes wrong does not matter.
func (b *bridge) end(c *conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if c == nil || !c.stillOpen(b.p.set.timing.read) {
		dialled, _, err := dialServer(ctx, b.doc, b.p.set.timing.probe)
		if err != nil {
			return
		}
		defer dialled.close()
		c = dialled
	}
	arrived, header := b.confirm()
	if r, err := c.exchange(ctx, "DELETE", "/mcp", b.headers+header, nil, maxAnswer); err == nil && r.status == http.StatusNoContent {
		b.p.client.confirmed(arrived)
	}
}

// pass gets one frame answered. False: the server is lost, and the frame was answered "outcome unknown" or given back.
func (b *bridge) pass(ctx context.Context, c **conn, f frame) bool {
	if f.tooLong {
		b.p.client.write(tooLongAnswer())
		return true
	}
	until := time.Now().Add(messageTime + f.wait())
	if f.runsEpisodeCommand() {
		var cutCall context.CancelCauseFunc
		ctx, cutCall = context.WithCancelCause(ctx)
		defer b.cutAfterInput(cutCall)()
	}
	for {
		sent, r, err := b.send(ctx, c, f, until)
		if err != nil {
			return b.unanswered(ctx, f, until, sent)
		}
		switch code := r.code(); {
		case r.status == http.StatusOK:
			if !b.give(f, r) {
				(*c).close() // which tells the server that the answer has not arrived
			}
			return true
		case r.status == http.StatusAccepted:
			return true
		case code == "session_not_found", code == "lease_lost":
			// Not executed; or it was, is safe to repeat and nobody was told (server.invoke). A server that has lost its lease
			// waits for the session to be ended; to end one that is not there does no harm.
			b.p.client.giveBack(f)
			b.lose(loss{goodbye: true})
			return false
		case code == "retired":
			b.p.client.giveBack(f)
			b.lose(loss{retired: r.retired()})
			return false
		case code == "busy" && b.pause(ctx, r, until):
			continue
		case errors.Is(context.Cause(ctx), errCancelled): // during the pause
			return true
		case code == "busy" && b.isLost(): // not executed, and the next server can be asked
			b.p.client.giveBack(f)
			return false
		}
		b.refuse(f, r)
		return true
	}
}

// unanswered decides what becomes of a frame to which no answer came, which may have been sent: nothing, when the client
// does not want it any more; "outcome unknown"; or it is given back to be sent to the next server. It answers for pass.
func (b *bridge) unanswered(ctx context.Context, f frame, until time.Time, sent bool) bool {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errCancelled):
		return true // it gets no answer
	case errors.Is(cause, errInputEnded):
		b.fail(f, "the repository's episode command is still running")
		return true
	case sent && !time.Now().Before(until):
		b.fail(f, fmt.Sprintf("no answer within %v", messageTime+f.wait()))
		return true
	case sent && !f.repeatable():
		b.fail(f, "the server was lost while the call ran")
	default:
		b.p.client.giveBack(f)
	}
	b.lose(loss{})
	return false
}

// send posts the frame, on a connection that is good for it. Its limit is the connection's: a context for each message would
// cost a tenth of the bridge's time. So that a call that must not be repeated is not sent in vain, the system is asked
// before whether the connection is still there; that is a fortieth of a call, and what may be repeated is sent again
// instead.
func (b *bridge) send(ctx context.Context, c **conn, f frame, until time.Time) (sent bool, r reply, err error) {
	good := (*conn).stillOpen
	if f.repeatable() {
		good = (*conn).notIdle
	}
	for {
		used := *c != nil && good(*c, b.p.set.timing.read)
		if !used {
			dialled, _, err := dialServer(ctx, b.doc, b.p.set.timing.probe)
			if err != nil {
				return false, reply{}, err
			}
			if old := *c; old != nil {
				if old.life != nil {
					dialled.live(old.life)
				}
				old.close()
			}
			*c = dialled
		}
		(*c).deadline(until)
		arrived, header := b.confirm()
		r, err = (*c).exchange(ctx, "POST", "/mcp", b.headers+header, f.raw, maxAnswer)
		if err == nil && (r.status == http.StatusOK || r.status == http.StatusAccepted) {
			b.p.client.confirmed(arrived)
		}
		if err == nil || !used || !f.repeatable() || ctx.Err() != nil || !time.Now().Before(until) {
			return true, r, err
		}
	}
}

// cutAfterInput cuts an exchange endingTime after the client has left. The function that it returns must be called when the
// exchange has ended.
func (b *bridge) cutAfterInput(cut context.CancelCauseFunc) func() {
	done := make(chan struct{})
	go func() { // ends with the exchange
		select {
		case <-b.p.client.ended:
			waitAtMost(done, endingTime)
		case <-done:
		}
		cut(errInputEnded)
	}()
	return func() { close(done) }
}

// give hands the server's answer to the client, byte for byte. What is no answer of ours must not get into the protocol. It
// reports whether the answer is out.
func (b *bridge) give(f frame, r reply) bool {
	if !r.json || len(r.body) == 0 || r.body[0] != '{' && r.body[0] != '[' || bytes.IndexByte(r.body, '\n') >= 0 {
		b.fail(f, "the server's answer makes no sense")
		return false
	}
	b.p.client.remember(f, r.body)
	if out := b.p.client.write(r.body); !out {
		return false
	}
	if r.parcels != "" {
		b.p.client.noteParcels(parcelNumbers(r.parcels))
		signalOn(b.parcel)
	}
	return true
}

// pause waits as long as a busy server asks; false when there is no time left.
func (b *bridge) pause(ctx context.Context, r reply, until time.Time) bool {
	seconds, err := strconv.Atoi(r.retryAfter)
	if err != nil || seconds < 0 {
		seconds = 1
	}
	t := time.NewTimer(min(time.Duration(seconds)*time.Second, time.Until(until)))
	defer t.Stop()
	select {
	case <-t.C:
		return time.Now().Before(until)
	case <-ctx.Done():
		return false
	}
}

// fail tells the client that nobody knows whether its call was executed.
func (b *bridge) fail(f frame, why string) {
	b.tell(f, func(id json.RawMessage) *rpcError {
		e := outcomeUnknown(why)
		e.Data = map[string]any{"request_id": id, "outcome": "unknown"}
		return e
	})
}

// refuse gives the client a refusal that no election can cure.
func (b *bridge) refuse(f frame, r reply) {
	b.tell(f, func(json.RawMessage) *rpcError {
		e := rpcErrorf(codeInternal, "the server refused the message with status %d: %s", r.status, clip(r.message(), 500))
		e.Data = map[string]any{"status": r.status, "code": r.code()}
		return e
	})
}

// tell answers a frame with an error, where it wants an answer.
func (b *bridge) tell(f frame, about func(id json.RawMessage) *rpcError) {
	if answer := f.failed(about); answer != nil {
		b.p.client.write(answer)
	}
}
