//go:build unix

package main

// The pages as a browser shows them.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestBrowser shows the pages in a browser, one for all of its tests.
func TestBrowser(t *testing.T) {
	t.Parallel()
	b := startBrowser(t)
	for _, c := range []struct {
		name string
		test func(*testing.T, *browser)
	}{
		{"layouts", testLayouts}, {"board", testBoard}, {"incomplete", testIncomplete}, {"lost", testLost},
		{"other", testOtherRepository}, {"explorer", testExplorer}, {"keyboard", testKeyboard},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, b) })
	}
}

// testLayouts holds every page, with few and many on the board, to the width of the window, in light and dark.
// With -screens DIR it leaves pictures for people to judge.
func testLayouts(t *testing.T, b *browser) {
	for _, peers := range []int{0, 3, 60} {
		url := serveGallery(t, peers)
		n := b.open(t, url+"/board")
		n.until(`document.querySelector('.status .good')`)
		for _, c := range []struct{ name, path, ready string }{
			{"board", "/board", `document.querySelector('.status .good')`},
			{"home", "/", `document.querySelector('#now p:not(.none)')`},
			{"swagger", "/swagger", `document.querySelector('.operation')`},
			{"docs", "/docs/", `document.querySelector('#documents')`},
			{"capability", "/docs/peers.list", `true`},
			{"document", "/docs/files/README.md", `true`},
		} {
			if peers != 3 && c.name != "board" && c.name != "home" {
				continue
			}
			n.load(url + c.path)
			n.until(c.ready)
			for _, width := range []int{360, 800, 1440} {
				for _, scheme := range []string{"light", "dark"} {
					n.look(width, 1000, scheme)
					n.screenshot(fmt.Sprintf("%s-%d-%d-%s", c.name, peers, width, scheme))
					if wide := n.eval(`document.documentElement.scrollWidth - innerWidth`); wide != 0.0 {
						t.Errorf("%s with %d peers is %v pixels wider than a window of %d", c.path, peers, wide, width)
					}
					if width == 800 {
						if pale := n.eval(legible); pale != "" {
							t.Errorf("%s with %d peers, %s, is hard to read:\n%s", c.path, peers, scheme, pale)
						}
					}
				}
			}
		}
		n.blameless(url)
	}
}

// legible finds text whose contrast with what is behind it is below what WCAG AA asks for.
const legible = `(() => {
	const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
	const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
	const parts = colour => colour.match(/[\d.]+/g).map(Number);
	const behind = e => {
		for (; e; e = e.parentElement) {
			const c = parts(getComputedStyle(e).backgroundColor);
			if (c.length < 4 || c[3] > 0) return c;
		}
		return [255, 255, 255];
	};
	const bad = new Set();
	const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
	for (let n; n = walk.nextNode();) {
		if (!n.data.trim() || !n.parentElement.checkVisibility()) continue;
		const a = light(parts(getComputedStyle(n.parentElement).color)), b = light(behind(n.parentElement));
		const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
		if (contrast < 4.5) bad.add(contrast.toFixed(2) + ': ' + n.data.trim().slice(0, 40));
	}
	return [...bad].join('\n');
})()`

// agent is a client of a program that runs inside the test.
type agent struct {
	t     testing.TB
	in    *io.PipeWriter
	lines chan string   // what it answers; closed at the end
	ended chan struct{} // closed when the program has returned
	log   *lockedBuffer
	asked int
}

type lockedBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// startAgent runs the program in a checkout and initializes it under a client's name.
func startAgent(t testing.TB, dir, name string, args ...string) *agent {
	in, stdin := io.Pipe()
	stdout, out := io.Pipe()
	a := &agent{t: t, in: stdin, lines: make(chan string, 100), ended: make(chan struct{}), log: &lockedBuffer{}}
	go func() { // ends when the program has nobody left to serve
		defer close(a.ended)
		if err := run(context.Background(), append([]string{"mcp", "--repo", dir}, args...), in, out, a.log); err != nil {
			fmt.Fprintln(a.log, err)
		}
		out.Close()
	}()
	go func() { // ends with the program's output
		defer close(a.lines)
		for r := bufio.NewReader(stdout); ; {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			a.lines <- line
		}
	}()
	t.Cleanup(a.leave)
	a.ask("initialize", map[string]any{"protocolVersion": "2025-06-18", "capabilities": map[string]any{}, "clientInfo": map[string]any{"name": name, "version": "1"}})
	return a
}

