package main

// JSON-RPC 2.0 by hand, and the MCP methods on top of it. Both transports use
// this file: stdio.go and httpmcp.go differ in framing and status codes only.
//
// Rules kept here:
//   - an id comes back byte for byte as it was sent; a notification is never
//     answered, not even with an error;
//   - keys match exactly (encoding/json folds case and lets the last twin win,
//     so envelopes are walked by hand) and a key given twice is refused;
//   - whatever comes in, what goes out is valid UTF-8 and valid JSON.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"
)

// JSON-RPC error codes.
const (
	codeParse          = -32700
	codeInvalidRequest = -32600
	codeMethodNotFound = -32601
	codeInvalidParams  = -32602
	codeInternal       = -32603
)

// maxNesting is how deep a message may nest (20-mcp.md §1).
const maxNesting = 1000

// rpcError is a JSON-RPC error object.
type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
	Data    any    `json:"data,omitempty"`
}

func rpcErrorf(code int, format string, args ...any) *rpcError {
	return &rpcError{Code: code, Message: fmt.Sprintf(format, args...)}
}

// message is one JSON-RPC message, decoded as far as it takes to know what it is.
type message struct {
	id       json.RawMessage // as sent; nil in a notification
	method   string
	params   json.RawMessage // an object, or nil
	response bool            // an answer to a question we never ask: accepted and ignored
}

// notification reports whether m wants no answer.
func (m message) notification() bool { return m.id == nil }

// parseMessage reads one message. An error comes with the message's id where
// that could be read, so that the answer can carry it.
func parseMessage(raw []byte) (message, *rpcError) {
	if err := checkJSON(raw); err != nil {
		return message{}, err
	}
	return parseEnvelope(raw)
}

// parseEnvelope is parseMessage for text that is known to be valid JSON.
func parseEnvelope(raw []byte) (m message, failed *rpcError) {
	if raw = bytes.TrimLeft(raw, " \t\r\n"); len(raw) == 0 || raw[0] != '{' {
		return m, rpcErrorf(codeInvalidRequest, "not a JSON-RPC request: a message is an object")
	}
	var version, method, result json.RawMessage
	twin := ""
	err := members(raw, func(key string, value json.RawMessage) {
		slot := (*json.RawMessage)(nil)
		switch key {
		case "jsonrpc":
			slot = &version
		case "id":
			slot = &m.id
		case "method":
			slot = &method
		case "params":
			slot = &m.params
		case "result", "error":
			slot = &result
		default:
			return
		}
		if *slot != nil {
			twin = key
		}
		*slot = value
	})
	id := m.id
	switch m.id = nil; {
	case err != nil:
		return m, rpcErrorf(codeParse, "parse error: %v", err)
	case twin != "":
		return m, rpcErrorf(codeInvalidRequest, "not a JSON-RPC request: %q is given twice", twin)
	case id != nil && !validID(id):
		return m, rpcErrorf(codeInvalidRequest, "not a JSON-RPC request: id must be a string or an integer, got %s", clip(string(id), 80))
	}
	m.id = id
	if string(version) != `"2.0"` {
		return m, rpcErrorf(codeInvalidRequest, `not a JSON-RPC request: jsonrpc must be "2.0"`)
	}
	if method == nil && result != nil {
		m.response = true
		return m, nil
	}
	if len(method) == 0 || method[0] != '"' || json.Unmarshal(method, &m.method) != nil {
		return m, rpcErrorf(codeInvalidRequest, "not a JSON-RPC request: method must be a string")
	}
	if len(m.params) > 0 && m.params[0] == 'n' {
		m.params = nil
	}
	if len(m.params) > 0 && m.params[0] != '{' && !m.notification() {
		return m, rpcErrorf(codeInvalidParams, "params must be an object")
	}
	return m, nil
}

