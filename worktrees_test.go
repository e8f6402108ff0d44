package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// fakeGit puts a shell script in front of git. In it, $GIT is the real one.
func fakeGit(t testing.TB, script string) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("needs a shell")
	}
	real, err := exec.LookPath("git")
	if err != nil {
		t.Skip("no git here; install it to run this")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "git"), []byte("#!/bin/sh\nGIT='"+real+"'\n"+script+"\n"), 0o777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+os.Getenv("PATH"))
}

// oldGit is git before 2.36.
const oldGit = `for a; do test "$a" = -z && { echo "error: unknown switch 'z'" >&2; exit 129; }; done; exec "$GIT" "$@"`

func oddNames() []string {
	if runtime.GOOS == "windows" {
		return []string{"with space", "naïve-é", "-dash", "🦊"}
	}
	return []string{"with space", `quo"te`, "naïve-é", "trail ", "a\ttab", "new\nline", "-dash", "🦊", `back\slash`, "worktree x", "\xff"}
}

func TestOddWorktreeNames(t *testing.T) {
	root := gitRepo(t)
	base := filepath.Dir(root)
	roots := []string{root}
	for i, name := range oddNames() {
		wt := filepath.Join(base, name)
		cmd := exec.Command("git", "worktree", "add", "-q", "-b", fmt.Sprint("b", i), wt)
		cmd.Dir, cmd.Env = root, gitEnvironment(os.Environ())
		if out, err := cmd.CombinedOutput(); err != nil {
			if name == "\xff" { // not every file system takes it
				continue
			}
			t.Fatalf("%q: %v\n%s", name, err, out)
		}
		roots = append(roots, wt)
	}
	check := func(dir string) {
		t.Helper()
		l := enumerates(t, mustFind(t, dir), slices.Clone(roots)...)
		if l.reason != "" {
			t.Error(l.reason)
		}
		for i, c := range l.checkouts {
			if want := branchOf(mustFind(t, c.root).gitDir); c.branch != want || c.primary != (i == 0) {
				t.Errorf("%q: on %q, primary %v; it is on %q", c.root, c.branch, c.primary, want)
			}
		}
	}
	check(root)
	check(filepath.Join(base, "with space"))

	fakeGit(t, oldGit)
	want := slices.DeleteFunc(slices.Clone(roots), func(p string) bool { return strings.Contains(p, "\n") })
	l := enumerates(t, mustFind(t, root), slices.Clone(want)...)
	if len(want) < len(roots) && !strings.Contains(l.reason, strconv.Quote(filepath.Join(base, "new\nline"))) {
		t.Errorf("the one that cannot be told apart is not named: %q", l.reason)
	}
	for _, c := range l.checkouts {
		if want := branchOf(mustFind(t, c.root).gitDir); c.branch != want {
			t.Errorf("with an old git %q is on %q, not %q", c.root, c.branch, want)
		}
	}
	if runtime.GOOS != "windows" {
		// From the one that cannot be told apart, it is itself still there.
		enumerates(t, mustFind(t, filepath.Join(base, "new\nline")), slices.Clone(roots)...)
	}
}

// Missing, locked, moved and detached worktrees are covered, and git's register is left as it is.
func TestBrokenWorktrees(t *testing.T) {
	root := gitRepo(t)
	base := filepath.Dir(root)
	at := func(name string) string { return filepath.Join(base, name) }
	roots := []string{root}
	for _, name := range []string{"removed", "locked", "held", "detached", "moved"} {
		gitIn(t, root, "worktree", "add", "-q", "--detach", at(name))
		roots = append(roots, at(name))
	}
	gitIn(t, root, "worktree", "lock", at("locked"))
	gitIn(t, root, "worktree", "lock", "--reason", "two\nlines\n\nworktree /forged\nbranch refs/heads/x", at("held"))
	if err := errors.Join(os.RemoveAll(at("removed")), os.RemoveAll(at("locked"))); err != nil {
		t.Fatal(err)
	}
	mustRename(t, at("moved"), at("here"))
	before := gitIn(t, root, "worktree", "list", "--porcelain")
	for range 20 {
		if l := enumerates(t, mustFind(t, root), slices.Clone(roots)...); l.reason != "" {
			t.Error(l.reason)
		}
	}
	if after := gitIn(t, root, "worktree", "list", "--porcelain"); after != before {
		t.Errorf("git's register changed from\n%sto\n%s", before, after)
	}
	// From the moved one, it is listed where it is.
	l := enumerates(t, mustFind(t, at("here")), append(slices.Clone(roots), at("here"))...)
	if l.checkouts[0].root != at("here") {
		t.Errorf("%+v", l.checkouts)
	}
	fakeGit(t, oldGit)
	enumerates(t, mustFind(t, root), slices.Clone(roots)...)

	mustRename(t, root, at("elsewhere"))
	if _, err := findCheckout(at("held")); !errors.Is(err, errNoCheckout) || !strings.Contains(err.Error(), "not there") {
		t.Errorf("in a worktree whose repository has moved: %v", err)
	}

	empty := at("empty")
	gitIn(t, base, "init", "-q", empty)
	enumerates(t, mustFind(t, empty), empty)
}

