package main

// The connections under the guards: how each has ended, how long the other side may take, and how many may be open.

import (
	"bytes"
	"container/list"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

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
	dc := &deadlineConn{Conn: c, s: l.s}
	l.s.open.enter()
	l.s.strangers.enter(dc)
	return dc, nil
}

// maxStrangers bounds the connections that have shown neither the token nor the id of a session that has shown it. A bridge
// shows one of them with its first message, so when somebody holds very many open, those go and no bridge is kept out.
const maxStrangers = 4096

// strangers are these connections, the oldest first.
type strangers struct {
	mu    sync.Mutex
	conns list.List
	most  int // maxStrangers, or half of what descriptors this process may have; 0 before the first
}

func (s *strangers) enter(c *deadlineConn) {
	s.mu.Lock()
	if s.most == 0 {
		s.most = min(maxStrangers, descriptorLimit()/2)
	}
	c.place = s.conns.PushBack(c)
	var oldest *deadlineConn
	if s.conns.Len() > s.most {
		oldest = s.conns.Front().Value.(*deadlineConn)
	}
	s.mu.Unlock()
	if oldest != nil {
		oldest.Close()
	}
}

// leave forgets a connection that is closed, or no stranger's any more.
func (s *strangers) leave(c *deadlineConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.place != nil {
		s.conns.Remove(c.place)
		c.place = nil
	}
}

// deadlineConn counts the connections that the read deadline cut off, and
// notes a head that names both lengths: net/http drops Content-Length beside
// chunked, so a handler cannot see it (RFC 9112 §6.3 calls it an attack).
type deadlineConn struct {
	net.Conn
	s        *server
	place    *list.Element // among the strangers, under their mutex; nil when it is none
	mu       sync.Mutex
	recent   []byte      // what came since the head before, at most maxRecent
	aborting atomic.Bool // net/http is breaking off its own read
	cut      atomic.Bool
	closed   atomic.Bool
	ended    atomic.Bool             // the other side sends nothing more
	reset    atomic.Bool             // the other side has not read all that was written
	shut     atomic.Bool             // nothing more is written
	armed    atomic.Int64            // when the write deadline was moved last
	read     atomic.Int64            // when something came last
	wrote    atomic.Int64            // when a write of the present answer began last; 0: none did
	early    atomic.Int64            // when something came while a request was being answered; 0: nothing did
	watcher  atomic.Pointer[session] // whose watch was answered here last
	head     atomic.Int64            // when the head of the present request came; nanoseconds since the server started
}

// noteHead notes when the head of a request came, before its body is read. What
// came while the request before it was being answered is the beginning of this one.
func (c *deadlineConn) noteHead() {
	c.wrote.Store(0)
	c.head.Store(c.read.Load())
	if early := c.early.Swap(0); early != 0 {
		c.head.Store(early)
	}
}

// Write gives up on who does not read what he asked for: he would hold the answer, and his place among those that are
// worked on, for ever. The deadline is moved seldom, since that costs a call as much as the rest of a write does.
// It also notes an answer that comes too late: whoever has closed its side before it got one does not wait for it.
func (c *deadlineConn) Write(b []byte) (int, error) {
	if c.ended.Load() {
		c.reset.Store(true)
	}
	now, deadline := time.Since(c.s.started), c.s.set.timing.read
	c.wrote.Store(int64(now))
	if armed := time.Duration(c.armed.Load()); armed == 0 || now-armed > deadline/4 {
		c.Conn.SetWriteDeadline(time.Now().Add(deadline))
		c.armed.Store(int64(now))
	}
	n, err := c.Conn.Write(b)
	if err != nil {
		c.reset.Store(true)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.cut.Store(true)
		}
	}
	return n, err
}

// SetWriteDeadline keeps the deadline that Write has set, which net/http takes away after each request.
func (c *deadlineConn) SetWriteDeadline(t time.Time) error {
	if t.IsZero() {
		return nil
	}
	return c.Conn.SetWriteDeadline(t)
}

func (c *deadlineConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		now := int64(time.Since(c.s.started))
		c.read.Store(now)
		if len(b) == 1 { // the read that net/http keeps running beside a handler
			c.early.Store(now)
		}
	}
	c.mu.Lock()
	c.recent = append(c.recent, b[:min(n, max(0, maxRecent-len(c.recent)))]...)
	c.mu.Unlock()
	switch {
	case err == nil, errors.Is(err, net.ErrClosed):
	case errors.Is(err, io.EOF):
		c.ended.Store(true)
	case !errors.Is(err, os.ErrDeadlineExceeded):
		c.reset.Store(true)
	case !c.aborting.Load():
		c.cut.Store(true)
	}
	return n, err
}

// lost reports whether what was written last may not have been read: the other side has broken the connection off. Another
// goroutine may notice that first and close: what it noticed stands before it does.
func (c *deadlineConn) lost() bool {
	_, lost := c.over()
	return lost
}

// over reports whether the other side has closed the connection, having read all of it, or has broken it off. Neither need
// have arrived yet when its next request does, which takes another way through the system. Once both ways are shut only
// what Read was told tells one from the other.
func (c *deadlineConn) over() (read, lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	shut := c.shut.Load()
	if !c.closed.Load() {
		closed, broken := endArrived(c.Conn)
		if broken || !shut && brokenOff(c.Conn) {
			c.reset.Store(true)
		}
		read = closed && !shut
	}
	lost = c.reset.Load()
	return (read || c.ended.Load()) && !lost, lost
}

// linger lets a connection that is about to be closed come to its end at the other side first, to learn whether that has
// read everything: of one that is closed here nothing is heard any more.
func (c *deadlineConn) linger(ended, over <-chan struct{}) {
	c.shut.Store(true)
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	t := time.NewTimer(lingerTime)
	defer t.Stop()
	select {
	case <-ended:
	case <-over:
	case <-t.C:
	}
}

// SetReadDeadline tells a real deadline from the one in the past by which
// net/http ends the read it keeps running beside a handler.
func (c *deadlineConn) SetReadDeadline(t time.Time) error {
	c.aborting.Store(!t.IsZero() && t.Before(c.s.started))
	return c.Conn.SetReadDeadline(t)
}

// lingerTime is how long a client may take to read an answer and close.
const lingerTime = 5 * time.Second

// maxRecent bounds what is kept of a request's beginning. The head of an honest
// request is far smaller; one that hides behind more is cut off after its answer.
const maxRecent = 4096

// bothLengths reports whether the present request's head names both lengths,
// and forgets it: what comes from now on belongs to the next request.
func (c *deadlineConn) bothLengths(chunked bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	both := chunked && bytes.Contains(bytes.ToLower(c.recent), []byte("\ncontent-length:"))
	c.recent = c.recent[:0]
	return both
}

func (c *deadlineConn) Close() error {
	if c.cut.Swap(false) {
		c.s.cutOff.Add(1)
	}
	read, lost := c.over() // it is noted, and nothing is heard of it any more
	if !c.closed.Swap(true) {
		c.s.open.leave()
	}
	c.s.strangers.leave(c)
	c.s.mesh.connectionEnded(c)
	if read || lost {
		c.s.watchBroke(c)
	}
	return c.Conn.Close()
}
