package main

// One connection to a server that has proven who it is, and what comes back on it.

import (
	"bufio"
	"context"
	"crypto/hmac"
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
	nc   net.Conn
	br   *bufio.Reader
	host string
	used time.Time // when the last exchange ended
	dead bool      // not to be used again
}

// reply is an answer to one request.
type reply struct {
	status int
	header http.Header
	body   []byte
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

// dialServer connects to the server of a lease, which must prove that it has
// read that lease and hold it still, within timeout. The connection is nil
// unless the result is probeOurs.
func dialServer(ctx context.Context, doc leaseDocument, timeout time.Duration) (*conn, probeResult, error) {
	c, holds, result, err := dialProven(ctx, doc, timeout)
	if err == nil && !holds {
		c.close()
		return nil, probeForeign, fmt.Errorf("%s has lost its lease", c.host)
	}
	return c, result, err
}

// dialProven is dialServer for a server that may have handed its lease on: it
// still finishes what it began.
func dialProven(ctx context.Context, doc leaseDocument, timeout time.Duration) (c *conn, holds bool, result probeResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	host := strings.TrimPrefix(*doc.URL, "http://")
	nc, err := new(net.Dialer).DialContext(ctx, "tcp4", host)
	if err != nil {
		return nil, false, failedProbe(err), fmt.Errorf("connecting to %s: %w", host, err)
	}
	c = &conn{nc: nc, br: bufio.NewReader(nc), host: host}
	challenge := randomHex(16)
	r, err := c.exchange(ctx, "GET", "/", "Accept: application/json\r\nMajordomus-Challenge: "+challenge+"\r\n", nil, 1<<20)
	if err != nil {
		c.close()
		return nil, false, failedProbe(err), fmt.Errorf("asking %s who it is: %w", host, err)
	}
	var home homeAnswer
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
		return c, home.Leaseholder, probeOurs, nil
	}
	c.close()
	return nil, false, probeForeign, err
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

var errMalformed = errors.New("not an HTTP answer")

func (c *conn) close() {
	c.dead = true
	c.nc.Close()
}

// fresh reports whether a message may be sent on the connection: one that has
// been idle for long would lose it.
func (c *conn) fresh(readDeadline time.Duration) bool {
	return !c.dead && time.Since(c.used) < readDeadline/2
}

// open is fresh, and asks the system whether the other side has ended the
// connection already.
func (c *conn) open(readDeadline time.Duration) bool {
	return c.fresh(readDeadline) && !endPending(c.nc)
}

// get asks for a path.
func (c *conn) get(ctx context.Context, path string, limit int64) (int, []byte, error) {
	r, err := c.exchange(ctx, "GET", path, "Accept: application/json\r\n", nil, limit)
	return r.status, r.body, err
}

// exchange sends one request and reads the whole answer, of at most limit
// bytes. After an error the connection is dead.
func (c *conn) exchange(ctx context.Context, method, path, headers string, body []byte, limit int64) (reply, error) {
	defer context.AfterFunc(ctx, func() { c.nc.SetDeadline(time.Unix(1, 0)) })()
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
	if _, err := c.nc.Write(request); err != nil {
		return reply{}, err
	}
	answer, err := http.ReadResponse(c.br, nil)
	if err != nil {
		if netErr := (net.Error)(nil); errors.As(err, &netErr) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return reply{}, err
		}
		return reply{}, fmt.Errorf("%w: %v", errMalformed, err)
	}
	if answer.ContentLength > limit {
		return reply{}, fmt.Errorf("the answer has %d bytes, more than %d", answer.ContentLength, limit)
	}
	r := reply{status: answer.StatusCode, header: answer.Header}
	if answer.ContentLength >= 0 {
		r.body = make([]byte, answer.ContentLength, answer.ContentLength+1) // and a newline
		_, err = io.ReadFull(answer.Body, r.body)
	} else if r.body, err = io.ReadAll(io.LimitReader(answer.Body, limit+1)); int64(len(r.body)) > limit {
		err = fmt.Errorf("the answer has more than %d bytes", limit)
	}
	c.dead = answer.Close
	return r, err
}
