package main

// A parcel is the letters of one answer. It is consumed when it is known that the answer was written: by the owner's stdio
// at once, by a bridge when it says so on a later request, by any other HTTP session, and by the human, with the next
// request, unless the connection was broken off before all of the answer was read. Until then its letters are in no other
// answer; when the session is lost they come again, marked. The journal knows a parcel before its answer is written, so
// that the next server can mark what may have been seen, and can be told by a bridge that it was.

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// parcel is what one answer carries.
type parcel struct {
	carriage
	session *session      // nil: the human
	given   time.Duration // since the server started: when the last of the answer began to be written, for a session that confirms by its next request; 0 before
	conn    *deadlineConn // on which it was given; nil when that has come to its end
	passed  bool          // its session has asked on since, on another connection
}

// exchange is one request being answered, as far as what becomes of the answer matters.
type exchange struct {
	parcels []int64
	work    *work // among which it is counted; nil: nowhere
	slot    bool  // it holds one of work's
	writing int64 // bytes of its answer that are counted
	command bool  // it may have changed something
}

type exchangeKey struct{}

func withExchange(ctx context.Context, x *exchange) context.Context {
	return context.WithValue(ctx, exchangeKey{}, x)
}

// exchangeOf is nil where nobody will tell whether the answer was written: such an answer carries nothing.
func exchangeOf(ctx context.Context) *exchange {
	x, _ := ctx.Value(exchangeKey{}).(*exchange)
	return x
}

// take makes a parcel of what waits for the caller and puts it into the answer of this exchange; more is how many letters
// have to stay behind. A reader that has got something no longer counts as waiting.
func (s *server) take(ctx context.Context, a actor, reader chan struct{}) (list []mail, more int) {
	x := exchangeOf(ctx)
	if x == nil {
		return nil, 0
	}
	m := s.mesh
	m.mu.Lock()
	letters, more := m.waitingLocked(a.box)
	if len(letters) == 0 {
		m.mu.Unlock()
		return nil, more
	}
	p := &parcel{carriage: carriage{Number: randomNumber(), Box: a.box}, session: a.session}
	for _, l := range letters {
		l.held = p.Number
		p.Refs = append(p.Refs, l.Ref)
		list = append(list, l.mail())
	}
	m.parcels[p.Number] = p
	m.unreadLocked(a.box, reader) // in the same moment: the next letter must not count as handed to it
	m.mu.Unlock()

	carry := p.carriage
	_, err := m.commit(&entry{Carry: &carry}, written)
	// Whoever has the lease now may be giving out the same letters.
	if err != nil || !s.holds() {
		m.release(false, p.Number)
		return nil, 0
	}
	x.parcels = append(x.parcels, p.Number)
	return list, more
}

// release gives parcels up: their letters wait again, marked when they may have been seen.
func (m *mesh) release(seen bool, numbers ...int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range numbers {
		if p := m.parcels[n]; p != nil {
			m.releaseLocked(p, seen)
		}
	}
}

func (m *mesh) releaseLocked(p *parcel, seen bool) {
	delete(m.parcels, p.Number)
	for _, letters := range m.state.boxes { // the mailbox may have moved
		for _, l := range letters {
			if l.held == p.Number {
				l.held, l.Again = 0, l.Again || seen
				m.wakeLocked(l.To[0])
			}
		}
	}
}

// confirm consumes parcels that have arrived.
func (m *mesh) confirm(how durability, numbers ...int64) {
	m.mu.Lock()
	known := slices.DeleteFunc(slices.Clone(numbers), func(n int64) bool { return m.state.carried[n] == nil })
	for _, n := range numbers {
		switch p := m.parcels[n]; {
		case p == nil:
		case slices.Contains(known, n):
			delete(m.parcels, n)                 // its letters are held until they are gone
			m.wakeLocked(m.state.carried[n].Box) // for what had to stay behind it
		default:
			m.releaseLocked(p, true)
		}
	}
	m.mu.Unlock()
	if len(known) > 0 {
		m.commit(&entry{Confirm: known}, how)
	}
}

