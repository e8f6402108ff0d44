package main

// Reads and writes of which Go's scheduler is not told. The scheduler takes every system call for one that may block, and wakes
// a thread of its own that looks after it. Those of a bridge never block: without that thread a bridged call takes 1.08 times as
// long as through a relay of bare system calls, with it 1.20 times (medians on one processor). That is won only where none is
// made the ordinary way, on the bridge's connection to the server and on its pipes to the client alike.

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"syscall"
	"unsafe"
)

// direct is a pipe or socket in Go's poller. A call that did block would stop the whole process, so whether it cannot is asked
// before each one where others have the descriptor too, and may change that. Between that question and the call nobody is kept
// from it: that has to be hit within a microsecond.
type direct struct {
	io.ReadWriter // the ordinary way
	raw           syscall.RawConn
	inherited     bool // others have it too
}

// directly is f, without detours where it allows that.
func directly(f io.ReadWriter, inherited bool) io.ReadWriter {
	if file, ok := f.(fs.File); ok {
		if info, err := file.Stat(); err != nil || info.Mode()&(fs.ModeNamedPipe|fs.ModeSocket) == 0 {
			return f // a disk may keep one waiting whatever it says
		}
	}
	if c, ok := f.(syscall.Conn); ok {
		if raw, err := c.SyscallConn(); err == nil {
			return &direct{f, raw, inherited}
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
		if err == nil && n == 0 {
			err = io.ErrUnexpectedEOF
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
		if d.inherited {
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
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		err = op.Err // which names the connection, as the message around it does
	}
	return n, blocks, err
}
