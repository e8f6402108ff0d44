package main

// The process's own client: frames in on stdin, answers out on stdout, and what
// the next server has to be told of it.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
)

// client is what the process knows of its own client, in every role.
type client struct {
	more   chan struct{} // a receive means that there may be something in queue, or that over is set
	room   chan struct{} // a receive means that there may be room in queue
	ended  chan struct{} // closed when the input has ended, read or not, or nobody reads the answers
	broken chan struct{} // closed when stdout cannot be written any more
	leave  sync.Once     // closes ended

	out      io.Writer
	lines    io.Writer // to out
	outMu    sync.Mutex
	patience time.Duration // with a client that has closed our stdin and reads no answers

	mu       sync.Mutex
	back     []frame // given back unanswered, to be taken before queue
	queue    []frame // read and not taken, after back
	queued   int     // bytes of queue
	over     bool    // nothing more is put into queue
	identity string
	address  *peerAddress
	carried  carried      // what goes along to the next server
	spoke    time.Time    // when the client last sent something; zero before
	server   string       // the token of the server that a bridge was attached to last
	lost     episodeTaken // the episode that another peer took last
	orphaned time.Time    // when the server handed on carried.Orphans
	parcels  []int64      // written out, which no server has been told yet
}

func newClient(in io.Reader, out io.Writer, name string, patience time.Duration, getenv func(string) string) *client {
	c := &client{
		more:     make(chan struct{}, 1),
		room:     make(chan struct{}, 1),
		ended:    make(chan struct{}),
		broken:   make(chan struct{}),
		out:      out,
		patience: patience,
		identity: randomHex(16),
		address:  ownAddress(getenv, os.Getppid()),
		carried:  carried{Name: getenv("MAJORDOMUS_NAME"), Circle: getenv("MAJORDOMUS_CIRCLE"), Role: getenv("MAJORDOMUS_ROLE"), Spawn: getenv("MAJORDOMUS_SPAWN")},
	}
	if c.carried.Name == "" {
		c.carried.Name = name
	}
	c.lines = out
	if f, ok := out.(*os.File); ok {
		c.lines = directly(abandonable{f, c}, true)
	}
	if f, ok := in.(*os.File); ok {
		in = directly(f, true)
	}
	go c.read(in) // ends with the input, or with the process
	return c
}

// ownAddress is where the process that started us can be reached: the client.
// Its messaging token is a credential and is never read.
func ownAddress(getenv func(string) string, parent int) *peerAddress {
	host, _ := os.Hostname()
	a := &peerAddress{Host: host, PID: parent, Socket: getenv("CLAUDE_CODE_MESSAGING_SOCKET")}
	if pid, err := strconv.Atoi(getenv("CLAUDE_PID")); err == nil && pid > 0 {
		a.PID = pid
	}
	for _, p := range []struct{ variable, provider string }{
		{"CLAUDECODE", "claude-code"}, {"CLAUDE_CODE_SESSION_ID", "claude-code"},
		{"CODEX_THREAD_ID", "codex"}, {"CODEX_SANDBOX", "codex"},
		{"GEMINI_CLI", "gemini-cli"},
		{"OPENCODE", "opencode"},
		{"CURSOR_TRACE_ID", "cursor"}, {"CURSOR_AGENT", "cursor"},
	} {
		if a.Provider == "" && getenv(p.variable) != "" {
			a.Provider = p.provider
		}
	}
	for _, variable := range []string{"MAJORDOMUS_PROVIDER_SESSION", "CLAUDE_CODE_SESSION_ID", "CODEX_THREAD_ID"} {
		if a.Session == "" {
			a.Session = getenv(variable)
		}
	}
	return a
}

