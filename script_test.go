//go:build unix

// The scenarios of testdata/script: real processes on pipes and sockets, planted files, kills, races.
//
// Every script starts in a fresh git checkout, $WORK/repo, with $LEASE naming its lease file. Three rules keep them
// honest. Nothing sleeps: a command waits for an event, at most `patience`, and polls in one place, `poll`; absence is
// proved by a fence. Readers of pipes only send lines on a channel: Fatalf panics, and only the script's goroutine
// recovers. What a script started it ends, by its process id. Every line that a client wrote on stdout must have been
// JSON-RPC, none may hold the token of a lease, and what it wrote on stderr no character that steers a terminal, whatever
// the scenario was about.
//
//	mcp [-raw] [-deaf] [-full|-broken] [-rev REVISION] [-exe FILE] NAME [arg...]
//		start `majordomus mcp arg...` as client NAME, initialize it and print the result. The port is 0 unless given.
//		-raw sends nothing; -deaf neither, and reads nothing before a command takes something from it. -full gives it a
//		stderr that is full and never read, -broken one that nobody can read, which is $WORK/NAME.log otherwise.
//	[!] call NAME TOOL ['json']
//		print the result of the tool; with !, it must be a refusal: isError or a JSON-RPC error.
//	until NAME TOOL 'json' 'regexp'
//		call until the result matches, and print it.
//	send NAME TEXT|@FILE...
//		each TEXT as a line, each file as its bytes.
//	expect NAME 'regexp'
//		take the first line that matches and print it. Lines not taken stay for later commands.
//	grab VARIABLE 'regexp'
//		set a variable to what the group matches in what was printed last.
//	fence [-short] NAME
//		ping, then take and print what arrived before the answer. -short: `ID CODE` or `ID RESULT` for each.
//	holder NAME...
//		wait until the lease names one of those processes, and a url; sets HOLDER, URL, HOST, PORT and TOKEN.
//	episodes NAME 'regexp'
//		wait until the episodes that NAME sees match.
//	peers N [NAME...]
//		wait until the lists of all clients (or of those named) show N attached and nobody twice.
//	hangup [-stay|-out] NAME...
//		close stdin of all, then require exit 0 of each and print what they still wrote. -stay: require that it has
//		noticed, and serves on. -out: close their stdout first and send messages, whose answers have nowhere to go.
//		-unread: what they wrote last may be cut, since they could not wait for ever for a reader.
//	kill9 NAME..., signal NAME SIGNAL, status NAME SIGNAL|CODE
//		SIGKILL and reap; send a signal; wait for the end and compare how it ended.
//	race N [KIND]
//		-rounds times: N clients let go at one instant (with `plant KIND` before), one server, N peers in each list.
//	[!] waitfile [-count N] FILE ['regexp']
//		wait until the file is there (or gone), or until its text matches, N times. Logs are written behind a program's
//		back, so they are waited for, not looked at.
//	bytes FILE PART...
//		write a file of parts with Go's escapes; `*N` repeats the part before it, {host} is $HOST.
//	perm MODE FILE
//		compare the permission bits.
//
// http and raw are in wire_test.go, plant in plant_test.go.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/testscript"
)

var (
	rounds = flag.Int("rounds", 3, "rounds of each race; their long form is 50")
)

func TestMain(m *testing.M) {
	// Scripts wait more than they work: this many of them keep the processors busy. -parallel says otherwise.
	flag.Set("test.parallel", strconv.Itoa(min(12*runtime.GOMAXPROCS(0), 48)))
	testscript.Main(suite{m}, map[string]func(){"majordomus": runProgram, "fake": runFake})
}

// A suite is the tests alone, without the programs that the test binary also is.
type suite struct{ *testing.M }

// Run undoes what nohup, or a shell that puts a job into the background, has told the tests to ignore: their processes
// would inherit it, and those that are to die of a signal would not. They do inherit it from a script that says so.
func (s suite) Run() int {
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	return s.M.Run()
}

