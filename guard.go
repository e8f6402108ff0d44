package main

// The guards in front of every route; connections.go is what is under them. Nothing
// is looked at before Host, Origin and Sec-Fetch-Site have passed: a page in
// the user's browser must not reach any route.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"mime"
	"net"
	"net/http"
	"path"
	"runtime/debug"
	"strconv"
	"strings"
)

// httpServer is the HTTP server around the routes. Its write deadline would end calls that wait; deadlineConn has one for
// each write.
func (s *server) httpServer() *http.Server {
	deadline := s.set.timing.read
	return &http.Server{
		Handler: s.guard(s.routes()),
		// OPTIONS * must pass the guard like everything else.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            deadline,
		ReadTimeout:                  deadline,
		IdleTimeout:                  deadline,
		MaxHeaderBytes:               maxHeaders,
		ErrorLog:                     log.New(io.Discard, "", 0), // a stranger's bad request is not our user's concern
		BaseContext:                  func(net.Listener) context.Context { return s.calls },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		ConnState: func(c net.Conn, state http.ConnState) {
			if state == http.StateNew {
				s.unused.Store(c, nil)
			} else {
				s.unused.Delete(c)
			}
		},
	}
}

// closeUnused closes the connections on which nothing was sent yet, as clients
// keep for later: Shutdown would wait for their first request. No bridge loses
// a message, since each begins with a question.
func (s *server) closeUnused() {
	s.unused.Range(func(c, _ any) bool {
		c.(net.Conn).Close()
		return true
	})
}

// routeTable is a mux that knows what was registered with it, so that a test can try the guards on every route there is.
type routeTable struct {
	http.ServeMux
	patterns []string
}

func (t *routeTable) HandleFunc(pattern string, handler func(http.ResponseWriter, *http.Request)) {
	t.ServeMux.HandleFunc(pattern, handler)
	t.patterns = append(t.patterns, pattern)
}

// routes registers everything that is served: the table, then the fixed paths.
func (s *server) routes() *routeTable {
	mux := &routeTable{}
	for _, c := range capabilities() {
		mux.HandleFunc(c.method+" "+c.path, func(w http.ResponseWriter, r *http.Request) { s.serveCapability(w, r, &c) })
	}
	mux.HandleFunc("GET /{$}", s.serveHome)
	mux.HandleFunc("GET /api/v1", s.serveIndex)
	mux.HandleFunc("GET /openapi.json", s.serveOpenAPI)
	s.pageRoutes(mux)
	mux.HandleFunc("/mcp", s.serveMCP)
	return mux
}

// guard stands in front of every route. It refuses what a page in the user's
// browser, a rebound name or a smuggled request could send; what passes is
// counted, so that ending can wait for it, and a panic ends one request only.
func (s *server) guard(mux *routeTable) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.running.Add(1)
		if c, _ := r.Context().Value(connKey{}).(*deadlineConn); c != nil {
			c.noteHead()
		}
		defer func() {
			if v := recover(); v != nil {
				s.logPanic(v)
				s.failure(w, r, http.StatusInternalServerError, "internal", "internal error; the log has the details")
			}
			if s.running.Add(-1) == 0 {
				signalOn(s.quiet)
			}
		}()
		h := w.Header()
		h["X-Content-Type-Options"] = []string{"nosniff"}
		h["Cache-Control"] = []string{"no-store"}
		if r.TransferEncoding != nil {
			// What follows a chunked body on this connection is not trusted.
			h["Connection"] = []string{"close"}
		}
		if status, code, message := s.admissible(r); status != 0 {
			h["Connection"] = []string{"close"}
			s.failure(w, r, status, code, message)
			return
		}
		if r.URL.Path == "/mcp" {
			s.serveMCP(w, r)
			return
		}
		if handler, pattern := mux.Handler(r); pattern == "" {
			s.serveUnrouted(w, r, handler)
			return
		}
		mux.ServeHTTP(w, r) // not the handler above: only this sets path values
	})
}

