package main

// MCP over HTTP at /mcp, the REST routes beside it, and the guards in front of
// every route.
//
// Rules kept here:
//   - nothing is looked at before Host, Origin and Sec-Fetch-Site have passed:
//     a page in the user's browser must not reach any route;
//   - a request at /mcp is checked in the order of 20-mcp.md §5, and each
//     refusal has a body whose error.data.code says what happened: a bridge
//     decides by that word, never by the status;
//   - a bridge's session (opened by majordomus/attach) takes frames by the
//     rules of stdio: every JSON-RPC answer is a 200, byte for byte what the
//     owner's own client would get;
//   - probes, pings, watches and attaches never wait behind other work.

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"mime"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const (
	maxMessage = 4 << 20  // a request body or a line on stdin
	maxAnswer  = 32 << 20 // an answer's body
	maxHeaders = 64 << 10
	// maxWorking bounds the requests worked on at once; a probe, a ping, a
	// watch and a call while it waits are not among them (50-surfaces.md §1).
	maxWorking = 256
)

//go:embed openapi.json
var openapiJSON []byte

// httpServer is the HTTP server around the routes. There is no write deadline:
// calls that wait have none, and the others end by themselves.
func (s *server) httpServer() *http.Server {
	deadline := s.set.timing.read
	return &http.Server{
		Handler:           s.guard(s.routes()),
		ReadHeaderTimeout: deadline,
		ReadTimeout:       deadline,
		IdleTimeout:       deadline,
		MaxHeaderBytes:    maxHeaders,
		ErrorLog:          log.New(io.Discard, "", 0), // a stranger's bad request is not our user's concern
		BaseContext:       func(net.Listener) context.Context { return s.calls },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
}

// routes registers everything that is served: the table, then the fixed paths.
func (s *server) routes() *http.ServeMux {
	mux := http.NewServeMux()
	for _, c := range capabilities() {
		mux.HandleFunc(c.method+" "+c.path, func(w http.ResponseWriter, r *http.Request) { s.serveCapability(w, r, &c) })
	}
	mux.HandleFunc("GET /{$}", s.serveHome)
	mux.HandleFunc("GET /api/v1", s.serveIndex)
	mux.HandleFunc("GET /openapi.json", s.serveOpenAPI)
	s.pageRoutes(mux)
	mux.HandleFunc("/mcp", s.serveMCP)
	return mux
}

// guard stands in front of every route. It refuses what a page in the user's
// browser, a rebound name or a smuggled request could send; what passes is
// counted, so that ending can wait for it, and a panic ends one request only.
func (s *server) guard(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.running.Add(1)
		defer func() {
			if v := recover(); v != nil {
				s.logPanic(v)
				s.failure(w, r, http.StatusInternalServerError, "internal", "internal error; the log has the details")
			}
			if s.running.Add(-1) == 0 {
				s.stir()
			}
		}()
		h := w.Header()
		h["X-Content-Type-Options"] = []string{"nosniff"}
		h["Cache-Control"] = []string{"no-store"}
		if status, code, message := s.admissible(r); status != 0 {
			s.failure(w, r, status, code, message)
			return
		}
		if r.URL.Path == "/mcp" {
			s.serveMCP(w, r)
			return
		}
		if handler, pattern := mux.Handler(r); pattern == "" {
			s.serveUnrouted(w, r, handler)
			return
		}
		mux.ServeHTTP(w, r) // not the handler above: only this sets path values
	})
}