// checkJSON says what is wrong with text that is not JSON, or nested deeper
// than maxNesting.
func checkJSON(raw []byte) *rpcError {
	depth, inString := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > maxNesting {
				return rpcErrorf(codeParse, "parse error: nested deeper than %d levels", maxNesting)
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	if !json.Valid(raw) {
		var v json.RawMessage
		return rpcErrorf(codeParse, "parse error: %v", json.Unmarshal(raw, &v))
	}
	return nil
}

// validID reports whether an id is a string or an integer. A fraction or an
// exponent is neither, and null would be taken for "no id".
func validID(id json.RawMessage) bool {
	if id[0] == '"' {
		return true
	}
	return (id[0] == '-' || id[0] >= '0' && id[0] <= '9') && !bytes.ContainsAny(id, ".eE")
}

var errNotObject = errors.New("not a JSON object")

// members calls each for every member of a JSON object, in order and twins
// included. Of text that is not valid JSON it may report anything, but it
// stays inside the text; a bridge uses it on frames that it does not judge.
func members(raw []byte, each func(key string, value json.RawMessage)) error {
	i := skipSpace(raw, 0)
	if i >= len(raw) || raw[i] != '{' {
		return errNotObject
	}
	if i = skipSpace(raw, i+1); i < len(raw) && raw[i] == '}' {
		return nil
	}
	for {
		from := skipSpace(raw, i)
		to := skipValue(raw, from)
		if to <= from+1 || raw[from] != '"' {
			return errNotObject
		}
		key := string(raw[from+1 : to-1])
		if bytes.IndexByte(raw[from:to], '\\') >= 0 && json.Unmarshal(raw[from:to], &key) != nil {
			return errNotObject
		}
		if i = skipSpace(raw, to); i >= len(raw) || raw[i] != ':' {
			return errNotObject
		}
		from = skipSpace(raw, i+1)
		if to = skipValue(raw, from); to == from {
			return errNotObject
		}
		each(key, json.RawMessage(raw[from:to:to]))
		if i = skipSpace(raw, to); i >= len(raw) || raw[i] != ',' {
			if i < len(raw) && raw[i] == '}' {
				return nil
			}
			return errNotObject
		}
		i++
	}
}

func skipSpace(raw []byte, i int) int {
	for i < len(raw) && (raw[i] == ' ' || raw[i] == '\t' || raw[i] == '\n' || raw[i] == '\r') {
		i++
	}
	return i
}

// skipValue returns the index behind the JSON value that starts at i.
func skipValue(raw []byte, i int) int {
	depth, inString := 0, false
	for ; i < len(raw); i++ {
		switch c := raw[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			if inString = !inString; !inString && depth == 0 {
				return i + 1
			}
		case inString:
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			if depth == 0 {
				return i
			}
			if depth--; depth == 0 {
				return i + 1
			}
		case depth == 0 && (c == ',' || c == ':' || c == ' ' || c == '\t' || c == '\n' || c == '\r'):
			return i
		}
	}
	return min(i, len(raw))
}

// member returns the value of one member of a JSON object, nil when there is
// none.
func member(raw []byte, name string) (value json.RawMessage) {
	if len(raw) == 0 {
		return nil
	}
	members(raw, func(key string, v json.RawMessage) {
		if key == name {
			value = v
		}
	})
	return value
}

// stringMember is member for a string; "" when it is absent or no string.
func stringMember(raw []byte, name string) (s string) {
	if v := member(raw, name); len(v) > 0 && v[0] == '"' {
		json.Unmarshal(v, &s)
	}
	return s
}

// validText makes a frame valid UTF-8 without lone surrogates: each fault
// becomes U+FFFD, so that nothing we echo can make a client's parser fail.
func validText(raw []byte) []byte {
	if !utf8.Valid(raw) {
		raw = bytes.ToValidUTF8(raw, []byte("\uFFFD"))
	}
	if bytes.Contains(raw, []byte(`\ud`)) || bytes.Contains(raw, []byte(`\uD`)) {
		raw = replaceLoneSurrogates(raw)
	}
	return raw
}

func replaceLoneSurrogates(raw []byte) []byte {
	surrogate := func(i int) uint64 { // the escaped surrogate at i, 0 when there is none
		if i+6 > len(raw) || raw[i] != '\\' || raw[i+1] != 'u' {
			return 0
		}
		n, err := strconv.ParseUint(string(raw[i+2:i+6]), 16, 16)
		if err != nil || n < 0xd800 || n > 0xdfff {
			return 0
		}
		return n
	}
	out := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); {
		n := surrogate(i)
		switch {
		case n == 0 && raw[i] == '\\' && i+1 < len(raw):
			out = append(out, raw[i], raw[i+1]) // an escape of two bytes, so that `\\ud800` stays text
			i += 2
		case n == 0:
			out = append(out, raw[i])
			i++
		case n < 0xdc00 && surrogate(i+6) >= 0xdc00:
			out = append(out, raw[i:i+12]...)
			i += 12
		default:
			out = append(out, `\ufffd`...)
			i += 6
		}
	}
	return out
}

