package main

// The modern revision of the protocol: stateless, every request says in _meta
// who asks and which revision it speaks. It is served beside the legacy ones,
// on the same endpoint and in the same process; what a tool does is the same.

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

const modernVersion = "2026-07-28"

// Error codes of the modern revision.
const (
	codeHeaderMismatch     = -32020
	codeUnsupportedVersion = -32022
)

// Keys in _meta.
const (
	metaVersion      = "io.modelcontextprotocol/protocolVersion"
	metaCapabilities = "io.modelcontextprotocol/clientCapabilities"
	metaClient       = "io.modelcontextprotocol/clientInfo"
	metaServer       = "io.modelcontextprotocol/serverInfo"
)

// supportedVersions are all that are served here, newest first.
var supportedVersions = append([]string{modernVersion}, legacyVersions...)

// isModern reports whether a request belongs to the modern revision: it says
// so, or asks what only that revision has.
func isModern(m message) bool {
	return m.method == "server/discover" || member(member(m.params, "_meta"), metaVersion) != nil
}

// modernMethod runs one request of the modern revision. n is nil for an HTTP
// request that names no worker.
func (s *server) modernMethod(ctx context.Context, n *session, m message) (json.RawMessage, error) {
	meta := member(m.params, "_meta")
	if err := checkMeta(meta); err != nil {
		return nil, err
	}
	if n != nil && n.peer != "" {
		s.board.identify(n.peer, readClientInfo(member(meta, metaClient)))
	}
	switch m.method {
	case "server/discover":
		return s.modernResult(mustJSON(discoverResult{
			SupportedVersions: supportedVersions,
			Instructions:      s.instructions(n),
			CacheScope:        "private", // the instructions name the caller
		})), nil
	case "tools/list":
		if err := checkCursor(m.params); err != nil {
			return nil, err
		}
		// The list is the same for everybody and never changes within one version of the program.
		list := toolsList()
		return s.modernResult(slices.Concat(list[:len(list)-1], []byte(`,"ttlMs":300000,"cacheScope":"public"}`))), nil
	case "tools/call":
		result, err := s.callTool(ctx, n, m)
		if result == nil || err != nil {
			return nil, err
		}
		return s.modernResult(result), nil
	}
	return nil, rpcErrorf(codeMethodNotFound, "method %q is not part of revision %s, or not served here", clip(m.method, 80), modernVersion)
}

type discoverResult struct {
	SupportedVersions []string           `json:"supportedVersions"`
	Capabilities      serverCapabilities `json:"capabilities"`
	Instructions      string             `json:"instructions"`
	TTL               int                `json:"ttlMs"`
	CacheScope        string             `json:"cacheScope"`
}

// checkMeta refuses a request that does not say what every modern one must.
func checkMeta(meta json.RawMessage) error {
	version := stringMember(meta, metaVersion)
	capabilities := member(meta, metaCapabilities)
	switch {
	case version == "":
		return rpcErrorf(codeInvalidParams, "params._meta[%q] is missing: give the revision you speak, one of %s", metaVersion, strings.Join(supportedVersions, ", "))
	case version != modernVersion:
		return &rpcError{
			Code:    codeUnsupportedVersion,
			Message: fmt.Sprintf("revision %q is not served in this form", clip(version, 40)),
			Data:    map[string]any{"supported": supportedVersions, "requested": version},
		}
	case len(capabilities) == 0 || capabilities[0] != '{':
		return rpcErrorf(codeInvalidParams, "params._meta[%q] is missing: give an object, {} for none", metaCapabilities)
	}
	return nil
}

// modernResult adds what every result of the modern revision carries.
func (s *server) modernResult(result json.RawMessage) json.RawMessage {
	about := slices.Concat([]byte(`{"`+metaServer+`":`), mustJSON(s.info()))
	rest, hasMeta := bytes.CutPrefix(result, []byte(`{"_meta":{`))
	if hasMeta {
		rest = slices.Concat([]byte(","), rest)
	} else {
		rest = slices.Concat([]byte("},"), result[1:])
	}
	return slices.Concat([]byte(`{"resultType":"complete","_meta":`), about, rest)
}

