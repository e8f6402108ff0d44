package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// boardShows fails unless the board lists exactly these, each as "id name attached".
func boardShows(t *testing.T, b *board, want ...string) {
	t.Helper()
	var got []string
	for _, p := range b.peers() {
		got = append(got, fmt.Sprintf("%s %s %v", p.ID, p.Mesh.Name, p.Attached))
	}
	if !slices.Equal(got, want) {
		t.Fatalf("the board shows %q, want %q", got, want)
	}
}

func boardClaims(t testing.TB, b *board, id peerID, in announceInput) announced {
	t.Helper()
	done, err := b.announce(id, in, "")
	if err != nil {
		t.Fatal(err)
	}
	return done
}

func boardFind(t *testing.T, b *board, id peerID) peer {
	t.Helper()
	for _, p := range b.peers() {
		if p.ID == id {
			return p
		}
	}
	t.Fatalf("%s is not listed", id)
	return peer{}
}

func TestBoardAttach(t *testing.T) {
	b := newBoard()
	p1 := b.attach(attachment{Transport: "stdio", Carried: carried{Name: "repo"}})
	p2 := b.attach(attachment{Transport: "http", Unverified: true})
	if p1 != "p1" || p2 != "p2" {
		t.Fatalf("ids are %s, %s", p1, p2)
	}
	p := boardFind(t, b, p2)
	if p.Client.Name != notInitialized || p.Client.Version != "" || p.Address != nil || p.Announcement != nil || !p.Mesh.Unverified {
		t.Errorf("before initialize: %+v", p)
	}
	b.identify(p2, clientInfo{Name: "  ", Version: "1"})
	if p := boardFind(t, b, p2); p.Client.Name != notInitialized || p.Client.Version != "" {
		t.Errorf("a blank name identifies as %+v", p.Client)
	}
	b.identify(p2, clientInfo{Name: "qa", Title: "Q", Version: "2"})
	if p := boardFind(t, b, p2); p.Client != (clientInfo{"qa", "Q", "2"}) {
		t.Errorf("identified as %+v", p.Client)
	}
	b.detach(p2)
	boardShows(t, b, "p1 repo true")
	b.attach(attachment{Transport: "http"})
	boardShows(t, b, "p1 repo true", "p3 peer true")

	text, _ := json.Marshal(boardFind(t, b, p1))
	for _, want := range []string{`"id":"p1"`, `"claims":[]`, `"last_seen_seconds_ago":0`, `"mesh":{"name":"repo","circle":"default","role":"agent"}`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s lacks %s", text, want)
		}
	}
	for _, not := range []string{"announcement", "address", "checkout", "title", "null"} {
		if strings.Contains(string(text), not) {
			t.Errorf("%s has %s", text, not)
		}
	}
}

func TestBoardOrder(t *testing.T) {
	b := newBoard()
	for range 12 {
		b.attach(attachment{Transport: "http"})
	}
	var ids []peerID
	for _, p := range b.peers() {
		ids = append(ids, p.ID)
	}
	if got := fmt.Sprint(ids); got != "[p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12]" {
		t.Error(got)
	}
}

// Who speaks again is attached again, under its number and in its place, even when nothing of it was listed any more.
func TestBoardSpeaksAgain(t *testing.T) {
	b := newBoard()
	a := b.attach(attachment{Transport: "http", Carried: carried{Name: "a"}})
	c := b.attach(attachment{Transport: "http", Carried: carried{Name: "c"}})
	b.identify(a, clientInfo{Name: "qa"})
	b.detach(a)
	b.detach(a)
	boardShows(t, b, "p2 c true")
	b.touch(a)
	boardShows(t, b, "p1 a true", "p2 c true")
	if got := boardFind(t, b, a).Client.Name; got != "qa" {
		t.Errorf("it is %q", got)
	}
	b.detach(a)
	boardClaims(t, b, a, announceInput{Intent: "x"})
	boardShows(t, b, "p1 a true", "p2 c true")

	// Forgotten altogether, the number is still its own.
	b.detach(c)
	for range goneLimit {
		b.detach(b.attach(attachment{Transport: "http"}))
	}
	if got := len(b.members); got != goneLimit+1 {
		t.Errorf("%d entries are kept", got)
	}
	b.touch(c)
	boardShows(t, b, "p1 a true", "p2 peer true")
	for _, odd := range []peerID{"", "p", "p0", "p02", "p-1", "p99999", "x2", "2"} {
		b.touch(odd)
	}
	boardShows(t, b, "p1 a true", "p2 peer true")
	if _, err := b.announce("p99999", announceInput{Intent: "x"}, ""); !boardRefused(err, "refused") {
		t.Errorf("unknown peer: %v", err)
	}
}