// clip shortens text that goes into an error.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// resultMessage is the message that carries a result.
func resultMessage(id, result json.RawMessage) []byte {
	out := make([]byte, 0, len(result)+len(id)+40)
	out = append(out, `{"jsonrpc":"2.0","id":`...)
	out = append(out, id...)
	out = append(out, `,"result":`...)
	out = append(out, result...)
	return append(out, '}')
}

// errorMessage is the message that carries an error; id null where none could
// be read.
func errorMessage(id json.RawMessage, e *rpcError) []byte {
	if id == nil {
		id = json.RawMessage("null")
	}
	out := append([]byte(`{"jsonrpc":"2.0","id":`), id...)
	out = append(out, `,"error":`...)
	out = append(out, mustJSON(e)...)
	return append(out, '}')
}

// mustJSON encodes a value of ours, which cannot fail. HTML is not escaped:
// what is sent is JSON, and pages escape for themselves.
func mustJSON(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(fmt.Sprintf("encoding %T: %v", v, err))
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// session is one client's connection to a server: the process's own client,
// a bridge's, or one that speaks HTTP itself.
type session struct {
	id       string // Mcp-Session-Id; "" for the process's own client
	peer     peerID
	attached bool // opened by majordomus/attach: a bridge
	trusted  bool // one of the user's own processes, not just any on loopback

	mu      sync.Mutex
	version string                             // negotiated revision; "" before initialize
	waits   map[string]context.CancelCauseFunc // calls that wait, by raw id

	// Kept by the server under its own mutex.
	running  int // requests being answered; such a session is not idle
	lastUsed time.Time
	ended    context.CancelCauseFunc // ends the session's watch; nil without one
}

func (n *session) protocol() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.version
}

// errCancelled is the cause of a wait that the client cancelled: it gets no answer.
var errCancelled = errors.New("cancelled by the client")

// waiting registers a call that may wait, so that notifications/cancelled can
// end it. The returned function must be called when the call has ended.
func (n *session) waiting(ctx context.Context, id json.RawMessage) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.waits == nil {
		n.waits = map[string]context.CancelCauseFunc{}
	}
	n.waits[string(id)] = cancel
	return ctx, func() {
		n.mu.Lock()
		delete(n.waits, string(id))
		n.mu.Unlock()
		cancel(nil)
	}
}

// cancelWait ends the waiting call that notifications/cancelled names.
func (n *session) cancelWait(params json.RawMessage) {
	n.mu.Lock()
	cancel := n.waits[string(member(params, "requestId"))]
	n.mu.Unlock()
	if cancel != nil {
		cancel(errCancelled)
	}
}

// endWaits lets every waiting call of the session be answered now, with what
// there is: its client has left or is about to.
func (n *session) endWaits() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, cancel := range n.waits {
		cancel(errInputEnded)
	}
}

type sessionKey struct{}

// withCaller marks a call as coming through a session.
func withCaller(ctx context.Context, n *session) context.Context {
	return context.WithValue(ctx, sessionKey{}, n)
}

// callerOf returns the session that a call came through; nil over plain HTTP.
func callerOf(ctx context.Context) *session {
	n, _ := ctx.Value(sessionKey{}).(*session)
	return n
}

// Revisions of the protocol with an initialize handshake, newest first. A
// client that asks for anything else is offered the newest of them.
var legacyVersions = []string{"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"}

// batches reports whether a revision knows JSON-RPC batches.
func batches(version string) bool { return version == "2025-03-26" || version == "2024-11-05" }

