//go:build unix

package main

// What a stranger, or a client out of its mind, may pile up, and that others still get in.

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestStrangersKeepNobodyOut(t *testing.T) {
	s := quietServer()
	for _, trusted := range []bool{false, true} {
		for i := range maxSessions {
			must(t, s.admit(&session{id: fmt.Sprint(trusted, i), trusted: trusted}))
		}
		if err := s.admit(&session{id: "more", trusted: trusted}); asRefusal(err) == nil || asRefusal(err).code != "busy" {
			t.Errorf("one more session, trusted %v: %v", trusted, err)
		}
	}
	must(t, s.admit(&session{id: "true 0", trusted: true})) // the same, in two requests at once
	s.dismiss(s.sessions["false 7"])
	must(t, s.admit(&session{id: "more", trusted: false}))
	for _, n := range s.sessions {
		s.dismiss(n)
	}
	if s.count[true] != 0 || s.count[false] != 0 {
		t.Errorf("sessions are left: %v", s.count)
	}
}

// All claims of a board together fit into the answer that the other checkouts read, and a stranger leaves half of the room.
func TestClaimsOfABoard(t *testing.T) {
	b := newBoard()
	fill := func(id peerID) (n int) {
		for ; ; n++ {
			var scope []string
			for i := range 16 {
				scope = append(scope, strings.Repeat("\x01", 1000)+fmt.Sprint(n, "-", i))
			}
			if _, err := b.announce(id, announceInput{Intent: "x", Claim: fmt.Sprint(n), Scope: scope}, "/"); err != nil {
				if r := asRefusal(err); r.code != "refused" || !strings.Contains(r.message, "claim directories instead of files") {
					t.Fatal(err)
				}
				return n
			}
		}
	}
	if n := fill(b.attach(attachment{Transport: "http", Unverified: true})); n < 10 || n > 16 {
		t.Errorf("a stranger has %d claims of 16 KB", n)
	}
	if n := fill(b.attach(attachment{Transport: "http", Unverified: true})); n != 0 {
		t.Errorf("two strangers have more than one: %d", n)
	}
	mine := b.attach(attachment{Transport: "stdio"})
	if n := fill(mine); n < 10 || n > 17 {
		t.Errorf("then there is room for %d", n)
	}
	if _, err := b.announce(mine, announceInput{Intent: "less", Claim: "0"}, "/"); err != nil { // replaces one
		t.Error(err)
	}
	peers := b.peers()
	if size := len(mustJSON(peers)); size > boardLimit {
		t.Errorf("the board has %d bytes, and the others read %d", size, boardLimit)
	}
	list, all := overlapsAmong(t.Context(), peers)
	if size := len(mustJSON(list)); all || size > boardLimit {
		t.Errorf("%d bytes of overlaps, all of them: %v", size, all)
	}
}

