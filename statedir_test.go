//go:build unix

package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/synctest"
)

func TestStateDir(t *testing.T) {
	t.Run("fresh", func(t *testing.T) {
		root := newCheckout(t)
		dir, err := stateDir(root)
		must(t, err)
		info, err := os.Stat(dir)
		must(t, err)
		if dir != filepath.Dir(leasePath(root)) || info.Mode().Perm() != 0o700 {
			t.Errorf("made %s with mode %v", dir, info.Mode())
		}
		ignore, err := os.ReadFile(filepath.Join(root, ".ai/local/.gitignore"))
		if string(ignore) != "*\n" {
			t.Errorf(".gitignore: %q, %v", ignore, err)
		}
		for _, other := range []string{".ai", ".ai/local/state", ".ai/local/state/mcp"} {
			if _, err := os.Stat(filepath.Join(root, other, ".gitignore")); err == nil {
				t.Errorf("%s has a .gitignore of its own", other)
			}
		}
	})
	for _, have := range []string{".ai/local", ".ai/local/state"} {
		t.Run("below "+have, func(t *testing.T) {
			root := newCheckout(t)
			must(t, os.MkdirAll(filepath.Join(root, have), 0o755))
			_, err := stateDir(root)
			must(t, err)
			if _, err := os.Stat(filepath.Join(root, have, ".gitignore")); err == nil {
				t.Error("a directory that was there was written to")
			}
			found, _ := filepath.Glob(filepath.Join(root, have, "*", ".gitignore"))
			if len(found) != 1 {
				t.Errorf("below it: %v", found)
			}
		})
	}
	t.Run("too wide", func(t *testing.T) {
		root := newCheckout(t)
		must(t, os.MkdirAll(filepath.Dir(leasePath(root)), 0o755))
		dir, err := stateDir(root)
		must(t, err)
		if info, _ := os.Stat(dir); info.Mode().Perm() != 0o700 {
			t.Errorf("mode %v", info.Mode())
		}
	})
	for _, name := range []string{".ai", ".ai/local", ".ai/local/state", ".ai/local/state/mcp"} {
		for kind, make := range map[string]func(path string) error{
			"link": func(path string) error { return os.Symlink(t.TempDir(), path) },
			"file": func(path string) error { return os.WriteFile(path, nil, 0o600) },
		} {
			t.Run(kind+" at "+name, func(t *testing.T) {
				root := newCheckout(t)
				path := filepath.Join(root, name)
				must(t, os.MkdirAll(filepath.Dir(path), 0o755))
				must(t, make(path))
				_, err := testElector(t, root).elect(t.Context())
				wantAlone(t, err, false, path)
			})
		}
	}
}

func TestGitStatusStaysEmpty(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is not installed")
	}
	root := t.TempDir()
	git := func(args ...string) string {
		cmd := exec.Command("git", append([]string{"-C", root}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	git("init", "-q")
	win(t, testElector(t, root))
	if out := git("status", "--porcelain", "--untracked-files=all"); out != "" {
		t.Errorf("git status:\n%s", out)
	}
}

func TestNameLockIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root := newCheckout(t)
		l := win(t, testElector(t, root))
		lock, err := lockFile(filepath.Join(root, leaseDir, nameLock))
		must(t, err)
		defer lock.Close()
		wantAlone(t, l.publish(testURL), true, nameLock)
		must(t, l.check()) // still ours
		if err := l.release(); !errors.Is(err, errHeld) {
			t.Errorf("released under another's lock: %v", err)
		}
		if r := readLease(leasePath(root)); r.state != readingDocument || r.held {
			t.Errorf("after that release: %+v", r)
		}
		_, err = testElector(t, root).elect(t.Context())
		wantAlone(t, err, true, nameLock)
		lock.Close()
		win(t, testElector(t, root))
	})
}

// The slow one has judged a stale lease; when it comes to act, another's fresh lease is there.

// overtaken while binding: the url must not be written over the winner's