// answerFrame answers one frame of a session by the rules of stdio, which are
// also those of a bridge's frames: nil when there is nothing to answer. Its one
// error is errLeaseLost: nothing was executed, and another server must be asked.
func (s *server) answerFrame(ctx context.Context, n *session, raw []byte) ([]byte, error) {
	raw = validText(raw)
	if err := checkJSON(raw); err != nil {
		return errorMessage(nil, err), nil
	}
	if raw = bytes.TrimLeft(raw, " \t\r\n"); raw[0] == '[' {
		return s.answerBatch(ctx, n, raw), nil
	}
	m, err := parseEnvelope(raw)
	if err != nil {
		return errorMessage(m.id, err), nil
	}
	return s.answer(ctx, n, m)
}

// answerBatch answers the elements in order, where the negotiated revision
// has batches. An element that came too late for this server says so by
// itself: those before it have been executed, so the batch cannot move on.
func (s *server) answerBatch(ctx context.Context, n *session, raw []byte) []byte {
	elements, err := batchElements(n.protocol(), raw)
	if err != nil {
		return errorMessage(nil, err)
	}
	var answers [][]byte
	for _, e := range elements {
		m, err := parseEnvelope(e)
		if err != nil {
			answers = append(answers, errorMessage(m.id, err))
		} else if a, err := s.answer(ctx, n, m); err != nil {
			answers = append(answers, errorMessage(m.id, rpcErrorf(codeInternal, "not executed: %v", err)))
		} else if a != nil {
			answers = append(answers, a)
		}
	}
	if len(answers) == 0 {
		return nil
	}
	return slices.Concat([]byte("["), bytes.Join(answers, []byte(",")), []byte("]"))
}

// batchElements applies the rules for batches (20-mcp.md §1): the whole batch
// is refused or none of it.
func batchElements(version string, raw []byte) ([]json.RawMessage, *rpcError) {
	var elements []json.RawMessage
	switch err := json.Unmarshal(raw, &elements); {
	case err != nil:
		return nil, rpcErrorf(codeParse, "parse error: %v", err)
	case !batches(version):
		return nil, rpcErrorf(codeInvalidRequest, "batches belong to revisions 2024-11-05 and 2025-03-26: send one message at a time")
	case len(elements) == 0:
		return nil, rpcErrorf(codeInvalidRequest, "an empty batch")
	}
	for _, e := range elements {
		if m, err := parseEnvelope(e); err == nil && m.method == "initialize" {
			return nil, rpcErrorf(codeInvalidRequest, "initialize must not be part of a batch")
		}
	}
	return elements, nil
}

// answer runs one message of a session; nil when there is nothing to answer.
// Its one error is errLeaseLost, see answerFrame.
func (s *server) answer(ctx context.Context, n *session, m message) ([]byte, error) {
	s.board.touch(n.peer)
	switch {
	case m.response:
		return nil, nil
	case m.notification():
		if m.method == "notifications/cancelled" {
			n.cancelWait(m.params)
		}
		return nil, nil
	}
	result, err := s.method(ctx, n, m)
	switch failed := (*rpcError)(nil); {
	case errors.As(err, &failed):
		return errorMessage(m.id, failed), nil
	case err != nil:
		return nil, err
	case result == nil: // a wait that its client cancelled
		return nil, nil
	}
	return resultMessage(m.id, result), nil
}

// method runs one request. A nil result without an error is a cancelled call,
// which gets no answer. Errors are *rpcError or errLeaseLost.
func (s *server) method(ctx context.Context, n *session, m message) (json.RawMessage, error) {
	if isModern(m) {
		return s.modernMethod(ctx, n, m)
	}
	switch m.method {
	case "initialize":
		return s.initialize(n, m.params)
	case "ping":
		return json.RawMessage("{}"), nil
	case "tools/list":
		if c := stringMember(m.params, "cursor"); c != "" {
			return nil, rpcErrorf(codeInvalidParams, "cursor %q is unknown: the list has one page", clip(c, 80))
		}
		return toolsList(), nil
	case "tools/call":
		return s.callTool(ctx, n, m)
	}
	return nil, rpcErrorf(codeMethodNotFound, "method %q is not served here", clip(m.method, 80))
}

// initializeParams is what a server reads of initialize. Everything in it may
// be missing: an odd client is better served than refused.
type initializeParams struct {
	ProtocolVersion string     `json:"protocolVersion"`
	ClientInfo      clientInfo `json:"clientInfo"`
}