func boardRefused(err error, code string) bool {
	var r *refusal
	return errors.As(err, &r) && r.code == code
}

func TestBoardNames(t *testing.T) {
	b := newBoard()
	wants := func(name, circle string) attachment {
		return attachment{Transport: "http", Carried: carried{Name: name, Circle: circle}}
	}
	one := b.attach(wants("build", ""))
	two := b.attach(wants("build ", ""))
	other := b.attach(wants("build", "elsewhere"))
	if b.displayName(one) != "build" || b.displayName(two) != "build-2" || b.displayName(other) != "build" {
		t.Fatal(b.displayName(one), b.displayName(two), b.displayName(other))
	}
	b.detach(one)
	three := b.attach(wants("build", ""))
	if b.displayName(three) != "build" {
		t.Errorf("the freed name is not given: %s", b.displayName(three))
	}
	b.touch(one) // its name is taken by now
	if b.displayName(one) != "build-3" {
		t.Errorf("it came back as %s", b.displayName(one))
	}
	b.detach(two)
	b.touch(two)
	if b.displayName(two) != "build-2" {
		t.Errorf("it did not keep its name: %s", b.displayName(two))
	}
	long := strings.Repeat("x", 100)
	b.attach(wants(long, ""))
	if got := b.displayName(b.attach(wants(long, ""))); got != strings.Repeat("x", 62)+"-2" {
		t.Errorf("a long name became %q", got)
	}
	if b.displayName("p77") != "" {
		t.Error("a stranger has a name")
	}
}

func TestCleanName(t *testing.T) {
	for in, want := range map[string]string{
		"": "peer", "*": "peer", "all": "all", "../../x": "..-..-x", "a/b": "a-b", "a.b": "a.b", "a\nb": "a-b", "a\u202eb": "a-b",
		"my  project!": "my-project", "naïve-é": "naïve-é", "_x": "_x", "日本": "日本", "<img onerror>": "img-onerror",
		strings.Repeat("a", 10_000): strings.Repeat("a", 64),
	} {
		if got := cleanName(in, "peer"); got != want {
			t.Errorf("cleanName(%q) = %q, want %q", in, got, want)
		}
	}
}

