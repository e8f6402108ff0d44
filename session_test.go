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
	const left = 32 << 20
	for _, c := range []struct {
		stay, leave int
		given       bool
	}{
		{0, manySessions, true}, {64, 300, true}, {400, 400, true},
		{0, manySessions - 1, false}, {400, 300, false},
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
				runtime.KeepAlive(make([]byte, left))
				before := givenBack()
				for i, n := range all[c.stay:] {
					s.dismiss(n)
					if i%50 == 0 {
						time.Sleep(lullTime / 2) // of the bubble
					}
				}
				time.Sleep(lullTime / 2)
				synctest.Wait()
				if givenBack() >= before+left {
					t.Error("given back while they were leaving")
				}
				time.Sleep(lullTime)
				synctest.Wait()
				if given := givenBack() >= before+left; given != c.given {
					t.Errorf("given back: %v, want %v", given, c.given)
				}
			})
		})
	}
}

// givenBack is how much memory the runtime has given back to the system.
func givenBack() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapReleased
}
