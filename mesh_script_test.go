//go:build unix

package main

import (
	"regexp"

	"github.com/rogpeppe/go-internal/testscript"
)

// cmdGrab sets a variable to what the group of the regexp matches in what was printed last.
func cmdGrab(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 2, "grab VARIABLE 'regexp'")
	re, err := regexp.Compile(args[1])
	ts.Check(err)
	found := re.FindStringSubmatch(ts.ReadFile("stdout"))
	if len(found) != 2 {
		ts.Fatalf("no match of %s", args[1])
	}
	ts.Setenv(args[0], found[1])
}
