//go:build unix

package main

// The load checker: many peers in several worktrees write to each other at random while processes are killed at random,
// and whatever was acknowledged must arrive: once, or again and marked; in order of its sender; and nothing that was
// refused. Short by default; `go test -run MeshLoad -mesh.load=10m .` is the long form.

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var meshLoad = flag.Duration("mesh.load", 0, "how long the load checker sends and kills; 0: a short run")

// load is one run.
type load struct {
	t     *testing.T
	peers []*loadPeer
	stop  chan struct{} // closed when no more is sent

	mu      sync.Mutex
	sent    map[string]*loadMessage // by text
	order   map[[2]string]int       // the highest number that has arrived, by sender and recipient
	arrived int
	acked   int
	kills   int
	unknown int
	repeats int
}

type loadMessage struct {
	from, to string
	number   int
	outcome  string // "", acked, refused, unknown
	arrived  int
}

// loadPeer is a client under a name, in one process after the other.
type loadPeer struct {
	l       *load
	name    string
	dir     string
	mu      sync.Mutex // held while the process is replaced
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	numbers map[string]int // of the next message, by recipient
	asks    []string       // to answer
	rand    *rand.Rand
}

func TestMeshLoad(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts many processes")
	}
	worktrees, each, messages, pause := 3, 3, 300, 700*time.Millisecond
	until := time.Now().Add(20 * time.Second)
	if *meshLoad > 0 {
		worktrees, each, messages, pause = 8, 8, 1<<30, 2*time.Second
		until = time.Now().Add(*meshLoad)
	}
	root := t.TempDir()
	l := &load{t: t, stop: make(chan struct{}), sent: map[string]*loadMessage{}, order: map[[2]string]int{}}
	dirs := []string{filepath.Join(root, "w0")}
	loadGit(t, root, "init", "-q", "-b", "main", dirs[0])
	loadGit(t, dirs[0], "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-q", "--allow-empty", "-m", "start")
	for i := 1; i < worktrees; i++ {
		dirs = append(dirs, filepath.Join(root, fmt.Sprint("w", i)))
		loadGit(t, dirs[0], "worktree", "add", "-q", "-b", fmt.Sprint("b", i), dirs[i])
	}
	for i := range worktrees * each {
		p := &loadPeer{l: l, name: fmt.Sprint("peer", i), dir: dirs[i%worktrees], numbers: map[string]int{}, rand: rand.New(rand.NewPCG(uint64(i), uint64(time.Now().UnixNano())))}
		l.peers = append(l.peers, p)
		p.begin()
		t.Cleanup(p.kill)
	}
	var left atomic.Int64
	left.Store(int64(messages))
	var all sync.WaitGroup
	for _, p := range l.peers {
		all.Go(func() {
			for !isClosed(l.stop) {
				p.act(&left)
			}
			p.drain()
		})
	}
	killer := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	for time.Now().Before(until) && left.Load() > 0 {
		<-time.After(time.Duration(killer.Int64N(int64(2 * pause))))
		l.killOne(killer, dirs)
	}
	close(l.stop)
	all.Wait()
	l.check()
	t.Logf("%d messages acknowledged, %d arrivals, of which %d were marked repeats; %d outcomes unknown, %d kills", l.acked, l.arrived, l.repeats, l.unknown, l.kills)
}

func loadGit(t *testing.T, dir string, args ...string) {
	git := exec.Command("git", args...)
	git.Dir = dir
	if out, err := git.CombinedOutput(); err != nil {
		t.Fatalf("git %s: %v\n%s", args, err, out)
	}
}