// confirmedBy consumes what an HTTP session, or the human, had been given and read before the head of this request arrived.
func (s *server) confirmedBy(n *session, r *http.Request) {
	m := s.mesh
	head := time.Since(s.started)
	c, _ := r.Context().Value(connKey{}).(*deadlineConn)
	if c != nil {
		head = time.Duration(c.head.Load())
	}
	var known []int64
	m.mu.Lock()
	for number, p := range m.parcels {
		if p.session != n || p.given == 0 || p.given >= head {
			continue
		}
		if p.conn == nil || p.conn == c {
			known = append(known, number)
			continue
		}
		switch read, lost := p.conn.over(); {
		case read:
			known = append(known, number)
		case !lost && !p.passed:
			// Who asks on has read what was answered before, unless it has just broken that connection off: that shows soon.
			p.passed = true
			time.AfterFunc(confirmTime, func() { s.confirmPassed(number) })
		}
	}
	m.mu.Unlock()
	m.confirm(loose, known...)
}

func (s *server) confirmPassed(number int64) {
	m := s.mesh
	m.mu.Lock()
	p := m.parcels[number]
	arrived := p != nil && (p.conn == nil || !p.conn.lost())
	m.mu.Unlock()
	if arrived && s.calls.Err() == nil {
		m.confirm(loose, number)
	}
}

// answered settles what an answer on stdio carried, now that it is known whether it was written.
func (m *mesh) answered(x *exchange, ok bool) {
	switch {
	case len(x.parcels) == 0:
	case ok:
		m.confirm(loose, x.parcels...)
	default:
		m.release(true, x.parcels...)
	}
}

// writeCarrying writes an answer over HTTP and sees to what it carries. A bridge is told what that is, to confirm it; if
// its connection ends first, the answer is lost. Another session confirms by its next request; what the client hangs up on
// is lost.
func (s *server) writeCarrying(w http.ResponseWriter, r *http.Request, n *session, x *exchange, write func() bool) {
	m := s.mesh
	bridge := n != nil && n.attached
	if bridge && len(x.parcels) > 0 {
		w.Header()[parcelHeader] = []string{parcelList(x.parcels)}
	}
	if !write() {
		m.unanswered(x)
	}
	if len(x.parcels) == 0 {
		return
	}
	conn, _ := r.Context().Value(connKey{}).(*deadlineConn)
	given := time.Since(s.started) // before it can be read: the next request may come at once
	if conn != nil && conn.wrote.Load() > 0 {
		given = time.Duration(conn.wrote.Load()) // nor can what was too long to be kept until now have been read before that
	}
	m.handing(x, conn, bridge, given)
	if err := http.NewResponseController(w).Flush(); err != nil {
		m.release(true, x.parcels...)
		return
	}
	if conn != nil && !bridge && (r.Close || w.Header().Get("Connection") == "close") {
		conn.linger(r.Context().Done(), s.ending)
	}
}

// handing notes that an answer is being written.
func (m *mesh) handing(x *exchange, conn *deadlineConn, bridge bool, given time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, number := range x.parcels {
		p := m.parcels[number]
		switch {
		case p == nil:
		case conn != nil && (bridge && conn.closed.Load() || conn.lost()):
			m.releaseLocked(p, true)
		case bridge:
			p.conn = conn
		default:
			p.conn, p.given = conn, given
		}
	}
}

// connectionEnded gives back what a bridge was given on a connection that ended before it said that it arrived, and what
// anybody else was given and has not read.
func (m *mesh) connectionEnded(c *deadlineConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.parcels {
		switch {
		case p.conn != c:
		case p.given == 0 || c.reset.Load():
			m.releaseLocked(p, true)
		default:
			p.conn = nil
		}
	}
}

// unanswered gives back what an exchange had taken for an answer that was never made.
func (m *mesh) unanswered(x *exchange) {
	if len(x.parcels) > 0 {
		m.release(false, x.parcels...)
		x.parcels = nil
	}
}

// sessionEnded gives back what a session had been given and has not confirmed.
func (m *mesh) sessionEnded(n *session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.parcels {
		if p.session == n {
			m.releaseLocked(p, true)
		}
	}
}

// parcelHeader and confirmHeader name parcels between a server and a bridge, several with commas.
const (
	parcelHeader  = "Majordomus-Delivery"
	confirmHeader = "Majordomus-Confirm"
)

func parcelNumbers(header string) (numbers []int64) {
	for word := range strings.SplitSeq(header, ",") {
		if n, err := strconv.ParseInt(strings.TrimSpace(word), 10, 64); err == nil && len(numbers) < 1000 {
			numbers = append(numbers, n)
		}
	}
	return numbers
}

func parcelList(numbers []int64) string {
	words := make([]string, len(numbers))
	for i, n := range numbers {
		words[i] = strconv.FormatInt(n, 10)
	}
	return strings.Join(words, ",")
}