// The same identity is the same peer, by the same id and name, and never listed twice; another's word for it is not.
func TestBoardIdentity(t *testing.T) {
	b := newBoard()
	worker := attachment{Transport: "http", Identity: strings.Repeat("a", 32), Carried: carried{
		Initialize: json.RawMessage(`{"protocolVersion":"2025-06-18","clientInfo":{"name":"qa","title":"Q","version":"1"}}`),
		Version:    "2025-06-18", Name: "w", Circle: "c", Role: "service", Description: "d\ne",
		Claims: []announcement{
			{Name: "b", Intent: "two", Scope: []string{"src"}, At: "2026-01-02T03:04:05Z"},
			{Intent: "one", At: "2026-01-02T03:04:06Z"},
			{Name: "bad", Intent: " "},
			{Name: "a", Intent: "three", Scope: []string{"x", "../y", "./x"}, At: "yesterday"},
		},
	}}
	b.attach(attachment{Transport: "stdio", Carried: carried{Name: "w", Circle: "c"}})
	id := b.attach(worker)
	p := boardFind(t, b, id)
	if p.Client != (clientInfo{"qa", "Q", "1"}) || *p.Mesh != (peerMesh{Name: "w-2", Circle: "c", Role: "service", Description: "d e"}) {
		t.Errorf("%+v %+v", p.Client, *p.Mesh)
	}
	if len(p.Claims) != 3 || p.Claims[0].Name != "" || p.Claims[1].Name != "a" || p.Claims[2].Name != "b" {
		t.Fatalf("claims are %+v", p.Claims)
	}
	if p.Claims[0].At != "2026-01-02T03:04:06Z" || p.Claims[0].Scope == nil || fmt.Sprint(p.Claims[1].Scope) != "[x]" || p.Announcement.Intent != "three" {
		t.Errorf("%+v, latest %+v", p.Claims, p.Announcement)
	}
	carry := worker.Carried
	carry.Name, carry.Claims = "w-2", []announcement{p.Claims[2], p.Claims[0], p.Claims[1]} // as they were made
	stranger := worker
	stranger.Unverified = true
	if got := b.attach(stranger); got == id {
		t.Error("a stranger inherits the peer")
	}
	again := b.attach(attachment{Transport: "http", Identity: worker.Identity, Carried: carry})
	if again != id || b.displayName(id) != "w-2" {
		t.Errorf("it comes back as %s %s", again, b.displayName(id))
	}
	b.detach(id)
	if again := b.attach(attachment{Transport: "http", Identity: worker.Identity, Carried: carry}); again != id || b.displayName(id) != "w-2" {
		t.Errorf("after detaching it comes back as %s %s", again, b.displayName(id))
	}
	boardShows(t, b, "p1 w true", "p2 w-2 true", "p3 w-3 true")

	// On another server it is there whole, at once.
	next := newBoard()
	next.attach(attachment{Transport: "http", Identity: worker.Identity, Carried: carry})
	moved, old := next.peers()[0], boardFind(t, b, id)
	if fmt.Sprint(moved.Claims, *moved.Announcement, moved.Client) != fmt.Sprint(old.Claims, *old.Announcement, old.Client) {
		t.Errorf("moved: %+v, was %+v", moved, old)
	}
	if moved.Mesh.Name != "w-2" {
		t.Errorf("moved as %s", moved.Mesh.Name)
	}
}

func TestBoardDeparted(t *testing.T) {
	b := newBoard()
	var ids []peerID
	for i := range departedLimit + 3 {
		ids = append(ids, b.attach(attachment{Transport: "http"}))
		boardClaims(t, b, ids[i], announceInput{Intent: fmt.Sprint(i)})
	}
	slices.Reverse(ids) // the last to attach is the first to leave
	for _, id := range ids {
		b.detach(id)
	}
	list := b.peers()
	if len(list) != departedLimit || attached(list) != 0 {
		t.Fatalf("%d are listed, %d attached", len(list), attached(list))
	}
	if list[0].ID != "p1" || list[departedLimit-1].ID != "p32" {
		t.Errorf("from %s to %s: not those who left last", list[0].ID, list[departedLimit-1].ID)
	}
	b.touch("p5")
	if p := boardFind(t, b, "p5"); !p.Attached || len(p.Claims) != 1 {
		t.Errorf("came back as %+v", p)
	}
	b.touch("p35")
	if p := boardFind(t, b, "p35"); !p.Attached || len(p.Claims) != 0 {
		t.Errorf("came back as %+v", p)
	}
}

// What strangers leave behind pushes out what other strangers have left, and nothing else.
func TestStrangersDepart(t *testing.T) {
	b := newBoard()
	leave := func(a attachment) {
		id := b.attach(a)
		if _, err := b.announce(id, announceInput{Intent: "half done"}, "/r"); err != nil {
			t.Fatal(err)
		}
		b.detach(id)
	}
	leave(attachment{Identity: "ours"})
	for i := range departedLimit + 3 {
		leave(attachment{Identity: fmt.Sprint("stranger", i), Unverified: true})
	}
	if list := b.peers(); len(list) != departedLimit || list[0].ID != "p1" {
		t.Errorf("left are %d, the first %s", len(list), list[0].ID)
	}
}