// read turns the input into frames: CRLF, blank lines, a BOM before the first
// line and a last line without its newline are all accepted.
func (c *client) read(in io.Reader) {
	r := bufio.NewReaderSize(in, 64<<10)
	for first := true; ; first = false {
		line, tooLong, err := readLine(r, maxMessage)
		if first {
			line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
		}
		if line = bytes.Trim(line, " \t\r\n"); len(line) > 0 || tooLong {
			f := frame{tooLong: true}
			if !tooLong && len(line) <= maxMessage { // exactly what a bridge may post
				f = readFrame(line)
			}
			c.mu.Lock()
			c.spoke = time.Now()
			c.mu.Unlock()
			c.put(f)
		}
		if err != nil {
			c.leave.Do(func() { close(c.ended) })
			c.hurry()
			c.mu.Lock()
			c.over = true
			c.mu.Unlock()
			signalOn(c.more)
			return
		}
	}
}

// readAhead is how many bytes of the client's messages wait here. It is more
// than the system keeps of what a client has written before it closed our
// stdin, or that would not be seen while nobody takes anything.
const readAhead = 256 << 10

// put queues a frame, when there is room.
func (c *client) put(f frame) {
	for {
		c.mu.Lock()
		if len(c.queue) == 0 || c.queued+len(f.raw) <= readAhead {
			c.queue, c.queued = append(c.queue, f), c.queued+len(f.raw)
			c.mu.Unlock()
			signalOn(c.more)
			return
		}
		c.mu.Unlock()
		<-c.room
	}
}

// signalOn makes the next receive succeed.
func signalOn(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// next returns the next frame to be answered; false at the end of input, and
// when ctx or stop is done. What was given back because of stop is for whoever
// comes after it.
func (c *client) next(ctx context.Context, stop <-chan struct{}) (frame, bool) {
	for {
		if ctx.Err() != nil || isClosed(stop) || isClosed(c.broken) {
			return frame{}, false
		}
		c.mu.Lock()
		switch {
		case len(c.back) > 0:
			f := c.back[0]
			c.back = c.back[1:]
			c.mu.Unlock()
			return f, true
		case len(c.queue) > 0:
			f := c.takeLocked()
			c.mu.Unlock()
			return f, true
		case c.over:
			c.mu.Unlock()
			return frame{}, false
		}
		c.mu.Unlock()
		select {
		case <-c.more:
		case <-stop:
		case <-ctx.Done():
		case <-c.broken:
		}
	}
}

// opening takes an initialize that the client has sent first; false when it has not come so far.
func (c *client) opening() (frame, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.back) > 0 || len(c.queue) == 0 || c.queue[0].method != "initialize" {
		return frame{}, false
	}
	return c.takeLocked(), true
}

// takeLocked takes the first frame of the queue.
func (c *client) takeLocked() frame {
	f := c.queue[0]
	c.queue[0] = frame{} // lets go of its bytes
	c.queue, c.queued = c.queue[1:], c.queued-len(f.raw)
	signalOn(c.room)
	return f
}

// giveBack gives frames back, to be the next ones in this order.
func (c *client) giveBack(f ...frame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.back = append(f[:len(f):len(f)], c.back...)
}

// done reports whether the client has left: everything it sent is answered, or
// nobody reads the answers.
func (c *client) done() bool {
	if isClosed(c.broken) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over && len(c.queue) == 0 && len(c.back) == 0
}

// write sends one answer: one write, so that lines never interleave. It reports
// whether the answer is out.
func (c *client) write(answer []byte) bool {
	c.outMu.Lock()
	defer c.outMu.Unlock()
	c.hurry()
	_, err := c.lines.Write(append(answer, '\n'))
	if err != nil {
		if !isClosed(c.broken) {
			close(c.broken)
			c.leave.Do(func() { close(c.ended) })
		}
	}
	return err == nil
}

// hurry bounds the write that goes on, once the client has closed our stdin:
// one that reads no answer any more must keep nothing alive. Where stdout
// cannot be polled this does nothing, and abandonable does it.
func (c *client) hurry() {
	if out, ok := c.out.(*os.File); ok && isClosed(c.ended) {
		out.SetWriteDeadline(time.Now().Add(c.patience))
	}
}

