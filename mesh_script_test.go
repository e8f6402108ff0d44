//go:build unix

package main

import (
	"fmt"
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

// cmdUntil calls a tool until what it answers matches, and prints that.
func cmdUntil(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 4, "until NAME TOOL 'json' 'regexp'")
	re, err := regexp.Compile(args[3])
	ts.Check(err)
	p := named(ts, args[0])
	var last string
	until(ts, func() string {
		a := p.ask(ts, "tools/call", fmt.Sprintf(`{"name":%q,"arguments":%s}`, args[1], args[2]))
		if last = string(a.Result) + string(a.Error); re.MatchString(last) {
			return ""
		}
		return "no match of " + args[3] + " in " + clipped(last, 2000)
	})
	fmt.Fprintln(ts.Stdout(), last)
}