// ask sends a request and waits for its answer.
func (a *agent) ask(method string, params any) string {
	a.t.Helper()
	a.asked++
	fmt.Fprintf(a.in, "%s\n", mustJSON(map[string]any{"jsonrpc": "2.0", "id": a.asked, "method": method, "params": params}))
	select {
	case line := <-a.lines:
		if !strings.Contains(line, `"result"`) || strings.Contains(line, `"isError":true`) {
			a.t.Fatalf("%s answered %s\n%s", method, line, a.log)
		}
		return line
	case <-time.After(patience):
		a.t.Fatalf("%s: no answer after %v\n%s", method, patience, a.log)
	}
	return ""
}

func (a *agent) announce(claim, intent string, scope ...string) {
	a.t.Helper()
	a.ask("tools/call", map[string]any{"name": "majordomus_announce", "arguments": map[string]any{"claim": claim, "intent": intent, "scope": scope}})
}

// leave ends the client, and waits for its program.
func (a *agent) leave() {
	a.in.Close()
	select {
	case <-a.ended:
	case <-time.After(patience):
		a.t.Errorf("the program has not ended after %v\n%s", patience, a.log)
	}
}

// serverURL waits until a server of the checkout says where it answers.
func serverURL(t testing.TB, dir string) string {
	t.Helper()
	var r reading
	eventually(t, "a server in "+dir, func() bool {
		r = readLease(leasePath(dir))
		return r.state == readingDocument && r.held && r.doc.URL != nil
	})
	return *r.doc.URL
}

const (
	hostileName   = `<img src=x onerror=alert(1)>`
	hostileIntent = `"></bdi><script>alert(2)</script> javascript:alert(3)`
	hostilePath   = `a/<svg onload=alert(4)>/&lt;b&gt;`
)

