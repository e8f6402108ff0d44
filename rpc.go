package main

// The MCP methods over JSON-RPC. Both transports use this file: stdio.go and
// httpmcp.go differ in framing and status codes only. A notification is never
// answered, not even with an error.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// Revisions of the protocol with an initialize handshake, newest first. A
// client that asks for anything else is offered the newest of them.
var legacyVersions = []string{"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"}

// answerFrame answers one frame of a session by the rules of stdio, which are
// also those of a bridge's frames: nil when there is nothing to answer. Its
// errors are errLeaseLost: nothing was executed but what may be repeated, and
// another server must be asked; and errSessionEnded: nothing was executed.
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
	ctx = context.WithValue(ctx, inBatch{}, true)
	var answers [][]byte
	size, most := 0, maxAnswer
	if !n.trusted {
		most = batchAnswer
	}
	for _, e := range elements {
		m, err := parseEnvelope(e)
		if err != nil {
			answers = append(answers, errorMessage(m.id, err))
		} else if size > most || ctx.Err() != nil {
			if !m.notification() && !m.response {
				answers = append(answers, errorMessage(m.id, rpcErrorf(codeInternal, "not executed: the answers before it fill what one answer may hold")))
			}
		} else if a, err := s.answer(ctx, n, m); err != nil {
			answers = append(answers, errorMessage(m.id, rpcErrorf(codeInternal, "not executed, or safe to repeat: %v", err)))
		} else if a != nil {
			answers = append(answers, a)
			size += len(a)
		}
	}
	if len(answers) == 0 {
		return nil
	}
	return slices.Concat([]byte("["), bytes.Join(answers, []byte(",")), []byte("]"))
}

// answer runs one message of a session; nil when there is nothing to answer.
// For its errors see answerFrame.
func (s *server) answer(ctx context.Context, n *session, m message) ([]byte, error) {
	s.board.touch(n.peer)
	switch {
	case m.response:
		return nil, nil
	case m.notification():
		if m.method == "notifications/cancelled" {
			n.waiting.cancel(m.params)
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
		if err := checkCursor(m.params); err != nil {
			return nil, err
		}
		return toolsList(), nil
	case "tools/call":
		return s.callTool(ctx, n, m)
	}
	return nil, rpcErrorf(codeMethodNotFound, "method %q is not served here", clip(m.method, 80))
}

// checkCursor refuses to go on in a list of one page.
func checkCursor(params json.RawMessage) error {
	if c := stringMember(params, "cursor"); c != "" {
		return rpcErrorf(codeInvalidParams, "cursor %q is unknown: the list has one page", clip(c, 80))
	}
	return nil
}

// initialize takes what it can read: everything may be missing or be of another
// type, because an odd client is better served than refused.
func (s *server) initialize(n *session, params json.RawMessage) (json.RawMessage, error) {
	s.board.identify(n.peer, readClientInfo(member(params, "clientInfo")))
	version := legacyVersions[0]
	if asked := stringMember(params, "protocolVersion"); slices.Contains(legacyVersions, asked) {
		version = asked
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
		ctx, done = n.waiting.begin(ctx, m.id)
		defer done()
	}
	if errors.Is(context.Cause(ctx), errCancelled) {
		return nil, nil
	}
	s.mesh.settled()
	out, err := s.invokeFor(ctx, n, c, member(m.params, "arguments"))
	switch failed := (*rpcError)(nil); {
	case errors.Is(context.Cause(ctx), errCancelled), errors.Is(err, errCancelled):
		return nil, nil
	case errors.Is(err, errLeaseLost), errors.Is(err, errSessionEnded), errors.As(err, &failed):
		return nil, err
	case err != nil:
		return toolFailure(s.refusalOf(err), s.carry(ctx, n, c)), nil
	}
	return toolResult(out, c.textOnly, s.carry(ctx, n, c)), nil
}

// invokeFor runs a capability for a caller, who is busy meanwhile, unless it waits.
func (s *server) invokeFor(ctx context.Context, n *session, c *capability, args []byte) (any, error) {
	if n != nil {
		s.board.spoke(n.peer)
	}
	if n != nil && !c.mayWait {
		s.mesh.work(n.peer, 1)
		defer s.mesh.work(n.peer, -1)
	}
	return s.invoke(ctx, c, args)
}

// refusalOf is what a caller may be told of an error. What is hidden from it is logged.
func (s *server) refusalOf(err error) *refusal {
	r := asRefusal(err)
	if r.code == "internal" {
		s.log.Error(fmt.Sprintf("a call failed: %v", err))
	}
	return r
}

type textBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// toolResult holds the value twice, since clients show their model one or the
// other, and with it the messages that came meanwhile. It is put together by
// hand: encoding a value inside another would parse it again. Of a tool that
// answers text only, the output says which.
func toolResult(out any, textOnly bool, list []mail) json.RawMessage {
	if textOnly {
		return mustJSON(struct {
			Content []textBlock `json:"content"`
		}{textBlocks(out.(interface{ blocks() []string }).blocks(), list)})
	}
	value := mustJSON(out)
	text := mustJSON(string(value))
	result := make([]byte, 0, len(text)+len(value)+80)
	result = append(result, `{"content":[{"type":"text","text":`...)
	result = append(result, text...)
	result = append(result, '}')
	if len(list) > 0 {
		result = append(append(result, ','), mustJSON(textBlock{"text", mailText(list)})...)
	}
	result = append(result, `],"structuredContent":`...)
	result = append(result, withInbox(value, list)...)
	return append(result, '}')
}

// textBlocks adds the messages that came meanwhile to what a tool says.
func textBlocks(texts []string, list []mail) (blocks []textBlock) {
	for _, t := range texts {
		blocks = append(blocks, textBlock{"text", t})
	}
	if len(list) > 0 {
		blocks = append(blocks, textBlock{"text", mailText(list)})
	}
	return blocks
}

func toolFailure(r *refusal, list []mail) json.RawMessage {
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
	}{about, textBlocks([]string{r.message}, list), true})
}
