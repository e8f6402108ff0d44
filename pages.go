package main

// The pages for people, embedded: no request leaves the machine.

import (
	"embed"
	"net/http"
)

//go:embed pages
var pageFiles embed.FS

// pagePolicy lets a page load its own stylesheet and scripts and nothing else.
const pagePolicy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func (s *server) pageRoutes(mux *http.ServeMux) {
	page := func(pattern, name string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.servePage(w, r, name) })
	}
	page("GET /board", "board")
	page("GET /docs/{$}", "docs")
	page("GET /swagger", "swagger")
	mux.HandleFunc("GET /assets/style.css", func(w http.ResponseWriter, r *http.Request) {
		s.serveFile(w, r, "style.css", "text/css; charset=utf-8")
	})
}

func (s *server) servePage(w http.ResponseWriter, r *http.Request, name string) {
	w.Header().Set("Content-Security-Policy", pagePolicy)
	w.Header().Set("Referrer-Policy", "no-referrer")
	w.Header().Set("Vary", "Accept")
	s.serveFile(w, r, name+".html", "text/html; charset=utf-8")
}

func (s *server) serveFile(w http.ResponseWriter, r *http.Request, name, kind string) {
	body, err := pageFiles.ReadFile("pages/" + name)
	if err != nil {
		s.failure(w, r, 404, "not_found", "there is nothing at this path")
		return
	}
	serveAsset(w, r, kind, body)
}
