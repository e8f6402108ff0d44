package main

// From one checkout's server to another's. What is to be done there is an entry, with a key of 128 bits by which it is
// done once: it is journaled here, handed over in order, and struck off when the other server has stored it. A server
// that is not there gets it when it comes; one that dies in the middle is asked again, by the same key.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// tendTime is how often a server that is not there is looked for while something waits for it.
const tendTime = 5 * time.Second

// handed is what became of a delivery.
type handed struct {
	note   string      // what the sender must know; "" when it has been handed to its reader
	closed bool        // the thread it was about is closed, or gone
	full   []boardName // mailboxes that could not take it
	err    error       // a refusal, or errNotServed
}

// deliverResult is the answer to majordomus/deliver.
type deliverResult struct {
	Note   string      `json:"note,omitempty"`
	Closed bool        `json:"closed,omitempty"`
	Full   []boardName `json:"full,omitempty"`
}

// handOver hands over what waits for a checkout and tells what became of one delivery. Without an answer in time it is
// on its way all the same.
func (s *server) handOver(ctx context.Context, to place, key string) handed {
	ctx, cancel := context.WithTimeout(ctx, s.set.timing.probe)
	defer cancel()
	m := s.mesh
	result := make(chan handed, 1) // a receive is what became of it
	m.mu.Lock()
	m.awaited[key] = result
	m.mu.Unlock()
	err := s.flush(ctx, to)
	m.mu.Lock()
	delete(m.awaited, key)
	m.mu.Unlock()
	select {
	case h := <-result: // whoever handed it over, this call or another
		return h
	default:
	}
	s.tendSoon()
	if err == nil {
		err = errNotServed
	}
	return handed{err: err}
}

// flush hands over everything that waits for a checkout, in order; one goroutine at a time.
func (s *server) flush(ctx context.Context, to place) error {
	m := s.mesh
	m.mu.Lock()
	lane := m.lanes[to.lane()]
	if lane == nil {
		lane = make(chan struct{}, 1)
		m.lanes[to.lane()] = lane
	}
	m.mu.Unlock()
	select {
	case lane <- struct{}{}:
		defer func() { <-lane }()
	case <-ctx.Done():
		return fmt.Errorf("%w: it takes long", errNotServed)
	}
	// One at a time: the next one may be by the same sender, to the same reader, and must not overtake.
	for {
		o := m.nextFor(to)
		if o == nil {
			return nil
		}
		if !s.holds() { // whoever does hands it over
			return errNotServed
		}
		h := s.deliver(ctx, o)
		if errors.Is(h.err, errNotServed) {
			return h.err
		}
		if err := s.strike(o, h); err != nil {
			return err
		}
	}
}

func (m *mesh) nextFor(to place) *outgoing {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.state.out {
		if o.To.same(to) {
			copied := *o
			return &copied
		}
	}
	return nil
}

// deliver has another server apply an entry.
func (s *server) deliver(ctx context.Context, o *outgoing) handed {
	answer, err := s.callPlace(ctx, o.To, "majordomus/deliver", o.Entry)
	if err != nil {
		return handed{err: err}
	}
	var r deliverResult
	if err := json.Unmarshal(answer, &r); err != nil {
		return handed{err: fmt.Errorf("%w: its answer makes no sense", errNotServed)}
	}
	return handed{note: cleanText(r.Note, 500), closed: r.Closed, full: r.Full}
}

// callPlace is callServer for a checkout that may have been moved, and in whose place there may be another by now.
func (s *server) callPlace(ctx context.Context, at place, method string, params any) (json.RawMessage, error) {
	root, err := s.rootOf(at)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotServed, err)
	}
	return s.callServer(ctx, root, method, params)
}

