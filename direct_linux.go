package main

// Reads and writes of which Go's scheduler is not told. It takes every system call for one that may block, and wakes a thread
// of its own that looks after it. Those of a bridge never block: without that thread a bridged call takes 1.08 times as long as
// through a relay of bare system calls, with it 1.20 times (medians on one processor). It helps only where all of them are made
// so, on the client's side and on the server's.

import (
	"io"
	"syscall"
	"unsafe"
)

// direct is a descriptor in Go's poller. A call that did block would stop the whole process, so whether it cannot is asked
// before each one where others have the descriptor too, and may change that.
type direct struct {
	io.ReadWriter // the ordinary way
	raw           syscall.RawConn
	shared        bool
}

// directly is f, without detours where it allows that.
func directly(f io.ReadWriter, shared bool) io.ReadWriter {
	if c, ok := f.(syscall.Conn); ok {
		if raw, err := c.SyscallConn(); err == nil {
			return &direct{f, raw, shared}
		}
	}
	return f
}

func (d *direct) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, blocks, err := d.transfer(d.raw.Read, syscall.SYS_READ, p)
	switch {
	case blocks:
		return d.ReadWriter.Read(p)
	case n == 0 && err == nil:
		return 0, io.EOF
	}
	return n, err
}

func (d *direct) Write(p []byte) (written int, err error) {
	for written < len(p) {
		n, blocks, err := d.transfer(d.raw.Write, syscall.SYS_WRITE, p[written:])
		written += n
		if blocks {
			n, err = d.ReadWriter.Write(p[written:])
			return written + n, err
		}
		if err != nil {
			return written, err
		}
	}
	return written, nil
}

// transfer makes one call, when the descriptor is ready for it. blocks means that it has not, since it might have blocked.
func (d *direct) transfer(whenReady func(func(fd uintptr) bool) error, call uintptr, p []byte) (n int, blocks bool, err error) {
	var failed syscall.Errno
	err = whenReady(func(fd uintptr) bool {
		if d.shared {
			flags, _, unknown := syscall.RawSyscall(syscall.SYS_FCNTL, fd, syscall.F_GETFL, 0)
			if blocks = unknown != 0 || flags&syscall.O_NONBLOCK == 0; blocks {
				return true
			}
		}
		for {
			var done uintptr
			if done, _, failed = syscall.RawSyscall(call, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p))); failed == 0 {
				n = int(done)
			}
			if failed != syscall.EINTR {
				return failed != syscall.EAGAIN
			}
		}
	})
	if err == nil && failed != 0 {
		err = failed
	}
	return n, blocks, err
}
