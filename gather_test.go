package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func mustList(t testing.TB, s *server, in peersInput) peersOutput {
	t.Helper()
	start := time.Now()
	out, err := s.peersList(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	// The bound itself is TestGatherIsBounded's; this only says that a test machine that is busy was not stuck.
	if took := time.Since(start); took > patience {
		t.Fatalf("a gather took %v", took)
	}
	return out
}

// boardOf finds the board of the checkout at root in an answer.
func boardOf(t testing.TB, out peersOutput, root string) boardView {
	t.Helper()
	for _, b := range out.Boards {
		if b.Worktree == root {
			return b
		}
	}
	t.Fatalf("%q has no board in %+v", root, out.Boards)
	return boardView{}
}

func TestBoardOfOneCheckout(t *testing.T) {
	s := gatherServer(mustFind(t, gitRepo(t)))
	id := s.board.attach(attachment{Transport: "stdio", Carried: carried{Name: "main"}})
	other := s.board.attach(attachment{Transport: "http"})
	if _, err := s.announce(t.Context(), announceInput{Intent: "x"}); !boardRefused(err, "refused") {
		t.Errorf("nobody announces: %v", err)
	}
	if _, err := s.announce(asCaller(t.Context(), other), announceInput{Intent: "y", Scope: []string{"src"}}); err != nil {
		t.Error(err)
	}
	said, err := s.announce(asCaller(t.Context(), id), announceInput{Intent: "x", Scope: []string{s.checkout.root + "/src/a.go"}})
	if err != nil || !said.Complete || said.ID != id || len(said.Overlaps) != 1 || said.Overlaps[0].Checkout.ID != s.checkout.id {
		t.Errorf("%+v, %v", said, err)
	}
	list, err := s.peersList(asCaller(t.Context(), id), peersInput{})
	if err != nil || list.Caller != id || list.Count != 2 || list.Covered != 1 || !list.Complete || len(list.Overlaps) != 1 || len(list.Boards) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if b := list.Boards[0]; b.ID != s.checkout.id || b.Branch != "main" || !b.ThisCheckout || b.Attached != 2 || b.Standing != "absent" {
		t.Errorf("%+v", b)
	}
	status, err := s.status(t.Context(), statusInput{})
	if err != nil || status.CheckoutID != s.checkout.id || status.Git.Linked || len(status.Servers) != 1 || !status.Servers[0].Primary || status.Servers[0].Peers != 2 {
		t.Errorf("%+v, %v", status, err)
	}

	outside := gatherServer(checkout{})
	outside.board.attach(attachment{Transport: "stdio"})
	list, err = outside.peersList(t.Context(), peersInput{})
	text, _ := json.Marshal(list)
	if err != nil || list.Count != 1 || list.Covered != 0 || !list.Complete || list.Caller != "" {
		t.Errorf("%s, %v", text, err)
	}
	if _, err := outside.announce(asCaller(t.Context(), "p1"), announceInput{Intent: "x", Scope: []string{"a"}}); err != nil {
		t.Error(err)
	}
	if _, err := outside.status(t.Context(), statusInput{}); err != nil {
		t.Error(err)
	}
}

func TestGatherOddNames(t *testing.T) {
	var names []string
	for _, name := range oddNames() {
		if name != "\xff" { // JSON cannot carry it
			names = append(names, name)
		}
	}
	root := gitRepo(t)
	at := func(name string) string { return filepath.Join(filepath.Dir(root), name) }
	main := serving(t, gatherServer(mustFind(t, root)))
	for i, name := range names {
		gitIn(t, root, "worktree", "add", "-q", "-b", fmt.Sprint("b", i), at(name))
		newSibling(t, at(name)).attach(t, fmt.Sprintf("%q", name), fmt.Sprint("dir", i))
	}
	main.board.attach(attachment{Transport: "stdio", Carried: carried{Name: "main"}})
	check := func(s *server, out peersOutput, names []string) {
		t.Helper()
		if out.Boards[0].Worktree != s.checkout.root || !out.Boards[0].ThisCheckout {
			t.Errorf("first comes %+v", out.Boards[0])
		}
		for _, name := range names {
			b, seen := boardOf(t, out, at(name)), 0
			for _, p := range out.Peers {
				if p.Checkout.Worktree == at(name) {
					seen++
					if p.Announcement.Intent != fmt.Sprintf("%q", name) || p.Checkout.ID != digest(at(name)) {
						t.Errorf("%q holds %+v", name, p)
					}
				}
			}
			if seen != 1 || b.Standing != "ready" && s.checkout.root != at(name) {
				t.Errorf("%q is there %d times, %+v", name, seen, b)
			}
		}
	}
	out := mustList(t, main, peersInput{})
	if !out.Complete || out.Count != len(names)+1 || out.Covered != len(names)+1 {
		t.Errorf("complete %v, %d peers, %d covered: %s", out.Complete, out.Count, out.Covered, out.Reason)
	}
	check(main, out, names)
	from := gatherServer(mustFind(t, at(names[0]))) // alone beside that checkout's server
	out = mustList(t, from, peersInput{})
	check(from, out, names)

	fakeGit(t, oldGit)
	out = mustList(t, main, peersInput{})
	var tellable []string
	for _, name := range names {
		if !strings.Contains(name, "\n") {
			tellable = append(tellable, name)
		}
	}
	check(main, out, tellable)
	if out.Complete != (len(tellable) == len(names)) || out.Complete == strings.Contains(out.Reason, "skipped") {
		t.Errorf("complete %v, %q", out.Complete, out.Reason)
	}
}

// Each sibling's fault shows on its own board and nowhere else.
func TestGatherStandings(t *testing.T) {
	faults := map[string]struct {
		standing string
		reason   string // what the board's reason says; "" when there is none
		set      func(t *testing.T, s *sibling)
	}{
		"ready":   {"ready", "", func(t *testing.T, s *sibling) {}},
		"departs": {"ready", "", func(t *testing.T, s *sibling) { s.board.detach("p1") }},
		"older":   {"outdated", "", func(t *testing.T, s *sibling) { s.doc.Version = "0.9.0" }},
		"unknown": {"outdated", "", func(t *testing.T, s *sibling) { s.doc.Version = "" }},
		"devel":   {"ready", "", func(t *testing.T, s *sibling) { s.doc.Version = "(devel)" }},
		"replaced": {"outdated", "", func(t *testing.T, s *sibling) {
			s.doc.Executable = &executable{Path: filepath.Join(s.checkout.root, ".git"), Mtime: 1, Size: 1}
		}},
		"removed": {"outdated", "", func(t *testing.T, s *sibling) {
			s.doc.Executable = &executable{Path: filepath.Join(s.checkout.root, "no"), Mtime: 1, Size: 1}
		}},
		"starting":   {"starting", "has not said", func(t *testing.T, s *sibling) { s.doc.URL = nil }},
		"notfound":   {"ready", "404", func(t *testing.T, s *sibling) { s.answers(nil, answering(404, `{}`)) }},
		"junk":       {"ready", "not a board", func(t *testing.T, s *sibling) { s.answers(nil, answering(200, `<html>`)) }},
		"boardless":  {"ready", "not a board", func(t *testing.T, s *sibling) { s.answers(nil, answering(200, `{"count":1}`)) }},
		"wrongtypes": {"ready", "not a board", func(t *testing.T, s *sibling) { s.answers(nil, answering(200, `{"peers":[{"id":7}]}`)) }},
		"huge": {"ready", "bytes", func(t *testing.T, s *sibling) {
			s.answers(nil, answering(200, `{"peers":[],"x":"`+strings.Repeat("x", boardLimit)+`"}`))
		}},
		"endless": {"ready", "bytes", func(t *testing.T, s *sibling) {
			s.answers(nil, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Transfer-Encoding", "identity") // as long as the connection
				for r.Context().Err() == nil {
					if _, err := w.Write(make([]byte, 1<<16)); err != nil {
						return
					}
				}
			})
		}},
		"hangsup": {"ready", "board could not be read", func(t *testing.T, s *sibling) {
			s.answers(nil, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
		}},
		"foreign": {"stale", "does not answer", func(t *testing.T, s *sibling) { s.answers(answering(200, `{}`), nil) }},
		"liar": {"stale", "does not answer", func(t *testing.T, s *sibling) {
			s.answers(func(w http.ResponseWriter, r *http.Request) {
				r.Header.Set("Majordomus-Challenge", "another")
				s.serveHome(w, r)
			}, nil)
		}},
		"refused": {"stale", "does not answer", func(t *testing.T, s *sibling) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			url := "http://" + l.Addr().String()
			l.Close()
			s.doc.URL = &url
		}},
		"elsewhere": {"stale", "does not answer", func(t *testing.T, s *sibling) { s.doc.Root = filepath.Dir(s.doc.Root) }},
		"dead":      {"stale", "", func(t *testing.T, s *sibling) {}},
		"corrupt":   {"stale", "", func(t *testing.T, s *sibling) {}},
		"absent":    {"absent", "", func(t *testing.T, s *sibling) {}},
	}
	var names []string
	for name := range faults {
		names = append(names, name)
	}
	root, at := gatherRepo(t, names...)
	main := serving(t, gatherServer(mustFind(t, root)))
	siblings := map[string]*sibling{}
	for name, fault := range faults {
		s := newSibling(t, at(name))
		s.attach(t, name, name)
		fault.set(t, s)
		s.plant(t)
		switch name {
		case "dead":
			s.release()
		case "corrupt":
			mustWrite(t, leasePath(at(name)), "{")
		case "absent":
			os.Remove(leasePath(at(name)))
		}
		siblings[name] = s
	}
	out := mustList(t, main, peersInput{View: "full"})
	if out.Complete || out.Reason != "" || out.Covered != len(faults)+1 || len(out.Boards) != len(faults)+1 || len(out.Omitted) != 0 {
		t.Errorf("complete %v, %q, %d covered, %d boards, omitted %v", out.Complete, out.Reason, out.Covered, len(out.Boards), out.Omitted)
	}
	peersAt := map[string]int{}
	for _, p := range out.Peers {
		peersAt[p.Checkout.Worktree]++
	}
	status, err := main.status(t.Context(), statusInput{})
	if err != nil || len(status.Servers) != len(faults)+1 || !status.Servers[0].ThisCheckout || status.ThisProcess == nil || status.Complete {
		t.Errorf("status: %+v, %v", status, err)
	}
	for _, v := range status.Servers[1:] {
		if want := faults[filepath.Base(v.Worktree)].standing; v.Standing != want || v.Branch != filepath.Base(v.Worktree) {
			t.Errorf("status of %s: %+v", v.Worktree, v)
		}
		if (v.Standing == "ready" || v.Standing == "absent") != (v.Reason == "") && faults[filepath.Base(v.Worktree)].reason == "" {
			t.Errorf("status of %s: %s, reason %q", v.Worktree, v.Standing, v.Reason)
		}
	}
	if text, _ := json.Marshal(status); strings.Contains(string(text), siblings["ready"].doc.Token) {
		t.Error("the status shows a token")
	}
	for name, fault := range faults {
		b := boardOf(t, out, at(name))
		if b.Standing != fault.standing || (b.Reason == "") != (fault.reason == "") || !strings.Contains(b.Reason, fault.reason) {
			t.Errorf("%s: %s, reason %q", name, b.Standing, b.Reason)
		}
		read := fault.reason == "" && (fault.standing == "ready" || fault.standing == "outdated")
		if (peersAt[at(name)] == 1) != read {
			t.Errorf("%s: %d peers", name, peersAt[at(name)])
		}
		heard := siblings[name].heard()
		if spared := strings.Contains("elsewhere refused starting dead corrupt absent", name); spared == (len(heard) > 0) {
			t.Errorf("%s was asked %q", name, heard)
		}
		for _, target := range heard {
			if target != "/" && target != "/api/v1/peers?checkouts=this&view=full" {
				t.Errorf("%s was asked for %s", name, target)
			}
		}
	}

	// The summary leaves out what holds nothing, and counts it.
	short := mustList(t, main, peersInput{})
	if got := fmt.Sprint(short.Omitted); got != "map[absent:1 stale:2]" || len(short.Boards) != len(out.Boards)-3 || short.Covered != out.Covered {
		t.Errorf("omitted %s, %d boards", got, len(short.Boards))
	}
	// This checkout alone: nobody is looked at.
	for _, s := range siblings {
		s.heard()
	}
	fakeGit(t, "echo called >&2; exit 1")
	one := mustList(t, main, peersInput{Checkouts: "this", View: "full"})
	if one.Covered != 1 || !one.Complete || len(one.Boards) != 1 || one.Reason != "" {
		t.Errorf("%+v", one)
	}
	for name, s := range siblings {
		if heard := s.heard(); heard != nil {
			t.Errorf("%s was asked %q", name, heard)
		}
	}
	// Without git there is this checkout, and git's words.
	one = mustList(t, main, peersInput{})
	if one.Covered != 1 || one.Complete || one.Reason != "called" {
		t.Errorf("%+v", one)
	}
}

