package main

// What the mesh remembers: names, mailboxes, threads, and what is on its way to other checkouts.
//
// All of it changes by entries, one after the other, and by nothing that an entry does not say: an entry is written to
// the journal first and applied afterwards, so applying what the journal holds gives the same state again. That is why
// apply looks at no clock but the entry's own, and refuses by what it finds, not by what the caller found before: of two
// answers to one question the first in the journal is the one that counts, today and after a crash.

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	keepTime     = 24 * time.Hour // of messages, threads, names of peers that have left, keys of deliveries
	mailboxLimit = 1000           // messages in a mailbox, on the way to one, and open asks of a peer
	textLimit    = 16384          // bytes of a message
	textsLimit   = 64 << 20       // bytes of all messages in the mailboxes of a checkout
	threadsLimit = 4096           // threads that are remembered, and as many that are open
	keysLimit    = 65536          // keys of deliveries that are remembered
	namesLimit   = 4096           // names that are remembered
)

var (
	errNoThread     = errors.New("there is no such thread")
	errThreadClosed = errors.New("the thread is closed already")
	errIDTaken      = errors.New("the id is taken")
)

// applied is what an entry came to.
type applied struct {
	seen   bool        // its key was known: it had been applied before
	stored []boardName // mailboxes that have got a letter
	full   []boardName // mailboxes that could not take one
	handed bool        // somebody waited for it and has it by now
}

// store is everything the journal keeps. Whoever uses it holds the mutex of the mesh.
type store struct {
	names   map[boardName]*nameRecord
	boxes   map[boardName][]*letter // in the order of arrival
	size    int                     // bytes of text in them
	threads map[string]*thread
	out     []*outgoing // in the order they were sent
	keys    map[string]int64
	carried map[int64]*carriage // not confirmed
	swept   int64

	schedules map[string]*schedule
	ordered   int64 // the latest order given to one

	spawns  map[string]*spawned
	retired map[string]int64 // identities, and since when
}

func newStore() *store {
	return &store{
		names: map[boardName]*nameRecord{}, boxes: map[boardName][]*letter{}, threads: map[string]*thread{},
		keys: map[string]int64{}, carried: map[int64]*carriage{}, schedules: map[string]*schedule{},
		spawns: map[string]*spawned{}, retired: map[string]int64{},
	}
}

func expired(at, now int64) bool { return now-at >= keepTime.Milliseconds() }

// apply changes the state as the entry says, or not at all.
func (st *store) apply(e *entry) (done applied, err error) {
	st.sweep(e.At)
	if at, ok := st.keys[e.Key]; ok && !expired(at, e.At) {
		return applied{seen: true}, nil
	}
	if err := st.check(e); err != nil {
		return done, err
	}
	if e.Key != "" {
		st.keys[e.Key] = e.At
	}
	if e.Name != nil {
		record := *e.Name
		st.names[record.Box] = &record
	}
	// First what ends, then what begins: a follow-up closes its prior thread before it opens its own.
	if e.Close != nil {
		st.close(e, &done)
	}
	if e.Open != nil {
		t := *e.Open
		st.threads[t.ID] = &t
	}
	for i := range e.Store {
		st.put(&e.Store[i], e.At, e.Kept, &done)
	}
	for i := range e.Queue {
		o := e.Queue[i]
		st.out = append(st.out, &o)
	}
	if len(e.Sent) > 0 {
		st.out = slices.DeleteFunc(st.out, func(o *outgoing) bool { return slices.Contains(e.Sent, o.Entry.Key) })
	}
	if e.Carry != nil {
		st.carry(e.Carry)
	}
	for _, n := range e.Confirm {
		st.confirm(n)
	}
	if e.Move != nil {
		st.move(*e.Move)
	}
	if e.Forget != nil {
		st.forget(*e.Forget)
	}
	st.applySchedule(e)
	st.applySpawn(e)
	st.bound()
	return done, nil
}

