//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"
)

func TestWords(t *testing.T) {
	for written, want := range map[string]string{
		"": "", " \n\t": "", "\n a\nb \n": "a\nb", "a\xff": "a\uFFFD", "\x00": "\x00",
		strings.Repeat("ä", 3000):              strings.Repeat("ä", 2048),
		"x" + strings.Repeat("ä", 3000):        "x" + strings.Repeat("ä", 2047),
		strings.Repeat("x", wordsLimit) + "yz": strings.Repeat("x", wordsLimit),
	} {
		if got := words(written); got != want {
			t.Errorf("%.20q: %d bytes %.20q", written, len(got), got)
		}
	}
	if got := words(strings.Repeat("\xff", 5000)); len(got) > wordsLimit || !utf8.ValidString(got) {
		t.Errorf("%d bytes", len(got))
	}
}

// commandServer serves a checkout whose episode command is a script outside of it.
func commandServer(t *testing.T, script string) *server {
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	command := filepath.Join(dir, "command")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(command, []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		t.Fatal(err)
	}
	s := episodeServer(t)
	s.checkout.root, s.set.episode = canonicalOrSame(root), command
	return s
}

// A descriptor that we were started with is not passed on.
func TestEpisodeCommandDescriptors(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc/self/fd; run it on Linux")
	}
	s := commandServer(t, "exec ls /proc/self/fd") // which opens one, the directory, itself
	fd, err := syscall.Open(os.DevNull, syscall.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	closeOnExec() // what the first command of a process does
	said, err := s.runEpisodeCommand(t.Context(), "open", []byte("{}\n"))
	if got := strings.Fields(said); err != nil || len(got) != 4 {
		t.Errorf("%q, %v", said, err)
	}
}

// A context that ends kills the command and its children.
func TestEpisodeCommandKilled(t *testing.T) {
	s := commandServer(t, "sleep 3600 &\necho $! $$\nwait")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	said, err := s.runEpisodeCommand(ctx, "open", []byte("{}\n"))
	got := strings.Fields(said)
	if err == nil || len(got) < 3 || !strings.HasSuffix(said, "(killed after 10s)") {
		t.Fatalf("%q, %v", said, err)
	}
	for _, pid := range got[:2] {
		number, _ := strconv.Atoi(pid)
		eventually(t, pid+" has ended", func() bool { return !running(number) })
	}
}

// running reports whether there is such a process, other than a dead one that nobody has reaped.
func running(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || !strings.Contains(string(stat), ") Z ")
}

// In doubt a file of the checkout is not run.
func TestEpisodeCommandInDoubt(t *testing.T) {
	s := commandServer(t, "echo ran")
	inside := filepath.Join(s.checkout.root, "command")
	if err := os.Rename(s.set.episode, inside); err != nil {
		t.Fatal(err)
	}
	s.set.episode = inside
	said, err := s.runEpisodeCommand(t.Context(), "open", []byte("{}\n"))
	if err == nil || !strings.Contains(said, "might be tracked") { // this is no git repository, as git sees it
		t.Errorf("%q, %v", said, err)
	}
	t.Setenv("PATH", t.TempDir())
	said, err = s.runEpisodeCommand(t.Context(), "open", []byte("{}\n"))
	if err == nil || !strings.Contains(said, "might be tracked: git is not in the PATH") {
		t.Errorf("%q, %v", said, err)
	}
}

// More commands than may run at once all come to their turn.
func TestEpisodeCommandsTogether(t *testing.T) {
	s := commandServer(t, "echo ran")
	s.episodes.slots = make(chan struct{}, 2)
	var all sync.WaitGroup
	for i := range 16 {
		n := s.testPeer(t, "n", true)
		all.Go(func() {
			if out := s.testAttach(t, n, strconv.Itoa(i)); out.Episode.Repository != "ran" {
				t.Errorf("%+v", out)
			}
		})
	}
	all.Wait()
}
