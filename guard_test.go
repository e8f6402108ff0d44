//go:build unix

package main

// Every request is tried on every route that is registered, so that a new route cannot forget what is checked here.

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// walked is a route that is there, with a method: the segments that a pattern leaves open are filled in.
type walked struct{ method, path string }

// walk lists every registered route by every method that it has or has not.
func walk(g *httpRig) (routes, all []walked) {
	open := regexp.MustCompile(`\{[^}]*\}`)
	for _, pattern := range append(g.routes().patterns, "GET /nothing", "GET /api/v1/nothing") {
		method, path, found := strings.Cut(pattern, " ")
		if !found {
			method, path = "POST", pattern
		}
		path = open.ReplaceAllStringFunc(path, func(s string) string {
			if s == "{$}" {
				return ""
			}
			return "peers.list"
		})
		routes = append(routes, walked{method, path})
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} {
			all = append(all, walked{method, path})
		}
	}
	return routes, all
}

// do has a request answered whose head has these lines.
func (g *httpRig) do(t *testing.T, at walked, body string, lines ...string) *httptest.ResponseRecorder {
	t.Helper()
	head := at.method + " " + at.path + " HTTP/1.1\r\n" + strings.Join(lines, "\r\n") + "\r\nContent-Length: " + fmt.Sprint(len(body)) + "\r\n\r\n" + body
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(g.names.Replace(head))))
	must(t, err)
	w := httptest.NewRecorder()
	g.handler.ServeHTTP(w, r)
	for name := range w.Header() {
		if strings.HasPrefix(name, "Access-Control") || strings.EqualFold(name, "Timing-Allow-Origin") {
			t.Errorf("%s %s %q: %s", at.method, at.path, lines, name)
		}
	}
	if strings.Contains(w.Body.String()+fmt.Sprint(w.Header()), g.lease.token()) {
		t.Errorf("%s %s %q: the answer has the token", at.method, at.path, lines)
	}
	return w
}

const rigHost = "Host: 127.0.0.1:8741"

// Nobody but a program of this machine, and a page of this server, reaches a route; whatever else is wrong comes after that.
func TestRoutesRefuseStrangers(t *testing.T) {
	g := newHTTPRig(t)
	routes, all := walk(g)
	if len(routes) < len(capabilities())+10 {
		t.Fatalf("%d routes are not all", len(routes))
	}
	for _, host := range []string{"evil.example", "evil.example:8741", "127.0.0.1", "127.0.0.1:8742", "127.0.0.1:08741", "127.0.0.1:8741:8741", "127.0.0.2:8741", "0.0.0.0:8741",
		"127.1:8741", "2130706433:8741", "localhost", "localhost.:8741", "localhost.evil:8741", "127.0.0.1.evil:8741", "evil.localhost:8741", "[::1]", "[::1]evil:8741",
		"[::1]:80", "[::]:8741", "[::ffff:127.0.0.1]:8741", "user@127.0.0.1:8741", "127.0.0.1:8741@evil.example", "127.0.0.1:8741,evil.example", "127.0.0.1 :8741"} {
		for _, at := range all {
			checkForbidden(t, g, at, "Host: "+host, "Content-Type: application/json", "Authorization: Bearer {token}")
		}
	}
	for _, line := range []string{"Origin: null", "Origin:", "Origin: http://evil.example", "Origin: http://evil.example:8741", "Origin: https://127.0.0.1:8741", "Origin: http://127.0.0.1",
		"Origin: http://127.0.0.1:3000", "Origin: http://localhost:8741.evil.example", "Origin: http://127.0.0.1:8741/", "Origin: file://", "Origin: chrome-extension://abc",
		"Origin: http://127.0.0.1:8741\r\nOrigin: http://evil.example", "Origin: http://127.0.0.1:8741 http://evil.example",
		"Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site", "Sec-Fetch-Site: Cross-Site", "Sec-Fetch-Site:", "Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site"} {
		for _, at := range all {
			checkForbidden(t, g, at, rigHost, line, "Accept: */*", "Content-Type: application/json", "Authorization: Bearer {token}")
		}
	}
	// A link from elsewhere opens a page, and nothing but a page.
	for _, at := range all {
		w := g.do(t, at, "", rigHost, "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document", "Accept: text/html")
		kind := w.Header().Get("Content-Type")
		if w.Code != 403 && (at.method != "GET" || w.Code == 200 && !strings.HasPrefix(kind, "text/") && kind != "image/svg+xml") {
			t.Errorf("%s %s from another site: %d %s", at.method, at.path, w.Code, kind)
		}
	}
	if peers := len(g.board.peers()); peers != 3 { // those of the rig
		t.Errorf("%d peers are on the board", peers)
	}
}

