//go:build unix

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestJudge(t *testing.T) {
	url := testURL
	file, newer := executable{"/bin/majordomus", 1000, 10}, executable{"/bin/majordomus", 2000, 10}
	bigger, elsewhere := executable{"/bin/majordomus", 1000, 11}, executable{"/opt/majordomus", 1000, 11}
	document := reading{state: readingDocument, doc: leaseDocument{PID: 7, Root: "/r", Version: "1.2.3", Executable: &file}}
	// Each row starts from a healthy lease of the same release and file as this process.
	tests := []struct {
		name     string
		change   func(s *sight)
		want     verdict
		takeOver bool
	}{
		{"absent", func(s *sight) { s.reading = reading{} }, verdictCreate, false},
		{"empty", func(s *sight) { s.reading = reading{state: readingEmpty} }, verdictStale, true},
		{"corrupt", func(s *sight) { s.reading = reading{state: readingCorrupt} }, verdictStale, true},
		{"corrupt although held", func(s *sight) { s.reading = reading{state: readingCorrupt, held: true} }, verdictStale, true},
		{"not held", func(s *sight) { s.reading.held = false }, verdictStale, true},
		{"not held, another root", func(s *sight) { s.reading.held, s.sameRoot = false, false }, verdictStale, true},
		{"held, answers", func(s *sight) {}, verdictAttach, false},

		{"another root", func(s *sight) { s.sameRoot = false }, verdictForeign, false},
		{"another root, older file", func(s *sight) { s.sameRoot, s.mine, s.disk = false, &newer, &newer }, verdictForeign, false},
		{"another root, no url, old", func(s *sight) { s.sameRoot, s.reading.doc.URL, s.age = false, nil, time.Hour }, verdictForeign, false},
		{"refused just now", func(s *sight) { s.probe = probeUnreachable }, verdictWait, false},
		{"refused", func(s *sight) { s.probe, s.unanswered = probeUnreachable, time.Minute }, verdictForeign, false},
		{"refused, older file", func(s *sight) {
			s.probe, s.unanswered, s.mine, s.disk = probeUnreachable, time.Minute, &newer, &newer
		}, verdictForeign, false},
		{"another's answer just now", func(s *sight) { s.probe = probeForeign }, verdictWait, false},
		{"another's answer", func(s *sight) { s.probe, s.unanswered = probeForeign, time.Minute }, verdictForeign, false},

		{"older file by time", func(s *sight) { s.mine, s.disk = &newer, &newer }, verdictSuperseded, true},
		{"older file by size", func(s *sight) { s.mine, s.disk = &bigger, &bigger }, verdictSuperseded, true},
		{"older file, silent", func(s *sight) { s.mine, s.disk, s.probe = &newer, &newer, probeTimeout }, verdictSuperseded, true},
		{"older file, no url", func(s *sight) { s.mine, s.disk, s.reading.doc.URL = &newer, &newer, nil }, verdictSuperseded, true},
		{"older file, but so is mine", func(s *sight) { s.mine, s.disk = &bigger, &newer }, verdictAttach, false},
		{"the same file, replaced since", func(s *sight) { s.disk = &newer }, verdictAttach, false},
		{"the same file, removed since", func(s *sight) { s.disk = nil }, verdictAttach, false},
		{"newer than mine", func(s *sight) { s.reading.doc.Executable, s.disk = &newer, &newer }, verdictAttach, false},
		{"another path", func(s *sight) { s.mine, s.disk = &elsewhere, &elsewhere }, verdictAttach, false},
		{"unknown file there", func(s *sight) { s.reading.doc.Executable = nil }, verdictAttach, false},
		{"unknown file here", func(s *sight) { s.mine, s.disk = nil, nil }, verdictAttach, false},

		{"older release", func(s *sight) { s.version = "1.10.0" }, verdictSuperseded, true},
		{"older release, file unknown here", func(s *sight) { s.version, s.mine, s.disk = "1.10.0", nil, nil }, verdictSuperseded, true},
		{"older release, but my file was replaced", func(s *sight) { s.version, s.disk = "1.10.0", &newer }, verdictAttach, false},
		{"older release, silent", func(s *sight) { s.version, s.probe = "1.10.0", probeTimeout }, verdictBusy, false},
		{"older release, no url", func(s *sight) { s.version, s.reading.doc.URL, s.probe = "1.10.0", nil, probeNone }, verdictWait, false},
		{"newer release", func(s *sight) { s.version = "1.2.2" }, verdictAttach, false},
		{"unordered here", func(s *sight) { s.version = "(devel)" }, verdictAttach, false},
		{"unordered there", func(s *sight) { s.reading.doc.Version = "(devel)" }, verdictAttach, false},

		{"no url, young", func(s *sight) { s.reading.doc.URL, s.probe, s.age = nil, probeNone, 15*time.Second-1 }, verdictWait, false},
		{"no url, old", func(s *sight) { s.reading.doc.URL, s.probe, s.age = nil, probeNone, 15*time.Second }, verdictAbandoned, true},
		{"silent", func(s *sight) { s.probe, s.unanswered = probeTimeout, 10*time.Second-1 }, verdictBusy, false},
		{"silent too long", func(s *sight) { s.probe, s.unanswered = probeTimeout, 10*time.Second }, verdictBusy, true},
		{"old, but answers", func(s *sight) { s.age, s.unanswered = 24*time.Hour, 24*time.Hour }, verdictAttach, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := sight{reading: document, sameRoot: true, probe: probeProven, mine: &file, disk: &file, version: "1.2.3", timing: testTimings}
			s.reading.held, s.reading.doc.URL = true, &url
			test.change(&s)
			got, takeOver, why := judge(s)
			if got != test.want || takeOver != test.takeOver {
				t.Errorf("got %s, take over %v (%s); want %s, %v", got, takeOver, why, test.want, test.takeOver)
			}
			if strings.Contains(why, "\n") {
				t.Errorf("the reason is more than one line: %q", why)
			}
		})
	}
}

