package main

// The tools by which peers write to each other.
//
// A thread has its home in the asker's checkout: whatever closes it, an answer, a withdrawal, a follow-up, is compared there
// with what the journal holds, and the first one counts. The recipient's checkout keeps a copy, which says where that is.
// What has to happen together is one entry, so that no crash comes between.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
)

const (
	describeTime = 15 * time.Minute // how long the description of a peer that has left is shown
	listingLimit = 24000            // characters of a text listing
)

type askInput struct {
	Peer    string `json:"peer_name" required:"true" doc:"name or peer_id of the recipient"`
	Query   string `json:"query" required:"true" doc:"the question, at most 16384 bytes"`
	ReplyTo string `json:"reply_to" doc:"id of an open thread of yours that this ask follows up and closes"`
	Circle  string `json:"circle" doc:"circle of the recipient, when two peers share the name"`
}

type ackInput struct {
	ID      string `json:"correlation_id" required:"true" doc:"id of the ask"`
	Message string `json:"message" doc:"the answer; without one the ack says: seen, nothing to do"`
}

type notifyInput struct {
	Peer    string `json:"peer_name" required:"true" doc:"name or peer_id of the recipient"`
	Message string `json:"message" required:"true" doc:"the message, at most 16384 bytes"`
	Circle  string `json:"circle" doc:"circle of the recipient, when two peers share the name"`
}

// sentOutput is the answer to what has been sent: the tool's text is the id alone.
type sentOutput struct {
	ID   string `json:"id" doc:"of the thread or the message"`
	Note string `json:"note,omitempty" doc:"why it was not delivered at once, or what else there is to know"`
}

func (o sentOutput) blocks() []string { return withNote(o.ID, o.Note) }

// saidOutput is the answer of a tool that says a sentence.
type saidOutput struct {
	Text string `json:"text" doc:"what was done"`
	Note string `json:"note,omitempty" doc:"what else there is to know"`
}

func (o saidOutput) blocks() []string { return withNote(o.Text, o.Note) }

// visible tells what a reader sees from blanks and the marks that only steer text.
func visible(r rune) bool {
	return unicode.IsGraphic(r) && !unicode.IsSpace(r) && !unicode.Is(unicode.Cf, r)
}

// letterFrom makes a letter of what the caller wrote, or refuses it.
func (s *server) letterFrom(a actor, kind, id, field, text string) (letter, error) {
	if s.retired {
		return letter{}, refuse("refused", "you write to nobody any more: %s", s.why)
	}
	switch {
	case !strings.ContainsFunc(text, visible):
		return letter{}, refuse("invalid_input", "%s: is blank; write what the other is to read", field)
	case len(text) > textLimit:
		return letter{}, refuse("invalid_input", "%s: has %d bytes, at most %d are allowed: put the rest into a file and send its path", field, len(text), textLimit)
	}
	if texts, _ := s.mesh.held(); a.stranger() && texts > textsLimit/2 {
		return letter{}, errTextsFull // the other half is for those whom a stranger must not silence
	}
	return letter{Ref: randomHex(6), ID: id, Kind: kind, From: address{Box: a.box}, Text: cleanMessage(text), At: millis(), Unverified: a.stranger()}, nil
}

// askPeer opens a thread.
func (s *server) askPeer(ctx context.Context, in askInput) (sentOutput, error) {
	a, err := s.actor(ctx)
	if err != nil {
		return sentOutput{}, err
	}
	l, err := s.letterFrom(a, "ask", s.mesh.newID("ask"), "query", in.Query)
	if err != nil {
		return sentOutput{}, err
	}
	to, err := s.resolve(ctx, a, in.Peer, in.Circle)
	if err != nil {
		return sentOutput{}, err
	}
	if !to.here && s.lease == nil {
		return sentOutput{}, refuse("refused", "this process serves its client alone (%s), so no answer could reach it: use notify_peer, and say how you can be reached", s.why)
	}
	prior, side, err := s.priorThread(ctx, a, in.ReplyTo)
	if err != nil {
		return sentOutput{}, err
	}
	if prior != nil {
		l.Follows = prior.ID
	}
	// The thread is in the journal before the ask is on its way: an answer may come back at once.
	e := &entry{Open: &thread{ID: l.ID, From: l.From, To: s.addressOf(to), Text: clip(l.Text, askExcerpt), At: l.At, Unverified: l.Unverified}}
	if prior != nil && to.here && prior.Home == (place{}) {
		// One line of the journal: the prior thread is closed if and only if the new ask is stored.
		s.closeThread(e, a, prior, side, s.followed(a, prior, side, to, l.ID))
		prior = nil
	}
	note, err := s.post(ctx, e, to, l)
	if err != nil {
		return sentOutput{}, err
	}
	s.tendSoon()      // it may lapse
	if prior != nil { // its home or the ask's mailbox is elsewhere: closed only once the ask is stored
		note = joined(note, s.closeFollowed(ctx, a, prior, side, to, l.ID))
	}
	return sentOutput{l.ID, note}, nil
}