func checkForbidden(t *testing.T, g *httpRig, at walked, lines ...string) {
	t.Helper()
	w := g.do(t, at, "{}", lines...)
	if code := jsonCode(w); w.Code != 403 || code != "forbidden" || w.Header().Get("Connection") != "close" {
		t.Errorf("%s %s %q: %d %s", at.method, at.path, lines, w.Code, w.Body)
	}
}

// jsonCode is the word by which an error says what happened.
func jsonCode(w *httptest.ResponseRecorder) string {
	found := regexp.MustCompile(`"code":"([a-z_]+)"`).FindStringSubmatch(w.Body.String())
	if found == nil {
		return ""
	}
	return found[1]
}

// What changes something takes nothing that a form of another page can send, and from a caller without the token nothing
// at all. What it answers instead stands here for the routes that are not for the token but for a session.
func TestRoutesThatChange(t *testing.T) {
	g := newHTTPRig(t)
	routes, all := walk(g)
	sessions := map[string]string{
		"/mcp":                     "",
		"/api/v1/peers/announce":   `{"intent":"x"}`,
		"/api/v1/episodes/attach":  `{"external_id":"x"}`,
		"/api/v1/episodes/detach":  `{"external_id":"x"}`,
		"/api/v1/mesh/description": `{"description":"x"}`,
		"/api/v1/schedules/self":   `{"text":"x","fire_at":"2999-01-01"}`,
	}
	for _, at := range routes {
		if at.method == "GET" {
			continue
		}
		for _, kind := range []string{"", "text/plain", "text/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json-patch+json",
			"application/jsonx", "application/octet-stream", "application/json, text/plain", "text/plain; application/json"} {
			w := g.do(t, at, "{}", rigHost, "Content-Type: "+kind, "Authorization: Bearer {token}")
			if w.Code != 415 || jsonCode(w) != "unsupported_media_type" {
				t.Errorf("%s %s as %q: %d %s", at.method, at.path, kind, w.Code, w.Body)
			}
		}
		for _, line := range []string{"Authorization: Bearer", "Authorization: Bearer x", "Authorization: bearer {token}", "Authorization: Basic {token}", "Authorization: Bearer {token}0",
			"Authorization: {token}", "Authorization: Bearer  {token}", "X: y"} {
			w := g.do(t, at, "{}", rigHost, "Content-Type: application/json", line)
			body, session := sessions[at.path]
			if session && line == "X: y" { // a token that is sent must be right, wherever it is
				if w = g.do(t, at, body, rigHost, "Content-Type: application/json", line); w.Code < 400 || w.Code >= 500 || body != "" && w.Code != 422 {
					t.Errorf("%s %s without a session: %d %s", at.method, at.path, w.Code, w.Body)
				}
			} else if w.Code != 401 || jsonCode(w) != "unauthorized" || w.Header().Get("WWW-Authenticate") != "Bearer" {
				t.Errorf("%s %s with %q: %d %s", at.method, at.path, line, w.Code, w.Body)
			}
		}
	}
	for _, at := range all { // and no method reaches a route that is not its own
		want := slices.Contains(routes, at) || at.method == "HEAD" && slices.Contains(routes, walked{"GET", at.path}) || at == walked{"DELETE", "/mcp"}
		w := g.do(t, at, "", rigHost)
		if !want && w.Code != 404 && (w.Code != 405 || w.Header().Get("Allow") == "") {
			t.Errorf("%s %s: %d %s", at.method, at.path, w.Code, w.Body)
		}
	}
	if peers := len(g.board.peers()); peers != 3 {
		t.Errorf("%d peers are on the board", peers)
	}
}

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