func TestBoardAnnounce(t *testing.T) {
	b := newBoard()
	id := b.attach(attachment{Transport: "http"})
	done := boardClaims(t, b, id, announceInput{Intent: " parser ", Scope: []string{"./src/", "src", "lib/x", "*.md"}, Claim: " "})
	if c := done.peer.Claims[0]; c.Intent != "parser" || c.Name != "" || fmt.Sprint(c.Scope) != "[src lib/x *.md]" || done.released != nil {
		t.Errorf("%+v, released %v", c, done.released)
	}
	if _, err := time.Parse(time.RFC3339, done.peer.Claims[0].At); err != nil || !strings.HasSuffix(done.peer.Claims[0].At, "Z") {
		t.Errorf("at %q", done.peer.Claims[0].At)
	}
	boardClaims(t, b, id, announceInput{Intent: "tests", Claim: "t"})
	done = boardClaims(t, b, id, announceInput{Intent: "less", Scope: []string{"src/a", "lib"}})
	if fmt.Sprint(done.released) != "[src *.md]" || done.peer.Announcement.Intent != "less" || len(done.peer.Claims) != 2 || done.peer.Claims[1].Name != "t" {
		t.Errorf("%+v", done)
	}
	// Listings made before are not touched by what comes after.
	before := boardFind(t, b, id)
	boardClaims(t, b, id, announceInput{Intent: "A", Claim: "A"})
	if len(before.Claims) != 2 || before.Announcement.Intent != "less" {
		t.Errorf("changed afterwards: %+v", before)
	}
	if got := boardFind(t, b, id); got.Claims[1].Name != "A" || got.Announcement.Name != "A" {
		t.Errorf("%+v", got)
	}
}

func TestBoardLimits(t *testing.T) {
	b := newBoard()
	id := b.attach(attachment{Transport: "http"})
	paths := func(n int) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprint("p", i))
		}
		return list
	}
	for _, tt := range []struct {
		in   announceInput
		want string // in the message; "" when it is fine
	}{
		{announceInput{Intent: strings.Repeat("é", 500)}, ""},
		{announceInput{Intent: strings.Repeat("é", 501)}, "500"},
		{announceInput{Intent: " \n "}, "blank"},
		{announceInput{Intent: "a\nb"}, "one line"},
		{announceInput{Intent: "a\u2028b"}, "one line"},
		{announceInput{Intent: "\na tab\tis fine\n"}, ""},
		{announceInput{Intent: "x", Claim: strings.Repeat("n", 200)}, ""},
		{announceInput{Intent: "x", Claim: strings.Repeat("n", 201)}, "200"},
		{announceInput{Intent: "x", Claim: "a\rb"}, "one line"},
		{announceInput{Intent: "x", Scope: paths(256)}, ""},
		{announceInput{Intent: "x", Scope: paths(257)}, "256"},
		{announceInput{Intent: "x", Scope: []string{strings.Repeat("a", 1024)}}, ""},
		{announceInput{Intent: "x", Scope: []string{strings.Repeat("a", 1025)}}, "1024"},
		{announceInput{Intent: "x", Scope: []string{"ok", "../other/x"}}, `"../other/x"`},
		{announceInput{Intent: "x", Scope: []string{"/etc/passwd"}}, `"/etc/passwd"`},
		{announceInput{Intent: "x", Scope: []string{"a\x00b"}}, "zero byte"},
	} {
		_, err := b.announce(id, tt.in, "")
		if tt.want == "" && err != nil || tt.want != "" && (!boardRefused(err, "invalid_input") || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%.60v: %v, want %q", tt.in, err, tt.want)
		}
	}
	for i := len(boardFind(t, b, id).Claims); i < claimLimit; i++ {
		boardClaims(t, b, id, announceInput{Intent: "x", Claim: fmt.Sprint(i)})
	}
	if _, err := b.announce(id, announceInput{Intent: "x", Claim: "more"}, ""); !boardRefused(err, "invalid_input") || !strings.Contains(err.Error(), "64") {
		t.Errorf("the 65th claim: %v", err)
	}
	boardClaims(t, b, id, announceInput{Intent: "y", Claim: "63"})
}