// However many mailboxes there are, what they hold together is bounded, and so is what is remembered of the past.
func TestStoreIsBounded(t *testing.T) {
	t.Parallel()
	st := newStore()
	text := strings.Repeat("x", textLimit)
	send := func(i int) error {
		_, err := st.apply(&entry{At: 1, Store: []letter{{Ref: fmt.Sprint(i), Kind: "notify", To: []boardName{{"default", fmt.Sprint(i % 50)}}, Text: text}}})
		return err
	}
	n := 0
	for err := error(nil); err == nil; n++ {
		if err = send(n); err != nil && !errors.Is(err, errTextsFull) {
			t.Fatal(err)
		}
	}
	if n*textLimit < textsLimit || (n-1)*textLimit > textsLimit {
		t.Errorf("%d messages were stored", n)
	}
	for box := range st.boxes {
		st.discard(box, func(l *letter) bool { return l.Ref < "2" })
	}
	must(t, send(n))
	for box := range st.boxes {
		st.discard(box, func(*letter) bool { return true })
	}
	if st.size != 0 || len(st.boxes) != 0 {
		t.Errorf("%d bytes in %d mailboxes are left of nothing", st.size, len(st.boxes))
	}

	at := keepTime.Milliseconds()
	for i := range 2 * mailboxLimit {
		id := fmt.Sprintf("ask-%08x", i)
		_, err := st.apply(&entry{At: at + int64(i), Key: fmt.Sprintf("%032x", i), Open: &thread{ID: id, At: at, From: address{Box: human}, To: address{Box: human}}})
		must(t, err)
		if i%2 == 0 {
			_, err = st.apply(&entry{At: at + int64(i), Close: &closing{ID: id, By: "asker"}})
			must(t, err)
		}
		if i == mailboxLimit {
			break
		}
	}
	for i := range 2 * keysLimit {
		st.keys[fmt.Sprintf("2%031x", i)] = at - int64(i)
	}
	for i := range 3 * threadsLimit {
		id := fmt.Sprintf("ask-1%07x", i)
		for _, e := range []*entry{{At: at + int64(i), Key: fmt.Sprintf("1%031x", i), Open: &thread{ID: id, At: at, From: address{Box: human}, To: address{Box: human}}}, {At: at + int64(i), Close: &closing{ID: id, By: "asker"}}} {
			_, err := st.apply(e)
			must(t, err)
		}
	}
	if open := st.openAsks(human); open != (mailboxLimit+1)/2 || len(st.threads) > 2*threadsLimit || len(st.keys) > 2*keysLimit || len(st.keys) < keysLimit {
		t.Errorf("%d open of %d threads, %d keys", open, len(st.threads), len(st.keys))
	}
}

// Who asks for much and reads nothing is cut off, with what was made for him.
func TestWhoDoesNotRead(t *testing.T) {
	s := quietServer()
	s.set.timing.read = 300 * time.Millisecond
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	s.url = "http://" + ln.Addr().String()
	hs := s.httpServer()
	served := make(chan error, 1)
	go func() { served <- hs.Serve(&deadlineListener{ln, s}) }()
	t.Cleanup(func() { hs.Close(); <-served })
	c, err := net.Dial("tcp4", ln.Addr().String())
	must(t, err)
	defer c.Close()
	// More answers than all buffers between us take.
	c.SetWriteDeadline(time.Now().Add(patience))
	_, err = c.Write(bytes.Repeat([]byte("GET /openapi.json HTTP/1.1\r\nHost: "+ln.Addr().String()+"\r\n\r\n"), 1_000_000))
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the server still holds on: %v", err)
	}
	eventually(t, "the answer is not being written any more", func() bool { return s.running.Load() == 0 })
}

// Very many open connections close each other, and none that has shown the token.
func TestStrangersCloseEachOther(t *testing.T) {
	s := quietServer()
	open := func() *deadlineConn {
		near, far := net.Pipe()
		t.Cleanup(func() { near.Close(); far.Close() })
		c := &deadlineConn{Conn: near, s: s}
		s.strangers.enter(c)
		return c
	}
	trusted, first, second := open(), open(), open()
	s.strangers.leave(trusted)
	second.Close()
	for range maxStrangers - 1 {
		open()
	}
	if first.closed.Load() || s.strangers.conns.Len() != maxStrangers {
		t.Errorf("%d are open, the first closed: %v", s.strangers.conns.Len(), first.closed.Load())
	}
	last := open()
	if !first.closed.Load() || trusted.closed.Load() || last.closed.Load() || s.strangers.conns.Len() != maxStrangers {
		t.Errorf("of %d the wrong one was closed", s.strangers.conns.Len())
	}
}