// admissible applies the checks that come before everything else; status 0
// means that the request may pass.
func (s *server) admissible(r *http.Request) (status int, code, message string) {
	both := false
	if c, _ := r.Context().Value(connKey{}).(*deadlineConn); c != nil {
		both = c.bothLengths(r.TransferEncoding != nil)
	}
	origin, sent := r.Header["Origin"]
	switch {
	case r.Host == "":
		return 400, "invalid_input", "the request names no Host"
	case !s.local(r.Host):
		return 403, "forbidden", fmt.Sprintf("Host %q is not this server: use %s", clip(r.Host, 80), s.url)
	case sent && (len(origin) != 1 || !strings.HasPrefix(origin[0], "http://") || !s.local(origin[0][len("http://"):])):
		return 403, "forbidden", fmt.Sprintf("Origin %q may not call this server", clip(strings.Join(origin, ", "), 80))
	case elsewhere(r.Header["Sec-Fetch-Site"]) && !follows(r):
		return 403, "forbidden", "a page from elsewhere may not call this server"
	case r.RequestURI == "" || r.RequestURI[0] != '/':
		return 400, "invalid_input", "the request target must be a path"
	case !plainPath(r.URL.Path):
		return 404, "not_found", "there is nothing at this path"
	case both:
		return 400, "invalid_input", "a request has either Content-Length or Transfer-Encoding, never both"
	}
	return 0, "", ""
}

// elsewhere reports whether a browser says that a page that is not ours has caused the request. To a browser every port of
// this machine is the same site, so a page of another local server counts too, and so does a word that is not known yet.
func elsewhere(site []string) bool {
	return len(site) > 0 && (len(site) > 1 || site[0] != "same-origin" && site[0] != "none")
}

// follows reports whether the user follows a link to a page. What a browser fetches for a page itself, ahead of a click
// too, would tell that page whether there is such a path.
func follows(r *http.Request) bool {
	return r.Method == "GET" && wantsPage(r) && r.Header.Get("Sec-Purpose") == "" &&
		r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

// local reports whether an authority is this server under one of its three names.
func (s *server) local(authority string) bool {
	host, port, found := strings.Cut(authority, ":")
	if strings.HasPrefix(authority, "[::1]:") {
		host, port, found = "localhost", authority[len("[::1]:"):], true
	}
	return found && (host == "127.0.0.1" || strings.EqualFold(host, "localhost")) &&
		port == s.url[strings.LastIndexByte(s.url, ':')+1:]
}

// plainPath refuses paths that would have to be cleaned first, so that no
// route has to think about them.
func plainPath(p string) bool {
	clean := path.Clean(p)
	return (p == clean || p == clean+"/" && clean != "/") && !strings.ContainsAny(p, "\x00\\")
}

// wantsPage reports whether a browser asks for a page, rather than a program
// for data.
func wantsPage(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "text/html") &&
		r.URL.Path != "/mcp" && r.URL.Path != "/openapi.json" && !strings.HasPrefix(r.URL.Path, "/api/")
}

// serveUnrouted answers what no route matches: the mux's own answer tells a
// wrong method from an unknown path, but in text.
func (s *server) serveUnrouted(w http.ResponseWriter, r *http.Request, handler http.Handler) {
	answer := &headOnly{header: http.Header{}}
	handler.ServeHTTP(answer, r)
	if answer.status == http.StatusMethodNotAllowed {
		allow := answer.header.Get("Allow")
		w.Header().Set("Allow", allow)
		s.failure(w, r, 405, "method_not_allowed", fmt.Sprintf("%s is not allowed here, only %s", clip(r.Method, 20), allow))
		return
	}
	s.pageFailure(w, r, 404, "not_found", "there is nothing at this path; GET / lists what is served")
}

