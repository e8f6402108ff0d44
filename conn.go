package main

// One connection to a server that has proven who it is, and what comes back on it.

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// conn is one keep-alive connection to a server that has proven who it is. It
// is used by one exchange at a time.
type conn struct {
	nc    net.Conn
	w     io.Writer     // to nc
	br    *bufio.Reader // from nc
	host  string
	holds bool            // the server held its lease when it was asked
	used  time.Time       // when the last exchange ended
	dead  bool            // not to be used again
	life  context.Context // see live; nil for most
	ends  func() bool     // of life
}

// reply is an answer to one request.
type reply struct {
	status int
	body   []byte

	json       bool // its Content-Type is that of our JSON
	retryAfter string
	parcels    string // the parcels that it carries
}

// code is the word by which a refusal says what happened, at /mcp or elsewhere.
// A success is not looked into: its body is the client's.
func (r reply) code() string {
	if r.status == http.StatusOK {
		return ""
	}
	e := member(r.body, "error")
	if code := stringMember(member(e, "data"), "code"); code != "" {
		return code
	}
	return stringMember(e, "code")
}

// retired is why the server refuses this client for good; "" when it does not.
func (r reply) retired() string {
	if r.code() != "retired" {
		return ""
	}
	return clip(r.message(), 200)
}

func (r reply) message() string { return stringMember(member(r.body, "error"), "message") }

func newConn(nc net.Conn, host string) *conn {
	rw := directly(nc, false)
	return &conn{nc: nc, w: rw, br: bufio.NewReader(rw), host: host}
}

// dialHolder is dialServer for a server that must still hold its lease: the connection is nil unless the result is probeProven.
func dialHolder(ctx context.Context, doc leaseDocument, timeout time.Duration) (*conn, probeResult, error) {
	c, result, err := dialServer(ctx, doc, timeout)
	if err == nil && !c.holds {
		c.close()
		return nil, probeForeign, fmt.Errorf("%s has lost its lease", c.host)
	}
	return c, result, err
}

// dialServer connects to the server of a lease, which must prove within timeout that it has read that lease. It may have handed
// it on meanwhile: then it still finishes what it began.
func dialServer(ctx context.Context, doc leaseDocument, timeout time.Duration) (*conn, probeResult, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	host := strings.TrimPrefix(*doc.URL, "http://")
	nc, err := new(net.Dialer).DialContext(ctx, "tcp4", host)
	if err != nil {
		return nil, failedProbe(err), fmt.Errorf("connecting to %s: %w", host, err)
	}
	c := newConn(nc, host)
	challenge := randomHex(16)
	r, err := c.exchange(ctx, "GET", "/", "Accept: application/json\r\nMajordomus-Challenge: "+challenge+"\r\n", nil, 1<<20)
	if err != nil {
		c.close()
		return nil, failedProbe(err), fmt.Errorf("asking %s who it is: %w", host, err)
	}
	var home struct { // what is needed of homeAnswer: to prepare for the decoding of all of it costs a start a fortieth
		Name         string `json:"name"`
		RepositoryID string `json:"repository_id"`
		Leaseholder  bool   `json:"leaseholder"`
		Proof        string `json:"proof"`
	}
	home.Leaseholder = true // "not false": an absent one counts as true
	err = json.Unmarshal(r.body, &home)
	switch {
	case r.status != http.StatusOK, err != nil, home.Name != "majordomus":
		err = fmt.Errorf("%s is not a majordomus server", host)
	case doc.Token == "": // anybody could compute that proof
		err = errors.New("the lease names no token")
	case home.RepositoryID != digest(doc.Root):
		err = fmt.Errorf("%s serves another checkout", host)
	case !hmac.Equal([]byte(home.Proof), []byte(proof(doc.Token, challenge))):
		err = fmt.Errorf("%s does not know this lease", host)
	default:
		c.holds = home.Leaseholder
		return c, probeProven, nil
	}
	c.close()
	return nil, probeForeign, err
}

// failedProbe tells a server that does not answer in time from one that
// cannot be reached or hangs up.
func failedProbe(err error) probeResult {
	var timeout net.Error
	if errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
		return probeTimeout
	}
	if errors.Is(err, errMalformed) {
		return probeForeign
	}
	return probeUnreachable
}

var errMalformed = errors.New("not an answer of majordomus")

func (c *conn) close() {
	c.dead = true
	if c.life != nil {
		c.ends()
	}
	c.nc.Close()
}

// cut breaks off what is being exchanged.
func (c *conn) cut() { c.nc.SetDeadline(time.Unix(1, 0)) }

// deadline bounds what is exchanged from now on.
func (c *conn) deadline(until time.Time) { c.nc.SetDeadline(until) }

// live has the end of ctx break off whatever is exchanged until the connection
// is closed. Who exchanges much under one context calls it first: to arrange it
// anew for each exchange is a fortieth of a bridged call.
func (c *conn) live(ctx context.Context) {
	c.life, c.ends = ctx, context.AfterFunc(ctx, c.cut)
}

// notIdle reports whether a message may be sent on the connection: one that has
// been idle for long would lose it.
func (c *conn) notIdle(readDeadline time.Duration) bool {
	return !c.dead && time.Since(c.used) < readDeadline/2
}

// stillOpen is notIdle, and asks the system whether the other side has ended the
// connection already.
func (c *conn) stillOpen(readDeadline time.Duration) bool {
	return c.notIdle(readDeadline) && !endPending(c.nc)
}

// get asks for a path.
func (c *conn) get(ctx context.Context, path string, limit int64) (int, []byte, error) {
	r, err := c.exchange(ctx, "GET", path, "Accept: application/json\r\n", nil, limit)
	return r.status, r.body, err
}