func (s *server) initialize(n *session, params json.RawMessage) (json.RawMessage, error) {
	var p initializeParams
	if len(params) > 0 {
		if err := json.Unmarshal(params, &p); err != nil {
			return nil, rpcErrorf(codeInvalidParams, "initialize: %v", err)
		}
	}
	s.board.identify(n.peer, p.ClientInfo)
	version := legacyVersions[0]
	if slices.Contains(legacyVersions, p.ProtocolVersion) {
		version = p.ProtocolVersion
	}
	n.mu.Lock()
	n.version = version
	n.mu.Unlock()
	return mustJSON(initializeResult{
		ProtocolVersion: version,
		Capabilities:    serverCapabilities{},
		ServerInfo:      s.info(),
		Instructions:    s.instructions(n),
	}), nil
}

type initializeResult struct {
	ProtocolVersion string             `json:"protocolVersion"`
	Capabilities    serverCapabilities `json:"capabilities"`
	ServerInfo      serverInfo         `json:"serverInfo"`
	Instructions    string             `json:"instructions"`
}

// serverCapabilities declares only what is answered: tools, without
// notifications of change.
type serverCapabilities struct {
	Tools struct{} `json:"tools"`
}

type serverInfo struct {
	Name    string `json:"name"`
	Title   string `json:"title"`
	Version string `json:"version"`
}

func (s *server) info() serverInfo {
	return serverInfo{Name: "majordomus", Title: "majordomus", Version: s.set.version}
}

// callTool runs tools/call. Everything that goes wrong inside a tool is a
// result with isError, which a model can read and act on; only a call that
// names no tool of ours is a JSON-RPC error. n is nil when there is no caller.
func (s *server) callTool(ctx context.Context, n *session, m message) (json.RawMessage, error) {
	name := stringMember(m.params, "name")
	if name == "" {
		return nil, rpcErrorf(codeInvalidParams, "tools/call: name is missing: give the name of a tool from tools/list")
	}
	c := toolTable()[name]
	if c == nil {
		return nil, rpcErrorf(codeInvalidParams, "tools/call: there is no tool %q: tools/list names all of them", clip(name, 80))
	}
	if n != nil {
		ctx = withCaller(ctx, n)
	}
	if n != nil && c.mayWait {
		var done func()
		ctx, done = n.waiting(ctx, m.id)
		defer done()
	}
	out, err := s.invoke(ctx, c, member(m.params, "arguments"))
	switch failed := (*rpcError)(nil); {
	case errors.Is(context.Cause(ctx), errCancelled):
		return nil, nil
	case errors.Is(err, errLeaseLost), errors.As(err, &failed):
		return nil, err
	case err != nil:
		return toolFailure(s.refusalOf(err)), nil
	}
	return toolResult(out), nil
}

// refusalOf is what a caller may be told of an error. What is hidden from it is logged.
func (s *server) refusalOf(err error) *refusal {
	r := asRefusal(err)
	if r.code == "internal" {
		s.log.Error(fmt.Sprintf("a call failed: %v", err))
	}
	return r
}

// Error makes an rpcError an error; it is what a client reads.
func (e *rpcError) Error() string { return e.Message }

type textBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// toolResult holds the value twice, since clients show their model one or the
// other. It is put together by hand: encoding a value inside another would
// parse it again.
func toolResult(out any) json.RawMessage {
	value := mustJSON(out)
	text := mustJSON(string(value))
	result := make([]byte, 0, len(text)+len(value)+80)
	result = append(result, `{"content":[{"type":"text","text":`...)
	result = append(result, text...)
	result = append(result, `}],"structuredContent":`...)
	result = append(result, value...)
	return append(result, '}')
}

func toolFailure(r *refusal) json.RawMessage {
	type meta struct {
		Error struct {
			Code string `json:"code"`
		} `json:"majordomus/error"`
	}
	var about meta
	about.Error.Code = r.code
	return mustJSON(struct {
		Meta    meta        `json:"_meta"` // first: see modernResult
		Content []textBlock `json:"content"`
		IsError bool        `json:"isError"`
	}{about, []textBlock{{"text", r.message}}, true})
}