// priorThread finds the thread that an ask follows up. It must be open, and the caller's.
func (s *server) priorThread(ctx context.Context, a actor, id string) (*thread, string, error) {
	if id == "" {
		return nil, "", nil
	}
	t, side, err := s.threadOf(a, id)
	if err != nil {
		return nil, "", err
	}
	open := t.Closed == 0
	if open && t.Home != (place{}) {
		ctx, cancel := context.WithTimeout(ctx, s.set.timing.probe)
		defer cancel()
		if open, err = s.isOpen(ctx, t); err != nil {
			return nil, "", refuse("refused", "reply_to: whether #%s is still open cannot be told now (%v): nothing was sent; ask without reply_to, or later", t.ID, err)
		}
	}
	if !open {
		return nil, "", refuse("refused", "reply_to: #%s is closed already; nothing was sent: ask without reply_to", t.ID)
	}
	return t, side, nil
}

// followed is what the other side of a thread is told when it is closed by a follow-up to somebody else; nil when the
// follow-up itself tells it.
func (s *server) followed(a actor, t *thread, side string, to *meshPeer, id string) *letter {
	other := t.From
	if side == "asker" {
		other = t.To
	}
	if other.Box == to.box() && (other.At == place{}) == to.here && (to.here || other.At.same(s.placeOf(to.Path))) {
		return nil
	}
	return &letter{Ref: randomHex(6), ID: t.ID, Kind: "ack", From: address{Box: a.box}, At: millis(), Text: "closed by a follow-up, #" + id, Unverified: a.stranger()}
}

func (s *server) closeFollowed(ctx context.Context, a actor, t *thread, side string, to *meshPeer, id string) string {
	e := &entry{}
	out := s.closeThread(e, a, t, side, s.followed(a, t, side, to, id))
	_, err := s.mesh.commit(e, synced) // whoever is there still: the follow-up is stored
	if err == nil && out != nil {
		if h := s.handOver(ctx, out.To, out.Entry.Key); h.closed && side == "recipient" {
			err = errThreadClosed
		}
	}
	if err != nil {
		return fmt.Sprintf("#%s could not be closed: %v", t.ID, err)
	}
	return ""
}

// threadOf finds a thread and the caller's side in it: asker or recipient.
func (s *server) threadOf(a actor, id string) (*thread, string, error) {
	id = strings.TrimPrefix(strings.TrimSpace(id), "#")
	s.mesh.mu.Lock()
	defer s.mesh.mu.Unlock()
	t := s.mesh.state.threads[id]
	if t == nil || t.Home != (place{}) && expired(t.At, millis()) {
		return nil, "", refuse("not_found", "there is no ask #%s%s", clip(id, 80), s.mesh.openLocked(a.box))
	}
	found := *t
	if side := t.sideOf(a.box); side != "" {
		return &found, side, nil
	}
	return nil, "", refuse("refused", "#%s is a thread between others%s", id, s.mesh.openLocked(a.box))
}

// openLocked names the threads that the caller may have meant.
func (m *mesh) openLocked(box boardName) string {
	var ids []string
	for _, t := range m.state.threads {
		if t.Closed == 0 && t.sideOf(box) != "" {
			ids = append(ids, "#"+t.ID)
		}
	}
	if len(ids) == 0 {
		return "; you have no open asks"
	}
	slices.Sort(ids)
	return "; your open asks: " + strings.Join(ids[:min(len(ids), 10)], ", ")
}

