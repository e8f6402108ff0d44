//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var testTimings = timings{probe: 2 * time.Second, bindGrace: 15 * time.Second, busyGrace: 10 * time.Second, join: 20 * time.Second}

const testURL = "http://127.0.0.1:41873"

func TestReadLease(t *testing.T) {
	whole := `{"schema":"majordomus-mcp-lease/v1","pid":7,"token":"ab","root":"/r","url":"http://127.0.0.1:1","started_at":"?","executable":null,"version":""}`
	with := func(url string) string { return strings.Replace(whole, `"http://127.0.0.1:1"`, url, 1) }
	write := func(content string) func(*testing.T, string) {
		return func(t *testing.T, path string) { must(t, os.WriteFile(path, []byte(content), 0o600)) }
	}
	for _, test := range []struct {
		name string
		make func(t *testing.T, path string)
		want readingState
		why  string
	}{
		{"absent", func(*testing.T, string) {}, readingAbsent, ""},
		{"empty", write(""), readingEmpty, "empty"},
		{"blank", write(" \n\t\n"), readingEmpty, "empty"},
		{"whole", write(whole), readingDocument, ""},
		{"least", write(`{"schema":"majordomus-mcp-lease/v1","later":[{}]}`), readingDocument, ""},
		{"no url yet", write(with("null")), readingDocument, ""},
		{"cut at half its length", write(whole[:len(whole)/2]), readingCorrupt, "not JSON"},
		{"two", write(whole + whole), readingCorrupt, "not JSON"},
		{"null", write("null"), readingCorrupt, "not a JSON object"},
		{"array", write("[" + whole + "]"), readingCorrupt, "not a JSON object"},
		{"another schema", write(strings.Replace(whole, "/v1", "/v2", 1)), readingCorrupt, "schema"},
		{"no schema", write("{}"), readingCorrupt, "schema"},
		{"wrong type", write(strings.Replace(whole, "7", `"7"`, 1)), readingCorrupt, `"pid" is a string`},
		{"wrong type below", write(strings.Replace(whole, `"executable":null`, `"executable":{"size":1.5}`, 1)), readingCorrupt, "size"},
		{"at the limit", write(whole + strings.Repeat(" ", leaseLimit-len(whole))), readingDocument, ""},
		{"over the limit", write(whole + strings.Repeat(" ", leaseLimit-len(whole)+1)), readingCorrupt, "over 65536"},
		{"url of another host", write(with(`"http://127.0.0.2:1"`)), readingCorrupt, "url"},
		{"url by name", write(with(`"http://localhost:1"`)), readingCorrupt, "url"},
		{"url with a path", write(with(`"http://127.0.0.1:1/"`)), readingCorrupt, "url"},
		{"url with a user", write(with(`"http://127.0.0.1:1@example.com:80"`)), readingCorrupt, "url"},
		{"url of port 0", write(with(`"http://127.0.0.1:0"`)), readingCorrupt, "url"},
		{"url of no port", write(with(`"http://127.0.0.1:"`)), readingCorrupt, "url"},
		{"url of a padded port", write(with(`"http://127.0.0.1:080"`)), readingCorrupt, "url"},
		{"url of a port too large", write(with(`"http://127.0.0.1:65536"`)), readingCorrupt, "url"},
		{"url empty", write(with(`""`)), readingCorrupt, "url"},
		{"directory", func(t *testing.T, path string) { must(t, os.Mkdir(path, 0o700)) }, readingCorrupt, "directory"},
		{"pipe", func(t *testing.T, path string) { must(t, syscall.Mkfifo(path, 0o600)) }, readingCorrupt, "regular"},
		{"link to a lease", func(t *testing.T, path string) {
			must(t, os.WriteFile(path+".real", []byte(whole), 0o600))
			must(t, os.Symlink(path+".real", path))
		}, readingCorrupt, "symbolic link"},
		{"link to nothing", func(t *testing.T, path string) { must(t, os.Symlink(path+".real", path)) }, readingCorrupt, "symbolic link"},
		{"unreadable", func(t *testing.T, path string) {
			skipAsRoot(t)
			must(t, os.WriteFile(path, []byte(whole), 0))
		}, readingCorrupt, "permission denied"},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), leaseName)
			test.make(t, path)
			r := readLease(path)
			if r.state != test.want || r.held || !strings.Contains(r.why, test.why) || strings.Contains(r.why, "\n") {
				t.Errorf("got state %d, held %v, %q; want state %d and %q", r.state, r.held, r.why, test.want, test.why)
			}
			if (r.info == nil) != (test.want == readingAbsent) {
				t.Errorf("info is %v", r.info)
			}
		})
	}
}

