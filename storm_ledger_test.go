//go:build unix

package main

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// ledger is what was written, and what has arrived.
type ledger struct {
	t       *testing.T
	known   map[string]int // the names of the clients, and their worktrees
	lenient func(to string) bool

	// What is sent by a process that serves its client alone goes at once, and overtakes what the server before it had
	// queued for another checkout.
	wasAlone func(from string) bool
	book     sync.Mutex
	sent     map[string]*stormMessage // by text; of what goes to several, by text and recipient
	order    map[[2]string]int        // the highest number that has arrived, by sender and recipient
	excused  map[int]time.Time        // by worktree: what was begun before may be forgotten there
	arrived  int
	acked    int
	refused  int
	unknown  int
	repeats  int
}

type stormMessage struct {
	from, to string
	number   int       // in the order of the sender's to this recipient; -1: in none
	outcome  string    // "" until it is known; acked, refused, unknown
	begun    time.Time // of a broadcast, known only when that has been answered
	settled  time.Time
	arrived  int
	loose    bool // it may come again unmarked
}

// write opens the account of a message before it is sent, and gives its text.
func (l *ledger) write(kind, from, to string, number int) string {
	text := fmt.Sprintf("%s %d to %s", from, number, to)
	m := &stormMessage{from: from, to: to, number: number, begun: time.Now()}
	if kind == "schedule" { // goes when the clock says so
		text, m.number = "later "+text, -1
	}
	l.book.Lock()
	defer l.book.Unlock()
	l.sent[text] = m
	return text
}

// settle notes what its sender was told of a message.
func (l *ledger) settle(text, outcome, answer string) {
	l.book.Lock()
	defer l.book.Unlock()
	m := l.sent[text]
	m.outcome, m.settled = outcome, time.Now()
	l.giveUpLocked(m)
	switch outcome {
	case "acked":
		l.acked++
	case "unknown":
		l.unknown++
	case "refused":
		l.refused++
		if m.arrived > 0 {
			l.t.Errorf("%q was refused and has arrived: %s", text, answer)
		}
	}
}

// settleBroadcast notes whom a broadcast has reached, by the words of its answer.
func (l *ledger) settleBroadcast(text, from, answer string, begun time.Time) {
	answer, _, _ = strings.Cut(answer, "; failed:")
	_, names, _ := strings.Cut(answer, ": ")
	l.book.Lock()
	defer l.book.Unlock()
	if strings.HasPrefix(answer, "broadcast to 0 ") {
		return
	}
	for name := range strings.SplitSeq(names, ", ") {
		if _, ok := l.known[name]; !ok {
			continue // it was taken because its own was not free yet, and its process is ended
		}
		m := l.broadcastLocked(text, from, name)
		m.outcome, m.begun, m.settled = "acked", begun, time.Now()
		l.giveUpLocked(m)
		l.acked++
	}
}

// excuse gives up what was begun before and waits in a worktree, there and on its way from there: its server has forgotten it,
// and what it has had already.
func (l *ledger) excuse(worktree int) {
	l.book.Lock()
	defer l.book.Unlock()
	l.excused[worktree] = time.Now()
	for _, m := range l.sent {
		l.giveUpLocked(m)
	}
}

// excusedLocked says whether the server of a client may have forgotten a message.
func (l *ledger) excusedLocked(m *stormMessage, client string) bool {
	worktree, ok := l.known[client]
	return ok && m.begun.Before(l.excused[worktree])
}

// giveUpLocked takes down what may have been forgotten of a message: that it was to come, at either end; that it has come, where
// it comes to.
func (l *ledger) giveUpLocked(m *stormMessage) {
	to := l.excusedLocked(m, m.to)
	m.loose = m.loose || to
	if (to || l.excusedLocked(m, m.from)) && m.outcome == "acked" && m.arrived == 0 {
		m.outcome = "unknown"
	}
}

func (l *ledger) broadcastLocked(text, from, to string) *stormMessage {
	key := text + " to " + to
	if l.sent[key] == nil {
		l.sent[key] = &stormMessage{from: from, to: to, number: -1}
	}
	return l.sent[key]
}

var stormLine = regexp.MustCompile(`(?m)^(\(again\) )?\[(\w+)(?: #(\S+))? from (@?\S+?)(?: \(([^)]*)\))?\] (.*)$`)