// admissible applies the checks that come before everything else; status 0
// means that the request may pass.
func (s *server) admissible(r *http.Request) (status int, code, message string) {
	c, _ := r.Context().Value(connKey{}).(*deadlineConn)
	origin, sent := r.Header["Origin"]
	switch {
	case r.Host == "":
		return 400, "invalid_input", "the request names no Host"
	case !s.local(r.Host):
		return 403, "forbidden", fmt.Sprintf("Host %q is not this server: use %s", clip(r.Host, 80), s.url)
	case sent && (len(origin) != 1 || !strings.HasPrefix(origin[0], "http://") || !s.local(origin[0][len("http://"):])):
		return 403, "forbidden", fmt.Sprintf("Origin %q may not call this server", clip(strings.Join(origin, ", "), 80))
	case r.Header.Get("Sec-Fetch-Site") == "cross-site" && !(r.Method == "GET" && wantsPage(r)):
		return 403, "forbidden", "a page of another site may not call this server"
	case r.RequestURI == "" || r.RequestURI[0] != '/':
		return 400, "invalid_input", "the request target must be a path"
	case !plainPath(r.URL.Path):
		return 404, "not_found", "there is nothing at this path"
	case r.TransferEncoding != nil && c != nil && c.sawBothLengths:
		return 400, "invalid_input", "a request has either Content-Length or Transfer-Encoding, never both"
	}
	if r.TransferEncoding != nil {
		// What follows a chunked body on this connection is not trusted.
		r.Close = true
	}
	return 0, "", ""
}

// local reports whether an authority is this server under one of its three names.
func (s *server) local(authority string) bool {
	host, port, found := strings.Cut(authority, ":")
	if strings.HasPrefix(authority, "[::1]:") {
		host, port, found = "localhost", authority[len("[::1]:"):], true
	}
	return found && (host == "127.0.0.1" || strings.EqualFold(host, "localhost")) &&
		port == s.url[strings.LastIndexByte(s.url, ':')+1:]
}

// plainPath refuses paths that would have to be cleaned first, so that no
// route has to think about them.
func plainPath(p string) bool {
	clean := path.Clean(p)
	return (p == clean || p == clean+"/") && !strings.ContainsAny(p, "\x00\\")
}

// wantsPage reports whether a browser asks for a page, rather than a program
// for data.
func wantsPage(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "text/html") &&
		r.URL.Path != "/mcp" && r.URL.Path != "/openapi.json" && !strings.HasPrefix(r.URL.Path, "/api/")
}

// serveUnrouted answers what no route matches: the mux's own answer tells a
// wrong method from an unknown path, but in text.
func (s *server) serveUnrouted(w http.ResponseWriter, r *http.Request, handler http.Handler) {
	answer := &headOnly{header: http.Header{}}
	handler.ServeHTTP(answer, r)
	if answer.status == http.StatusMethodNotAllowed {
		allow := answer.header.Get("Allow")
		w.Header().Set("Allow", allow)
		s.failure(w, r, 405, "method_not_allowed", fmt.Sprintf("%s is not allowed here, only %s", clip(r.Method, 20), allow))
		return
	}
	s.failure(w, r, 404, "not_found", "there is nothing at this path; GET / lists what is served")
}

// headOnly is a ResponseWriter that keeps the head and drops the body.
type headOnly struct {
	header http.Header
	status int
}

func (h *headOnly) Header() http.Header         { return h.header }
func (h *headOnly) WriteHeader(status int)      { h.status = status }
func (h *headOnly) Write(b []byte) (int, error) { return len(b), nil }

// failure writes an error in the form of its surface: a JSON-RPC error without
// id at /mcp, {"error": …} elsewhere.
func (s *server) failure(w http.ResponseWriter, r *http.Request, status int, code, message string) {
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	if r.URL.Path != "/mcp" {
		writeJSON(w, status, mustJSON(errorAnswer{errorDetail{code, message}}))
		return
	}
	number := codeInvalidRequest
	if code == "invalid_json" {
		number = codeParse
	}
	writeJSON(w, status, mustJSON(struct {
		Version string   `json:"jsonrpc"`
		Error   rpcError `json:"error"`
	}{"2.0", rpcError{number, message, map[string]string{"code": code}}}))
}

