package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// polledPipe is a pipe whose ends are in Go's poller.
func polledPipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

func TestDirectly(t *testing.T) {
	r, w := polledPipe(t)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // more than a pipe holds
	wrote := make(chan error, 1)
	go func() { // ends when all of it has been read
		n, err := directly(w, true).Write(sent)
		if err == nil && n != len(sent) {
			err = io.ErrShortWrite
		}
		w.Close()
		wrote <- err
	}()
	got, err := io.ReadAll(directly(r, true))
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	must(t, <-wrote)
}

func TestDirectlyFails(t *testing.T) {
	r, w := polledPipe(t)
	must(t, r.SetReadDeadline(time.Now()))
	if n, err := directly(r, true).Read(make([]byte, 1)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %d, %v", n, err)
	}
	must(t, r.Close())
	if n, err := directly(w, true).Write([]byte("x")); n != 0 || !errors.Is(err, syscall.EPIPE) {
		t.Errorf("with nobody to read: %d, %v", n, err)
	}
	if n, err := directly(r, true).Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("closed: %d, %v", n, err)
	}
}

// Who has the descriptor too may have made it one that blocks: the process goes on all the same.
func TestDirectlyWhereItBlocks(t *testing.T) {
	r, w := polledPipe(t)
	raw, err := r.SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) { err = syscall.SetNonblock(int(fd), false) }))
	must(t, err)
	reading, got := make(chan struct{}), make(chan string, 1)
	go func() { // ends when something is written
		p := make([]byte, 1)
		close(reading)
		n, _ := directly(r, true).Read(p)
		got <- string(p[:n])
	}()
	<-reading
	for range 10 {
		runtime.GC() // stops the world, which waits for everybody that runs
	}
	w.Write([]byte("x"))
	if text := <-got; text != "x" {
		t.Errorf("read %q", text)
	}
}

// Pipes that do not block when the process starts, as an event loop may leave them, are waited for like all others.
func TestPipesThatDoNotBlock(t *testing.T) {
	var fds [2]int
	must(t, syscall.Pipe2(fds[:], syscall.O_NONBLOCK|syscall.O_CLOEXEC))
	r, w := os.NewFile(uintptr(fds[0]), "stdin"), os.NewFile(uintptr(fds[1]), "stdout")
	defer r.Close()
	defer w.Close()
	in, restoreIn := pollable(r)
	out, restoreOut := pollable(w)
	defer restoreIn()
	defer restoreOut()
	got := make(chan int)
	begun := make(chan struct{})
	go func() { // ends with the input
		close(begun)
		n, _ := io.Copy(io.Discard, in) // begins while there is nothing to read
		got <- int(n)
	}()
	<-begun
	n, err := out.Write(make([]byte, 4<<20)) // more than a pipe holds
	w.Close()
	if m := <-got; err != nil || n != m {
		t.Errorf("%d bytes written, %d read: %v", n, m, err)
	}
}

// A client that has closed our stdin and reads no answer is given up, also where a write to it waits in the system: where
// stdin and stdout are one socket, which is not polled, and where somebody else has made our pipe block.
func TestStdoutThatBlocks(t *testing.T) {
	for name, pair := range map[string]func(t *testing.T) (reader, out *os.File){
		"one socket": func(t *testing.T) (reader, out *os.File) {
			fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
			must(t, err)
			return os.NewFile(uintptr(fds[0]), "reader"), os.NewFile(uintptr(fds[1]), "out")
		},
		"pipe": func(t *testing.T) (reader, out *os.File) {
			reader, out = polledPipe(t)
			raw, err := out.SyscallConn()
			must(t, err)
			must(t, raw.Control(func(fd uintptr) { err = syscall.SetNonblock(int(fd), false) }))
			must(t, err)
			return reader, out
		},
	} {
		t.Run(name, func(t *testing.T) {
			reader, out := pair(t)
			in, input := io.Pipe()
			c := newClient(in, out, "", 50*time.Millisecond, func(string) string { return "" })
			if !c.write([]byte("{}")) {
				t.Fatal("an answer that is read")
			}
			wrote := make(chan bool)
			go func() { // ends when it is given up
				for c.write(make([]byte, 1<<20)) {
				}
				close(wrote)
			}()
			input.Close()
			select {
			case <-wrote:
			case <-time.After(30 * time.Second):
				t.Fatal("it still writes")
			}
			if !c.done() {
				t.Error("the client is not gone")
			}
			reader.Close() // which ends the write
		})
	}
}
