//go:build unix

package main

// What majordomus costs. Each thing that is measured has a floor of its own, the least that any program of this kind
// must do, and takes turns with it in one run: what disturbs the machine disturbs both, so the `ratio` says the same on
// any machine. docs/performance.md has the figures, and what they were held against.
//
//	go test -run '^$' -bench . .                     everything, a few minutes
//	taskset -c 0 go test -run '^$' -bench Call .     on one processor: the work alone, without waking an idle one

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// beside lets ours and its floor take turns, each the first in every other turn, and reports the medians. It returns the
// worst of ours.
func beside(b *testing.B, floor, ours func() time.Duration) (worst time.Duration) {
	turns := [2]func() time.Duration{floor, ours}
	var took [2][]time.Duration
	for n := 0; b.Loop(); n++ {
		for i := range turns {
			i ^= n & 1
			took[i] = append(took[i], turns[i]())
		}
	}
	for i := range took {
		slices.Sort(took[i])
	}
	least, mine := took[0][len(took[0])/2], took[1][len(took[1])/2]
	b.ReportMetric(float64(mine), "ns/op")
	b.ReportMetric(float64(least), "floor-ns/op")
	b.ReportMetric(float64(mine)/float64(least), "ratio")
	return took[1][len(took[1])-1]
}

// each is how long one of n calls takes.
func each(n int, call func()) func() time.Duration {
	return func() time.Duration {
		start := time.Now()
		for range n {
			call()
		}
		return time.Since(start) / time.Duration(n)
	}
}

// programs are built as README.md says.
type programs struct{ ours, floor string }

// buildPrograms comes before anything that changes HOME: the build cache is found by it.
func buildPrograms(t testing.TB) programs {
	t.Helper()
	dir := t.TempDir()
	build := exec.Command("env", "CGO_ENABLED=0", "go", "build", "-buildvcs=false", "-o", dir+"/", ".", "./testdata/floor")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building: %v\n%s", err, out)
	}
	return programs{filepath.Join(dir, "majordomus"), filepath.Join(dir, "floor")}
}

// bareCheckout is a checkout as far as the program looks.
func bareCheckout(t testing.TB) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	must(t, os.Mkdir(filepath.Join(dir, ".git"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, ".git", "HEAD"), []byte("ref: refs/heads/main\n"), 0o644))
	return dir
}

// talker is a client on the pipes of a program.
type talker struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

