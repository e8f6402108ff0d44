package main

// Memory that many have left behind.

import (
	"runtime"
	"runtime/debug"
	"sync"
	"time"
)

// When a crowd has gone, and it is at least half of those who were there, what they leave behind is given back to the system
// as soon as no other has followed for lullTime. By itself the runtime keeps most of it: where 1,000 sessions had come,
// called and gone 150 MB stayed, and now 26; there had been 21.
const (
	crowdSize = 64
	lullTime  = time.Second // so that it is done once for all who leave together
)

// crowd counts those of one kind who are there.
type crowd struct {
	mu       sync.Mutex
	here     int
	most     int         // since memory was last given back
	giveBack *time.Timer // nil until a crowd has gone
}

func (c *crowd) enter() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.here++
	c.most = max(c.most, c.here)
}

func (c *crowd) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.here--
	if gone := c.most - c.here; gone < crowdSize || gone < c.most/2 {
		return
	}
	if c.giveBack != nil {
		c.giveBack.Reset(lullTime)
		return
	}
	c.giveBack = time.AfterFunc(lullTime, func() {
		c.mu.Lock()
		c.most = c.here
		c.mu.Unlock()
		runtime.GC() // what is pooled outlasts one collection
		debug.FreeOSMemory()
	})
}

// stop gives nothing back any more.
func (c *crowd) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.giveBack != nil {
		c.giveBack.Stop()
	}
}
