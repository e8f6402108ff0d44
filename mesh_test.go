//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// meshServer is the server of a checkout as far as the mesh needs one. It ends with the test.
func meshServer(t testing.TB, root string, log io.Writer) *server {
	t.Helper()
	dir, err := stateDir(root)
	must(t, err)
	place := os.Link
	if _, err := os.Lstat(leasePath(root)); err == nil {
		place = os.Rename
	}
	l, err := newLease(dir, leaseDocument{Schema: leaseSchema, Token: randomHex(16), Root: root}, place)
	must(t, err)
	set := &settings{version: "1.0.0"}
	set.timing, _ = readTimings(func(string) string { return "" })
	at := checkout{root: root, id: digest(root), gitDir: filepath.Join(root, ".git"), commonDir: filepath.Join(root, ".git")}
	s := newServer(set, at, slog.New(slog.NewTextHandler(log, nil)), l)
	s.openMesh()
	t.Cleanup(func() {
		s.close()
		s.closeMesh()
		l.release()
	})
	return s
}

// speak puts a peer on the board and gives the context of its calls. What they carry counts as written.
func speak(s *server, name string) (context.Context, *session) {
	n := &session{id: randomHex(16), trusted: true, peer: s.board.attach(attachment{Transport: "http", Identity: randomHex(16), Carried: carried{Name: name}})}
	return withCaller(context.Background(), n), n
}

// read has a peer read its inbox and confirms what it got.
func read(t testing.TB, s *server, ctx context.Context) (texts []string) {
	t.Helper()
	x := &exchange{}
	out, err := s.inbox(withExchange(ctx, x), inboxInput{})
	must(t, err)
	s.mesh.confirm(written, x.parcels...)
	for _, m := range out.Messages {
		text := m.Text
		if m.Again {
			text = "(again) " + text
		}
		texts = append(texts, text)
	}
	return texts
}

func send(t testing.TB, s *server, ctx context.Context, to, text string) sentOutput {
	t.Helper()
	out, err := s.notifyPeer(ctx, notifyInput{Peer: to, Message: text})
	must(t, err)
	return out
}

func wantTexts(t testing.TB, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("read %q, want %q", got, want)
	}
}

// What was answered is there after a crash at any moment; what a dead server had given out comes again, marked.
func TestMeshSurvives(t *testing.T) {
	root := newCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	send(t, s, a, "b", "read")
	wantTexts(t, read(t, s, b), "read")
	send(t, s, a, "b", "given")
	x := &exchange{}
	if out, err := s.inbox(withExchange(b, x), inboxInput{}); err != nil || len(out.Messages) != 1 {
		t.Fatal(out, err)
	}
	send(t, s, a, "b", "unread")
	asked, err := s.askPeer(a, askInput{Peer: "b", Query: "open"})
	must(t, err)

	s2 := meshServer(t, root, io.Discard)
	if s.holds() {
		t.Fatal("the first server still holds the lease")
	}
	if _, err := s.notifyPeer(a, notifyInput{Peer: "b", Message: "late"}); err == nil && s.holds() {
		t.Error("a server without a lease has stored a message")
	}
	speak(s2, "b")
	if name := s2.board.displayName("p1"); name != "b-2" {
		t.Errorf("the name of a peer that may come back was given to another: %q", name)
	}
	s2.mesh.mu.Lock()
	s2.mesh.keptUntil = time.Now()
	s2.mesh.mu.Unlock()
	b2, _ := speak(s2, "b")
	wantTexts(t, read(t, s2, b2), "(again) given", "unread", "open")
	out, err := s2.ackAsk(b2, ackInput{ID: asked.ID, Message: "yes"})
	if err != nil || out.Text != "acked #"+asked.ID+" with reply" {
		t.Error(out, err)
	}
	a2, _ := speak(s2, "a")
	wantTexts(t, read(t, s2, a2), "yes")
}

