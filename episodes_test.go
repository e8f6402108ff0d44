//go:build unix

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// cmdEpisodes waits until the episodes that a client sees match.
func cmdEpisodes(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 2, "episodes NAME 'regexp'")
	re := regexp.MustCompile(args[1])
	until(ts, func() string {
		a := named(ts, args[0]).ask(ts, "tools/call", `{"name":"majordomus_episodes"}`)
		if re.Match(member(a.Result, "structuredContent")) {
			return ""
		}
		return fmt.Sprintf("no match of %s: %s%s", args[1], a.Result, a.Error)
	})
}

// episodeServer is a server outside of any checkout, so that no command runs.
func episodeServer(t *testing.T) *server {
	set := &settings{timing: timings{sessionIdle: 1000 * time.Hour, reattach: 15 * time.Minute, join: 20 * time.Second, probe: 2 * time.Second}}
	s := newServer(set, checkout{}, slog.New(slog.DiscardHandler), nil)
	t.Cleanup(s.stopEpisodes)
	return s
}

func (s *server) testPeer(t *testing.T, name string, trusted bool) *session {
	t.Helper()
	n := &session{id: randomHex(16), trusted: trusted, peer: s.board.attach(attachment{Transport: "http", Unverified: !trusted, Carried: carried{Name: name}})}
	if err := s.admit(n); err != nil {
		t.Fatal(err)
	}
	return n
}

func (s *server) testAttach(t *testing.T, n *session, id string) episodeAttachOutput {
	t.Helper()
	out, err := s.episodesAttach(withCaller(t.Context(), n), episodeAttachInput{ExternalID: id})
	if err != nil {
		t.Fatalf("attaching %q: %v", id, err)
	}
	return out
}

// listed is what a peer sees: each episode as id, holder or -, attachments; * for its own.
func (s *server) listed(n *session) string {
	ctx := context.Background()
	if n != nil {
		ctx = withCaller(ctx, n)
	}
	out, _ := s.episodesList(ctx, episodesInput{})
	var words []string
	open := 0
	for _, e := range out.Episodes {
		holder := string(e.Peer)
		if (e.State == "open") != (holder != "") || e.Repository == "" {
			return fmt.Sprintf("inconsistent: %+v", e)
		}
		if holder == "" {
			holder = "-"
		} else {
			open++
		}
		if out.Mine != nil && out.Mine.ExternalID == e.ExternalID {
			holder += "*"
		}
		words = append(words, fmt.Sprintf("%s %s %d", e.ExternalID, holder, e.Attachments))
	}
	if out.Open != open || out.Open+out.Detached != len(out.Episodes) {
		return fmt.Sprintf("counted wrongly: %+v", out)
	}
	return strings.Join(words, ", ")
}

func (s *server) expectListed(t *testing.T, n *session, want string) {
	t.Helper()
	synctest.Wait()
	if got := s.listed(n); got != want {
		t.Errorf("listed %q, want %q", got, want)
	}
}

func TestEpisodeStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := episodeServer(t)
		a, b := s.testPeer(t, "a", true), s.testPeer(t, "b", true)
		opened := s.testAttach(t, a, "x").Episode.OpenedAt
		s.expectListed(t, a, "x p1* 1")
		s.expectListed(t, nil, "x p1 1")

		// An attached one never expires.
		time.Sleep(24 * time.Hour)
		s.expectListed(t, b, "x p1 1")
		if out := s.testAttach(t, a, " x "); !out.Resumed || out.Episode.Attachments != 1 || out.Episode.OpenedAt != opened {
			t.Errorf("attached again: %+v", out)
		}

		// The grace counts from the loss, and a return stops it.
		s.dismiss(a)
		s.expectListed(t, b, "x - 1")
		time.Sleep(15*time.Minute - time.Second)
		if out := s.testAttach(t, b, "x"); !out.Resumed || out.Episode.OpenedAt != opened || out.Name != "a" {
			t.Errorf("taken over: %+v", out)
		}
		time.Sleep(time.Hour)
		s.expectListed(t, b, "x p2* 2")

		// Another one instead: the first waits, and expires.
		s.testAttach(t, b, "y")
		s.expectListed(t, b, "x - 2, y p2* 1")
		time.Sleep(14 * time.Minute)
		s.board.touch(b.peer)
		time.Sleep(time.Minute + time.Second)
		s.expectListed(t, b, "y p2* 1")

		out, err := s.episodesDetach(withCaller(t.Context(), b), episodeDetachInput{})
		if err != nil || out.Episode.State != "detached" || out.Episode.Peer != "" || out.Episode.LastActivity != 0 {
			t.Errorf("detached: %+v, %v", out, err)
		}
		s.expectListed(t, b, "")
	})
}