const (
	sayInitialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}`
	sayPing       = `{"jsonrpc":"2.0","id":2,"method":"ping"}`
	sayWhoami     = `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"whoami"}}`
)

// talk starts a program and initializes it.
func talk(t testing.TB, dir string, argv ...string) *talker {
	c := &talker{t: t, cmd: exec.Command(argv[0], argv[1:]...)}
	c.cmd.Dir = dir
	c.in, _ = c.cmd.StdinPipe()
	out, _ := c.cmd.StdoutPipe()
	c.out = bufio.NewReader(out)
	must(t, c.cmd.Start())
	c.ask(sayInitialize)
	return c
}

func (c *talker) ask(line string) {
	io.WriteString(c.in, line+"\n")
	answer, err := c.out.ReadSlice('\n')
	if err != nil || !bytes.Contains(answer, []byte(`"result"`)) {
		c.t.Fatalf("%s was answered %q, %v", line, answer, err)
	}
}

func (c *talker) end() {
	c.in.Close()
	c.cmd.Wait()
}

// kill ends a server that would stay for the sessions over HTTP that are left.
func (c *talker) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

func (p programs) serve(t testing.TB, dir string) *talker {
	return talk(t, dir, p.ours, "mcp", "--http-port", "0")
}

// serverAddress is where the server of a checkout listens.
func serverAddress(dir string) (address string) {
	poll(patience, func() bool { // it is published just after the server's own client has been answered
		if doc := readLease(leasePath(dir)).doc; doc.URL != nil {
			address = strings.TrimPrefix(*doc.URL, "http://")
		}
		return address != ""
	})
	return address
}

func floorAddress(dir string) string {
	addr, _ := os.ReadFile(filepath.Join(dir, ".git", "floor"))
	return string(addr)
}

// httpTalker is a client that speaks HTTP by hand, and costs next to nothing.
type httpTalker struct {
	t       testing.TB
	conn    net.Conn
	in      *bufio.Reader
	addr    string
	session string
}

func talkHTTP(t testing.TB, addr string) *httpTalker {
	conn, err := net.Dial("tcp4", addr)
	must(t, err)
	c := &httpTalker{t: t, conn: conn, in: bufio.NewReader(conn), addr: addr}
	c.ask(sayInitialize)
	return c
}

func (c *httpTalker) ask(line string) {
	fmt.Fprintf(c.conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", c.addr, c.session, len(line), line)
	length, status := 0, ""
	for {
		head, err := c.in.ReadString('\n')
		if err != nil {
			c.t.Error(err)
			return
		}
		name, value, _ := strings.Cut(strings.TrimSpace(head), ": ")
		switch name {
		case "":
			if body, _ := c.in.Peek(length); !strings.Contains(status, " 200 ") || !bytes.Contains(body, []byte(`"result"`)) {
				c.t.Errorf("%s was answered %q %q", line, status, body)
			}
			c.in.Discard(length)
			return
		case "Content-Length":
			fmt.Sscan(value, &length)
		case "Mcp-Session-Id":
			c.session = head
		default:
			status += name + " "
		}
	}
}

// BenchmarkBridgedCall is a call through a bridge. The floor is a relay to the same server that only copies.
func BenchmarkBridgedCall(b *testing.B) {
	p, dir := buildPrograms(b), bareCheckout(b)
	server := p.serve(b, dir)
	defer server.kill()
	bridge := p.serve(b, dir)
	defer bridge.end()
	relay := talk(b, dir, p.floor, serverAddress(dir))
	defer relay.end()
	for name, line := range map[string]string{"ping": sayPing, "tool": sayWhoami} {
		b.Run(name, func(b *testing.B) {
			beside(b, each(20, func() { relay.ask(line) }), each(20, func() { bridge.ask(line) }))
		})
	}
}

// BenchmarkDirectCall is a call over HTTP. The floor is a net/http server that does nothing.
func BenchmarkDirectCall(b *testing.B) {
	p, dir := buildPrograms(b), bareCheckout(b)
	server, floor := p.serve(b, dir), talk(b, dir, p.floor)
	defer server.kill()
	defer floor.end()
	ours, least := talkHTTP(b, serverAddress(dir)), talkHTTP(b, floorAddress(dir))
	for name, line := range map[string]string{"ping": sayPing, "tool": sayWhoami} {
		b.Run(name, func(b *testing.B) {
			beside(b, each(20, func() { least.ask(line) }), each(20, func() { ours.ask(line) }))
		})
	}
}

// BenchmarkSessions is a call while many sessions make calls at once, each on a connection of its own, and what a session
// keeps in memory. The floor is a net/http server that does nothing.
func BenchmarkSessions(b *testing.B) {
	p := buildPrograms(b)
	for _, n := range []int{1, 8, 64, 512} {
		b.Run(fmt.Sprintf("sessions=%d", n), func(b *testing.B) {
			dir := bareCheckout(b)
			server, floor := p.serve(b, dir), talk(b, dir, p.floor)
			defer server.kill()
			defer floor.end()
			crowd := func(addr string) func() time.Duration {
				var all []*httpTalker
				for range n {
					all = append(all, talkHTTP(b, addr))
				}
				const calls = 20
				return func() time.Duration {
					start := time.Now()
					var done sync.WaitGroup
					for _, c := range all {
						done.Go(func() {
							for range calls {
								c.ask(sayPing)
							}
						})
					}
					done.Wait()
					return time.Since(start) / time.Duration(n*calls)
				}
			}
			least := crowd(floorAddress(dir))
			before := memoryOf(server)
			ours := crowd(serverAddress(dir))
			for range 500/n + 1 { // past the growth of a young heap, which is no session's
				ours()
			}
			grown := memoryOf(server) - before
			b.ResetTimer()
			beside(b, least, ours)
			b.ReportMetric(grown, "KiB-grown")
		})
	}
}

// memoryOf is what a program has in memory of its own, in KiB; 0 where the system does not tell.
func memoryOf(c *talker) (kib float64) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", c.cmd.Process.Pid))
	if _, rest, ok := strings.Cut(string(text), "\nAnonymous:"); ok {
		fmt.Sscan(rest, &kib)
	}
	return kib
}

// BenchmarkColdStart is from the start of a process to its answer to initialize, in a checkout without a server and in one
// with. The floor is the least program of the same shape.
func BenchmarkColdStart(b *testing.B) {
	p := buildPrograms(b)
	start := func(second bool, argv ...string) func() time.Duration {
		return func() time.Duration {
			dir := bareCheckout(b)
			if second {
				defer talk(b, dir, argv...).end()
			}
			start := time.Now()
			c := talk(b, dir, argv...)
			took := time.Since(start)
			c.end()
			return took
		}
	}
	for _, second := range []bool{false, true} {
		b.Run(map[bool]string{false: "first", true: "second"}[second], func(b *testing.B) {
			beside(b, start(second, p.floor), start(second, p.ours, "mcp", "--http-port", "0"))
		})
	}
}

// BenchmarkJournalStart is a first start where an earlier server has left a journal of so many lines, messages, half of them
// read: up to the answer to initialize, and up to that of the first tool, before which the journal is written anew. The
// floor is a start without one.
func BenchmarkJournalStart(b *testing.B) {
	p := buildPrograms(b)
	for _, lines := range []int{1, 1000, 20_000} {
		var journal bytes.Buffer
		for i := range lines {
			box, number, e := boardName{"default", fmt.Sprint("p", i/1000)}, int64(i/3), entry{At: millis()}
			ref := fmt.Sprintf("%012x", number)
			switch {
			case i%3 == 1:
				e.Carry = &carriage{Number: number, Box: box, Refs: []string{ref}}
			case i%6 == 2:
				e.Confirm = []int64{number}
			default:
				e.Store = []letter{{
					Ref: ref, ID: fmt.Sprintf("notif-%08x", i), Kind: "notify", At: e.At, Text: strings.Repeat("word ", 30),
					From: address{Box: boardName{"default", "sender"}}, To: []boardName{box},
				}}
			}
			journal.Write(append(mustJSON(e), '\n'))
		}
		start := func(left []byte, tool bool) func() time.Duration {
			return func() time.Duration {
				dir := bareCheckout(b)
				if _, err := stateDir(dir); err != nil {
					b.Fatal(err)
				}
				must(b, os.WriteFile(journalPath(dir), left, 0o600))
				start := time.Now()
				c := p.serve(b, dir)
				if tool {
					c.ask(sayWhoami)
				}
				took := time.Since(start)
				c.end()
				return took
			}
		}
		for _, tool := range []bool{false, true} {
			b.Run(fmt.Sprintf("lines=%d/tool=%v", lines, tool), func(b *testing.B) {
				beside(b, start(nil, tool), start(journal.Bytes(), tool))
			})
		}
	}
}

// BenchmarkTakeOver is from the kill of a server to the next answer that a bridge's client gets. The floor is a kill, up to
// where a client of the dead process sees the end of its connection.
func BenchmarkTakeOver(b *testing.B) {
	p := buildPrograms(b)
	worst := beside(b, func() time.Duration {
		dir := bareCheckout(b)
		server := talk(b, dir, p.floor)
		conn, err := net.Dial("tcp4", floorAddress(dir))
		must(b, err)
		defer conn.Close()
		defer server.end()
		start := time.Now()
		server.cmd.Process.Kill()
		io.Copy(io.Discard, conn)
		return time.Since(start)
	}, func() time.Duration {
		dir := bareCheckout(b)
		server := p.serve(b, dir)
		bridge := p.serve(b, dir)
		defer bridge.end()
		bridge.ask(sayWhoami)
		defer server.end()
		start := time.Now()
		server.cmd.Process.Kill()
		bridge.ask(sayWhoami)
		return time.Since(start)
	})
	b.ReportMetric(float64(worst.Milliseconds()), "worst-ms")
}

// BenchmarkGather is the gathered board of so many checkouts, one in 26 of them with a server. The floor is the time that
// git alone needs to list them.
func BenchmarkGather(b *testing.B) {
	for _, n := range []int{1, 10, 100, 625} {
		b.Run(fmt.Sprintf("checkouts=%d", n), func(b *testing.B) {
			root := gitRepo(b)
			s := serving(b, gatherServer(mustFind(b, root)))
			servers := 0
			for i, wt := range gatherWorktrees(b, root, n-1) {
				if i%26 == 0 {
					newSibling(b, wt).attach(b, "work", fmt.Sprint("dir", i))
					servers++
				}
			}
			b.ResetTimer()
			beside(b, each(1, func() {
				if _, err := runGit(b.Context(), root, "worktree", "list", "--porcelain"); err != nil {
					b.Fatal(err)
				}
			}), each(1, func() {
				out, err := s.peersList(b.Context(), peersInput{})
				if err != nil || out.Count != servers || out.Covered != n || !out.Complete {
					b.Fatalf("%d peers, %d covered, %q, %v", out.Count, out.Covered, out.Reason, err)
				}
			}))
		})
	}
}

// claimants makes peers with so many claims in all, in a tree like that of a real repository.
func claimants(claims int) []peer {
	var peers []peer
	for i := range claims {
		if i%20 == 0 {
			peers = append(peers, peer{ID: peerID(fmt.Sprint("p", i)), Attached: true})
		}
		p := &peers[len(peers)-1]
		p.Claims = append(p.Claims, announcement{Name: fmt.Sprint(i), Intent: "work", Scope: []string{
			fmt.Sprintf("src/m%d/a%d", i%97, i), fmt.Sprintf("test/m%d/*_%d.go", i%97, i),
		}})
	}
	return peers
}

// BenchmarkClaims is an announcement on a board of so many claims, and the search for every pair that meets. The floor
// looks up every claimed path once.
func BenchmarkClaims(b *testing.B) {
	for _, n := range []int{1, 100, 1000, 10_000} {
		peers, board, known := claimants(n), newBoard(), map[string]bool{}
		for _, p := range peers {
			board.attach(attachment{Transport: "http", Carried: carried{Claims: p.Claims}})
			for _, c := range p.Claims {
				known[c.Scope[0]] = true
			}
		}
		id := board.attach(attachment{Transport: "http"})
		in := announceInput{Intent: "x", Scope: []string{"src/m5", "lib/x", "test/m5/**/y.go"}}
		found := 0
		floor := each(10, func() {
			for _, p := range peers {
				for _, c := range p.Claims {
					for _, path := range c.Scope {
						if known[path] {
							found++
						}
					}
				}
			}
		})
		b.Run(fmt.Sprintf("announce/claims=%d", n), func(b *testing.B) {
			beside(b, floor, each(10, func() {
				done, err := board.announce(id, in, "")
				must(b, err)
				if _, all := overlapsWith(b.Context(), done.claim, done.others); !all {
					b.Fatal("not all overlaps were found")
				}
			}))
		})
		b.Run(fmt.Sprintf("list/claims=%d", n), func(b *testing.B) {
			beside(b, floor, each(1, func() { overlapsAmong(b.Context(), peers) }))
		})
	}
}

// BenchmarkSend is a stored message: a line in the journal with its sync, shared by those who send at once. The floor is
// the same number of bytes, written and synced one after the other by a program that does nothing else.
func BenchmarkSend(b *testing.B) {
	for _, senders := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("senders=%d", senders), func(b *testing.B) {
			s := meshServer(b, bareCheckout(b), io.Discard)
			f, err := os.Create(filepath.Join(s.checkout.root, "floor"))
			must(b, err)
			defer f.Close()
			line := append(bytes.Repeat([]byte("x"), 220), '\n')
			send := func(name string) (once, empty func()) {
				ctx, _ := speak(s, name)
				return func() {
					if _, err := s.notifyPeer(ctx, notifyInput{Peer: name, Message: "hello"}); err != nil {
						b.Error(err)
					}
				}, func() { read(b, s, ctx) }
			}
			var all, emptied []func()
			for i := range senders {
				once, empty := send(fmt.Sprint("p", i))
				all, emptied = append(all, once), append(emptied, empty)
			}
			const sends = 4
			beside(b, each(sends, func() {
				f.Write(line)
				must(b, f.Sync())
			}), func() time.Duration {
				start := time.Now()
				var done sync.WaitGroup
				for _, once := range all {
					done.Go(func() {
						for range sends {
							once()
						}
					})
				}
				done.Wait()
				took := time.Since(start) / time.Duration(sends*senders)
				for _, empty := range emptied { // no mailbox must be full
					empty()
				}
				return took
			})
		})
	}
}
