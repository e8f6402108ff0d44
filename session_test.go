package main

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// What many sessions leave behind is given back when they have gone, whoever stays, and once for all of them.
func TestMemoryIsGivenBack(t *testing.T) {
	for _, c := range []struct {
		stay, leave int
		given       bool
	}{
		{0, crowdSize, true}, {64, 300, true}, {400, 400, true},
		{0, crowdSize - 1, false}, {400, 300, false},
	} {
		t.Run(fmt.Sprintf("%d of %d leave", c.leave, c.stay+c.leave), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := quietServer()
				var all []*session
				for i := range c.stay + c.leave {
					n := &session{id: fmt.Sprint(i), peer: peerID(fmt.Sprint("p", i)), trusted: true}
					must(t, s.admit(n))
					all = append(all, n)
				}
				defer func() { s.sweep.Stop() }()
				before := givenBack()
				for i, n := range all[c.stay:] {
					s.dismiss(n)
					if i%50 == 0 {
						time.Sleep(lullTime / 2) // of the bubble
					}
				}
				time.Sleep(lullTime / 2)
				synctest.Wait()
				if givenBack() > before {
					t.Error("given back while they were leaving")
				}
				time.Sleep(lullTime)
				synctest.Wait()
				if given := givenBack() > before; given != c.given {
					t.Errorf("given back: %v, want %v", given, c.given)
				}
			})
		})
	}
}

// givenBack is how often memory has been given back, which is by collections that are asked for. How much comes of it
// TestLoadSessions says.
func givenBack() uint32 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.NumForcedGC
}
