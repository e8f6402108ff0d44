//go:build unix

// What scenarios do with processes and files; script_test.go lists it.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// takeOptions takes the leading flags off the arguments; those whose names end in = take a value.
func takeOptions(ts *testscript.TestScript, args []string, known ...string) (map[string]string, []string) {
	set := map[string]string{}
	for len(args) > 0 && strings.HasPrefix(args[0], "-") {
		switch name := args[0]; {
		case slices.Contains(known, name+"=") && len(args) > 1:
			set[name] = strings.TrimPrefix(set[name]+"\n"+args[1], "\n")
			args = args[2:]
		case slices.Contains(known, name):
			set[name] = "yes"
			args = args[1:]
		default:
			ts.Fatalf("unknown option %s", name)
		}
	}
	return set, args
}

// checkUsage refuses a line that is no use of its command; a `!` that would mean nothing is one.
func checkUsage(ts *testscript.TestScript, bad bool, text string) {
	if bad {
		ts.Fatalf("usage: %s", text)
	}
}

func named(ts *testscript.TestScript, name string) *proc {
	p := worldOf(ts).procs[name]
	if p == nil {
		ts.Fatalf("there is no process %q", name)
	}
	return p
}

func cmdMCP(ts *testscript.TestScript, neg bool, args []string) {
	set, args := takeOptions(ts, args, "-raw", "-deaf", "-full", "-broken", "-rev=", "-exe=")
	checkUsage(ts, neg || len(args) < 1, "mcp [-raw] [-deaf] [-full|-broken] [-rev REVISION] [-exe FILE] NAME [arg...]")
	argv := []string{"majordomus", "mcp"}
	if set["-exe"] != "" {
		argv[0] = ts.MkAbs(set["-exe"])
	}
	if !slices.ContainsFunc(args, func(s string) bool { return strings.Contains(s, "-http-port") }) {
		argv = append(argv, "--http-port", "0")
	}
	p := worldOf(ts).start(ts, args[0], append(argv, args[1:]...), func(cmd *exec.Cmd) {
		switch {
		case set["-full"] != "":
			cmd.Stderr = fullPipe(ts)
		case set["-broken"] != "":
			cmd.Stderr = brokenPipe(ts)
		}
	})
	if set["-deaf"] != "" {
		return
	}
	p.listen()
	if set["-raw"] == "" {
		revision := set["-rev"]
		if revision == "" {
			revision = "2025-06-18"
		}
		fmt.Fprintf(ts.Stdout(), "%s\n", p.initialize(ts, revision).Result)
	}
}

// fullPipe is a pipe that takes not one byte more and is never read; its reading end stays open until the script ends.
func fullPipe(ts *testscript.TestScript) *os.File {
	r, w, err := os.Pipe()
	ts.Check(err)
	ts.Defer(func() { r.Close(); w.Close() })
	conn, err := w.SyscallConn()
	ts.Check(err)
	ts.Check(conn.Write(func(fd uintptr) bool {
		for err = nil; err == nil || err == syscall.EINTR; {
			_, err = syscall.Write(int(fd), make([]byte, 1))
		}
		return true
	}))
	if err != syscall.EAGAIN {
		ts.Fatalf("filling a pipe: %v", err)
	}
	return w
}

// brokenPipe is a pipe whose reading end is closed.
func brokenPipe(ts *testscript.TestScript) *os.File {
	r, w, err := os.Pipe()
	ts.Check(err)
	r.Close()
	ts.Defer(func() { w.Close() })
	return w
}

func cmdCall(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, len(args) != 2 && len(args) != 3, "[!] call NAME TOOL ['json']")
	arguments := "{}"
	if len(args) == 3 {
		arguments = args[2]
	}
	a := named(ts, args[0]).ask(ts, "tools/call", fmt.Sprintf(`{"name":%q,"arguments":%s}`, args[1], arguments))
	fmt.Fprintf(ts.Stdout(), "%s\n", slices.Concat(a.Result, a.Error))
	var result struct {
		IsError bool `json:"isError"`
	}
	json.Unmarshal(a.Result, &result)
	if refused := result.IsError || a.Error != nil; refused != neg {
		ts.Fatalf("refused: %v", refused)
	}
}

