//go:build unix

// What a server must bear: very many clients at once, connections that are slow or stuck, sessions that nobody ends. The
// short forms hold to what must be true; the long ones, with -load, take the full numbers and the bounds in time.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var longLoad = flag.Bool("load", false, "the long forms of the load tests, which measure")

// loaded is a server under load, with its bridges.
type loaded struct {
	*storm
	pid  int
	url  string
	http *http.Client
}

func newLoaded(t *testing.T, bridges int) *loaded {
	s := newStorm(t, stormProfile{worktrees: between{1, 1}, clients: between{bridges + 1, bridges + 1}})
	l := &loaded{storm: s, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100, MaxConnsPerHost: 100}}}
	t.Cleanup(l.http.CloseIdleConnections)
	var all sync.WaitGroup
	for _, c := range s.peers {
		all.Go(c.begin)
	}
	all.Wait()
	doc := readLease(s.path(leasePath(s.dirs[0]))).doc
	if doc.URL == nil {
		t.Fatal("nobody serves")
	}
	l.pid, l.url = doc.PID, *doc.URL
	return l
}

// post sends a message as a session, or opens one.
func (l *loaded) post(session, body string) (answer, opened string, err error) {
	r, err := http.NewRequest("POST", l.url+"/mcp", strings.NewReader(body))
	if err != nil {
		return "", "", err
	}
	r.Header.Set("Content-Type", "application/json")
	if session != "" {
		r.Header.Set("Mcp-Session-Id", session)
	}
	response, err := l.http.Do(r)
	if err != nil {
		return "", "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, clipped(string(text), 300))
	}
	return string(text), response.Header.Get("Mcp-Session-Id"), err
}

// attached is how many peers the server lists, over plain HTTP.
func (l *loaded) attached() int {
	response, err := l.http.Get(l.url + "/api/v1/peers?checkouts=this")
	must(l.t, err)
	defer response.Body.Close()
	var out peersOutput
	must(l.t, json.NewDecoder(response.Body).Decode(&out))
	return out.Count
}

// holding is what a process holds.
type holding struct{ descriptors, kilobytes int }

func usageOf(t *testing.T, pid int) holding {
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		t.Skip("needs /proc to see what a process holds; run it on Linux")
	}
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	kilobytes, _ := strconv.Atoi(strings.Fields(rest + " 0")[0])
	return holding{len(fds), kilobytes}
}

// settlesAt waits until the process holds no more descriptors than before.
func (l *loaded) settlesAt(before holding) (now holding) {
	if !poll(2*patience, func() bool { now = usageOf(l.t, l.pid); return now.descriptors <= before.descriptors }) {
		l.t.Errorf("the server holds %d descriptors, and held %d before", now.descriptors, before.descriptors)
	}
	return now
}

// returns waits until the process is about where it was in memory too.
func (l *loaded) returns(before holding) {
	now := usageOf(l.t, l.pid)
	returned := raced() || poll(2*patience, func() bool {
		now = usageOf(l.t, l.pid)
		return now.kilobytes < before.kilobytes+before.kilobytes/4+8<<10
	})
	l.t.Logf("before: %+v; after: %+v", before, now)
	if !returned {
		l.t.Errorf("the server has %d kB in memory, and had %d kB before", now.kilobytes, before.kilobytes)
	}
}