// What was acknowledged is read again, however many checkouts a broadcast went to.
func TestLongJournalLine(t *testing.T) {
	t.Parallel()
	l := letter{Ref: "1", ID: "notif-00000001", Kind: "broadcast", From: address{Box: human}, To: []boardName{{"default", "x"}}, Text: strings.Repeat("x", textLimit), At: 1}
	e := &entry{At: 1, Store: []letter{l}}
	for i := range 1000 {
		e.Queue = append(e.Queue, outgoing{To: place{Root: fmt.Sprint("/", i)}, Sender: human, Entry: entry{Key: fmt.Sprintf("%032x", i), Store: []letter{l}}})
	}
	var r report
	st := newStore()
	r.read(bytes.NewReader(append(mustJSON(e), '\n')), st)
	if r.String() != "" || len(st.out) != 1000 || len(st.boxes) != 1 {
		t.Errorf("%d on the way, %d mailboxes: %s", len(st.out), len(st.boxes), r)
	}
}

// Too much work at once is refused, and nobody who asks whether the server lives is.
func TestWorkIsBounded(t *testing.T) {
	g := newHTTPRig(t)
	g.restore()
	const list = `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`
	g.working.Store(maxWorking)
	g.bridging.Store(maxWorking)
	for body, want := range map[string]int{list: 503, strings.Replace(list, "tools/list", "ping", 1): 200} {
		for _, session := range []string{"{new}", "{bridge}"} {
			w := g.do(t, walked{"POST", "/mcp"}, body, rigHost, "Content-Type: application/json", "Mcp-Session-Id: "+session)
			if w.Code != want || want == 503 && (jsonCode(w) != "busy" || w.Header().Get("Retry-After") != "1") {
				t.Errorf("%s of %s: %d %s", body, session, w.Code, w.Body)
			}
		}
	}
	if w := g.do(t, walked{"GET", "/api/v1/peers"}, "", rigHost); w.Code != 503 || jsonCode(w) != "busy" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if w := g.do(t, walked{"GET", "/"}, "", rigHost); w.Code != 200 {
		t.Errorf("GET /: %d %s", w.Code, w.Body)
	}
	g.working.Store(0)
	g.bridging.Store(0)
	if w := g.do(t, walked{"GET", "/api/v1/peers"}, "", rigHost); w.Code != 200 || g.working.Load() != 0 {
		t.Errorf("%d, %d at work", w.Code, g.working.Load())
	}

	w := httptest.NewRecorder()
	if g.writeAnswer(w, httptest.NewRequest("POST", "/mcp", nil), &exchange{}, make([]byte, maxAnswer+1), nil) || w.Code != 500 || jsonCode(w) != "too_large" {
		t.Errorf("an answer that is too large: %d %s", w.Code, w.Body)
	}
}

// The connection on which a bridge passes a message on, or waits, is no stranger's: it shows the session, and never the token.
func TestBridgesAreNoStrangers(t *testing.T) {
	g := newHTTPRig(t)
	g.restore()
	for _, c := range []struct {
		session  string
		stranger bool
	}{{"{bridge}", false}, {"{new}", true}, {"unknown", true}} {
		near, far := net.Pipe()
		conn := &deadlineConn{Conn: near, s: g.server}
		g.strangers.enter(conn)
		r, w := httptest.NewRequest("POST", "/mcp", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)), httptest.NewRecorder()
		r.Host = "127.0.0.1:8741"
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Mcp-Session-Id", g.names.Replace(c.session))
		g.handler.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), connKey{}, conn)))
		if (conn.place != nil) != c.stranger {
			t.Errorf("%s: %d %s, counted among strangers: %v", c.session, w.Code, w.Body, !c.stranger)
		}
		conn.Close()
		far.Close()
	}
}

