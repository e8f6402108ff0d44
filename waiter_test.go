//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
)

type waiterInput struct {
	Name string `json:"name" doc:"what the file calls it" required:"true"`
}

type waiterOutput struct {
	Ended string `json:"ended" doc:"what ended the wait"`
}

// addWaiter gives the program two tools that no list names. wait ends only when its call does: one that waits for as long
// as there are clients, so that a test need not. work ends when somebody opens the named pipe FILE.go for writing. Each notes in the file that it began; wait also what ended it.
func addWaiter(file string) {
	note := func(name, what string) {
		f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = fmt.Fprintf(f, "%s %s\n", name, what)
			f.Close()
		}
		if err != nil {
			panic(err)
		}
	}
	wait := func(s *server, ctx context.Context, in waiterInput) (waiterOutput, error) {
		note(in.Name, "began")
		<-ctx.Done()
		note(in.Name, "ended: "+context.Cause(ctx).Error())
		return waiterOutput{context.Cause(ctx).Error()}, nil
	}
	work := func(s *server, ctx context.Context, in waiterInput) (waiterOutput, error) {
		note(in.Name, "began")
		f, err := os.Open(file + ".go")
		if err != nil {
			return waiterOutput{}, err
		}
		return waiterOutput{"worked"}, f.Close()
	}
	w := query("test.work", "work", "GET /api/v1/work", "Work.", "Use this to work.", work)
	c := query("test.wait", "wait", "GET /api/v1/wait", "Wait.", "Use this to wait.", wait, mayWait)
	table := toolTable()
	table["wait"], table["work"] = &c, &w
}
