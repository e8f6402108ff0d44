package main

// JSON-RPC 2.0 messages, read and written by hand.
//
// Rules kept here:
//   - an id comes back byte for byte as it was sent;
//   - keys match exactly (encoding/json folds case and lets the last twin win,
//     so envelopes are walked by hand) and a key given twice is refused;
//   - whatever comes in, what goes out is valid UTF-8 and valid JSON.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
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

// maxBatch is how many messages a batch may hold: its answers are kept until
// the last one is there.
const maxBatch = 100

// maxNesting is how deep a message may nest.
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

// Error makes an rpcError an error; it is what a client reads.
func (e *rpcError) Error() string { return e.Message }

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
	twin, answered := "", ""
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
			if result != nil && key != answered {
				twin = "result or error"
			}
			slot, answered = &result, key
		default:
			return
		}
		if *slot != nil && twin == "" {
			twin = strconv.Quote(key)
		}
		*slot = value
	})
	id := m.id
	switch m.id = nil; {
	case err != nil:
		return m, rpcErrorf(codeParse, "parse error: %v", err)
	case twin != "":
		return m, rpcErrorf(codeInvalidRequest, "not a JSON-RPC request: %s is given twice", twin)
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
	var named bool
	if m.method, named = stringOf(method); !named {
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
func stringMember(raw []byte, name string) string {
	s, _ := stringOf(member(raw, name))
	return s
}

// stringOf reads a value that should be a string; lone surrogates and bad bytes
// become U+FFFD, as everywhere. Most need no decoder, which saves half of the
// time that a bridge looks at a message.
func stringOf(value json.RawMessage) (s string, ok bool) {
	switch n := len(value); {
	case n == 0 || value[0] != '"':
		return "", false
	case n > 1 && value[n-1] == '"' && bytes.IndexByte(value, '\\') < 0 && utf8.Valid(value):
		return string(value[1 : n-1]), true
	}
	return s, json.Unmarshal(value, &s) == nil
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

// batches reports whether a revision knows JSON-RPC batches.
func batches(version string) bool { return version == "2025-03-26" || version == "2024-11-05" }

// batchElements applies the rules for batches: the whole batch
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
	case len(elements) > maxBatch:
		return nil, rpcErrorf(codeInvalidRequest, "a batch of %d messages: at most %d are taken", len(elements), maxBatch)
	}
	for _, e := range elements {
		if m, err := parseEnvelope(e); err == nil && m.method == "initialize" {
			return nil, rpcErrorf(codeInvalidRequest, "initialize must not be part of a batch")
		}
	}
	return elements, nil
}
