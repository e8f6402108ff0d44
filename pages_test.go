//go:build unix

package main

// The pages as they are sent: what they are made of, what they never hold, and the documents of the repository.

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const readmeSample = "# A compiler\n\nIt *compiles* **everything**, see [the documentation](docs/configuration.md) and <https://example.com/>.\n\n" +
	"## Start\n\n```sh\ngo run . --help   # <all> flags & more\n```\n\n1. first\n2. second\n   - a detail with `code`\n   - [ ] a task\n\n" +
	"> A quote\n> of two lines.\n\n| flag | means |\n|---|---:|\n| `-v` | *verbose* |\n| `-q` | quiet |\n\n" +
	"<img src=x onerror=alert(1)> [bad](javascript:alert(1)) ![a picture](https://example.com/x.png)\n\n---\n\nThe end.\n"

// newRepository makes a git checkout with documents in it.
func newRepository(t testing.TB) string {
	dir := filepath.Join(t.TempDir(), "compiler")
	for name, text := range map[string]string{
		"README.md":             readmeSample,
		"AGENTS.md":             "# How to work here\n\nRead [the configuration](docs/configuration.md#keys).\n",
		"docs/configuration.md": "# Configuration\n\n## Keys\n\nNone.\n",
		"docs/latin.md":         "# caf\xe9\n",
	} {
		write(t, filepath.Join(dir, name), text)
	}
	git(t, dir, "init", "-q", "-b", "main")
	git(t, dir, "add", "-A")
	git(t, dir, "commit", "-q", "-m", "start")
	return dir
}

func write(t testing.TB, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func git(t testing.TB, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(gitEnvironment(os.Environ()), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=test", "GIT_AUTHOR_EMAIL=test@example.com", "GIT_COMMITTER_NAME=test", "GIT_COMMITTER_EMAIL=test@example.com")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("git %s: %v\n%s", args[0], err, out)
	}
}

// newPageServer is a server of the checkout that nobody is attached to.
func newPageServer(t testing.TB, dir, mode string) *server {
	at, err := findCheckout(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(&settings{version: "1.2.3", timing: timings{probe: patience, read: patience}}, at, slog.New(slog.DiscardHandler), nil)
	s.docs = newDocuments(at.root, mode)
	s.docs.index(context.Background())
	return s
}

// servePages serves it on loopback, behind its guards.
func servePages(t testing.TB, s *server, wrap func(http.Handler) http.Handler) (url string) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.url = "http://" + ln.Addr().String()
	hs := s.httpServer()
	if wrap != nil {
		hs.Handler = wrap(hs.Handler)
	}
	served := make(chan struct{}) // closed when the listener is
	go func() {
		defer close(served)
		hs.Serve(ln)
	}()
	t.Cleanup(func() { hs.Close(); <-served })
	return s.url
}

// fetch asks as a browser does.
func fetch(t testing.TB, url string, headers ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequest("GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept", "text/html,*/*")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := plainHTTP.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(body)
}

// TestPagesPolicy walks every page: each is complete, brings its policy, holds no code and no address of elsewhere, and
// leads nowhere that answers with an error.
func TestPagesPolicy(t *testing.T) {
	url := servePages(t, newPageServer(t, newRepository(t), "vcs"), nil)
	paths := []string{"/", "/board", "/swagger", "/docs/"}
	seen := map[string]bool{}
	for len(paths) > 0 {
		path := paths[0]
		paths = paths[1:]
		if seen[path] {
			continue
		}
		seen[path] = true
		response, body := fetch(t, url+path)
		if response.StatusCode != 200 {
			t.Errorf("%s: %s", path, response.Status)
		}
		if tag := response.Header.Get("Etag"); tag == "" && !strings.HasPrefix(path, "/api/") {
			t.Errorf("%s has no ETag", path)
		} else if again, _ := fetch(t, url+path, "If-None-Match", tag); tag != "" && again.StatusCode != 304 {
			t.Errorf("%s, asked again with its ETag: %s", path, again.Status)
		}
		if !strings.HasPrefix(response.Header.Get("Content-Type"), "text/html") {
			continue
		}
		if got := response.Header.Get("Content-Security-Policy"); !strings.Contains(got, "default-src 'none'") || strings.Contains(got, "unsafe") {
			t.Errorf("%s has the policy %q", path, got)
		}
		for _, never := range []string{`(?i)\son[a-z]+\s*=\s*["']`, `(?i)<script(?:\s[^>]*)?>[^<]`, `(?i)<style`, `(?i)\sstyle\s*=`, `(?i)<iframe|<base|<object|<embed`, `(?i)src="https?:`, `(?i)<link[^>]*href="https?:`} {
			if found := regexp.MustCompile(never).FindString(body); found != "" {
				t.Errorf("%s holds %q", path, found)
			}
		}
		if strings.Count(body, "<h1") != 1 || !strings.Contains(body, "<title>") || !strings.Contains(body, `<html lang="en">`) {
			t.Errorf("%s is no complete page", path)
		}
		for _, m := range regexp.MustCompile(`\s(?:href|src)="(/[^"#?]*)(?:#([^"]*))?"`).FindAllStringSubmatch(body, -1) {
			paths = append(paths, html.UnescapeString(m[1]))
		}
		for _, m := range regexp.MustCompile(`\shref="#([^"]*)"`).FindAllStringSubmatch(body, -1) {
			if !strings.Contains(body, ` id="`+m[1]+`"`) {
				t.Errorf("%s leads to #%s, which is not there", path, m[1])
			}
		}
	}
	for _, must := range []string{"/docs/peers.list", "/docs/files/README.md", "/assets/board.js", "/assets/style.css", "/openapi.json"} {
		if !seen[must] {
			t.Errorf("no page leads to %s", must)
		}
	}
}

// TestPagesScripts holds the modules to the one rule that keeps what peers say from becoming markup.
func TestPagesScripts(t *testing.T) {
	files, err := pageFiles.ReadDir("pages")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, _ := pageFiles.ReadFile("pages/" + f.Name())
		for _, never := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "createContextualFragment", "setHTML", "eval(", "new Function", "localStorage", "sessionStorage", "document.cookie", "https://", "@import", " url("} {
			if bytes.Contains(text, []byte(never)) {
				t.Errorf("pages/%s holds %s", f.Name(), never)
			}
		}
	}
}