func TestEpisodeActivity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := episodeServer(t)
		a := s.testPeer(t, "a", true)
		s.testAttach(t, a, "x")
		idle := func(want int64) {
			t.Helper()
			if out, _ := s.episodesList(t.Context(), episodesInput{}); out.Episodes[0].LastActivity != want {
				t.Errorf("%d seconds, want %d", out.Episodes[0].LastActivity, want)
			}
		}
		time.Sleep(20 * time.Second)
		idle(20)
		s.board.touch(a.peer)
		time.Sleep(5 * time.Second)
		idle(5)
		s.dismiss(a)
		time.Sleep(5 * time.Second)
		idle(10)

		// Nor is it activity that a process brings it to the next server.
		next := episodeServer(t)
		c := carried{Name: "a", Idle: 10, Episode: &carriedEpisode{ExternalID: "x", OpenedAt: "2020-02-02T02:02:02Z", Attachments: 3, Repository: "said"}}
		peer := next.board.attach(attachment{Transport: "http", Carried: c})
		next.restoreEpisodes(peer, c, false)
		out, _ := next.episodesList(t.Context(), episodesInput{})
		if e := out.Episodes[0]; e.LastActivity != 10 || e.OpenedAt != "2020-02-02T02:02:02Z" || e.Attachments != 3 || e.Repository != "said" || e.Peer != peer {
			t.Errorf("%+v", e)
		}
	})
}

// A server that was stopped finds its timers late: nobody could come back meanwhile.
func TestEpisodeLapsesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := episodeServer(t)
		a := s.testPeer(t, "a", true)
		s.testAttach(t, a, "x")
		s.dismiss(a)
		s.episodes.mu.Lock()
		e := s.episodes.byID["x"]
		e.due = e.due.Add(-lateLimit - time.Minute)
		s.episodes.mu.Unlock()
		time.Sleep(16 * time.Minute)
		s.expectListed(t, nil, "x - 1")
		time.Sleep(15 * time.Minute)
		s.expectListed(t, nil, "")
	})
}

func TestEpisodeRestored(t *testing.T) {
	carry := func(attachments uint32, opened string) *carriedEpisode {
		return &carriedEpisode{ExternalID: "x", Provider: "codex", OpenedAt: cmp.Or(opened, "2000-01-01T00:00:00Z"), Attachments: attachments, Repository: "said"}
	}
	for _, test := range []struct {
		what        string
		here        string // before: unknown, held, detached, mine or mine, other
		attachments uint32 // counted by what is carried; here it is 2
		again       bool
		want        string // a is p1 and holds it here, b is p2 and brings it
		opened      string // of what is carried; "" is when it was opened here
	}{
		{"a new server", "unknown", 4, false, "x p2* 4", "2020-02-02T02:02:02Z"},
		{"the server that has closed it", "unknown", 4, true, "", ""},
		{"nonsense", "unknown", 0, false, "", ""},
		{"taken over since", "held", 1, true, "x p1 2", ""},
		{"two that opened the same", "held", 2, false, "x p1 2", ""},
		{"taken over by what it brings", "held", 3, false, "x p2* 3", ""},
		{"its own return", "detached", 2, true, "x p2* 2", ""},
		{"taken over and left since", "detached", 1, true, "x - 2", ""},
		{"handed on before it came", "detached", 2, false, "x p2* 2", ""},
		{"it holds another", "other", 2, true, "x - 2, y p2* 1", ""},
		{"closing when it returns", "closing", 2, true, "x p2* 2", ""},
		{"opened anew since, elsewhere", "detached", 1, false, "x p2* 1", "2000-01-01T00:00:01Z"},
		{"opened anew since, and here too", "held", 1, false, "x p1 2", "2000-01-01T00:00:01Z"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := episodeServer(t)
			a, b := s.testPeer(t, "a", true), s.testPeer(t, "b", true)
			if test.here != "unknown" {
				s.testAttach(t, a, "x")
				s.episodes.byID["x"].attachments = 2
			}
			switch test.here {
			case "detached", "other":
				s.dismiss(a)
			case "closing":
				s.dismiss(a)
				s.episodes.mu.Lock()
				s.episodes.byID["x"].closing = true
				s.episodes.mu.Unlock()
			}
			if test.here == "other" {
				s.testAttach(t, b, "y")
			}
			held := s.restoreEpisodes(b.peer, carried{Episode: carry(test.attachments, test.opened)}, test.again)
			s.expectListed(t, b, test.want)
			if got := strings.Contains(s.listed(b), "*"); got != (held != nil) {
				t.Errorf("%s: told %+v", test.what, held)
			}
			if t.Failed() {
				t.Fatal(test.what)
			}
		})
	}
}

