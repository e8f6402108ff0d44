package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestParseMessage(t *testing.T) {
	for _, test := range []struct {
		in   string
		code int    // 0: it is a message
		id   string // as it must be echoed
	}{
		{`{"jsonrpc":"2.0","id":1,"method":"ping"}`, 0, `1`},
		{`{"jsonrpc":"2.0","id":"1","method":"ping"}`, 0, `"1"`},
		{`{"jsonrpc":"2.0","id":"","method":"ping"}`, 0, `""`},
		{`{"jsonrpc":"2.0","id":0,"method":"ping"}`, 0, `0`},
		{`{"jsonrpc":"2.0","id":-7,"method":"ping"}`, 0, `-7`},
		{`{"jsonrpc":"2.0","id":9007199254740993,"method":"ping"}`, 0, `9007199254740993`},
		{`{"jsonrpc":"2.0","id":"init-α","method":"ping"}`, 0, `"init-α"`},
		{` { "method" : "ping" , "id" : 3 , "jsonrpc" : "2.0" } `, 0, `3`},
		{`{"jsonrpc":"2.0","method":"ping"}`, 0, ``},
		{`{"jsonrpc":"2.0","id":1,"result":{}}`, 0, `1`},
		{`{"jsonrpc":"2.0","id":1,"method":"ping","params":null}`, 0, `1`},
		{`{"jsonrpc":"2.0","id":1,"method":"ping","unknown":[1]}`, 0, `1`},

		{`{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}`, codeInvalidParams, `1`},
		{`{"jsonrpc":"2.0","id":1,"method":"ping","params":"x"}`, codeInvalidParams, `1`},
		{`{"jsonrpc":"2.0","id":null,"method":"ping"}`, codeInvalidRequest, ``},
		{`{"jsonrpc":"2.0","id":true,"method":"ping"}`, codeInvalidRequest, ``},
		{`{"jsonrpc":"2.0","id":{},"method":"ping"}`, codeInvalidRequest, ``},
		{`{"jsonrpc":"2.0","id":1.5,"method":"ping"}`, codeInvalidRequest, ``},
		{`{"jsonrpc":"2.0","id":1e3,"method":"ping"}`, codeInvalidRequest, ``},
		{`{"jsonrpc":"1.0","id":1,"method":"ping"}`, codeInvalidRequest, `1`},
		{`{"id":1,"method":"ping"}`, codeInvalidRequest, `1`},
		{`{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}`, codeInvalidRequest, ``},
		{`{"jsonrpc":"2.0","id":1,"method":"ping","method":"x"}`, codeInvalidRequest, ``},
		{`{"jsonrpc":"2.0","id":1,"Method":"ping"}`, codeInvalidRequest, `1`},
		{`{"jsonrpc":"2.0","id":1,"method":7}`, codeInvalidRequest, `1`},
		{`{"jsonrpc":"2.0","\u0069d":1,"id":1,"method":"ping"}`, codeInvalidRequest, ``},
		{`7`, codeInvalidRequest, ``},
		{`"x"`, codeInvalidRequest, ``},
		{`{}`, codeInvalidRequest, ``},
		{`not json`, codeParse, ``},
		{``, codeParse, ``},
		{"{}\x00", codeParse, ``},
		{`{"jsonrpc":"2.0","id":1,"method":"ping"}{}`, codeParse, ``},
		{strings.Repeat("[", 100_000), codeParse, ``},
		{strings.Repeat("[", 1001) + strings.Repeat("]", 1001), codeParse, ``},
	} {
		m, err := parseMessage([]byte(test.in))
		code := 0
		if err != nil {
			code = err.Code
		}
		if code != test.code || string(m.id) != test.id {
			t.Errorf("%.80s: code %d, id %q; want %d, %q", test.in, code, m.id, test.code, test.id)
		}
	}
}