// runProgram is the process under test, with the test hooks that a script's environment sets.
//
// VERSION is the version it takes itself for. WAITS=FILE gives it the tools of waiter_test.go. For schedules it is always
// the time that stands in CLOCK=FILE. PATIENCE is how long a spawned peer may take to attach. STALL=HOOK stops it at a hook, once: it makes $WORK/stalled and goes on when
// that is gone. A racer first waits at the gate: it says on descriptor 4 that it is there, and 3 ends when all are let go;
// main sees neither.
func runProgram() {
	version = cmp.Or(os.Getenv("VERSION"), version)
	stall := sync.OnceFunc(func() {
		mark := filepath.Join(os.Getenv("WORK"), "stalled")
		os.WriteFile(mark, nil, 0o600)
		for !poll(patience, func() bool { _, err := os.Lstat(mark); return err != nil }) {
			// until the script goes on, however long that takes: what it started ends with it
		}
	})
	switch os.Getenv("STALL") {
	case "create":
		testHookBeforeCreate = stall
	case "takeover":
		testHookBeforeTakeOver = stall
	case "publish":
		testHookBeforePublish = stall
	case "watch":
		testHookBeforeWatch = stall
	}
	if file := os.Getenv("CLOCK"); file != "" {
		testHookClock = fileClock(file)
	}
	testHookSpawnPatience, _ = time.ParseDuration(os.Getenv("PATIENCE"))
	if file := os.Getenv("WAITS"); file != "" {
		addWaiter(file)
	}
	if os.Getenv("GATE") != "" {
		os.Unsetenv("GATE")
		gate, ready := os.NewFile(3, "gate"), os.NewFile(4, "ready")
		ready.Write([]byte{1})
		ready.Close()
		io.Copy(io.Discard, gate)
		gate.Close()
	}
	main()
}

func TestScript(t *testing.T) {
	t.Parallel()
	mark := "SUITE=" + strconv.Itoa(os.Getpid())
	t.Run("run", func(t *testing.T) {
		// Every script has its repository from this one: git's three commands for each would be a tenth of the suite's time.
		root := t.TempDir()
		gitIn(t, root, "init", "-q", "-b", "main")
		gitIn(t, root, "commit", "-q", "--allow-empty", "-m", "start")
		fresh := os.DirFS(filepath.Join(root, ".git"))
		testscript.Run(t, testscript.Params{
			Dir:                 filepath.Join("testdata", "script"),
			Setup:               func(env *testscript.Env) error { return setupScript(env, mark, fresh) },
			Condition:           scriptCondition,
			UpdateScripts:       *update,
			RequireExplicitExec: true,
			RequireUniqueNames:  true,
			Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
				"bytes": cmdBytes, "call": cmdCall, "closed": cmdClosed, "episodes": cmdEpisodes, "expect": cmdExpect, "fence": cmdFence,
				"grab": cmdGrab, "until": cmdUntil, "hangup": cmdHangup,
				"holder": cmdHolder, "http": cmdHTTP, "kill9": cmdKill9, "mcp": cmdMCP, "peers": cmdPeers,
				"perm": cmdPerm, "plant": cmdPlant, "race": cmdRace, "raw": cmdRaw, "send": cmdSend,
				"signal": cmdSignal, "status": cmdStatus, "waitfile": cmdWaitfile,
			},
		})
	})
	t.Run("nothing left", func(t *testing.T) { nothingLeft(t, mark) })
}

// nothingLeft finds processes of this run by a variable that all of them inherit, those too that the program started.
func nothingLeft(t *testing.T, mark string) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("needs /proc to see the environment of processes; run it on Linux")
	}
	var left []string
	gone := poll(patience, func() bool {
		left = nil
		files, _ := filepath.Glob("/proc/[0-9]*/environ")
		for _, file := range files {
			env, _ := os.ReadFile(file)
			if bytes.Contains(append([]byte{0}, env...), []byte("\x00"+mark+"\x00")) {
				line, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
				left = append(left, filepath.Base(filepath.Dir(file))+" "+strings.ReplaceAll(string(line), "\x00", " "))
			}
		}
		return left == nil
	})
	if gone {
		return
	}
	t.Errorf("still running after all scripts have ended: %q", left)
}

func scriptCondition(word string) (bool, error) {
	if word == "root" {
		return os.Getuid() == 0, nil
	}
	return false, fmt.Errorf("unknown condition %q", word)
}

// world is what one script has made: its processes, by name.
type world struct {
	work  string
	names []string // of the variables that reach the processes, for a command cannot list the environment
	tb    testing.TB
	procs map[string]*proc

	tokens []string // of the leases that were seen: no process writes one anywhere but into a lease
}

type worldKey struct{}

func worldOf(ts *testscript.TestScript) *world { return ts.Value(worldKey{}).(*world) }