func TestOlderRelease(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want bool
	}{
		{"1.2.3", "1.2.4", true}, {"1.2.3", "1.3.0", true}, {"1.9.9", "2.0.0", true}, {"1.2.9", "1.2.10", true},
		{"1.2.3", "1.2.99999999999999999999999", true},
		{"1.2.3", "1.2.3", false}, {"1.2.4", "1.2.3", false}, {"1.10.0", "1.9.0", false},
		{"v1.2.3", "1.2.4", false}, {"1.2.3", "v1.2.4", false}, {"1.2", "1.2.4", false}, {"1.2.3.4", "1.2.4", false},
		{"1.2.3", "1.2.4-rc1", false}, {"1.02.3", "1.3.0", false}, {"", "1.0.0", false}, {"1..3", "2.0.0", false},
		{"-1.2.3", "1.2.4", false}, {"(devel)", "1.0.0", false},
	} {
		if got := olderRelease(test.a, test.b); got != test.want {
			t.Errorf("olderRelease(%q, %q) = %v", test.a, test.b, got)
		}
	}
}

func TestOwnLeaseIsNotProbed(t *testing.T) {
	e := testElector(t, newCheckout(t))
	e.probe = func(context.Context, leaseDocument) (*conn, probeResult, error) {
		t.Error("probed")
		return nil, probeTimeout, nil
	}
	l := win(t, e)
	must(t, l.publish(testURL))
	if again := win(t, e); again != l {
		t.Error("another lease")
	}
}

