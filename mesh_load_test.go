//go:build unix

package main

import (
	"flag"
	"testing"
	"time"
)

var meshLoad = flag.Duration("mesh.load", 0, "how long the load checker sends and kills; 0: a short run")

// The load checker is a storm of nothing but messages and kills, with the timings of every day: `go test -run MeshLoad
// -mesh.load=10m .` is its long form.
func TestMeshLoad(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts many processes")
	}
	p := stormProfile{
		worktrees: between{3, 3}, clients: between{3, 3}, life: 6 * time.Second, pause: 700 * time.Millisecond,
		actions: []weighted{{"inbox", 5}, {"broadcast", 1}, {"ack", 4}, {"notify", 8}, {"ask", 2}},
		faults:  []weighted{{"kill", 1}, {"kill server", 2}},
	}
	if *meshLoad > 0 {
		p.worktrees, p.clients, p.life, p.pause = between{8, 8}, between{8, 8}, *meshLoad, 2*time.Second
	}
	runStorm(t, p)
}
