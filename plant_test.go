//go:build unix

// Leases as others leave them, and a fake that holds one.
//
//	plant KIND [NAME [RULE...]]
//		leave a lease in the current checkout. Kinds of `unheld` are just a file. Those of `fakes` are held by a process
//		NAME ("fake" unless given), which answers, or does not, as the kind says, and which the commands for clients
//		(kill9, signal, holder) know by that name. URL, HOST, PORT, TOKEN are set from what was planted.
//
// A fake logs each request in $WORK/NAME.log as `METHOD PATH RPC-METHOD TOOL ID bearer=B session=S`, then the body on a
// line of its own. Kind `server` plays majordomus with the proof of the lease's token, and follows rules, each once:
// `WHAT=ACTION`, where WHAT is a JSON-RPC method, a tool or a path. With `WHAT*=ACTION` a rule holds for ever. Actions: drop
// (read the request, close), half (close in the middle of the answer), hang (no answer), end (an empty 200), nonsense (a
// page), goodbye (release the lease and resign, then answer), or an error: session_not_found, lease_lost, busy, too_large,
// retired, internal.
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// scriptLease is where a checkout has its lease.
const scriptLease = ".ai/local/state/mcp/server.json"

// foundLease is the lease as one finds it, written down once more: a test that used the program's own type would not notice that it changed.
type foundLease struct {
	Schema     string          `json:"schema"`
	PID        int             `json:"pid"`
	Token      string          `json:"token"`
	Root       string          `json:"root"`
	URL        *string         `json:"url"`
	StartedAt  string          `json:"started_at"`
	Executable *executableFile `json:"executable"`
	Version    string          `json:"version"`
}

type executableFile struct {
	Path  string `json:"path"`
	MTime int64  `json:"mtime"`
	Size  int64  `json:"size"`
}

func (l foundLease) text() string {
	text, _ := json.Marshal(l)
	return string(text)
}

// with is the lease with one property in another type than it has.
func (l foundLease) with(key string, value any) string {
	var all map[string]any
	json.Unmarshal([]byte(l.text()), &all)
	all[key] = value
	text, _ := json.Marshal(all)
	return string(text)
}

// unheld are leases that nobody holds, made from a whole one whose process is dead.
var unheld = map[string]func(l foundLease) string{
	"empty":    func(foundLease) string { return "" },
	"blank":    func(foundLease) string { return " \n\n" },
	"half":     func(l foundLease) string { return l.text()[:len(l.text())/2] },
	"list":     func(l foundLease) string { return "[" + l.text() + "]" },
	"twice":    func(l foundLease) string { return l.text() + "\n" + l.text() },
	"schema":   func(l foundLease) string { l.Schema = "majordomus-mcp-lease/v2"; return l.text() },
	"schema-1": func(l foundLease) string { return l.with("schema", 1) },
	"pid-text": func(l foundLease) string { return l.with("pid", "1") },
	"url-list": func(l foundLease) string { return l.with("url", []string{*l.URL}) },
	"big":      func(l foundLease) string { return l.text() + strings.Repeat(" ", 64<<10) },
	"dead":     func(l foundLease) string { return l.text() },
	"living":   func(l foundLease) string { l.PID = os.Getpid(); return l.text() },
	"unbound":  func(l foundLease) string { l.URL = nil; return l.text() },
	"future":   func(l foundLease) string { l.StartedAt = timeText(-time.Hour); return l.text() },
}

// fakes are leases that a process holds, with what it does behind its url.
var fakes = map[string]func(f *fake){
	"server":         func(f *fake) {},
	"silent":         func(f *fake) { f.Behind = "silence" },
	"unreachable":    func(f *fake) { f.Behind = "nobody" },
	"stranger":       func(f *fake) { f.Behind = "stranger" },
	"impostor":       func(f *fake) { f.Behind = "impostor" },
	"resigned":       func(f *fake) { f.Behind = "resigned" },
	"other-checkout": func(f *fake) { f.Behind = "other-checkout" },
	"starting":       func(f *fake) { f.Behind = "nobody"; f.Unbound = true },
	"abandoned":      func(f *fake) { f.Behind = "nobody"; f.Unbound = true; f.Age = time.Hour },
	"from-future":    func(f *fake) { f.Behind = "nobody"; f.Unbound = true; f.Age = -time.Hour },
	"elsewhere":      func(f *fake) { f.Lease.Root = filepath.Dir(f.Lease.Root) },
	"older":          func(f *fake) { f.Lease.Version = "0.9.0" },
	"newer":          func(f *fake) { f.Lease.Version = "9.0.0" },
	"unordered":      func(f *fake) { f.Lease.Version = "0.9.0-rc1" },
	"replaced":       func(f *fake) { f.Lease.Executable = &executableFile{Path: programPath(), MTime: 1, Size: 1} },
	"url-localhost":  func(f *fake) { f.Behind = "stranger"; f.Hostile = "http://localhost:PORT" },
	"url-path":       func(f *fake) { f.Behind = "stranger"; f.Hostile = "http://127.0.0.1:PORT/x" },
	"url-user":       func(f *fake) { f.Behind = "stranger"; f.Hostile = "http://127.0.0.1:PORT@127.0.0.1:PORT" },
	"url-scheme":     func(f *fake) { f.Behind = "stranger"; f.Hostile = "file://127.0.0.1:PORT" },
	"url-line":       func(f *fake) { f.Behind = "stranger"; f.Hostile = "http://127.0.0.1:PORT\r\nX: y" },
	"url-no-port":    func(f *fake) { f.Behind = "stranger"; f.Hostile = "http://127.0.0.1" },
	"url-port-0":     func(f *fake) { f.Behind = "stranger"; f.Hostile = "http://127.0.0.1:0" },
}