func TestReferencePages(t *testing.T) {
	url := servePages(t, newPageServer(t, newRepository(t), "vcs"), nil)
	for _, c := range capabilities() {
		_, body := fetch(t, url+"/docs/"+c.id)
		if c.tool == "" {
			c.tool = `MCP</th><td><span title="not there">—</span>`
		}
		wanted := []string{c.tool, c.method + " " + c.path, `<span title="not there">—</span>`, "JSON Schema", c.kind(), "read-only", "safe to repeat", "may wait"}
		for _, typ := range slices.Concat(typesWithin(c.in), typesWithin(c.out)) {
			for _, f := range fieldsOf(typ) {
				wanted = append(wanted, "<code>"+f.name+"</code>")
			}
		}
		for _, text := range wanted {
			if !strings.Contains(body, text) {
				t.Errorf("/docs/%s does not say %q", c.id, text)
			}
		}
	}
	if response, body := fetch(t, url+"/docs/no.such"); response.StatusCode != 404 || !strings.Contains(body, "<h1>Not Found</h1>") {
		t.Errorf("an unknown capability: %s", response.Status)
	}
	if response, body := fetch(t, url+"/docs/no.such", "Accept", "*/*"); response.StatusCode != 404 || !strings.HasPrefix(body, `{"error":`) {
		t.Errorf("an unknown capability, asked by a program: %s %s", response.Status, body)
	}
}

// TestHomeConfiguration keeps what the home page says to paste in step with README.md.
func TestHomeConfiguration(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, body := fetch(t, servePages(t, newPageServer(t, newRepository(t), "vcs"), nil)+"/")
	for _, c := range clientConfigurations {
		if !strings.Contains(string(readme), "\n"+c.text+"\n```") {
			t.Errorf("README.md does not say for %s:\n%s", c.client, c.text)
		}
		if !strings.Contains(body, html.EscapeString(c.text)) {
			t.Errorf("the home page does not say for %s:\n%s", c.client, c.text)
		}
	}
}

