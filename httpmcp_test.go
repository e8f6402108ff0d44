//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// httpRig is a server behind its guards, without a socket, with one session of each kind.
type httpRig struct {
	*server
	handler http.Handler
	log     bytes.Buffer
	names   *strings.Replacer // {token}, {old}, {new} and {bridge}, which a request's head may name
	kept    []*session
}

func newHTTPRig(t testing.TB) *httpRig {
	g := &httpRig{}
	set := &settings{version: "1.2.3"}
	set.timing, _ = readTimings(func(string) string { return "" })
	g.server = newServer(set, mustFind(t, gitRepo(t)), slog.New(slog.NewTextHandler(&g.log, nil)), nil)
	g.url = "http://127.0.0.1:8741"
	serving(t, g.server)
	g.handler = g.guard(g.routes())
	names := []string{"{token}", g.lease.token()}
	for name, n := range map[string]*session{
		"{old}":    {version: "2025-03-26"},
		"{new}":    {version: "2025-11-25"},
		"{bridge}": {version: "2025-03-26", attached: true, trusted: true},
	} {
		n.id = randomHex(16)
		n.peer = g.board.attach(attachment{Transport: "http", Unverified: !n.trusted})
		g.kept = append(g.kept, n)
		names = append(names, name, n.id)
	}
	g.names = strings.NewReplacer(names...)
	return g
}

// ask has one request answered, whose head is text up to the blank line. It is nil when net/http would refuse the head,
// and when the request had to be broken off, as a watch must be.
func (g *httpRig) ask(head string, body []byte) (*http.Request, *httptest.ResponseRecorder) {
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(g.names.Replace(head) + "\r\n\r\n")))
	if err != nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	r = r.WithContext(ctx)
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	if r.TransferEncoding != nil {
		r.ContentLength = -1
	}
	g.restore()
	w := httptest.NewRecorder()
	g.handler.ServeHTTP(w, r)
	if ctx.Err() != nil {
		return nil, nil
	}
	return r, w
}

// restore brings the sessions back that the request before has ended, and ends those that it opened.
func (g *httpRig) restore() {
	g.mu.Lock()
	var opened []*session
	for _, n := range g.sessions {
		opened = append(opened, n)
	}
	g.mu.Unlock()
	for _, n := range opened {
		g.dismiss(n)
	}
	for _, n := range g.kept {
		g.admit(n)
	}
}

const modernMeta = `{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":{"name":"m"}}`

const clientHead = "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:8741\r\nContent-Type: application/json"

