package main

// The state directory holds what outlives a process: the lease, the journal. This file makes it, refuses one that leads
// elsewhere, and gives out the one lock under which names in it change.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	nameLock    = "server.lock" // never removed: who waits for it would wake up with a file that has lost the name
	nameLockMax = 2 * time.Second
	ignoreName  = ".gitignore"
	ignoreTemp  = ".majordomus-ignore-" // then random digits
)

var (
	errNotPlain = errors.New("not what majordomus may use") // a link or a file where a real directory must be, or the reverse
	errHeld     = errors.New("locked by another process")   // flock would have waited
	errNoLocks  = errors.New("file locks are not supported here")
)

// stateDir makes the directory of the lease and everything else that survives a process, and returns its path. No component
// may be a link: a cloned repository must not lead our files, or the token, elsewhere.
func stateDir(root string) (string, error) {
	dir, first, ignored := root, "", false
	for name := range strings.SplitSeq(leaseDir, "/") {
		dir = filepath.Join(dir, name)
		made, err := realDir(dir, name == "mcp")
		switch {
		case err != nil:
			return "", err
		case name == ".ai": // this name is shared with other tools, whose files may well be tracked
			continue
		case made && first == "":
			first = dir
		}
		ignored = ignored || hidesAll(filepath.Join(dir, ignoreName))
	}
	if ignored {
		return dir, nil
	}
	// The topmost directory of ours that was not there before tells git to look away from all of it; where somebody else had made
	// them all, or a kill came in between, the innermost.
	return dir, writeIgnore(cmp.Or(first, dir), dir)
}

// realDir makes sure that dir is a directory and no link, and says whether it had to be made. A private one is for this user
// alone; bits are only ever taken away from one that exists, so that who made it read-only keeps it so.
func realDir(dir string, private bool) (made bool, err error) {
	mode := fs.FileMode(0o755) // whatever the umask: nobody else is to exchange what lies below
	if private {
		mode = 0o700
	}
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.Mkdir(dir, mode); err == nil {
			return true, nil
		}
		if errors.Is(err, fs.ErrExist) { // somebody was faster
			info, err = os.Lstat(dir)
		}
	}
	switch {
	case err != nil:
		return false, err
	case info.Mode()&fs.ModeSymlink != 0:
		return false, fmt.Errorf("%w: %s is a symbolic link, and none is followed here", errNotPlain, dir)
	case !info.IsDir():
		return false, fmt.Errorf("%w: %s is not a directory", errNotPlain, dir)
	case othersFile(info, filepath.Dir(dir)):
		return false, fmt.Errorf("%w: %s belongs to another user", errNotPlain, dir)
	case private && info.Mode().Perm()&^mode != 0:
		// Fails closed: in a directory that others may write they could put a lease of their own in place of ours.
		return false, os.Chmod(dir, info.Mode().Perm()&mode)
	}
	return false, nil
}

// othersFile says that what is there belongs to somebody who could not have put it there but for a directory that was once open
// to everybody: neither to this user, nor to the system's, nor to the owner of the directory above, who can do as he likes.
func othersFile(info fs.FileInfo, above string) bool {
	owner, known := ownerOf(info)
	if !known || owner == os.Geteuid() || owner == 0 {
		return false
	}
	dir, err := os.Stat(above)
	if err != nil {
		return true
	}
	of, _ := ownerOf(dir)
	return owner != of
}

// strange says that a checkout belongs to another user than the one that is served, whose owner may have put anything there:
// a worktree that was removed stays registered, and its place may be free for all.
func (c checkout) strange(root string) bool {
	info, err := os.Stat(root)
	return err == nil && othersFile(info, c.root)
}

// hidesAll says whether git looks away from everything in a directory, by a .gitignore that may have come with the repository.
func hidesAll(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|openWary, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return false
	}
	const limit = 4096 // what is longer may end otherwise
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	all := false
	for line := range strings.Lines(string(text)) {
		// As git reads it, to which a blank before the pattern is part of it.
		line = strings.TrimRight(strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r"), " ")
		if strings.HasPrefix(line, "!") {
			return false
		}
		all = all || line == "*"
	}
	return all && err == nil && len(text) <= limit
}

// writeIgnore makes the file by which git looks away from a directory: in full under another name first, in a directory of
// ours, since half of it would stay for good.
func writeIgnore(dir, ours string) error {
	temp := filepath.Join(ours, ignoreTemp+randomHex(8))
	defer os.Remove(temp) // also when a full disk leaves it empty
	if err := os.WriteFile(temp, []byte("*\n"), 0o644); err != nil {
		return err
	}
	path := filepath.Join(dir, ignoreName)
	err := linkNew(temp, path)
	switch {
	case !errors.Is(err, fs.ErrExist):
		return err
	case hidesAll(path): // somebody was faster
		return nil
	}
	return fmt.Errorf("%w: %s does not hide the directory from git, whose next commit might hold the token", errNotPlain, path)
}

// underNameLock runs change while no other process of ours changes what the lease's name leads to. Creating needs no lock: a
// link takes nothing from anybody. A lock on the lease itself would not do: it goes with the inode, and who waits for it wakes
// up holding a file that has lost the name.
func underNameLock(ctx context.Context, dir string, change func() error) error {
	path := filepath.Join(dir, nameLock)
	limit := time.Now().Add(nameLockMax)
	for delay := firstDelay; ; delay = nextDelay(delay) {
		f, err := lockFile(path)
		if err == nil {
			defer f.Close() // lets go of the lock
			return change()
		}
		if !errors.Is(err, errHeld) {
			return err
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%s/%s has been %w for %v", leaseDir, nameLock, err, nameLockMax)
		}
		if err := pause(ctx, delay, nil); err != nil {
			return err
		}
	}
}

// lockFile opens and locks the file, or errHeld. The lock counts only if the name still leads to what was locked.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|openWary, 0o600)
	if info, statErr := os.Lstat(path); statErr == nil && !info.Mode().IsRegular() {
		f.Close() // or nil, which Close knows
		return nil, fmt.Errorf("%w: %s: %s", errNotPlain, path, describe(info.Mode()))
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		if info.Mode().Perm()&0o077 != 0 {
			f.Chmod(0o600) // who may open it may hold it
		}
		err = flock(f, lockExclusive)
	}
	if err == nil {
		if now, statErr := os.Lstat(path); statErr != nil || !os.SameFile(now, info) {
			err = errHeld // the directory was deleted or replaced meanwhile: open it anew
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// removeOldTemps removes what killed processes left between making a file and naming it. The caller holds server.lock.
func removeOldTemps(dir string) {
	entries, _ := os.ReadDir(dir) // what cannot be read is left for another time
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), tempPrefix) {
			continue
		}
		// The age first: to ask who holds a young one would refuse it to the process that is just making it.
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() || time.Since(info.ModTime()) < tempMaxAge {
			continue
		}
		path := filepath.Join(dir, entry.Name())
		if r := readLease(path); r.info != nil && !r.held {
			os.Remove(path)
		}
	}
}

func describe(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "it is a directory"
	case mode&fs.ModeSymlink != 0:
		return "it is a symbolic link"
	}
	return "it is not a regular file"
}

// reasonOf is the cause of a failed file operation without the path, which the message around it names.
func reasonOf(err error) string {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err.Error()
	}
	var l *os.LinkError
	if errors.As(err, &l) {
		return l.Err.Error()
	}
	return err.Error()
}

// lockKind is how a file is locked: a holder's lock is exclusive; who only asks whether there is one tries a shared one.
type lockKind int

const (
	lockShared lockKind = iota
	lockExclusive
)
