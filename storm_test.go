//go:build unix

// The storm: many clients in several worktrees do everything at random that a client can do, while processes are killed,
// ended, stopped and continued, leases are damaged, directories cannot be written, disks are full and clocks are set. What
// must hold all the same is checked along the way and at the end:
//
//   - every request is answered, once; what a client was told is on the board: its name, its claims, its episode;
//   - of the servers of a checkout one at most says that it is the leaseholder; no peer is listed twice;
//   - every message that was acknowledged arrives: once, or again and marked; in order of its sender; and none that was
//     refused;
//   - nothing is left at the end, and nobody has broken down.
//
// Short by default; `go test -run Storm -storm=10m .` is the long form. It says its seed, and -storm.seed=N blows by the
// same plan again: what is done, to whom, in which order. When it happens, and so what comes of it, the machine decides.
//
// storm_client_test.go is a client and its processes, storm_ledger_test.go what was written and has arrived,
// storm_fault_test.go what goes wrong, storm_check_test.go what must hold.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var (
	stormLife = flag.Duration("storm", 0, "how long the storm blows; 0: a short one")
	stormSeed = flag.Uint64("storm.seed", 0, "the seed whose plan is followed; 0: a new one")
)

// between is a range of numbers, both ends included.
type between struct{ least, most int }

func (s between) pick(r *rand.Rand) int { return s.least + r.IntN(s.most-s.least+1) }

type weighted struct {
	kind   string
	weight int
}

func choose(r *rand.Rand, list []weighted) string {
	all := 0
	for _, w := range list {
		all += w.weight
	}
	n := r.IntN(all)
	for _, w := range list {
		if n -= w.weight; n < 0 {
			return w.kind
		}
	}
	panic("unreachable")
}

// stormProfile is what a storm is made of.
type stormProfile struct {
	worktrees, clients between // clients of each worktree
	life               time.Duration
	pause              time.Duration // between two faults, on average
	actions, faults    []weighted
	timings            [][]string // environments, of which the seed takes one
}

// stormPlan is what happens, as a function of the seed alone.
type stormPlan struct {
	stormProfile
	seed    uint64
	each    []int // clients of each worktree
	tmpfs   []bool
	timing  []string
	clients int
}

// action is one thing that a client does.
type action struct {
	kind  string
	to    int // a client
	n     int
	burst bool // while what was sent before is still open
	pause time.Duration
}

// fault is one thing that goes wrong.
type fault struct {
	kind     string
	worktree int
	client   int // of all
	n        int
	after    time.Duration
	lasts    time.Duration
}

func newStormPlan(seed uint64, profile stormProfile) *stormPlan {
	p := &stormPlan{stormProfile: profile, seed: seed}
	r := p.stream(0)
	for range profile.worktrees.pick(r) {
		n := profile.clients.pick(r)
		p.each = append(p.each, n)
		p.tmpfs = append(p.tmpfs, r.IntN(2) == 0)
		p.clients += n
	}
	if len(profile.timings) > 0 {
		p.timing = profile.timings[r.IntN(len(profile.timings))]
	}
	return p
}

func (p *stormPlan) stream(n int) *rand.Rand { return rand.New(rand.NewPCG(p.seed, uint64(n))) }

// actionsOf gives what a client does, one after the other, without end.
func (p *stormPlan) actionsOf(client int) func() action {
	r := p.stream(2 + client)
	return func() action {
		return action{
			kind: choose(r, p.actions), to: r.IntN(p.clients), n: r.IntN(1 << 16), burst: r.IntN(3) == 0,
			pause: time.Duration(r.IntN(20)) * time.Millisecond,
		}
	}
}

// allFaults gives what goes wrong, without end.
func (p *stormPlan) allFaults() func() fault {
	r := p.stream(1)
	return func() fault {
		return fault{
			kind: choose(r, p.faults), worktree: r.IntN(len(p.each)), client: r.IntN(p.clients), n: r.IntN(1 << 16),
			after: time.Duration(r.Int64N(2 * int64(p.pause))), lasts: time.Duration(100+r.IntN(5000)) * time.Millisecond,
		}
	}
}

func TestStormPlan(t *testing.T) {
	p, q := newStormPlan(7, everything()), newStormPlan(7, everything())
	if !reflect.DeepEqual(p, q) {
		t.Error("two plans of one seed differ")
	}
	f, g, other := p.allFaults(), q.allFaults(), newStormPlan(8, everything()).allFaults()
	same := true
	for range 100 {
		a, b, c := f(), g(), other()
		if a != b {
			t.Fatalf("%+v and %+v", a, b)
		}
		same = same && a == c
	}
	if same {
		t.Error("another seed makes no difference")
	}
	for client := range p.clients {
		f, g := p.actionsOf(client), q.actionsOf(client)
		for range 100 {
			if a, b := f(), g(); a != b {
				t.Fatalf("client %d: %+v and %+v", client, a, b)
			}
		}
	}
}

// everything is a storm of all kinds.
func everything() stormProfile {
	p := stormProfile{
		worktrees: between{2, 2}, clients: between{2, 4}, life: 6 * time.Second, pause: 600 * time.Millisecond,
		actions: []weighted{
			{"inbox", 20}, {"notify", 24}, {"ask", 10}, {"ack", 12}, {"reply", 8}, {"broadcast", 3}, {"announce", 10},
			{"peers", 6}, {"list", 2}, {"episodes", 3}, {"attach", 3}, {"detach", 1}, {"describe", 2}, {"ping", 3}, {"schedule", 4},
			{"tools", 1},
		},
		faults: []weighted{
			{"kill", 6}, {"kill server", 8}, {"kill some", 2}, {"term", 2}, {"term server", 4}, {"leave", 4}, {"leave server", 3},
			{"stop", 3}, {"stop server", 5}, {"delete lease", 3}, {"corrupt lease", 2}, {"replace lease", 2},
			{"clock", 8}, {"lock directory", 2}, {"fill disk", 3}, {"delete directory", 3},
		},
		timings: [][]string{
			nil,
			{"MAJORDOMUS_PROBE_TIMEOUT=1s", "MAJORDOMUS_BUSY_GRACE=2s", "MAJORDOMUS_JOIN_TIMEOUT=8s", "MAJORDOMUS_PING_INTERVAL=1s"},
		},
	}
	if *stormLife > 0 {
		p.worktrees, p.clients, p.life, p.pause = between{2, 4}, between{2, 16}, *stormLife, time.Second
	}
	return p
}