// A sibling may leave everything optional out, and say odd things.
func TestGatherTolerates(t *testing.T) {
	root, at := gatherRepo(t, "wt")
	s := newSibling(t, at("wt"))
	s.answers(nil, answering(200, `{"new":1,"peers":[
		{"id":"p1","client":{"name":"","version":""},"transport":"carrier pigeon","connected_at":"","last_seen_seconds_ago":-5,"attached":true,
		 "checkout":{"id":"forged","worktree":"/forged","this_checkout":true},"announcement":{"intent":"x","scope":["a/","a","../b"],"at":""}},
		{"id":"p2","claims":[{"intent":"y"}],"mesh":{"name":"n"}},
		{}]}`))
	main := serving(t, gatherServer(mustFind(t, root)))
	id := main.board.attach(attachment{Transport: "stdio"})
	out := mustList(t, main, peersInput{})
	if !out.Complete || out.Count != 2 || len(out.Peers) != 4 {
		t.Fatalf("%+v", out)
	}
	p := out.Peers[1]
	if p.Client.Name != notInitialized || p.Transport != "http" || p.LastSeen != 0 || p.Checkout.Worktree != at("wt") || p.Checkout.ThisCheckout || p.Checkout.Branch != "wt" {
		t.Errorf("%+v in %+v", p, p.Checkout)
	}
	if len(p.Claims) != 1 || fmt.Sprint(p.Claims[0].Scope) != "[a]" {
		t.Errorf("claims %+v", p.Claims)
	}
	text, _ := json.Marshal(out)
	if strings.Contains(string(text), "null") || strings.Contains(string(text), "forged") {
		t.Errorf("%s", text)
	}
	said, err := main.announce(asCaller(t.Context(), id), announceInput{Intent: "mine", Scope: []string{"a/b"}})
	if err != nil || !said.Complete || len(said.Overlaps) != 1 || said.Overlaps[0].Checkout.Worktree != at("wt") || said.Checkout != nil {
		t.Errorf("%+v, %v", said, err)
	}
	if out = mustList(t, main, peersInput{}); len(out.Overlaps) != 1 || out.Overlaps[0].Peer != id || out.Overlaps[0].Claimant.Checkout.Worktree != at("wt") {
		t.Errorf("%+v", out.Overlaps)
	}
	s.answers(answering(500, ""), nil)
	if said, err := main.announce(asCaller(t.Context(), id), announceInput{Intent: "mine", Scope: []string{"a/b"}}); err != nil || said.Complete {
		t.Errorf("%+v, %v", said, err)
	}
}

