//go:build unix

package main

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// openWary is added wherever a file that others may have put there is opened: no link is followed, no pipe waited for.
const openWary = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// flock locks the whole file, shared or for this descriptor alone, until the descriptor is closed. It never waits: errHeld.
func flock(f *os.File, exclusive bool) error {
	how := syscall.LOCK_SH
	if exclusive {
		how = syscall.LOCK_EX
	}
	for {
		err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case err == syscall.EINTR:
			continue
		case err == syscall.EWOULDBLOCK:
			return errHeld
		case err == syscall.ENOSYS || errors.Is(err, syscall.ENOTSUP) || errors.Is(err, syscall.EOPNOTSUPP):
			return errNoLocks
		}
		return &os.PathError{Op: "flock", Path: f.Name(), Err: err}
	}
}

// dieOf ends the process by the signal, so that whoever waits for it sees why it ended. It returns only when the signal does
// not kill (it was ignored when we were started): the caller exits then.
func dieOf(sig os.Signal) {
	number, ok := sig.(syscall.Signal)
	if !ok {
		return
	}
	signal.Reset(sig)
	syscall.Kill(syscall.Getpid(), number)
	<-time.After(time.Second) // the signal may be taken by another thread
}

// endPending reports whether the other side of an idle connection has closed it, or has sent something nobody asked for.
// Either way the next request must go elsewhere.
func endPending(nc net.Conn) bool {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	pending := false
	err = raw.Read(func(fd uintptr) bool {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		pending = err != syscall.EAGAIN && err != syscall.EINTR
		return true
	})
	return pending || err != nil
}

// ownGroup gives a command a process group of its own, so that killGroup ends its children too.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func killGroup(cmd *exec.Cmd) error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }

// closeOnExec keeps every open descriptor from the processes we start, also those that we got from who started us: a pipe
// or lock of the client's would outlive it in a child of ours.
func closeOnExec() {
	open, _ := os.ReadDir("/dev/fd")
	for _, entry := range open {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
}

// pollable lets the runtime wait for a pipe or socket on stdin without a thread of its own. A thread that is blocked in
// read takes its processor along until the scheduler notices, which costs a bridged call as much again as all the rest. Terminals and
// files stay as they are: others read them too. The second result undoes it.
// One that serves as stdout or stderr too stays as it is, since a full buffer would look like an error there.
func pollable(f *os.File) (*os.File, func()) {
	info, err := f.Stat()
	if err != nil || info.Mode()&(os.ModeNamedPipe|os.ModeSocket) == 0 {
		return f, func() {}
	}
	for _, other := range []*os.File{os.Stdout, os.Stderr} {
		if o, err := other.Stat(); err != nil || os.SameFile(info, o) {
			return f, func() {}
		}
	}
	fd := int(f.Fd())
	if syscall.SetNonblock(fd, true) != nil {
		return f, func() {}
	}
	return os.NewFile(uintptr(fd), f.Name()), func() { syscall.SetNonblock(fd, false) }
}