// receive takes down the messages in a text that somebody got, and returns the asks among them.
func (l *ledger) receive(to, text string) (asks []openedAsk) {
	l.book.Lock()
	defer l.book.Unlock()
	for _, m := range stormLine.FindAllStringSubmatch(text, -1) {
		again, kind, id, header, text := m[1] != "", m[2], m[3], m[5], m[6]
		if m[4] == "majordomus" {
			l.noticeLocked(to, text)
			continue
		}
		from := strings.TrimPrefix(m[4], "@")
		if kind == "ask" {
			asks = append(asks, openedAsk{id, from})
		}
		sent := l.sent[text]
		if kind == "broadcast" {
			sent = l.broadcastLocked(text, from, to)
		}
		if sent == nil || sent.to != to || sent.from != from {
			l.t.Errorf("%s got %q, which nobody sent it", to, m[0])
			continue
		}
		if strings.HasPrefix(header, "scheduled") != strings.HasPrefix(text, "later") {
			l.t.Errorf("%s got %q, whose header says something else", to, m[0])
		}
		l.arriveLocked(sent, again, m[0])
	}
	return asks
}

var notDelivered = regexp.MustCompile(`^not delivered \((.*)\): \w+ #\S+ (".*")$`)

// noticeLocked takes down what a sender is told of its own messages: what was queued may come to nothing, but not silently.
func (l *ledger) noticeLocked(to, text string) {
	m := notDelivered.FindStringSubmatch(text)
	if m == nil {
		l.t.Logf("%s was told: %s", to, text)
		return
	}
	what, err := strconv.Unquote(m[2])
	if sent := l.sent[what]; err != nil || sent == nil || sent.from != to || sent.arrived > 0 {
		l.t.Errorf("%s was told: %s", to, text)
		return
	}
	l.sent[what].outcome = "reported"
}

func (l *ledger) arriveLocked(m *stormMessage, again bool, line string) {
	l.arrived++
	if m.arrived++; m.arrived > 1 {
		if l.repeats++; !again && !m.loose {
			l.t.Errorf("%s got %q again, unmarked", m.to, line)
		}
		return
	}
	// With a full disk reading goes on, and what was read then is not known to the next server.
	m.loose = m.loose || l.lenient(m.to)
	if m.outcome == "refused" {
		l.t.Errorf("%s got %q, which was refused", m.to, line)
	}
	pair := [2]string{m.from, m.to}
	if m.number >= 0 {
		if m.number < l.order[pair] && !l.wasAlone(m.from) {
			l.t.Errorf("%s: %s got %q, sent from %s on and %s, after number %d", time.Now().Format(time.StampMilli), m.to, line,
				m.begun.Format(time.StampMilli), cmp.Or(m.outcome, "not answered"), l.order[pair])
		}
		l.order[pair] = max(l.order[pair], m.number)
	}
}

// missing lists what was acknowledged and has not arrived.
func (l *ledger) missing() (list []string) {
	l.book.Lock()
	defer l.book.Unlock()
	for text, m := range l.sent {
		if m.outcome == "acked" && m.arrived == 0 {
			list = append(list, text)
		}
	}
	return list
}

// checkLedger complains of what is missing, with the traces that it has left.
func (l *ledger) checkLedger(traces func(text string) []string) {
	if list := l.missing(); list != nil {
		slices.Sort(list)
		l.t.Errorf("%d messages were acknowledged and have not arrived: %q", len(list), list[:min(len(list), 20)])
		for _, text := range list[:min(len(list), 5)] {
			l.t.Logf("%q was acknowledged at %v; the journals: %q", text, l.sent[text].settled.Format(time.StampMilli), traces(text))
		}
	}
	if l.acked == 0 {
		l.t.Error("nothing was acknowledged")
	}
}

// What was begun before a worktree was forgotten is given up whenever its sender is answered, and nothing else.
func TestExcuse(t *testing.T) {
	l := ledger{
		t: t, known: map[string]int{"a": 0, "b": 1, "c": 2}, lenient: func(string) bool { return false },
		wasAlone: func(string) bool { return false }, sent: map[string]*stormMessage{}, order: map[[2]string]int{}, excused: map[int]time.Time{},
	}
	late := l.write("notify", "a", "b", 1)
	from := l.write("notify", "b", "c", 1)
	other := l.write("notify", "a", "c", 1)
	l.settle(other, "acked", "")
	before := time.Now()
	l.excuse(1)
	l.settle(late, "acked", "")
	l.settle(from, "acked", "")
	l.settleBroadcast("all", "a", "broadcast to 1 peers: b", before)
	after := l.write("notify", "a", "b", 2)
	l.settle(after, "acked", "")
	missing := l.missing()
	if slices.Sort(missing); !slices.Equal(missing, []string{other, after}) {
		t.Errorf("missing: %q", missing)
	}
	if !l.sent[late].loose || l.sent[from].loose || l.sent[after].loose {
		t.Error("what may come again: what went to the worktree before, and that alone")
	}
}
