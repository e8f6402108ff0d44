package main

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

func TestMeets(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"src", "src/a.go", true},
		{"src", "src-app/a.go", false},
		{"src/foo.go", "src/foobar.go", false},
		{"src/**", "src/app.go", true},
		{"src/*.go", "src/x/y.go", false},
		{".", "a", true},
		{"a", "a", true},
		{".", ".", true},
		{"", "a/b/c", true},

		{"src/*.go", "src/y.go", true},
		{"src/*.go", "src", true},
		{"src/*.go", "lib", false},
		{"src/*", "src/x/y.go", true},       // a parent of the path
		{"src/*/z.go", "src/x", true},       // something inside the path
		{"src/*/z.go", "src/x/y.go", false}, //
		{"src/*/z.go", "src/x/z.go", true},  //
		{"**/*_test.go", "a/b/c_test.go", true},
		{"**/*_test.go", "c_test.go", true},
		{"**/*_test.go", "a/b", true},
		{"**/*_test.go", "a/b.go", true}, // a directory may be called so
		{"**/x/**", "a/x", true},
		{"a/**/b", "a/b", true},
		{"a/**/b", "a/c/d/b/e", true},
		{"a/**/b", "ab/b", false},
		{"a/**.go", "a/b/c.go", true},
		{"a?c", "abc", true},
		{"a?c", "aéc", true},
		{"a?c", "a/c", false},
		{"a[bc]d", "acd", true},
		{"a[!bc]d", "acd", false},
		{"a[b-d]e", "ace", true},
		{"a[]]b", "a]b", true},
		{"a[b", "a[b", true},
		{"a[b", "ab", false},
		{"app/[id]/page.tsx", "app/[id]/page.tsx", true},
		{"app/[id]/page.tsx", "app/[id]", true},
		{"app/[id]/page.tsx", "app", true},
		{"app/[id]/page.tsx", "app/layout.tsx", false},
		{"src/*.go", "src/*.rs", true}, // in doubt they meet
		{"src/*.go", "lib/*.go", false},
		{"src/*.go", "src/a/*.go", true},
		{"*", "a/b", true},
		{"*.go", ".", true},
		{"a b", "a b/c", true},
		{"trail ", "trail", false},
	} {
		if got := meets(mustClean(t, tt.a), mustClean(t, tt.b)); got != tt.want {
			t.Errorf("meets(%q, %q) = %v", tt.a, tt.b, got)
		}
		if got := meets(mustClean(t, tt.b), mustClean(t, tt.a)); got != tt.want {
			t.Errorf("meets(%q, %q) = %v", tt.b, tt.a, got)
		}
	}
}

func mustClean(t *testing.T, p string) string {
	t.Helper()
	c, ok := clean(p)
	if !ok {
		t.Fatalf("clean(%q) leads out", p)
	}
	return c
}

func TestClean(t *testing.T) {
	for p, want := range map[string]string{
		"": ".", ".": ".", "./": ".", "a/": "a", "./a//b/": "a/b", "a/./b": "a/b", "a/../b": "b", "a/..": ".",
		"src/**/": "src/**", " a ": " a ", "-x": "-x", `a\b`: `a\b`,
		"..": "", "../a": "", "a/../../b": "", "/etc": "", "/": "",
	} {
		got, ok := clean(p)
		if ok != (want != "") || ok && got != want {
			t.Errorf("clean(%q) = %q, %v", p, got, ok)
		}
	}
}

func TestRelative(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("paths begin otherwise there")
	}
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(base, "root")
	if err := os.MkdirAll(filepath.Join(root, "sub"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(root, filepath.Join(base, "link")); err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]string{
		"a/b":                  "a/b",
		root:                   ".",
		root + "/":             ".",
		root + "/src//x":       "src/x",
		root + "/../root/y":    "y",
		base + "/link":         ".",
		base + "/link/new/*.x": "new/*.x",
		base + "/link/sub":     "sub",
		root + "-other/x":      "",
		base:                   "",
		"/":                    "",
		"../root/x":            "",
	} {
		got, ok := relative(root, p)
		if ok != (want != "") || ok && got != want {
			t.Errorf("relative(%q) = %q, %v, want %q", p, got, ok, want)
		}
	}
	if _, ok := relative("", root); ok {
		t.Error("outside of a checkout an absolute path is taken")
	}
}

func TestCovers(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"src", "src/a", true}, {"src/a", "src", false}, {"src", "src", true}, {".", "src", true}, {"src", ".", false},
		{".", "*.go", true}, {"src", "src/*.go", true}, {"src/a", "src/*.go", false}, {"src/*.go", "src/*.go", true},
		{"src/*.go", "src/a.go", true}, {"src/*.go", "src", false}, {"src/**", "src/*/b", true}, {"**", "a", true},
		{"s*/**", "src/*.go", false}, {"?", ".", false},
	} {
		if got := covers(tt.a, tt.b); got != tt.want {
			t.Errorf("covers(%q, %q) = %v", tt.a, tt.b, got)
		}
	}
}

// A glob cannot make the board slow: what backtracking would take ages for ends at once.
func TestGlobIsBounded(t *testing.T) {
	glob := strings.Repeat("a*", 300) + "**" + strings.Repeat("/*a", 100) + "b"
	path := strings.Repeat("a", 400) + strings.Repeat("/aa", 200)
	start := time.Now()
	meets(mustClean(t, glob), mustClean(t, path))
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
}

func FuzzMeets(f *testing.F) {
	for _, p := range []string{"", ".", "a", "a/b", "a/*", "**", "**/a", "a/**/b", "[a-c]x", "[", "a[]]b", "é?", "../x", "\xff*", "a//b/"} {
		f.Add(p, "a/b")
		f.Add("a/b/c", p)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		x, xok := clean(a)
		y, yok := clean(b)
		if again, ok := clean(x); ok != xok || ok && again != x {
			t.Fatalf("clean(%q) = %q, and of that %q, %v", a, x, again, ok)
		}
		if !xok || !yok {
			return
		}
		if meets(x, y) != meets(y, x) {
			t.Fatalf("meets(%q, %q) depends on the order", x, y)
		}
		if !meets(x, x) || !meets(x, ".") {
			t.Fatalf("%q does not meet itself or the whole", x)
		}
		if covers(x, y) && !meets(x, y) {
			t.Fatalf("%q covers %q and does not meet it", x, y)
		}
		// The index must find what a comparison finds.
		g := newGround()
		g.add(x, 0)
		n := len(g.meeting(y, nil))
		if n > 1 || (n == 1) != meets(x, y) {
			t.Fatalf("the index finds %q %d times for %q", x, n, y)
		}
	})
}