// A server that leaves while it is asked is no fault, and its successor is asked in its place.
func TestGatherSuccessor(t *testing.T) {
	root, at := gatherRepo(t, "wt")
	first, second := newSibling(t, at("wt")), newSibling(t, at("wt"))
	second.attach(t, "successor")
	first.plant(t)
	first.answers(func(w http.ResponseWriter, r *http.Request) {
		second.plant(t)
		panic(http.ErrAbortHandler)
	}, nil)
	main := serving(t, gatherServer(mustFind(t, root)))
	out := mustList(t, main, peersInput{})
	if !out.Complete || len(out.Peers) != 1 || out.Peers[0].Announcement.Intent != "successor" {
		t.Errorf("%+v", out)
	}
	second.answers(nil, func(w http.ResponseWriter, r *http.Request) {
		os.Remove(leasePath(at("wt")))
		w.WriteHeader(404)
	})
	if out = mustList(t, main, peersInput{}); !out.Complete || len(out.Peers) != 0 || out.Omitted["absent"] != 1 {
		t.Errorf("%+v", out)
	}
}

// Alone, a process sees the server of its own checkout as a guest.
func TestGatherAlone(t *testing.T) {
	root, at := gatherRepo(t, "wt")
	host, other := newSibling(t, root), newSibling(t, at("wt"))
	host.attach(t, "host", "src")
	other.attach(t, "other", "src")
	s := gatherServer(mustFind(t, root))
	id := s.board.attach(attachment{Transport: "stdio"})
	said, err := s.announce(asCaller(t.Context(), id), announceInput{Intent: "mine", Scope: []string{"src"}})
	if err != nil || !said.Complete || len(said.Overlaps) != 2 {
		t.Errorf("%+v, %v", said, err)
	}
	out := mustList(t, s, peersInput{})
	if !out.Complete || out.Count != 3 || len(out.Boards) != 2 || out.Boards[0].Attached != 2 || out.Boards[0].Standing != "ready" || len(out.Overlaps) != 3 {
		t.Errorf("%+v", out)
	}
	if out.Peers[0].Claims[0].Intent != "mine" || out.Peers[1].Claims[0].Intent != "host" {
		t.Errorf("%+v", out.Peers)
	}
	host.heard()
	if out := mustList(t, s, peersInput{Checkouts: "this"}); out.Complete || out.Count != 1 || out.Boards[0].Reason == "" {
		t.Errorf("%+v", out)
	}
	if heard := host.heard(); heard != nil {
		t.Errorf("it was asked %q", heard)
	}
	host.release()
	if out := mustList(t, s, peersInput{Checkouts: "this"}); !out.Complete || out.Boards[0].Standing != "stale" {
		t.Errorf("%+v", out)
	}
}