// refused writes an error of a capability or of admission.
func (s *server) refused(w http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, errLeaseLost) {
		s.failure(w, r, 409, "lease_lost", "not executed: this server has handed its checkout on; ask the next one")
		return
	}
	if unknown := (*rpcError)(nil); errors.As(err, &unknown) {
		s.failure(w, r, 500, "internal", unknown.Message)
		return
	}
	f := s.refusalOf(err)
	s.failure(w, r, httpStatus(f.code), f.code, f.message)
}

var jsonType = []string{"application/json"}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h["Content-Type"] = jsonType
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	w.Write(body)
}

// readBody reads a JSON body within its limits; false means that the answer
// has been written.
func (s *server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		s.failure(w, r, 415, "unsupported_media_type", fmt.Sprintf("Content-Type %q: send application/json", clip(r.Header.Get("Content-Type"), 80)))
		return nil, false
	}
	tooLarge := func() {
		r.Close = true
		w.Header().Set("Connection", "close")
		s.failure(w, r, 413, "too_large", fmt.Sprintf("a body may have at most %d bytes", maxMessage))
	}
	if r.ContentLength > maxMessage {
		tooLarge()
		return nil, false
	}
	if r.ContentLength < 0 {
		body, err := io.ReadAll(io.LimitReader(r.Body, maxMessage+1))
		switch {
		case err != nil:
			s.failure(w, r, 400, "invalid_input", "the body ended early or was malformed")
			return nil, false
		case len(body) > maxMessage:
			tooLarge()
			return nil, false
		}
		return body, true
	}
	body := make([]byte, r.ContentLength)
	if _, err := io.ReadFull(r.Body, body); err != nil {
		s.failure(w, r, 400, "invalid_input", "the body is shorter than its Content-Length, or came too slowly")
		return nil, false
	}
	return body, true
}

// startWork counts a request against maxWorking; false means that it was
// refused. Every true needs one stopWork.
func (s *server) startWork(w http.ResponseWriter, r *http.Request) bool {
	if s.working.Add(1) > maxWorking {
		s.working.Add(-1)
		s.refusedBusy.Add(1)
		s.failure(w, r, 503, "busy", fmt.Sprintf("%d requests are being worked on, which is the limit: try again", maxWorking))
		return false
	}
	return true
}

func (s *server) stopWork() { s.working.Add(-1) }

// serveMCP is /mcp, in the order of 20-mcp.md §5.
func (s *server) serveMCP(w http.ResponseWriter, r *http.Request) {
	if r.Method != "POST" && r.Method != "DELETE" {
		w.Header().Set("Allow", "DELETE, POST")
		s.failure(w, r, 405, "method_not_allowed", fmt.Sprintf("%s is not allowed at /mcp, only POST and DELETE", clip(r.Method, 20)))
		return
	}
	trusted, ok := s.checkToken(w, r)
	if !ok {
		return
	}
	if r.Method == "DELETE" {
		s.serveDelete(w, r)
		return
	}
	body, ok := s.readBody(w, r)
	if !ok {
		return
	}
	n := s.use(r.Header.Get("Mcp-Session-Id"))
	if n != nil {
		defer s.release(n)
	}
	if trusted && s.servePrivate(w, r, n, body) {
		return
	}
	if n != nil && n.attached {
		s.serveBridge(w, r, n, body)
		return
	}
	s.serveClient(w, r, n, body, trusted)
}

// checkToken reports whether the request carries the lease's token; a wrong
// one is refused.
func (s *server) checkToken(w http.ResponseWriter, r *http.Request) (trusted, ok bool) {
	given := r.Header.Get("Authorization")
	if given == "" {
		return false, true
	}
	token, bearer := strings.CutPrefix(given, "Bearer ")
	if !bearer || subtle.ConstantTimeCompare([]byte(token), []byte(s.lease.token())) != 1 {
		w.Header().Set("WWW-Authenticate", "Bearer")
		s.failure(w, r, 401, "unauthorized", "Authorization must be Bearer with the token of this server's lease file")
		return false, false
	}
	return true, true
}

