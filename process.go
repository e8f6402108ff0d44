package main

// One process and its life: elect, take the role that the election gives (serve, follow or alone), and again when that is
// over, until a signal came or the client has left (a server stays for the others that it serves). A role is a function: it
// takes frames from the client (stdio.go) and returns the election that decides on the next one. The client initializes only
// once and notices none of it.
//
//	serve   server.go  it holds the lease: serves its own client, the bridges and whoever speaks HTTP
//	follow  bridge.go  another process holds the lease: passes its client's messages on to that one
//	alone   below      no server can be shared: serves its client only, and tries again where that may help
//
// However a server ends, it does so in one order (server.end): it finishes the journal and releases the lease, so that somebody
// else may serve; answers the watches, so that the bridges elect; finishes what runs; closes the port.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// process is one `majordomus mcp`.
type process struct {
	set        *settings
	log        *slog.Logger
	client     *client
	checkout   checkout
	elector    *elector
	background sync.WaitGroup // what goes on while the client has moved on

	aloneWhy      string    // not empty: the client is served alone from the start
	attachFailing time.Time // since when attaching fails; zero when it does not
	roles         int       // how many it has been given by elections, this one included
	refusal       error     // why it does not serve, see refuses in documents.go
}

// newProcess finds the checkout and begins to read what the client says.
func newProcess(set *settings, stdin io.Reader, stdout io.Writer, log *slog.Logger) *process {
	p := &process{set: set, log: log}
	var err error
	name := ""
	if p.checkout, err = findCheckout(set.dir); err == nil {
		name = filepath.Base(p.checkout.root)
	}
	p.client = newClient(stdin, stdout, name, set.timing.read, os.Getenv)
	switch {
	case set.standalone:
		p.aloneWhy = "--standalone was given"
	case err != nil:
		p.aloneWhy = err.Error()
	default:
		p.elector = &elector{
			root: p.checkout.root, version: set.version, exe: set.exe, timing: set.timing, log: log, ended: p.client.ended, wasAt: p.client.wasAt,
			probe: func(ctx context.Context, doc leaseDocument) (*conn, probeResult, error) {
				return dialHolder(ctx, doc, set.timing.probe)
			},
		}
	}
	return p
}

// ballot is an election that is going on or has ended.
type ballot struct {
	done chan struct{} // closed when out and err are set
	out  outcome
	err  error
}

func (p *process) elect(ctx context.Context) *ballot {
	b := &ballot{done: make(chan struct{})}
	go func() { // ends with the election, which is bounded
		defer close(b.done)
		b.out, b.err = p.elector.elect(ctx)
	}()
	return b
}

// abandon gives up what an election won when nobody wants it any more.
func (b *ballot) abandon() {
	<-b.done
	if b.out.lease != nil {
		b.out.lease.release()
	}
	if b.out.conn != nil {
		b.out.conn.close()
	}
}

// run is the life of the process: elect, take the role, and again, until a
// signal came or the client has left. A server stays for the bridges and the
// sessions over HTTP after its own client has left (leaveOwn), until the last
// of them is gone.
func (p *process) run(ctx context.Context) {
	defer p.background.Wait()
	b := p.start(ctx)
	for b != nil {
		p.wait(ctx, b)
		if ctx.Err() != nil {
			b.abandon()
			return
		}
		p.roles++
		switch {
		case b.err != nil:
			b = p.alone(ctx, b.err)
		case b.out.lease != nil:
			b = p.serve(ctx, b.out.lease)
		default:
			b = p.follow(ctx, b.out)
		}
	}
}

// start begins the first election. Where there can be none, it serves the client alone until that has left.
func (p *process) start(ctx context.Context) *ballot {
	if p.elector != nil {
		return p.elect(ctx)
	}
	return p.alone(ctx, nil)
}

// endingTime bounds every orderly ending: upon a signal, a server's goodbye, the
// end of the input. A client kills five seconds after it has asked.
const endingTime = 4 * time.Second

// firstAnswer bounds how long a client waits for the election before the
// process answers by itself, without saying who is here.
const firstAnswer = time.Second

// maxKept is how many calls and batches are taken in while an election goes on.
const maxKept = 64

