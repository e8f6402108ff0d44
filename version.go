package main

// Which release and which file of the program a process runs: by that a newer one supersedes an older one's lease.

import (
	"cmp"
	"os"
	"runtime/debug"
	"strings"
)

// version is set by -ldflags "-X main.version=1.2.3"; empty: from the build.
var version string

// programVersion is the release, without the leading v, or (devel).
func programVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return strings.TrimPrefix(info.Main.Version, "v")
	}
	return "(devel)"
}

// ownExecutable notes the file this process was started from; nil when unknown.
func ownExecutable() *executable {
	path, err := os.Executable()
	if err != nil {
		return nil
	}
	return statExecutable(path)
}

// An executable is a program's file as it was when somebody looked.
type executable struct {
	Path  string `json:"path"`
	Mtime int64  `json:"mtime"` // ms since the epoch
	Size  int64  `json:"size"`
}

// statExecutable looks at the program's file now; nil when there is none.
func statExecutable(path string) *executable {
	info, err := os.Stat(path)
	if err != nil {
		return nil
	}
	return &executable{path, info.ModTime().UnixMilli(), info.Size()}
}

// olderRelease says whether a is a release before b. Only plain x.y.z are ordered; "(devel)" and the rest never are.
func olderRelease(a, b string) bool {
	as, bs := releaseNumbers(a), releaseNumbers(b)
	if as == nil || bs == nil {
		return false
	}
	for i := range as {
		// Without leading zeros a longer number is a larger one, whatever its size.
		if c := cmp.Or(cmp.Compare(len(as[i]), len(bs[i])), cmp.Compare(as[i], bs[i])); c != 0 {
			return c < 0
		}
	}
	return false
}

func releaseNumbers(version string) []string {
	numbers := strings.Split(version, ".")
	for _, n := range numbers {
		if n == "" || strings.Trim(n, "0123456789") != "" || n[0] == '0' && n != "0" {
			return nil
		}
	}
	if len(numbers) != 3 {
		return nil
	}
	return numbers
}
