//go:build unix

package main

// Nothing is paid for what is not used. Time would say so only on an idle machine, so what is counted here is what does
// not depend on it: the size of the program, what it allocates before main, the pages it touches until it has answered,
// and which functions have run at all.

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

func TestCost(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds the program; run it without -short")
	}
	p := buildPrograms(t)
	atMost := func(what string, ours, floor, ratio float64) {
		t.Helper()
		t.Logf("%s: %.0f, %.2f × the floor", what, ours, ours/floor)
		if floor == 0 || ours > ratio*floor {
			t.Errorf("%s: %.0f, more than %v × %.0f, the floor's", what, ours, ratio, floor)
		}
	}
	atMost("bytes of the program", fileSize(t, p.ours), fileSize(t, p.floor), 1.6)
	if n := initAllocations(t, p.ours); n > 60 {
		t.Errorf("package main makes %d allocations before it starts: use sync.OnceValue for what not every process needs", n)
	}
	first, floor := pagesTouched(t, false, p.ours, "mcp", "--http-port", "0"), pagesTouched(t, false, p.floor)
	atMost("pages that the first process touches", first, floor, 2)
	second, floor := pagesTouched(t, true, p.ours, "mcp", "--http-port", "0"), pagesTouched(t, true, p.floor)
	atMost("pages that the second process touches", second, floor, 2)
}

func fileSize(t *testing.T, path string) float64 {
	info, err := os.Stat(path)
	must(t, err)
	return float64(info.Size())
}

// initAllocations asks the Go runtime what the program's own package does before main.
func initAllocations(t *testing.T, program string) (n int) {
	version := exec.Command(program, "version")
	version.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	out, err := version.CombinedOutput()
	must(t, err)
	trace := regexp.MustCompile(`(?m)^init main @.* (\d+) allocs$`).FindSubmatch(out)
	if trace == nil {
		return 0 // none at all
	}
	fmt.Sscan(string(trace[1]), &n)
	return n
}

// pagesTouched counts the page faults of a program that is initialized and then left. The least of a few: only a garbage
// collection or the scheduler adds to them.
func pagesTouched(t *testing.T, second bool, argv ...string) float64 {
	least := int64(0)
	for range 5 {
		dir := bareCheckout(t)
		if second {
			defer talk(t, dir, argv...).end()
		}
		c := talk(t, dir, argv...)
		c.end()
		if n := c.cmd.ProcessState.SysUsage().(*syscall.Rusage).Minflt; least == 0 || n < least {
			least = n
		}
	}
	return float64(least)
}

// What has run is seen by the coverage of real processes.
func TestNothingUnusedRuns(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds the program; run it without -short")
	}
	program := filepath.Join(t.TempDir(), "majordomus")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-cover", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("building: %v\n%s", err, out)
	}
	dir, counts := bareCheckout(t), [2]string{t.TempDir(), t.TempDir()}
	start := func(i int) *talker {
		return talk(t, dir, "env", "GOCOVERDIR="+counts[i], program, "mcp", "--http-port", "0")
	}
	server := start(0)
	bridge := start(1)
	server.ask(sayPing)
	bridge.ask(sayPing)
	io.WriteString(bridge.in, `{"jsonrpc":"2.0","id":9,"method":"resources/list"}`+"\n") // refused
	if answer, err := bridge.out.ReadString('\n'); err != nil || !strings.Contains(answer, "-32601") {
		t.Fatalf("%q, %v", answer, err)
	}
	bridge.end()
	server.end()
	late := []string{
		"planOf", "fieldsOf", "toolsList", "*capability.describeTool", "inputSchema", "outputSchema", "openAPI",
		"*server.writePage", "*server.serveBuilt", "*server.serveReference", "*page.add", "renderMarkdown",
	}
	wantRun(t, counts[0], true, "*process.serve", "*server.routes", "*server.serveMCP", "*server.openMesh")
	wantRun(t, counts[0], false, late...)
	wantRun(t, counts[1], true, "*process.follow", "*bridge.attach", "*bridge.relay")
	wantRun(t, counts[1], false, append(late, "*process.serve", "*server.routes", "*server.openMesh", "newDocuments")...)
}

// wantRun looks whether functions have run.
func wantRun(t *testing.T, counts string, want bool, names ...string) {
	t.Helper()
	out, err := exec.Command("go", "tool", "covdata", "func", "-i="+counts).CombinedOutput()
	if err != nil {
		t.Fatalf("reading the coverage: %v\n%s", err, out)
	}
	share := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 3 {
			share[f[1]] = f[2]
		}
	}
	for _, name := range names {
		switch of := share[name]; {
		case of == "":
			t.Errorf("there is no function %s: name the one that does its work now", name)
		case (of != "0.0%") != want:
			t.Errorf("%s: %s of it has run", name, of)
		}
	}
}