func TestRepositoriesOfOtherShapes(t *testing.T) {
	root := gitRepo(t)
	base := filepath.Dir(root)
	at := func(name string) string { return filepath.Join(base, name) }
	t.Run("bare", func(t *testing.T) {
		gitIn(t, base, "clone", "-q", "--bare", root, "p/.bare")
		mustWrite(t, at("p/.git"), "gitdir: ./.bare\n")
		gitIn(t, at("p"), "worktree", "add", "-q", "main")
		gitIn(t, at("p"), "worktree", "add", "-q", "feat")
		for _, name := range []string{"p/main", "p/feat"} {
			l := enumerates(t, mustFind(t, at(name)), at("p/main"), at("p/feat"))
			if l.reason != "" || l.checkouts[0].primary || l.checkouts[1].primary {
				t.Errorf("%+v", l)
			}
		}
		fakeGit(t, oldGit)
		if l := enumerates(t, mustFind(t, at("p/feat")), at("p/main"), at("p/feat")); l.reason != "" {
			t.Error(l.reason)
		}
	})
	t.Run("submodule", func(t *testing.T) {
		super := at("super")
		gitIn(t, base, "init", "-q", super)
		gitIn(t, super, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", root, "sub dir")
		sub := filepath.Join(super, "sub dir")
		gitIn(t, sub, "worktree", "add", "-q", "--detach", at("sub-wt"))
		for _, dir := range []string{sub, at("sub-wt")} {
			l := enumerates(t, mustFind(t, dir), sub, at("sub-wt"))
			if l.reason != "" {
				t.Error(l.reason)
			}
		}
		if got := mustFind(t, super); got.gitID == mustFind(t, sub).gitID {
			t.Error("a submodule counts as its superproject")
		}
	})
	t.Run("separate", func(t *testing.T) {
		sep := at("sep")
		gitIn(t, base, "clone", "-q", "--separate-git-dir", at("sep.git"), root, sep)
		gitIn(t, sep, "worktree", "add", "-q", "--detach", at("sep-wt"))
		if l := enumerates(t, mustFind(t, sep), sep, at("sep-wt")); l.reason != "" {
			t.Error(l.reason)
		}
		// From the worktree git does not tell where the main checkout is: said, not guessed.
		l := enumerates(t, mustFind(t, at("sep-wt")), at("sep-wt"))
		if !strings.Contains(l.reason, "sep.git") {
			t.Errorf("reason %q", l.reason)
		}
	})
	t.Run("link", func(t *testing.T) {
		if err := os.Symlink(root, at("l")); err != nil {
			t.Skip(err)
		}
		if err := os.Symlink(base, filepath.Join(root, "up")); err != nil {
			t.Fatal(err)
		}
		gitIn(t, at("l"), "worktree", "add", "-q", "--detach", at("l/up/wl"))
		enumerates(t, mustFind(t, at("l")), root, at("wl"))
		enumerates(t, mustFind(t, at("l/up/wl")), root, at("wl"))
		// registered by the link's spelling, as some versions do
		mustWrite(t, filepath.Join(root, ".git/worktrees/wl/gitdir"), at("l/up/wl")+"/.git\n")
		enumerates(t, mustFind(t, root), root, at("wl"))
		mustRename(t, filepath.Join(root, ".git"), at("store"))
		if err := os.Symlink(at("store"), filepath.Join(root, ".git")); err != nil {
			t.Fatal(err)
		}
		mustWrite(t, at("wl/.git"), "gitdir: "+at("store/worktrees/wl")+"\n")
		if l := enumerates(t, mustFind(t, at("l")), root, at("wl")); l.reason != "" {
			t.Error(l.reason)
		}
	})
}

func TestGitIsNotStarted(t *testing.T) {
	root := gitRepo(t)
	fakeGit(t, "exit 1")
	if l := enumerates(t, mustFind(t, root), root); l.reason != "" {
		t.Errorf("git was started: %s", l.reason)
	}
}

// What git cannot or will not tell is said in its words, and this checkout is still there.
func TestGitFails(t *testing.T) {
	root := gitRepo(t)
	gitIn(t, root, "worktree", "add", "-q", "--detach", filepath.Join(filepath.Dir(root), "wt"))
	c := mustFind(t, root)
	t.Setenv("LC_ALL", "de_DE.UTF-8")
	t.Setenv("GIT_DIR", "/nowhere")
	for script, want := range map[string]string{
		`echo "sorry, not today" >&2; exit 69`: "sorry, not today",
		`echo "fatal: a
b" >&2; exit 1`: "fatal: a b",
		`exit 3`:     "exit status 3",
		`kill -9 $$`: "killed",
		`echo "$LC_ALL${GIT_DIR-unset}" >&2; exit 1`: "Cunset",
		`yes worktree`: fmt.Sprint(gitOutputLimit),
	} {
		t.Run(script, func(t *testing.T) {
			fakeGit(t, script)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			l := c.enumerate(ctx)
			if len(l.checkouts) != 1 || l.checkouts[0].root != root || !strings.Contains(l.reason, want) || strings.Contains(l.reason, "\n") || len(l.reason) > 2*gitWordsLimit {
				t.Errorf("%+v, want %q", l, want)
			}
		})
	}
	t.Run("dubious", func(t *testing.T) {
		if os.Getuid() != 0 {
			t.Skip("only root can give a directory to somebody else; run as root to see it")
		}
		t.Setenv("SUDO_UID", "")
		defer os.Chown(root, 0, 0)
		defer os.Chown(filepath.Join(root, ".git"), 0, 0)
		if err := errors.Join(os.Chown(root, 12345, 12345), os.Chown(filepath.Join(root, ".git"), 12345, 12345)); err != nil {
			t.Skip(err)
		}
		if l := enumerates(t, c, root); !strings.Contains(l.reason, "ownership") {
			t.Errorf("reason %q", l.reason)
		}
	})
	t.Run("missing", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		if l := enumerates(t, c, root); !strings.Contains(l.reason, "git") || !strings.Contains(l.reason, "PATH") {
			t.Errorf("reason %q", l.reason)
		}
	})
}

