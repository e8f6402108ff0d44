//go:build unix

package main

import (
	"errors"
	"math"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// openWary is added wherever a file that others may have put there is opened: no link is followed, no pipe waited for.
const openWary = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// flock locks the whole file, shared or for this descriptor alone, until the descriptor is closed. It never waits: errHeld.
func flock(f *os.File, kind lockKind) error {
	how := syscall.LOCK_SH
	if kind == lockExclusive {
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

// brokenOff reports whether the other side of a connection, both ways of which are open here, has broken it off: it was
// closed before all that had been sent to it was read, or before it was sent. Who reads everything and closes then does not.
// Not every system tells when the other side lets go of what it never read; Linux does.
func brokenOff(nc net.Conn) bool {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	broken := false
	raw.Control(func(fd uintptr) {
		_, err := syscall.Getpeername(int(fd))
		broken = err != nil
	})
	return broken
}

// endArrived reports whether the other side of a connection has closed its way, or has broken the connection off, which the
// system says only once. Neither takes anything from whoever reads.
func endArrived(nc net.Conn) (closed, broken bool) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return false, false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false, false
	}
	raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		closed = n == 0 && err == nil
		broken = err != nil && err != syscall.EAGAIN && err != syscall.EINTR
	})
	return closed, broken
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

// pollable lets the runtime wait for a pipe or socket on stdin without a thread of its own: one that is blocked in read takes
// its processor along until the scheduler notices, which costs a bridged call as much again as all the rest. It also lets a
// write that nobody reads be given up. Terminals and files stay as they are, which others read too; so does one that serves as
// another of the three, where a full or empty buffer would look like an error. The second result undoes it.
func pollable(f *os.File) (*os.File, func()) {
	if f.SetDeadline(time.Time{}) == nil { // it is already, as whoever started us left it: nothing waits for a descriptor twice
		return f, func() {}
	}
	info, err := f.Stat()
	if err != nil || info.Mode()&(os.ModeNamedPipe|os.ModeSocket) == 0 {
		return f, func() {}
	}
	for _, other := range []*os.File{os.Stdin, os.Stdout, os.Stderr} {
		if other == f {
			continue
		}
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

// detach makes a command the first of a session, and so of a process group, of its own: no terminal's hangup reaches it,
// and it can be ended as a whole.
func detach(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }

// ownerOf is the user a file belongs to.
func ownerOf(info os.FileInfo) (uid int, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Uid), true
}

// signalGroup signals a process group; one that is gone is no error. Groups 0 and 1 mean others than they say.
func signalGroup(group int, sig syscall.Signal) error {
	if group <= 1 {
		return syscall.EINVAL
	}
	if err := syscall.Kill(-group, sig); err != syscall.ESRCH {
		return err
	}
	return nil
}

// groupGone says that nothing runs in a group. Who has ended and waits for its parent to notice does not run: whose parent
// died goes to the first process of the system, which may take its time.
func groupGone(group int) bool {
	if group <= 1 || syscall.Kill(-group, 0) == syscall.ESRCH {
		return true
	}
	pids, known := groupPIDs(group)
	return known && len(pids) == 0
}

// groupPIDs lists what runs in a group; known is false where there is no /proc to tell.
func groupPIDs(group int) (pids []int, known bool) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		known = true
		if state, of, _, ok := readStat(pid); ok && of == group && state != "Z" && state != "X" {
			pids = append(pids, pid)
		}
	}
	return pids, known
}

// processGroup is the group of a process, of this one for 0; 0 when there is no such process.
func processGroup(pid int) int {
	group, err := syscall.Getpgid(pid)
	if err != nil {
		return 0
	}
	return group
}

// ownProcess names this process to others of this machine: by the namespace of its number, the number, and its start.
func ownProcess() string {
	_, _, start, _ := readStat(os.Getpid())
	return processSpace() + "/" + strconv.Itoa(os.Getpid()) + "/" + start
}

// processSpace is the namespace of process ids; "" where there is but one.
func processSpace() string {
	space, _ := os.Readlink("/proc/self/ns/pid")
	return space
}

// processGone says that a process is known to have ended. It fails to the side of who may be alive: one that cannot be
// seen from here is not gone.
func processGone(name string) bool {
	space, rest, _ := strings.Cut(name, "/")
	number, start, _ := strings.Cut(rest, "/")
	pid, err := strconv.Atoi(number)
	if err != nil || pid <= 1 || space != processSpace() {
		return false
	}
	if state, _, since, ok := readStat(pid); ok {
		return state == "Z" || state == "X" || since != start
	}
	return syscall.Kill(pid, 0) == syscall.ESRCH
}

// processStart says when a process started, in words that no other process of that number has; "" when there is none.
func processStart(pid int) (start string, zombie bool) {
	state, _, ticks, ok := readStat(pid)
	if ok {
		boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
		return strings.TrimSpace(string(boot)) + " " + ticks, state == "Z" || state == "X"
	}
	if _, err := os.Stat("/proc/self/stat"); err == nil || pid <= 1 {
		return "", false
	}
	out, err := exec.Command("/bin/ps", "-o", "stat=,lstart=", "-p", strconv.Itoa(pid)).Output()
	state, start, found := strings.Cut(strings.TrimSpace(string(out)), " ")
	if err != nil || !found {
		return "", false
	}
	return strings.Join(strings.Fields(start), " "), strings.HasPrefix(state, "Z")
}

// readStat reads what Linux says of a process. The name, in parentheses, may hold anything.
func readStat(pid int) (state string, group int, start string, ok bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", 0, "", false
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 20 {
		return "", 0, "", false
	}
	group, _ = strconv.Atoi(fields[2])
	return fields[0], group, fields[19], true
}

// groupMembers lists what runs in a group and has a variable in its environment. Where there is no /proc, nobody can prove
// that.
func groupMembers(group int, variable string) (members []int) {
	if group <= 1 || syscall.Kill(-group, 0) == syscall.ESRCH {
		return nil
	}
	pids, _ := groupPIDs(group)
	for _, pid := range pids {
		env, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
		if strings.Contains("\x00"+string(env), "\x00"+variable+"\x00") {
			members = append(members, pid)
		}
	}
	return members
}

// descriptorLimit is how many descriptors this process may have.
func descriptorLimit() int {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil || limit.Cur > math.MaxInt32 {
		return math.MaxInt32
	}
	return int(limit.Cur)
}