// closeThread adds to an entry what closes a thread, and returns what another server has to do for it.
func (s *server) closeThread(e *entry, a actor, t *thread, side string, l *letter) *outgoing {
	e.Close = &closing{ID: t.ID, By: side, Letter: l}
	to := t.Home
	if side == "asker" {
		to = t.To.At
	}
	if to == (place{}) {
		return nil
	}
	if side == "asker" {
		// What is still here need not go there. It may be on its way at this moment: the closing follows all the same.
		e.Sent = s.mesh.keysOf(t.ID)
	}
	far := closing{ID: t.ID, By: side}
	if l != nil {
		copied := *l
		copied.From.At = s.here()
		far.Letter = &copied
	}
	e.Queue = append(e.Queue, outgoing{To: to, Sender: a.box, Entry: entry{At: millis(), Key: randomHex(16), Close: &far}})
	return &e.Queue[len(e.Queue)-1]
}

// ackAsk closes a thread.
func (s *server) ackAsk(ctx context.Context, in ackInput) (saidOutput, error) {
	a, err := s.actor(ctx)
	if err != nil {
		return saidOutput{}, err
	}
	t, side, err := s.threadOf(a, in.ID)
	if err != nil {
		return saidOutput{}, err
	}
	l := &letter{Ref: randomHex(6), ID: t.ID, Kind: "ack", From: address{Box: a.box}, At: millis(), Unverified: a.stranger()}
	text := "acked #" + t.ID
	if in.Message != "" {
		text += " with reply"
		if *l, err = s.letterFrom(a, "ack", t.ID, "message", in.Message); err != nil {
			return saidOutput{}, err
		}
	}
	if side == "asker" { // a recipient gets an ack for nothing else
		l.Text = strings.TrimSuffix("withdrawn: "+l.Text, ": ")
	}
	e := &entry{}
	out := s.closeThread(e, a, t, side, l)
	done, err := s.commitFor(ctx, e)
	if err != nil && !errors.Is(err, errThreadClosed) {
		return saidOutput{}, s.notStored(err)
	}
	h := handed{err: err}
	if err == nil && out != nil {
		h = s.handOver(ctx, out.To, out.Entry.Key)
	} else if err == nil && len(done.stored) > 0 && !done.handed {
		h.note = s.whyQueued(done.stored[0], a.box)
	}
	switch {
	case h.closed && side == "asker": // it never came there
		h = handed{}
	case errors.Is(h.err, errThreadClosed), h.closed:
		if in.Message != "" {
			return saidOutput{}, refuse("refused", "#%s is closed already; the message was not delivered: use notify_peer, or a new ask", t.ID)
		}
		h = handed{note: "it was closed already"}
	case errors.Is(h.err, errNotServed):
		h = handed{note: fmt.Sprintf("queued: it is handed over as soon as the server of %s can be reached (%v)", out.To.Root, h.err)}
	}
	return saidOutput{text, h.note}, h.err
}

// notifyPeer sends a message that wants no answer.
func (s *server) notifyPeer(ctx context.Context, in notifyInput) (sentOutput, error) {
	a, err := s.actor(ctx)
	if err != nil {
		return sentOutput{}, err
	}
	l, err := s.letterFrom(a, "notify", s.mesh.newID("notif"), "message", in.Message)
	if err != nil {
		return sentOutput{}, err
	}
	to, err := s.resolve(ctx, a, in.Peer, in.Circle)
	if err != nil {
		return sentOutput{}, err
	}
	note, err := s.post(ctx, &entry{}, to, l)
	return sentOutput{l.ID, note}, err
}