// testBoard watches a board change under two checkouts, with names that want to be more than text.
func testBoard(t *testing.T, b *browser) {
	dir := newRepository(t)
	tree := filepath.Join(filepath.Dir(dir), hostileName)
	git(t, dir, "worktree", "add", "-q", "-b", "<b>branch</b>", tree)
	first := startAgent(t, dir, hostileName, "--http-port", "0")
	second := startAgent(t, tree, `"><script>alert(5)</script>`, "--http-port", "0")
	first.announce("", hostileIntent, hostilePath, "docs")
	url := serverURL(t, dir)
	serverURL(t, tree)

	n := b.open(t, url+"/board")
	n.until(`document.querySelectorAll('.peer').length === 2`)
	n.until(`document.querySelector('.status .good')?.textContent === 'Live'`)
	text := n.text()
	for _, want := range []string{hostileName, hostileIntent, hostilePath, `"><script>alert(5)</script>`, "<b>branch</b>", "no claims meet", "2 peers, 2 checkouts"} {
		if !strings.Contains(text, want) {
			t.Errorf("the board does not show %q as text:\n%s", want, text)
		}
	}

	// what is in use stays where it is while the board changes
	n.look(500, 300, "light")
	n.eval(`window.kept = document.querySelector('.peer .intent'); window.link = document.querySelector('.checkout header a'); link.focus(); scrollTo(0, 120); window.at = scrollY`)
	second.announce("<i>claim</i>", "a claim on the same ground", "docs/configuration.md")
	n.until(`document.querySelector('#meeting')`)
	if n.eval(`kept.isConnected && document.activeElement === link`) != true {
		t.Error("the update replaced what was in use")
	}
	if n.eval(`document.querySelector('.content').firstElementChild.id`) != "meeting" {
		t.Error("claims that meet are not the first thing on the board")
	}
	if title := n.eval(`document.title`); title != "(1!) Board · compiler · majordomus" {
		t.Errorf("the title is %q", title)
	}
	n.until(`document.querySelectorAll('.peer.hot').length === 2 && document.querySelectorAll('.peer code.hot').length === 2`)

	// what else there is to know has a section each
	second.ask("tools/call", map[string]any{"name": "majordomus_session_attach", "arguments": map[string]any{"external_id": "elsewhere"}})
	first.ask("tools/call", map[string]any{"name": "majordomus_session_attach", "arguments": map[string]any{"external_id": "<b>work</b>"}})
	second.ask("tools/call", map[string]any{"name": "ask", "arguments": map[string]any{"peer_name": "compiler", "query": "what was asked"}})
	first.ask("tools/call", map[string]any{"name": "schedule_create", "arguments": map[string]any{"to_peer": "compiler", "text": "<i>later</i>", "fire_at": "2999-01-01"}})
	n.soon(`document.querySelector('#schedules')?.textContent.includes('compiler to compiler')`)
	n.soon(`document.querySelector('#episodes')?.textContent.includes('<b>work</b>') && document.querySelector('#asks')?.textContent.includes('waits for compiler')`)
	if text := n.text(); strings.Contains(text, "what was asked") || strings.Contains(text, "<i>later</i>") {
		t.Errorf("the board tells what is for two:\n%s", text)
	}

	// a third comes and leaves; what it claimed stays
	third := startAgent(t, dir, "third")
	third.announce("", "half done", "elsewhere")
	n.soon(`document.querySelectorAll('.peer').length === 3 && document.querySelector('.status').textContent.includes('3 peers')`)
	third.leave()
	n.soon(`document.querySelector('.peer.left')?.textContent.includes('half done') && document.querySelector('.status').textContent.includes('2 peers')`)

	if n.eval(`document.querySelectorAll('#board img, #board script, #board svg, #board b, #board i').length`) != 0.0 {
		t.Error("somebody's text became markup")
	}
	if n.eval(`[...document.querySelectorAll('a[href]')].every(a => a.protocol === 'http:' && a.hostname === '127.0.0.1')`) != true {
		t.Error("a link leads away")
	}
	n.blameless(url)

	home := b.open(t, url+"/")
	home.until(`document.querySelector('#now .names')?.textContent.includes('claims nothing') === false && document.querySelector('#now .bad')`)
	home.blameless(url)
}

// testIncomplete shows a checkout whose board cannot be read, until it can.
func testIncomplete(t *testing.T, b *browser) {
	dir := newRepository(t)
	tree := filepath.Join(filepath.Dir(dir), "tree")
	git(t, dir, "worktree", "add", "-q", tree)
	startAgent(t, dir, "first", "--http-port", "0")
	url := serverURL(t, dir)
	e := &elector{root: tree, version: "1", timing: timings{bindGrace: patience, join: patience, busyGrace: patience}, log: slog.New(slog.DiscardHandler)}
	won, err := e.elect(t.Context())
	if err != nil || won.lease == nil {
		t.Fatalf("the lease cannot be had: %v", err)
	}
	defer won.lease.release()

	n := b.open(t, url+"/board")
	n.until(`document.querySelector('.status .warn')?.textContent.includes('Incomplete')`)
	n.until(`document.querySelector('#unread')?.textContent.includes('tree') && document.querySelector('#unread').textContent.includes('has not said yet where it answers')`)
	if err := won.lease.release(); err != nil {
		t.Fatal(err)
	}
	startAgent(t, tree, "late", "--http-port", "0")
	n.soon(`!document.querySelector('#unread') && !document.querySelector('.status .warn') && document.querySelector('.status').textContent.includes('2 peers')`)
	n.blameless(url)
}

