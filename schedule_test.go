//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// standClock makes the wall clock stand at the returned moment, and counts how often it is looked at.
func standClock(t *testing.T, at string, look time.Duration) (set func(string), looks func() int) {
	var mu sync.Mutex
	var now time.Time
	seen := 0
	set = func(at string) {
		mu.Lock()
		defer mu.Unlock()
		var err error
		now, err = time.Parse(time.RFC3339, at)
		must(t, err)
	}
	set(at)
	testHookClock = func() (time.Time, time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		seen++
		return now, look
	}
	t.Cleanup(func() { testHookClock = nil })
	return set, func() int {
		mu.Lock()
		defer mu.Unlock()
		return seen
	}
}

// readMail reads and confirms what waits for a peer: what each message says of its schedule, and its text.
func readMail(t *testing.T, s *server, ctx context.Context) (all []string) {
	t.Helper()
	x := &exchange{}
	out, err := s.inbox(withExchange(ctx, x), inboxInput{})
	must(t, err)
	s.mesh.confirm(written, x.parcels...)
	for _, m := range out.Messages {
		_, said, _ := strings.Cut(m.Scheduled, "; ")
		all = append(all, said+": "+m.Text)
	}
	return all
}

func scheduleMine(t *testing.T, s *server, ctx context.Context, text, fireAt, cron string) string {
	t.Helper()
	out, err := s.scheduleSelf(ctx, scheduleSelfInput{Text: text, FireAt: fireAt, Cron: cron, Kind: "notify"})
	must(t, err)
	return out.ID
}

// Nothing comes early and nothing comes twice, whether it is due in a second or in a year.
func TestScheduleHorizons(t *testing.T) {
	for _, wait := range []time.Duration{
		time.Second, clockLook - time.Millisecond, clockLook, clockLook + time.Millisecond, 2 * time.Hour, 36 * time.Hour, 366 * 24 * time.Hour,
	} {
		synctest.Test(t, func(t *testing.T) {
			s := meshServer(t, newCheckout(t), io.Discard)
			a, _ := speak(s, "a")
			due := time.Now().Add(wait)
			scheduleMine(t, s, a, "x", due.Format(time.RFC3339Nano), "")
			time.Sleep(wait - time.Millisecond)
			synctest.Wait()
			wantTexts(t, readMail(t, s, a))
			time.Sleep(time.Millisecond)
			synctest.Wait()
			wantTexts(t, readMail(t, s, a), "due "+moment(due.UnixMilli())+": x")
			time.Sleep(48 * time.Hour)
			synctest.Wait()
			wantTexts(t, readMail(t, s, a))
		})
	}
}

// A recurring schedule comes once a due time, and stays on its grid, whatever happens to the clock.
func TestScheduleClockSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set, _ := standClock(t, "2026-03-01T10:05:00Z", time.Second)
		s := meshServer(t, newCheckout(t), io.Discard)
		a, _ := speak(s, "a")
		scheduleMine(t, s, a, "x", "", "*/10 * * * *")
		for _, step := range []struct{ at, want string }{
			{"2026-03-01T10:09:59.999Z", ""},
			{"2026-03-01T10:10:00Z", "due 2026-03-01T10:10:00Z: x"},
			{"2026-03-01T10:10:59Z", ""},
			{"2026-03-01T10:05:00Z", ""}, // set back
			{"2026-03-01T10:10:00Z", ""},
			{"2026-03-01T10:20:07Z", "due 2026-03-01T10:20:00Z; late by 7s: x"},
			{"2026-03-01T13:04:00Z", "due 2026-03-01T10:30:00Z; late by 2h34m0s; 16 due times missed, sent once: x"}, // suspended
			{"2026-03-01T13:09:59Z", ""},
			{"2026-03-01T13:10:00Z", "due 2026-03-01T13:10:00Z: x"},
			{"2029-03-01T13:10:00Z", "due 2026-03-01T13:20:00Z; late by 1095 days; at least 100000 due times missed, sent once: x"},
			{"2026-03-01T13:20:00Z", ""},
			{"2029-03-01T13:20:00Z", "due 2029-03-01T13:20:00Z: x"},
		} {
			set(step.at)
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if got := strings.Join(readMail(t, s, a), ", "); got != step.want {
				t.Errorf("at %s: %q, want %q", step.at, got, step.want)
			}
		}
	})
}