// abandonable is the client's stdout. A write to it that cannot be given up, since it waits in the system, is left behind.
type abandonable struct {
	*os.File
	c *client
}

func (a abandonable) Write(p []byte) (int, error) {
	var n int
	var err error
	wrote := make(chan struct{})
	go func(p []byte) { // ends with the write, or with the process
		defer close(wrote)
		n, err = a.File.Write(p)
	}(bytes.Clone(p))
	select {
	case <-wrote:
		return n, err
	case <-a.c.ended:
	}
	if waitAtMost(wrote, a.c.patience); !isClosed(wrote) {
		return 0, os.ErrDeadlineExceeded
	}
	return n, err
}

// noteParcels notes the parcels of an answer that is out: whoever is the server
// when it can be told is told.
func (c *client) noteParcels(numbers []int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parcels = append(c.parcels, numbers...)
}

// unconfirmed lists them.
func (c *client) unconfirmed() []int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.parcels)
}

// confirmed strikes off what a server has been told.
func (c *client) confirmed(numbers []int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parcels = slices.DeleteFunc(c.parcels, func(n int64) bool { return slices.Contains(numbers, n) })
}

// remember keeps what an answered frame changed of the client's standing, so
// that the next server can be told.
func (c *client) remember(f frame, answer []byte) {
	c.rememberModern(f)
	if f.tool != "" {
		c.mu.Lock()
		c.carried.Spoken = c.carried.Spawn != ""
		c.mu.Unlock()
	}
	switch {
	case f.method == "initialize":
		if version := stringMember(member(answer, "result"), "protocolVersion"); version != "" {
			c.mu.Lock()
			c.carried.Initialize, c.carried.Version = f.params, version
			c.mu.Unlock()
		}
	case f.tool == "majordomus_announce":
		if claims := claimsOf(member(member(answer, "result"), "structuredContent")); claims != nil {
			c.mu.Lock()
			c.carried.Claims = claims
			c.mu.Unlock()
		}
	case f.runsEpisodeCommand():
		c.rememberEpisode(member(member(answer, "result"), "structuredContent"))
	case f.tool == "set_description":
		if result := member(answer, "result"); result != nil && member(result, "isError") == nil {
			c.mu.Lock()
			c.carried.Description = stringMember(member(f.params, "arguments"), "description")
			c.mu.Unlock()
		}
	}
}

// rememberModern keeps who a client is that never initializes.
func (c *client) rememberModern(f frame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.carried.Initialize != nil {
		return
	}
	if info := member(member(f.params, "_meta"), metaClient); info != nil {
		c.carried.Initialize = slices.Concat([]byte(`{"clientInfo":`), info, []byte("}"))
	}
}

// claimsOf reads the claims out of an answer to announce, the latest last; nil
// when the answer is a failure.
func claimsOf(answer json.RawMessage) []announcement {
	var peer struct {
		Announcement announcement   `json:"announcement"`
		Claims       []announcement `json:"claims"`
	}
	if len(answer) == 0 || json.Unmarshal(answer, &peer) != nil {
		return nil
	}
	var claims []announcement
	for _, a := range peer.Claims {
		if a.Name != peer.Announcement.Name {
			claims = append(claims, a)
		}
	}
	return append(claims, peer.Announcement)
}

// attachment is how this client comes onto a board.
func (c *client) attachment(transport string) attachment {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.orphaned) > time.Minute {
		c.carried.Orphans = nil // what has become of them since is unknown
	}
	a := attachment{Transport: transport, Identity: c.identity, Address: c.address, Carried: c.carried}
	if !c.spoke.IsZero() {
		a.Carried.Idle = int64(time.Since(c.spoke) / time.Second)
	}
	return a
}

func (c *client) negotiated() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.carried.Version
}

// named keeps the display name that a server gave to this client.
func (c *client) named(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.carried.Name = name
}