// testLost takes the server away. The board says so, keeps what it knew, and finds the next server at the address.
func testLost(t *testing.T, b *browser) {
	dir := newRepository(t)
	first := startAgent(t, dir, "first", "--http-port", "0")
	first.announce("", "the first work", "docs")
	url := serverURL(t, dir)
	n := b.open(t, url+"/board")
	n.until(`document.querySelector('.peer')?.textContent.includes('the first work')`)
	home := b.open(t, url+"/")
	home.until(`document.querySelector('#now .names')`)
	first.leave()
	home.until(`document.querySelector('#now .bad')?.textContent.includes('does not answer')`)
	n.show()
	n.until(`document.querySelector('.status .bad')?.textContent === 'Server lost'`)
	n.until(`document.querySelector('.notice.bad')?.textContent.includes('does not answer') && document.querySelector('.content.stale .peer')`)
	if title := n.eval(`document.title`); title != "(lost) Board · compiler · majordomus" {
		t.Errorf("the title is %q", title)
	}
	n.screenshot("board-lost")

	port := url[strings.LastIndexByte(url, ':')+1:]
	for deadline := time.Now().Add(patience); ; {
		next := startAgent(t, dir, "next", "--http-port", port)
		if serverURL(t, dir) == url {
			break
		}
		next.leave() // somebody had the port for a moment
		if time.Now().After(deadline) {
			t.Skip("the port was taken by another process: run it again")
		}
	}
	n.until(`document.querySelector('.status .good') && document.querySelector('.peer')?.textContent.includes('next') && !document.querySelector('.stale, .notice.bad')`)
	for _, p := range []*tab{n, home} {
		p.forgive("network error", "net::ERR_")
		p.blameless(url)
	}
}

// testOtherRepository does not mix two boards when a server of another repository takes the port.
func testOtherRepository(t *testing.T, b *browser) {
	one, other := newPageServer(t, newRepository(t), "vcs"), newPageServer(t, newRepository(t), "vcs")
	one.board.attach(attachment{Transport: "http", Carried: carried{Name: "peer-of-one"}})
	other.board.attach(attachment{Transport: "http", Carried: carried{Name: "peer-of-other"}})
	var moved atomic.Bool
	url := servePages(t, one, func(h http.Handler) http.Handler {
		handlers := map[bool]http.Handler{false: h, true: other.guard(other.routes())}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handlers[moved.Load()].ServeHTTP(w, r) })
	})
	other.url = url
	n := b.open(t, url+"/board")
	n.until(`document.querySelector('.peer')?.textContent.includes('peer-of-one')`)
	moved.Store(true)
	n.soon(`document.querySelector('.notice.bad')?.textContent.includes('Another repository is served here now')`)
	if text := n.text(); !strings.Contains(text, "peer-of-one") || strings.Contains(text, "peer-of-other") {
		t.Errorf("two boards were mixed:\n%s", text)
	}
	moved.Store(false)
	n.soon(`!document.querySelector('.notice.bad') && document.querySelector('.status .good')`)
	n.forgive("network error", "status of 422", "/schedules") // these servers have no lease, and so keep none
	n.blameless(url)
}