// A thousand schedules cost a look at the clock every minute, none at all cost nothing, and there are never more.
func TestScheduleLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set, looks := standClock(t, "2026-03-01T10:00:00Z", clockLook)
		s := meshServer(t, newCheckout(t), io.Discard)
		a, _ := speak(s, "a")
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := looks(); n != 0 {
			t.Errorf("%d looks at the clock without a schedule", n)
		}
		last := ""
		for i := range schedulesLimit {
			last = scheduleMine(t, s, a, fmt.Sprint(i), "2026-03-02", "")
		}
		_, err := s.scheduleSelf(a, scheduleSelfInput{Text: "x", Cron: "@daily", Kind: "notify"})
		if r := asRefusal(err); err == nil || r.code != "refused" || !strings.Contains(r.message, "1000 schedules") {
			t.Errorf("one too many: %v", err)
		}
		if _, err := s.scheduleDelete(a, scheduleDeleteInput{ID: "#" + last}); err != nil {
			t.Error(err)
		}
		before := looks()
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := looks() - before; n > 61 {
			t.Errorf("%d looks at the clock in an hour", n)
		}

		// All of them at one moment come, in the order in which they were made, as far as the mailbox takes them.
		set("2026-03-02T00:00:00Z")
		time.Sleep(2 * clockLook)
		synctest.Wait()
		var got []string
		for len(got) < schedulesLimit-1 {
			some := readMail(t, s, a)
			if len(some) == 0 {
				t.Fatalf("only %d came", len(got))
			}
			got = append(got, some...)
		}
		for i, text := range got {
			if want := fmt.Sprintf("due 2026-03-02T00:00:00Z: %d", i); text != want {
				t.Fatalf("message %d is %q, want %q", i, text, want)
			}
		}
		if list := s.mesh.schedules(); len(list) != 0 {
			t.Errorf("%d schedules are left", len(list))
		}
	})
}

// Of two servers of a checkout the one with the lease fires, once, and what it fired the next one knows.
func TestScheduleOneServerFires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set, _ := standClock(t, "2026-03-01T10:00:00Z", time.Second)
		root := newCheckout(t)
		s := meshServer(t, root, io.Discard)
		a, _ := speak(s, "a")
		scheduleMine(t, s, a, "once", "2026-03-01T10:30:00Z", "")
		scheduleMine(t, s, a, "again", "", "@hourly")
		s2 := meshServer(t, root, io.Discard)
		s2.mesh.mu.Lock()
		s2.mesh.keptUntil = time.Now()
		s2.mesh.mu.Unlock()
		a2, _ := speak(s2, "a")
		set("2026-03-01T11:00:00Z")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		wantTexts(t, readMail(t, s, a))
		wantTexts(t, readMail(t, s2, a2), "due 2026-03-01T10:30:00Z; late by 30m0s: once", "due 2026-03-01T11:00:00Z: again")
		s2.close()

		s3 := meshServer(t, root, io.Discard)
		s3.mesh.mu.Lock()
		s3.mesh.keptUntil = time.Now()
		s3.mesh.mu.Unlock()
		a3, _ := speak(s3, "a")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		wantTexts(t, readMail(t, s3, a3))
		if list := s3.mesh.schedules(); len(list) != 1 || moment(list[0].Due) != "2026-03-01T12:00:00Z" {
			t.Errorf("%+v", list)
		}
	})
}

// However much of the journal was written when the server died: a schedule is due still, or its message is there.
func TestScheduleTorn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set, _ := standClock(t, "2026-03-01T10:00:00Z", time.Second)
		root := newCheckout(t)
		s := meshServer(t, root, io.Discard)
		a, _ := speak(s, "a")
		scheduleMine(t, s, a, "x", "2026-03-01T10:30:00Z", "")
		before, err := os.Stat(journalPath(root))
		must(t, err)
		set("2026-03-01T10:30:00Z")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		whole, err := os.ReadFile(journalPath(root))
		must(t, err)
		if int64(len(whole)) == before.Size() {
			t.Fatal("nothing was fired")
		}
		torn := filepath.Join(t.TempDir(), "journal")
		fired := 0
		for n := int(before.Size()); n <= len(whole); n++ {
			must(t, os.WriteFile(torn, whole[:n], 0o600))
			st := newStore()
			if r := readJournal(torn, st); r.err != nil || r.damaged > 0 {
				t.Fatal(r)
			}
			due, there := len(st.schedules), len(st.boxes[boardName{"default", "a"}])
			if due+there != 1 {
				t.Fatalf("of %d bytes: %d schedules and %d messages", n, due, there)
			}
			fired += there
		}
		if fired == 0 {
			t.Error("the message is in no journal")
		}
	})
}