// bound forgets before its time what there is too much of: the oldest closed threads and keys. It looks twice as far apart
// as it must, so that an entry costs little.
func (st *store) bound() {
	if len(st.keys) > 2*keysLimit {
		ages := slices.Sorted(maps.Values(st.keys))
		maps.DeleteFunc(st.keys, func(_ string, at int64) bool { return at < ages[len(ages)-keysLimit] })
	}
	if len(st.threads) >= 2*threadsLimit {
		var closed []int64
		for _, t := range st.threads {
			if t.Closed != 0 {
				closed = append(closed, t.Closed)
			}
		}
		slices.Sort(closed)
		newest := closed[min(len(closed), len(st.threads)-threadsLimit):]
		maps.DeleteFunc(st.threads, func(_ string, t *thread) bool {
			return t.Closed != 0 && (len(newest) == 0 || t.Closed < newest[0])
		})
	}
}

// check finds whatever would keep an entry from being applied whole.
func (st *store) check(e *entry) error {
	if err := cmp.Or(st.checkSchedule(e), st.checkSpawn(e), st.checkForget(e)); err != nil {
		return err
	}
	if e.Close != nil {
		t := st.threads[e.Close.ID]
		switch {
		case t == nil:
			return errNoThread
		case t.Closed != 0:
			return errThreadClosed
		case e.Close.By == "recipient" && !e.Kept && e.Close.Letter != nil && t.Home == place{} && st.count(t.From.Box, e.At) >= mailboxLimit:
			return mailboxFull(t.From.Box)
		}
	}
	if e.Open != nil {
		if st.threads[e.Open.ID] != nil {
			return errIDTaken
		}
		if !e.Kept && len(st.threads) >= 2*threadsLimit {
			return refuse("refused", "%d threads are open in this checkout, the most that may: ack those that no longer matter", len(st.threads))
		}
		if !e.Kept && e.Open.Home == (place{}) && st.openAsks(e.Open.From.Box) >= mailboxLimit {
			return refuse("refused", "%q has %d open asks, the most a peer may: ack those that no longer matter", e.Open.From.Box.name, mailboxLimit)
		}
	}
	if e.Kept {
		return nil
	}
	if st.size+e.size() > textsLimit {
		return errTextsFull
	}
	// A message to one is refused when there is no room; one to many reaches those who have room.
	if len(e.Store) == 1 && len(e.Store[0].To) == 1 && !e.Store[0].Notice && st.count(e.Store[0].To[0], e.At) >= mailboxLimit {
		return mailboxFull(e.Store[0].To[0])
	}
	for i := range e.Queue {
		if !e.Queue[i].isNotice() && st.onTheWay(e.Queue[i].To) >= mailboxLimit {
			return refuse("refused", "%d messages to %q wait for a server there, the most that may: nothing was stored", mailboxLimit, e.Queue[i].To.Root)
		}
	}
	return nil
}

var errTextsFull = refuse("refused", "the mailboxes of this checkout hold %d MiB of messages, the most that they may, until some are read; nothing was stored", textsLimit>>20)

// size is what an entry adds to the mailboxes of this checkout. What only majordomus says is not counted: it is short, and
// somebody waits for it.
func (e *entry) size() (n int) {
	for i := range e.Store {
		if l := &e.Store[i]; !l.Notice {
			n += len(l.Text) * len(l.To)
		}
	}
	if e.Close != nil && e.Close.By == "recipient" && e.Close.Letter != nil {
		n += len(e.Close.Letter.Text)
	}
	return n
}

func mailboxFull(box boardName) error {
	return refuse("refused", "the mailbox of %q is full: %d messages wait there until it reads them; nothing was stored", box.name, mailboxLimit)
}

// count is how many messages wait in a mailbox, those from majordomus itself apart.
func (st *store) count(box boardName, now int64) int {
	n := 0
	if len(st.boxes[box]) >= mailboxLimit { // the common case is cheap
		for _, l := range st.boxes[box] {
			if !l.Notice && !expired(l.At, now) {
				n++
			}
		}
	}
	return n
}

// openAsks is how many asks of a peer are open; like the other counts it is only made when there may be too many.
func (st *store) openAsks(box boardName) int {
	n := 0
	if len(st.threads) >= mailboxLimit {
		for _, t := range st.threads {
			if t.Closed == 0 && t.Home == (place{}) && t.From.Box == box {
				n++
			}
		}
	}
	return n
}

func (st *store) onTheWay(to place) int {
	n := 0
	if len(st.out) >= mailboxLimit {
		for _, o := range st.out {
			if o.To.same(to) {
				n++
			}
		}
	}
	return n
}

