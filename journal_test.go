//go:build unix

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/diff"
)

// What cannot be written is refused and has no effect, now or after a restart; reading goes on.
func TestJournalFails(t *testing.T) {
	root := newCheckout(t)
	var log bytes.Buffer
	s := meshServer(t, root, &log)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	send(t, s, a, "b", "before")
	asked, err := s.askPeer(b, askInput{Peer: "a", Query: "well?"})
	must(t, err)
	var failing bool
	testHookJournal = func() error {
		if failing {
			return errors.New("no space left")
		}
		return nil
	}
	t.Cleanup(func() { testHookJournal = nil })
	s.mesh.journal.drain()
	failing = true
	if _, err := s.notifyPeer(a, notifyInput{Peer: "b", Message: "refused"}); err == nil || !strings.Contains(err.Error(), "no space left") || asRefusal(err).code != "internal" {
		t.Error(err)
	}
	if _, err := s.askPeer(a, askInput{Peer: "b", Query: "refused"}); err == nil {
		t.Error("an ask that was not stored was accepted")
	}
	if _, err := s.ackAsk(a, ackInput{ID: asked.ID, Message: "refused"}); asRefusal(err).code != "internal" || !strings.Contains(err.Error(), "nothing was sent") {
		t.Error(err)
	}
	wantTexts(t, read(t, s, b), "before")
	s.mesh.journal.drain()
	failing = false
	send(t, s, a, "b", "after")
	if out, _ := s.inbox(withExchange(a, &exchange{}), inboxInput{}); len(out.Asks) != 1 || out.Asks[0].ID != asked.ID {
		t.Errorf("%+v", out)
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log.String())
	}

	s2 := meshServer(t, root, io.Discard)
	s2.mesh.keptUntil = time.Now()
	b2, _ := speak(s2, "b")
	wantTexts(t, read(t, s2, b2), "after") // and not "before": that it was read is known by the file written since
}

// A server that slept through a take-over does not put its journal in place of its successor's.
func TestJournalOfASleeper(t *testing.T) {
	root := newCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	send(t, s, a, "a", "one")
	s2 := meshServer(t, root, io.Discard)
	a2, _ := speak(s2, "z")
	send(t, s2, a2, "z", "two")
	before, err := os.ReadFile(journalPath(root))
	must(t, err)
	s.mesh.journal.behind = true
	if _, err := s.mesh.commit(&entry{Store: []letter{s.notice(boardName{"default", "z"}, "x")}}, synced); !errors.Is(err, errLeaseLost) {
		t.Errorf("it wrote: %v", err)
	}
	s.mesh.journal.drain()
	after, _ := os.ReadFile(journalPath(root))
	if !bytes.Equal(before, after) {
		t.Error("the journal has changed")
	}
	wantFiles(t, root, journalName, nameLock, leaseName)
}

// The file is written anew when it is gone, and when somebody else has written to it.
func TestJournalIsRestored(t *testing.T) {
	root := newCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	s.mesh.journal.drain() // its name is written beside this, and a file made during a deletion would be in its way
	for i, damage := range []func(){
		func() { must(t, os.RemoveAll(filepath.Join(root, ".ai"))) },
		func() { must(t, os.Remove(journalPath(root))) },
		func() { must(t, os.WriteFile(journalPath(root), nil, 0o600)) },
		func() {
			must(t, os.Remove(journalPath(root)))
			must(t, os.Symlink(filepath.Join(root, ".git"), journalPath(root)))
		},
	} {
		damage()
		send(t, s, a, "a", fmt.Sprint(i))
		st := newStore()
		if r := readJournal(journalPath(root), st); r.String() != "" || len(st.boxes[boardName{"default", "a"}]) != i+1 {
			t.Errorf("%d: %v, %d messages", i, r, len(st.boxes[boardName{"default", "a"}]))
		}
	}
}

// The file does not grow with what has been read.
func TestJournalCompacts(t *testing.T) {
	root := newCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	text := strings.Repeat("x", 16000)
	for range 100 {
		send(t, s, a, "a", text)
		if got := read(t, s, a); len(got) != 1 {
			t.Fatal(len(got))
		}
	}
	if info, err := os.Stat(journalPath(root)); err != nil || info.Size() > 2*journalGrowth || info.Mode().Perm() != 0o600 {
		t.Errorf("%d bytes, %v, %v", info.Size(), info.Mode(), err)
	}
}

