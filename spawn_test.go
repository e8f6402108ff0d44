//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// allowCommands writes a configuration that allows them, and hides tmux.
func allowCommands(t *testing.T, commands ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.json")
	var c config
	c.Spawn.Commands = commands
	must(t, os.WriteFile(file, mustJSON(c), 0o600))
	t.Setenv("MAJORDOMUS_CONFIG", file)
	bin := t.TempDir()
	for _, tool := range []string{"sh", "cat", "sleep"} {
		path, err := exec.LookPath(tool)
		must(t, err)
		must(t, os.Symlink(path, filepath.Join(bin, tool)))
	}
	t.Setenv("PATH", bin)
}

// spawnCheckout is a checkout with a HEAD: a directory without one is none to spawn in.
func spawnCheckout(t *testing.T) string {
	t.Helper()
	root := newCheckout(t)
	must(t, os.WriteFile(filepath.Join(root, ".git", "HEAD"), []byte("ref: refs/heads/main\n"), 0o600))
	return root
}

var spawnRounds = flag.Int("spawns", 50, "processes that TestSpawnGrowth spawns; its long form is 1000")

// Those that have ended leave nothing behind, however many they were.
func TestSpawnGrowth(t *testing.T) {
	allowCommands(t, "exit 0")
	root := spawnCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	descriptors := func() int {
		open, _ := os.ReadDir("/dev/fd")
		return len(open)
	}
	spawn := func(n int) {
		for range n {
			must2(t)(s.spawnPeer(a, spawnInput{Path: ".", Command: "exit 0", Circle: "default", Message: "hello"}))
			read(t, s, a)
		}
		eventually(t, "all ended", func() bool { return len(s.mesh.spawnedList()) == 0 })
		read(t, s, a)
	}
	spawn(spawnLimit)
	open, running := descriptors(), runtime.NumGoroutine()
	spawn(*spawnRounds - spawnLimit)
	eventually(t, "as few goroutines as before", func() bool { return runtime.NumGoroutine() <= running })
	eventually(t, "as few descriptors as before", func() bool { return descriptors() <= open })
	s.mesh.journal.drain()
	s.mesh.mu.Lock()
	defer s.mesh.mu.Unlock()
	if st := s.mesh.state; len(st.boxes) > 0 || len(st.names) > 2*spawnLimit || len(st.carried) > 0 || len(s.mesh.parcels) > 0 {
		t.Errorf("%d mailboxes, %d names, %d and %d parcels are left", len(st.boxes), len(st.names), len(st.carried), len(s.mesh.parcels))
	}
	if j := s.mesh.journal; j.size > 3*(j.alive+journalGrowth) {
		t.Errorf("the journal has %d bytes, of which %d were alive", j.size, j.alive)
	}
	if zombies := children(t, "Z"); len(zombies) > 0 {
		t.Errorf("zombies: %v", zombies)
	}
	files, _ := filepath.Glob(filepath.Join(root, ".ai/local/state/mcp/spawn/*"))
	if len(files) > spawnLimit {
		t.Errorf("%d files: %q", len(files), files)
	}
}