func (s *server) serveDelete(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get("Mcp-Session-Id")
	if id == "" {
		s.failure(w, r, 400, "session_required", "DELETE ends the session that Mcp-Session-Id names")
		return
	}
	s.mu.Lock()
	n := s.sessions[id]
	s.mu.Unlock()
	if n == nil || !s.dismiss(n) {
		s.sessionNotFound(w, r)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *server) sessionNotFound(w http.ResponseWriter, r *http.Request) {
	s.failure(w, r, 404, "session_not_found", "there is no such session (it may have expired): initialize again")
}

// serveBridge answers one frame of a bridge. Status and headers tell only what
// concerns the bridge itself; the body is the client's.
func (s *server) serveBridge(w http.ResponseWriter, r *http.Request, n *session, body []byte) {
	if s.gone() {
		s.refuseLate(w, r, member(body, "params"))
		return
	}
	ping := bytes.Contains(body, []byte(`"ping"`)) // at worst one that need not be
	if !ping && !s.startWork(w, r) {
		return
	}
	f := readFrame(body)
	answer, err := s.answerSafely(s.callContext(w, r, message{method: f.method, params: f.params}), n, body)
	if !ping {
		s.stopWork()
	}
	s.writeAnswer(w, r, answer, err)
}

// refuseLate answers a request that came after the lease was released or lost:
// a command was not executed, everything else has no session here any more.
// Both send a bridge to the next server.
func (s *server) refuseLate(w http.ResponseWriter, r *http.Request, params json.RawMessage) {
	if c := toolTable()[stringMember(params, "name")]; c != nil && c.command {
		s.refused(w, r, errLeaseLost)
		return
	}
	s.sessionNotFound(w, r)
}

// callContext is the context of one call: the request's, and without its read
// deadline where the call may wait, since that would end the wait.
func (s *server) callContext(w http.ResponseWriter, r *http.Request, m message) context.Context {
	if c := toolTable()[stringMember(m.params, "name")]; m.method == "tools/call" && c != nil && c.mayWait {
		http.NewResponseController(w).SetReadDeadline(time.Time{})
	}
	return r.Context()
}

func (s *server) writeAnswer(w http.ResponseWriter, r *http.Request, answer []byte, err error) {
	switch {
	case err != nil:
		s.refused(w, r, err)
	case answer == nil:
		w.WriteHeader(http.StatusAccepted)
	case len(answer) > maxAnswer:
		s.failure(w, r, 500, "too_large", fmt.Sprintf("the answer has more than %d bytes: ask for less", maxAnswer))
	default:
		writeJSON(w, http.StatusOK, answer)
	}
}

// serveClient answers a client that speaks HTTP itself.
func (s *server) serveClient(w http.ResponseWriter, r *http.Request, n *session, body []byte, trusted bool) {
	body = validText(body)
	if err := checkJSON(body); err != nil {
		s.failure(w, r, 400, "invalid_json", err.Message)
		return
	}
	if body = bytes.TrimLeft(body, " \t\r\n"); body[0] == '[' {
		s.serveBatch(w, r, n, body)
		return
	}
	m, bad := parseEnvelope(body)
	if bad != nil && bad.Code != codeInvalidParams {
		s.failure(w, r, 400, "invalid_input", bad.Message)
		return
	}
	if m.notification() || m.response {
		if n != nil {
			s.answer(r.Context(), n, m)
		}
		w.WriteHeader(http.StatusAccepted)
		return
	}
	if isModern(m) || r.Header.Get("MCP-Protocol-Version") >= modernVersion && m.method != "initialize" {
		s.serveModern(w, r, m, trusted)
		return
	}
	if v := r.Header.Get("MCP-Protocol-Version"); v != "" && m.method != "initialize" && !slices.Contains(legacyVersions, v) {
		s.failure(w, r, 400, "unsupported_protocol_version", fmt.Sprintf("MCP-Protocol-Version %q is not served: use one of %s", clip(v, 40), strings.Join(legacyVersions, ", ")))
		return
	}
	switch id := r.Header.Get("Mcp-Session-Id"); {
	case n == nil && id != "":
		s.sessionNotFound(w, r)
	case n == nil && m.method != "initialize":
		s.failure(w, r, 400, "session_required", "send initialize first, then its Mcp-Session-Id with every request")
	case bad != nil:
		writeJSON(w, http.StatusOK, errorMessage(m.id, bad))
	case s.gone():
		s.refuseLate(w, r, m.params)
	case n == nil:
		s.serveInitialize(w, r, m, trusted)
	case m.method == "ping":
		answer, err := s.answer(r.Context(), n, m)
		s.writeAnswer(w, r, answer, err)
	case s.startWork(w, r):
		defer s.stopWork()
		answer, err := s.answer(s.callContext(w, r, m), n, m)
		s.writeAnswer(w, r, answer, err)
	}
}

func (s *server) serveBatch(w http.ResponseWriter, r *http.Request, n *session, body []byte) {
	version := ""
	if n != nil {
		version = n.protocol()
	}
	if _, err := batchElements(version, body); err != nil {
		s.failure(w, r, 400, "invalid_input", err.Message)
		return
	}
	if s.gone() {
		s.sessionNotFound(w, r)
		return
	}
	if s.startWork(w, r) {
		defer s.stopWork()
		s.writeAnswer(w, r, s.answerBatch(r.Context(), n, body), nil)
	}
}

// serveInitialize opens the session of a client that speaks HTTP itself.
func (s *server) serveInitialize(w http.ResponseWriter, r *http.Request, m message, trusted bool) {
	n := &session{id: randomHex(16), trusted: trusted}
	n.peer = s.board.attach(attachment{Transport: "http", Unverified: !trusted})
	if err := s.admit(n); err != nil {
		s.board.detach(n.peer)
		s.refused(w, r, err)
		return
	}
	answer, err := s.answer(r.Context(), n, m)
	if err == nil && bytes.Contains(answer, []byte(`"result"`)) {
		w.Header()["Mcp-Session-Id"] = []string{n.id}
	} else {
		s.dismiss(n)
	}
	s.writeAnswer(w, r, answer, err)
}

// attachParams is what a bridge says of itself and its client.
type attachParams struct {
	Identity string       `json:"identity"`
	Address  *peerAddress `json:"address,omitempty"`
	Carried  carried      `json:"carried"`
}

type attachResult struct {
	Session string `json:"session"`
	Peer    peerID `json:"peer"`
	Name    string `json:"name"` // the display name the peer was given
}

// servePrivate answers the methods that only a bearer of the token may use;
// false when the body is none of them.
func (s *server) servePrivate(w http.ResponseWriter, r *http.Request, n *session, body []byte) bool {
	m, bad := parseMessage(body)
	switch {
	case bad != nil:
		return false
	case m.method == "majordomus/attach":
		s.serveAttach(w, r, m)
	case m.method == "majordomus/watch" && n != nil && n.attached:
		s.serveWatch(w, r, n, m)
	case m.method == "ping" && n != nil && n.attached:
		// The bridge's own: no sign of life of its client.
		writeJSON(w, http.StatusOK, resultMessage(m.id, []byte("{}")))
	case m.method == "majordomus/watch", m.method == "ping":
		s.sessionNotFound(w, r)
	default:
		return false
	}
	return true
}

// serveAttach puts a bridge's client on the board, whole and at once.
func (s *server) serveAttach(w http.ResponseWriter, r *http.Request, m message) {
	var p attachParams
	if err := json.Unmarshal(m.params, &p); err != nil || !validIdentity(p.Identity) {
		s.failure(w, r, 400, "invalid_input", "majordomus/attach: identity must be 32 lower-case hex digits, with what is carried beside it")
		return
	}
	if s.gone() {
		s.refused(w, r, errLeaseLost)
		return
	}
	n := &session{id: randomHex(16), attached: true, trusted: true, version: p.Carried.Version}
	n.peer = s.board.attach(attachment{Transport: "http", Identity: p.Identity, Address: p.Address, Carried: p.Carried})
	if err := s.admit(n); err != nil {
		s.board.detach(n.peer)
		s.refused(w, r, err)
		return
	}
	s.replace(n)
	writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(attachResult{n.id, n.peer, s.board.displayName(n.peer)})))
}