// Any history, written anew, makes the same state.
func TestStoreRewrites(t *testing.T) {
	t.Parallel()
	names := []boardName{{"default", "a"}, {"default", "b"}, {"red", "a"}}
	far := place{Root: "/far"}
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		st := newStore()
		var ids, refs []string
		var parcels []int64
		now := int64(1_000_000_000_000)
		for range 300 {
			now += r.Int64N(600_000)
			box, other := names[r.IntN(3)], names[r.IntN(3)]
			e := &entry{At: now}
			switch r.IntN(10) {
			case 0, 1, 2:
				refs = append(refs, randomHex(6))
				e.Store = []letter{{Ref: refs[len(refs)-1], ID: "notif-" + randomHex(4), Kind: "notify", From: address{Box: other}, To: []boardName{box}, Text: "x", At: now}}
			case 3:
				ids = append(ids, "ask-"+randomHex(4))
				e.Open = &thread{ID: ids[len(ids)-1], From: address{Box: box}, To: address{Box: other}, At: now}
				if r.IntN(2) == 0 {
					e.Open.To.At = far
					e.Queue = []outgoing{{To: far, Sender: box, Entry: entry{Key: randomHex(16)}}}
				}
			case 4:
				if len(ids) > 0 {
					e.Close = &closing{ID: ids[r.IntN(len(ids))], By: "recipient", Letter: &letter{Ref: randomHex(6), ID: ids[0], Kind: "ack", From: address{Box: box}, At: now}}
				}
			case 5:
				if len(refs) > 0 {
					parcels = append(parcels, randomNumber())
					e.Carry = &carriage{Number: parcels[len(parcels)-1], Box: box, Refs: refs[r.IntN(len(refs)):]}
				}
			case 6:
				if len(parcels) > 0 {
					e.Confirm = []int64{parcels[r.IntN(len(parcels))]}
				}
			case 7:
				e.Move = &move{From: box, To: other}
				if box == other {
					e.Move = nil
				}
			case 8:
				e.Key = randomHex(16)
				e.Name = &nameRecord{Box: box, Seen: now}
			case 9:
				if _, _, mail, _ := st.lapsed(now + keepTime.Milliseconds()/2); len(mail) > 0 {
					e.Forget = &forgetting{Box: mail[0].to, Refs: []string{mail[0].letters[0].Ref}}
				}
			}
			st.apply(e)
		}
		again := newStore()
		st.entries(func(e *entry) {
			back, err := readEntry(mustJSON(e))
			must(t, err)
			if _, err := again.apply(back); err != nil {
				t.Fatal(seed, err)
			}
		})
		if a, b := shape(st), shape(again); a != b {
			t.Fatalf("seed %d:\n%s", seed, diff.Diff("written", []byte(a+"\n"), "read", []byte(b+"\n")))
		}
	}
}

// shape is what a state holds, in one order.
func shape(st *store) string {
	var lines []string
	st.entries(func(e *entry) {
		e.At = 0
		for i := range e.Store {
			e.Store[i].Again = false // set when it is read
			slices.Sort(e.Store[i].Carriers)
		}
		lines = append(lines, string(mustJSON(e)))
	})
	order := ""
	for _, box := range []boardName{{"default", "a"}, {"default", "b"}, {"red", "a"}} {
		for _, l := range st.boxes[box] {
			order += l.Ref + " "
		}
		order += ";"
	}
	for n, c := range st.carried {
		var left []string // of some letters another parcel may have been confirmed
		for _, l := range st.boxes[c.Box] {
			if slices.Contains(c.Refs, l.Ref) {
				left = append(left, l.Ref)
			}
		}
		if left != nil {
			lines = append(lines, fmt.Sprint(n, c.Box, left))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + order
}

// Wherever a write was broken off, what was whole before it is read; a line that is too long costs that line.
func TestJournalIsRead(t *testing.T) {
	t.Parallel()
	var whole []byte
	var ends []int
	line := func(text string) []byte {
		return append(mustJSON(&entry{At: 1, Store: []letter{{Ref: text, ID: "notif-00000000", Kind: "notify", From: address{Box: human}, To: []boardName{human}, Text: text, At: 1}}}), '\n')
	}
	for i := range 5 {
		whole = append(whole, line(fmt.Sprint(i))...)
		ends = append(ends, len(whole))
	}
	for cut := range whole {
		var r report
		st := newStore()
		r.read(bytes.NewReader(whole[:cut]), st)
		lines := 0
		for _, end := range ends {
			if end <= cut {
				lines++
			}
		}
		torn := cut > 0 && !slices.Contains(ends, cut)
		if len(st.boxes[human]) != lines || r.torn != torn || r.String() != "" {
			t.Fatalf("cut at %d: %d letters, want %d; %+v", cut, len(st.boxes[human]), lines, r)
		}
	}
	var r report
	st := newStore()
	long := append(bytes.Repeat([]byte(" "), journalLine+17), '\n')
	r.read(bytes.NewReader(slices.Concat(line("a"), long, line("b"))), st)
	if len(st.boxes[human]) != 2 || r.String() != "has damaged lines, which are skipped: 1 of 3, the first is line 2" {
		t.Errorf("%d, %v", len(st.boxes[human]), r)
	}
}

// FuzzJournal: whatever is in the file, reading it never fails, and what it came to can be written and read again.
func FuzzJournal(f *testing.F) {
	st := newStore()
	one := letter{Ref: "1", ID: "ask-00000001", Kind: "ask", From: address{Box: boardName{"default", "a"}}, To: []boardName{{"default", "b"}}, Text: "x", At: 1}
	for _, e := range []*entry{
		{At: 1, Name: &nameRecord{Box: boardName{"default", "a"}}},
		{At: 2, Open: &thread{ID: one.ID, From: one.From, To: address{Box: boardName{"default", "b"}}}, Store: []letter{one}},
		{At: 3, Carry: &carriage{Number: 7, Box: boardName{"default", "b"}, Refs: []string{"1"}}},
		{At: 4, Close: &closing{ID: one.ID, By: "recipient", Letter: &one}},
		{At: 5, Confirm: []int64{7}, Move: &move{boardName{"default", "a"}, boardName{"default", "c"}}},
		{At: 6, Queue: []outgoing{{To: place{Root: "/x"}, Sender: boardName{"default", "a"}, Entry: entry{Key: strings.Repeat("0", 32), Store: []letter{one}}}}},
	} {
		st.apply(e)
		f.Add(append(mustJSON(e), '\n'))
	}
	f.Add([]byte("{}\nnull\n[]\n{\"at\":-1}\n{\"close\":{}}\n{\"store\":[{}]}\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var r report
		st := newStore()
		r.read(bytes.NewReader(data), st)
		again := newStore()
		st.entries(func(e *entry) {
			back, err := readEntry(mustJSON(e))
			if err != nil {
				t.Fatalf("%s: %v", mustJSON(e), err)
			}
			if _, err := again.apply(back); err != nil {
				t.Fatalf("%s: %v", mustJSON(e), err)
			}
		})
	})
}