// FuzzHTTP holds the HTTP side to its promise: whatever comes in, the answer has a declared form, and nothing panics.
func FuzzHTTP(f *testing.F) {
	modern := clientHead + "\r\nMCP-Protocol-Version: 2026-07-28\r\nMcp-Method: "
	const meta = `"_meta":` + modernMeta
	for _, seed := range []struct{ head, body string }{
		{clientHead, `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18","clientInfo":{"name":"x","version":"1"}}}`},
		{clientHead, `{"jsonrpc":"2.0","id":1,"method":"ping"}`},
		{clientHead + "\r\nMcp-Session-Id: {new}", `{"jsonrpc":"2.0","id":"α","method":"tools/list"}`},
		{clientHead + "\r\nMcp-Session-Id: {new}\r\nMCP-Protocol-Version: 1999-01-01", `{"jsonrpc":"2.0","id":1,"method":"ping"}`},
		{clientHead + "\r\nMcp-Session-Id: {new}", `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"majordomus_announce","arguments":{"intent":"x","scope":["a/**"]}}}`},
		{clientHead + "\r\nMcp-Session-Id: {new}", `{"jsonrpc":"2.0","id":3,"method":"ping","params":[]}`},
		{clientHead + "\r\nMcp-Session-Id: {new}", `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":3}}`},
		{clientHead + "\r\nMcp-Session-Id: {old}", `[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","method":"x"},7]`},
		{clientHead + "\r\nMcp-Session-Id: {old}", `[]`},
		{clientHead + "\r\nMcp-Session-Id: {bridge}", `{"jsonrpc":"2.0","id":null,"method":"ping"}`},
		{clientHead + "\r\nMcp-Session-Id: {bridge}", "\xff not json"},
		{clientHead + "\r\nMcp-Session-Id: {bridge}", `{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{` + meta + `}}`},
		{clientHead + "\r\nMcp-Session-Id: {bridge}\r\nAuthorization: Bearer {token}", `{"jsonrpc":"2.0","id":1,"method":"majordomus/watch","params":{}}`},
		{clientHead + "\r\nMcp-Session-Id: {bridge}\r\nAuthorization: Bearer {token}", `{"jsonrpc":"2.0","id":1,"method":"ping"}`},
		{clientHead + "\r\nAuthorization: Bearer {token}", `{"jsonrpc":"2.0","id":1,"method":"majordomus/attach","params":{"identity":"00112233445566778899aabbccddeeff","carried":{"Claims":[{"intent":"x"}]}}}`},
		{clientHead + "\r\nAuthorization: Bearer no", `{"jsonrpc":"2.0","id":1,"method":"majordomus/attach"}`},
		{"DELETE /mcp HTTP/1.1\r\nHost: localhost:8741\r\nMcp-Session-Id: {old}", ""},
		{"GET /mcp HTTP/1.1\r\nHost: localhost:8741\r\nAccept: text/event-stream", ""},
		{modern + "server/discover", `{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{` + meta + `}}`},
		{modern + "tools/list\r\nMajordomus-Client: 00112233445566778899aabbccddeeff", `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{` + meta + `}}`},
		{modern + "tools/call\r\nMcp-Name: =?base64?bWFqb3Jkb211c19wZWVycw==?=", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"majordomus_peers","arguments":{"checkouts":"this"},` + meta + `}}`},
		{modern + "ping", `{"jsonrpc":"2.0","id":1,"method":"ping","params":{` + meta + `}}`},
		{modern + "tools/list", `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2099-01-01"}}}`},
		{"GET / HTTP/1.1\r\nHost: 127.0.0.1:8741\r\nMajordomus-Challenge: 00112233445566778899aabbccddeeff", ""},
		{"GET /api/v1/peers?checkouts=this&view=full HTTP/1.1\r\nHost: [::1]:8741", ""},
		{"GET /api/v1/server?checkouts=this HTTP/1.1\r\nHost: 127.0.0.1:8741\r\nOrigin: http://evil.example", ""},
		{"POST /api/v1/peers/announce HTTP/1.1\r\nHost: 127.0.0.1:8741\r\nContent-Type: application/json; charset=utf-8", `{"intent":"x"}`},
		{"PUT /api/v1/peers HTTP/1.1\r\nHost: 127.0.0.1:8741\r\nTransfer-Encoding: chunked", `{}`},
		{"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1:8741", ""},
		{"GET /..%2f/docs//x HTTP/1.1\r\nHost: 127.0.0.1:8741\r\nAccept: text/html", ""},
	} {
		f.Add(seed.head, []byte(seed.body))
	}
	for _, c := range capabilities() {
		f.Add(c.method+" "+c.path+" HTTP/1.1\r\nHost: 127.0.0.1:8741\r\nContent-Type: application/json\r\nAuthorization: Bearer {token}", []byte("{}"))
		f.Add(clientHead+"\r\nMcp-Session-Id: {bridge}", fmt.Appendf(nil, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%q,"arguments":{}}}`, c.tool))
	}
	g := newHTTPRig(f)
	f.Fuzz(func(t *testing.T, head string, body []byte) {
		g.log.Reset()
		r, w := g.ask(head, body)
		if strings.Contains(g.log.String(), "panic") {
			t.Fatal(g.log.String())
		}
		if r == nil {
			return
		}
		if err := checkHTTPAnswer(r, w); err != nil {
			t.Fatalf("%d %v %q: %v", w.Code, w.Header(), w.Body, err)
		}
		if m, bad := parseMessage(validText(body)); bad == nil && m.id != nil && !m.response && r.URL.Path == "/mcp" && w.Code == 200 {
			if id := member(w.Body.Bytes(), "id"); !bytes.Equal(id, m.id) {
				t.Fatalf("the id %s came back as %s", m.id, id)
			}
		}
	})
}

// checkHTTPAnswer says in what an answer differs from every declared form.
func checkHTTPAnswer(r *http.Request, w *httptest.ResponseRecorder) error {
	h, body := w.Header(), w.Body.Bytes()
	kind := h.Get("Content-Type")
	switch {
	case h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Cache-Control") == "":
		return fmt.Errorf("headers")
	case w.Code == http.StatusMethodNotAllowed && h.Get("Allow") == "":
		return fmt.Errorf("no Allow")
	case w.Code == http.StatusAccepted || w.Code == http.StatusNoContent:
		if len(body) > 0 || kind != "" {
			return fmt.Errorf("this status has no body")
		}
		return nil
	case r.Method == "HEAD", r.Header.Get("Range") != "" || w.Code == http.StatusNotModified:
		return nil // net/http's own
	case kind != "application/json":
		if w.Code != http.StatusOK || r.URL.Path == "/mcp" || strings.HasPrefix(r.URL.Path, "/api/") {
			return fmt.Errorf("Content-Type %q", kind)
		}
		return nil // a page
	case h.Get("Content-Length") != strconv.Itoa(len(body)):
		return fmt.Errorf("Content-Length")
	case !json.Valid(body) || !utf8.Valid(body):
		return fmt.Errorf("not JSON")
	case r.URL.Path == "/mcp":
		return checkMCPAnswer(w.Code, body)
	case w.Code == http.StatusOK:
		return nil
	}
	var answer errorAnswer
	if err := json.Unmarshal(body, &answer); err != nil || answer.Error.Message == "" || httpStatus(answer.Error.Code) != w.Code {
		return fmt.Errorf("not the error of an API")
	}
	return nil
}

// checkMCPAnswer is checkHTTPAnswer for the JSON of /mcp.
func checkMCPAnswer(status int, body []byte) error {
	if bytes.ContainsAny(body, "\r\n") {
		return fmt.Errorf("more than one line")
	}
	answers := []json.RawMessage{body}
	if body[0] == '[' {
		json.Unmarshal(body, &answers)
	}
	for _, a := range answers {
		var answer struct {
			Version    string `json:"jsonrpc"`
			ID, Result json.RawMessage
			Error      *struct {
				Code    int
				Message string
				Data    struct{ Code string }
			}
		}
		if err := json.Unmarshal(a, &answer); err != nil || answer.Version != "2.0" || (answer.Result == nil) == (answer.Error == nil) {
			return fmt.Errorf("not an answer of JSON-RPC")
		}
		e := answer.Error
		switch {
		case status == http.StatusOK && answer.ID != nil && (e == nil || e.Message != ""):
		case status == http.StatusOK || e == nil || body[0] == '[':
			return fmt.Errorf("an answer without id")
		case answer.ID != nil: // of the modern revision
			want := map[int]int{codeHeaderMismatch: 400, codeUnsupportedVersion: 400, codeInvalidParams: 400, codeMethodNotFound: 404}
			if want[e.Code] != status {
				return fmt.Errorf("not the status of its code")
			}
		default:
			want := codeInvalidRequest
			if e.Data.Code == "invalid_json" {
				want = codeParse
			}
			if e.Code != want || httpStatus(e.Data.Code) != status || e.Message == "" {
				return fmt.Errorf("not the error of a transport")
			}
		}
	}
	return nil
}

// A client that speaks HTTP itself cancels a call by closing its request, and with a session also by a notification.
func TestCancelledOverHTTP(t *testing.T) {
	began, ended := make(chan string), make(chan error)
	wait := query("test.wait", "wait", "GET /api/v1/wait", "Wait.", "Use this to wait.",
		func(s *server, ctx context.Context, in struct{}) (struct{}, error) {
			began <- ""
			<-ctx.Done()
			ended <- context.Cause(ctx)
			return in, nil
		}, mayWait)
	table := toolTable
	toolTable = func() map[string]*capability { return map[string]*capability{"wait": &wait} }
	t.Cleanup(func() { toolTable = table })
	g := newHTTPRig(t)
	h := httptest.NewServer(g.handler)
	t.Cleanup(h.Close)
	g.url = h.URL
	g.restore()
	const session = "Mcp-Session-Id: {new}"
	const modern = "MCP-Protocol-Version: 2026-07-28, Mcp-Method: tools/call, Mcp-Name: wait"
	post := func(ctx context.Context, headers, body string) (status int, text []byte, err error) {
		r, err := http.NewRequestWithContext(ctx, "POST", h.URL+"/mcp", strings.NewReader(body))
		must(t, err)
		r.Header.Set("Content-Type", "application/json")
		for header := range strings.SplitSeq(headers, ", ") {
			key, value, _ := strings.Cut(g.names.Replace(header), ": ")
			r.Header.Set(key, value)
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			return 0, nil, err
		}
		defer answer.Body.Close()
		text, err = io.ReadAll(answer.Body)
		return answer.StatusCode, text, err
	}
	for name, test := range map[string]struct {
		headers, meta string
		notify        bool
	}{
		"session, notified": {session, "{}", true},
		"session, closed":   {session, "{}", false},
		"bridge, notified":  {"Mcp-Session-Id: {bridge}", "{}", true},
		"bridge, closed":    {"Mcp-Session-Id: {bridge}", "{}", false},
		"modern":            {modern, modernMeta, false},
		"modern, worker":    {modern + ", Majordomus-Client: 00000000000000000000000000000001", modernMeta, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			answered := make(chan string)
			go func() {
				status, text, err := post(ctx, test.headers, `{"jsonrpc":"2.0","id":"w","method":"tools/call","params":{"name":"wait","_meta":`+test.meta+`}}`)
				answered <- fmt.Sprintf("%d %s %v", status, text, err)
			}()
			receive(t, began)
			want := context.Canceled
			if test.notify {
				want = errCancelled
				if status, text, err := post(t.Context(), test.headers, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"w"}}`); status != http.StatusAccepted || len(text) > 0 || err != nil {
					t.Errorf("the notification got %d %s %v", status, text, err)
				}
			} else {
				cancel()
			}
			if err := receive(t, ended); err != want {
				t.Errorf("the wait ended with %v", err)
			}
			if a := receive(t, answered); test.notify && a != "202  <nil>" {
				t.Errorf("the call got %s", a)
			}
			cancel()
		})
	}
}