// rootOf is where a checkout of the repository is now.
func (s *server) rootOf(at place) (string, error) {
	there, err := readCheckout(at.Root)
	if err == nil && (there.gitDir == at.GitDir || at.GitDir == "" && there.commonDir == s.checkout.commonDir) {
		return at.Root, nil
	}
	siblings, _ := s.siblings()
	for _, c := range siblings {
		if moved, err := readCheckout(c.root); err == nil && moved.gitDir == at.GitDir {
			return c.root, nil
		}
	}
	if err == nil {
		err = fmt.Errorf("another checkout is at %q now", at.Root)
	}
	return "", err
}

// strike takes a delivery off the list. Who waits for it is told what became of it; when nobody does any more, a failure
// is told by a notice.
func (s *server) strike(o *outgoing, h handed) error {
	m := s.mesh
	e := &entry{Sent: []string{o.Entry.Key}}
	how := written
	m.mu.Lock()
	result := m.awaited[o.Entry.Key]
	m.mu.Unlock()
	failure := ""
	switch {
	case h.err != nil: // for good: what a later try may cure has not come here
		failure = h.err.Error()
		if o.Entry.Open != nil {
			e.Close = &closing{ID: o.Entry.Open.ID, By: "refused"}
		}
	case h.closed && o.Entry.Close != nil && o.Entry.Close.By == "recipient" && o.Entry.Close.Letter != nil && o.Entry.Close.Letter.Text != "":
		failure = errThreadClosed.Error()
	case len(h.full) > 0:
		failure = fmt.Sprintf("full: the mailbox of %s", listBoxes(h.full))
	}
	if failure != "" && result == nil && !o.isNotice() {
		e.Store = []letter{s.notice(o.Sender, fmt.Sprintf("not delivered (%s): %s", failure, o.Entry.summary()))}
	}
	if failure != "" {
		how = synced
	}
	_, err := m.commit(e, how)
	if errors.Is(err, errThreadClosed) || errors.Is(err, errNoThread) { // its asker was faster
		e.Close = nil
		_, err = m.commit(e, how)
	}
	if err == nil && result != nil {
		result <- h
	}
	return err
}

// summary says to its sender which message an entry is about.
func (e *entry) summary() string {
	switch {
	case len(e.Store) > 0 && e.Store[0].Scheduled != "":
		l := &e.Store[0]
		return fmt.Sprintf("%s to @%s (%s): %q", l.Kind, l.To[0].name, l.Scheduled, clip(l.Text, 200))
	case len(e.Store) > 0:
		return fmt.Sprintf("%s #%s %q", e.Store[0].Kind, e.Store[0].ID, clip(e.Store[0].Text, 200))
	case e.Close != nil && e.Close.Letter != nil:
		return fmt.Sprintf("ack #%s %q", e.Close.ID, clip(e.Close.Letter.Text, 200))
	}
	return "a message"
}

// serveDeliver applies what another checkout's server hands over.
func (s *server) serveDeliver(w http.ResponseWriter, r *http.Request, m message) {
	e, err := readEntry(m.params)
	if err == nil {
		err = deliverable(e)
	}
	if err != nil {
		s.refused(w, r, refuse("invalid_input", "majordomus/deliver: %v", err))
		return
	}
	s.mesh.settled()
	if !s.holds() {
		s.refused(w, r, errLeaseLost)
		return
	}
	s.localize(e)
	done, err := s.mesh.commit(e, synced)
	switch {
	case errors.Is(err, errThreadClosed), errors.Is(err, errNoThread):
		err = nil
		writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(deliverResult{Closed: true})))
		return
	case errors.Is(err, errIDTaken):
		err = refuse("refused", "the id is taken there: ask again")
	}
	if err == nil && !s.holds() {
		err = errLeaseLost // the same key counts once, here or at the next server
	}
	if err != nil {
		s.refused(w, r, s.notStored(err))
		return
	}
	result := deliverResult{Full: done.full}
	if done.seen {
		result.Note = "queued: it was stored there before"
	}
	if !done.handed && len(done.stored) == 1 {
		result.Note = s.whyQueued(done.stored[0], boardName{})
	}
	writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(result)))
}