// Of two peers who claim the same ground at once, at least one is told.
func TestBoardRace(t *testing.T) {
	for range 200 {
		b := newBoard()
		var group sync.WaitGroup
		told := make([]int, 4)
		for i := range told {
			id := b.attach(attachment{Transport: "http"})
			group.Go(func() {
				done, err := b.announce(id, announceInput{Intent: "x", Scope: []string{"src"}}, "")
				list, whole := overlapsWith(t.Context(), done.claim, done.others)
				if err != nil || !whole {
					t.Error(err, whole)
				}
				told[i] = len(list)
			})
		}
		group.Wait()
		slices.Sort(told)
		if !slices.Equal(told, []int{0, 1, 2, 3}) {
			t.Fatalf("they were told of %v", told)
		}
	}
}

func TestOverlaps(t *testing.T) {
	here, there := &peerCheckout{ID: "1"}, &peerCheckout{ID: "2"}
	claim := func(name, intent string, scope ...string) announcement {
		return announcement{Name: name, Intent: intent, Scope: scope}
	}
	peers := []peer{
		{ID: "p1", Attached: true, Checkout: here, Claims: []announcement{claim("", "one", "src", "doc"), claim("b", "two", "src/b")}},
		{ID: "p2", Checkout: here, Claims: []announcement{claim("", "three", "src/b/c", "doc/x")}},
		{ID: "p1", Attached: true, Checkout: there, Claims: []announcement{claim("", "four", "src-app"), claim("y", "five", ".")}},
	}
	list, whole := overlapsAmong(t.Context(), peers)
	var got []string
	for _, o := range list {
		got = append(got, fmt.Sprintf("%s@%s %s (%s@%s %s, %v) %v", o.Claimant.Peer, o.Claimant.Checkout.ID, o.Claimant.Intent, o.Peer, o.Checkout.ID, o.Intent, o.Attached, o.Paths))
	}
	want := []string{
		"p2@1 three (p1@1 one, true) [{src/b/c src} {doc/x doc}]",
		"p2@1 three (p1@1 two, true) [{src/b/c src/b}]",
		"p1@2 five (p1@1 one, true) [{. src} {. doc}]",
		"p1@2 five (p1@1 two, true) [{. src/b}]",
		"p1@2 five (p2@1 three, false) [{. src/b/c} {. doc/x}]",
	}
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			t.Fatalf("%q\nwant\n%q, %v", got, want, whole)
		}
	}
	mine, whole := overlapsWith(t.Context(), claim("", "m", "doc", "src/*.go"), peers)
	got = nil
	for _, o := range mine {
		got = append(got, fmt.Sprintf("%s@%s %s %v %v %v", o.Peer, o.Checkout.ID, o.Intent, o.Attached, o.Paths, o.Claimant))
	}
	want = []string{
		"p1@1 one true [{src/*.go src} {doc doc}] <nil>",
		"p2@1 three false [{doc doc/x}] <nil>",
		"p1@2 five true [{doc .} {src/*.go .}] <nil>",
	}
	if !slices.Equal(got, want) || !whole {
		t.Errorf("%q\nwant\n%q, %v", got, want, whole)
	}
	crowd := make([]peer, 400)
	for i := range crowd {
		crowd[i] = peer{Claims: []announcement{claim("", "all", ".")}}
	}
	if list, whole := overlapsAmong(t.Context(), crowd); whole || len(list) == 0 || len(list) > overlapLimit {
		t.Errorf("%d of 79,800 overlaps, whole %v", len(list), whole)
	}
}

func TestLastSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBoard()
		id := b.attach(attachment{Transport: "http"})
		<-time.After(1999 * time.Millisecond)
		if got := b.peers()[0].LastSeen; got != 1 {
			t.Errorf("after 1.999 s: %d", got)
		}
		b.touch(id)
		if got := b.peers()[0].LastSeen; got != 0 {
			t.Errorf("after a message: %d", got)
		}
	})
}

func TestBoardMemory(t *testing.T) {
	const sessions = 4000
	b := newBoard()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range sessions {
		b.identify(b.attach(attachment{Transport: "http", Unverified: true, Carried: carried{Name: fmt.Sprint("n", i)}}), clientInfo{Name: "qa", Version: "1"})
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / sessions
	t.Logf("%d bytes a session", each)
	if each > 1024 {
		t.Errorf("an idle session costs %d bytes", each)
	}
	runtime.KeepAlive(b)
}