func TestLoadSessions(t *testing.T) {
	if !*longLoad { // what is measured is not shared
		t.Parallel()
	}
	if testing.Short() {
		t.Skip("starts many processes")
	}
	sessions, bridges, rounds := 200, 6, 2
	if *longLoad {
		sessions, bridges, rounds = 1000, 64, 5
	}
	l := newLoaded(t, bridges)
	before := usageOf(t, l.pid)
	for range rounds {
		l.checkCalm()
		ids := make([]string, sessions)
		inParallel(32, sessions, func(i int) {
			_, id, err := l.post("", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"load","version":"1"}}}`)
			if err != nil || id == "" {
				t.Errorf("session %d: %v", i, err)
			}
			ids[i] = id
		})
		if n := l.attached(); n != sessions+bridges+1 {
			t.Errorf("%d attached, there are %d", n, sessions+bridges+1)
		}
		began := time.Now()
		var all sync.WaitGroup
		for _, c := range l.peers {
			all.Go(func() {
				for range 10 {
					l.await(c.current(), c.tool("whoami", `{}`, c.checkWhoami))
				}
			})
		}
		inParallel(64, sessions, func(i int) {
			if answer, _, err := l.post(ids[i], `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"whoami"}}`); err != nil || !strings.Contains(answer, `\t`) {
				t.Errorf("session %d: %v %s", i, err, answer)
			}
		})
		all.Wait()
		t.Logf("%d sessions and %d bridges made %d calls in %v; %+v", sessions, bridges, sessions+10*(bridges+1), time.Since(began), usageOf(t, l.pid))
		inParallel(32, sessions, func(i int) {
			r, _ := http.NewRequest("DELETE", l.url+"/mcp", nil)
			r.Header.Set("Mcp-Session-Id", ids[i])
			if response, err := l.http.Do(r); err != nil || response.StatusCode != http.StatusNoContent {
				t.Errorf("ending session %d: %v", i, err)
			} else {
				response.Body.Close()
			}
		})
		l.http.CloseIdleConnections()
		l.settlesAt(holding{before.descriptors + len(l.peers), 0}) // each may keep a second connection for its next calls
	}
	if *longLoad {
		l.settlesAt(before)
	}
	l.returns(before)
	l.checkCalm()
	l.checkEnd()
}

// raced says that this is the race detector's build, which keeps for ever what it knows of memory that was used once.
func raced() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

func (c *stormClient) checkWhoami(a *stormAnswer) {
	if !strings.Contains(a.text(), "\t"+c.name+"\t") {
		c.s.t.Errorf("%s is told %s", c.name, a.Line)
	}
}

// inParallel does what for 0 to n-1, some at a time.
func inParallel(together, n int, what func(int)) {
	var next atomic.Int64
	var all sync.WaitGroup
	for range together {
		all.Go(func() {
			for i := int(next.Add(1) - 1); i < n; i = int(next.Add(1) - 1) {
				what(i)
			}
		})
	}
	all.Wait()
}

// Connections that are slow or stuck, more of them than requests are worked on at once, keep neither the home page nor a
// bridge from being answered, and in the end leave nothing.
func TestLoadStuck(t *testing.T) {
	if !*longLoad { // what is measured is not shared
		t.Parallel()
	}
	if testing.Short() {
		t.Skip("starts many processes")
	}
	l := newLoaded(t, 2)
	for _, page := range []string{"/", "/docs/"} { // what is made for the first reader stays
		response, err := plainHTTP.Get(l.url + page)
		must(t, err)
		response.Body.Close()
	}
	before := usageOf(t, l.pid)
	var stuck []net.Conn
	defer func() {
		for _, c := range stuck {
			c.Close()
		}
	}()
	host := strings.TrimPrefix(l.url, "http://")
	for i := range 500 {
		c, err := net.Dial("tcp", host)
		must(t, err)
		stuck = append(stuck, c)
		text := "GET / HTTP/1.1\r\nHost: " + host + "\r\nX-Half: "
		switch i % 5 {
		case 1:
			text = "POST /mcp HTTP/1.1\r\nHost: " + host + "\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
		case 2, 3, 4: // the answers are far more than the connection holds, and nobody reads them
			c.(*net.TCPConn).SetReadBuffer(4 << 10)
			text = strings.Repeat("GET /docs/ HTTP/1.1\r\nHost: "+host+"\r\n\r\n", 10)
		}
		c.SetWriteDeadline(time.Now().Add(patience))
		io.WriteString(c, text)
	}
	t.Logf("with %d connections: %+v", len(stuck), usageOf(t, l.pid))
	var home, bridged time.Duration
	for range 40 {
		began := time.Now()
		response, err := plainHTTP.Get(l.url)
		must(t, err)
		response.Body.Close()
		home = max(home, time.Since(began))
		for _, c := range l.peers {
			began = time.Now()
			l.await(c.current(), c.tool("whoami", `{}`, c.checkWhoami))
			bridged = max(bridged, time.Since(began))
		}
	}
	t.Logf("the home page took %v at most, a call %v", home, bridged)
	if *longLoad && max(home, bridged) > time.Second {
		t.Error("that is more than a second")
	}
	if *longLoad { // the read deadline ends them all by itself
		l.settlesAt(holding{before.descriptors + 4, 0})
		t.Logf("left alone they are gone: %+v", usageOf(t, l.pid))
	}
	for _, c := range stuck {
		c.Close()
	}
	l.http.CloseIdleConnections()
	l.settlesAt(holding{before.descriptors + 8, 0}) // a bridge may have a connection more than before
	l.returns(before)
	l.checkCalm()
	l.checkEnd()
}

// A day of clients that come, say nothing more and are never heard of again: ten thousand sessions (in the short form
// fewer) expire and leave nothing in memory, on the board, or running.
func TestLoadExpiry(t *testing.T) {
	root := filepath.Dir(leasePath(newCheckout(t))) // made outside, where time is real
	must(t, os.MkdirAll(root, 0o700))
	hours, clients := 5, 100
	if *longLoad {
		hours, clients = 20, 250
	}
	root = strings.TrimSuffix(root, leaseDir)
	synctest.Test(t, func(t *testing.T) {
		s := meshServer(t, filepath.Clean(root), io.Discard)
		s.url = "http://127.0.0.1:8741"
		handler := s.guard(s.routes())
		day := func() (heap uint64, goroutines int) {
			for range hours {
				for range clients {
					r := httptest.NewRequest("POST", "/mcp", bytes.NewReader([]byte(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"load","version":"1"}}}`)))
					r.Host = strings.TrimPrefix(s.url, "http://")
					r.Header.Set("Content-Type", "application/json")
					w := httptest.NewRecorder()
					handler.ServeHTTP(w, r)
					if w.Header().Get("Mcp-Session-Id") == "" {
						t.Fatal(w.Code, w.Body)
					}
				}
				time.Sleep(144 * time.Second) // of the bubble
				if n := s.connections().Sessions; n != 0 {
					t.Fatalf("%d sessions have not expired", n)
				}
			}
			s.mesh.journal.drain()
			synctest.Wait()
			runtime.GC()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc, runtime.NumGoroutine()
		}
		day() // fills what is kept of those that have left, which is bounded
		heap, goroutines := day()
		after, now := day()
		t.Logf("heap %d kB, then %d kB; goroutines %d, then %d; journal %d bytes", heap>>10, after>>10, goroutines, now, s.mesh.journal.size)
		if n := len(s.board.peers()); n != 0 {
			t.Errorf("%d peers are listed", n)
		}
		if after > heap+heap/4+1<<20 {
			t.Errorf("the heap has grown from %d to %d bytes", heap, after)
		}
	})
}