// private goes through the names here that have messages, or something that brings some: open asks of either side, messages
// on their way, schedules, spawned processes. A name may come more than once.
func (st *store) private(yield func(boardName) bool) {
	for box := range st.boxes {
		if !yield(box) {
			return
		}
	}
	for _, sc := range st.schedules {
		if !yield(sc.From) || sc.To.At == (place{}) && !yield(sc.To.Box) {
			return
		}
	}
	for _, o := range st.out {
		if !yield(o.Sender) {
			return
		}
	}
	for _, t := range st.threads {
		for _, side := range []address{t.From, t.To} {
			if t.Closed == 0 && side.At == (place{}) && !yield(side.Box) {
				return
			}
		}
	}
	for _, p := range st.spawns {
		if !yield(p.By) {
			return
		}
	}
}

// put lays a letter into each of its mailboxes that has room; where it must, also into a full one.
func (st *store) put(l *letter, now int64, must bool, done *applied) {
	for _, box := range l.To {
		if !must && !l.Notice && st.count(box, now) >= mailboxLimit {
			done.full = append(done.full, box)
			continue
		}
		if l.Notice && len(st.boxes[box]) >= 2*mailboxLimit { // nobody reads them, and a schedule may fail every minute
			continue
		}
		one := *l
		one.To = []boardName{box}
		one.Again = one.Again || len(one.Carriers) > 0
		st.boxes[box] = append(st.boxes[box], &one)
		st.size += len(one.Text)
		done.stored = append(done.stored, box)
		for _, n := range one.Carriers { // from a compacted journal
			if st.carried[n] == nil {
				st.carried[n] = &carriage{Number: n, Box: box}
			}
			st.carried[n].Refs = append(st.carried[n].Refs, one.Ref)
		}
	}
}

// close closes the thread that check has found open, and tells the other side, where that is here. An ask that its
// asker withdraws before anybody has fetched it is never seen.
func (st *store) close(e *entry, done *applied) {
	t := st.threads[e.Close.ID]
	t.Closed, t.By = e.At, e.Close.By
	l := e.Close.Letter
	if l == nil {
		return
	}
	told := *l // where it goes is the thread's to say: names may have moved since it was written
	switch e.Close.By {
	case "asker":
		if t.To.At != (place{}) || st.retract(t) {
			return
		}
		told.To = []boardName{t.To.Box}
	default:
		if t.Home != (place{}) {
			return
		}
		told.To = []boardName{t.From.Box}
	}
	st.put(&told, e.At, e.Close.By == "asker", done)
}

// retract takes an ask out of its recipient's mailbox, unless it may have been seen.
func (st *store) retract(t *thread) bool {
	letters := st.boxes[t.To.Box]
	i := slices.IndexFunc(letters, func(l *letter) bool { return l.Kind == "ask" && l.ID == t.ID })
	if i < 0 || letters[i].held != 0 || letters[i].Carriers != nil {
		return false
	}
	st.discard(t.To.Box, func(l *letter) bool { return l == letters[i] })
	return true
}

// carry notes on each letter of a parcel that the parcel carried it. Letters that are gone meanwhile are left out.
func (st *store) carry(c *carriage) {
	kept := carriage{Number: c.Number, Box: c.Box}
	note := func(box boardName) {
		for _, l := range st.boxes[box] {
			if len(kept.Refs) == len(c.Refs) {
				break // mostly they are the first ones
			}
			if slices.Contains(c.Refs, l.Ref) {
				l.Carriers = append(slices.Clip(l.Carriers), c.Number)
				kept.Box, kept.Refs = box, append(kept.Refs, l.Ref)
			}
		}
	}
	note(c.Box)
	for box := range st.boxes {
		if kept.Refs == nil { // the mailbox has been moved just now
			note(box)
		}
	}
	if kept.Refs != nil {
		st.carried[c.Number] = &kept
	}
}

// confirm consumes the letters of a parcel, also those that another one carries by now: they have been read.
func (st *store) confirm(n int64) {
	c := st.carried[n]
	if c == nil {
		return
	}
	delete(st.carried, n)
	st.discard(c.Box, func(l *letter) bool { return slices.Contains(c.Refs, l.Ref) })
}