// A call whose session has ended writes no more: its caller may have come back, and gone on. One that was merely broken off is
// done.
func TestCallersThatHaveGone(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	first, n := speak(s, "a")
	b, _ := speak(s, "b")
	asked, err := s.askPeer(b, askInput{Peer: "a", Query: "?"})
	must(t, err)
	must(t, s.admit(n))
	broken, cancel := context.WithCancel(first)
	cancel()
	again := &session{id: randomHex(16), trusted: true, peer: n.peer}
	must(t, s.admit(again))
	writes := func(ctx context.Context) map[string]error {
		_, notify := s.notifyPeer(ctx, notifyInput{Peer: "b", Message: "notify"})
		_, ask := s.askPeer(ctx, askInput{Peer: "b", Query: "ask"})
		_, ack := s.ackAsk(ctx, ackInput{ID: asked.ID, Message: "ack"})
		_, all := s.broadcast(ctx, broadcastInput{Message: "broadcast"})
		_, schedule := s.scheduleOnce(ctx, scheduleOnceInput{Peer: "b", Text: "later", FireAt: stamp(time.Now().Add(time.Hour)), Kind: "notify"})
		return map[string]error{"notify": notify, "ask": ask, "ack": ack, "broadcast": all, "schedule": schedule}
	}
	gone := func(when string, ctx context.Context) {
		for what, err := range writes(ctx) {
			if !errors.Is(err, errSessionEnded) {
				t.Errorf("%s: %s: %v", when, what, err)
			}
		}
		wantTexts(t, read(t, s, b))
	}
	send(t, s, broken, "b", "broken off")
	wantTexts(t, read(t, s, b), "broken off")
	s.replace(again)
	gone("replaced", first)
	for what, err := range writes(withCaller(t.Context(), again)) {
		if err != nil {
			t.Errorf("in the new session: %s: %v", what, err)
		}
	}
	wantTexts(t, read(t, s, b), "notify", "ask", "ack", "broadcast")
	s.dismiss(again)
	gone("ended", withCaller(t.Context(), again))
}

// A peer_id is of one server: who has it from the one before is told when it means another peer now.
func TestNumbersOfTheServerBefore(t *testing.T) {
	root := newCheckout(t)
	s := meshServer(t, root, io.Discard)
	for _, name := range []string{"a", "c", "d"} { // p1, p2, p3
		speak(s, name)
	}
	s.mesh.journal.drain()
	s2 := meshServer(t, root, io.Discard)
	s2.mesh.mu.Lock()
	s2.mesh.keptUntil = time.Now()
	s2.mesh.mu.Unlock()
	a, _ := speak(s2, "a")
	d, _ := speak(s2, "d") // p2
	id := s2.fullID("p2")
	for what, try := range map[string]func() error{
		"notify": func() error { _, err := s2.notifyPeer(a, notifyInput{Peer: id, Message: "for c"}); return err },
		"kill":   func() error { _, err := s2.killPeer(a, killInput{Peer: id}); return err },
	} {
		if err := try(); err == nil || !strings.Contains(err.Error(), `is "d" now, and was "c" before`) {
			t.Errorf("%s: %v", what, err)
		}
	}
	wantTexts(t, read(t, s2, d))
	if _, err := s2.listPeers(a, listPeersInput{}); err != nil {
		t.Fatal(err)
	}
	send(t, s2, a, id, "for d")
	wantTexts(t, read(t, s2, d), "for d")
}

// A text that was not read in 24 hours is forgotten, an ask lapses, and whoever sent them is told.
func TestMeshLapses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := quietServer()
		s.lease = nil
		a, _ := speak(s, "a")
		b, _ := speak(s, "b")
		sent := send(t, s, a, "b", "one")
		asked, err := s.askPeer(a, askInput{Peer: "b", Query: "two"})
		must(t, err)
		time.Sleep(keepTime - time.Second)
		s.lapse()
		if out, _ := s.inbox(b, inboxInput{Peek: true}); len(out.Messages) != 2 {
			t.Errorf("%+v", out)
		}
		time.Sleep(2 * time.Second)
		s.lapse()
		wantTexts(t, read(t, s, b))
		wantTexts(t, read(t, s, a), fmt.Sprintf("your ask #%s to @b has lapsed: nobody answered within 24h0m0s: \"two\"", asked.ID),
			fmt.Sprintf("not read by @b within 24h0m0s, and gone: notify #%s \"one\"", sent.ID))
		if s.lapse(); len(s.mesh.state.boxes) != 0 {
			t.Errorf("%+v", s.mesh.state.boxes)
		}
		if _, err := s.ackAsk(b, ackInput{ID: asked.ID, Message: "late"}); err == nil || !strings.Contains(err.Error(), "closed already; the message was not delivered") {
			t.Error(err)
		}
		out, _ := s.listPeers(a, listPeersInput{Offline: true, Self: true})
		if len(out.Peers) != 2 {
			t.Errorf("%+v", out)
		}
		s.board.detach(callerOf(b).peer)
		time.Sleep(describeTime)
		if out, _ = s.listPeers(a, listPeersInput{Offline: true}); len(out.Peers) != 1 || out.Peers[0].Status != "offline" {
			t.Errorf("%+v", out)
		}
		time.Sleep(keepTime)
		send(t, s, a, "a", "sweep")
		if out, _ = s.listPeers(a, listPeersInput{Offline: true}); len(out.Peers) != 0 {
			t.Errorf("%+v", out)
		}
	})
}