// TestDocuments lists what may and what may not be shown, by both ways of discovery.
func TestDocuments(t *testing.T) {
	dir := newRepository(t)
	outside := t.TempDir()
	write(t, filepath.Join(outside, "secret.md"), "# the secret\n")
	for name, text := range map[string]string{
		"docs/deep/er/a b?.md":      "# Spaces\n",
		"docs/deleted.md":           "# Deleted\n",
		"docs/large.md":             strings.Repeat("x", documentLimit+1),
		"docs/full.md":              strings.Repeat("x", documentLimit),
		"docs/bom.md":               "\ufeff# With a mark\n",
		"docs/notes.txt":            "no Markdown",
		"docs/node_modules/a/b.md":  "# Not ours\n",
		"docs/.git-like/b.md":       "# Hidden\n",
		"docs-x/secret.md":          "# Elsewhere\n",
		"CHANGES.md":                "# Changes\n",
		"docs/back\\slash.md":       "# No\n",
		"docs/<img onerror=x>.md":   "# <script>alert(1)</script>\n",
		"docs/untracked/new one.md": "# New\n",
	} {
		write(t, filepath.Join(dir, name), text)
	}
	for name, to := range map[string]string{
		"CLAUDE.md": "AGENTS.md", "docs/inside.md": "../README.md", "docs/escapes.md": filepath.Join(outside, "secret.md"),
		"docs/climbs.md": "../../../../../../../../../../etc/passwd", "docs/linked": outside, "docs/dangling.md": "nothing", "docs/round.md": "round.md",
	} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	git(t, dir, "add", "-f", "-A")
	git(t, dir, "rm", "-q", "--cached", "-r", "docs/untracked")
	git(t, dir, "commit", "-q", "-m", "more")
	if err := os.Remove(filepath.Join(dir, "docs/deleted.md")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "docs/pipe.md"), 0o644); err != nil {
		t.Fatal(err)
	}
	common := []string{
		"AGENTS.md: How to work here", "CLAUDE.md: How to work here", "README.md: A compiler",
		"docs/<img onerror=x>.md: <script>alert(1)</script>", "docs/back\\slash.md! " + errBadName.Error(),
		"docs/bom.md: With a mark", "docs/climbs.md! it is a link, and only one to another of these documents is followed", "docs/configuration.md: Configuration",
		"docs/dangling.md! it is a link, and only one to another of these documents is followed", "docs/deep/er/a b?.md: Spaces", "docs/escapes.md! it is a link, and only one to another of these documents is followed",
		"docs/full.md: ", "docs/inside.md: A compiler", "docs/large.md! " + errTooLarge.Error(), "docs/latin.md! " + errNotText.Error(),
		"docs/round.md! it is a link, and only one to another of these documents is followed",
	}
	for mode, more := range map[string][]string{
		"vcs":        {"docs/.git-like/b.md: Hidden", "docs/node_modules/a/b.md: Not ours"},
		"filesystem": {"docs/pipe.md! it is not a regular file", "docs/untracked/new one.md: New"},
	} {
		list, reason := listDocuments(context.Background(), dir, mode)
		var got []string
		for _, e := range list {
			if e.problem != "" {
				got = append(got, e.path+"! "+e.problem)
			} else {
				got = append(got, e.path+": "+e.title)
			}
		}
		want := slices.Sorted(slices.Values(slices.Concat(common, more)))
		slices.Sort(got)
		if reason != "" || !slices.Equal(got, want) {
			t.Errorf("%s lists (%q)\n%s\nnot\n%s", mode, reason, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		url := servePages(t, newPageServer(t, dir, mode), nil)
		_, index := fetch(t, url+"/docs/")
		for _, e := range list {
			response, body := fetch(t, url+documentURL(e.path))
			switch {
			case strings.Contains(body, "the secret") || strings.Contains(body, "root:"):
				t.Fatalf("%s %s shows what is outside", mode, e.path)
			case e.problem == "" && (response.StatusCode != 200 || !strings.Contains(body, `<article class="prose">`)):
				t.Errorf("%s %s: %s", mode, e.path, response.Status)
			case e.problem != "" && response.StatusCode != 404:
				t.Errorf("%s %s: %s", mode, e.path, response.Status)
			}
			if !strings.Contains(index, html.EscapeString(e.path)) || !strings.Contains(index, html.EscapeString(e.problem)) {
				t.Errorf("%s: the list does not name %s, %s", mode, e.path, e.problem)
			}
		}
	}
}

// TestDocumentsChange shows a document as it is now, and nothing that came in its place.
func TestDocumentsChange(t *testing.T) {
	dir := newRepository(t)
	outside := filepath.Join(t.TempDir(), "secret.md")
	write(t, outside, "# the secret\n")
	url := servePages(t, newPageServer(t, dir, "vcs"), nil)
	readme := filepath.Join(dir, "README.md")
	write(t, readme, "# Changed\n")
	if _, body := fetch(t, url+"/docs/files/README.md"); !strings.Contains(body, "Changed") {
		t.Error("the document is shown as it was")
	}
	os.Remove(readme)
	os.Symlink(outside, readme)
	if response, body := fetch(t, url+"/docs/files/README.md"); response.StatusCode != 404 || strings.Contains(body, "the secret") {
		t.Errorf("a link that came in its place: %s", response.Status)
	}
	os.RemoveAll(filepath.Join(dir, "docs"))
	os.Symlink(filepath.Dir(outside), filepath.Join(dir, "docs"))
	write(t, filepath.Join(filepath.Dir(outside), "configuration.md"), "# the secret\n")
	if response, body := fetch(t, url+"/docs/files/docs/configuration.md"); response.StatusCode != 404 || strings.Contains(body, "the secret") {
		t.Errorf("a directory that became a link: %s", response.Status)
	}
}

func TestDocumentsNotListed(t *testing.T) {
	if _, reason := listDocuments(context.Background(), t.TempDir(), "vcs"); !strings.Contains(reason, "not a git repository") {
		t.Errorf("without git's word the reason is %q", reason)
	}
	if list, reason := listDocuments(context.Background(), t.TempDir(), "filesystem"); len(list) != 0 || reason != "" {
		t.Errorf("an empty directory gave %v, %q", list, reason)
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if _, reason := listDocuments(over, newRepository(t), "filesystem"); reason == "" {
		t.Error("a list that was cut short does not say so")
	}
}

// TestPagesPathTricks sends paths that lead out of what is served, in every spelling, as they are.
func TestPagesPathTricks(t *testing.T) {
	t.Parallel()
	dir := newRepository(t)
	write(t, filepath.Join(dir, "..", "secret.md"), "# the secret\n")
	write(t, filepath.Join(dir, "docs-x", "secret.md"), "# the secret\n")
	url := servePages(t, newPageServer(t, dir, "filesystem"), nil)
	for _, prefix := range []string{"/docs/", "/docs/files/", "/docs/files/docs/", "/assets/", "/docs/peers.list/", "/"} {
		for _, up := range []string{"..", "%2e%2e", "%2E.", ".%2e", "%252e%252e", "..%00", "..;", "....//", "%c0%ae%c0%ae", "..%5c..", "..\\"} {
			for _, slash := range []string{"/", "%2f", "%2F", "%252f", "%5c", "\\", "//"} {
				for _, target := range []string{"secret.md", "README.md/" + up + slash + "secret.md", "etc/passwd"} {
					for _, depth := range []int{1, 3} {
						path := prefix + strings.Repeat(up+slash, depth) + target
						if status, body := rawGet(t, url, path); status != 400 && status != 404 || strings.Contains(body, "the secret") || strings.Contains(body, "root:") {
							t.Errorf("%s: %d", path, status)
						}
					}
				}
			}
		}
	}
	for _, path := range []string{
		"//etc/passwd", "/docs//files/README.md", "/docs/files//README.md", "/docs/files//etc/passwd", "/docs/files/./README.md", "/docs/files/README.md%00", "/docs/files/README.md%00.md",
		"/docs/files/" + strings.ReplaceAll(dir, "/", "%2f") + "%2fREADME.md", "/docs/files/docs-x/secret.md", "/docs/files/readme.MD/", "/docs/files/README.md/", "/docs/files/.git/config",
		"/docs/files/docs", "/docs/files/docs/", "/assets/", "/assets/board.html", "/assets/swagger.html", "/assets/%2e%2e%2fpages.go", "/docs/Peers.list", "/docs/peers.list%00",
	} {
		if status, _ := rawGet(t, url, path); status != 400 && status != 404 {
			t.Errorf("%s: %d", path, status)
		}
	}
}

func rawGet(t testing.TB, url, path string) (status int, body string) {
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nAccept: text/html\r\nConnection: close\r\n\r\n", path, strings.TrimPrefix(url, "http://"))
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	fmt.Sscanf(string(answer), "HTTP/1.1 %d", &status)
	return status, string(answer)
}