func cmdSend(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 2, "send NAME TEXT|@FILE...")
	p := named(ts, args[0])
	for _, arg := range args[1:] {
		if file, ok := strings.CutPrefix(arg, "@"); ok {
			p.write(ts, []byte(ts.ReadFile(file)))
		} else {
			p.write(ts, []byte(arg+"\n"))
		}
	}
}

func cmdExpect(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 2, "expect NAME 'regexp'")
	re, err := regexp.Compile(args[1])
	ts.Check(err)
	io.WriteString(ts.Stdout(), named(ts, args[0]).take(ts, "line that matches "+args[1], re.MatchString))
}

func cmdFence(ts *testscript.TestScript, neg bool, args []string) {
	set, args := takeOptions(ts, args, "-short")
	checkUsage(ts, neg || len(args) != 1, "fence [-short] NAME")
	p := named(ts, args[0])
	if a := p.ask(ts, "ping", "{}"); string(a.Result) != "{}" {
		ts.Fatalf("ping answered %s%s", a.Result, a.Error)
	}
	out := ts.Stdout() // also when nothing came, so that `! stdout .` speaks of the fence
	for _, line := range p.kept {
		if set["-short"] != "" {
			line = shortened(line) + "\n"
		}
		io.WriteString(out, line)
	}
	p.kept = nil
}

// shortened is what a client can rely on in an answer: the id, and the result or the error's number.
func shortened(line string) string {
	var batch []json.RawMessage
	if json.Unmarshal([]byte(line), &batch) == nil {
		var all []string
		for _, one := range batch {
			all = append(all, shortened(string(one)))
		}
		return "[" + strings.Join(all, ", ") + "]"
	}
	var a heard
	json.Unmarshal([]byte(line), &a)
	if a.ID == nil {
		a.ID = json.RawMessage("no id")
	}
	var failure struct{ Code int }
	if json.Unmarshal(a.Error, &failure) == nil && a.Error != nil {
		return fmt.Sprintf("%s %d", a.ID, failure.Code)
	}
	return fmt.Sprintf("%s %s", a.ID, a.Result)
}

// cmdHolder waits until the lease of the current checkout names one of the processes and a url.
func cmdHolder(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 1, "holder NAME...")
	var lease foundLease
	until(ts, func() string {
		lease = foundLease{}
		text, err := os.ReadFile(ts.MkAbs(scriptLease))
		if err != nil {
			return err.Error()
		}
		if err := json.Unmarshal(text, &lease); err == nil && lease.URL != nil {
			for _, name := range args {
				if p := named(ts, name); p.alive() && p.cmd.Process.Pid == lease.PID {
					ts.Setenv("HOLDER", name)
					return ""
				}
			}
		}
		return fmt.Sprintf("the lease does not name %s and a url: %s", args, text)
	})
	setURL(ts, *lease.URL)
	setToken(ts, lease.Token)
}

func setToken(ts *testscript.TestScript, token string) {
	ts.Setenv("TOKEN", token)
	worldOf(ts).tokens = append(worldOf(ts).tokens, token)
}

func setURL(ts *testscript.TestScript, url string) {
	host := strings.TrimPrefix(url, "http://")
	_, port, _ := strings.Cut(host, ":")
	ts.Setenv("URL", url)
	ts.Setenv("HOST", host)
	ts.Setenv("PORT", port)
}

// seenBoard is what a client sees of its own checkout.
type seenBoard struct {
	Count int
	Peers []struct {
		ID       string
		Attached bool
		Client   struct{ Name string }
	}
}

func cmdPeers(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 1, "peers N [NAME...]")
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	var clients []*proc
	for _, name := range args[1:] {
		clients = append(clients, named(ts, name))
	}
	for _, p := range worldOf(ts).procs {
		if len(args) == 1 && p.alive() && !p.silent {
			clients = append(clients, p)
		}
	}
	if clients == nil {
		ts.Fatalf("nobody is left to ask")
	}
	sameBoard(ts, clients, n)
}

