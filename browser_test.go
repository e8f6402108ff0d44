//go:build unix

package main

// A Chromium of our own for the tests of the pages: started without a window and driven over a pair of pipes, on which both sides write
// JSON with a zero byte behind it (the DevTools protocol, --remote-debugging-pipe).
//
// Whatever a page does that none of ours may do is noted by its tab, and fails the test that opened it: an exception, an
// error on the console, a dialog, a request that leaves the server.

import (
	"bufio"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

var screens = flag.String("screens", "", "directory to write screenshots of the pages to")

type browser struct {
	cmd  *exec.Cmd
	in   *os.File
	dead chan struct{} // closed when it has been reaped

	mu      sync.Mutex
	last    int
	waiting map[int]chan devtoolsMessage // a receive is the answer; closed when the browser is gone
	tabs    map[string]*tab              // by session
}

type devtoolsMessage struct {
	ID      int             `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// startBrowser starts a Chromium that lives as long as the test, or skips it where there is none.
func startBrowser(t *testing.T) *browser {
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"} {
		if found, err := exec.LookPath(name); err == nil && path == "" {
			path = found
		}
	}
	if path == "" {
		t.Skip("needs Chromium to look at the pages: install it (apt-get install chromium) and run go test -run Browser .")
	}
	dir, err := os.MkdirTemp("", "majordomus-browser") // not t.TempDir: the browser's last writes may come after a look
	if err != nil {
		t.Fatal(err)
	}
	toBrowser, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, fromBrowser, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	b := &browser{in: in, dead: make(chan struct{}), waiting: map[int]chan devtoolsMessage{}, tabs: map[string]*tab{}}
	b.cmd = exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-breakpad",
		"--disable-crash-reporter", "--disable-dev-shm-usage", "--hide-scrollbars", "--password-store=basic", "--use-mock-keychain",
		"--user-data-dir="+filepath.Join(dir, "profile"), "--remote-debugging-pipe", "about:blank")
	b.cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "XDG_CONFIG_HOME="+dir, "XDG_CACHE_HOME="+dir)
	b.cmd.ExtraFiles = []*os.File{toBrowser, fromBrowser}
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	toBrowser.Close()
	fromBrowser.Close()
	go b.read(out) // ends when the browser has closed its end
	go func() {    // ends when the browser does
		b.cmd.Wait()
		close(b.dead)
	}()
	t.Cleanup(func() {
		b.end(t)
		out.Close()
		poll(patience, func() bool { return os.RemoveAll(dir) == nil }) // its children are in the middle of their last writes
	})
	return b
}

// end asks the browser to leave, and then ends whatever is left of its process group.
func (b *browser) end(t testing.TB) {
	b.command("", "Browser.close", nil)
	select {
	case <-b.dead:
	case <-time.After(patience):
		t.Errorf("the browser has not ended after %v", patience)
	}
	syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL)
	b.in.Close()
}

func (b *browser) read(out *os.File) {
	r := bufio.NewReaderSize(out, 1<<20)
	for {
		line, err := r.ReadBytes(0)
		if err != nil {
			break
		}
		var m devtoolsMessage
		if json.Unmarshal(line[:len(line)-1], &m) != nil {
			continue
		}
		b.mu.Lock()
		answered, about := b.waiting[m.ID], b.tabs[m.Session]
		if m.ID != 0 {
			delete(b.waiting, m.ID)
		}
		b.mu.Unlock()
		switch {
		case m.ID != 0 && answered != nil:
			answered <- m
		case m.ID == 0 && about != nil:
			about.note(m)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.waiting {
		close(c)
	}
	b.waiting = nil
}

// command sends one command and waits for its result.
func (b *browser) command(session, method string, params any) (json.RawMessage, error) {
	answer := make(chan devtoolsMessage, 1)
	b.mu.Lock()
	if b.waiting == nil {
		b.mu.Unlock()
		return nil, errors.New("the browser is gone")
	}
	b.last++
	b.waiting[b.last] = answer
	text := mustJSON(map[string]any{"id": b.last, "method": method, "params": cmp.Or[any](params, map[string]any{}), "sessionId": session})
	if session == "" {
		text = mustJSON(map[string]any{"id": b.last, "method": method, "params": cmp.Or[any](params, map[string]any{})})
	}
	_, err := b.in.Write(append(text, 0))
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	select {
	case m, ok := <-answer:
		switch {
		case !ok:
			return nil, fmt.Errorf("%s: the browser is gone", method)
		case m.Error != nil:
			return nil, fmt.Errorf("%s: %s", method, m.Error.Message)
		}
		return m.Result, nil
	case <-time.After(patience):
		return nil, fmt.Errorf("%s: no answer after %v", method, patience)
	}
}

// tab is one page, and what it did.
type tab struct {
	t       testing.TB
	b       *browser
	session string
	loaded  chan struct{} // a receive means that a page has been loaded

	mu       sync.Mutex
	requests []string // "GET http://…"
	sent     []string // the same with the headers, where Chromium tells them
	faults   []string // what no page of ours may do
}

// open shows the address in a new tab, for the time of the test, and waits until it is loaded.
func (b *browser) open(t testing.TB, address string) *tab {
	t.Helper()
	n := &tab{t: t, b: b, loaded: make(chan struct{}, 100)}
	var target struct {
		ID string `json:"targetId"`
	}
	n.must(&target, "Target.createTarget", map[string]any{"url": "about:blank"})
	t.Cleanup(func() { b.command("", "Target.closeTarget", target) })
	var attached struct {
		Session string `json:"sessionId"`
	}
	n.must(&attached, "Target.attachToTarget", map[string]any{"targetId": target.ID, "flatten": true})
	n.session = attached.Session
	b.mu.Lock()
	b.tabs[n.session] = n
	b.mu.Unlock()
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		n.must(nil, domain+".enable", nil)
	}
	n.show()
	n.load(address)
	return n
}

// show brings the tab to the front: a page that nobody sees asks for nothing.
func (n *tab) show() {
	n.t.Helper()
	n.must(nil, "Page.bringToFront", nil)
}

func (n *tab) load(address string) {
	n.t.Helper()
	for len(n.loaded) > 0 {
		<-n.loaded
	}
	n.must(nil, "Page.navigate", map[string]any{"url": address})
	select {
	case <-n.loaded:
	case <-time.After(patience):
		n.t.Fatalf("%s is not loaded after %v", address, patience)
	}
}

func (n *tab) must(result any, method string, params any) {
	n.t.Helper()
	answer, err := n.b.command(n.session, method, params)
	if err == nil && result != nil {
		err = json.Unmarshal(answer, result)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// note keeps what an event tells. It is called by the reader, which fails nothing.
func (n *tab) note(m devtoolsMessage) {
	var e struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Request struct{ Method, URL string }
		Headers map[string]string
		Entry   struct{ Level, Source, Text, URL string }
		Args    []struct {
			Value       any
			Description string
		}
		ExceptionDetails struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	json.Unmarshal(m.Params, &e)
	n.mu.Lock()
	defer n.mu.Unlock()
	switch m.Method {
	case "Page.loadEventFired":
		select {
		case n.loaded <- struct{}{}:
		default:
		}
	case "Network.requestWillBeSent":
		n.requests = append(n.requests, e.Request.Method+" "+e.Request.URL)
	case "Network.requestWillBeSentExtraInfo":
		n.sent = append(n.sent, fmt.Sprint(e.Headers))
	case "Network.webSocketCreated":
		n.faults = append(n.faults, "a web socket: "+string(m.Params))
	case "Page.javascriptDialogOpening":
		n.faults = append(n.faults, "a dialog: "+e.Message)
		go n.b.command(n.session, "Page.handleJavaScriptDialog", map[string]any{"accept": true}) // ends with its answer
	case "Runtime.exceptionThrown":
		n.faults = append(n.faults, "an exception: "+e.ExceptionDetails.Text+" "+e.ExceptionDetails.Exception.Description)
	case "Runtime.consoleAPICalled":
		if e.Type == "error" || e.Type == "warning" || e.Type == "assert" {
			n.faults = append(n.faults, fmt.Sprintf("console.%s: %v", e.Type, e.Args))
		}
	case "Log.entryAdded":
		if e.Entry.Level == "error" || e.Entry.Level == "warning" {
			n.faults = append(n.faults, fmt.Sprintf("%s %s: %s %s", e.Entry.Source, e.Entry.Level, e.Entry.Text, e.Entry.URL))
		}
	}
}

// forgive drops the faults that name all the texts: a browser reports a refused connection, and a status that is no success,
// whatever the page makes of it.
func (n *tab) forgive(texts ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.faults = slices.DeleteFunc(n.faults, func(f string) bool {
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(f, text) })
	})
}

// blameless requires that the page did nothing that none of ours may do, and asked nobody but the server.
func (n *tab) blameless(server string) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, f := range n.faults {
		n.t.Errorf("the page: %s", f)
	}
	if len(n.requests) == 0 {
		n.t.Error("the page asked for nothing")
	}
	for _, r := range n.requests {
		if _, address, _ := strings.Cut(r, " "); address != server && !strings.HasPrefix(address, server+"/") {
			n.t.Errorf("the page asked %s, which is not its server", r)
		}
	}
}

// eval runs JavaScript and returns its value; a promise is waited for.
func (n *tab) eval(script string) any {
	n.t.Helper()
	var answer struct {
		Result           struct{ Value any }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	n.must(&answer, "Runtime.evaluate", map[string]any{"expression": script, "awaitPromise": true, "returnByValue": true, "userGesture": true})
	if e := answer.ExceptionDetails; e != nil {
		n.t.Fatalf("%s: %s %s", script, e.Text, e.Exception.Description)
	}
	return answer.Result.Value
}

// until waits until an expression is true. It looks whenever the document changes.
func (n *tab) until(expression string) {
	n.t.Helper()
	ok := n.eval(fmt.Sprintf(`new Promise(resolve => {
		const watch = new MutationObserver(look);
		const late = setTimeout(() => { watch.disconnect(); resolve(false); }, %d);
		function look() {
			if (!(%s)) return false;
			watch.disconnect();
			clearTimeout(late);
			resolve(true);
			return true;
		}
		if (!look()) watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
	})`, patience.Milliseconds()*9/10, expression))
	if ok != true {
		n.t.Fatalf("it never came true that %s; the page shows:\n%v", expression, n.eval("document.body.innerText"))
	}
}

// soon is until, without waiting for the page's own next question.
func (n *tab) soon(expression string) {
	n.t.Helper()
	n.eval(`document.dispatchEvent(new Event('visibilitychange'))`)
	n.until(expression)
}

func (n *tab) text() string { return fmt.Sprint(n.eval("document.body.innerText")) }

// look sets the size of the window, in CSS pixels, and the colours that the page is asked for.
func (n *tab) look(width, height int, scheme string) {
	n.t.Helper()
	n.must(nil, "Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false})
	n.must(nil, "Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]any{"name": "prefers-color-scheme", "value": scheme}}})
}

// screenshot writes what the page shows, from its top and not all of a very long one, when -screens asks for it.
func (n *tab) screenshot(name string) {
	n.t.Helper()
	if *screens == "" {
		return
	}
	var shot struct{ Data string }
	n.must(&shot, "Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true, "clip": map[string]any{
		"x": 0, "y": 0, "scale": 1, "width": n.eval("innerWidth"), "height": n.eval("Math.min(document.documentElement.scrollHeight, 3000)"),
	}})
	data, err := base64.StdEncoding.DecodeString(shot.Data)
	if err == nil {
		err = os.MkdirAll(*screens, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(*screens, name+".png"), data, 0o644)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}