func validIdentity(id string) bool {
	b, err := hex.DecodeString(id)
	return err == nil && len(b) == 16 && id == strings.ToLower(id)
}

// serveWatch holds the request until the server is ending or hands its
// sessions on; the bridge then elects. When the bridge's end drops instead,
// its process is gone, and its session and peer go at once.
func (s *server) serveWatch(w http.ResponseWriter, r *http.Request, n *session, m message) {
	// A watch is no sign of a request in progress: it must neither keep its
	// session from expiring nor the server from ending.
	s.release(n)
	s.running.Add(-1)
	defer func() {
		s.running.Add(1)
		s.mu.Lock()
		n.running++
		s.mu.Unlock()
	}()
	http.NewResponseController(w).SetReadDeadline(time.Time{})
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	s.mu.Lock()
	here := s.sessions[n.id] == n
	if here {
		if n.ended != nil {
			n.ended(errSessionEnded) // a second watch replaces the first
		}
		n.ended = cancel
	}
	s.mu.Unlock()
	if !here {
		s.sessionNotFound(w, r)
		return
	}
	select {
	case <-s.ending:
		writeJSON(w, http.StatusOK, resultMessage(m.id, []byte(`{"reason":"ending"}`)))
	case <-ctx.Done():
		if errors.Is(context.Cause(ctx), errSessionEnded) {
			s.sessionNotFound(w, r)
			return
		}
		s.dismiss(n)
	}
}

