package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
)

// repository625 is a server among 625 checkouts, 24 others of which have a server.
func repository625(t testing.TB) (s *server, siblings []*sibling) {
	t.Helper()
	root := gitRepo(t)
	s = serving(t, gatherServer(mustFind(t, root)))
	for i, wt := range gatherWorktrees(t, root, 624) {
		if i%26 == 0 {
			siblings = append(siblings, newSibling(t, wt))
		}
	}
	return s, siblings
}

// Everybody is told to read the wide answer first, and what is longer than a client shows goes by unread: 600 checkouts
// without a server cost a count, one with a server a line, a peer what it says.
func TestGatherWideIsSmall(t *testing.T) {
	const maxWide, maxPeer = 12 << 10, 640
	s, siblings := repository625(t)
	size := func() int {
		out := mustList(t, s, peersInput{})
		if out.Covered != 625 || len(out.Boards) != 25 || !out.Complete {
			t.Fatalf("%d covered, %d boards, %q", out.Covered, len(out.Boards), out.Reason)
		}
		answer, err := json.Marshal(out)
		if err != nil {
			t.Fatal(err)
		}
		return len(answer)
	}
	alone := size()
	if alone >= maxWide {
		t.Errorf("the answer has %d bytes, more than %d", alone, maxWide)
	}
	for i, other := range siblings {
		other.attach(t, "work", fmt.Sprint("dir", i))
	}
	peers := size()
	if each := (peers - alone) / 24; each >= maxPeer {
		t.Errorf("each peer adds %d bytes, more than %d", each, maxPeer)
	}
	t.Logf("%d bytes, %d with a peer and a claim in each", alone, peers)
}

// A gather leaves nothing behind: no memory, no goroutine, no process.
func TestGatherLeavesNothing(t *testing.T) {
	root, at := gatherRepo(t, "one", "two", "gone")
	s := serving(t, gatherServer(mustFind(t, root)))
	siblings := []*sibling{newSibling(t, at("one")), newSibling(t, at("two"))}
	for _, other := range siblings {
		other.attach(t, "work", ".")
	}
	idle := runtime.NumGoroutine()
	heap := func(rounds int) uint64 {
		for range rounds {
			var together sync.WaitGroup
			for range 20 {
				together.Go(func() {
					if out, err := s.peersList(t.Context(), peersInput{}); err != nil || out.Count != 2 {
						t.Errorf("%d peers, %q, %v", out.Count, out.Reason, err)
					}
				})
			}
			together.Wait()
			for _, other := range siblings {
				other.heard() // it would remember all of it
			}
		}
		// The connections of a sibling end a little after its answer.
		eventually(t, "what another process does", func() bool { return runtime.NumGoroutine() <= idle+2 })
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // a second one empties the pools
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	// What other tests left behind may move the heap once; a leak moves it every time.
	const limit = 100_000 // a hundred bytes for each
	sizes := []uint64{heap(5)}
	for range 3 {
		sizes = append(sizes, heap(50))
		if n := len(sizes); int64(sizes[n-1])-int64(sizes[n-2]) <= limit {
			break
		}
	}
	t.Logf("bytes of heap after 100 gathers, and after each 1,000 more: %d", sizes)
	if n := len(sizes); int64(sizes[n-1])-int64(sizes[n-2]) > limit {
		t.Errorf("every 1,000 gathers leave more than %d bytes: %d", limit, sizes)
	}
	if processes, err := filepath.Glob("/proc/self/task/*/children"); err == nil {
		for _, list := range processes {
			if children, _ := os.ReadFile(list); len(children) > 0 {
				t.Errorf("left processes: %s", children)
			}
		}
	}
}
