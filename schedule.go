package main

// Schedules: messages that are sent later, once or again and again.
//
// When one is due is a moment of the wall clock. Timers here run by another clock, which stands still in suspend and
// knows nothing of a clock that was set, so nobody sleeps longer than clockLook before looking at the wall clock again.
//
// Firing is one line of the journal: the schedule's next due time (or its end) and the stored message, or what another
// checkout's server has yet to be handed. Whoever reads the journal next finds both or neither. The line says which due
// time it is about, so of two firings of one due time the second is refused. A server that slept through a take-over
// gets no further than that line: its journal is not the one under the name, and whoever gives out the message, here or
// to another checkout, looks at the lease again.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	schedulesLimit = 1000
	clockLook      = time.Minute
	lateAfter      = time.Second // what a busy machine may take is not worth a word
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

var (
	errNoSchedule = errors.New("there is no such schedule")
	errNotDue     = errors.New("it is not due then")
)

// schedule is a message to be sent.
type schedule struct {
	ID      string    `json:"id"`
	From    boardName `json:"from"` // who created it, in this checkout
	To      address   `json:"to"`
	Kind    string    `json:"kind"` // notify, ask
	Text    string    `json:"text"`
	Due     int64     `json:"due"`             // milliseconds since 1970
	Order   int64     `json:"order,omitempty"` // of creation; apply gives it
	Cron    string    `json:"cron,omitempty"`
	Failing bool      `json:"failing,omitempty"` // the last firing failed, and the creator knows
}

// firing is what becomes of a schedule when it is due.
type firing struct {
	ID     string `json:"id"`
	Due    int64  `json:"due"`            // which of its due times this is
	Next   int64  `json:"next,omitempty"` // 0: there is none, it ends
	Failed bool   `json:"failed,omitempty"`
}

func (sc *schedule) valid() error {
	_, err := parseCron(sc.Cron)
	switch {
	case !strings.HasPrefix(sc.ID, "sched-") || !messageID.MatchString(sc.ID) || sc.Kind != "notify" && sc.Kind != "ask":
		return fmt.Errorf("bad schedule %.40q of kind %.40q", sc.ID, sc.Kind)
	case sc.Cron != "" && err != nil:
		return err
	case !sc.From.valid() || !sc.To.Box.valid() || len(sc.Text) > 3*textLimit || sc.Text != cleanMessage(sc.Text):
		return fmt.Errorf("schedule %s has no names, or a text that was not cleaned", sc.ID)
	}
	return nil
}

// checkSchedule finds what would keep an entry about schedules from being applied.
func (st *store) checkSchedule(e *entry) error {
	switch {
	case e.Schedule != nil && st.schedules[e.Schedule.ID] != nil:
		return errIDTaken
	case e.Schedule != nil && !e.Kept && len(st.schedules) >= schedulesLimit:
		return refuse("refused", "this checkout has %d schedules, the most it may: delete some", schedulesLimit)
	case e.Unschedule != "" && st.schedules[e.Unschedule] == nil:
		return errNoSchedule
	case e.Fire != nil && (st.schedules[e.Fire.ID] == nil || st.schedules[e.Fire.ID].Due != e.Fire.Due):
		return errNotDue
	}
	return nil
}

func (st *store) applySchedule(e *entry) {
	if e.Schedule != nil {
		sc := *e.Schedule
		if sc.Order == 0 {
			sc.Order = st.ordered + 1
		}
		st.ordered = max(st.ordered, sc.Order)
		st.schedules[sc.ID] = &sc
	}
	if e.Unschedule != "" {
		delete(st.schedules, e.Unschedule)
	}
	switch {
	case e.Fire == nil:
	case e.Fire.Next == 0:
		delete(st.schedules, e.Fire.ID)
	default:
		sc := *st.schedules[e.Fire.ID]
		sc.Due, sc.Failing = e.Fire.Next, e.Fire.Failed
		st.schedules[sc.ID] = &sc
	}
}

