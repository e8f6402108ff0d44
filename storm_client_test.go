//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// stormClient is a client under a name, in one process after the other.
type stormClient struct {
	s        *storm
	name     string
	index    int
	worktree int
	next     func() action
	runs     int
	alone    atomic.Bool // some process of it that has ended has served it alone

	mu  sync.Mutex
	run *stormRun // the present one; nil before the first

	// Its own goroutine's.
	numbers   map[string]int // of the latest message, by recipient
	announced int

	known   sync.Mutex          // held while an answer is taken in
	asks    []openedAsk         // to answer
	claims  map[string][]string // by name: of these intents the board has one; "" is none
	episode []string            // of these it holds one; "" is none
	holding []string            // what it was told of its latest attachments
}

type openedAsk struct{ id, from string }

// stormRun is one process of a client.
type stormRun struct {
	c       *stormClient
	cmd     *exec.Cmd
	in      *os.File
	log     string
	session string        // by which its peer is known from all others
	over    chan struct{} // closed when it has ended and all that it wrote has been read
	named   bool          // it has its client's name, and so its mail; guarded by c.known

	writing sync.Mutex // held while a line goes out: the client leaves before it or after it

	mu      sync.Mutex
	open    map[string]*stormCall
	ended   bool
	dump    string           // its log, once it has ended
	doomed  bool             // it was told to die: what is open may stay so
	signals []syscall.Signal // that were to end it
	left    bool             // its client has gone
	stopped bool
}

// stormCall is a request.
type stormCall struct {
	what string
	id   string
	sent time.Time
	over chan struct{} // closed when it has been answered, or never will be
	then func(*stormAnswer)
}

// stormAnswer is what came back; Line is "" when nothing will.
type stormAnswer struct {
	Line   string
	ID     json.RawMessage
	Result struct {
		Content           []textBlock
		StructuredContent json.RawMessage
		IsError           bool
	}
	Error *struct {
		Message string
		Data    struct{ Outcome string }
	}
}

// outcome is what the caller knows: acked, refused or unknown.
func (a *stormAnswer) outcome() string {
	switch {
	case a.Line == "", a.Error != nil && a.Error.Data.Outcome == "unknown":
		return "unknown"
	case a.Error != nil, a.Result.IsError:
		return "refused"
	}
	return "acked"
}

func (a *stormAnswer) text() string {
	if len(a.Result.Content) == 0 {
		return ""
	}
	return a.Result.Content[0].Text
}

func newStormClient(s *storm, index, worktree int) *stormClient {
	return &stormClient{
		s: s, name: fmt.Sprint("peer", index), index: index, worktree: worktree, next: s.plan.actionsOf(index),
		numbers: map[string]int{},
	}
}

// live does what the plan says until the storm is over, and then reads what is still to come.
func (c *stormClient) live() {
	c.begin()
	for !isClosed(c.s.stop) {
		a := c.next()
		if !a.burst {
			c.settle()
		}
		if !c.there() {
			c.settle()
			c.begin()
			continue
		}
		c.do(a)
		waitAtMost(c.s.stop, a.pause)
	}
	c.settle()
	c.s.acting.Done()
	<-c.s.calm
	c.drain()
}

// there says whether the client has a process that serves it.
func (c *stormClient) there() bool {
	r := c.current()
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.doomed && !r.left && !isClosed(r.over)
}

func (c *stormClient) current() *stormRun {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.run
}

// settle waits until nothing that was sent is open any more.
func (c *stormClient) settle() {
	r := c.current()
	r.mu.Lock()
	open := make([]*stormCall, 0, len(r.open))
	for _, call := range r.open {
		open = append(open, call)
	}
	r.mu.Unlock()
	for _, call := range open {
		c.s.await(r, call)
	}
}

// await waits for the answer. One that takes too long ends its process, with what it is doing in its log.
func (s *storm) await(r *stormRun, call *stormCall) {
	select {
	case <-call.over:
	case <-time.After(messageTime + 3*patience):
		s.t.Errorf("%s has not answered %s since %v", r.session, call.what, call.sent.Format(time.TimeOnly))
		r.doom(syscall.SIGQUIT)
		r.cmd.Process.Signal(syscall.SIGCONT)
		<-r.over
	}
}