// discard takes letters out of a mailbox.
func (st *store) discard(box boardName, which func(*letter) bool) {
	letters := slices.DeleteFunc(st.boxes[box], func(l *letter) bool {
		if !which(l) {
			return false
		}
		st.size -= len(l.Text)
		return true
	})
	if st.boxes[box] = letters; len(letters) == 0 {
		delete(st.boxes, box)
	}
}

// move makes one mailbox of two, in the order of sending, and one party of two in every thread.
func (st *store) move(m move) {
	if letters := st.boxes[m.From]; letters != nil {
		for _, l := range letters {
			l.To = []boardName{m.To}
		}
		all := append(st.boxes[m.To], letters...)
		slices.SortStableFunc(all, func(a, b *letter) int { return cmp.Compare(a.At, b.At) })
		st.boxes[m.To] = all
		delete(st.boxes, m.From)
	}
	for _, c := range st.carried {
		if c.Box == m.From {
			c.Box = m.To
		}
	}
	for _, t := range st.threads {
		for _, side := range []*address{&t.From, &t.To} {
			if side.At == (place{}) && side.Box == m.From {
				side.Box = m.To
			}
		}
	}
	for _, o := range st.out {
		if o.Sender == m.From {
			o.Sender = m.To
		}
	}
	st.moveSchedules(m)
}

// sweep forgets what has been kept for long enough. What somebody is to be told of lapses instead: lapse.go.
func (st *store) sweep(now int64) {
	if now-st.swept < time.Minute.Milliseconds() {
		return
	}
	st.swept = now
	for box := range st.boxes {
		st.discard(box, func(l *letter) bool { return expired(l.At, now) && !l.lapses() })
	}
	maps.DeleteFunc(st.keys, func(_ string, at int64) bool { return expired(at, now) })
	maps.DeleteFunc(st.threads, func(_ string, t *thread) bool {
		return t.Closed != 0 && expired(t.Closed, now) || t.Home != (place{}) && expired(t.At, now)
	})
	st.sweepCarried()
	maps.DeleteFunc(st.names, func(box boardName, r *nameRecord) bool {
		return r.Left != 0 && expired(r.Left, now) && st.boxes[box] == nil
	})
	if excess := len(st.names) - namesLimit; excess > 0 { // anonymous sessions come and go by the thousand
		var left []*nameRecord
		for box, r := range st.names {
			if r.Left != 0 && st.boxes[box] == nil {
				left = append(left, r)
			}
		}
		slices.SortFunc(left, func(a, b *nameRecord) int {
			return cmp.Or(cmp.Compare(a.Left, b.Left), strings.Compare(a.Box.name, b.Box.name))
		})
		for _, r := range left[:min(excess, len(left))] {
			delete(st.names, r.Box)
		}
	}
}

// sweepCarried forgets the parcels of which nothing is left.
func (st *store) sweepCarried() {
	there := map[string]bool{}
	for _, letters := range st.boxes {
		for _, l := range letters {
			if l.Carriers != nil {
				there[l.Ref] = true
			}
		}
	}
	maps.DeleteFunc(st.carried, func(_ int64, c *carriage) bool {
		return !slices.ContainsFunc(c.Refs, func(ref string) bool { return there[ref] })
	})
}

// entries gives what makes the same state out of nothing, for a journal that is written anew.
func (st *store) entries(each func(*entry)) {
	for _, r := range st.names {
		each(&entry{At: st.swept, Name: r})
	}
	for _, t := range st.threads {
		each(&entry{At: st.swept, Kept: true, Open: t})
	}
	for _, letters := range st.boxes {
		for _, l := range letters {
			each(&entry{At: st.swept, Kept: true, Store: []letter{*l}})
		}
	}
	for _, o := range st.out {
		each(&entry{At: st.swept, Kept: true, Queue: []outgoing{*o}})
	}
	for _, sc := range st.schedules {
		each(&entry{At: st.swept, Kept: true, Schedule: sc})
	}
	st.spawnEntries(each)
	for key, at := range st.keys {
		each(&entry{At: at, Key: key})
	}
}

// vital says whether the state holds more than names: what somebody was promised.
func (st *store) vital() bool {
	return len(st.boxes) > 0 || len(st.threads) > 0 || len(st.out) > 0 || len(st.keys) > 0 || len(st.schedules) > 0 || len(st.spawns) > 0 || len(st.retired) > 0
}