// deliverable refuses what no server has to tell another.
func deliverable(e *entry) error {
	switch {
	case e.Key == "":
		return errors.New("no key")
	case e.Name != nil || e.Queue != nil || e.Sent != nil || e.Carry != nil || e.Confirm != nil || e.Move != nil || e.Forget != nil || e.Kept,
		e.Schedule != nil || e.Fire != nil || e.Unschedule != "", e.Spawn != nil || e.Unspawn != "" || e.Retire != "":
		return errors.New("not a delivery")
	case e.Open != nil && e.Open.Home == (place{}):
		return errors.New("a thread without a home")
	}
	for i := range e.Store {
		if l := &e.Store[i]; l.Notice && (e.Open != nil || len(e.Store) > 1) || l.Again || l.Carriers != nil {
			return errors.New("not a new letter")
		}
	}
	return nil
}

// localize makes the addresses of this checkout those of this checkout: one that serves its client alone has the same.
func (s *server) localize(e *entry) {
	here := func(a *address) {
		if a.At.same(s.here()) {
			a.At = place{}
		}
	}
	for i := range e.Store {
		here(&e.Store[i].From)
	}
	if e.Close != nil && e.Close.Letter != nil {
		here(&e.Close.Letter.From)
	}
}

// keysOf lists the deliveries of an ask that are not done.
func (m *mesh) keysOf(id string) (keys []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.state.out {
		if o.Entry.Open != nil && o.Entry.Open.ID == id {
			keys = append(keys, o.Entry.Key)
		}
	}
	return keys
}

// waitsFor says whether something is to be handed over to the checkout at a root.
func (s *server) waitsFor(root string) bool {
	m := s.mesh
	m.mu.Lock()
	waiting := len(m.state.out) > 0
	m.mu.Unlock()
	return waiting && m.nextFor(s.placeOf(root)) != nil
}

// tendSoon has somebody look after what waits and what lapses, now.
func (s *server) tendSoon() {
	m := s.mesh
	m.mu.Lock()
	if !m.tendOn && !m.closed && s.lease != nil {
		m.tendOn = true
		m.tending.Go(s.tendMesh)
	}
	m.mu.Unlock()
	signalOn(m.tend)
}

// tendMesh hands over what waits for other checkouts, at most every tendTime or when a server was seen there, and sees
// to what lapses. It ends with the server.
func (s *server) tendMesh() {
	ctx, cancel := context.WithCancel(s.calls)
	defer cancel()
	s.mesh.tending.Go(func() { // ends with the server
		<-s.ending
		cancel()
	})
	s.mesh.settled()
	t := time.NewTimer(tendTime)
	defer t.Stop()
	for {
		next := min(s.lapse(), lapseLook)
		if s.flushAll(ctx) {
			next = tendTime
		}
		t.Reset(next)
		select {
		case <-s.ending:
			return
		case <-t.C:
		case <-s.mesh.tend:
		}
	}
}

// flushAll hands over what it can and says whether anything is left.
func (s *server) flushAll(ctx context.Context) bool {
	var places []place
	s.mesh.mu.Lock()
	for _, o := range s.mesh.state.out {
		if !slices.ContainsFunc(places, func(p place) bool { return p.same(o.To) }) {
			places = append(places, o.To)
		}
	}
	s.mesh.mu.Unlock()
	var group errgroup.Group
	group.SetLimit(gatherTogether)
	for _, to := range places {
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, s.set.timing.probe+tendTime)
			defer cancel()
			s.flush(ctx, to)
			return nil
		})
	}
	group.Wait()
	s.mesh.mu.Lock()
	defer s.mesh.mu.Unlock()
	return len(s.mesh.state.out) > 0
}

func listBoxes(boxes []boardName) string {
	var b bytes.Buffer
	for i, box := range boxes {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(box.name)
	}
	return b.String()
}
