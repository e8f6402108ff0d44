package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// gitIn runs git as a user without any configuration would.
func gitIn(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(gitEnvironment(os.Environ()), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@localhost", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@localhost")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// gitHermetic keeps this machine's git configuration out of the git that the program starts. GIT_* variables would be
// taken away again, so it is done by HOME.
func gitHermetic(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("no git here; install it to run this")
	}
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
}

// gitRepo makes a repository with one commit and returns its canonical root.
func gitRepo(t testing.TB) string {
	t.Helper()
	gitHermetic(t)
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(base, "main")
	gitIn(t, base, "init", "-q", "-b", "main", root)
	gitIn(t, root, "commit", "-q", "--allow-empty", "-m", "first")
	return root
}

func mustFind(t testing.TB, dir string) checkout {
	t.Helper()
	c, err := findCheckout(dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustRename(t testing.TB, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func mustWrite(t testing.TB, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte(text), 0o666)); err != nil {
		t.Fatal(err)
	}
}

// enumerates fails unless the checkout lists exactly these roots, in any order but with its own repository's main one
// first, and returns the listing.
func enumerates(t testing.TB, c checkout, want ...string) listing {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l := c.enumerate(ctx)
	var got []string
	for _, o := range l.checkouts {
		got = append(got, o.root)
		if o.id != digest(o.root) {
			t.Errorf("%q has the id of another", o.root)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Fatalf("listed %q\nwant %q\nreason %q", got, want, l.reason)
	}
	return l
}

func TestFindCheckout(t *testing.T) {
	root := gitRepo(t)
	base := filepath.Dir(root)
	t.Setenv("GIT_DIR", filepath.Join(base, "elsewhere", ".git"))
	t.Setenv("GIT_WORK_TREE", filepath.Join(base, "elsewhere"))
	mustWrite(t, filepath.Join(root, "sub/deep/x"), "")
	wt := filepath.Join(base, "wt")
	gitIn(t, root, "worktree", "add", "-q", "-b", "feature/x", wt)
	if err := os.Symlink(root, filepath.Join(base, "link")); err != nil {
		t.Fatal(err)
	}

	c := mustFind(t, root)
	if c.root != root || c.linked || c.gitDir != filepath.Join(root, ".git") || c.commonDir != c.gitDir || len(c.id) != 32 || len(c.gitID) != 32 || c.id == c.gitID {
		t.Errorf("%+v", c)
	}
	for _, dir := range []string{filepath.Join(root, "sub/deep"), filepath.Join(base, "link"), filepath.Join(base, "link/sub"), filepath.Join(root, ".git/refs")} {
		if got := mustFind(t, dir); got != c {
			t.Errorf("from %q: %+v", dir, got)
		}
	}
	w := mustFind(t, wt)
	if w.root != wt || !w.linked || w.commonDir != c.commonDir || w.gitID != c.gitID || w.id == c.id {
		t.Errorf("%+v", w)
	}
	if a, b := branchOf(c.gitDir), branchOf(w.gitDir); a != "main" || b != "feature/x" {
		t.Errorf("on branches %q and %q", a, b)
	}
	mustWrite(t, filepath.Join(wt, ".git"), "gitdir: ../main/.git/worktrees/wt\n") // as git 2.48 may write it
	if got := mustFind(t, wt); got != w {
		t.Errorf("by a relative link: %+v", got)
	}
	gitIn(t, wt, "checkout", "-q", "--detach")
	if got := branchOf(w.gitDir); got != "" {
		t.Errorf("detached on branch %q", got)
	}

	// .git itself a link; a separate git directory
	mustRename(t, filepath.Join(root, ".git"), filepath.Join(base, "store"))
	if err := os.Symlink(filepath.Join(base, "store"), filepath.Join(root, ".git")); err != nil {
		t.Fatal(err)
	}
	if got := mustFind(t, root); got.id != c.id || got.gitDir != filepath.Join(base, "store") || got.linked {
		t.Errorf("%+v", got)
	}
	separate := filepath.Join(base, "separate")
	gitIn(t, base, "init", "-q", "--separate-git-dir", filepath.Join(base, "sep.git"), separate)
	if got := mustFind(t, separate); got.root != separate || got.commonDir != filepath.Join(base, "sep.git") || got.linked {
		t.Errorf("%+v", got)
	}
	if got := branchOf(mustFind(t, separate).gitDir); got == "" {
		t.Error("a branch without a commit is not told")
	}
}

// What is no checkout is refused with a message that names what is wrong, and nothing above it is taken instead.
func TestFindNoCheckout(t *testing.T) {
	root := gitRepo(t)
	base := filepath.Dir(root)
	inside := func(name string) string { return filepath.Join(root, name) }
	mustWrite(t, inside("dangling/.git"), "gitdir: "+filepath.Join(base, "gone/.git/worktrees/x")+"\n")
	mustWrite(t, inside("junk/.git"), "hello\n")
	mustWrite(t, inside("hollow/.git/config"), "")
	gitIn(t, base, "clone", "-q", "--bare", root, "p/.bare")
	mustWrite(t, filepath.Join(base, "p/.git"), "gitdir: ./.bare\n")
	gitIn(t, base, "clone", "-q", "--bare", root, "q/.git")
	if err := os.Symlink("nowhere", filepath.Join(base, "r.git")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(inside("r"), 0o777), os.Symlink("nowhere", inside("r/.git"))); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{
		inside("dangling"):             "names a git directory that is not there",
		inside("junk"):                 "is not a git file",
		inside("hollow"):               "has no HEAD",
		inside("r"):                    "leads nowhere",
		filepath.Join(base, "p"):       "bare repository",
		filepath.Join(base, "p/.bare"): "bare repository",
		filepath.Join(base, "q"):       "bare repository",
		base:                           "contains .git",
	} {
		c, err := findCheckout(dir)
		if !errors.Is(err, errNoCheckout) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: %+v, %v, want %q", dir, c, err, want)
		}
	}
	if _, err := findCheckout(filepath.Join(base, "missing")); err == nil {
		t.Error("a directory that is not there is taken")
	}
	gitIn(t, filepath.Join(base, "p/.bare"), "worktree", "add", "-q", "../w", "main")
	if w := mustFind(t, filepath.Join(base, "p/w")); !w.linked || w.commonDir != filepath.Join(base, "p/.bare") {
		t.Errorf("%+v", w)
	}
}

func TestCoreConfig(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]string{
		"":                                      "false ",
		"[core]\n\tbare = true\n":               "true ",
		"[core]\nbare\n":                        "true ",
		"[core] bare = yes # really\n":          "true ",
		"[CORE]\n BARE=1\n[other]\nbare=false":  "true ",
		"[core]\nbare = true\nbare = false\n":   "false ",
		"[core \"x\"]\nbare = true\n":           "false ",
		"[core]\nworktree = ../../a b\n":        "false ../../a b",
		"[core]\nworktree = \"../#a\" ; x\n":    "false ../#a",
		"[extensions]\nworktreeConfig = true\n": "true ",
	} {
		mustWrite(t, filepath.Join(dir, "config"), text)
		mustWrite(t, filepath.Join(dir, "config.worktree"), "[core]\nbare = true\n")
		bare, worktree := coreConfig(dir)
		if got := fmt.Sprintf("%v %s", bare, worktree); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