// sameBoard waits until each client's list has n attached, and requires that no client's name is there twice, dead or alive.
func sameBoard(ts *testscript.TestScript, clients []*proc, n int) {
	for _, p := range clients {
		until(ts, func() string {
			a := p.ask(ts, "tools/call", `{"name":"majordomus_peers","arguments":{"checkouts":"this"}}`)
			var result struct{ StructuredContent seenBoard }
			if err := json.Unmarshal(a.Result, &result); err != nil {
				ts.Fatalf("%s: peers answered %s%s", p.name, a.Result, a.Error)
			}
			var names []string
			for _, peer := range result.StructuredContent.Peers {
				if slices.Contains(names, peer.Client.Name) {
					return fmt.Sprintf("%s sees %q twice: %s", p.name, peer.Client.Name, a.Result)
				}
				names = append(names, peer.Client.Name)
			}
			if result.StructuredContent.Count != n {
				return fmt.Sprintf("%s sees %d, not %d: %s", p.name, result.StructuredContent.Count, n, names)
			}
			return ""
		})
	}
}

func cmdHangup(ts *testscript.TestScript, neg bool, args []string) {
	set, args := takeOptions(ts, args, "-stay", "-out", "-unread")
	checkUsage(ts, neg || len(args) < 1, "hangup [-stay|-out|-unread] NAME...")
	before := -1
	if set["-stay"] != "" {
		before = attachedNow(ts)
	}
	for _, name := range args {
		p := named(ts, name)
		p.silent, p.killed = true, set["-unread"] != ""
		if set["-out"] != "" {
			p.stdout.Close()
			until(ts, func() string { // a process that is just being started has a copy of our end, and hides that it is gone
				p.stdin.WriteString(`{"jsonrpc":"2.0","id":"nobody reads this","method":"ping"}` + "\n")
				if p.alive() {
					return name + " has not ended"
				}
				return ""
			})
		}
		p.stdin.Close()
	}
	if before >= 0 { // its peer leaves the board when it has noticed; that it serves on is then no accident of timing
		until(ts, func() string {
			if now := attachedNow(ts); now >= before {
				return fmt.Sprintf("%d attached, as before", now)
			}
			return ""
		})
		return
	}
	for _, name := range args {
		p := named(ts, name)
		if how := p.wait(ts); how != "0" {
			ts.Fatalf("%s ended with %s", name, how)
		}
		p.listen()
		for line := range p.lines {
			p.kept = append(p.kept, line)
		}
		io.WriteString(ts.Stdout(), strings.Join(p.kept, ""))
	}
}

// attachedNow asks the server at $URL how many are attached.
func attachedNow(ts *testscript.TestScript) int {
	var b seenBoard
	_, body := sendHTTP(ts, "GET", "/api/v1/peers?checkouts=this", nil, "")
	ts.Check(json.Unmarshal([]byte(body), &b))
	return b.Count
}

func cmdKill9(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 1, "kill9 NAME...")
	for _, name := range args {
		p := named(ts, name)
		p.killed = true
		ts.Check(p.cmd.Process.Kill())
		p.wait(ts)
	}
}

func cmdSignal(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 2 || signalNames[args[1]] == 0, "signal NAME TERM|INT|HUP|KILL|STOP|CONT|PIPE")
	p := named(ts, args[0])
	p.killed = p.killed || args[1] == "KILL"
	ts.Check(p.cmd.Process.Signal(signalNames[args[1]]))
	if args[1] == "STOP" { // a thread that has not had its turn since has not noticed
		until(ts, func() string {
			threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid)) // none where there is no /proc
			for _, thread := range threads {
				if text, _ := os.ReadFile(thread); strings.Contains(string(text), ") R ") || strings.Contains(string(text), ") S ") {
					return args[0] + " runs on"
				}
			}
			return ""
		})
	}
}

func cmdStatus(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 2, "status NAME SIGNAL|CODE")
	if how := named(ts, args[0]).wait(ts); how != args[1] {
		ts.Fatalf("%s ended with %s", args[0], how)
	}
}