// What tmux writes into the log after the end of a process is told of, if it is not much later.
func TestSpawnLateLog(t *testing.T) {
	allowCommands(t, "exit 0")
	s := meshServer(t, spawnCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	p := spawned{ID: "spawn-00000000", Box: boardName{"default", "x"}, By: boardName{"default", "a"}, Began: millis(), PID: 1 << 30, Window: "@1", Log: filepath.Join(t.TempDir(), "x.log")}
	s.mesh.commit(&entry{Spawn: &p}, synced)
	if s.lookAfter(&p, true) {
		t.Error("it did not wait for the log")
	}
	must(t, os.WriteFile(p.Log, []byte("no such model\n"), 0o600))
	if !s.lookAfter(&p, true) {
		t.Error("it waits for more")
	}
	wantTexts(t, read(t, s, a), `@x, which you spawned, has ended without attaching; the last line of its output: "no such model"`)
	must(t, os.Remove(p.Log))
	s.mesh.commit(&entry{Spawn: &p}, synced)
	if !s.lookAfter(&p, false) {
		t.Error("it waits for ever")
	}
	wantTexts(t, read(t, s, a), "@x, which you spawned, has ended without attaching; it has written nothing")

	// Nobody is refused a place that such a one still has.
	for i := range spawnLimit {
		p.ID = fmt.Sprintf("spawn-%08x", i)
		s.mesh.commit(&entry{Spawn: &p}, synced)
	}
	must2(t)(s.spawnPeer(a, spawnInput{Path: ".", Command: "exit 0", Circle: "default"}))
}

// No more than the limit are alive.
func TestSpawnLimit(t *testing.T) {
	allowCommands(t, "sleep 600")
	root := spawnCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	for i := range spawnLimit {
		out, err := s.spawnPeer(a, spawnInput{Path: ".", Command: "sleep 600", Circle: "default"})
		must(t, err)
		if want := "spawned @" + numbered(cleanName(filepath.Base(root), ""), i+1) + " "; !strings.HasPrefix(out.Text, want) {
			t.Errorf("%q does not begin with %q", out.Text, want)
		}
	}
	_, err := s.spawnPeer(a, spawnInput{Path: ".", Command: "sleep 600", Circle: "default"})
	if r := asRefusal(err); err == nil || r.code != "refused" || !strings.Contains(r.message, "16 spawned processes are alive") {
		t.Errorf("one too many: %v", err)
	}
	list, _ := s.listPeers(a, listPeersInput{})
	if len(list.Peers) != spawnLimit {
		t.Errorf("%d peers are listed", len(list.Peers))
	}
	for _, p := range list.Peers {
		out, err := s.killPeer(a, killInput{Peer: p.PeerID})
		if err != nil || !strings.Contains(out.Text, "ended when asked to (TERM)") || p.TurnState != "pending_first_turn" {
			t.Errorf("%+v: %q, %v", p, out.Text, err)
		}
	}
	// The group is gone before the system has told this process of the end of each.
	eventually(t, "none is left", func() bool { return len(children(t, "SRDZ")) == 0 })
}

// children lists the child processes of this one that are in one of the states. Where there is no /proc, none.
func children(t *testing.T, states string) (pids []string) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		text, _ := os.ReadFile(file)
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if len(fields) > 1 && fields[1] == strconv.Itoa(os.Getpid()) && strings.Contains(states, fields[0]) {
			pids = append(pids, filepath.Base(filepath.Dir(file)))
		}
	}
	return pids
}

// Only a process that is known to have ended is gone.
func TestProcessGone(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	pid := cmd.Process.Pid
	_, _, start, known := readStat(pid)
	name := fmt.Sprintf("%s/%d/%s", processSpace(), pid, start)
	if processGone(name) || processGone(ownProcess()) {
		t.Error("it is there")
	}
	if known && !processGone(name+"0") {
		t.Error("the number is another's by now")
	}
	in.Close()
	if known {
		eventually(t, "it has ended and nobody waits for it", func() bool { return processGone(name) })
	}
	must(t, cmd.Wait())
	if !processGone(name) {
		t.Error("it has ended")
	}
	for _, unseen := range []string{"", "/", "x" + name, processSpace(), processSpace() + "/1/", processSpace() + "/-1/", processSpace() + "/x/"} {
		if processGone(unseen) {
			t.Errorf("%q is gone", unseen)
		}
	}
}

