package main

// Reading a journal: what a server takes over from the one before it, and what it says of what it cannot read.

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// report is what reading a journal came to.
type report struct {
	found   bool
	lines   int
	damaged int
	first   int // the first damaged line; lines count from 1
	torn    bool
	err     error // why nothing could be read
}

// String says what a user should know; "" when all is well.
func (r report) String() string {
	var parts []string
	if r.err != nil {
		parts = append(parts, fmt.Sprintf("cannot be read (%v) and is begun anew", r.err))
	}
	if r.damaged > 0 {
		parts = append(parts, fmt.Sprintf("has damaged lines, which are skipped: %d of %d, the first is line %d", r.damaged, r.lines, r.first))
	}
	return strings.Join(parts, "; ")
}

// setAside keeps under another name what is about to be replaced though not all of it was read, and says where. The
// journal itself stays in place until the new one is written, unless nothing of it was read.
func (r report) setAside(path string, l *lease) string {
	dir, aside := filepath.Dir(path), journalAside+randomHex(4)
	entries, _ := os.ReadDir(dir)
	kept := len(slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return !strings.HasPrefix(e.Name(), journalAside) }))
	if info, err := os.Lstat(path); kept >= asideLimit && err == nil && !info.IsDir() { // that would be in the way of the new one
		return fmt.Sprintf("what was there is not kept, since %d such files are: remove %s*", kept, journalAside)
	}
	err := underNameLock(context.Background(), dir, func() error {
		if err := l.check(); err != nil {
			return err
		}
		keep := os.Link
		if r.err != nil { // it may be what cannot be linked
			keep = os.Rename
		}
		return keep(path, filepath.Join(dir, aside))
	})
	if err != nil {
		return fmt.Sprintf("what was there cannot be kept (%s)", reasonOf(err))
	}
	return "what was there is kept as " + aside
}

// readJournal applies to the state what a journal holds. It never fails: what cannot be read is reported.
func readJournal(path string, st *store) (r report) {
	f, err := os.OpenFile(path, os.O_RDONLY|openWary, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return r
	}
	r.found = true
	if err != nil {
		r.err = errors.New(reasonOf(err))
		return r
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		r.err = errors.New(reasonOf(err))
	case !info.Mode().IsRegular():
		r.err = errors.New(describe(info.Mode()))
	case othersFile(info, filepath.Dir(path)):
		r.err = errors.New("it belongs to another user")
	case info.Mode().Perm()&0o077 != 0:
		r.err = fmt.Errorf("its mode is %04o, and this program's own is 0600", info.Mode().Perm())
	default:
		r.read(f, st)
	}
	return r
}

// read decodes many lines at once, on all processors, while those before them are applied, in order: to decode is most of the
// time by which a full journal holds up a start, and to apply a quarter.
func (r *report) read(f io.Reader, st *store) {
	type piece struct {
		entries []*entry
		torn    bool
		err     error // the last piece's
	}
	pieces := make(chan piece, 1)
	go func() { // ends with the file
		defer close(pieces)
		in := bufio.NewReaderSize(f, 64<<10)
		for err := error(nil); err == nil; {
			var p piece
			var lines [][]byte
			lines, p.torn, err = readLines(in)
			p.entries, p.err = readEntries(lines), err
			pieces <- p
		}
	}()
	for p := range pieces {
		for _, e := range p.entries {
			r.lines++
			if e != nil {
				st.apply(e) // what it refuses it refused then, too
			} else if r.damaged++; r.first == 0 {
				r.first = r.lines
			}
		}
		r.torn = p.torn
		if p.err != nil && !errors.Is(p.err, io.EOF) {
			r.err = errors.New(reasonOf(p.err))
		}
	}
}

// readLines reads about a quarter of a megabyte of lines; one that is too long is nil. The last one of the file is torn without its
// newline: it was not finished, and so not acknowledged, even where it reads well.
func readLines(in *bufio.Reader) (lines [][]byte, torn bool, err error) {
	for size := 0; size < 256<<10; {
		line, tooLong, err := readLine(in, journalLine)
		if err != nil {
			return lines, len(line) > 0 || tooLong, err
		}
		lines = append(lines, line)
		size += len(line)
	}
	return lines, false, nil
}

// readEntries decodes lines; one that is damaged is nil.
func readEntries(lines [][]byte) []*entry {
	entries := make([]*entry, len(lines))
	var all sync.WaitGroup
	together := min(runtime.GOMAXPROCS(0), 1+len(lines)/64)
	for first := range together {
		all.Go(func() {
			for i := first; i < len(lines); i += together {
				if e, err := readEntry(lines[i]); err == nil {
					entries[i] = e
				}
			}
		})
	}
	all.Wait()
	return entries
}