// A git that hangs is killed with what it started, and reaped. What it says meanwhile is kept to a limit.
func TestGitHangs(t *testing.T) {
	root := gitRepo(t)
	gitIn(t, root, "worktree", "add", "-q", "--detach", filepath.Join(filepath.Dir(root), "wt"))
	pids := filepath.Join(t.TempDir(), "pids")
	fakeGit(t, "sleep 60 & echo $! $$ >'"+pids+".new'; mv '"+pids+".new' '"+pids+"'; while :; do echo err >&2; done")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	c := mustFind(t, root)
	answer := make(chan listing, 1) // a receive is what enumerating came to
	go func() { answer <- c.enumerate(ctx) }()
	eventually(t, "what another process does", func() bool { _, err := os.Stat(pids); return err == nil })
	cancel(context.DeadlineExceeded) // as its timeout does
	select {
	case l := <-answer:
		if !strings.Contains(l.reason, "in time") || len(l.checkouts) != 1 {
			t.Errorf("%+v", l)
		}
	case <-time.After(patience):
		t.Fatal("it hangs with its git")
	}
	text, err := os.ReadFile(pids)
	if err != nil {
		t.Fatal(err)
	}
	var child, git int
	fmt.Sscan(string(text), &child, &git)
	for _, pid := range []int{child, git} {
		eventually(t, "what another process does", func() bool { return gatherDead(pid) })
	}
}