// Large bodies that come slowly fill no memory, and keep nobody out who has the token or little to say.
func TestBodiesAreBounded(t *testing.T) {
	g := newHTTPRig(t)
	g.restore()
	var all sync.WaitGroup
	var slow []*io.PipeWriter
	for _, path := range []string{"/mcp", "/api/v1/peers/announce"} {
		for range bodiesLimit / maxMessage / 2 {
			body, w := io.Pipe()
			slow = append(slow, w)
			r := httptest.NewRequest("POST", path, body)
			r.Host, r.ContentLength = "127.0.0.1:8741", maxMessage
			r.Header.Set("Content-Type", "application/json")
			all.Go(func() { g.handler.ServeHTTP(httptest.NewRecorder(), r) })
		}
	}
	eventually(t, "all are sending", func() bool { return g.bodies.Load() == bodiesLimit })
	large := strings.Repeat(" ", smallBody) + `{"jsonrpc":"2.0","id":1,"method":"ping"}`
	for _, c := range []struct {
		body, header string
		want         int
	}{
		{large, "Mcp-Session-Id: {new}", 503}, {strings.TrimSpace(large), "Mcp-Session-Id: {new}", 200},
		{large, "Mcp-Session-Id: {bridge}\r\nAuthorization: Bearer {token}", 200},
		{large, "Mcp-Session-Id: {bridge}", 200}, // as a bridge sends what its client says
	} {
		w := g.do(t, walked{"POST", "/mcp"}, c.body, rigHost, "Content-Type: application/json", c.header)
		if w.Code != c.want || c.want == 503 && (jsonCode(w) != "busy" || w.Header().Get("Retry-After") != "1") {
			t.Errorf("%d bytes, %s: %d %s", len(c.body), c.header, w.Code, w.Body)
		}
	}
	for _, w := range slow {
		w.Close()
	}
	all.Wait()
	if w := g.do(t, walked{"POST", "/mcp"}, large, rigHost, "Content-Type: application/json", "Mcp-Session-Id: {new}"); w.Code != 200 || g.bodies.Load() != 0 {
		t.Errorf("%d %s, %d bytes are being sent", w.Code, w.Body, g.bodies.Load())
	}
}

// A log that nobody reads stops nobody, and says afterwards how much is missing.
func TestLogIsBounded(t *testing.T) {
	r, w := io.Pipe()
	lines := newLineWriter(w)
	log := slog.New(&lineHandler{out: lines})
	for range 400 {
		log.Info(strings.Repeat("é", logLineLimit))
	}
	dropped := lines.dropped.Load()
	if dropped < 100 || dropped > 144 {
		t.Errorf("%d of 400 lines were dropped", dropped)
	}
	in := bufio.NewReader(r)
	told := 0
	for range 400 - int(dropped) + 1 {
		line, err := in.ReadString('\n')
		must(t, err)
		if len(line) > logLineLimit+100 || !strings.HasSuffix(line, "\n") {
			t.Fatalf("a line of %d bytes", len(line))
		}
		if line == fmt.Sprintf("majordomus: warning: %d lines were dropped: nobody read them\n", dropped) {
			told++
		}
	}
	if told != 1 {
		t.Errorf("it was told %d times", told)
	}
}