// A number that another process has by now is nobody's: neither is it taken for alive, nor is anything signalled.
func TestSpawnReusedPID(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	detach(cmd)
	must(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { cmd.Process.Kill() })
	start, zombie := processStart(cmd.Process.Pid)
	if start == "" || zombie {
		t.Fatalf("%q %v", start, zombie)
	}
	p := spawned{ID: "spawn-00000000", PID: cmd.Process.Pid, Start: start + "0"}
	if how, err := p.end(nil); p.alive() || err != nil || how != "had ended already" {
		t.Error(how, err)
	}
	if again, _ := processStart(cmd.Process.Pid); again != start {
		t.Errorf("started %q, then %q", start, again)
	}
	p.Start = start
	if how, err := p.end(nil); err != nil || how != "ended when asked to (TERM)" {
		t.Error(how, err)
	}
	<-ended
	if start, _ := processStart(cmd.Process.Pid); start != "" {
		t.Error("it is there still")
	}
	for _, pid := range []int{-1, 0, 1} {
		p := spawned{PID: pid, Start: "x", Began: 1}
		if err := signalGroup(pid, syscall.Signal(0)); err == nil || p.alive() {
			t.Errorf("%d was signalled", pid)
		}
	}
	for _, bad := range []spawned{
		{ID: "spawn-0", PID: 7}, {ID: "spawn-00000000", PID: 1}, {ID: "spawn-00000000", PID: -5},
	} {
		bad.Box, bad.By = boardName{"default", "a"}, boardName{"default", "a"}
		if bad.valid() == nil {
			t.Errorf("%+v", bad)
		}
	}
}

// The first process may go and leave others of its group behind: they are what was started, and end with it.
func TestSpawnLeavesChildren(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("needs /proc to tell whose group it is; run it on Linux")
	}
	allowCommands(t, "sleep 600 & exit 0")
	s := meshServer(t, spawnCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	must2(t)(s.spawnPeer(a, spawnInput{Path: ".", Command: "sleep 600 & exit 0", Circle: "default"}))
	p := s.mesh.spawnedList()[0]
	eventually(t, "the first process has gone", func() bool { start, _ := processStart(p.PID); return start == "" })
	if !p.alive() {
		t.Error("what it left behind is not seen")
	}
	out := must2(t)(s.killPeer(a, killInput{Peer: p.Box.name}))
	if !groupGone(p.PID) || !strings.Contains(out.Text, "ended when asked to") {
		t.Error(out.Text)
	}
}

func must2(t *testing.T) func(saidOutput, error) saidOutput {
	return func(out saidOutput, err error) saidOutput {
		t.Helper()
		must(t, err)
		return out
	}
}

// What a window runs has exactly the environment that is asked for, whatever stands in it, and no argument shows it.
func TestWindowScript(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "it's a $(touch p) script")
	odd := "a'b\"c$(touch p)`touch p`\\\n;touch p\n"
	p := spawned{ID: "spawn-00000000", Box: boardName{"default", "-n"}, Path: dir, Command: "exec env -0"}
	env := p.environ([]string{"PATH=" + os.Getenv("PATH"), "ODD=" + odd, "EMPTY=", "TERM=dumb", "GIT_DIR=/x", "CLAUDECODE=1", "CODEX_A=1", "a.b=1", "MAJORDOMUS_CONFIG=/x"}, odd)
	must(t, os.WriteFile(file, []byte(windowScript(file, &p, env, "THEIRS=1\n-REMOVED\nODD=2\nTMUX=3\nx; touch p=1\n")), 0o600))
	cmd := exec.Command("/bin/sh", file)
	cmd.Dir, cmd.Env = "/", []string{"PATH=" + os.Getenv("PATH"), "THEIRS=1", "ODD=2", "TERM=screen"}
	out, err := cmd.Output()
	must(t, err)
	got := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	got = slices.DeleteFunc(got, func(v string) bool {
		return strings.HasPrefix(v, "PWD=") || strings.HasPrefix(v, "OLDPWD=") || strings.HasPrefix(v, "_=") || strings.HasPrefix(v, "SHLVL=")
	})
	want := []string{"PATH=" + os.Getenv("PATH"), "ODD=" + odd, "EMPTY=", "TERM=screen", "MAJORDOMUS_SPAWN=spawn-00000000", "MAJORDOMUS_CIRCLE=default", "MAJORDOMUS_NAME=-n", "MAJORDOMUS_MESSAGE=" + odd}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("\n got %q\nwant %q", got, want)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A client that gives its servers no environment is known by its process group, and its name is kept for it.