// killOne kills a process: mostly a server, by its lease.
func (l *load) killOne(r *rand.Rand, dirs []string) {
	pid := 0
	if r.IntN(3) > 0 {
		pid = readLease(leasePath(dirs[r.IntN(len(dirs))])).doc.PID
	}
	p := l.peers[r.IntN(len(l.peers))]
	if pid != 0 {
		for _, other := range l.peers {
			other.mu.Lock()
			if other.cmd.Process.Pid == pid {
				p = other
			}
			other.mu.Unlock()
		}
	}
	p.mu.Lock()
	p.cmd.Process.Kill() // its own loop notices and begins anew
	p.mu.Unlock()
	l.mu.Lock()
	l.kills++
	l.mu.Unlock()
}

// begin starts processes until one has the name: one that died a moment ago may still be known as living.
func (p *loadPeer) begin() {
	for deadline := time.Now().Add(2 * patience); ; {
		p.start()
		p.call("initialize", `{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"load","version":"1"}}`)
		answer, err := p.call("tools/call", `{"name":"whoami"}`)
		if err == nil && strings.Contains(answer, `\t`+p.name+`\t`) {
			return
		}
		p.stop()
		if time.Now().After(deadline) {
			p.l.t.Errorf("%s cannot get its name: %s, %v", p.name, answer, err)
			return
		}
	}
}

func (p *loadPeer) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd = exec.Command("majordomus", "mcp", "--http-port", "0")
	p.cmd.Dir = p.dir
	p.cmd.Env = append(os.Environ(), "MAJORDOMUS_NAME="+p.name, "GORACE=atexit_sleep_ms=10")
	p.in, _ = p.cmd.StdinPipe()
	out, _ := p.cmd.StdoutPipe()
	p.out = bufio.NewReaderSize(out, 1<<16)
	if err := p.cmd.Start(); err != nil {
		panic(err)
	}
}

// stop ends a process that did not get its name: in order, so that it leaves none behind, unless it has become the
// server of others and would outlive its input.
func (p *loadPeer) stop() {
	p.in.Close()
	late := time.AfterFunc(2*time.Second, func() { p.cmd.Process.Kill() })
	defer late.Stop()
	io.Copy(io.Discard, p.out)
	p.cmd.Wait()
}

func (p *loadPeer) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

var loadID atomic.Int64

// call makes one call and notes what arrived with its answer. An error means that the process is dead.
func (p *loadPeer) call(method, params string) (string, error) {
	id := strconv.FormatInt(loadID.Add(1), 10)
	if _, err := fmt.Fprintf(p.in, `{"jsonrpc":"2.0","id":%s,"method":%q,"params":%s}`+"\n", id, method, params); err != nil {
		return "", err
	}
	line, err := p.out.ReadString('\n')
	if err != nil {
		return "", err
	}
	var answer struct {
		ID     json.RawMessage
		Result struct{ Content []textBlock }
	}
	if err := json.Unmarshal([]byte(line), &answer); err != nil || string(answer.ID) != id {
		p.l.t.Errorf("%s: %q is no answer to %s", p.name, line, id)
	}
	for _, block := range answer.Result.Content {
		p.note(block.Text)
	}
	return line, nil
}

var loadLine = regexp.MustCompile(`(?m)^(\(again\) )?\[(\w+)(?: #(\S+))? from (@?\S+)\] (.*)$`)

// note takes down the messages in a text.
func (p *loadPeer) note(text string) {
	l := p.l
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range loadLine.FindAllStringSubmatch(text, -1) {
		again, kind, id, text := m[1] != "", m[2], m[3], m[5]
		if m[4] == "majordomus" {
			continue
		}
		if kind == "ask" && !slices.Contains(p.asks, id) {
			p.asks = append(p.asks, id)
		}
		sent := l.sent[text]
		if kind == "broadcast" {
			sent = l.sent[text+" to "+p.name]
			if sent == nil {
				sent = &loadMessage{from: strings.TrimPrefix(m[4], "@"), to: p.name, number: -1}
				l.sent[text+" to "+p.name] = sent
			}
		}
		if sent == nil || sent.to != p.name || sent.from != strings.TrimPrefix(m[4], "@") {
			l.t.Errorf("%s got %q, which nobody sent it", p.name, m[0])
			continue
		}
		l.arrived++
		if sent.arrived++; sent.arrived > 1 {
			if l.repeats++; !again {
				l.t.Errorf("%s got %q again, unmarked", p.name, m[0])
			}
			continue
		}
		if sent.outcome == "refused" {
			l.t.Errorf("%s got %q, which was refused", p.name, m[0])
		}
		pair := [2]string{sent.from, sent.to}
		if sent.number >= 0 {
			if sent.number < l.order[pair] {
				l.t.Errorf("%s got %q after number %d", p.name, m[0], l.order[pair])
			}
			l.order[pair] = sent.number
		}
	}
}