// checkModernHeaders compares the headers of a modern HTTP request with its
// body: a gateway routes by them, so they must not tell something else.
func checkModernHeaders(h http.Header, m message) *rpcError {
	for _, c := range []struct{ header, want string }{
		{"Mcp-Protocol-Version", stringMember(member(m.params, "_meta"), metaVersion)},
		{"Mcp-Method", m.method},
		{"Mcp-Name", stringMember(m.params, "name")},
	} {
		if c.header == "Mcp-Name" && m.method != "tools/call" {
			continue
		}
		if c.header == "Mcp-Protocol-Version" && c.want == "" && h.Get(c.header) != "" {
			continue // the missing field is the clearer error
		}
		values := h[c.header]
		if len(values) != 1 {
			return rpcErrorf(codeHeaderMismatch, "header %s must be there once", c.header)
		}
		if got := decodeHeader(values[0]); got != c.want {
			return rpcErrorf(codeHeaderMismatch, "header %s says %q, the body %q", c.header, clip(got, 80), clip(c.want, 80))
		}
	}
	return nil
}

// decodeHeader undoes the form in which values beyond ASCII are sent.
func decodeHeader(v string) string {
	v = strings.TrimSpace(v)
	if inner, ok := strings.CutPrefix(v, "=?base64?"); ok {
		if inner, ok = strings.CutSuffix(inner, "?="); ok {
			if b, err := base64.StdEncoding.DecodeString(inner); err == nil {
				return string(b)
			}
		}
	}
	return v
}

// serveModern answers a modern request over HTTP. What is wrong with the
// request as such is a 400, an unknown method a 404; the errors of what was
// called are the client's business, and a 200.
func (s *server) serveModern(w http.ResponseWriter, r *http.Request, m message, trusted bool) {
	bad := checkModernHeaders(r.Header, m)
	if bad == nil {
		bad, _ = checkMeta(member(m.params, "_meta")).(*rpcError)
	}
	if bad != nil {
		writeJSON(w, http.StatusBadRequest, errorMessage(m.id, bad))
		return
	}
	if s.gone() {
		s.refuseLate(w, r, m.params)
		return
	}
	n, err := s.worker(r.Header.Get("Majordomus-Client"), trusted)
	if err != nil {
		s.refused(w, r, err)
		return
	}
	if n != nil {
		defer s.release(n)
		s.board.touch(n.peer)
		s.confirmedBy(n, r)
	}
	x := &exchange{}
	if !s.startWork(w, r, x, s.among(trusted)) {
		return
	}
	defer x.end()
	s.writeCarrying(w, r, n, x, func() bool {
		result, err := s.modernMethod(s.callContext(w, r, x, m), n, m)
		x.executed()
		switch failed, _ := err.(*rpcError); {
		case failed != nil && failed.Code == codeMethodNotFound:
			writeJSON(w, http.StatusNotFound, errorMessage(m.id, failed))
		case failed != nil:
			writeJSON(w, http.StatusOK, errorMessage(m.id, failed))
		case err != nil:
			s.refused(w, r, err)
		case result == nil:
			w.WriteHeader(http.StatusAccepted)
		default:
			return s.writeAnswer(w, r, x, resultMessage(m.id, result), nil)
		}
		return false
	})
}

// worker finds the peer that a modern HTTP request speaks for: the same header
// value is the same peer, present while it speaks within the idle expiry. It
// is marked as in use. No header: nobody, as over plain HTTP.
func (s *server) worker(identity string, trusted bool) (*session, error) {
	if identity == "" {
		return nil, nil
	}
	if !validIdentity(strings.ToLower(identity)) {
		return nil, refuse("invalid_input", "header Majordomus-Client must be 32 hex digits of your own choice, not %q", clip(identity, 80))
	}
	identity = strings.ToLower(identity)
	// No header can name this id: the space between workers and legacy sessions is not shared. Nor is that between those with the
	// token and those without: who shows it vouches for one request.
	id := "\x00-" + identity
	if trusted {
		id = "\x00+" + identity
	}
	if n := s.use(id); n != nil {
		return n, nil
	}
	if err := s.refuseRetired(identity); err != nil {
		return nil, err
	}
	n := &session{id: id, trusted: trusted, peer: s.board.knows(identity, !trusted)}
	if n.peer == "" {
		n.peer = s.board.attach(attachment{Transport: "http", Identity: identity, Unverified: !trusted})
	}
	if err := s.admit(n); err != nil {
		s.board.detach(n.peer)
		return nil, err
	}
	return s.use(id), nil
}