// testExplorer calls every operation, and holds the curl lines to what they promise.
func testExplorer(t *testing.T, b *browser) {
	dir := newRepository(t)
	startAgent(t, dir, "first", "--http-port", "0")
	url := serverURL(t, dir)
	n := b.open(t, url+"/swagger#server.status")
	n.until(`document.getElementById('server.status')?.open`)
	n.eval(`for (const d of document.querySelectorAll('details')) d.open = true`)
	for _, c := range capabilities() {
		at := fmt.Sprintf(`document.getElementById(%q)`, c.id)
		if n.eval(at+` !== null`) != true {
			t.Fatalf("the explorer does not have %s", c.id)
		}
		n.eval(at + `.querySelector('button[type=submit]').click()`)
		n.until(at + `.querySelector('.answer .state')`)
		if status := fmt.Sprint(n.eval(at + `.querySelector('.answer .state').textContent`)); status[0] == '0' || status[0] == '5' {
			t.Errorf("%s answers %s: %v", c.id, status, n.eval(at+`.querySelector('.answer').textContent`))
		}
		runCurl(t, dir, fmt.Sprint(n.eval(at+`.querySelector('.curl code').textContent`)))
	}
	n.look(1000, 800, "light")
	n.screenshot("swagger-open")
	status := n.eval(`document.getElementById('peers.list').querySelector('.answer .state').textContent`)
	if answer := n.eval(`document.getElementById('peers.list').querySelector('.answer code').textContent`); status != "200 OK" || !strings.Contains(fmt.Sprint(answer), `"name": "first"`) {
		t.Errorf("peers.list answers %v: %v", status, answer)
	}

	// what is typed is in the call and in the line
	fill := func(id, value string) {
		n.eval(fmt.Sprintf(`(() => { const e = document.getElementById(%q); e.value = %q; e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true})); })()`, id, value))
	}
	fill("peers.list-checkouts", "this")
	n.until(`document.querySelector('[id="peers.list"] .curl').textContent.includes('/api/v1/peers?checkouts=this')`)
	fill("peers.announce-body", `{"intent": "it's $HOME \"quoted\" \\ `+"`x`"+`"}`)
	n.until(`document.querySelector('[id="peers.announce"] .curl').textContent.includes('quoted')`)
	line := fmt.Sprint(n.eval(`document.querySelector('[id="peers.announce"] .curl code').textContent`))
	if answer := runCurl(t, dir, line); answer != "" && !strings.Contains(answer, `"code":"refused"`) {
		t.Errorf("%s\nanswered %s", line, answer)
	}

	// the token goes with writes only, and is never shown
	fill("token", readLease(leasePath(dir)).doc.Token)
	n.until(`document.querySelector('[id="peers.announce"] .send').textContent.includes('with the token')`)
	n.eval(`document.querySelector('[id="peers.list"] button[type=submit]').click(); document.querySelector('[id="peers.announce"] button[type=submit]').click()`)
	n.until(`!document.querySelector('button:disabled')`)
	n.mu.Lock()
	sent := 0
	for _, headers := range n.sent {
		if strings.Contains(headers, "Bearer "+readLease(leasePath(dir)).doc.Token) {
			sent++
		}
	}
	n.mu.Unlock()
	if sent != 1 {
		t.Errorf("the token was sent %d times, not with the write alone", sent)
	}
	line = fmt.Sprint(n.eval(`document.querySelector('[id="peers.announce"] .curl code').textContent`))
	if answer := runCurl(t, dir, line); strings.Contains(n.text(), readLease(leasePath(dir)).doc.Token) || answer != "" && !strings.Contains(answer, `"code":"refused"`) {
		t.Errorf("%s\nanswered %s", line, answer)
	}
	n.forgive("network error", "status of 4")
	n.blameless(url)
}

// runCurl runs a line as a person would who pasted it, if there is curl; else it returns nothing.
func runCurl(t *testing.T, dir, line string) string {
	if _, err := exec.LookPath("curl"); err != nil {
		return ""
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-ec", line)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "no_proxy=127.0.0.1")
	out, err := cmd.CombinedOutput()
	if err != nil || !json.Valid(out) {
		t.Errorf("%s\n%v: %s", line, err, out)
	}
	return string(out)
}

// testKeyboard reaches the content and opens an operation without a mouse.
func testKeyboard(t *testing.T, b *browser) {
	url := servePages(t, newPageServer(t, newRepository(t), "vcs"), nil)
	n := b.open(t, url+"/swagger")
	n.until(`document.querySelector('.operation')`)
	press := func(key string, code int) {
		for _, kind := range []string{"keyDown", "keyUp"} {
			event := map[string]any{"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
			if key == "Enter" && kind == "keyDown" {
				event["text"] = "\r"
			}
			n.must(nil, "Input.dispatchKeyEvent", event)
		}
	}
	press("Tab", 9)
	n.until(`document.activeElement.className === 'skip' && document.activeElement.getBoundingClientRect().left >= 0`)
	press("Enter", 13)
	n.until(`location.hash === '#content'`)
	for range 20 {
		press("Tab", 9)
		if n.eval(`document.activeElement.matches('.operation > summary')`) == true {
			break
		}
	}
	if outline := n.eval(`getComputedStyle(document.activeElement).outlineStyle`); outline != "solid" {
		t.Errorf("what has the focus cannot be seen: its outline is %v", outline)
	}
	press("Enter", 13)
	n.until(`document.activeElement.parentElement.open`)
	n.blameless(url)
}