// moveSchedules is move, for the schedules of and for the worker.
func (st *store) moveSchedules(m move) {
	for id, sc := range st.schedules {
		moved := *sc
		if moved.From == m.From {
			moved.From = m.To
		}
		if moved.To.At == (place{}) && moved.To.Box == m.From {
			moved.To.Box = m.To
		}
		st.schedules[id] = &moved
	}
}

// schedulesOf says whether a name here has schedules, its own or for it.
func (st *store) schedulesOf(box boardName) bool {
	for _, sc := range st.schedules {
		if sc.From == box || sc.To.At == (place{}) && sc.To.Box == box {
			return true
		}
	}
	return false
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
	select {
	case m.scheduled <- struct{}{}:
	default:
	}
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

// bySchedule is the order in which schedules are sent: those of one moment as they were created.
func bySchedule(a, b schedule) int {
	return cmp.Or(cmp.Compare(a.Due, b.Due), cmp.Compare(a.Order, b.Order))
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
	if there, err := readCheckout(at.Root); err == nil && there.commonDir == s.checkout.commonDir || s.movedTo(at) != "" {
		return nil
	}
	return refuse("refused", "%q is no checkout of this repository any more", at.Root)
}

// address makes the letter of a schedule part of an entry: into a mailbox here, or on its way to another checkout.
func (s *server) address(e *entry, sc *schedule, header string) {
	id := map[string]string{"notify": "notif", "ask": "ask"}[sc.Kind]
	l := letter{
		Ref: randomHex(6), ID: s.mesh.newID(id), Kind: sc.Kind, From: address{Box: sc.From}, To: []boardName{sc.To.Box},
		Text: sc.Text, At: millis(), Scheduled: header,
	}
	if sc.Kind == "ask" {
		e.Open = &thread{ID: l.ID, From: l.From, To: sc.To, Text: clip(l.Text, askExcerpt), At: l.At}
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

type scheduleOnceInput struct {
	Peer   string `json:"to_peer" required:"true" doc:"name or peer_id of the recipient"`
	Text   string `json:"text" required:"true" doc:"the message"`
	FireAt string `json:"fire_at" required:"true" doc:"ISO 8601, UTC unless it has an offset"`
	Kind   string `json:"kind" doc:"ask opens a thread" enum:"notify,ask" default:"notify"`
	Circle string `json:"circle" doc:"its circle, when two peers share the name"`
}

type scheduleSelfInput struct {
	Text   string `json:"text" required:"true" doc:"the message"`
	FireAt string `json:"fire_at" doc:"ISO 8601, UTC unless it has an offset; this or cron"`
	Cron   string `json:"cron" doc:"five fields in UTC, or @daily and the like"`
	Kind   string `json:"kind" doc:"ask opens a thread" enum:"notify,ask" default:"notify"`
	Circle string `json:"circle" doc:"your own circle, if given"`
}

type scheduleCronInput struct {
	Peer   string `json:"to_peer" required:"true" doc:"name or peer_id of the recipient"`
	Text   string `json:"text" required:"true" doc:"the message"`
	Cron   string `json:"cron" required:"true" doc:"five fields in UTC, or @daily and the like"`
	Kind   string `json:"kind" doc:"ask opens a thread" enum:"notify,ask" default:"notify"`
	Circle string `json:"circle" doc:"its circle, when two peers share the name"`
}

type scheduleListInput struct {
	Mine bool `json:"mine_only" doc:"only what was created under your name in this checkout" default:"true"`
	Cron bool `json:"include_cron" doc:"also the column cron" default:"false"`
}

type scheduleDeleteInput struct {
	ID string `json:"schedule_id" required:"true" doc:"id of the schedule"`
}

// scheduleRow is a row of schedule_list; its fields are the columns, in order.
type scheduleRow struct {
	ID     string  `json:"schedule_id" doc:"what schedule_delete takes"`
	From   string  `json:"from_peer" doc:"name of the peer that created it"`
	To     string  `json:"to_peer" doc:"name of the recipient"`
	Kind   string  `json:"kind" doc:"what is sent" enum:"notify,ask"`
	FireAt string  `json:"fire_at" doc:"when it is due next, RFC 3339 in UTC"`
	Text   string  `json:"text" doc:"the message"`
	Cron   *string `json:"cron,omitempty" doc:"when it recurs, empty for once; only if asked for"`
}

type schedulesOutput struct {
	Schedules []scheduleRow `json:"schedules" doc:"the schedules, the next one first"`
	cron      bool
}

func (o schedulesOutput) blocks() []string {
	text, note := "schedule_id\tfrom_peer\tto_peer\tkind\tfire_at\ttext", ""
	if o.cron {
		text += "\tcron"
	}
	size := len(text)
	for i, row := range o.Schedules {
		columns := []string{row.ID, row.From, row.To, row.Kind, row.FireAt, row.Text}
		if row.Cron != nil {
			columns = append(columns, *row.Cron)
		}
		for i := range columns {
			columns[i] = oneCell(columns[i])
		}
		line := strings.Join(columns, "\t")
		if size += utf8.RuneCountInString(line) + 1; size > listingLimit {
			note = fmt.Sprintf("%d more schedules are left out here: GET /api/v1/schedules lists all", len(o.Schedules)-i)
			break
		}
		text += "\n" + line
	}
	return withNote(text, note)
}

// scheduleOnce sends a message to a peer later.
func (s *server) scheduleOnce(ctx context.Context, in scheduleOnceInput) (sentOutput, error) {
	return s.schedule(ctx, scheduleSelfInput{Text: in.Text, FireAt: in.FireAt, Kind: in.Kind}, true, s.recipient(ctx, in.Peer, in.Circle))
}

// scheduleCron sends a message to a peer again and again.
func (s *server) scheduleCron(ctx context.Context, in scheduleCronInput) (sentOutput, error) {
	return s.schedule(ctx, scheduleSelfInput{Text: in.Text, Cron: in.Cron, Kind: in.Kind}, false, s.recipient(ctx, in.Peer, in.Circle))
}

// recipient looks up whom a schedule is for.
func (s *server) recipient(ctx context.Context, name, circle string) func(actor) (address, error) {
	return func(a actor) (address, error) {
		if strings.TrimSpace(name) == "" {
			return address{}, refuse("invalid_input", "to_peer: is blank; give a name or peer_id that list_peers shows")
		}
		p, err := s.resolve(ctx, a, name, circle)
		if err != nil {
			return address{}, err
		}
		return s.addressOf(p), nil
	}
}

// scheduleSelf sends the caller a message.
func (s *server) scheduleSelf(ctx context.Context, in scheduleSelfInput) (sentOutput, error) {
	if callerOf(ctx) == nil {
		return sentOutput{}, refuse("refused", "this call comes from nobody on the board: connect as an MCP client and call in that session, or use schedule_create")
	}
	once := in.FireAt != ""
	if once == (in.Cron != "") {
		return sentOutput{}, refuse("invalid_input", "fire_at, cron: give exactly one of them, for example fire_at %q or cron %q", stamp(time.Now().Add(time.Hour)), "30 9 * * mon-fri")
	}
	return s.schedule(ctx, in, once, func(a actor) (address, error) {
		if in.Circle != "" && in.Circle != a.box.circle {
			return address{}, refuse("invalid_input", "circle: %s is not your circle, which is %q; leave it out", quote(in.Circle), a.box.circle)
		}
		return address{Box: a.box}, nil
	})
}

// scheduler is who acts in a call about schedules.
func (s *server) scheduler(ctx context.Context) (actor, error) {
	if s.lease == nil {
		return actor{}, refuse("refused", "this process serves its client alone (%s): it would not be here when a schedule is due, and knows none", s.why)
	}
	return s.actor(ctx)
}

// schedule creates a schedule.
func (s *server) schedule(ctx context.Context, in scheduleSelfInput, once bool, to func(actor) (address, error)) (sentOutput, error) {
	a, err := s.scheduler(ctx)
	if err != nil {
		return sentOutput{}, err
	}
	l, err := s.letterFrom(a, in.Kind, "", "text", in.Text)
	if err != nil {
		return sentOutput{}, err
	}
	sc := schedule{From: a.box, Kind: in.Kind, Text: l.Text}
	note, err := sc.set(in, once)
	if err != nil {
		return sentOutput{}, err
	}
	if sc.To, err = to(a); err != nil {
		return sentOutput{}, err
	}
	for {
		sc.ID = s.mesh.newID("sched")
		switch _, err := s.mesh.commit(&entry{Schedule: &sc}, synced); {
		case errors.Is(err, errIDTaken):
		case err != nil:
			return sentOutput{}, s.notStored(err)
		default:
			s.runSoon()
			return sentOutput{sc.ID, note}, nil
		}
	}
}

// set sets when a new schedule is due.
func (sc *schedule) set(in scheduleSelfInput, once bool) (note string, err error) {
	now, _ := wallClock()
	if once {
		at, err := parseFireAt(in.FireAt, now)
		if err != nil {
			return "", err
		}
		sc.Due = at.Add(time.Millisecond - 1).UnixMilli() // never early
		if now.Sub(at) >= lateAfter {
			note = "late: " + moment(sc.Due) + " is past, so it is sent at once"
		}
		return note, nil
	}
	c, err := parseCron(in.Cron)
	if err != nil {
		return "", err
	}
	next := c.next(now)
	if next.IsZero() {
		return "", refuse("invalid_input", "cron: %s is never due up to the year %d, %s", quote(in.Cron), lastYear, cronExample)
	}
	sc.Cron, sc.Due = c.text, next.UnixMilli()
	return "", nil
}

// scheduleList lists the schedules of this checkout. Who is nobody on the board reads those of the human.
func (s *server) scheduleList(ctx context.Context, in scheduleListInput) (schedulesOutput, error) {
	if callerOf(ctx) == nil {
		ctx = asHuman(ctx)
	}
	a, err := s.scheduler(ctx)
	if err != nil {
		return schedulesOutput{}, err
	}
	out := schedulesOutput{Schedules: []scheduleRow{}, cron: in.Cron}
	for _, sc := range s.mesh.schedules() {
		if in.Mine && sc.From != a.box {
			continue
		}
		row := scheduleRow{ID: sc.ID, From: sc.From.name, To: sc.To.Box.name, Kind: sc.Kind, FireAt: moment(sc.Due), Text: sc.Text}
		if in.Cron {
			row.Cron = &sc.Cron
		}
		out.Schedules = append(out.Schedules, row)
	}
	return out, nil
}

// schedules lists all of them, the next one first.
func (m *mesh) schedules() (list []schedule) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, sc := range m.state.schedules {
		list = append(list, *sc)
	}
	slices.SortFunc(list, bySchedule)
	return list
}

// scheduleDelete ends a schedule.
func (s *server) scheduleDelete(ctx context.Context, in scheduleDeleteInput) (saidOutput, error) {
	a, err := s.scheduler(ctx)
	if err != nil {
		return saidOutput{}, err
	}
	id := strings.TrimPrefix(strings.TrimSpace(in.ID), "#")
	var mine []string
	found := (*schedule)(nil)
	for _, sc := range s.mesh.schedules() {
		if sc.ID == id {
			found = &sc
		}
		if sc.From == a.box && len(mine) < 10 {
			mine = append(mine, sc.ID)
		}
	}
	if found != nil && found.From != a.box && !a.crosses() {
		return saidOutput{}, refuse("refused", "schedule %s is that of %q: only its creator may delete it, or a peer whose role is orchestrator, service or human", id, found.From.name)
	}
	err = errNoSchedule
	if found != nil {
		_, err = s.mesh.commit(&entry{Unschedule: id}, synced)
	}
	switch {
	case errors.Is(err, errNoSchedule):
		yours := "; you have none"
		if mine != nil {
			yours = "; yours: " + strings.Join(mine, ", ")
		}
		return saidOutput{}, refuse("not_found", "there is no schedule %s (one that has been sent for the last time is gone)%s", quote(id), yours)
	case err != nil:
		return saidOutput{}, s.notStored(err)
	}
	return saidOutput{Text: "deleted schedule " + id}, nil
}
