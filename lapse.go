package main

// What nobody has fetched, answered or taken in time lapses, and whoever waits for it is told: an open ask, a message that
// was not read, one that no server took. Nothing is dropped in silence but what nobody waits for.

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// lapseLook is how long nobody looks, though nothing here is about to lapse: what another server hands over may have
	// waited there for almost as long as it is kept.
	lapseLook   = time.Hour
	lapseListed = 10 // messages that one notice names
)

var errNotThere = errors.New("the message is not there any more")

// lapses says whether a letter's sender is told when nobody reads it. An ask lapses with its thread, and majordomus itself
// waits for nothing.
func (l *letter) lapses() bool { return l.Kind != "ask" && !l.Notice }

// isNotice says whether what waits for another server is a word of this one's own.
func (o *outgoing) isNotice() bool { return len(o.Entry.Store) > 0 && o.Entry.Store[0].Notice }

// itself is who sends a notice.
var itself = boardName{"default", "majordomus"}

// notice is a letter from majordomus itself.
func (s *server) notice(to boardName, text string) letter {
	return letter{
		Ref: randomHex(6), ID: s.mesh.newID("notif"), Kind: "notify", Notice: true,
		From: address{Box: itself}, To: []boardName{to}, Text: cleanMessage(text), At: millis(),
	}
}

// unread is what one sender wrote to one mailbox here and nobody has read in time.
type unread struct {
	from    address
	to      boardName
	letters []letter
}

// checkForget finds out whether a letter has been read after all.
func (st *store) checkForget(e *entry) error {
	if e.Forget == nil {
		return nil
	}
	for _, ref := range e.Forget.Refs {
		if !slices.ContainsFunc(st.boxes[e.Forget.Box], func(l *letter) bool { return l.Ref == ref }) {
			return errNotThere
		}
	}
	return nil
}

func (st *store) forget(f forgetting) {
	st.discard(f.Box, func(l *letter) bool { return slices.Contains(f.Refs, l.Ref) })
	st.sweepCarried()
}

// lapsed lists the open threads of this checkout, what is on its way from here and what lies in mailboxes here, that are
// too old; next is the time of the oldest one that is not.
func (st *store) lapsed(now int64) (threads []thread, out []outgoing, mail []unread, next int64) {
	late := func(at int64) bool {
		if !expired(at, now) && (next == 0 || at < next) {
			next = at
		}
		return expired(at, now)
	}
	for _, t := range st.threads {
		if t.Closed == 0 && t.Home == (place{}) && late(t.At) {
			threads = append(threads, *t)
		}
	}
	for _, o := range st.out {
		if late(o.Entry.At) {
			out = append(out, *o)
		}
	}
	for box, letters := range st.boxes {
		for _, l := range letters {
			if !l.lapses() || !late(l.At) {
				continue
			}
			i := slices.IndexFunc(mail, func(u unread) bool { return u.from == l.From && u.to == box })
			if i < 0 {
				i, mail = len(mail), append(mail, unread{from: l.From, to: box})
			}
			mail[i].letters = append(mail[i].letters, *l)
		}
	}
	slices.SortFunc(mail, func(a, b unread) int { return cmp.Compare(a.letters[0].At, b.letters[0].At) })
	return threads, out, mail, next
}

// lapse sees to what is too old, and says when to look again.
func (s *server) lapse() time.Duration {
	m := s.mesh
	m.mu.Lock()
	threads, out, mail, next := m.state.lapsed(millis())
	m.mu.Unlock()
	for _, o := range out {
		e := &entry{Sent: []string{o.Entry.Key}}
		if o.Entry.Open == nil && !o.isNotice() { // an ask lapses with its thread
			e.Store = []letter{s.notice(o.Sender, fmt.Sprintf("not delivered: no server took it within %v: %s", keepTime, o.Entry.summary()))}
		}
		if _, err := m.commit(e, synced); err != nil {
			return time.Minute
		}
	}
	for _, t := range threads {
		told := s.notice(t.From.Box, fmt.Sprintf("your ask #%s to @%s has lapsed: nobody answered within %v: %q", t.ID, t.To.Box.name, keepTime, t.Text))
		if _, err := m.commit(&entry{Close: &closing{ID: t.ID, By: "lapse", Letter: &told}}, synced); err != nil && !errors.Is(err, errThreadClosed) {
			return time.Minute
		}
	}
	for i := range mail {
		if _, err := m.commit(s.forgetting(&mail[i]), synced); err != nil && !errors.Is(err, errNotThere) {
			return time.Minute
		}
	}
	if next == 0 {
		return keepTime
	}
	return max(time.Second, time.Until(time.UnixMilli(next).Add(keepTime)))
}

// forgetting takes what was not read out of its mailbox and tells its sender, through its server where that is another.
func (s *server) forgetting(u *unread) *entry {
	e := &entry{Forget: &forgetting{Box: u.to}}
	var which []string
	for i := range u.letters {
		l := &u.letters[i]
		e.Forget.Refs = append(e.Forget.Refs, l.Ref)
		if i >= lapseListed {
			continue
		}
		what := fmt.Sprintf("%s #%s %q", l.Kind, l.ID, clip(l.Text, askExcerpt))
		if l.Carriers != nil {
			what += " (it was in an answer that may have arrived)"
		}
		which = append(which, what)
	}
	text := fmt.Sprintf("not read by @%s within %v, and gone: %s", u.to.name, keepTime, strings.Join(which, ", "))
	if more := len(u.letters) - lapseListed; more > 0 {
		text += fmt.Sprintf(", and %d more", more)
	}
	told := s.notice(u.from.Box, text)
	if u.from.At == (place{}) {
		e.Store = []letter{told}
		return e
	}
	e.Queue = []outgoing{{To: u.from.At, Sender: itself, Entry: entry{At: told.At, Key: randomHex(16), Store: []letter{told}}}}
	return e
}