func cmdWaitfile(ts *testscript.TestScript, neg bool, args []string) {
	set, args := takeOptions(ts, args, "-count=")
	checkUsage(ts, len(args) < 1 || len(args) > 2 || neg && len(args) > 1, "[!] waitfile [-count N] FILE ['regexp']")
	want := -1
	if set["-count"] != "" {
		var err error
		want, err = strconv.Atoi(set["-count"])
		ts.Check(err)
	}
	re := regexp.MustCompile("")
	if len(args) == 2 {
		re = regexp.MustCompile("(?m)" + args[1])
	}
	until(ts, func() string {
		_, err := os.Lstat(ts.MkAbs(args[0]))
		switch {
		case neg && err == nil:
			return args[0] + " is still there"
		case !neg && err != nil:
			return err.Error()
		case !neg && len(args) == 2:
			text := ts.ReadFile(args[0])
			switch found := len(re.FindAllStringIndex(text, -1)); {
			case want >= 0 && found > want:
				ts.Fatalf("%s has %d matches of %s", args[0], found, args[1])
			case found < max(want, 1):
				return fmt.Sprintf("%s has %d matches of %s: %s", args[0], found, args[1], clipped(text, 2000))
			}
		}
		return ""
	})
}

func cmdBytes(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 2, "bytes FILE PART...")
	text := strings.Join(parts(ts, args[1:]), "")
	ts.Check(os.MkdirAll(filepath.Dir(ts.MkAbs(args[0])), 0o700))
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text), 0o600))
}

// parts reads arguments with Go's escapes, where a quotation mark stands for itself, {host} for $HOST, and *N for N times
// the part before it.
func parts(ts *testscript.TestScript, args []string) (all []string) {
	for _, arg := range args {
		if n, err := strconv.Atoi(strings.TrimPrefix(arg, "*")); err == nil && arg[0] == '*' {
			all = append(all, slices.Repeat(all[len(all)-1:], n-1)...)
			continue
		}
		text, err := strconv.Unquote(`"` + strings.ReplaceAll(arg, `"`, `\"`) + `"`)
		ts.Check(err)
		all = append(all, strings.ReplaceAll(text, "{host}", ts.Getenv("HOST")))
	}
	return all
}

func cmdPerm(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 2, "perm MODE FILE")
	info, err := os.Lstat(ts.MkAbs(args[1]))
	ts.Check(err)
	if mode := strconv.FormatUint(uint64(info.Mode().Perm()), 8); mode != args[0] {
		ts.Fatalf("%s has mode %s", args[1], mode)
	}
}

func cmdRace(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 1 || len(args) > 2, "race N [KIND]")
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	for round := range *rounds {
		if len(args) == 2 {
			cmdPlant(ts, false, args[1:])
		}
		raceOnce(ts, round, n, len(args) == 2)
	}
}

// raceOnce lets n clients go at one instant and requires that one of them serves all, and that only a planted lease is
// worth a warning.
func raceOnce(ts *testscript.TestScript, round, n int, planted bool) {
	gate, open, err := os.Pipe()
	ts.Check(err)
	ready, there, err := os.Pipe()
	ts.Check(err)
	var clients []*proc
	for i := range n {
		p := worldOf(ts).start(ts, fmt.Sprintf("race%d.%d.%d", len(worldOf(ts).procs), round, i), []string{"majordomus", "mcp", "--http-port", "0"}, func(cmd *exec.Cmd) {
			cmd.Env = append(cmd.Env, "GATE=1")
			cmd.ExtraFiles = []*os.File{gate, there}
		})
		clients = append(clients, p)
	}
	gate.Close()
	there.Close()
	ready.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(ready, make([]byte, n)); err != nil {
		ts.Fatalf("waiting for the racers: %v", err)
	}
	ready.Close()
	open.Close()

	for _, p := range clients {
		p.initialize(ts, "2025-06-18")
	}
	sameBoard(ts, clients, n)
	var roles, warnings int
	for _, p := range clients {
		log := ts.ReadFile(p.log)
		roles += strings.Count(log, "serving this checkout")
		warnings += strings.Count(log, "warning: ")
	}
	if expected := map[bool]int{false: 0, true: 1}[planted]; roles != 1 || warnings != expected {
		ts.Fatalf("%d serve, %d warnings", roles, warnings)
	}
	var names []string
	for _, p := range clients {
		names = append(names, p.name)
	}
	cmdHangup(ts, false, names)
	cmdWaitfile(ts, true, []string{scriptLease})
}