func TestSpawnRecognized(t *testing.T) {
	allowCommands(t, "sleep 600")
	s := meshServer(t, spawnCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	must2(t)(s.spawnPeer(a, spawnInput{Path: ".", Command: "sleep 600", Circle: "team", Message: "hello"}))
	sp := s.mesh.spawnedList()[0]
	defer sp.end(nil)
	name := sp.Box.name

	early := s.board.attach(attachment{Transport: "http", Identity: randomHex(16), Carried: carried{Name: name, Circle: "team"}})
	if got := s.board.displayName(early); got != name+"-2" {
		t.Errorf("somebody else got the name %q", got)
	}
	params := attachParams{Identity: randomHex(16), Address: &peerAddress{PID: sp.PID}, Carried: carried{Name: "x"}}
	s.recognize(&params)
	n := &session{id: randomHex(16), trusted: true, peer: s.board.attach(attachment{Transport: "http", Identity: params.Identity, Carried: params.Carried})}
	ctx := withCaller(context.Background(), n)
	row := must3(t)(s.whoami(ctx, noInput{})).Peers[0]
	if row.Name != name || row.Circle != "team" || row.TurnState != "pending_first_turn" {
		t.Errorf("%+v", row)
	}
	s.board.spoke(n.peer)
	if row = must3(t)(s.whoami(ctx, noInput{})).Peers[0]; row.TurnState != "" {
		t.Errorf("%+v", row)
	}
	wantTexts(t, read(t, s, ctx), "hello")
	out := must2(t)(s.killPeer(a, killInput{Peer: name, Circle: "team"}))
	if want := fmt.Sprintf("killed @%s: process %d and its group ended when asked to (TERM)", name, sp.PID); out.Text != want {
		t.Errorf("%q, want %q", out.Text, want)
	}
	if r := asRefusal(s.refuseRetired(params.Identity)); r == nil || r.code != "retired" {
		t.Errorf("%v", r)
	}
}

func must3(t *testing.T) func(whoamiOutput, error) whoamiOutput {
	return func(out whoamiOutput, err error) whoamiOutput {
		t.Helper()
		must(t, err)
		return out
	}
}

// The next server reads the account as it was left, and drops what it cannot know.
func TestSpawnJournal(t *testing.T) {
	st := newStore()
	box := boardName{"default", "b"}
	for i := range spawnLimit {
		p := spawned{ID: fmt.Sprintf("spawn-0000000%x", i), Box: box, By: box, PID: 1000 + i}
		if _, err := st.apply(&entry{Spawn: &p}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range retiredLimit + 5 {
		st.apply(&entry{At: int64(i), Retire: fmt.Sprintf("%032x", i)})
	}
	again := newStore()
	st.entries(func(e *entry) {
		line := mustJSON(e)
		read, err := readEntry(line)
		if err == nil {
			_, err = again.apply(read)
		}
		if err != nil {
			t.Errorf("%s: %v", line, err)
		}
	})
	if len(again.spawns) != spawnLimit || len(again.retired) != retiredLimit {
		t.Errorf("%d processes, %d identities", len(again.spawns), len(again.retired))
	}
	if _, ok := again.retired[fmt.Sprintf("%032x", 4)]; ok {
		t.Error("the oldest identity was kept")
	}
	for _, e := range []*entry{{Spawn: &spawned{}}, {Unspawn: "spawn-00000000"}, {Retire: "x"}} {
		e.Key = strings.Repeat("0", 32)
		if deliverable(e) == nil {
			t.Errorf("another server could send %s", mustJSON(e))
		}
	}
	s := meshServer(t, newCheckout(t), io.Discard)
	s.mesh.commit(&entry{Spawn: &spawned{ID: "spawn-00000000", Box: box, By: box}}, synced)
	s.adoptSpawned()
	s.mesh.journal.drain()
	if list := s.mesh.spawnedList(); len(list) != 0 {
		t.Errorf("%+v", list)
	}
}