func TestTakeOver(t *testing.T) {
	for _, test := range []struct {
		name  string
		plant func(t *testing.T, root string)
		warn  string
	}{
		{"empty", func(t *testing.T, root string) { must(t, os.WriteFile(leasePath(root), nil, 0o600)) }, "stale, it is empty"},
		{"cut", func(t *testing.T, root string) { must(t, os.WriteFile(leasePath(root), []byte(`{"sch`), 0o600)) }, "stale, it is not JSON"},
		{"pipe", func(t *testing.T, root string) { must(t, syscall.Mkfifo(leasePath(root), 0o600)) }, "stale, it is not a regular file"},
		{"link", func(t *testing.T, root string) {
			must(t, os.WriteFile(filepath.Join(root, "precious"), []byte("kept"), 0o600))
			must(t, os.Symlink(filepath.Join(root, "precious"), leasePath(root)))
		}, "stale, it is a symbolic link"},
		{"dead", func(t *testing.T, root string) {
			plantLease(t, root, leaseDocument{PID: os.Getpid(), Root: root}, false)
		}, "stale, no process holds it"},
		{"copied with its checkout", func(t *testing.T, root string) {
			other := newCheckout(t)
			must(t, win(t, testElector(t, other)).publish(testURL))
			data, err := os.ReadFile(leasePath(other))
			must(t, err)
			must(t, os.WriteFile(leasePath(root), data, 0o600))
		}, "stale, no process holds it"},
		{"abandoned", func(t *testing.T, root string) {
			plantLease(t, root, leaseDocument{Root: root, StartedAt: "2001-01-01T00:00:00Z"}, true)
		}, "abandoned"},
		{"older release", func(t *testing.T, root string) {
			url := testURL
			plantLease(t, root, leaseDocument{Root: root, URL: &url, Version: "0.0.9"}, true)
		}, "superseded"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := newCheckout(t)
			_, err := stateDir(root)
			must(t, err)
			test.plant(t, root)
			e := testElector(t, root)
			e.version = "1.0.0"
			e.probe = func(context.Context, leaseDocument) (*conn, probeResult, error) { return nil, probeProven, nil }
			l := win(t, e)
			must(t, l.publish(testURL))
			wantWarnings(t, e, "took over .ai/local/state/mcp/server.json: "+test.warn)
			if data, err := os.ReadFile(filepath.Join(root, "precious")); err == nil && string(data) != "kept" {
				t.Errorf("wrote through the link: %q", data)
			}
			wantFiles(t, root, nameLock, leaseName)
		})
	}
}

func TestAloneFor(t *testing.T) {
	for _, test := range []struct {
		err   error
		retry bool
		hint  string
	}{
		{syscall.ENOSPC, true, "free some space"}, {syscall.EDQUOT, true, "free some space"}, {syscall.EMFILE, true, ""},
		{errHeld, true, "stopped"}, {syscall.ENOLCK, true, ""}, {syscall.EIO, true, ""},
		{syscall.EACCES, true, "write permission"}, {syscall.EROFS, true, "write permission"}, {syscall.ENOTDIR, false, ""},
		{errNoLocks, false, "local file system"}, {errNoLinks, false, "local file system"}, {errNotPlain, false, "move it away"},
	} {
		err := aloneFor("doing", &os.PathError{Op: "open", Path: "/p", Err: test.err})
		wantAlone(t, err, test.retry, "doing: open /p: ")
		if !strings.Contains(err.Error(), test.hint) || !errors.Is(err, test.err) {
			t.Errorf("%v: want the hint %q", err, test.hint)
		}
	}
}

func TestElectionAttaches(t *testing.T) {
	root := newCheckout(t)
	link := filepath.Join(t.TempDir(), "other-name")
	must(t, os.Symlink(root, link))
	must(t, win(t, testElector(t, root)).publish(testURL))
	e := testElector(t, link) // the same directory by another name
	found, err := e.elect(t.Context())
	must(t, err)
	if found.lease != nil || found.conn == nil || *found.doc.URL != testURL || found.doc.Root != root {
		t.Errorf("got %+v", found)
	}
	wantWarnings(t, e)
}

func TestRootThatIsNotUTF8(t *testing.T) {
	root := filepath.Join(newCheckout(t), "caf\xe9 \xff\xfe")
	if err := os.MkdirAll(filepath.Join(root, ".git"), 0o755); err != nil {
		t.Skipf("this file system takes no such name: %v", err)
	}
	must(t, win(t, testElector(t, root)).publish(testURL))
	found, err := testElector(t, root).elect(t.Context())
	must(t, err)
	if found.conn == nil || found.doc.Root != root {
		t.Errorf("got %+v", found)
	}
}

