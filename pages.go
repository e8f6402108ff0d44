package main

// The pages for people, embedded: no request leaves the machine. Whatever a page shows that came from outside is escaped here
// or set as text by the scripts in pages/, which know no other way.

import (
	"embed"
	"fmt"
	"html"
	"net/http"
	"path"
	"path/filepath"
	"strings"
)

//go:embed pages
var pageFiles embed.FS

// pagePolicy lets a page load its own stylesheet and scripts and nothing else.
const pagePolicy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func (s *server) pageRoutes(mux *routeTable) {
	mux.HandleFunc("GET /board", func(w http.ResponseWriter, r *http.Request) { s.serveBuilt(w, r, "Board", "board") })
	mux.HandleFunc("GET /swagger", func(w http.ResponseWriter, r *http.Request) { s.serveBuilt(w, r, "API explorer", "swagger") })
	mux.HandleFunc("GET /docs", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/docs/", http.StatusFound) })
	mux.HandleFunc("GET /docs/{$}", s.serveDocs)
	mux.HandleFunc("GET /docs/{id}", s.serveReference)
	mux.HandleFunc("GET /docs/files/{path...}", s.serveDocument)
	mux.HandleFunc("GET /assets/{name}", s.servePageAsset)
}

// markup is text that is HTML already.
type markup string

func escape(s string) string { return html.EscapeString(s) }

// page is a page being written.
type page struct {
	title   string
	section string // the path of the surface it belongs to
	script  string // the module it starts; "" for none
	class   string // of its main part
	body    strings.Builder
}

// add writes a format whose arguments are escaped, unless they are markup.
func (p *page) add(format string, args ...any) {
	for i, a := range args {
		if _, ok := a.(markup); !ok {
			args[i] = escape(fmt.Sprint(a))
		}
	}
	fmt.Fprintf(&p.body, format, args...)
}

// navigation names the surfaces that are pages.
var navigation = []string{"/", "/board", "/docs/", "/swagger"}

// servePage writes the page with what is around every page.
func (s *server) servePage(w http.ResponseWriter, r *http.Request, p *page) {
	s.writePage(w, r, p, http.StatusOK)
}

func (s *server) writePage(w http.ResponseWriter, r *http.Request, p *page, status int) {
	name := filepath.Base(s.checkout.root)
	var out page
	out.add("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n")
	out.add("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n")
	out.add("<title>%s · %s · majordomus</title>\n", p.title, name)
	out.add("<link rel=\"icon\" href=\"/assets/icon.svg\">\n<link rel=\"stylesheet\" href=\"/assets/style.css\">\n")
	if p.script != "" {
		out.add("<script type=\"module\" src=\"/assets/%s\"></script>\n", p.script)
	}
	out.add("</head>\n<body>\n<a class=\"skip\" href=\"#content\">Skip to the content</a>\n")
	out.add("<header class=\"top\"><a class=\"brand\" href=\"/\">majordomus</a><span class=\"where\" title=\"this checkout\"><bdi>%s</bdi></span><nav aria-label=\"Pages\">", name)
	for _, f := range surfaces() {
		for _, at := range navigation {
			if f.Path == at {
				current := markup("")
				if at == p.section {
					current = ` aria-current="page"`
				}
				out.add(`<a href="%s"%s>%s</a>`, f.Path, current, f.Title)
			}
		}
	}
	out.add("</nav></header>\n<main id=\"content\" class=\"%s\" tabindex=\"-1\">\n%s\n</main>\n", p.class, markup(p.body.String()))
	out.add("<footer>majordomus %s, serving <bdi>%s</bdi> at %s</footer>\n</body>\n</html>\n", s.set.version, name, s.url)
	x := &exchange{work: &s.working} // no page needs the token
	defer x.count(0)
	if !s.room(w, r, x, out.body.Len()) {
		return
	}
	h := w.Header()
	h.Set("Content-Security-Policy", pagePolicy)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Vary", "Accept")
	if status != http.StatusOK {
		h.Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(status)
		w.Write([]byte(out.body.String()))
		return
	}
	serveAsset(w, r, "text/html; charset=utf-8", []byte(out.body.String()))
}

// pageFailure is failure on a route for people: a page for a browser, JSON for a program.
func (s *server) pageFailure(w http.ResponseWriter, r *http.Request, status int, code, message string) {
	if !wantsPage(r) {
		s.failure(w, r, status, code, message)
		return
	}
	p := page{title: http.StatusText(status)}
	p.add(`<h1>%s</h1><p class="lead">%s.</p><p>Try the <a href="/board">board</a>, the <a href="/docs/">documentation</a> or the <a href="/">home page</a>.</p>`,
		http.StatusText(status), strings.TrimSuffix(message, "."))
	s.writePage(w, r, &p, status)
}

// serveBuilt is a page whose script builds it from the API.
func (s *server) serveBuilt(w http.ResponseWriter, r *http.Request, title, name string) {
	body, err := pageFiles.ReadFile("pages/" + name + ".html")
	if err != nil {
		panic(err) // embedded
	}
	p := page{title: title, section: "/" + name, script: name + ".js", class: name}
	p.add("%s", markup(body))
	s.servePage(w, r, &p)
}

var assetTypes = map[string]string{
	".css": "text/css; charset=utf-8",
	".js":  "text/javascript; charset=utf-8",
	".svg": "image/svg+xml",
}

// servePageAsset serves what pages are made of. The name is one segment of the path, and the files are embedded.
func (s *server) servePageAsset(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	body, err := pageFiles.ReadFile("pages/" + name)
	kind := assetTypes[path.Ext(name)]
	if err != nil || kind == "" {
		s.failure(w, r, 404, "not_found", "there is nothing at this path")
		return
	}
	w.Header().Set("Content-Security-Policy", pagePolicy)
	serveAsset(w, r, kind, body)
}

// serveHomePage tells a person what this is, and how to come in.
func (s *server) serveHomePage(w http.ResponseWriter, r *http.Request) {
	p := page{title: "Home", section: "/", script: "home.js", class: "home"}
	p.add("<h1><bdi>%s</bdi></h1>\n", filepath.Base(s.checkout.root))
	p.add("<p class=\"lead\">majordomus shows the agents that work on one repository to each other: who is here, what each of them is doing, and whose ground meets whose.</p>\n")
	kind := "main checkout"
	if s.checkout.linked {
		kind = "linked worktree"
	}
	p.add("<dl class=\"facts\"><div><dt>Checkout</dt><dd><bdi>%s</bdi>, %s</dd></div><div><dt>Address</dt><dd><code>%s</code></dd></div>", filepath.Base(s.checkout.root), kind, s.url)
	p.add("<div><dt>Version</dt><dd>%s</dd></div></dl>\n", s.set.version)
	p.add("<section><h2>Here now</h2><div id=\"now\"><p class=\"none\">Asking the server…</p></div><noscript><p class=\"notice\">Without JavaScript: <a href=\"/api/v1/peers\">/api/v1/peers</a></p></noscript></section>\n")
	p.add("<section><h2>Surfaces</h2><ul class=\"index\">")
	for _, f := range surfaces() {
		if f.ID == "mcp" { // nothing for a browser to open
			p.add("<li><span class=\"name\">%s</span> <code>%s</code> <span>%s</span></li>", f.Title, f.Path, surfaceNotes[f.ID])
			continue
		}
		p.add("<li><a href=\"%s\">%s</a> <code>%s</code> <span>%s</span></li>", f.Path, f.Title, f.Path, surfaceNotes[f.ID])
	}
	p.add("</ul></section>\n")
	p.addConfiguration(s.url)
	s.servePage(w, r, &p)
}

var surfaceNotes = map[string]string{
	"home":    "this page; for programs, who this server is",
	"board":   "who is where, what they claim, which claims meet, live",
	"docs":    "every capability, and this repository’s own documents",
	"swagger": "try every route against this server",
	"openapi": "the contract, for programs",
	"api":     "the routes, listed",
	"mcp":     "for clients that speak MCP over HTTP",
}

// clientConfigurations are what to paste, by client. README.md has the same; TestHomeConfiguration keeps them in step.
var clientConfigurations = []struct{ client, where, text string }{
	{"Claude Code", "in a terminal", `claude mcp add majordomus -- majordomus mcp`},
	{"Codex", "~/.codex/config.toml", "[mcp_servers.majordomus]\ncommand = \"majordomus\"\nargs = [\"mcp\"]"},
	{"Gemini CLI", ".gemini/settings.json", `{ "mcpServers": { "majordomus": { "command": "majordomus", "args": ["mcp"] } } }`},
	{"OpenCode", "opencode.json", `{ "mcp": { "majordomus": { "type": "local", "command": ["majordomus", "mcp"], "enabled": true } } }`},
	{"Cursor", ".cursor/mcp.json", `{ "mcpServers": { "majordomus": { "command": "majordomus", "args": ["mcp", "--repo", "${workspaceFolder}"] } } }`},
	{"VS Code", ".vscode/mcp.json", `{ "servers": { "majordomus": { "type": "stdio", "command": "majordomus", "args": ["mcp", "--repo", "${workspaceFolder}"] } } }`},
}

func (p *page) addConfiguration(url string) {
	p.add("<section><h2>Let another client in</h2><p>Each client starts <code>majordomus mcp</code> itself. The first one in a checkout serves, the others join it.</p>\n<div class=\"configurations\">")
	for _, c := range clientConfigurations {
		p.add("<div><h3>%s <small>%s</small></h3><pre tabindex=\"0\"><code>%s</code></pre></div>\n", c.client, c.where, c.text)
	}
	p.add("<div><h3>HTTP <small>while this server runs</small></h3><pre tabindex=\"0\"><code>%s/mcp</code></pre></div></div></section>\n", url)
}
