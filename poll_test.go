package main

import (
	"testing"
	"time"
)

// patience bounds every wait. It is no measure of speed: a busy machine may take its time, a hung program may not.
const patience = 30 * time.Second

// poll asks until the answer is yes, at most for so long. It sleeps, because files, processes and the memory of another
// goroutine send no event to whoever waits for them; all other sleeps of the tests are on the clock of a synctest bubble.
func poll(limit time.Duration, ok func() bool) bool {
	for deadline := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// eventually is poll for what a test cannot do without.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !poll(patience, ok) {
		t.Fatal("not in time: " + what)
	}
}