// post stores a letter in its recipient's mailbox, or queues it here for the server there. The entry holds what must
// happen along with it. The note says why it has not been delivered yet.
func (s *server) post(ctx context.Context, e *entry, to *meshPeer, l letter) (note string, err error) {
	l.To = []boardName{to.box()}
	if to.here {
		e.Store = append(e.Store, l)
		done, err := s.commitFor(ctx, e)
		switch {
		case errors.Is(err, errThreadClosed):
			return "", refuse("refused", "reply_to: #%s was closed just now; nothing was sent", e.Close.ID)
		case err != nil:
			return "", s.notStored(err)
		case done.handed:
			return "", nil
		}
		return s.whyQueued(to.box(), l.From.Box), nil
	}
	out := s.outgoing(e, to.Path, l)
	h := handed{}
	if s.lease == nil { // nothing outlives this process, so nothing is kept for later: sent now or refused
		switch h = s.deliver(ctx, &out); {
		case errors.Is(h.err, errUnanswered):
			return "", outcomeUnknown("the server of " + to.Path + " was lost while it took the message")
		case errors.Is(h.err, errNotServed):
			return "", refuse("refused", "not sent: this process serves its client alone, and %v", h.err)
		}
		return h.note, h.err
	}
	e.Queue = append(e.Queue, out)
	if _, err := s.commitFor(ctx, e); err != nil {
		return "", s.notStored(err)
	}
	h = s.handOver(ctx, out.To, out.Entry.Key)
	if errors.Is(h.err, errNotServed) {
		return fmt.Sprintf("queued here: it is handed over as soon as the server of %s can be reached (%v)", to.Path, h.err), nil
	}
	return h.note, h.err
}

// outgoing makes what another server is to store.
func (s *server) outgoing(e *entry, root string, l letter) outgoing {
	at := s.placeOf(root)
	l.From.At = s.here()
	out := outgoing{To: at, Sender: l.From.Box, Entry: entry{At: l.At, Key: randomHex(16), Store: []letter{l}}}
	if e.Open != nil {
		t := *e.Open
		t.From, t.To, t.Home = l.From, address{Box: t.To.Box}, s.here()
		out.Entry.Open = &t
	}
	return out
}

// placeOf is a checkout as it is journaled.
func (s *server) placeOf(root string) place {
	c, _ := readCheckout(root)
	return place{Root: root, GitDir: c.gitDir}
}

func (s *server) addressOf(to *meshPeer) address {
	if to.here {
		return address{Box: to.box()}
	}
	return address{Box: to.box(), At: s.placeOf(to.Path)}
}

// commitFor makes an entry count that the caller wants, unless its session has ended: errSessionEnded. Whoever goes on under
// its name has been told nothing of this call, or that its outcome is unknown, and may have written already what has to come
// after it.
func (s *server) commitFor(ctx context.Context, e *entry) (applied, error) {
	if errors.Is(context.Cause(ctx), errLeaseLost) {
		return applied{}, errLeaseLost
	}
	return s.mesh.commitOf(callerOf(ctx), e, synced)
}

// notStored says that a send had no effect.
func (s *server) notStored(err error) error {
	if r := (*refusal)(nil); errors.As(err, &r) || errors.Is(err, errLeaseLost) || errors.Is(err, errSessionEnded) {
		return err
	}
	return refuse("internal", "nothing was sent: the journal cannot be written (%v)", err)
}

// whyQueued says why a message in a mailbox here has not been read yet.
func (s *server) whyQueued(box, from boardName) string {
	m := s.mesh
	id := s.board.holds(box)
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case id != "" && box == from: // it comes with the answer to this call
		return ""
	case id != "" && m.working[id] > 0:
		return fmt.Sprintf("queued: %s is busy and sees it with its next call", box.name)
	case id != "":
		return fmt.Sprintf("queued: %s sees it with its next call", box.name)
	case m.state.expects(box, ""):
		return fmt.Sprintf("queued: %s has been spawned and sees it with its first call", box.name)
	case box == human:
		return "queued: the human sees it when the inbox is read"
	}
	since := ""
	if held := m.state.names[box]; held != nil && held.Left > 1 {
		since = " since " + stamp(time.UnixMilli(held.Left))
	}
	return fmt.Sprintf("queued: %s is offline%s; the message is kept for %v", box.name, since, keepTime)
}

func silentNote(silent []string) string {
	if len(silent) == 0 {
		return ""
	}
	return "could not be asked, so peers may be missing: " + cleanText(strings.Join(silent, "; "), 1000)
}

// isOpen asks a thread's home.
func (s *server) isOpen(ctx context.Context, t *thread) (bool, error) {
	answer, err := s.callPlace(ctx, t.Home, "majordomus/look", lookParams{Thread: t.ID})
	return string(member(answer, "open")) == "true", err
}
