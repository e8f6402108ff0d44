//go:build unix

package main

import (
	"os"
	"strings"
	"sync"
	"time"
)

// fileClock is the wall clock of a script: the moment that stands in the file, until another stands there. A file that is
// just being written is not read.
func fileClock(file string) func() (time.Time, time.Duration) {
	var mu sync.Mutex
	var last time.Time
	return func() (time.Time, time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		text, _ := os.ReadFile(file)
		if t, err := time.Parse(time.RFC3339, strings.TrimSpace(string(text))); err == nil {
			last = t
		}
		return last, 10 * time.Millisecond
	}
}