func TestElectionFails(t *testing.T) {
	for _, test := range []struct {
		name string
		make func(t *testing.T, dir string) error
		path string
	}{
		{"lease is a directory", func(t *testing.T, dir string) error { return os.Mkdir(filepath.Join(dir, leaseName), 0o700) }, leaseName},
		{"lock is a directory", func(t *testing.T, dir string) error {
			return errors.Join(os.Mkdir(filepath.Join(dir, nameLock), 0o700), os.WriteFile(filepath.Join(dir, leaseName), nil, 0o600))
		}, nameLock},
		{"lock is a link", func(t *testing.T, dir string) error {
			return errors.Join(os.Symlink("nowhere", filepath.Join(dir, nameLock)), os.WriteFile(filepath.Join(dir, leaseName), nil, 0o600))
		}, nameLock},
		{"lock is a pipe", func(t *testing.T, dir string) error {
			return errors.Join(syscall.Mkfifo(filepath.Join(dir, nameLock), 0o600), os.WriteFile(filepath.Join(dir, leaseName), nil, 0o600))
		}, nameLock},
		{"directory is read-only", func(t *testing.T, dir string) error {
			skipAsRoot(t)
			return os.Chmod(dir, 0o555)
		}, leaseDir},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := newCheckout(t)
			dir, err := stateDir(root)
			must(t, err)
			must(t, test.make(t, dir))
			defer os.Chmod(dir, 0o700)
			before, _ := os.ReadDir(dir)
			e := testElector(t, root)
			_, err = e.elect(t.Context())
			wantAlone(t, err, false, test.path)
			wantWarnings(t, e)
			if after, _ := os.ReadDir(dir); len(after) != len(before) {
				t.Errorf("left behind: %v", after)
			}
		})
	}
}

func TestForeignRoot(t *testing.T) {
	root, other := newCheckout(t), newCheckout(t)
	url := testURL
	plantLease(t, root, leaseDocument{Root: other, URL: &url, Token: "theirs"}, true)
	e := testElector(t, root)
	e.probe = func(context.Context, leaseDocument) (*conn, probeResult, error) {
		t.Error("probed a lease of another root")
		return nil, probeForeign, nil
	}
	_, err := e.elect(t.Context())
	wantAlone(t, err, true, root)
	wantAlone(t, err, true, other)
	if r := readLease(leasePath(root)); r.doc.Token != "theirs" {
		t.Errorf("left %+v", r)
	}
}

func TestElectionOverTime(t *testing.T) {
	url := testURL
	held := leaseDocument{PID: 7, URL: &url, Token: "theirs", StartedAt: "2999-01-01T00:00:00Z"}
	starting := held
	starting.URL = nil
	closed := make(chan struct{})
	close(closed)
	silent := func(ctx context.Context, _ leaseDocument) (*conn, probeResult, error) {
		<-ctx.Done()
		return nil, probeTimeout, ctx.Err()
	}
	refused := func(context.Context, leaseDocument) (*conn, probeResult, error) {
		return nil, probeUnreachable, errors.New("connection refused")
	}
	for _, test := range []struct {
		name         string
		doc          leaseDocument
		set          func(e *elector)
		after        time.Duration // the least; at most a probe and a pause more
		warn         string        // of a take-over
		alone, ended bool
	}{
		{"busy", held, func(e *elector) { e.probe = silent }, 10 * time.Second, "busy", false, false},
		{"abandoned", starting, func(e *elector) {}, 15 * time.Second, "abandoned", false, false},
		{"refused", held, func(e *elector) { e.probe = refused }, foreignGrace, "", true, false},
		{"out of time", starting, func(e *elector) { e.timing.bindGrace = time.Hour }, 20 * time.Second, "", true, false},
		{"out of time while asking", held, func(e *elector) { e.probe, e.timing.busyGrace = silent, time.Hour }, 20 * time.Second, "", true, false},
		{"input ended while starting", starting, func(e *elector) { e.ended = closed }, 0, "", false, true},
		{"input ended while busy", held, func(e *elector) { e.probe, e.ended = silent, closed }, 2 * time.Second, "", false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				root := newCheckout(t)
				test.doc.Root = root
				plantLease(t, root, test.doc, true)
				e := testElector(t, root)
				test.set(e)
				start := time.Now()
				found, err := e.elect(t.Context())
				if took := time.Since(start); took < test.after || took > test.after+e.timing.probe+lastDelay*8 {
					t.Errorf("took %v, want %v", took, test.after)
				}
				switch {
				case test.alone:
					wantAlone(t, err, true, leaseFile)
				case test.ended:
					if err != errInputEnded {
						t.Errorf("got %v", err)
					}
				default:
					must(t, err)
					t.Cleanup(func() { found.lease.release() })
				}
				if test.warn != "" {
					wantWarnings(t, e, test.warn)
					return
				}
				wantWarnings(t, e)
				if r := readLease(leasePath(root)); r.doc.Token != "theirs" || !r.held {
					t.Errorf("the lease was touched: %+v", r)
				}
			})
		})
	}
}