// begin starts processes until one has the name: one that died a moment ago may still be known as living.
func (c *stormClient) begin() {
	for deadline := time.Now().Add(2 * patience); ; {
		c.start()
		c.known.Lock()
		c.claims, c.episode, c.asks = map[string][]string{}, []string{""}, nil
		c.known.Unlock()
		r := c.current()
		c.s.await(r, r.call("initialize", `{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"storm","version":"1"}}`, nil))
		named, answer := false, ""
		c.s.await(r, c.tool("whoami", `{}`, func(a *stormAnswer) {
			answer = a.Line
			named = r.named
		}))
		if named {
			return
		}
		if c.there() {
			r.leave()
			waitAtMost(r.over, 2*time.Second) // it may have become the server of others, and outlive its client
			if !isClosed(r.over) {
				r.kill()
			}
		}
		if time.Now().After(deadline) {
			c.s.t.Errorf("%s cannot get its name: %s", c.name, answer)
			return
		}
		c.s.count("second starts")
		<-time.After(100 * time.Millisecond)
	}
}

// start starts a process.
func (c *stormClient) start() {
	s := c.s
	c.runs++
	r := &stormRun{
		c: c, session: fmt.Sprint(c.name, ".", c.runs), over: make(chan struct{}), open: map[string]*stormCall{},
	}
	r.log = filepath.Join(filepath.Dir(s.clock), r.session+".log")
	log, err := os.Create(r.log)
	must(s.t, err)
	defer log.Close()
	in, stdin, err := os.Pipe()
	must(s.t, err)
	defer in.Close()
	stdout, out, err := os.Pipe()
	must(s.t, err)
	defer out.Close()
	r.in = stdin
	r.cmd = exec.Command("majordomus", "mcp", "--http-port", "0")
	r.cmd.Dir = s.dirs[c.worktree]
	r.cmd.Env = append(os.Environ(), s.mark, "MAJORDOMUS_NAME="+c.name, "MAJORDOMUS_PROVIDER_SESSION="+r.session, "CLOCK="+s.clock,
		"GORACE=atexit_sleep_ms=10", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1")
	r.cmd.Env = append(r.cmd.Env, s.plan.timing...)
	r.cmd.Stdin, r.cmd.Stdout, r.cmd.Stderr = in, out, log
	s.inMounts(func() { err = r.cmd.Start() })
	must(s.t, err)
	s.mu.Lock()
	s.runs = append(s.runs, r)
	s.done["processes"]++
	s.mu.Unlock()
	c.mu.Lock()
	c.run = r
	c.mu.Unlock()
	go r.read(stdout) // ends with the process
}

// read takes the answers until the process has ended.
func (r *stormRun) read(stdout *os.File) {
	s := r.c.s
	for lines := bufio.NewReaderSize(stdout, 1<<16); ; {
		line, err := lines.ReadString('\n')
		if err == nil {
			r.answered(line)
			continue
		}
		r.mu.Lock()
		if line != "" && !r.doomed {
			s.t.Errorf("%s wrote half a line: %q", r.session, clipped(line, 300))
		}
		r.mu.Unlock()
		break
	}
	io.Copy(io.Discard, stdout)
	stdout.Close()
	err := r.cmd.Wait()
	r.in.Close()
	r.mu.Lock()
	r.ended = true
	open, doomed, left := r.open, r.doomed, r.left
	r.mu.Unlock()
	if !doomed && (err != nil || !left) {
		s.t.Errorf("%s ended by itself: %v", r.session, r.cmd.ProcessState)
	}
	for _, call := range open {
		if !doomed {
			s.t.Errorf("%s has not answered %s", r.session, call.what)
		}
		r.finish(call, &stormAnswer{})
	}
	s.ended(r)
	close(r.over)
}

// answered gives an answer to whoever asked.
func (r *stormRun) answered(line string) {
	a := &stormAnswer{Line: line}
	err := json.Unmarshal([]byte(line), a)
	r.mu.Lock()
	call := r.open[string(a.ID)]
	delete(r.open, string(a.ID))
	r.mu.Unlock()
	if err != nil || call == nil {
		r.c.s.t.Errorf("%s wrote %q, which answers nothing that is open (%v)", r.session, clipped(line, 500), err)
		return
	}
	r.c.s.count("requests")
	r.finish(call, a)
}

func (r *stormRun) finish(call *stormCall, a *stormAnswer) {
	r.c.known.Lock()
	defer r.c.known.Unlock()
	// A name that is not free yet makes it another peer, which gets broadcasts of its own.
	r.named = r.named || strings.Contains(a.text(), "\t"+r.c.name+"\t")
	for _, block := range a.Result.Content {
		if !r.named {
			break
		}
		for _, asked := range r.c.s.receive(r.c.name, block.Text) {
			if !slices.Contains(r.c.asks, asked) {
				r.c.asks = append(r.c.asks, asked)
			}
		}
	}
	if call.then != nil {
		call.then(a)
	}
	close(call.over)
}

// call sends a request.
func (r *stormRun) call(method, params string, then func(*stormAnswer)) *stormCall {
	call := &stormCall{what: method + " " + clipped(params, 200), id: r.c.s.nextID(), sent: time.Now(), over: make(chan struct{}), then: then}
	r.writing.Lock()
	defer r.writing.Unlock()
	r.mu.Lock()
	gone := r.left || r.ended
	if !gone {
		r.open[call.id] = call
	}
	r.mu.Unlock()
	if !gone {
		r.in.SetWriteDeadline(time.Now().Add(patience))
		// A process that is dead by now cannot be written to, and what is open is finished when it has been buried.
		fmt.Fprintf(r.in, `{"jsonrpc":"2.0","id":%s,"method":%q,"params":%s}`+"\n", call.id, method, params)
		return call
	}
	go r.finish(call, &stormAnswer{}) // who calls may hold what it takes
	return call
}

func (c *stormClient) tool(name, arguments string, then func(*stormAnswer)) *stormCall {
	return c.current().call("tools/call", fmt.Sprintf(`{"name":%q,"arguments":%s}`, name, arguments), then)
}

// doom sends a signal that ends the process.
func (r *stormRun) doom(sig syscall.Signal) {
	r.mu.Lock()
	r.doomed, r.signals = true, append(r.signals, sig)
	r.mu.Unlock()
	r.cmd.Process.Signal(sig)
}

func (r *stormRun) kill() {
	r.doom(syscall.SIGKILL)
	<-r.over
}

// leave is the client's going: it closes the process's input.
func (r *stormRun) leave() {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.mu.Lock()
	left := r.left
	r.left = true
	r.mu.Unlock()
	if !left {
		r.in.Close()
	}
}

// drain reads until everything that was acknowledged has arrived everywhere, or nothing has come for long.
func (c *stormClient) drain() {
	for deadline := time.Now().Add(2 * patience); ; {
		switch {
		case !c.there():
			c.begin()
		case c.isAlone():
			c.s.count("alone at the end")
			r := c.current()
			r.leave()
			<-r.over
			c.begin()
		}
		c.s.await(c.current(), c.tool("inbox", `{"wait_seconds":1}`, nil))
		if c.s.missing() == nil || time.Now().After(deadline) {
			break
		}
	}
	c.s.await(c.current(), c.tool("inbox", `{}`, nil)) // what is left must be nothing that was there before
}

// isAlone says whether the client is served alone: until the storm is over there may be a cause for it.
func (c *stormClient) isAlone() (alone bool) {
	c.s.await(c.current(), c.tool("majordomus_server", `{"checkouts":"this"}`, func(a *stormAnswer) {
		alone = a.Line != "" && member(a.Result.StructuredContent, "this_process") == nil
	}))
	return alone
}