func timeText(ago time.Duration) string {
	return time.Now().Add(-ago).UTC().Format(time.RFC3339)
}

// programPath is the file that runs as majordomus, as that process itself sees it.
func programPath() string {
	path, _ := exec.LookPath("majordomus")
	path, _ = filepath.EvalSymlinks(path)
	return path
}

func cmdPlant(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 1, "plant KIND [NAME [RULE...]]")
	root, err := filepath.EvalSymlinks(ts.MkAbs("."))
	ts.Check(err)
	path := ts.MkAbs(scriptLease)
	ts.Check(os.MkdirAll(filepath.Dir(path), 0o700))
	whole := foundLease{Schema: "majordomus-mcp-lease/v1", Token: strings.Repeat("5e", 16), Root: root, StartedAt: timeText(time.Minute), Version: "(devel)"}
	setToken(ts, whole.Token)
	if text := unheld[args[0]]; text != nil && len(args) == 1 {
		gone := exec.Command("true")
		ts.Check(gone.Run())
		l, err := net.Listen("tcp", "127.0.0.1:0")
		ts.Check(err)
		l.Close()
		url := "http://" + l.Addr().String()
		whole.PID, whole.URL = gone.Process.Pid, &url
		ts.Check(os.WriteFile(path, []byte(text(whole)), 0o600))
		old := time.Now().Add(-time.Hour) // so that age is no reason to wait
		ts.Check(os.Chtimes(path, old, old))
		return
	}
	prepare := fakes[args[0]]
	if prepare == nil {
		ts.Fatalf("unknown kind %q", args[0])
	}
	name := "fake"
	if len(args) > 1 {
		name = args[1]
	}
	f := fake{Path: path, Lease: whole}
	if len(args) > 2 {
		f.Rules = args[2:]
	}
	prepare(&f)
	config, err := json.Marshal(&f)
	ts.Check(err)
	p := worldOf(ts).start(ts, name, []string{"fake", string(config)}, nil)
	p.silent = true
	setURL(ts, strings.TrimSpace(p.take(ts, "url", func(string) bool { return true })))
}

// fake is a process that holds a lease. Its fields are its argument.
type fake struct {
	Path    string // of the lease
	Lease   foundLease
	Unbound bool          // the lease has no url
	Age     time.Duration // of the lease
	Hostile string        // what the url is instead; PORT stands for the real one
	Behind  string        // what is at the url: nobody, silence, stranger, impostor, resigned, "" for a server
	Rules   []string

	mu       sync.Mutex
	sessions int
}

// runFake is the fake's main. It ends with its stdin, so that none survives the test.
func runFake() {
	var f fake
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	check(json.Unmarshal([]byte(os.Args[1]), &f))
	address, serve := f.listen(check)
	url := "http://" + address
	f.Lease.PID, f.Lease.URL = os.Getpid(), &url
	f.Lease.StartedAt = timeText(f.Age)
	if f.Hostile != "" {
		_, port, _ := net.SplitHostPort(address)
		hostile := strings.ReplaceAll(f.Hostile, "PORT", port)
		f.Lease.URL = &hostile
	}
	if f.Unbound {
		f.Lease.URL = nil
	}
	f.hold(check)
	go serve() // ends with the process
	fmt.Println(url)
	io.Copy(io.Discard, os.Stdin)
}

// hold makes the lease's file complete and locked before it has the name.
func (f *fake) hold(check func(error)) {
	temporary := fmt.Sprintf("%s.%d", f.Path, os.Getpid())
	check(os.WriteFile(temporary, []byte(f.Lease.text()), 0o600))
	file, err := os.Open(temporary)
	check(err)
	check(syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB))
	then := time.Now().Add(-f.Age)
	check(os.Chtimes(temporary, then, then))
	check(os.Rename(temporary, f.Path))
	held = file
}

// held keeps the lock of the fake's lease: a file without a reference would be closed.
var held *os.File