// headOnly is a ResponseWriter that keeps the head and drops the body.
type headOnly struct {
	header http.Header
	status int
}

func (h *headOnly) Header() http.Header         { return h.header }
func (h *headOnly) WriteHeader(status int)      { h.status = status }
func (h *headOnly) Write(b []byte) (int, error) { return len(b), nil }

// failure writes an error in the form of its surface: a JSON-RPC error without
// id at /mcp, {"error": …} elsewhere.
func (s *server) failure(w http.ResponseWriter, r *http.Request, status int, code, message string) {
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	if r.URL.Path != "/mcp" {
		writeJSON(w, status, mustJSON(errorAnswer{errorDetail{code, message}}))
		return
	}
	number := codeInvalidRequest
	if code == "invalid_json" {
		number = codeParse
	}
	writeJSON(w, status, mustJSON(struct {
		Version string   `json:"jsonrpc"`
		Error   rpcError `json:"error"`
	}{"2.0", rpcError{number, message, map[string]string{"code": code}}}))
}

// refused writes an error of a capability or of admission.
func (s *server) refused(w http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, errLeaseLost) {
		s.failure(w, r, 409, "lease_lost", "not executed, or safe to repeat: this server has handed its checkout on; ask the next one")
		return
	}
	if errors.Is(err, errSessionEnded) {
		s.sessionNotFound(w, r)
		return
	}
	if unknown := (*rpcError)(nil); errors.As(err, &unknown) {
		s.failure(w, r, 500, "internal", unknown.Message)
		return
	}
	f := s.refusalOf(err)
	s.failure(w, r, httpStatus(f.code), f.code, f.message)
}

var jsonType = []string{"application/json"}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h["Content-Type"] = jsonType
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	w.Write(body)
}

const (
	smallBody   = 16 << 10 // as many of them as there may be connections are no burden
	bodiesLimit = 64 << 20 // of larger ones that come with neither the token nor the id of a session that has shown it
)

// readBody reads a JSON body within its limits; false means that the answer
// has been written.
func (s *server) readBody(w http.ResponseWriter, r *http.Request, trusted bool) ([]byte, bool) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		s.failure(w, r, 415, "unsupported_media_type", fmt.Sprintf("Content-Type %q: send application/json", clip(r.Header.Get("Content-Type"), 80)))
		return nil, false
	}
	tooLarge := func() {
		// Read on for a while: a client that is still writing would see a
		// broken connection instead of the answer.
		io.CopyN(io.Discard, r.Body, 4*maxMessage)
		s.failure(w, r, 413, "too_large", fmt.Sprintf("a body may have at most %d bytes", maxMessage))
	}
	if r.ContentLength > maxMessage {
		tooLarge()
		return nil, false
	}
	size := r.ContentLength
	if size < 0 {
		size = maxMessage
	}
	if !trusted && size > smallBody {
		defer s.bodies.Add(-size)
		if s.bodies.Add(size) > bodiesLimit {
			s.busy(w, r, fmt.Sprintf("bodies of %d bytes are being sent, which is the limit for those without the token: try again", bodiesLimit))
			return nil, false // at once: to read on is what there is too much of
		}
	}
	if r.ContentLength < 0 {
		body, err := io.ReadAll(io.LimitReader(r.Body, maxMessage+1))
		switch {
		case err != nil:
			s.failure(w, r, 400, "invalid_input", "the body ended early or was malformed")
			return nil, false
		case len(body) > maxMessage:
			tooLarge()
			return nil, false
		}
		return body, true
	}
	body := make([]byte, r.ContentLength)
	if _, err := io.ReadFull(r.Body, body); err != nil {
		s.failure(w, r, 400, "invalid_input", "the body is shorter than its Content-Length, or came too slowly")
		return nil, false
	}
	return body, true
}

func (s *server) logPanic(v any) {
	s.log.Error(fmt.Sprintf("panic: %v: %q", v, debug.Stack()))
}
