package main

// An entry is one change of what the mesh remembers: a line of the journal, or what one server has another apply. This file
// says what it may hold; mailbox.go, what it does.

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// boardName has one spelling as text, circle/name: neither may hold a slash.
func (n boardName) MarshalText() ([]byte, error) { return []byte(n.circle + "/" + n.name), nil }

func (n *boardName) UnmarshalText(text []byte) error {
	circle, name, _ := strings.Cut(string(text), "/")
	*n = boardName{circle, name}
	if circle == "" || name == "" || cleanName(circle, "") != circle || cleanName(name, "") != name {
		return fmt.Errorf("%.80q is no name in a circle", text)
	}
	return nil
}

// place is a checkout of the repository; the zero place is this one.
type place struct {
	Root   string `json:"root"`
	GitDir string `json:"git_dir,omitempty"` // which stays the same when the checkout is moved
}

// same says whether two places are one checkout, which may have been moved from one to the other.
func (p place) same(o place) bool { return p.lane() == o.lane() }

// lane is the name under which a checkout's deliveries keep their order.
func (p place) lane() string { return cmp.Or(p.GitDir, p.Root) }

// address is where a letter comes from or goes to.
type address struct {
	Box boardName `json:"box"`
	At  place     `json:"at,omitzero"`
}

func (a address) same(o address) bool { return a.Box == o.Box && a.At.same(o.At) }

// letter is one message in a mailbox or on its way there.
type letter struct {
	Ref        string      `json:"ref"` // names it in the journal: an ask and the ack to it have one id
	ID         string      `json:"id"`
	Kind       string      `json:"kind"` // ask, ack, notify, broadcast
	From       address     `json:"from"`
	To         []boardName `json:"to"` // mailboxes of the checkout it goes to; one, once it is there
	Text       string      `json:"text,omitempty"`
	At         int64       `json:"at"` // when it was sent; all times here are milliseconds since 1970
	Follows    string      `json:"follows,omitempty"`
	Scheduled  string      `json:"scheduled,omitempty"`  // what its header says of the schedule that sent it
	Unverified bool        `json:"unverified,omitempty"` // sent without the token: by anybody on that machine
	Notice     bool        `json:"notice,omitempty"`     // from majordomus itself, about the recipient's own messages
	Again      bool        `json:"again,omitempty"`      // it was in an answer that may not have arrived
	Carriers   []int64     `json:"carriers,omitempty"`   // the parcels that carried it
	held       int64       // the parcel it is in now; not in the journal
}

// thread is an ask and whether it is still open. Its home is the asker's checkout; the recipient's keeps a copy.
type thread struct {
	ID     string  `json:"id"`
	From   address `json:"from"`
	To     address `json:"to"`
	Text   string  `json:"text"` // the beginning, for lists
	At     int64   `json:"at"`
	Home   place   `json:"home,omitzero"`
	Closed int64   `json:"closed,omitempty"`
	By     string  `json:"by,omitempty"`

	Unverified bool `json:"unverified,omitempty"` // asked without the token
}

// sideOf is what a name here is in the thread: recipient, asker, or "" for neither. Who has asked itself is the recipient.
func (t *thread) sideOf(box boardName) string {
	switch (address{Box: box}) {
	case t.To:
		return "recipient"
	case t.From:
		return "asker"
	}
	return ""
}

// closing closes a thread if it is still open.
type closing struct {
	ID     string  `json:"id"`
	By     string  `json:"by"` // asker, recipient, lapse, refused
	Letter *letter `json:"letter,omitempty"`
}

// nameRecord is a name that somebody holds, or held until he left.
type nameRecord struct {
	Box         boardName `json:"box"`
	Identity    string    `json:"identity,omitempty"` // only what was proven
	Own         bool      `json:"own,omitempty"`      // the server's own client, which dies with it
	Process     string    `json:"process,omitempty"`  // the bridge's, as ownProcess names it
	Peer        peerID    `json:"peer,omitempty"`
	Role        string    `json:"role"`
	Client      string    `json:"client,omitempty"`
	Description string    `json:"description,omitempty"`
	Described   int64     `json:"described,omitempty"`
	Seen        int64     `json:"seen"`
	Left        int64     `json:"left,omitempty"`  // 0: it is held
	Spawn       string    `json:"spawn,omitempty"` // by which it was started
}

// outgoing is what another checkout's server is to apply, once, whenever it can be reached.
type outgoing struct {
	To     place     `json:"to"`
	Sender boardName `json:"sender"` // who is told when it is refused
	Entry  entry     `json:"entry"`  // with the key by which it is stored once
}

// carriage is a parcel that was given out: the letters of one answer.
type carriage struct {
	Number int64     `json:"number"` // random: a bridge may confirm it to the next server
	Box    boardName `json:"box"`
	Refs   []string  `json:"refs"`
}

// move makes one mailbox of two: a worker that resumed its work under its old name brings along what came meanwhile.
type move struct {
	From boardName `json:"from"`
	To   boardName `json:"to"`
}

// forgetting takes letters out of a mailbox that nobody has read for too long.
type forgetting struct {
	Box  boardName `json:"box"`
	Refs []string  `json:"refs"`
}

