package main

// The log: one line an event on stderr, for people.

import (
	"context"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
)

// lineHandler writes `majordomus: warning: message key="value"`. Whatever a
// message holds, it stays one line and reaches no terminal raw.
type lineHandler struct {
	out   *lineWriter
	level slog.Level
}

func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }
func (h *lineHandler) WithAttrs([]slog.Attr) slog.Handler           { return h }
func (h *lineHandler) WithGroup(string) slog.Handler                { return h }

func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString("majordomus: ")
	switch {
	case r.Level >= slog.LevelError:
		b.WriteString("error: ")
	case r.Level >= slog.LevelWarn:
		b.WriteString("warning: ")
	case r.Level < slog.LevelInfo:
		b.WriteString("debug: ")
	}
	b.WriteString(printable(clip(r.Message, logLineLimit)))
	r.Attrs(func(a slog.Attr) bool {
		b.WriteString(" " + a.Key + "=" + strconv.Quote(a.Value.String()))
		return true
	})
	h.out.line(b.String() + "\n")
	return nil
}

const logLineLimit = 16 << 10 // bytes; what others say in it is bounded where it comes from

// printable replaces what could forge a line or steer a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if steers(r) {
			return '\uFFFD'
		}
		return r
	}, s)
}

// steers is true of control characters, separators of lines, and the invisible
// characters, some of which change the direction of text.
func steers(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
}

// lineWriter writes lines beside the program: a stderr that nobody reads must
// not stop it. What does not fit into the queue is dropped.
type lineWriter struct {
	lines   chan string
	dropped atomic.Int64
	pending atomic.Int64
	written chan struct{} // a receive means that a line has been written
}

func newLineWriter(w io.Writer) *lineWriter {
	lw := &lineWriter{lines: make(chan string, 256), written: make(chan struct{}, 1)}
	go func() { // ends with the process: it may be blocked for ever
		for l := range lw.lines {
			if n := lw.dropped.Swap(0); n > 0 {
				l = "majordomus: warning: " + strconv.FormatInt(n, 10) + " lines were dropped: nobody read them\n" + l
			}
			io.WriteString(w, l)
			lw.pending.Add(-1)
			signalOn(lw.written)
		}
	}()
	return lw
}

func (w *lineWriter) line(l string) {
	w.pending.Add(1)
	select {
	case w.lines <- l:
	default:
		w.pending.Add(-1)
		w.dropped.Add(1)
	}
}

// flush waits until what was logged is written, but not for a reader that is
// not there.
func (w *lineWriter) flush() {
	t := time.NewTimer(500 * time.Millisecond)
	defer t.Stop()
	for w.pending.Load() > 0 {
		select {
		case <-w.written:
		case <-t.C:
			return
		}
	}
}
