package main

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// readFrom has a connection read one answer, which these bytes are all of.
func readFrom(t testing.TB, answer []byte) (reply, *conn, error) {
	t.Helper()
	here, there := net.Pipe()
	t.Cleanup(func() { here.Close() })
	go io.Copy(io.Discard, there) // the request; ends with here
	c := &conn{nc: here, w: here, br: bufio.NewReader(bytes.NewReader(answer))}
	r, err := c.roundTrip([]byte("GET / HTTP/1.1\r\n\r\n"), 1000)
	return r, c, err
}

func TestAnswerHead(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for _, test := range []struct {
		name, answer string
		status       int
		body         string
		dead         bool
		err          error // nil: none
	}{
		{name: "plain", answer: ok + "Content-Length: 2\r\n\r\nhi", status: 200, body: "hi"},
		{name: "no body", answer: "HTTP/1.1 204 No Content\r\n\r\n", status: 204},
		{name: "no reason", answer: "HTTP/1.1 404\r\nContent-Length: 0\r\n\r\n", status: 404},
		{name: "last one", answer: ok + "content-length:2\r\nconnection: Close\r\n\r\nhi", status: 200, body: "hi", dead: true},
		{name: "up to the end", answer: "HTTP/1.1 400 Bad Request\r\n\r\nhi", status: 400, body: "hi", dead: true},
		{name: "old", answer: "HTTP/1.0 200 OK\nContent-Length: 2\n\nhi", status: 200, body: "hi", dead: true},
		{name: "cut body", answer: ok + "Content-Length: 3\r\n\r\nhi", err: io.ErrUnexpectedEOF},
		{name: "cut head", answer: ok + "Content-Le", err: io.ErrUnexpectedEOF},
		{name: "nothing", answer: "", err: io.EOF},
		{name: "not HTTP", answer: "SSH-2.0-OpenSSH\r\n\r\n", err: errMalformed},
		{name: "not yet", answer: "HTTP/1.1 100 Continue\r\n\r\n", err: errMalformed},
		{name: "chunks", answer: ok + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", err: errMalformed},
		{name: "two lengths", answer: ok + "Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi", err: errMalformed},
		{name: "negative length", answer: ok + "Content-Length: -1\r\n\r\n", err: errMalformed},
		{name: "signed length", answer: ok + "Content-Length: +2\r\n\r\nhi", err: errMalformed},
		{name: "no length at all", answer: ok + "Content-Length:\r\n\r\n", err: errMalformed},
		{name: "no header line", answer: ok + "hello\r\n\r\n", err: errMalformed},
		{name: "endless line", answer: ok + strings.Repeat("a", 1<<20), err: errMalformed},
		{name: "endless head", answer: ok + strings.Repeat("A: b\r\n", 1<<20), err: errMalformed},
	} {
		r, c, err := readFrom(t, []byte(test.answer))
		if !errors.Is(err, test.err) || test.err == nil && (r.status != test.status || string(r.body) != test.body || c.dead != test.dead) {
			t.Errorf("%s: status %d, body %q, dead %v, %v", test.name, r.status, r.body, c.dead, err)
		}
	}
	for _, tooLong := range []string{ok + "Content-Length: 1001\r\n\r\n", ok + "\r\n" + strings.Repeat("x", 1001)} {
		if _, _, err := readFrom(t, []byte(tooLong)); err == nil || !strings.Contains(err.Error(), "1000") {
			t.Errorf("a body that is too long: %v", err)
		}
	}
}

// FuzzHead holds our reading of an answer against that of the library: what we take, it takes as the same.
func FuzzHead(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nMajordomus-Delivery: 7,8\r\nContent-Length: 2\r\n\r\n{}"))
	f.Add([]byte("HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{}"))
	f.Add([]byte("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		r, _, err := readFrom(t, answer)
		if err != nil {
			return
		}
		theirs, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(answer)), nil)
		if err != nil {
			return // it is stricter about names and values that do not matter here
		}
		body, err := io.ReadAll(theirs.Body)
		if err != nil || theirs.StatusCode != r.status || !bytes.Equal(body, r.body) {
			t.Fatalf("ours: %d %q; the library's: %d %q, %v", r.status, r.body, theirs.StatusCode, body, err)
		}
	})
}