// entry is one line of the journal. It is applied whole or not at all.
type entry struct {
	At      int64       `json:"at"`
	Key     string      `json:"key,omitempty"` // of a delivery from another server: it counts once
	Name    *nameRecord `json:"name,omitempty"`
	Open    *thread     `json:"open,omitempty"`
	Close   *closing    `json:"close,omitempty"`
	Store   []letter    `json:"store,omitempty"`
	Queue   []outgoing  `json:"queue,omitempty"`
	Sent    []string    `json:"sent,omitempty"` // keys of outgoing that are done with
	Carry   *carriage   `json:"carry,omitempty"`
	Confirm []int64     `json:"confirm,omitempty"`
	Move    *move       `json:"move,omitempty"`
	Forget  *forgetting `json:"forget,omitempty"`
	// What becomes of schedules: schedule.go.
	Schedule   *schedule `json:"schedule,omitempty"`
	Fire       *firing   `json:"fire,omitempty"`
	Unschedule string    `json:"unschedule,omitempty"`
	// What becomes of processes: spawned.go.
	Spawn   *spawned `json:"spawn,omitempty"`
	Unspawn string   `json:"unspawn,omitempty"`
	Retire  string   `json:"retire,omitempty"` // an identity that is refused from now on

	Kept bool `json:"kept,omitempty"` // from a journal written anew: it was accepted before, whatever the limits
}

// isID reports whether an id is one of ours, of one of these kinds: notif-0a1b2c3d.
func isID(id string, kinds ...string) bool {
	kind, digits, _ := strings.Cut(id, "-")
	return slices.Contains(kinds, kind) && isHex(digits, 8)
}

func isMessageID(id string) bool { return isID(id, "ask", "notif", "sched") }

// isHex reports whether s is so many lower-case hex digits.
func isHex(s string, digits int) bool {
	return len(s) == digits && strings.Trim(s, "0123456789abcdef") == ""
}

// readEntry reads a line of a journal, or what another server delivers. What this program would not have written is
// an error, so that nothing in a mailbox can look like more than one message.
func readEntry(line []byte) (*entry, error) {
	e := new(entry)
	if err := json.Unmarshal(line, e); err != nil {
		return nil, err
	}
	return e, e.valid()
}

func (e *entry) valid() error {
	if e.At < 0 || e.Key != "" && !isHex(e.Key, 32) {
		return fmt.Errorf("bad time %d or key %.40q", e.At, e.Key)
	}
	for i := range e.Store {
		if err := e.Store[i].valid(); err != nil {
			return err
		}
		if len(e.Store[i].To) == 0 {
			return errors.New("a letter to nobody")
		}
	}
	if e.Close != nil && e.Close.Letter != nil {
		if err := e.Close.Letter.valid(); err != nil {
			return err
		}
	}
	if e.Open != nil {
		if err := e.Open.valid(); err != nil {
			return err
		}
	}
	if e.Schedule != nil {
		if err := e.Schedule.valid(); err != nil {
			return err
		}
	}
	if e.Spawn != nil {
		if err := e.Spawn.valid(); err != nil {
			return err
		}
	}
	if e.Name != nil && !e.Name.Box.valid() {
		return errors.New("a record of no name")
	}
	if e.Move != nil && !(e.Move.From.valid() && e.Move.To.valid()) || e.Carry != nil && !e.Carry.Box.valid() || e.Forget != nil && !e.Forget.Box.valid() {
		return errors.New("a mailbox without a name")
	}
	for i := range e.Queue {
		if err := e.Queue[i].Entry.valid(); err != nil {
			return err
		}
		if e.Queue[i].To == (place{}) || !e.Queue[i].Sender.valid() || e.Queue[i].Entry.Key == "" || len(e.Queue[i].Entry.Queue) > 0 {
			return errors.New("a delivery to nowhere")
		}
	}
	return nil
}

// valid is false for what no JSON has set.
func (n boardName) valid() bool { return n.circle != "" && n.name != "" }

func (l *letter) valid() error {
	switch {
	case l.Ref == "" || !isMessageID(l.ID) || l.Follows != "" && !isMessageID(l.Follows):
		return fmt.Errorf("bad id %.40q", l.ID)
	case !slices.Contains([]string{"ask", "ack", "notify", "broadcast"}, l.Kind):
		return fmt.Errorf("bad kind %.40q", l.Kind)
	case len(l.Text) > 3*textLimit || l.Text != cleanMessage(l.Text) || !oneLine(l.Scheduled): // cleaning may make it longer
		return errors.New("a text that was not cleaned")
	case !l.From.Box.valid() || slices.ContainsFunc(l.To, func(to boardName) bool { return !to.valid() }):
		return errors.New("a letter without names")
	}
	return nil
}

func (t *thread) valid() error {
	if !isMessageID(t.ID) || !t.From.Box.valid() || !t.To.Box.valid() || t.Text != cleanMessage(t.Text) {
		return fmt.Errorf("bad thread %.40q", t.ID)
	}
	return nil
}

// cleanMessage leaves a text as it is, but for what could steer a terminal or turn the direction in which it is read:
// that becomes visible. Lines end with a newline only.
func cleanMessage(s string) string {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	if strings.ContainsRune(s, '\r') {
		s = strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\r", "\n")
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return r
		case r == '\u2028' || r == '\u2029' || r == '\u0085':
			return '\n'
		case r < ' ' || r >= 0x7f && r <= 0x9f, steersText(r):
			return '\uFFFD'
		}
		return r
	}, s)
}

// steersText is true of the invisible characters that reorder what is shown, and of the tags, with which a whole text can be
// written that a model reads and nobody sees.
func steersText(r rune) bool {
	return r >= '\u202a' && r <= '\u202e' || r >= '\u2066' && r <= '\u2069' || r >= '\U000e0000' && r <= '\U000e007f'
}