func TestStorm(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts many processes")
	}
	runStorm(t, everything())
}

// storm is one run.
type storm struct {
	t     *testing.T
	plan  *stormPlan
	mark  string        // a variable that all processes inherit
	dirs  []string      // worktrees
	clock string        // the file with the time by which schedules are due
	stop  chan struct{} // closed when nobody begins anything more
	calm  chan struct{} // closed when nobody has anything open, and all is due

	acting sync.WaitGroup
	peers  []*stormClient
	ids    atomic.Int64
	ledger
	now      time.Time      // in clock; the faults' own
	history  []string       // the faults, when they happened; likewise
	spoiled  []bool         // worktrees whose directory cannot be written now
	unwell   []atomic.Int64 // until when they cannot, or may be behind with it
	mounts   func(func())
	mountsAt func(string) string

	mu   sync.Mutex
	runs []*stormRun       // that have not ended
	urls map[string]string // of servers that have been, and their worktrees
	done map[string]int    // figures
}

// newStorm makes the worktrees and names the clients, which begin by themselves.
func newStorm(t *testing.T, profile stormProfile) *storm {
	seed := cmp.Or(*stormSeed, rand.Uint64()>>1)
	plan := newStormPlan(seed, profile)
	say := func() {
		t.Logf("seed: go test -run '^%s$' -storm.seed=%d -storm=%v . (%v clients in the worktrees; %v)", t.Name(), seed, *stormLife, plan.each, plan.timing)
	}
	say()
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	s := &storm{
		t: t, plan: plan, mark: fmt.Sprintf("STORM=%d-%d", os.Getpid(), seed), stop: make(chan struct{}), calm: make(chan struct{}), clock: filepath.Join(root, "clock"),
		urls: map[string]string{}, done: map[string]int{}, now: time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC),
	}
	s.ledger = ledger{t: t, lenient: s.cannotWrite, wasAlone: s.hasBeenAlone, known: map[string]int{}, sent: map[string]*stormMessage{}, order: map[[2]string]int{}, excused: map[int]time.Time{}}
	s.unwell = make([]atomic.Int64, len(plan.each))
	s.setClock(s.now)
	if s.mounts, s.mountsAt, err = ownMounts(); err != nil {
		t.Logf("no disk is filled: mounts of one's own are not allowed here (%v); run it as root on Linux", err)
	}
	s.makeWorktrees(root)
	t.Cleanup(func() {
		s.endAll()
		if t.Failed() {
			say()
		}
	})
	for w, n := range plan.each {
		for range n {
			c := newStormClient(s, len(s.peers), w)
			s.peers = append(s.peers, c)
			s.known[c.name] = w
		}
	}
	return s
}

func runStorm(t *testing.T, profile stormProfile) {
	s := newStorm(t, profile)
	var all, watching sync.WaitGroup
	s.acting.Add(len(s.peers))
	for _, c := range s.peers {
		all.Go(c.live)
	}
	still := make(chan struct{}) // closed when there is no more to watch
	watching.Go(func() { s.watch(still) })
	s.blow()
	close(s.stop)
	s.acting.Wait()
	s.setClock(s.now.Add(time.Hour)) // all that was to come later is due
	close(s.calm)
	all.Wait()
	s.checkLedger(func(text string) (traces []string) {
		text, _, _ = strings.Cut(text, " to ")
		for _, dir := range s.dirs {
			journal, _ := os.ReadFile(journalPath(s.path(dir)))
			for line := range strings.Lines(string(journal)) {
				if strings.Contains(line, text) {
					traces = append(traces, dir+": "+line)
				}
			}
		}
		return traces
	})
	s.checkCalm()
	close(still)
	watching.Wait()
	s.checkEnd()
	t.Log(s.figures())
}

func (s *storm) makeWorktrees(root string) {
	git := func(dir string, args ...string) {
		c := exec.Command("git", append([]string{"-c", "user.name=t", "-c", "user.email=t@example.com"}, args...)...)
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			s.t.Fatalf("git %s: %v\n%s", args, err, out)
		}
	}
	for i := range s.plan.each {
		dir := filepath.Join(root, fmt.Sprint("w", i))
		if i == 0 {
			git(root, "init", "-q", "-b", "main", dir)
			git(dir, "commit", "-q", "--allow-empty", "-m", "start")
		} else {
			git(s.dirs[0], "worktree", "add", "-q", "-b", fmt.Sprint("b", i), dir)
		}
		s.dirs, s.spoiled = append(s.dirs, dir), append(s.spoiled, false)
		if s.plan.tmpfs[i] = s.plan.tmpfs[i] && s.mounts != nil; s.plan.tmpfs[i] {
			state, err := stateDir(dir)
			must(s.t, err)
			s.inMounts(func() { err = mountTmpfs(state, fmt.Sprintf("size=%d,mode=0700", stormDisk)) })
			must(s.t, err)
		}
	}
}

// count adds to a figure.
func (s *storm) count(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done[what]++
}

func (s *storm) nextID() string { return strconv.FormatInt(s.ids.Add(1), 10) }
