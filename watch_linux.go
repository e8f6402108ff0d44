package main

import (
	"os"
	"path/filepath"
	"syscall"
)

// watchLease sends when something may have happened to the lease's name: a file came or went beside it, or a directory
// above it was moved or deleted. It costs nothing while nothing happens, where looking every second costs four wakeups
// each time. The channel is closed when watching has ended, by close or because a directory is gone. No watch to be had: nil.
func watchLease(root string) (changed <-chan struct{}, closed func()) {
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC | syscall.IN_NONBLOCK)
	if err != nil {
		return nil, func() {}
	}
	f := os.NewFile(uintptr(fd), "inotify")
	const self = syscall.IN_DELETE_SELF | syscall.IN_MOVE_SELF | syscall.IN_ONLYDIR
	const names = syscall.IN_CREATE | syscall.IN_DELETE | syscall.IN_MOVED_FROM | syscall.IN_MOVED_TO | syscall.IN_CLOSE_WRITE
	dir := filepath.Dir(leasePath(root))
	for mask := uint32(self | names); ; mask = self {
		if _, err := syscall.InotifyAddWatch(fd, dir, mask); err != nil {
			f.Close()
			return nil, func() {}
		}
		if dir == root {
			break
		}
		dir = filepath.Dir(dir)
	}
	c := make(chan struct{}, 1)
	go func() { // ends when f is closed, or a watched directory is gone
		defer close(c)
		buf := make([]byte, 4096)
		for {
			n, err := f.Read(buf)
			if err != nil {
				return
			}
			select {
			case c <- struct{}{}:
			default:
			}
			if watchEnded(buf[:n]) {
				return
			}
		}
	}()
	return c, func() { f.Close() }
}

// watchEnded reports whether one of the events says that a directory is gone from its place.
func watchEnded(events []byte) bool {
	for len(events) >= syscall.SizeofInotifyEvent {
		mask := uint32(events[4]) | uint32(events[5])<<8 | uint32(events[6])<<16 | uint32(events[7])<<24
		size := uint32(events[12]) | uint32(events[13])<<8
		if mask&(syscall.IN_DELETE_SELF|syscall.IN_MOVE_SELF|syscall.IN_IGNORED|syscall.IN_Q_OVERFLOW) != 0 {
			return true
		}
		events = events[min(len(events), syscall.SizeofInotifyEvent+int(size)):]
	}
	return false
}