func TestInputEndedDoesNotKeepFromWinning(t *testing.T) {
	e := testElector(t, newCheckout(t))
	closed := make(chan struct{})
	close(closed)
	e.ended = closed
	win(t, e)
}

func TestElectionCancelled(t *testing.T) {
	root := newCheckout(t)
	plantLease(t, root, leaseDocument{Root: root}, true)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := testElector(t, root).elect(ctx); err != context.Canceled {
		t.Errorf("got %v", err)
	}
}

func TestDyingServerIsNotForeign(t *testing.T) {
	for name, asking := range map[string]time.Duration{
		"dead at the fourth look":                0,
		"dead while it is asked, past the grace": foreignGrace,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				root := newCheckout(t)
				holder := plantLease(t, root, leaseDocument{Root: root, URL: ptr(testURL)}, true)
				e := testElector(t, root)
				asked := 0
				e.probe = func(ctx context.Context, _ leaseDocument) (*conn, probeResult, error) {
					if asked++; asked == 4 {
						must(t, pause(ctx, asking, nil))
						holder.Close()
					}
					return nil, probeUnreachable, errors.New("connection refused")
				}
				win(t, e)
				wantWarnings(t, e, "stale")
			})
		})
	}
}

func TestServerThatWakesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root := newCheckout(t)
		url := testURL
		plantLease(t, root, leaseDocument{Root: root, URL: &url}, true)
		e := testElector(t, root)
		asked := 0
		e.probe = func(ctx context.Context, _ leaseDocument) (*conn, probeResult, error) {
			if asked++; asked == 4 {
				return new(conn), probeProven, nil
			}
			<-ctx.Done()
			return nil, probeTimeout, ctx.Err()
		}
		found, err := e.elect(t.Context())
		must(t, err)
		if found.conn == nil {
			t.Error("did not attach")
		}
		wantWarnings(t, e)
	})
}

func TestTwoElectorsJudgeOneStaleLease(t *testing.T) {
	for name, overtake := range map[string]func(t *testing.T, root string, dead *os.File){
		"a fast one serves": func(t *testing.T, root string, _ *os.File) {
			must(t, win(t, testElector(t, root)).publish(testURL))
		},
		// An inode number is free for the next lease as soon as the file is replaced. Here it even has the old time.
		"with the same inode number": func(t *testing.T, root string, dead *os.File) {
			info, err := dead.Stat()
			must(t, err)
			alive := leaseDocument{Root: root, Token: "alive", URL: ptr(testURL)}
			must(t, os.WriteFile(leasePath(root), leaseBytes(t, alive), 0o600))
			must(t, os.Chtimes(leasePath(root), info.ModTime(), info.ModTime()))
			must(t, flock(dead, lockExclusive))
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := newCheckout(t)
			dead := plantLease(t, root, leaseDocument{Root: root, Token: "dead"}, false)
			judged, overtaken := make(chan struct{}), make(chan struct{})
			setHook(t, &testHookBeforeTakeOver, func() {
				close(judged)
				<-overtaken
			})
			slow := testElector(t, root)
			result := make(chan outcome, 1)
			go func() {
				found, err := slow.elect(context.Background())
				if err != nil {
					t.Error(err)
				}
				result <- found
			}()
			receive(t, judged)
			overtake(t, root, dead)
			want := readLease(leasePath(root)).doc.Token
			close(overtaken)
			if found := receive(t, result); found.lease != nil || found.doc.Token != want {
				t.Errorf("got %+v, want to attach to %s", found, want)
			}
			wantWarnings(t, slow)
		})
	}
}