// exchange sends one request and reads the whole answer, of at most limit
// bytes. After an error the connection is dead.
func (c *conn) exchange(ctx context.Context, method, path, headers string, body []byte, limit int64) (reply, error) {
	switch {
	case ctx != c.life:
		defer context.AfterFunc(ctx, c.cut)()
	case ctx.Err() != nil:
		c.cut() // again: another deadline may have been set since
	}
	request := make([]byte, 0, len(body)+len(headers)+128)
	request = append(request, method...)
	request = append(request, ' ')
	request = append(request, path...)
	request = append(request, " HTTP/1.1\r\nHost: "...)
	request = append(request, c.host...)
	request = append(request, "\r\n"...)
	request = append(request, headers...)
	if method == "POST" {
		request = append(request, "Content-Type: application/json\r\nContent-Length: "...)
		request = strconv.AppendInt(request, int64(len(body)), 10)
		request = append(request, "\r\n"...)
	}
	request = append(append(request, "\r\n"...), body...)
	r, err := c.roundTrip(request, limit)
	if err != nil {
		c.close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return reply{}, err
	}
	c.used = time.Now()
	return r, nil
}

func (c *conn) roundTrip(request []byte, limit int64) (reply, error) {
	if _, err := c.w.Write(request); err != nil {
		return reply{}, err
	}
	r, length, err := c.readHead()
	switch {
	case err != nil:
		return reply{}, err
	case length > limit:
		return reply{}, fmt.Errorf("the answer has %d bytes, more than %d", length, limit)
	case length >= 0:
		r.body = make([]byte, length, length+1) // and a newline
		_, err = io.ReadFull(c.br, r.body)
	default: // up to the end of the connection
		c.dead = true
		if r.body, err = io.ReadAll(io.LimitReader(c.br, limit+1)); int64(len(r.body)) > limit {
			err = fmt.Errorf("the answer has more than %d bytes", limit)
		}
	}
	return r, err
}

// maxHeadLines bounds the head of an answer; a line of it is at most the
// buffer of the connection long, 4096 bytes. A server sends no more than ten
// lines, the longest of which names the parcels of a batch, 100 at most.
const maxHeadLines = 100

// readHead reads the head of an answer: its status, what of its header matters
// here, and the length of its body, -1 when that is as long as the connection.
// http.ReadResponse takes a twentieth of a bridged call more, and bounds
// nothing; it would also read chunks, which our servers do not send.
func (c *conn) readHead() (r reply, length int64, err error) {
	length = -1
	for lines := range maxHeadLines {
		line, err := c.br.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			return r, 0, fmt.Errorf("%w: a line of its head is too long", errMalformed)
		case errors.Is(err, io.EOF) && (lines > 0 || len(line) > 0):
			return r, 0, io.ErrUnexpectedEOF
		case err != nil:
			return r, 0, err
		}
		line = bytes.TrimSuffix(line[:len(line)-1], []byte("\r"))
		if lines == 0 {
			// HTTP/1.1 200 OK
			if len(line) < 12 || string(line[:7]) != "HTTP/1." || line[8] != ' ' {
				return r, 0, fmt.Errorf("%w: it begins with %.40q", errMalformed, line)
			}
			if r.status, err = strconv.Atoi(string(line[9:12])); err != nil || r.status < 200 {
				return r, 0, fmt.Errorf("%w: its status is %.40q", errMalformed, line)
			}
			c.dead = line[7] == '0'
			continue
		}
		if len(line) == 0 {
			if r.status == http.StatusNoContent || r.status == http.StatusNotModified {
				length = 0
			}
			return r, length, nil
		}
		name, value, found := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		is := func(known string) bool { return len(name) == len(known) && strings.EqualFold(string(name), known) }
		switch {
		case !found:
			return r, 0, fmt.Errorf("%w: %.40q is no header line", errMalformed, line)
		case is("Content-Length"):
			if length >= 0 {
				return r, 0, fmt.Errorf("%w: it has two lengths", errMalformed)
			}
			n, err := strconv.ParseUint(string(value), 10, 62)
			if err != nil {
				return r, 0, fmt.Errorf("%w: its length is %.40q", errMalformed, value)
			}
			length = int64(n)
		case is("Transfer-Encoding"):
			return r, 0, fmt.Errorf("%w: it comes in chunks", errMalformed)
		case is("Connection"):
			c.dead = c.dead || strings.EqualFold(string(value), "close")
		case is("Content-Type"):
			r.json = string(value) == jsonType[0]
		case is("Retry-After"):
			r.retryAfter = string(value)
		case is(parcelHeader):
			r.parcels = string(value)
		}
	}
	return r, 0, fmt.Errorf("%w: its head has over %d lines", errMalformed, maxHeadLines)
}

// isLeaseURL accepts the one form we write. Nothing is ever sent to another.
func isLeaseURL(url string) bool {
	port, ok := strings.CutPrefix(url, "http://127.0.0.1:")
	n, err := strconv.ParseUint(port, 10, 16)
	return ok && err == nil && n > 0 && strconv.FormatUint(n, 10) == port
}

// request is a message of this program's own.
func request(method string, params []byte) []byte {
	return fmt.Appendf(nil, `{"jsonrpc":"2.0","id":0,"method":%q,"params":%s}`, method, params)
}

// proof is what only a reader of the lease file can answer to a challenge.
func proof(token, challenge string) string {
	h := hmac.New(sha256.New, []byte(token))
	h.Write([]byte(challenge))
	return hex.EncodeToString(h.Sum(nil))
}

// randomHex is 2n hex digits.
func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return hex.EncodeToString(b)
}