// gatherDead reports whether no process of that id runs. A killed orphan may stay a zombie until somebody reaps it.
func gatherDead(pid int) bool {
	p, err := os.FindProcess(pid)
	if err != nil || p.Signal(syscall.Signal(0)) != nil {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(stat), ") Z ")
}

func TestParseWorktrees(t *testing.T) {
	out := "worktree /a b\x00HEAD 1\x00branch refs/heads/x/y\x00\x00" +
		"worktree /new\nline\x00HEAD 2\x00detached\x00locked two\nworktree /forged\x00\x00" +
		"worktree /r\x00bare\x00\x00"
	records, err := parseWorktrees(out)
	got := fmt.Sprintf("%#v", records)
	want := fmt.Sprintf("%#v", []worktreeRecord{{path: "/a b", branch: "x/y"}, {path: "/new\nline"}, {path: "/r", bare: true}})
	if got != want || err != nil {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
	for _, odd := range []string{"", "usage: git\x00worktree /x\x00\x00", out[:len(out)-1], out[:60], "\x00\x00x\x00\x00"} {
		if got, err := parseWorktrees(odd); err == nil {
			t.Errorf("%q is a list: %#v", odd, got)
		}
	}
}

func TestParseWorktreeLines(t *testing.T) {
	registered := []string{"/main", "/a\nb", `/q"`, "/naïve", "/twice", "/absent"}
	out := "worktree /main\nHEAD 1\n\nworktree /a\nb\nHEAD 1\n\nworktree \"/q\\\"\"\ndetached\n\nworktree \"/na\\303\\257ve\"\n\n" +
		"worktree /forged\nbare\n\nworktree /twice\n\nworktree /twice\n\n"
	paths, missed := parseWorktreeLines(out, registered)
	if fmt.Sprintf("%q", paths) != fmt.Sprintf("%q", []string{"/main", `/q"`, "/naïve", "/twice"}) {
		t.Errorf("paths %q", paths)
	}
	if fmt.Sprintf("%q", missed) != fmt.Sprintf("%q", []string{"/a\nb", "/absent"}) {
		t.Errorf("missed %q", missed)
	}
	for _, odd := range []string{`"`, `"a`, `"a"b"`, `"\`, `"\"`, `"\9"`, `"\12"`, `"\777"`, `"\x"`} {
		if got, ok := unquoteC(odd); ok {
			t.Errorf("unquoteC(%s) = %q", odd, got)
		}
	}
}

// No path and no lock reason can make the parser see a worktree that git did not list.
func FuzzParseWorktrees(f *testing.F) {
	f.Add("/a", "/b", "reason")
	f.Add("/a\n\nworktree /forged\nHEAD 1", "bare", "x\nworktree /forged")
	f.Add("worktree /x", "/\"q\"", "\nbranch refs/heads/z\n\n")
	f.Fuzz(func(t *testing.T, a, b, reason string) {
		if a == "" || b == "" || strings.Contains(a+b+reason, "\x00") {
			return
		}
		out := "worktree " + a + "\x00HEAD 1\x00branch refs/heads/m\x00locked " + reason + "\x00\x00worktree " + b + "\x00HEAD 1\x00detached\x00prunable " + reason + "\x00\x00"
		if got, err := parseWorktrees(out); err != nil || !slices.Equal(got, []worktreeRecord{{path: a, branch: "m"}, {path: b}}) {
			t.Fatalf("%q became %#v", out, got)
		}
		lines := "worktree " + a + "\nHEAD 1\nlocked " + reason + "\n\nworktree " + b + "\nHEAD 1\n\n"
		paths, missed := parseWorktreeLines(lines, []string{a, b, "/c"})
		for _, p := range slices.Concat(paths, missed) {
			if p != a && p != b && p != "/c" {
				t.Fatalf("%q was forged", p)
			}
		}
		want := map[string]bool{a: true, b: true, "/c": true}
		if len(paths)+len(missed) != len(want) {
			t.Fatalf("%q and %q are not each of %v once", paths, missed, want)
		}
	})
}