// serveCapability is the REST route of one capability. There is no caller: a
// session id sent along is ignored.
func (s *server) serveCapability(w http.ResponseWriter, r *http.Request, c *capability) {
	if s.gone() {
		if c.command {
			s.refused(w, r, errLeaseLost)
		} else {
			s.failure(w, r, 404, "not_found", "this server has handed its checkout on; ask the next one")
		}
		return
	}
	args, ok := s.readArguments(w, r, c)
	if !ok || !s.startWork(w, r) {
		return
	}
	out, err := s.invoke(r.Context(), c, args)
	s.stopWork()
	if err != nil {
		s.refused(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, append(mustJSON(out), '\n'))
}

func (s *server) readArguments(w http.ResponseWriter, r *http.Request, c *capability) (json.RawMessage, bool) {
	query := r.URL.Query()
	if c.method == "GET" {
		args, err := queryArguments(c, query)
		if err != nil {
			s.refused(w, r, err)
		}
		return args, err == nil
	}
	if len(query) > 0 {
		s.failure(w, r, 400, "invalid_input", "this route takes no query parameters: send a JSON object as the body")
		return nil, false
	}
	body, ok := s.readBody(w, r)
	if !ok {
		return nil, false
	}
	body = validText(body)
	if err := checkJSON(body); err != nil {
		s.failure(w, r, 400, "invalid_json", err.Message)
		return nil, false
	}
	return body, true
}

// homeAnswer is GET / for programs. It names no path.
type homeAnswer struct {
	Name            string    `json:"name"`
	Version         string    `json:"version"`
	Repository      string    `json:"repository"`
	RepositoryID    string    `json:"repository_id"`
	GitRepositoryID string    `json:"git_repository_id,omitempty"`
	LinkedWorktree  bool      `json:"linked_worktree"`
	Leaseholder     bool      `json:"leaseholder"`
	Proof           string    `json:"proof,omitempty"`
	Surfaces        []surface `json:"surfaces"`
}

// serveHome is the home page, and for programs the answer that proves who this
// is: only a process that has read the lease file can compute the proof.
func (s *server) serveHome(w http.ResponseWriter, r *http.Request) {
	if wantsPage(r) {
		s.servePage(w, r, "home")
		return
	}
	answer := homeAnswer{
		Name:            "majordomus",
		Version:         s.set.version,
		Repository:      filepath.Base(s.checkout.root),
		RepositoryID:    s.checkout.id,
		GitRepositoryID: s.checkout.gitID,
		LinkedWorktree:  s.checkout.linked,
		Leaseholder:     s.holds(),
		Surfaces:        surfaces(),
	}
	if challenge := r.Header.Get("Majordomus-Challenge"); challenge != "" {
		if !validIdentity(challenge) {
			s.failure(w, r, 400, "invalid_input", "Majordomus-Challenge must be 32 lower-case hex digits")
			return
		}
		answer.Proof = proof(s.lease.token(), challenge)
	}
	w.Header().Set("Vary", "Accept")
	writeJSON(w, http.StatusOK, append(mustJSON(answer), '\n'))
}

// proof is what only a reader of the lease file can answer to a challenge.
func proof(token, challenge string) string {
	h := hmac.New(sha256.New, []byte(token))
	h.Write([]byte(challenge))
	return hex.EncodeToString(h.Sum(nil))
}

// serveIndex lists the routes of the REST API.
func (s *server) serveIndex(w http.ResponseWriter, r *http.Request) {
	type route struct {
		ID      string `json:"id"`
		Method  string `json:"method"`
		Path    string `json:"path"`
		Summary string `json:"summary"`
	}
	var routes []route
	for _, c := range capabilities() {
		routes = append(routes, route{c.id, c.method, c.path, c.summary})
	}
	writeJSON(w, http.StatusOK, append(mustJSON(map[string]any{"openapi": "/openapi.json", "routes": routes}), '\n'))
}

func (s *server) serveOpenAPI(w http.ResponseWriter, r *http.Request) {
	serveAsset(w, r, "application/json", openapiJSON)
}

// serveAsset serves embedded bytes under an ETag, so that asking again is cheap.
func serveAsset(w http.ResponseWriter, r *http.Request, kind string, body []byte) {
	sum := sha256.Sum256(body)
	w.Header().Set("ETag", `"`+hex.EncodeToString(sum[:12])+`"`)
	w.Header().Set("Cache-Control", "no-cache")
	w.Header().Set("Content-Type", kind)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
}

func (s *server) logPanic(v any) {
	s.log.Error(fmt.Sprintf("panic: %v: %q", v, debug.Stack()))
}

type connKey struct{}

// deadlineListener accepts connections that know how they ended.
type deadlineListener struct {
	net.Listener
	s *server
}

func (l *deadlineListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &deadlineConn{Conn: c, s: l.s}, nil
}

// deadlineConn counts the connections that the read deadline cut off, and
// notes a head that names both lengths: net/http drops Content-Length beside
// chunked, so a handler cannot see it (RFC 9112 §6.3 calls it an attack).
type deadlineConn struct {
	net.Conn
	s              *server
	sawBothLengths bool
	aborting       atomic.Bool // net/http is breaking off its own read
	cut            atomic.Bool
}

func (c *deadlineConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && bytes.Contains(b[:n], []byte("hunked")) {
		head, _, _ := bytes.Cut(b[:n], []byte("\r\n\r\n"))
		c.sawBothLengths = bytes.Contains(bytes.ToLower(head), []byte("\r\ncontent-length:"))
	}
	if err != nil && errors.Is(err, os.ErrDeadlineExceeded) && !c.aborting.Load() {
		c.cut.Store(true)
	}
	return n, err
}

// SetReadDeadline tells a real deadline from the one in the past by which
// net/http ends the read it keeps running beside a handler.
func (c *deadlineConn) SetReadDeadline(t time.Time) error {
	c.aborting.Store(!t.IsZero() && t.Before(c.s.started))
	return c.Conn.SetReadDeadline(t)
}

func (c *deadlineConn) Close() error {
	if c.cut.Swap(false) {
		c.s.cutOff.Add(1)
	}
	return c.Conn.Close()
}