// What a server hands on is detached at the next one, until who holds it has come.
func TestEpisodeHandedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := episodeServer(t)
		a, b := old.testPeer(t, "a", true), old.testPeer(t, "b", true)
		old.testAttach(t, a, "held")
		old.testAttach(t, b, "left")
		old.dismiss(b)
		time.Sleep(10 * time.Minute)
		orphans := old.handDown()

		s := episodeServer(t)
		s.lease = &lease{}
		close(s.ending) // holds asks nothing of this lease
		c := s.testPeerUnadmitted("c")
		bring := carried{Orphans: orphans}
		s.restoreEpisodes(c, bring, false)
		s.expectListed(t, nil, "held - 1, left - 1")
		bring.Episode = &carriedEpisode{ExternalID: "held", Attachments: 1, Repository: "said"}
		s.restoreEpisodes(s.testPeerUnadmitted("a"), bring, false)
		s.expectListed(t, nil, "held p2 1, left - 1")
		if e := s.episodes.byID["left"]; e.name != "b" || time.Since(e.active) != 10*time.Minute {
			t.Errorf("%+v", e)
		}

		// Who comes later brings what others have dealt with.
		s.episodes.mu.Lock()
		delete(s.episodes.byID, "left")
		s.episodes.mu.Unlock()
		time.Sleep(s.set.timing.join)
		s.restoreEpisodes(s.testPeerUnadmitted("late"), bring, false)
		s.expectListed(t, nil, "held p2 1")
	})
}

func (s *server) testPeerUnadmitted(name string) peerID {
	return s.board.attach(attachment{Transport: "http", Carried: carried{Name: name}})
}

func TestEpisodeHandedOnBounded(t *testing.T) {
	s := episodeServer(t)
	for i := range 600 {
		id := strconv.Itoa(i)
		s.episodes.byID[id] = &episodeEntry{id: id, attachments: 1, words: strings.Repeat("\x01", wordsLimit)}
	}
	list := s.handDown()
	if size := len(mustJSON(list)); len(list) == 0 || size > handDownLimit+1000 {
		t.Errorf("%d episodes, %d bytes", len(list), size)
	}
}

func TestEpisodeStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := episodeServer(t)
		mine, stranger, other := s.testPeer(t, "mine", true), s.testPeer(t, "stranger", false), s.testPeer(t, "other", false)
		s.testAttach(t, mine, "x")
		s.testAttach(t, stranger, "y")
		refused := func(n *session, id string) {
			t.Helper()
			before := s.listed(n)
			for _, call := range []string{"attach", "detach"} {
				var err error
				if call == "attach" {
					_, err = s.episodesAttach(withCaller(t.Context(), n), episodeAttachInput{ExternalID: id})
				} else {
					_, err = s.episodesDetach(withCaller(t.Context(), n), episodeDetachInput{ExternalID: id})
				}
				if asRefusal(err) == nil || asRefusal(err).code != "refused" || s.listed(n) != before {
					t.Errorf("%s %s: %v", call, id, err)
				}
			}
		}
		refused(stranger, "x")
		refused(other, "y")
		s.testAttach(t, stranger, "z")
		refused(other, "y")
		s.testAttach(t, stranger, "y")
		s.expectListed(t, stranger, "x p1 1, y p2* 2, z - 1")
		if out := s.testAttach(t, mine, "y"); !out.Resumed || out.Name != "" || len(out.Claims) != 0 {
			t.Errorf("%+v", out)
		}
		s.dismiss(mine)
		refused(stranger, "y")
		refused(stranger, "x")
	})
}