func TestReadLeaseHeld(t *testing.T) {
	root := newCheckout(t)
	holder := plantLease(t, root, leaseDocument{Token: "a"}, true)
	if r := readLease(leasePath(root)); !r.held {
		t.Errorf("a locked lease is not held: %+v", r)
	}
	holder.Close()
	if r := readLease(leasePath(root)); r.held || r.state != readingDocument {
		t.Errorf("after its holder is gone: %+v", r)
	}
}

func FuzzLease(f *testing.F) {
	for _, seed := range []string{
		"", "\n", "{}", "null", "[]", `{"schema":"majordomus-mcp-lease/v1"}`, "\xef\xbb\xbf{}",
		`{"schema":"majordomus-mcp-lease/v1","pid":1,"token":"00","root":"/r","url":null,"started_at":"2026-01-02T03:04:05Z","executable":{"path":"/p","mtime":1,"size":2},"version":"1.2.3"}`,
		`{"schema":"majordomus-mcp-lease/v1","url":"http://127.0.0.1:8741","pid":1e3}`,
		`{"schema":"majordomus-mcp-lease/v1","url":"http://127.0.0.1:8741@h/","root":"\ud800\n"}`,
		`{"schema":"majordomus-mcp-lease/v1","URL":"file:///","executable":{"size":"\n"}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := parseLease(data)
		if r.state != readingDocument {
			if r.why == "" || strings.ContainsAny(r.why, "\n\r") || r.state == readingAbsent {
				t.Fatalf("state %d: %q", r.state, r.why)
			}
			return
		}
		if r.doc.URL != nil && !isLeaseURL(*r.doc.URL) {
			t.Fatalf("accepted the url %q", *r.doc.URL)
		}
		again, err := json.Marshal(r.doc)
		must(t, err)
		// What JSON makes longer by escaping may cross the limit, and only that.
		if back := parseLease(again); len(again) <= leaseLimit && !reflect.DeepEqual(back, r) {
			t.Fatalf("wrote %s\nread %+v\nwant %+v", again, back, r)
		}
	})
}

func TestLeaseLife(t *testing.T) {
	root := newCheckout(t)
	e := testElector(t, root)
	e.exe, e.version = &executable{"/p", 1, 2}, "1.2.3"
	l := win(t, e)
	r := readLease(leasePath(root))
	doc := r.doc
	if !r.held || doc.URL != nil || doc.PID != os.Getpid() || doc.Root != root || len(doc.Token) != 32 || doc.Token != l.token() ||
		*doc.Executable != *e.exe || doc.Version != "1.2.3" || r.info.Mode().Perm() != 0o600 {
		t.Errorf("created %+v %+v", doc, r)
	}
	if started, err := time.Parse(time.RFC3339, doc.StartedAt); err != nil || started.Location() != time.UTC {
		t.Errorf("started_at %q: %v", doc.StartedAt, err)
	}
	must(t, l.check())

	must(t, l.publish(testURL))
	published := readLease(leasePath(root))
	want := doc
	url := testURL
	want.URL = &url
	if !published.held || !reflect.DeepEqual(published.doc, want) || !reflect.DeepEqual(l.document(), want) {
		t.Errorf("published %+v, want %+v", published.doc, want)
	}
	must(t, l.check())
	wantFiles(t, root, nameLock, leaseName)

	must(t, l.release())
	must(t, l.release())
	wantFiles(t, root, nameLock)
	for _, err := range []error{l.check(), l.publish(testURL)} {
		if !errors.Is(err, errLeaseLost) {
			t.Errorf("after the release: %v", err)
		}
	}
	wantFiles(t, root, nameLock)
	wantWarnings(t, e)
}

func TestDeletedLeaseIsPutBack(t *testing.T) {
	for name, remove := range map[string]func(root string) error{
		"file":      func(root string) error { return os.Remove(leasePath(root)) },
		"directory": func(root string) error { return os.RemoveAll(filepath.Join(root, ".ai")) },
	} {
		t.Run(name, func(t *testing.T) {
			root := newCheckout(t)
			l := win(t, testElector(t, root))
			must(t, remove(root))
			must(t, l.publish(testURL))
			want := l.document()
			must(t, remove(root))
			must(t, l.check())
			if r := readLease(leasePath(root)); !r.held || !reflect.DeepEqual(r.doc, want) {
				t.Errorf("put back %+v, want %+v", r, want)
			}
			must(t, remove(root))
			must(t, l.release())
			if r := readLease(leasePath(root)); r.state != readingAbsent {
				t.Errorf("after the release: %+v", r)
			}
		})
	}
}

func TestLostLease(t *testing.T) {
	for name, replace := range map[string]func(t *testing.T, root string){
		"held":     func(t *testing.T, root string) { plantLease(t, root, leaseDocument{Token: "other"}, true) },
		"not held": func(t *testing.T, root string) { plantLease(t, root, leaseDocument{Token: "other"}, false) },
		"link": func(t *testing.T, root string) {
			must(t, os.Rename(leasePath(root), leasePath(root)+".away"))
			must(t, os.Symlink(leasePath(root)+".away", leasePath(root)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := newCheckout(t)
			l := win(t, testElector(t, root))
			replace(t, root)
			before, _ := os.Lstat(leasePath(root))
			for _, err := range []error{l.publish(testURL), l.check(), l.publish(testURL)} {
				if !errors.Is(err, errLeaseLost) {
					t.Errorf("got %v", err)
				}
			}
			after, err := os.Lstat(leasePath(root))
			if err != nil || !os.SameFile(before, after) {
				t.Error("the other's file was touched")
			}
			must(t, os.Remove(leasePath(root)))
			if err := l.check(); !errors.Is(err, errLeaseLost) {
				t.Errorf("not lost for good: %v", err)
			}
			plantLease(t, root, leaseDocument{Token: "third"}, true)
			must(t, l.release())
			if r := readLease(leasePath(root)); r.doc.Token != "third" {
				t.Errorf("release left %+v", r)
			}
		})
	}
}

// What somebody has written into is put back under the lock; who gets that finds the lease another's by then.
func TestLostWhilePuttingBack(t *testing.T) {
	root := newCheckout(t)
	l := win(t, testElector(t, root))
	must(t, os.WriteFile(leasePath(root), []byte("{"), 0o600))
	checked := make(chan error, 1)
	must(t, underNameLock(t.Context(), filepath.Dir(leasePath(root)), func() error {
		go func() { checked <- l.check() }() // ends when the lock is free
		eventually(t, "somebody has looked", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.altered
		})
		plantLease(t, root, leaseDocument{Token: "other"}, true)
		return nil
	}))
	if err := <-checked; !errors.Is(err, errLeaseLost) {
		t.Errorf("check says %v", err)
	}
}

func TestReleaseSparesSuccessor(t *testing.T) {
	root := newCheckout(t)
	l := win(t, testElector(t, root))
	plantLease(t, root, leaseDocument{Token: "other"}, true) // unnoticed until the release
	must(t, l.release())
	if r := readLease(leasePath(root)); r.doc.Token != "other" {
		t.Errorf("release left %+v", r)
	}
}

func TestCheckoutGone(t *testing.T) {
	root := filepath.Join(newCheckout(t), "worktree")
	makeCheckout := func() {
		must(t, os.Mkdir(root, 0o755))
		must(t, os.WriteFile(filepath.Join(root, ".git"), []byte("gitdir: elsewhere\n"), 0o644))
	}
	makeCheckout()
	l := win(t, testElector(t, root))
	must(t, l.publish(testURL))
	must(t, os.RemoveAll(root))
	must(t, l.check())
	if _, err := os.Lstat(root); err == nil {
		t.Fatal("check made the checkout anew")
	}
	makeCheckout() // another worktree in its place
	must(t, l.check())
	if entries, _ := os.ReadDir(root); len(entries) != 1 {
		t.Errorf("check wrote into another checkout: %v", entries)
	}
	win(t, testElector(t, root))
	if err := l.check(); !errors.Is(err, errLeaseLost) {
		t.Errorf("with a new server there: %v", err)
	}
}

// The kinds of thing a start may find under the lease's name.

func TestStatExecutable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	if got := statExecutable(path); got != nil {
		t.Errorf("of no file: %+v", got)
	}
	must(t, os.WriteFile(path, []byte("four"), 0o700))
	must(t, os.Chtimes(path, time.Time{}, time.UnixMilli(1234567)))
	if got := statExecutable(path); got == nil || *got != (executable{path, 1234567, 4}) {
		t.Errorf("got %+v", got)
	}
}

// Elections that take time, on a clock of their own. In it every file comes from the future.

// A killed server loses its socket before its lock: refused, and held for a moment more.

func TestPublishAfterTakeOver(t *testing.T) {
	root := newCheckout(t)
	l := win(t, testElector(t, root))
	setHook(t, &testHookBeforePublish, func() {
		e := testElector(t, root)
		e.timing.bindGrace = time.Nanosecond
		found, err := e.elect(context.Background())
		must(t, err)
		t.Cleanup(func() { found.lease.release() })
		wantWarnings(t, e, "abandoned")
	})
	if err := l.publish(testURL); !errors.Is(err, errLeaseLost) {
		t.Errorf("got %v", err)
	}
	if r := readLease(leasePath(root)); r.doc.URL != nil || r.doc.Token == l.token() || !r.held {
		t.Errorf("left %+v", r)
	}
}

// created between the look and the link

func TestLeaseMethodsAtOnce(t *testing.T) {
	root := newCheckout(t)
	l := win(t, testElector(t, root))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				if err := l.check(); err != nil {
					t.Error(err)
					return
				}
				if r := readLease(leasePath(root)); r.state == readingDocument && !r.held {
					t.Error("seen without a holder")
					return
				}
			}
		})
	}
	wg.Go(func() {
		for range 50 {
			if err := l.publish(testURL); err != nil {
				t.Error(err)
			}
			os.Remove(leasePath(root))
		}
	})
	wg.Wait()
}

// A check beside a release must not put the file back.

func TestReleaseBesideCheck(t *testing.T) {
	root := newCheckout(t)
	for range 50 {
		l := win(t, testElector(t, root))
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for l.check() == nil {
				}
			})
			wg.Go(func() {
				if err := l.release(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		wantFiles(t, root, nameLock)
	}
}

func TestCheckDuringDeletion(t *testing.T) {
	root := newCheckout(t)
	l := win(t, testElector(t, root))
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 50 {
			os.RemoveAll(filepath.Join(root, ".ai")) // fails when a file comes in between
		}
		close(done)
	})
	for deleting := true; deleting; {
		must(t, l.check())
		select {
		case <-done:
			deleting = false
		default:
		}
	}
	wg.Wait()
	must(t, l.check())
	if r := readLease(leasePath(root)); !r.held || r.doc.Token != l.token() {
		t.Errorf("left %+v", r)
	}
}

func TestDieOf(t *testing.T) {
	const env = "MAJORDOMUS_TEST_DIE"
	if os.Getenv(env) != "" {
		dieOf(syscall.SIGTERM)
		os.Exit(3)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestDieOf$")
	cmd.Env = append(os.Environ(), env+"=1", "TMPDIR="+t.TempDir()) // which testscript.Main cannot clear when it dies
	err := cmd.Run()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != syscall.SIGTERM {
		t.Errorf("ended with %v", err)
	}
}

// newCheckout makes a directory that looks like a checkout, by its real path.

func newCheckout(t *testing.T) string {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	must(t, os.Mkdir(filepath.Join(root, ".git"), 0o755))
	return root
}

// testElector has a probe that finds everything in order, and a log that logOf reads.

func testElector(t *testing.T, root string) *elector {
	t.Helper()
	buffer := new(bytes.Buffer)
	return &elector{
		root: root, version: "(devel)", timing: testTimings,
		log:   slog.New(&bufferHandler{slog.NewTextHandler(buffer, nil), buffer}),
		probe: func(context.Context, leaseDocument) (*conn, probeResult, error) { return new(conn), probeProven, nil },
	}
}

type bufferHandler struct {
	slog.Handler
	buffer *bytes.Buffer
}

func logOf(e *elector) string { return e.log.Handler().(*bufferHandler).buffer.String() }

// wantWarnings requires one warning a text and nothing else.

func wantWarnings(t *testing.T, e *elector, texts ...string) {
	t.Helper()
	log := logOf(e)
	lines := strings.SplitAfter(log, "\n")
	if len(lines)-1 != len(texts) {
		t.Errorf("logged %d lines, want %d:\n%s", len(lines)-1, len(texts), log)
		return
	}
	for i, text := range texts {
		if !strings.Contains(lines[i], "level=WARN") || !strings.Contains(lines[i], text) {
			t.Errorf("logged %q, want a warning with %q", lines[i], text)
		}
	}
}

func wantAlone(t *testing.T, err error, retry bool, text string) {
	t.Helper()
	var alone *aloneError
	if !errors.As(err, &alone) || alone.retry != retry || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v (%#v), want an aloneError with retry %v about %s", err, err, retry, text)
	}
}

// wantFiles requires exactly these names in the state directory, in order.

func wantFiles(t *testing.T, root string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(root, leaseDir))
	must(t, err)
	var got []string
	for _, entry := range entries {
		if entry.Name() != ".gitignore" {
			got = append(got, entry.Name())
		}
	}
	if len(got) > 1 && got[len(got)-2] == leaseName { // "server.json" sorts before "server.lock"
		got[len(got)-2], got[len(got)-1] = got[len(got)-1], got[len(got)-2]
	}
	if !reflect.DeepEqual(got, names) {
		t.Errorf("the state directory holds %q, want %q", got, names)
	}
}

// win requires that the election is won, and releases the lease when the test is over.

func win(t *testing.T, e *elector) *lease {
	t.Helper()
	found, err := e.elect(context.Background())
	must(t, err)
	if found.lease == nil {
		t.Fatalf("attached to %+v", found.doc)
	}
	t.Cleanup(func() { found.lease.release() })
	return found.lease
}

// plantLease puts a lease in place as another process would, in the way of whatever is there, and returns what holds it.

func plantLease(t *testing.T, root string, doc leaseDocument, held bool) *os.File {
	t.Helper()
	dir, err := stateDir(root)
	must(t, err)
	temp := filepath.Join(dir, "planted")
	must(t, os.WriteFile(temp, leaseBytes(t, doc), 0o600))
	f, err := os.Open(temp)
	must(t, err)
	if held {
		must(t, flock(f, lockExclusive))
	}
	must(t, os.Rename(temp, leasePath(root)))
	t.Cleanup(func() { f.Close() })
	return f
}

func leaseBytes(t *testing.T, doc leaseDocument) []byte {
	t.Helper()
	doc.Schema = leaseSchema
	data, err := json.Marshal(doc)
	must(t, err)
	return data
}

// setHook stalls or overtakes who comes by first. (sync.Once would make the second wait for the first.)

func setHook(t *testing.T, hook *func(), f func()) {
	var passed atomic.Bool
	*hook = func() {
		if passed.CompareAndSwap(false, true) {
			f()
		}
	}
	t.Cleanup(func() { *hook = nil })
}

func receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(30 * time.Second):
		t.Fatal("nothing came within 30 s")
		panic("unreachable")
	}
}

func skipAsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		t.Skip("root may do everything: run the tests as another user")
	}
}

func ptr[T any](v T) *T { return &v }