func TestCreateLosesTheRace(t *testing.T) {
	root := newCheckout(t)
	var winner *lease
	setHook(t, &testHookBeforeCreate, func() {
		winner = win(t, testElector(t, root))
		must(t, winner.publish(testURL))
	})
	e := testElector(t, root)
	found, err := e.elect(t.Context())
	must(t, err)
	if found.conn == nil || found.doc.Token != winner.token() {
		t.Errorf("got %+v", found)
	}
	wantWarnings(t, e)
	wantFiles(t, root, nameLock, leaseName)
}

func TestElectorsRace(t *testing.T) {
	for round := range 20 {
		root := newCheckout(t)
		if round%2 == 0 {
			plantLease(t, root, leaseDocument{Root: root, Token: "dead", URL: ptr(testURL)}, false)
		}
		const racers = 16
		var electors [racers]*elector
		var found [racers]outcome
		start := make(chan struct{})
		var wg sync.WaitGroup
		for i := range racers {
			electors[i] = testElector(t, root)
			wg.Go(func() {
				<-start
				for {
					var err error
					if found[i], err = electors[i].elect(t.Context()); err != nil {
						t.Error(err)
						return
					}
					if found[i].lease == nil {
						return
					}
					if err := found[i].lease.publish(testURL); err == nil || !errors.Is(err, errLeaseLost) {
						return
					}
					found[i].lease.release()
				}
			})
		}
		close(start)
		wg.Wait()
		token := readLease(leasePath(root)).doc.Token
		winners, warnings := 0, 0
		for i := range racers {
			warnings += strings.Count(logOf(electors[i]), "\n")
			if found[i].lease != nil {
				winners++
				must(t, found[i].lease.check())
				defer found[i].lease.release()
			}
			if found[i].doc.Token != token {
				t.Errorf("round %d: racer %d ended with %q, the lease says %q", round, i, found[i].doc.Token, token)
			}
		}
		if winners != 1 || warnings != (round+1)%2 {
			t.Errorf("round %d: %d winners, %d warnings", round, winners, warnings)
		}
		wantFiles(t, root, nameLock, leaseName)
	}
}

func TestOldTempsAreRemoved(t *testing.T) {
	root := newCheckout(t)
	plantLease(t, root, leaseDocument{}, false)
	dir := filepath.Join(root, leaseDir)
	hourAgo := time.Now().Add(-time.Hour)
	for _, name := range []string{"old", "young", "held"} {
		path := filepath.Join(dir, tempPrefix+name)
		must(t, os.WriteFile(path, leaseBytes(t, leaseDocument{}), 0o600))
		if name != "young" {
			must(t, os.Chtimes(path, hourAgo, hourAgo))
		}
		if name == "held" {
			f, err := os.Open(path)
			must(t, err)
			defer f.Close()
			must(t, flock(f, lockExclusive))
		}
	}
	must(t, os.WriteFile(filepath.Join(dir, "journal"), nil, 0o600))
	must(t, os.Chtimes(filepath.Join(dir, "journal"), hourAgo, hourAgo))
	win(t, testElector(t, root))
	wantFiles(t, root, tempPrefix+"held", tempPrefix+"young", "journal", nameLock, leaseName)
}