func TestEpisodeLimit(t *testing.T) {
	s := episodeServer(t)
	mine, stranger := s.testPeer(t, "mine", true), s.testPeer(t, "stranger", false)
	fill := func(n *session) int {
		for i := 0; ; i++ {
			if _, err := s.episodesAttach(withCaller(t.Context(), n), episodeAttachInput{ExternalID: fmt.Sprint(n.peer, i)}); err != nil {
				if asRefusal(err).code != "busy" {
					t.Fatal(err)
				}
				return i
			}
		}
	}
	if n := fill(stranger); n != strangersLimit {
		t.Errorf("an unverified peer opened %d", n)
	}
	if n := fill(mine); n != episodeLimit-strangersLimit {
		t.Errorf("then a trusted one opened %d", n)
	}
	s.testAttach(t, mine, fmt.Sprint(stranger.peer, 0)) // what is known can always be taken
}

// A clock that was stopped is not kept until it would have been due.
func TestEpisodeClocksAreNotKept(t *testing.T) {
	s := episodeServer(t)
	n := s.testPeer(t, "restless", true)
	heap := func(times int) int64 {
		for range times {
			s.testAttach(t, n, "one")
			s.testAttach(t, n, "two") // which leaves the other
		}
		runtime.GC()
		runtime.GC() // a second one empties the pools
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap(100)
	if grown := heap(10_000) - before; grown > 1<<20 {
		t.Errorf("20,000 changes of the episode left %d bytes", grown)
	}
}

func TestProviderOf(t *testing.T) {
	for client, want := range map[string]string{
		"claude-code": "claude-code", "Claude Code": "claude-code", "claude-ai": "generic", "codex-mcp-client": "codex", "Codex": "codex",
		"gemini-cli-mcp-client": "gemini", "opencode": "opencode", "cursor-vscode": "cursor", "Visual Studio Code": "generic", notInitialized: "generic", "": "generic",
	} {
		if got := providerOf(client); got != want {
			t.Errorf("%q: %s, want %s", client, got, want)
		}
	}
}

func TestInherit(t *testing.T) {
	claim := func(name string) announcement {
		return announcement{Name: name, Intent: "of:" + name, Scope: []string{}, At: stamp(time.Now())}
	}
	b := newBoard()
	add := func(name string, claims ...announcement) peerID {
		return b.attach(attachment{Transport: "http", Carried: carried{Name: name, Claims: claims}})
	}
	old, third, next := add("n", claim(""), claim("one")), add("t"), add("n", claim("one"))
	if name := b.displayName(next); name != "n-2" {
		t.Fatal(name)
	}

	// From one that is here: it gets the next free name, which is that of the newcomer, and keeps its claims.
	name, claims := b.inherit(next, "n", old)
	if name != "n" || claims != nil || b.displayName(old) != "n-2" || b.displayName(next) != "n" {
		t.Errorf("%q %v, old %q, next %q", name, claims, b.displayName(old), b.displayName(next))
	}
	// A name that a third goes by stays with that one.
	if name, _ := b.inherit(next, "t", old); name != "" || b.displayName(third) != "t" || b.displayName(next) != "n" {
		t.Errorf("%q", name)
	}
	// From one that is gone: its claims come along, where there is none of the name, and it is not listed any more.
	b.detach(old)
	name, claims = b.inherit(next, "n-2", old)
	if name != "n-2" || len(claims) != 1 || claims[0].Intent != "of:" {
		t.Errorf("%q %v", name, claims)
	}
	for _, p := range b.peers() {
		if p.ID == old || p.ID == next && (len(p.Claims) != 2 || p.Claims[1].Intent != "of:one") {
			t.Errorf("%+v", p)
		}
	}
	if name, _ := b.inherit("p99", "n", next); name != "" {
		t.Error(name)
	}
}

// What a client's process keeps of its episode, by what it hears.
func TestRememberEpisode(t *testing.T) {
	answer := func(call string, attachments int, more string) []byte {
		return fmt.Appendf(nil, `{"episode":{"external_id":"x","provider":"p","peer":"p1","opened_at":"2020-02-02T02:02:02Z","last_activity_seconds_ago":0,"attachments":%d,"state":"open","repository":"r"}%s}`, attachments, more)
	}
	attach := func(attachments int) []byte {
		return answer("attach", attachments, `,"resumed":true,"reattach_grace_seconds":1`)
	}
	holds := func(c *client, want uint32) {
		t.Helper()
		switch e := c.carried.Episode; {
		case want == 0 && e != nil, want > 0 && (e == nil || e.Attachments != want || e.Repository != "r"):
			t.Errorf("keeps %+v, want %d", e, want)
		}
	}
	c := &client{carried: carried{Name: "own"}}
	c.rememberEpisode(nil) // a refusal has no structure
	holds(c, 0)
	c.rememberEpisode(attach(1))
	holds(c, 1)
	c.rememberEpisode(answer("attach", 2, `,"resumed":true,"name":"other","claims":[{"intent":"i","scope":[],"at":""}]`))
	if holds(c, 2); c.carried.Name != "other" || len(c.carried.Claims) != 1 {
		t.Errorf("%+v", c.carried)
	}
	c.loseEpisode(episodeTaken{"y", 9, ""})
	holds(c, 2)
	c.loseEpisode(episodeTaken{"x", 2, ""}) // old news
	holds(c, 2)
	c.loseEpisode(episodeTaken{"x", 3, "third"})
	if holds(c, 0); c.carried.Name != "third" {
		t.Errorf("%+v", c.carried)
	}
	c.rememberEpisode(attach(2)) // the answer came later than the news
	holds(c, 0)
	c.rememberEpisode(attach(4))
	holds(c, 4)
	c.rememberEpisode(answer("detach", 4, ""))
	holds(c, 0)
}

// Peers come, go, attach and detach at once: no peer holds two episodes, no episode is lost while it is held, and the
// commands of one episode alternate.
func TestEpisodesAtOnce(t *testing.T) {
	s := episodeServer(t)
	s.set.timing.reattach = time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for ctx.Err() == nil {
				n := s.testPeer(t, "n", rand.IntN(4) > 0)
				for range rand.IntN(6) {
					id := strconv.Itoa(rand.IntN(4))
					call := withCaller(ctx, n)
					if rand.IntN(3) == 0 {
						s.episodesDetach(call, episodeDetachInput{ExternalID: id})
					} else if out, err := s.episodesAttach(call, episodeAttachInput{ExternalID: id}); err == nil && out.Episode.ExternalID != id {
						t.Errorf("%+v", out)
					}
					list, _ := s.episodesList(call, episodesInput{})
					holders := map[peerID]bool{}
					for _, e := range list.Episodes {
						if e.Peer != "" && holders[e.Peer] {
							t.Errorf("%s holds two: %+v", e.Peer, list)
						}
						holders[e.Peer] = true
					}
				}
				s.dismiss(n)
			}
		})
	}
	all.Wait()
	if !poll(patience, func() bool { return s.listed(nil) == "" }) {
		t.Fatalf("left behind: %s", s.listed(nil))
	}
}

// What is listed, attached and detached has the shape that was promised.
func TestEpisodeShapes(t *testing.T) {
	s := episodeServer(t)
	a := s.testPeer(t, "a", true)
	s.testAttach(t, a, "x")
	s.testAttach(t, a, "y")
	out, _ := s.episodesList(withCaller(t.Context(), a), episodesInput{})
	var got map[string]any
	if err := json.Unmarshal(mustJSON(out), &got); err != nil || len(got) != 4 {
		t.Errorf("%s, %v", mustJSON(out), err)
	}
	none := string(mustJSON(episodesOutput{Episodes: []episode{}}))
	if none != `{"open":0,"detached":0,"episodes":[]}` {
		t.Error(none)
	}
}