// setupScript makes the checkout. The names of the environment are those set here and those that the script's text sets.
func setupScript(env *testscript.Env, mark string, fresh fs.FS) error {
	repo := filepath.Join(env.WorkDir, "repo")
	env.Cd = repo
	env.Vars = append(env.Vars, mark, "HOME="+env.WorkDir, "GORACE=atexit_sleep_ms=10",
		"LEASE="+filepath.Join(repo, ".ai", "local", "state", "mcp", "server.json"),
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=test", "GIT_AUTHOR_EMAIL=test@example.com",
		"GIT_COMMITTER_NAME=test", "GIT_COMMITTER_EMAIL=test@example.com")
	w := &world{work: env.WorkDir, tb: env.T().(testing.TB), procs: map[string]*proc{}}
	for _, v := range env.Vars {
		name, _, _ := strings.Cut(v, "=")
		w.names = append(w.names, name)
	}
	script, err := os.ReadFile(filepath.Join("testdata", "script", strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")+".txtar"))
	if err != nil {
		return err
	}
	for _, line := range regexp.MustCompile(`(?m)^(?:\[\S+\] )?env .*`).FindAllString(string(script), -1) {
		for _, set := range regexp.MustCompile(`\s(\w+)=`).FindAllStringSubmatch(line, -1) {
			w.names = append(w.names, set[1])
		}
	}
	env.Values[worldKey{}] = w
	env.Defer(w.end)
	env.Defer(func() { killSpawned(env.WorkDir) })
	if err := os.MkdirAll(repo, 0o755); err != nil {
		return err
	}
	return os.CopyFS(filepath.Join(repo, ".git"), fresh)
}

// environ is the environment of a process that the script starts now. A variable set to nothing is not passed.
func (w *world) environ(ts *testscript.TestScript) []string {
	env := []string{"PWD=" + ts.MkAbs(".")}
	for _, name := range w.names {
		if value := ts.Getenv(name); value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// until asks until there is no complaint any more.
func until(ts *testscript.TestScript, complaint func() string) {
	last := ""
	if !poll(patience, func() bool { last = complaint(); return last == "" }) {
		ts.Fatalf("after %v: %s", patience, last)
	}
}

// proc is a process under a name: a client's majordomus, or a fake.
type proc struct {
	name          string
	world         *world
	cmd           *exec.Cmd
	stdin, stdout *os.File      // our ends
	lines         chan string   // its stdout, newlines included; closed at the end of it
	kept          []string      // lines read while another was looked for
	dead          chan struct{} // closed when it has been reaped
	log           string
	listen        func() // reads stdout from now on
	ids           int    // given to requests of ours
	killed        bool   // its last line may be cut
	silent        bool   // its client has gone
}

// start runs argv under a name, in the script's directory. Its stderr is a file, so that no goroutine stands between.
func (w *world) start(ts *testscript.TestScript, name string, argv []string, prepare func(*exec.Cmd)) *proc {
	if w.procs[name] != nil {
		ts.Fatalf("there was a process %q already", name)
	}
	path, err := exec.LookPath(argv[0]) // testscript put its directory first
	ts.Check(err)
	p := &proc{name: name, world: w, lines: make(chan string, 1<<15), dead: make(chan struct{}), log: filepath.Join(w.work, name+".log")}
	log, err := os.Create(p.log)
	ts.Check(err)
	defer log.Close()
	in, stdin, err := os.Pipe()
	ts.Check(err)
	defer in.Close()
	stdout, out, err := os.Pipe()
	ts.Check(err)
	defer out.Close()
	p.stdin, p.stdout = stdin, stdout
	p.cmd = exec.Command(path, argv[1:]...)
	p.cmd.Dir, p.cmd.Env = ts.MkAbs("."), w.environ(ts)
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = in, out, log
	if prepare != nil {
		prepare(p.cmd)
	}
	ts.Check(p.cmd.Start())
	w.procs[name] = p
	p.listen = sync.OnceFunc(func() { go p.read() }) // ends when the last writer of stdout is gone, or end closes our end
	go func() {                                      // ends when the process does
		p.cmd.Wait()
		close(p.dead)
	}()
	return p
}

func (p *proc) read() {
	defer close(p.lines)
	for r := bufio.NewReader(p.stdout); ; {
		line, err := r.ReadString('\n')
		if line != "" {
			p.lines <- line
		}
		if err != nil {
			return
		}
	}
}

// end kills and reaps whatever the script left, and holds every process to what no scenario may excuse.
func (w *world) end() {
	for _, p := range w.procs {
		if p.alive() {
			p.killed = true
			p.cmd.Process.Kill()
		}
		<-p.dead
		p.stdin.Close()
		p.stdout.Close()
		p.listen()
		for line := range p.lines {
			p.kept = append(p.kept, line)
		}
		for _, line := range p.kept {
			if err := p.protocol(line); err != nil {
				w.tb.Error(err)
			}
		}
		log, _ := os.ReadFile(p.log)
		if regexp.MustCompile(`DATA RACE|(?m)^(panic|fatal error):`).Match(log) {
			w.tb.Errorf("%s broke down", p.name)
		} else if bad := rawCharacter.Find(log); (bad != nil || !utf8.Valid(log)) && !p.fake() {
			w.tb.Errorf("%s wrote %q on stderr, or what is no text", p.name, bad)
		}
		if w.tells(string(log)) && !p.fake() {
			w.tb.Errorf("%s wrote a token on stderr", p.name)
		}
		if w.tb.Failed() {
			w.tb.Logf("stderr of %s:\n%s", p.name, clipped(string(log), 4000))
		}
	}
}

// rawCharacter is what no line for people may hold.
var rawCharacter = regexp.MustCompile(`[\x00-\x09\x0b-\x1f\x7f\x{80}-\x{9f}\x{2028}\x{2029}\p{Cf}]`)

// tells says whether a text holds the token of a lease.
func (w *world) tells(text string) bool {
	return slices.ContainsFunc(w.tokens, func(token string) bool { return strings.Contains(text, token) })
}

func (p *proc) fake() bool { return filepath.Base(p.cmd.Path) == "fake" }

// protocol says what is wrong with a line of stdout. A fake may write what it likes.
func (p *proc) protocol(line string) error {
	whole := strings.HasSuffix(line, "\n")
	if p.fake() || !whole && p.killed {
		return nil
	}
	if p.world.tells(line) {
		return fmt.Errorf("%s told a token: %s", p.name, clipped(line, 300))
	}
	if !whole || !json.Valid([]byte(line)) || line[0] != '{' && line[0] != '[' {
		return fmt.Errorf("%s wrote on stdout, where only protocol may be: %q", p.name, clipped(line, 300))
	}
	return nil
}

func (p *proc) alive() bool {
	select {
	case <-p.dead:
		return false
	default:
		return true
	}
}

// wait waits for the end of the process and says how it ended: "0", "2", "SIGTERM".
func (p *proc) wait(ts *testscript.TestScript) string {
	select {
	case <-p.dead:
	case <-time.After(patience):
		ts.Fatalf("%s has not ended after %v", p.name, patience)
	}
	status := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	for name, signal := range signalNames {
		if status.Signaled() && status.Signal() == signal {
			return name
		}
	}
	return strconv.Itoa(status.ExitStatus())
}

var signalNames = map[string]syscall.Signal{
	"TERM": syscall.SIGTERM, "INT": syscall.SIGINT, "HUP": syscall.SIGHUP, "KILL": syscall.SIGKILL,
	"STOP": syscall.SIGSTOP, "CONT": syscall.SIGCONT, "PIPE": syscall.SIGPIPE,
}

func (p *proc) write(ts *testscript.TestScript, data []byte) {
	p.stdin.SetWriteDeadline(time.Now().Add(patience))
	if _, err := p.stdin.Write(data); err != nil {
		ts.Fatalf("writing to %s: %v", p.name, err)
	}
}

// take waits for the first line that is wanted and removes it; the others stay, in order.
func (p *proc) take(ts *testscript.TestScript, what string, wanted func(string) bool) string {
	if i := slices.IndexFunc(p.kept, wanted); i >= 0 {
		line := p.kept[i]
		p.kept = slices.Delete(p.kept, i, i+1)
		return line
	}
	p.listen()
	timeout := time.After(patience)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				ts.Fatalf("%s has closed its output; wanted %s, got %s", p.name, what, clipped(strings.Join(p.kept, ""), 2000))
			}
			ts.Check(p.protocol(line))
			if wanted(line) {
				return line
			}
			p.kept = append(p.kept, line)
		case <-timeout:
			ts.Fatalf("%s: no %s after %v, but %s", p.name, what, patience, clipped(strings.Join(p.kept, ""), 2000))
		}
	}
}

// heard is a response as it came; the parts keep their bytes.
type heard struct{ ID, Result, Error json.RawMessage }

// ask sends a request of ours and waits for its answer, whatever else arrives.
func (p *proc) ask(ts *testscript.TestScript, method, params string) (a heard) {
	p.ids++
	id := fmt.Sprintf(`"ask-%d"`, p.ids)
	p.write(ts, fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"method":%q,"params":%s}`+"\n", id, method, params))
	p.take(ts, "answer to "+method, func(line string) bool {
		a = heard{}
		return json.Unmarshal([]byte(line), &a) == nil && string(a.ID) == id
	})
	return a
}

func (p *proc) initialize(ts *testscript.TestScript, revision string) heard {
	a := p.ask(ts, "initialize", fmt.Sprintf(`{"protocolVersion":%q,"capabilities":{},"clientInfo":{"name":%q,"version":"1"}}`, revision, p.name))
	p.write(ts, []byte(`{"jsonrpc":"2.0","method":"notifications/initialized"}`+"\n"))
	return a
}

// clipped keeps a text fit to be read in a failure.
func clipped(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return s[:most] + fmt.Sprintf("… (%d bytes)", len(s))
}
