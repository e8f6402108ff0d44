package main

import (
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
)

// ownMounts starts a thread with mounts of its own, which end with it, and what it starts. The function it returns runs
// another there; path is how files are seen from there.
func ownMounts() (run func(func()), path func(string) string, err error) {
	work := make(chan func()) // closed never: the thread ends with the process
	ready := make(chan error)
	tid := 0
	go func() {
		runtime.LockOSThread() // for good: no other goroutine may get to see these mounts
		tid = syscall.Gettid()
		err := syscall.Unshare(syscall.CLONE_NEWNS)
		if err == nil {
			err = syscall.Mount("none", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, "")
		}
		ready <- err
		if err != nil {
			return
		}
		for f := range work {
			f()
		}
	}()
	if err := <-ready; err != nil {
		return nil, nil, err
	}
	run = func(f func()) {
		done := make(chan struct{})
		work <- func() { defer close(done); f() }
		<-done
	}
	return run, func(p string) string { return fmt.Sprintf("/proc/%d/task/%d/root%s", syscall.Getpid(), tid, p) }, nil
}

func mountTmpfs(dir, options string) error {
	out, err := exec.Command("mount", "-t", "tmpfs", "-o", options, "none", dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mount: %v: %s", err, out)
	}
	return nil
}