func TestValidText(t *testing.T) {
	for in, want := range map[string]string{
		`{"a":"b"}`:            `{"a":"b"}`,
		"{\"a\":\"\xff\"}":     "{\"a\":\"\uFFFD\"}",
		`"\ud800"`:             `"\ufffd"`,
		`"\uDFFF\uD83D\uDE00"`: `"\ufffd\uD83D\uDE00"`,
		`"\ud83dx"`:            `"\ufffdx"`,
		`"\\ud800"`:            `"\\ud800"`,
		`"\ud800\ud800\udc00"`: `"\ufffd\ud800\udc00"`,
		`\ud`:                  `\ud`,
	} {
		if got := string(validText([]byte(in))); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

func TestBatchElements(t *testing.T) {
	const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`
	for _, test := range []struct {
		version, in string
		code        int
	}{
		{"2025-03-26", "[" + ping + "," + ping + "]", 0},
		{"2024-11-05", "[" + ping + "]", 0},
		{"2025-06-18", "[" + ping + "]", codeInvalidRequest},
		{"", "[" + ping + "]", codeInvalidRequest},
		{"2025-03-26", "[]", codeInvalidRequest},
		{"2025-03-26", `[{"jsonrpc":"2.0","id":1,"method":"initialize"}]`, codeInvalidRequest},
	} {
		code := 0
		if _, err := batchElements(test.version, []byte(test.in)); err != nil {
			code = err.Code
		}
		if code != test.code {
			t.Errorf("%s %s: code %d, want %d", test.version, test.in, code, test.code)
		}
	}
}

// quietServer is a server that is alone, for tests of what needs no socket.
func quietServer() *server {
	set := &settings{version: "1.2.3"}
	set.timing, _ = readTimings(func(string) string { return "" })
	return newServer(set, checkout{}, slog.New(slog.DiscardHandler), nil)
}

func quietSession(s *server) *session {
	return &session{peer: s.board.attach(attachment{Transport: "stdio"}), version: "2025-03-26", trusted: true}
}

// FuzzAnswer holds the dispatcher to its promise: whatever comes in, what goes
// out is one line of valid JSON in valid UTF-8.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","clientInfo":{"name":"qa","version":"1"}}}`,
		`{"jsonrpc":"2.0","id":"x","method":"tools/list"}`,
		`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"majordomus_announce","arguments":{"intent":"x","scope":["a"]}}}`,
		`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"majordomus_peers","arguments":{"checkouts":"this"}}}`,
		`[{"jsonrpc":"2.0","id":1,"method":"ping"},7]`,
		`{"jsonrpc":"2.0","id":"\ud800","method":"ping"}`,
		`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`,
		`[`, `{"id":{}}`, "\xff\xfe", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"","arguments":[]}}`,
	} {
		f.Add([]byte(seed))
	}
	s := quietServer()
	n := quietSession(s)
	f.Fuzz(func(t *testing.T, in []byte) {
		in = bytes.ReplaceAll(in, []byte("\n"), nil)
		if len(bytes.TrimSpace(in)) == 0 {
			return // blank lines never reach the dispatcher
		}
		readFrame(in).waits()
		answer, err := s.answerFrame(context.Background(), n, in)
		if err != nil {
			t.Fatalf("%q: %v", in, err)
		}
		if answer != nil && (!json.Valid(answer) || !utf8.Valid(answer) || bytes.ContainsAny(answer, "\n\r")) {
			t.Fatalf("%q was answered %q", in, answer)
		}
	})
}

// FuzzMembers compares the hand-written walk with encoding/json.
func FuzzMembers(f *testing.F) {
	for _, seed := range []string{`{}`, `{"a":1,"b":[{"c":"}"}],"d":"\"x\\"}`, ` { "a" : null , "a" : {} } `, `{"a`, `{"a":}`, `{"a":1,}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		got := map[string]json.RawMessage{}
		err := members(in, func(key string, value json.RawMessage) { got[key] = value })
		var want map[string]json.RawMessage
		if json.Unmarshal(in, &want) != nil || want == nil || !utf8.Valid(in) {
			return // what is judged is valid UTF-8: see validText
		}
		if err != nil || len(got) != len(want) {
			t.Fatalf("%q: %v, %d members, want %d", in, err, len(got), len(want))
		}
		for key, value := range want {
			if !bytes.Equal(bytes.TrimSpace(value), got[key]) {
				t.Fatalf("%q: member %q is %q, want %q", in, key, got[key], value)
			}
		}
	})
}

// FuzzFrames feeds a client's input in pieces: every line arrives once, whole
// and in order, or is told to be too long.
func FuzzFrames(f *testing.F) {
	f.Add([]byte("\xef\xbb\xbf{}\r\n\r\n[1]\n{}"), 3)
	f.Add([]byte("a\n\nb"), 1)
	f.Fuzz(func(t *testing.T, in []byte, size int) {
		var out bytes.Buffer
		c := newClient(&pieces{in, max(1, size%7)}, &out, "x", time.Minute, func(string) string { return "" })
		var got []string
		for {
			f, ok := c.next(context.Background(), nil)
			if !ok {
				break
			}
			got = append(got, string(f.raw))
		}
		var want []string
		for line := range strings.SplitSeq(strings.TrimPrefix(string(in), "\xef\xbb\xbf"), "\n") {
			if line = strings.Trim(line, " \t\r\n"); line != "" {
				want = append(want, line)
			}
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Fatalf("%q gave the lines %q, want %q", in, got, want)
		}
	})
}

// pieces hands its bytes out in pieces of one size.
type pieces struct {
	left []byte
	size int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.left) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), p.size)], p.left)
	p.left = p.left[n:]
	return n, nil
}

func TestLinesThatAreTooLong(t *testing.T) {
	long := strings.Repeat("x", 2*maxMessage)
	in := "a\n" + long[:maxMessage] + "\r\n" + long[:maxMessage+1] + "\n" + long + "\n" + long[:maxMessage] + "\nb"
	c := newClient(strings.NewReader("\xef\xbb\xbf"+in), io.Discard, "x", time.Minute, func(string) string { return "" })
	for _, want := range []int{1, maxMessage, -1, -1, maxMessage, 1} {
		f, ok := c.next(t.Context(), nil)
		if !ok || f.tooLong != (want < 0) || len(f.raw) != max(want, 0) {
			t.Errorf("a line of %d bytes, too long %v; want %d", len(f.raw), f.tooLong, want)
		}
	}
	if f, ok := c.next(t.Context(), nil); ok {
		t.Errorf("a line of %d bytes more", len(f.raw))
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
