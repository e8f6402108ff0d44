package main

// Firing what is due. When that is is a moment of the wall clock. Timers run by another clock, which stands still in
// suspend and knows nothing of a clock that was set, so nobody sleeps longer than clockLook before looking at the wall
// clock again.
//
// Firing is one line of the journal: the schedule's next due time (or its end) and the stored message, or what another
// checkout's server has yet to be handed. Whoever reads the journal next finds both or neither. The line says which due
// time it is about, so of two firings of one due time the second is refused. A server that slept through a take-over
// gets no further than that line: its journal is not the one under the name, and whoever gives out the message, here or
// to another checkout, looks at the lease again.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	clockLook = time.Minute
	lateAfter = time.Second // what a busy machine may take is not worth a word
)

// testHookClock stands in for the wall clock and says how often it is looked at.
var testHookClock func() (now time.Time, look time.Duration)

// wallClock is the time by which schedules are due. Without its monotonic reading, which two times would be compared by.
func wallClock() (now time.Time, look time.Duration) {
	if testHookClock != nil {
		return testHookClock()
	}
	return time.Now().Round(0), clockLook
}

// runSoon sees to it that somebody looks at the schedules, now.
func (s *server) runSoon() {
	m := s.mesh
	m.mu.Lock()
	if !m.runs && !m.closed && s.lease != nil {
		m.runs = true
		m.tending.Go(s.runSchedules)
	}
	m.mu.Unlock()
	signalOn(m.scheduled)
}

// runSchedules fires what is due. It ends with the server.
func (s *server) runSchedules() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-s.ending:
			return
		case <-t.C:
		case <-s.mesh.scheduled:
		}
		if next, any := s.fireDue(); any {
			t.Reset(next)
		} else {
			t.Stop()
		}
	}
}

// fireDue fires what is due and says when to look again, if ever.
func (s *server) fireDue() (next time.Duration, any bool) {
	for {
		now, look := wallClock()
		due, then, any := s.mesh.dueAt(now)
		if len(due) == 0 {
			return min(look, time.UnixMilli(then).Sub(now)), any
		}
		for i := range due {
			if !s.holds() {
				return look, true
			}
			if err := s.fire(&due[i]); err != nil { // the journal: it says so itself
				return min(look, tendTime), true
			}
		}
	}
}

// dueAt lists what is due, in order, else when the next one is.
func (m *mesh) dueAt(now time.Time) (due []schedule, next int64, any bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, sc := range m.state.schedules {
		if sc.Due <= now.UnixMilli() {
			due = append(due, *sc)
		}
		if !any || sc.Due < next {
			next, any = sc.Due, true
		}
	}
	slices.SortFunc(due, bySchedule)
	return due, next, any
}

// fire sends what a schedule holds, once, for all its due times that have come. An error means that it is due still.
func (s *server) fire(sc *schedule) error {
	now, _ := wallClock()
	f, header := sc.firing(now)
	e := &entry{Fire: &f}
	err := s.stillThere(sc.To.At)
	if err == nil {
		s.address(e, sc, header)
		_, err = s.mesh.commit(e, synced)
	}
	if r := (*refusal)(nil); errors.As(err, &r) {
		// It is told once: the same failure every minute helps nobody.
		f.Failed = true
		e = &entry{Fire: &f}
		if !sc.Failing || f.Next == 0 {
			e.Store = []letter{s.notice(sc.From, fmt.Sprintf("not delivered (%s): %s to @%s (%s): %q", r.message, sc.Kind, sc.To.Box.name, header, clip(sc.Text, askExcerpt)))}
		}
		_, err = s.mesh.commit(e, synced)
	}
	switch {
	case errors.Is(err, errNotDue): // deleted meanwhile
		return nil
	case err != nil:
		return err
	case len(e.Queue) > 0:
		s.mesh.tending.Go(func() { // bounded by its timeout
			ctx, cancel := context.WithTimeout(s.calls, s.set.timing.probe+tendTime)
			defer cancel()
			if s.flush(ctx, sc.To.At) != nil {
				s.tendSoon()
			}
		})
	}
	return nil
}

// firing is what becomes of the schedule now, and what the header of its message says.
func (sc *schedule) firing(now time.Time) (f firing, header string) {
	f = firing{ID: sc.ID, Due: sc.Due}
	due, times := time.UnixMilli(sc.Due), 1
	if sc.Cron != "" {
		c, _ := parseCron(sc.Cron)
		if next := c.next(now); !next.IsZero() {
			f.Next = next.UnixMilli()
		}
		times, _ = c.missed(due.Add(-time.Millisecond), now)
	}
	header = fmt.Sprintf("scheduled %s; due %s", sc.ID, moment(sc.Due))
	if late := now.Sub(due); late >= lateAfter {
		header += "; late by " + span(now.Unix()-due.Unix(), late)
	}
	switch {
	case times >= missedLimit:
		header += fmt.Sprintf("; at least %d due times missed, sent once", times)
	case times > 1:
		header += fmt.Sprintf("; %d due times missed, sent once", times)
	}
	return f, header
}

// span is how long something took; a Duration ends at 292 years.
func span(seconds int64, d time.Duration) string {
	if days := seconds / (24 * 3600); days >= 2 {
		return fmt.Sprintf("%d days", days)
	}
	return d.Truncate(time.Second).String()
}

// moment is stamp with the milliseconds, when there are any.
func moment(ms int64) string {
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05.999Z07:00")
}

// stillThere refuses a checkout that has gone for good: nobody would ever fetch what is sent there.
func (s *server) stillThere(at place) error {
	if at == (place{}) {
		return nil
	}
	if _, err := s.rootOf(at); err == nil {
		return nil
	}
	return refuse("refused", "%q is no checkout of this repository any more", at.Root)
}

// address makes the letter of a schedule part of an entry: into a mailbox here, or on its way to another checkout.
func (s *server) address(e *entry, sc *schedule, header string) {
	id := map[string]string{"notify": "notif", "ask": "ask"}[sc.Kind]
	l := letter{
		Ref: randomHex(6), ID: s.mesh.newID(id), Kind: sc.Kind, From: address{Box: sc.From}, To: []boardName{sc.To.Box},
		Text: sc.Text, At: millis(), Scheduled: header, Unverified: sc.Unverified,
	}
	if sc.Kind == "ask" {
		e.Open = &thread{ID: l.ID, From: l.From, To: sc.To, Text: clip(l.Text, askExcerpt), At: l.At, Unverified: l.Unverified}
	}
	if sc.To.At == (place{}) {
		e.Store = []letter{l}
		return
	}
	out := s.outgoing(e, sc.To.At.Root, l)
	out.To = sc.To.At // which finds a checkout that was moved since
	// The same whoever fires: should two servers ever hand over the same firing, the other side stores one.
	out.Entry.Key = digest(fmt.Sprintf("%s %s %d", s.checkout.id, sc.ID, sc.Due))
	e.Queue = []outgoing{out}
}
