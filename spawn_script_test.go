//go:build unix

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// killSpawned ends what a script has spawned and, having failed, not ended itself: such a process outlives the servers.
func killSpawned(work string) {
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range files {
		env, _ := os.ReadFile(file)
		if text := "\x00" + string(env); strings.Contains(text, "\x00WORK="+work+"\x00") && strings.Contains(text, "\x00MAJORDOMUS_SPAWN=") {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
}