// What cannot be delivered is told to its creator, once, and again after it could be delivered in between.
func TestScheduleFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set, _ := standClock(t, "2026-03-01T10:00:00Z", time.Second)
		s := meshServer(t, newCheckout(t), io.Discard)
		a, _ := speak(s, "a")
		b, _ := speak(s, "b")
		fill := func() {
			for {
				l := letter{Ref: randomHex(6), ID: "notif-00000000", Kind: "notify", From: address{Box: boardName{"default", "b"}}, To: []boardName{{"default", "b"}}, Text: "x", At: millis()}
				if _, err := s.mesh.commit(&entry{Store: []letter{l}}, written); err != nil {
					return
				}
			}
		}
		empty := func() (n int) {
			for texts := readMail(t, s, b); texts != nil; texts = readMail(t, s, b) {
				n += len(texts)
			}
			return n
		}
		at := func(when string) {
			set(when)
			time.Sleep(2 * time.Second)
			synctest.Wait()
		}
		out, err := s.scheduleCron(a, scheduleCronInput{Peer: "b", Text: "hello", Cron: "@hourly", Kind: "ask"})
		must(t, err)
		told := func(due string) string {
			return fmt.Sprintf(`: not delivered (the mailbox of "b" is full: 1000 messages wait there until it reads them; nothing was stored): ask to @b (scheduled %s; due %s): "hello"`, out.ID, due)
		}
		fill()
		at("2026-03-01T11:00:00Z")
		wantTexts(t, readMail(t, s, a), told("2026-03-01T11:00:00Z"))
		at("2026-03-01T12:00:00Z")
		wantTexts(t, readMail(t, s, a))
		if n := empty(); n != mailboxLimit {
			t.Errorf("b had %d messages", n)
		}
		at("2026-03-01T13:00:00Z")
		wantTexts(t, readMail(t, s, b), "due 2026-03-01T13:00:00Z: hello")
		fill()
		at("2026-03-01T14:00:00Z")
		wantTexts(t, readMail(t, s, a), told("2026-03-01T14:00:00Z"))

		// A journal that cannot be written delays what is due, and loses nothing.
		empty()
		testHookJournal = func() error { return errors.New("no space") }
		t.Cleanup(func() { testHookJournal = nil })
		at("2026-03-01T15:00:00Z")
		wantTexts(t, readMail(t, s, b))
		testHookJournal = nil
		at("2026-03-01T15:00:10Z")
		wantTexts(t, readMail(t, s, b), "due 2026-03-01T15:00:00Z; late by 10s: hello")
		if _, open := s.mesh.openAsks(boardName{"default", "a"}); open != 0 {
			t.Error(open)
		}
	})
}

// A worker that goes on under an older name of its own takes its schedules along.
func TestScheduleMoves(t *testing.T) {
	st := newStore()
	old, now := boardName{"default", "old"}, boardName{"default", "now"}
	for i, sc := range []schedule{{From: old, To: address{Box: old}}, {From: now, To: address{Box: old, At: place{Root: "/else"}}}} {
		sc.ID, sc.Kind = fmt.Sprintf("sched-0000000%d", i), "notify"
		if _, err := st.apply(&entry{Schedule: &sc}); err != nil {
			t.Fatal(err)
		}
	}
	st.apply(&entry{Move: &move{old, now}})
	if sc := st.schedules["sched-00000000"]; sc.From != now || sc.To.Box != now {
		t.Errorf("%+v", sc)
	}
	if sc := st.schedules["sched-00000001"]; sc.From != now || sc.To.Box != old {
		t.Errorf("%+v", sc)
	}
	for _, bad := range []string{
		`{"schedule":{"id":"ask-00000000","from":"default/a","to":{"box":"default/a"},"kind":"notify","due":1}}`,
		`{"schedule":{"id":"sched-00000000","from":"default/a","to":{"box":"default/a"},"kind":"broadcast","due":1}}`,
		`{"schedule":{"id":"sched-00000000","from":"default/a","to":{},"kind":"notify","due":1}}`,
		`{"schedule":{"id":"sched-00000000","from":"default/a","to":{"box":"default/a"},"kind":"notify","due":1,"cron":"x"}}`,
		`{"schedule":{"id":"sched-00000000","from":"default/a","to":{"box":"default/a"},"kind":"notify","due":1,"text":"\u001b"}}`,
	} {
		if _, err := readEntry([]byte(bad)); err == nil {
			t.Errorf("read %s", bad)
		}
	}
	e := &entry{Key: strings.Repeat("0", 32), Fire: &firing{}}
	if deliverable(e) == nil {
		t.Error("another server could fire schedules here")
	}
	if !slices.Contains([]error{errNotDue}, st.checkSchedule(e)) {
		t.Error("what is not there was fired")
	}
}