// wait answers the client until the election has ended, once it has waited for
// firstAnswer. From then on only calls of tools and batches wait for it.
func (p *process) wait(ctx context.Context, b *ballot) {
	// Most elections are settled at once, and then every answer comes in order
	// from whoever serves.
	patience := time.NewTimer(firstAnswer)
	defer patience.Stop()
	select {
	case <-b.done:
		return
	case <-patience.C:
	case <-ctx.Done():
	}
	var stopgap *server
	var kept []frame
	size := 0
	defer func() { p.client.giveBack(kept...) }()
	for {
		f, ok := p.client.next(ctx, b.done)
		switch {
		case !ok:
			<-b.done // at the end of input it ends by itself: see elector.ended
			return
		case f.tool != "", bytes.HasPrefix(f.raw, []byte("[")) && batches(p.client.negotiated()):
			kept = append(kept, f)
			if size += len(f.raw); len(kept) < maxKept && size < maxMessage {
				continue
			}
			<-b.done // what else it sends stays with the client
			return
		case f.method == "notifications/cancelled":
			id := member(f.params, "requestId")
			kept = without(kept, id)
		}
		if stopgap == nil {
			stopgap = newServer(p.set, p.checkout, p.log, nil)
			stopgap.why = "it is not settled yet which process serves this checkout"
		}
		n := &session{version: p.client.negotiated(), trusted: true}
		stopgap.attendFrame(ctx, p.client, n, f)
	}
}

// without removes the call that its client cancelled.
func without(kept []frame, id json.RawMessage) []frame {
	var rest []frame
	for _, f := range kept {
		if id == nil || !bytes.Equal(f.id, id) {
			rest = append(rest, f)
		}
	}
	return rest
}

// aloneAgain is how often, at the least, a process that is alone for a cause
// that may pass elects again.
const aloneAgain = 30 * time.Second

// retiredError is why a client is alone whom its server refuses for good: the
// user has ended it with kill_peer. It writes to nobody from then on.
type retiredError string

func (e retiredError) Error() string {
	return "the server refuses this client from now on: " + string(e)
}

// alone serves this client and nobody else, because of why; nil for a process
// that was told so from the start. It returns the election that found a way
// out, nil when the client has left.
func (p *process) alone(ctx context.Context, why error) *ballot {
	s := newServer(p.set, p.checkout, p.log, nil)
	s.why = p.aloneWhy
	again := (*aloneError)(nil)
	s.retired = errors.As(why, new(retiredError))
	if why != nil {
		s.why = why.Error()
		level := slog.LevelWarn
		if errors.Is(why, errInputEnded) {
			level = slog.LevelDebug // it has left already; what it sent is answered
		}
		p.log.Log(ctx, level, fmt.Sprintf("serving this client alone: %v", why))
	} else {
		p.log.Info("serving this client alone: " + s.why)
	}
	defer context.AfterFunc(ctx, func() { s.close() })() // a signal: nothing waits for long any more
	ctx, cancel := context.WithCancel(ctx)
	var next *ballot
	var trying sync.WaitGroup
	if errors.As(why, &again) && again.retry {
		trying.Go(func() {
			if next = p.electUntil(ctx); next != nil {
				s.close()
			}
		})
	}
	s.attend(ctx, p.client, s.attachOwn(p.client))
	s.closeMesh()
	cancel()
	trying.Wait()
	if next != nil && p.client.done() {
		next.abandon()
		next = nil
	}
	if next == nil {
		s.closeEpisodes(context.Background())
	}
	s.stopEpisodes()
	return next
}

// electUntil elects until an election succeeds, soon at first: where this
// process may not write, another that may is often about to take over. It
// returns nil when ctx is done first.
func (p *process) electUntil(ctx context.Context) *ballot {
	for wait := time.Second; ; wait = min(2*wait, aloneAgain) {
		if pause(ctx, wait, nil) != nil {
			return nil
		}
		b := p.elect(ctx)
		if <-b.done; b.err == nil {
			return b
		}
	}
}

// isClosed looks without waiting.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// waitAtMost waits for c, but not longer than d.
func waitAtMost(c <-chan struct{}, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c:
	case <-t.C:
	}
}
