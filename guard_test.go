//go:build unix

package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// FuzzGuard: whatever a request says, it passes only when it comes under one of the server's three names and from nobody else's page.
func FuzzGuard(f *testing.F) {
	for _, host := range []string{"127.0.0.1:8741", "LOCALHOST:8741", "[::1]:8741", "", "localhost", "127.0.0.1:08741", "127.0.0.1:8741.", "localhost.:8741",
		"u@127.0.0.1:8741", "127.0.0.1:8741:8741", "[::1]", "[::1]evil:8741", "::1:8741", "127.1:8741", "0x7f.1:8741", "localhost:8741\x00"} {
		f.Add("GET", "/", host, "", "", "text/html")
		f.Add("POST", "/mcp", "127.0.0.1:8741", "http://"+host, "same-origin", "")
	}
	f.Add("GET", "/api/v1/peers", "127.0.0.1:8741", "null", "cross-site", "*/*")
	f.Add("OPTIONS", "*", "localhost:8741", "http://localhost:8741, http://evil", "Cross-Site", "")
	f.Add("GET", "/docs/..%2f", "localhost:8741", "", "same-site", "text/html")
	s := quietServer()
	s.url = "http://127.0.0.1:8741"
	names := []string{"127.0.0.1:8741", "localhost:8741", "[::1]:8741"}
	f.Fuzz(func(t *testing.T, method, path, host, origin, site, accept string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.Method, r.URL.Path, r.RequestURI, r.Host = method, path, path, host
		r.Header = http.Header{"Accept": {accept}}
		if origin != "" {
			r.Header["Origin"] = []string{origin}
		}
		if site != "" {
			r.Header["Sec-Fetch-Site"] = []string{site}
		}
		status, code, message := s.admissible(r)
		if status != 0 {
			if httpStatus(code) != status || message == "" || len(message) > 1000 || strings.ContainsFunc(message, steers) {
				t.Fatalf("%d %s %q", status, code, message)
			}
			return
		}
		from, mine := strings.CutPrefix(origin, "http://")
		switch {
		case !slices.Contains(names, lowerASCII(host)):
			t.Fatalf("passed with the Host %q", host)
		case origin != "" && !(mine && slices.Contains(names, lowerASCII(from))):
			t.Fatalf("passed with the Origin %q", origin)
		case site != "" && site != "same-origin" && site != "none" && !(method == "GET" && strings.Contains(accept, "text/html")):
			t.Fatalf("passed with Sec-Fetch-Site %q", site)
		case !strings.HasPrefix(path, "/") || strings.Contains(path, "/../") || strings.Contains(path, "//") || strings.ContainsAny(path, "\\\x00"):
			t.Fatalf("passed with the path %q", path)
		}
	})
}

func lowerASCII(s string) string { return string(bytes.ToLower([]byte(s))) }