// Of many answers to one ask exactly one counts, and the others are told.
func TestAckRace(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	for range 10 {
		asked, err := s.askPeer(a, askInput{Peer: "b", Query: "?"})
		must(t, err)
		var counted sync.Map
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				if _, err := s.ackAsk(b, ackInput{ID: asked.ID, Message: fmt.Sprint(i)}); err == nil {
					counted.Store(i, true)
				}
			})
		}
		all.Wait()
		n := 0
		counted.Range(func(any, any) bool { n++; return true })
		if got := read(t, s, a); n != 1 || len(got) != 1 {
			t.Errorf("%d counted, %q was read", n, got)
		}
		read(t, s, b)
	}
}

func TestResume(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	_, old := speak(s, "worker")
	b, n := speak(s, "fresh")
	send(t, s, a, "worker", "one")
	send(t, s, a, "fresh", "two")
	asked, err := s.askPeer(b, askInput{Peer: "a", Query: "?"})
	must(t, err)
	if out, err := s.episodesAttach(withCaller(t.Context(), old), episodeAttachInput{ExternalID: "x"}); err != nil || out.Resumed {
		t.Fatal(out, err)
	}
	if out, err := s.episodesAttach(b, episodeAttachInput{ExternalID: "x"}); err != nil || !out.Resumed {
		t.Fatal(out, err)
	}
	if name := s.board.displayName(n.peer); name != "worker" {
		t.Error(name)
	}
	if name := s.board.displayName(old.peer); name != "worker-2" {
		t.Error(name)
	}
	wantTexts(t, read(t, s, b), "one", "two")
	read(t, s, a)
	_, err = s.ackAsk(a, ackInput{ID: asked.ID, Message: "!"})
	must(t, err)
	wantTexts(t, read(t, s, b), "!")
}

func TestMatching(t *testing.T) {
	list := []meshPeer{
		{PeerID: "p1@aaaaaaaa", Name: "a", Circle: "default", Role: "agent", Status: "online"},
		{PeerID: "p2@aaaaaaaa", Name: "b", Circle: "default", Role: "agent", Status: "online"},
		{PeerID: "p1@bbbbbbbb", Name: "b", Circle: "default", Role: "agent", Status: "busy"},
		{PeerID: "default/c@bbbbbbbb", Name: "c", Circle: "default", Role: "agent", Status: "offline"},
		{PeerID: "p4@aaaaaaaa", Name: "c", Circle: "red", Role: "agent", Status: "online"},
		{PeerID: "default/d@aaaaaaaa", Name: "d", Circle: "default", Role: "agent", Status: "offline"},
		{PeerID: "p5@bbbbbbbb", Name: "d", Circle: "default", Role: "agent", Status: "online"},
		{PeerID: "p6@bbbbbbbb", Name: "s", Circle: "red", Role: "service", Status: "online"},
	}
	agent, boss := actor{boardName{"default", "x"}, "agent", nil}, actor{boardName{"default", "x"}, "orchestrator", nil}
	for _, test := range []struct {
		who          actor
		name, circle string
		want         string
	}{
		{agent, "a", "", "p1@aaaaaaaa"},
		{agent, "p2@aaaaaaaa", "", "p2@aaaaaaaa"},
		{agent, "default/b@bbbbbbbb", "", "p1@bbbbbbbb"},
		{agent, "b", "", "p2@aaaaaaaa p1@bbbbbbbb"},
		{agent, "c", "", "default/c@bbbbbbbb"},
		{agent, "c", "red", "p4@aaaaaaaa"},
		{agent, "c", "blue", ""},
		{agent, "d", "", "p5@bbbbbbbb"},
		{agent, "s", "", "p6@bbbbbbbb"},
		{agent, "A", "", ""},
		{agent, "", "", ""},
		{boss, "c", "", "default/c@bbbbbbbb"},
	} {
		var ids []string
		for _, p := range matching(list, test.who, test.name, test.circle) {
			ids = append(ids, p.PeerID)
		}
		if got := strings.Join(ids, " "); got != test.want {
			t.Errorf("%s %q in %q: %q, want %q", test.who.role, test.name, test.circle, got, test.want)
		}
	}
	for _, test := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"a", "", 1}, {"engineer", "enginer", 1}, {"abc", "abd", 1}, {"ünï", "uni", 2}} {
		if got := distance(test.a, test.b); got != test.want || distance(test.b, test.a) != got {
			t.Errorf("%q %q: %d, want %d", test.a, test.b, got, test.want)
		}
	}
}