// act does one thing at random. A process that has died meanwhile is replaced.
func (p *loadPeer) act(left *atomic.Int64) {
	var err error
	switch n := p.rand.IntN(20); {
	case n < 4:
		_, err = p.call("tools/call", `{"name":"inbox","arguments":{"wait_seconds":1}}`)
	case n == 4:
		_, err = p.call("tools/call", `{"name":"broadcast","arguments":{"message":"all `+randomHex(6)+`"}}`)
	case n < 8 && len(p.asks) > 0:
		id := p.asks[0]
		p.asks = p.asks[1:]
		_, err = p.call("tools/call", fmt.Sprintf(`{"name":"ack","arguments":{"correlation_id":%q}}`, id))
	default:
		if left.Add(-1) < 0 {
			_, err = p.call("tools/call", `{"name":"inbox","arguments":{"wait_seconds":1}}`)
			break
		}
		err = p.send()
	}
	if err != nil {
		p.kill()
		p.begin()
	}
}

// send writes to somebody, and keeps what came of it.
func (p *loadPeer) send() error {
	l := p.l
	to := l.peers[p.rand.IntN(len(l.peers))].name
	p.numbers[to]++
	m := &loadMessage{from: p.name, to: to, number: p.numbers[to]}
	text := fmt.Sprintf("%s %d to %s", p.name, m.number, to)
	l.mu.Lock()
	l.sent[text] = m
	l.mu.Unlock()
	call := fmt.Sprintf(`{"name":"notify_peer","arguments":{"peer_name":%q,"message":%q}}`, to, text)
	if p.rand.IntN(4) == 0 {
		call = fmt.Sprintf(`{"name":"ask","arguments":{"peer_name":%q,"query":%q}}`, to, text)
	}
	answer, err := p.call("tools/call", call)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil, strings.Contains(answer, `"outcome":"unknown"`):
		m.outcome = "unknown"
		l.unknown++
	case strings.Contains(answer, `"isError":true`), strings.Contains(answer, `"error":{`):
		m.outcome = "refused"
		if m.arrived > 0 {
			l.t.Errorf("%q was refused and has arrived: %s", text, answer)
		}
		l.t.Logf("%q: %s", text, clipped(answer, 400))
	default:
		m.outcome = "acked"
		l.acked++
	}
	return err
}

// drain reads until everything that was acknowledged has arrived everywhere, or nothing has come for long.
func (p *loadPeer) drain() {
	for deadline := time.Now().Add(3 * patience); time.Now().Before(deadline); {
		if _, err := p.call("tools/call", `{"name":"inbox","arguments":{"wait_seconds":1}}`); err != nil {
			p.kill()
			p.begin()
		}
		if p.l.missing() == nil {
			break
		}
	}
	p.call("tools/call", `{"name":"inbox"}`) // what is left must be nothing that was there before
}

func (l *load) missing() (list []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for text, m := range l.sent {
		if m.outcome == "acked" && m.arrived == 0 {
			list = append(list, text)
		}
	}
	return list
}

func (l *load) check() {
	if list := l.missing(); list != nil {
		slices.Sort(list)
		l.t.Errorf("%d messages were acknowledged and have not arrived: %q", len(list), list[:min(len(list), 20)])
	}
	if l.acked == 0 {
		l.t.Error("nothing was acknowledged")
	}
}