func TestSmallBounds(t *testing.T) {
	st := newStore()
	for i := range namesLimit + 100 {
		box := boardName{"default", fmt.Sprint(i)}
		st.names[box] = &nameRecord{Box: box, Left: int64(min(i, 1) * (i + 1))} // the first is held
	}
	st.sweep(time.Hour.Milliseconds())
	if len(st.names) != namesLimit || st.names[boardName{"default", "0"}] == nil || st.names[boardName{"default", "100"}] != nil {
		t.Errorf("%d names", len(st.names))
	}

	config := filepath.Join(t.TempDir(), "config.json")
	must(t, os.WriteFile(config, append([]byte(`{"spawn":{"allowed_commands":["x"]}}`), bytes.Repeat([]byte(" "), configLimit)...), 0o600))
	if c, err := readUserConfig(config); err == nil || c.Spawn.Commands != nil || !strings.Contains(err.Error(), "more than 65536 bytes") {
		t.Errorf("a long configuration: %v", err)
	}

	s := quietServer()
	s.checkout.root, s.set.episode = t.TempDir(), "/bin/sh"
	for range commandsTogether {
		s.episodes.slots <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if words, err := s.runEpisodeCommand(ctx, "open", nil); err == nil || words != "the episode command was not run: 64 others were running all the time" {
		t.Errorf("%q, %v", words, err)
	}

	root := filepath.Join(t.TempDir(), "many")
	for i := range documentsLimit + 1 {
		write(t, filepath.Join(root, "docs", fmt.Sprint(i/500), fmt.Sprint(i, ".md")), "x")
	}
	docs := newDocuments(root, "filesystem")
	docs.index(t.Context())
	if n := len(docs.list); n > documentsLimit || n < documentsLimit-len(rootDocuments) || !strings.Contains(docs.reason, "only the first 5000 documents are listed") {
		t.Errorf("%d documents: %s", len(docs.list), docs.reason)
	}
}

// docs/limits.md says what the program does.
func TestLimitsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("docs/limits.md")
	must(t, err)
	for what, limit := range map[string]string{
		"a message (a line on stdin)": mib(maxMessage), "headers of a request": kib(maxHeaders), "an answer |": mib(maxAnswer),
		"nesting of a message": thousands(maxNesting) + " levels, " + thousands(maxBatch), "sessions over HTTP": thousands(maxSessions),
		"have shown neither the token": thousands(maxStrangers), "requests worked on": thousands(maxWorking), "executed at once": thousands(executedLimit), "answers of over " + kib(smallBody): mib(answersLimit), "a batch of": mib(batchAnswer), "bodies of over " + kib(smallBody): mib(bodiesLimit), "a line of the log": kib(logLineLimit) + "; 256",
		"intent of a claim": fmt.Sprintf("%d characters, %d bytes", intentLimit, nameLimit), "paths of a claim": fmt.Sprintf("%d, of %s bytes", scopeLimit, thousands(pathLimit)),
		"claims of a peer": thousands(claimLimit), "claims of a checkout": kib(claimsLimit), "overlaps in one answer": thousands(overlapLimit) + " pairs of paths, of " + kib(overlapText),
		"departed peers": thousands(departedLimit), "the board of another": mib(boardLimit) + ", " + mib(boardsLimit), "a document that": mib(documentLimit) + ", " + thousands(documentsLimit),
		"id of an episode": fmt.Sprintf("%d bytes, %d bytes", externalIDLimit, providerLimit), "episodes |": thousands(episodeLimit), "episode command says": "4 KiB",
		"episode commands at once": fmt.Sprintf("%d, %v s", commandsTogether, commandTime.Seconds()), "between peers": thousands(textLimit), "messages in one answer": thousands(readLimit),
		"messages in a mailbox": thousands(mailboxLimit), "messages of a checkout": mib(textsLimit), "messages, threads, names": "24 hours",
		"threads, names, keys": strings.Join([]string{thousands(threadsLimit), thousands(namesLimit), thousands(keysLimit)}, ", "), "schedules of a checkout": thousands(schedulesLimit),
		"a line of the journal": mib(journalLine), "the journal |": kib(journalGrowth), "a description": fmt.Sprintf("%d and %d", descriptionLimit, displayNameLimit),
		"spawned processes": thousands(spawnLimit), "must have attached": "120 s", "between TERM": "5 s", "the lease, the user's": kib(leaseLimit), "an answer of git": mib(gitOutputLimit),
	} {
		found := false
		for row := range strings.Lines(string(text)) {
			found = found || strings.HasPrefix(row, "|") && strings.Contains(row, what) && strings.Contains(row, limit)
		}
		if !found {
			t.Errorf("no row of docs/limits.md says %q of %q", limit, what)
		}
	}
}

func mib(n int) string { return fmt.Sprint(n>>20, " MiB") }
func kib(n int) string { return fmt.Sprint(n>>10, " KiB") }

func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%d,%03d", n/1000, n%1000)
}