// Another repository that stands where a worktree was registered is none of ours.
func TestGatherAnotherRepository(t *testing.T) {
	root, at := gatherRepo(t, "wt")
	if err := os.RemoveAll(at("wt")); err != nil {
		t.Fatal(err)
	}
	main := serving(t, gatherServer(mustFind(t, root)))
	if out := mustList(t, main, peersInput{}); !out.Complete || out.Covered != 2 || out.Omitted["absent"] != 1 {
		t.Errorf("removed: %+v", out)
	}
	gitIn(t, at(""), "init", "-q", at("wt"))
	stranger := newSibling(t, at("wt"))
	stranger.attach(t, "secret")
	if out := mustList(t, main, peersInput{}); !out.Complete || len(out.Peers) != 0 || stranger.heard() != nil {
		t.Errorf("replaced: %+v", out)
	}
}

// However many siblings are silent, a gather ends by its bound, and those that are not are in it.
func TestGatherIsBounded(t *testing.T) {
	root := gitRepo(t)
	main := serving(t, gatherServer(mustFind(t, root)))
	main.set.timing.probe = time.Second
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	url := "http://" + silent.Addr().String()
	wt := gatherWorktrees(t, root, 160)
	newSibling(t, wt[0]).attach(t, "here")
	mute := newSibling(t, wt[1])
	mute.answers(nil, func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	silence := func(roots []string) {
		for _, root := range roots {
			doc := gatherLease(root)
			doc.URL = &url
			f := holdLease(t, root, doc)
			t.Cleanup(func() { f.Close() })
		}
	}
	silence(wt[2:20])
	out := mustList(t, main, peersInput{})
	if out.Complete || len(out.Peers) != 1 || out.Omitted["absent"] != 140 {
		t.Errorf("complete %v, %d peers, omitted %v", out.Complete, len(out.Peers), out.Omitted)
	}
	if b := boardOf(t, out, wt[1]); b.Standing != "ready" || !strings.Contains(b.Reason, "could not be read") {
		t.Errorf("one that proves itself and says no more: %+v", b)
	}
	if b := boardOf(t, out, wt[2]); b.Standing != "stale" || !strings.Contains(b.Reason, "does not answer") {
		t.Errorf("a silent one: %+v", b)
	}

	status, err := main.status(t.Context(), statusInput{})
	if err != nil || len(status.Servers) != 21 || status.Omitted["absent"] != 140 {
		t.Errorf("status lists %d, omits %v, %v", len(status.Servers), status.Omitted, err)
	}

	// More than can be asked in time: the gather does not wait for its turn with each.
	silence(wt[20:])
	main.set.timing.probe = 300 * time.Millisecond
	out = mustList(t, main, peersInput{})
	if out.Complete || len(out.Boards) != 161 {
		t.Errorf("complete %v, %d boards", out.Complete, len(out.Boards))
	}
	last := out.Boards[len(out.Boards)-1]
	if last.Standing != "stale" || !strings.Contains(last.Reason, "no time") {
		t.Errorf("the last: %+v", last)
	}
}

func TestGatherAsks32AtOnce(t *testing.T) {
	root := gitRepo(t)
	main := serving(t, gatherServer(mustFind(t, root)))
	main.set.timing.probe = patience
	var asking, most atomic.Int64
	var once sync.Once
	full := make(chan struct{}) // closed when as many ask as may
	for _, wt := range gatherWorktrees(t, root, gatherTogether+8) {
		s := newSibling(t, wt)
		s.answers(func(w http.ResponseWriter, r *http.Request) {
			n := asking.Add(1)
			defer asking.Add(-1)
			if n > most.Load() {
				most.Store(n)
			}
			if n == gatherTogether {
				once.Do(func() { close(full) })
			}
			select {
			case <-full:
			case <-r.Context().Done():
			}
			s.serveHome(w, r)
		}, nil)
	}
	if out := mustList(t, main, peersInput{}); !out.Complete || len(out.Boards) != gatherTogether+9 {
		t.Errorf("complete %v, %d boards", out.Complete, len(out.Boards))
	}
	if most.Load() != gatherTogether {
		t.Errorf("%d were asked at once", most.Load())
	}
}

// Gathers at the same time share one run of git, and one that gives up does not end it for the others.
func TestGatherSharesGit(t *testing.T) {
	root, _ := gatherRepo(t, "wt")
	s := gatherServer(mustFind(t, root))
	s.set.timing.probe = patience
	dir := t.TempDir()
	started, release := filepath.Join(dir, "started"), filepath.Join(dir, "release")
	fakeGit(t, "echo >>'"+started+"'; while ! test -e '"+release+"'; do sleep 0.01; done; exec \"$GIT\" \"$@\"")
	first := make(chan listing, 1) // a receive is the answer of the one that started git
	go func() { first <- s.enumerate(context.Background()) }()
	eventually(t, "what another process does", func() bool { _, err := os.Stat(started); return err == nil })
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		if l := s.enumerate(gone); l.reason == "" || len(l.checkouts) != 1 {
			t.Errorf("%+v", l)
		}
	}
	mustWrite(t, release, "")
	select {
	case l := <-first:
		if l.reason != "" || len(l.checkouts) != 2 {
			t.Errorf("%+v", l)
		}
	case <-time.After(patience):
		t.Fatal("it never came back")
	}
	if text, _ := os.ReadFile(started); string(text) != "\n" {
		t.Errorf("git was started %d times", len(text))
	}
}
