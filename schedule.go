package main

// Schedules: messages that are sent later, once or again and again: what is kept of them, and the tools. fire.go sends
// them.

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

const schedulesLimit = 1000 // of a checkout

var (
	errNoSchedule = errors.New("there is no such schedule")
	errNotDue     = errors.New("it is not due then")
)

// schedule is a message to be sent.
type schedule struct {
	ID         string    `json:"id"`
	From       boardName `json:"from"` // who created it, in this checkout
	To         address   `json:"to"`
	Kind       string    `json:"kind"` // notify, ask
	Text       string    `json:"text"`
	Due        int64     `json:"due"`             // milliseconds since 1970
	Order      int64     `json:"order,omitempty"` // of creation; apply gives it
	Cron       string    `json:"cron,omitempty"`
	Unverified bool      `json:"unverified,omitempty"` // created without the token
	Failing    bool      `json:"failing,omitempty"`    // the last firing failed, and the creator knows
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
	case !isID(sc.ID, "sched") || sc.Kind != "notify" && sc.Kind != "ask":
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
	ID      string  `json:"schedule_id" doc:"what schedule_delete takes"`
	From    string  `json:"from_peer" doc:"name of the peer that created it"`
	Strange bool    `json:"unverified,omitempty" doc:"whether that peer came without the token"`
	To      string  `json:"to_peer" doc:"name of the recipient"`
	Kind    string  `json:"kind" doc:"what is sent" enum:"notify,ask"`
	FireAt  string  `json:"fire_at" doc:"when it is due next, RFC 3339 in UTC"`
	Text    string  `json:"text,omitempty" doc:"the message; left out where it is not for the caller, see note"`
	Cron    *string `json:"cron,omitempty" doc:"when it recurs, empty for once; only if asked for"`
}

type schedulesOutput struct {
	Schedules []scheduleRow `json:"schedules" doc:"the schedules, the next one first"`
	Note      string        `json:"note,omitempty" doc:"why texts are left out"`
	cron      bool
}

func (o schedulesOutput) blocks() []string {
	text, note := "schedule_id\tfrom_peer\tto_peer\tkind\tfire_at\ttext", o.Note
	if o.cron {
		text += "\tcron"
	}
	size := len(text)
	for i, row := range o.Schedules {
		from := row.From
		if row.Strange {
			from += " (unverified)"
		}
		columns := []string{row.ID, from, row.To, row.Kind, row.FireAt, row.Text}
		if row.Cron != nil {
			columns = append(columns, *row.Cron)
		}
		for i := range columns {
			columns[i] = oneCell(columns[i])
		}
		line := strings.Join(columns, "\t")
		if size += utf8.RuneCountInString(line) + 1; size > listingLimit {
			note = joined(note, fmt.Sprintf("%d more schedules are left out here: GET /api/v1/schedules lists all", len(o.Schedules)-i))
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
		if r := (*refusal)(nil); errors.As(err, &r) {
			err = refuse(r.code, "to_peer: %s", strings.NewReplacer("nothing was sent", "nothing is scheduled", "peer_name: ", "").Replace(r.message))
		}
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
	if _, schedules := s.mesh.held(); a.stranger() && schedules >= schedulesLimit/2 {
		return sentOutput{}, refuse("refused", "this checkout has %d schedules, the most that an unverified session may add to", schedules)
	}
	sc := schedule{From: a.box, Kind: in.Kind, Text: l.Text, Unverified: l.Unverified}
	note, err := sc.set(in, once)
	if err != nil {
		return sentOutput{}, err
	}
	if sc.To, err = to(a); err != nil {
		return sentOutput{}, err
	}
	for {
		sc.ID = s.mesh.newID("sched")
		switch _, err := s.commitFor(ctx, &entry{Schedule: &sc}); {
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

// scheduleList lists the schedules of this checkout. Who is nobody on the board reads those of the human. What they say is
// for the two that they are between, and the user, as with asks: everybody on this machine can call.
func (s *server) scheduleList(ctx context.Context, in scheduleListInput) (schedulesOutput, error) {
	n := callerOf(ctx)
	known := n != nil && n.trusted || n == nil && ctx.Value(humanKey{}) != nil
	a := actor{box: human, role: "human"} // who only looks is not noted as being here
	if n != nil {
		var err error
		if a, err = s.scheduler(ctx); err != nil {
			return schedulesOutput{}, err
		}
	}
	out := schedulesOutput{Schedules: []scheduleRow{}, cron: in.Cron}
	for _, sc := range s.mesh.schedules() {
		if in.Mine && sc.From != a.box {
			continue
		}
		row := scheduleRow{ID: sc.ID, From: sc.From.name, Strange: sc.Unverified, To: sc.To.Box.name, Kind: sc.Kind, FireAt: moment(sc.Due), Text: sc.Text}
		if in.Cron {
			row.Cron = &sc.Cron
		}
		if !known && (n == nil || sc.From != a.box && sc.To != (address{Box: a.box})) {
			row.Text, out.Note = "", "texts are left out that are between others: this call came without the token of this server's lease file"
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

// bySchedule is the order in which schedules are sent: those of one moment as they were created.
func bySchedule(a, b schedule) int {
	return cmp.Or(cmp.Compare(a.Due, b.Due), cmp.Compare(a.Order, b.Order))
}

// scheduleDelete ends a schedule.
func (s *server) scheduleDelete(ctx context.Context, in scheduleDeleteInput) (saidOutput, error) {
	a, err := s.scheduler(ctx)
	if err != nil {
		return saidOutput{}, err
	}
	id := strings.TrimPrefix(strings.TrimSpace(in.ID), "#")
	if id == "" {
		return saidOutput{}, refuse("invalid_input", "schedule_id: is blank; give one that schedule_list shows")
	}
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
		_, err = s.commitFor(ctx, &entry{Unschedule: id})
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