// A connection that a client opened for later does not hold up the end.
func TestEndingLeavesUnusedConnections(t *testing.T) {
	g := newHTTPRig(t)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	g.url = "http://" + ln.Addr().String()
	hs := g.httpServer()
	served := make(chan error, 1)
	go func() { served <- hs.Serve(&deadlineListener{ln, g.server}) }()
	unused, err := net.Dial("tcp4", ln.Addr().String())
	must(t, err)
	defer unused.Close()
	answer, err := http.Get(g.url + "/api/v1") // accepted after it
	must(t, err)
	answer.Body.Close()
	start := time.Now()
	g.endBy = start.Add(time.Minute)
	g.end(hs)
	receive(t, served)
	if took := time.Since(start); took > endingTime {
		t.Errorf("ending took %v", took)
	}
}

// What a bridge is to be told while it has no watch open, it is told by the next one, and once.
func TestWatchTellsLater(t *testing.T) {
	s := newServer(&settings{timing: timings{probe: patience, sessionIdle: patience}}, checkout{}, slog.New(slog.DiscardHandler), nil)
	n := &session{id: "1", peer: "p1", attached: true, trusted: true}
	if err := s.admit(n); err != nil {
		t.Fatal(err)
	}
	watch := func(hold time.Duration) watchResult {
		w := httptest.NewRecorder()
		params := mustJSON(watchParams{Hold: hold.Milliseconds()})
		s.serveWatch(w, httptest.NewRequest("POST", "/mcp", nil), s.use(n.id), message{id: []byte("1"), params: params})
		s.release(n)
		var answer struct{ Result watchResult }
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
			t.Fatal(err)
		}
		return answer.Result
	}
	if r := watch(time.Millisecond); r.Reason != "here" || r.Lost != nil {
		t.Errorf("nothing to tell: %+v", r)
	}
	s.tellLoser("p1", episodeTaken{ExternalID: "e", Attachments: 2})
	if r := watch(patience); r.Lost == nil || r.Lost.ExternalID != "e" {
		t.Errorf("something to tell: %+v", r)
	}
	if r := watch(time.Millisecond); r.Reason != "here" || r.Lost != nil {
		t.Errorf("told already: %+v", r)
	}
	s.sweep.Stop()
}

// A bridge that dies just when its watch has been answered leaves nobody behind; one that only does not ask on stays.
func TestDeathBetweenWatches(t *testing.T) {
	s := newServer(&settings{timing: timings{probe: patience, sessionIdle: patience, read: patience}}, checkout{}, slog.New(slog.DiscardHandler), nil)
	n := &session{id: "1", peer: "p1", attached: true, trusted: true}
	if err := s.admit(n); err != nil {
		t.Fatal(err)
	}
	defer s.sweep.Stop()
	hs := s.httpServer()
	hs.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer s.release(s.use(n.id))
		s.serveWatch(w, r, n, message{id: []byte("1"), params: []byte(`{"hold_ms":1}`)})
	})
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error)
	go func() { served <- hs.Serve(&deadlineListener{ln, s}) }()
	defer func() { hs.Close(); <-served }()
	there := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.sessions[n.id] == n
	}
	c, err := net.Dial("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	in := bufio.NewReader(c)
	for range 3 {
		io.WriteString(c, "POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
		r, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, r.Body)
	}
	if !there() {
		t.Error("it was taken for dead while its connection was there")
	}
	c.Close()
	if !poll(patience, func() bool { return !there() }) {
		t.Error("it is still there")
	}
}