// listen takes a port; serve does with it what the fake is for.
func (f *fake) listen(check func(error)) (address string, serve func()) {
	if f.Behind == "nobody" { // bound and not listening: refused, and nobody else can get the port
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
		check(err)
		check(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
		name, err := syscall.Getsockname(fd)
		check(err)
		return fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port), func() {}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	if f.Behind == "silence" { // the kernel accepts, nobody answers
		return l.Addr().String(), func() {}
	}
	return l.Addr().String(), func() { check(http.Serve(l, f)) }
}

// call is what the fake knows of a JSON-RPC message.
type fakeCall struct {
	ID     json.RawMessage
	Method string
	Params struct {
		Name            string
		ProtocolVersion string
		Hold            int64 `json:"hold_ms"`
	}
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var call fakeCall
	json.Unmarshal(body, &call)
	f.mu.Lock()
	fmt.Fprintf(os.Stderr, "%s %s %s %s %s bearer=%s session=%s\n%s\n", r.Method, r.URL.Path, call.Method, call.Params.Name, call.ID,
		strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), r.Header.Get("Mcp-Session-Id"), strings.TrimSpace(string(body)))
	action := f.rule(call.Method, call.Params.Name, r.URL.Path)
	if action == "goodbye" {
		os.Remove(f.Path)
		f.Behind = "resigned"
	}
	behind := f.Behind
	f.mu.Unlock()
	switch {
	case behind == "stranger":
		io.WriteString(w, "{}")
	case r.Method == "GET" && r.URL.Path == "/":
		f.home(w, r, behind)
	case r.Method == "DELETE":
		w.WriteHeader(http.StatusNoContent)
	case action == "goodbye":
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{}}`, call.ID)
	case action != "":
		f.act(w, r, action)
	case r.URL.Path != "/mcp":
		http.NotFound(w, r)
	default:
		f.answer(w, r, call)
	}
}

// rule finds what is to be done with a request, and uses the rule up.
func (f *fake) rule(names ...string) string {
	for i, rule := range f.Rules {
		what, action, _ := strings.Cut(rule, "=")
		what, always := strings.CutSuffix(what, "*")
		if !slices.Contains(names, what) {
			continue
		}
		if !always {
			f.Rules = slices.Delete(f.Rules, i, i+1)
		}
		return action
	}
	return ""
}

// home answers the probe: who knows the token can prove it.
func (f *fake) home(w http.ResponseWriter, r *http.Request, behind string) {
	root := f.Lease.Root
	if behind == "other-checkout" {
		root += "-other"
	}
	key := f.Lease.Token
	if behind == "impostor" {
		key = "guessed"
	}
	proof := hmac.New(sha256.New, []byte(key))
	io.WriteString(proof, r.Header.Get("Majordomus-Challenge"))
	id := sha256.Sum256([]byte(root))
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{
		"name": "majordomus", "version": f.Lease.Version, "repository": filepath.Base(root),
		"repository_id": hex.EncodeToString(id[:])[:32], "leaseholder": behind != "resigned",
		"proof": hex.EncodeToString(proof.Sum(nil)),
	})
}

// refusals are the errors of a server that a fake can be told to give.
var refusals = map[string]int{
	"session_not_found": 404, "lease_lost": 409, "busy": 503, "too_large": 413, "retired": 410, "internal": 500,
}

func (f *fake) act(w http.ResponseWriter, r *http.Request, action string) {
	switch action {
	case "drop", "half":
		conn, _, _ := w.(http.Hijacker).Hijack()
		if action == "half" {
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"jsonrpc\":\"2.0\",")
		}
		conn.Close()
	case "hang":
		<-r.Context().Done()
	case "end":
	case "nonsense":
		w.Header().Set("Content-Type", "text/html")
		io.WriteString(w, "<html>")
	default:
		w.Header().Set("Content-Type", "application/json")
		if action == "busy" {
			w.Header().Set("Retry-After", "1")
		}
		w.WriteHeader(refusals[action])
		fmt.Fprintf(w, `{"jsonrpc":"2.0","error":{"code":-32600,"message":"told to","data":{"code":%q}}}`, action)
	}
}

// answer is what a server says when nothing goes wrong, no more than a bridge needs.
func (f *fake) answer(w http.ResponseWriter, r *http.Request, call fakeCall) {
	var result string
	switch call.Method {
	case "majordomus/attach":
		f.mu.Lock()
		f.sessions++
		result = fmt.Sprintf(`{"session":"%032d","peer":"p%d"}`, f.sessions, f.sessions)
		f.mu.Unlock()
	case "majordomus/watch":
		select {
		case <-r.Context().Done():
			return
		case <-time.After(time.Duration(call.Params.Hold) * time.Millisecond):
			result = `{"reason":"here"}`
		}
	case "initialize":
		result = fmt.Sprintf(`{"protocolVersion":%q,"capabilities":{"tools":{}},"serverInfo":{"name":"fake","version":"1"},"instructions":"from a fake"}`, call.Params.ProtocolVersion)
	case "tools/list":
		result = `{"tools":[]}`
	case "tools/call":
		result = fmt.Sprintf(`{"content":[{"type":"text","text":"done by the fake: %s"}]}`, call.Params.Name)
	default:
		result = "{}"
	}
	if call.ID == nil {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	answer := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":%s}`, call.ID, result)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
	io.WriteString(w, answer)
}
