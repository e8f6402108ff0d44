package main

// MCP over HTTP at /mcp; guard.go has been passed before.
//
// Rules kept here:
//   - a request at /mcp is checked in one order, that of serveMCP, and each
//     refusal has a body whose error.data.code says what happened: a bridge
//     decides by that word, never by the status;
//   - a bridge's session (opened by majordomus/attach) takes frames by the
//     rules of stdio: every JSON-RPC answer is a 200, byte for byte what the
//     owner's own client would get;
//   - probes, pings, watches and attaches never wait behind other work.

import (
	"bytes"
	"context"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

const (
	maxMessage = 4 << 20  // a request body or a line on stdin
	maxAnswer  = 32 << 20 // an answer's body
	maxHeaders = 64 << 10
)

// serveMCP is /mcp.
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
	s.mesh.confirm(loose, parcelNumbers(r.Header.Get(confirmHeader))...)
	if r.Method == "DELETE" {
		s.serveDelete(w, r)
		return
	}
	n := s.use(r.Header.Get("Mcp-Session-Id"))
	if n != nil {
		defer s.release(n)
		if n.trusted { // whose id is as secret as the token, and all that a bridge's messages show
			s.noStranger(r)
		}
	}
	body, ok := s.readBody(w, r, trusted || n != nil && n.trusted)
	if !ok {
		return
	}
	if trusted && s.servePrivate(w, r, n, body) {
		return
	}
	if n != nil && n.attached {
		s.serveBridge(w, r, n, body)
		return
	}
	if n != nil {
		s.confirmedBy(n, r)
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
		s.unauthorized(w, r, "Authorization must be Bearer with the token of this server's lease file")
		return false, false
	}
	s.noStranger(r)
	return true, true
}

// noStranger notes that the connection of a request is one of the user's own processes'.
func (s *server) noStranger(r *http.Request) {
	if c, _ := r.Context().Value(connKey{}).(*deadlineConn); c != nil {
		s.strangers.leave(c)
	}
}

func (s *server) unauthorized(w http.ResponseWriter, r *http.Request, message string) {
	w.Header().Set("WWW-Authenticate", "Bearer")
	s.failure(w, r, 401, "unauthorized", message)
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
	if n != nil && !n.attached {
		s.confirmedBy(n, r)
	}
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
	f := readFrame(body)
	x := &exchange{}
	if !ping && !s.startWork(w, r, x, &s.bridging) {
		return
	}
	answer, err := s.answerSafely(s.callContext(w, r, x, message{method: f.method, params: f.params}), n, body)
	if !ping {
		x.end()
	}
	s.writeCarrying(w, r, n, x, func() bool { return s.writeAnswer(w, r, x, answer, err) })
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
func (s *server) callContext(w http.ResponseWriter, r *http.Request, x *exchange, m message) context.Context {
	if c := toolTable()[stringMember(m.params, "name")]; m.method == "tools/call" && c != nil {
		x.command = c.command
		if c.mayWait {
			http.NewResponseController(w).SetReadDeadline(time.Time{})
		}
	}
	return withExchange(r.Context(), x)
}

// writeAnswer reports whether what it has written is the answer itself.
func (s *server) writeAnswer(w http.ResponseWriter, r *http.Request, x *exchange, answer []byte, err error) bool {
	switch {
	case err != nil:
		s.refused(w, r, err)
	case answer == nil:
		w.WriteHeader(http.StatusAccepted)
	case len(answer) > maxAnswer:
		s.failure(w, r, 500, "too_large", fmt.Sprintf("the answer has more than %d bytes: ask for less", maxAnswer))
	case s.room(w, r, x, len(answer)):
		writeJSON(w, http.StatusOK, answer)
		return true
	}
	return false
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
	x := &exchange{}
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
		s.writeAnswer(w, r, x, answer, err)
	case s.startWork(w, r, x, s.among(n.trusted)):
		defer x.end()
		s.writeCarrying(w, r, n, x, func() bool {
			answer, err := s.answer(s.callContext(w, r, x, m), n, m)
			x.executed()
			return s.writeAnswer(w, r, x, answer, err)
		})
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
	x := &exchange{}
	if !s.startWork(w, r, x, s.among(n != nil && n.trusted)) {
		return
	}
	defer x.end()
	if !s.room(w, r, x, batchAnswer) { // before: there may be commands in it
		return
	}
	x.command = true
	s.writeCarrying(w, r, n, x, func() bool {
		answer := s.answerBatch(withExchange(r.Context(), x), n, body)
		x.executed()
		return s.writeAnswer(w, r, x, answer, nil)
	})
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
	s.writeAnswer(w, r, &exchange{}, answer, err)
}

// attachParams is what a bridge says of itself and its client.
type attachParams struct {
	Identity string       `json:"identity"`
	Process  string       `json:"process,omitempty"` // see ownProcess
	Address  *peerAddress `json:"address,omitempty"`
	Carried  carried      `json:"carried"`
	Again    bool         `json:"again,omitempty"` // this server is the one it was attached to last
}

type attachResult struct {
	Session string          `json:"session"`
	Peer    peerID          `json:"peer"`
	Name    string          `json:"name"`              // the display name the peer was given
	Episode *carriedEpisode `json:"episode,omitempty"` // the one it holds
}

// servePrivate answers the methods that only a bearer of the token may use;
// false when the body is none of them.
func (s *server) servePrivate(w http.ResponseWriter, r *http.Request, n *session, body []byte) bool {
	m, bad := parseMessage(body)
	switch {
	case bad != nil || m.notification(): // the latter is never answered
		return false
	case m.method == "majordomus/attach":
		s.serveAttach(w, r, m)
	case m.method == "majordomus/deliver":
		s.serveDeliver(w, r, m)
	case m.method == "majordomus/kill":
		s.serveKill(w, r, m)
	case m.method == "majordomus/look":
		s.serveLook(w, r, m)
	case m.method == "majordomus/watch" && n != nil && n.attached:
		s.serveWatch(w, r, n, m)
	case m.method == "ping" && n != nil && n.attached:
		// The bridge's own: no sign of life of its client.
		if stringMember(m.params, "input") == "ended" {
			n.waiting.end()
		}
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
	s.mesh.settled()
	if err := s.refuseRetired(p.Identity); err != nil {
		s.refused(w, r, err)
		return
	}
	s.recognize(&p)
	n := &session{id: randomHex(16), attached: true, trusted: true, version: p.Carried.Version}
	n.peer = s.board.attach(attachment{Transport: "http", Identity: p.Identity, Process: p.Process, Address: p.Address, Carried: p.Carried})
	if err := s.admit(n); err != nil {
		s.board.detach(n.peer)
		s.refused(w, r, err)
		return
	}
	s.mesh.settled()
	s.mesh.confirm(written, parcelNumbers(r.Header.Get(confirmHeader))...)
	s.replace(n)
	held := s.restoreEpisodes(n.peer, p.Carried, p.Again)
	writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(attachResult{n.id, n.peer, s.board.displayName(n.peer), held})))
}

func validIdentity(id string) bool { return isHex(id, 32) }
