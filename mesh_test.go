//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rogpeppe/go-internal/diff"
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

// A bridge that has an answer in its client's hands says so to the next server, which then has nothing to repeat.
func TestConfirmToTheNextServer(t *testing.T) {
	root := newCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	send(t, s, a, "b", "one")
	x := &exchange{}
	s.inbox(withExchange(b, x), inboxInput{})

	s2 := meshServer(t, root, io.Discard)
	s2.mesh.confirm(written, x.parcels...)
	s2.mesh.keptUntil = time.Now()
	b2, _ := speak(s2, "b")
	wantTexts(t, read(t, s2, b2))
}

// A lost session's messages come again, to whoever has the name then.
func TestSessionEnds(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	b, n := speak(s, "b")
	must(t, s.admit(n))
	send(t, s, a, "b", "one")
	x := &exchange{}
	s.inbox(withExchange(b, x), inboxInput{})
	wantTexts(t, read(t, s, b)) // in no other answer of a living session
	s.dismiss(n)
	b2, _ := speak(s, "b")
	wantTexts(t, read(t, s, b2), "(again) one")

	// An answer that was never made gives its messages back unmarked.
	send(t, s, a, "b", "two")
	x = &exchange{}
	s.inbox(withExchange(b2, x), inboxInput{})
	s.mesh.unanswered(x)
	wantTexts(t, read(t, s, b2), "two")
}

// A request of which something had arrived before the answer was written does not confirm that answer, whatever else of it
// comes later; the next one does.
func TestEarlyRequest(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	s.set.httpPort = 0
	ln, err := s.listen()
	must(t, err)
	hs := s.httpServer()
	served := make(chan struct{})
	spy := &spyListener{&deadlineListener{ln, s}, make(chan *deadlineConn, 9)}
	go func() { defer close(served); hs.Serve(spy) }()
	t.Cleanup(func() { hs.Close(); <-served })
	a, _ := speak(s, "a")
	_, n := speak(s, "b")
	must(t, s.admit(n))

	dial := func() (net.Conn, *bufio.Reader) {
		c, err := net.Dial("tcp", ln.Addr().String())
		must(t, err)
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(30 * time.Second))
		return c, bufio.NewReader(c)
	}
	request := func(tool string) string {
		body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":` + tool + `}}`
		return fmt.Sprintf("POST /mcp HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nMcp-Session-Id: %s\r\nContent-Length: %d\r\n\r\n%s", ln.Addr(), n.id, len(body), body)
	}
	answer := func(r *bufio.Reader) string {
		response, err := http.ReadResponse(r, nil)
		must(t, err)
		body, err := io.ReadAll(response.Body)
		must(t, err)
		return string(body)
	}
	open := func() int {
		s.mesh.mu.Lock()
		defer s.mesh.mu.Unlock()
		return len(s.mesh.parcels)
	}
	waiting := func() bool {
		s.mesh.mu.Lock()
		defer s.mesh.mu.Unlock()
		return len(s.mesh.readers) == 1
	}
	c, r := dial()
	fmt.Fprint(c, request(`"inbox","arguments":{"wait_seconds":30}`))
	for !waiting() {
		runtime.Gosched()
	}
	next := request(`"whoami"`)
	fmt.Fprint(c, next[:20])
	for seen := receive(t, spy.conns); seen.early.Load() == 0; {
		runtime.Gosched()
	}
	send(t, s, a, "b", "one")
	if text := answer(r); !strings.Contains(text, "] one") {
		t.Error(text)
	}
	fmt.Fprint(c, next[20:])
	if text := answer(r); strings.Contains(text, "] one") || open() != 1 {
		t.Errorf("it was confirmed too early: %s", text)
	}
	c2, r2 := dial()
	fmt.Fprint(c2, next)
	if answer(r2); open() != 0 {
		t.Error("the next request has not confirmed it")
	}
}

// spyListener hands on the connections that a server accepts.
type spyListener struct {
	*deadlineListener
	conns chan *deadlineConn
}

func (l *spyListener) Accept() (net.Conn, error) {
	c, err := l.deadlineListener.Accept()
	if err == nil {
		l.conns <- c.(*deadlineConn)
	}
	return c, err
}

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
			switch r.IntN(9) {
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

// A text of 24 hours is forgotten; an ask of 24 hours lapses, and its asker is told.
func TestMeshLapses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := quietServer()
		s.lease = nil
		a, _ := speak(s, "a")
		b, _ := speak(s, "b")
		send(t, s, a, "b", "one")
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
		wantTexts(t, read(t, s, a), fmt.Sprintf("your ask #%s to @b has lapsed: nobody answered within 24h0m0s: \"two\"", asked.ID))
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

// A wait is woken by the first message, whoever of many sends it, and the sender is told that it was handed over.
func TestWaitIsHanded(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	for range 20 {
		got := make(chan inboxOutput, 1)
		go func() {
			x := &exchange{}
			out, _ := s.inbox(withExchange(b, x), inboxInput{Wait: 30})
			s.mesh.confirm(written, x.parcels...)
			got <- out
		}()
		for waits := false; !waits; {
			s.mesh.mu.Lock()
			waits = len(s.mesh.readers) == 1
			s.mesh.mu.Unlock()
		}
		if out := send(t, s, a, "b", "now"); out.Note != "" {
			t.Errorf("it was handed over: %q", out.Note)
		}
		if out := receive(t, got); len(out.Messages) != 1 {
			t.Errorf("%+v", out)
		}
	}
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

// Wherever a write was broken off, what was whole before it is read; a line that is too long costs that line.
func TestJournalIsRead(t *testing.T) {
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
	long := append(bytes.Repeat([]byte(" "), maxMessage+10), '\n')
	r.read(bytes.NewReader(slices.Concat(line("a"), long, line("b"))), st)
	if len(st.boxes[human]) != 2 || r.String() != "has damaged lines, which are skipped: 1 of 3, the first is line 2" {
		t.Errorf("%d, %v", len(st.boxes[human]), r)
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

// BenchmarkSend measures stored sends: a journal write with its sync each, shared by those who send at once. The floor is
// the same bytes, written and synced one after the other by a program that does nothing else.
func BenchmarkSend(b *testing.B) {
	b.Run("floor", func(b *testing.B) {
		f, err := os.Create(filepath.Join(b.TempDir(), "floor"))
		must(b, err)
		defer f.Close()
		line := append(bytes.Repeat([]byte("x"), 220), '\n')
		for b.Loop() {
			f.Write(line)
			must(b, f.Sync())
		}
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "sends/s")
	})
	for _, senders := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("senders=%d", senders), func(b *testing.B) {
			root, err := filepath.EvalSymlinks(b.TempDir())
			must(b, err)
			must(b, os.Mkdir(filepath.Join(root, ".git"), 0o755))
			s := meshServer(b, root, io.Discard)
			var all sync.WaitGroup
			var left atomic.Int64
			left.Store(int64(b.N))
			b.ResetTimer()
			for i := range senders {
				name := fmt.Sprint("p", i)
				ctx, _ := speak(s, name)
				all.Go(func() {
					for n := 1; left.Add(-1) >= 0; n++ {
						if _, err := s.notifyPeer(ctx, notifyInput{Peer: name, Message: "hello"}); err != nil {
							b.Error(err)
						}
						if n%200 == 0 { // to itself, so that no mailbox is full
							read(b, s, ctx)
						}
					}
				})
			}
			all.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "sends/s")
		})
	}
}