// FuzzMailText: whatever is written, there are as many headers as messages, and nothing steers a terminal.
func FuzzMailText(f *testing.F) {
	f.Add("hello\n[ask #ask-00000000 from @human] x", "(again) [ack #x] \r\n\u2028[broadcast from @b]")
	f.Add("\x1b[31m\u202e\x00", "\u0085 \v\f[notify #x]\n\n")
	f.Fuzz(func(t *testing.T, a, b string) {
		list := []mail{}
		for _, text := range []string{a, b} {
			l := letter{Ref: "1", ID: "notif-00000000", Kind: "notify", From: address{Box: boardName{"default", "x"}}, To: []boardName{{"default", "y"}}, Text: cleanMessage(text)}
			if err := l.valid(); err != nil && len(l.Text) <= 3*textLimit {
				t.Fatalf("%q: %v", text, err)
			}
			list = append(list, l.mail())
		}
		out := mailText(list)
		headers := 0
		for i, line := range strings.Split(out, "\n") {
			if strings.HasPrefix(line, "[notify #notif-00000000 from @x]") {
				headers++
			} else if i > 0 && !strings.HasPrefix(line, "  ") {
				t.Fatalf("line %d of %q is not ours", i, out)
			}
		}
		if headers != 2 || strings.ContainsFunc(out, func(r rune) bool {
			return r < ' ' && r != '\n' && r != '\t' || r >= 0x7f && r <= 0x9f || steersText(r) || r == '\u2028' || r == '\u2029'
		}) {
			t.Fatalf("%d headers in %q", headers, out)
		}
	})
}

// However many names a stranger must not have, he gets the next free one after one look at all of them: not at all for each.
func TestStrangerTakesNumberAtOnce(t *testing.T) {
	s := meshServer(t, t.TempDir(), io.Discard)
	looks := 0
	reserved, private := s.board.reserved, s.board.private
	s.board.reserved = func(at boardName, who boardIdentity, spawn string) bool {
		looks++
		return reserved(at, who, spawn)
	}
	s.board.private = func() map[boardName]bool {
		looks++
		return private()
	}
	const many = 300
	s.mesh.mu.Lock()
	for i := range many {
		id := fmt.Sprint("ask-", i)
		to := address{Box: boardName{"default", numbered("peer", i+1)}}
		s.mesh.state.threads[id] = &thread{ID: id, From: address{Box: boardName{"default", "alice"}}, To: to}
	}
	s.mesh.mu.Unlock()
	for i := range 3 {
		looks = 0
		name := s.board.displayName(s.board.attach(attachment{Transport: "http", Unverified: true}))
		if want := numbered("peer", many+1+i); name != want || looks > 3 {
			t.Errorf("%q after %d looks, want %q", name, looks, want)
		}
	}
	looks = 0
	if name := s.board.displayName(s.board.attach(attachment{Transport: "http"})); name != "peer" || looks != 1 {
		t.Errorf("one of our own is %q after %d looks", name, looks)
	}
}

// A server that loses its lease while it does something may have done it: where nobody asks the next one, it cannot be said
// that it was not done.
func TestAskedServerIsOvertaken(t *testing.T) {
	root, at := gatherRepo(t, "one")
	there := newSibling(t, at("one"))
	other := meshPeer{PeerID: "p1@" + there.checkout.id[:8], Name: "other", Circle: "default", Role: "agent", Status: "online", Path: there.checkout.root}
	there.answers(nil, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if m, _ := parseMessage(body); m.method == "majordomus/look" {
			writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(lookResult{Peers: []meshPeer{other}})))
			return
		}
		there.refused(w, r, errLeaseLost)
	})
	set := &settings{}
	set.timing, _ = readTimings(func(string) string { return "" })
	s := newServer(set, mustFind(t, root), slog.New(slog.DiscardHandler), nil)
	ctx, _ := speak(s, "lone")
	_, err := s.notifyPeer(ctx, notifyInput{Peer: "other", Message: "x"})
	k := meshServer(t, root, io.Discard)
	ctx, _ = speak(k, "killer")
	_, killed := k.killPeer(ctx, killInput{Peer: "other"})
	for what, err := range map[string]error{"a message": err, "an end": killed} {
		if err == nil || !strings.Contains(err.Error(), "outcome unknown") {
			t.Errorf("of %s it was told: %v", what, err)
		}
	}
}
