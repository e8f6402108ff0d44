package main

// The routes beside MCP: a capability each, the home answer that proves who this
// is, the index and the contract.

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"path/filepath"
	"time"
)

//go:embed openapi.json
var openapiJSON []byte

// serveCapability is the REST route of one capability. There is no caller: a
// session id sent along is ignored.
func (s *server) serveCapability(w http.ResponseWriter, r *http.Request, c *capability) {
	if s.gone() {
		if c.command {
			s.refused(w, r, errLeaseLost)
		} else {
			s.failure(w, r, 404, "not_found", "this server has handed its checkout on; ask the next one")
		}
		return
	}
	ctx := r.Context()
	trusted, ok := s.checkToken(w, r)
	switch {
	case !ok:
		return
	case trusted:
		ctx = asHuman(ctx)
		s.confirmedBy(nil, r)
	case c.token:
		s.unauthorized(w, r, "this needs Authorization: Bearer with the token of this server's lease file")
		return
	}
	args, ok := s.readArguments(w, r, c, trusted)
	x := &exchange{command: c.command}
	if !ok || !s.startWork(w, r, x, s.among(trusted)) {
		return
	}
	defer x.end()
	if c.mayWait {
		http.NewResponseController(w).SetReadDeadline(time.Time{})
	}
	s.mesh.settled()
	s.writeCarrying(w, r, nil, x, func() bool {
		out, err := s.invoke(withExchange(ctx, x), c, args)
		var answer []byte
		if err == nil {
			answer = append(mustJSON(out), '\n')
		}
		x.executed()
		switch {
		case errors.Is(err, errCancelled): // nobody is there to read an answer
		case err != nil:
			s.refused(w, r, err)
		case s.room(w, r, x, len(answer)):
			writeJSON(w, http.StatusOK, answer)
			return true
		}
		return false
	})
}

func (s *server) readArguments(w http.ResponseWriter, r *http.Request, c *capability, trusted bool) (json.RawMessage, bool) {
	query := r.URL.Query()
	if c.method == "GET" {
		args, err := queryArguments(c, query)
		if err != nil {
			s.refused(w, r, err)
		}
		return args, err == nil
	}
	if len(query) > 0 {
		s.failure(w, r, 400, "invalid_input", "this route takes no query parameters: send a JSON object as the body")
		return nil, false
	}
	body, ok := s.readBody(w, r, trusted)
	if !ok {
		return nil, false
	}
	body = validText(body)
	if err := checkJSON(body); err != nil {
		s.failure(w, r, 400, "invalid_json", err.Message)
		return nil, false
	}
	return body, true
}

// homeAnswer is GET / for programs. It names no path.
type homeAnswer struct {
	Name            string    `json:"name"`
	Version         string    `json:"version"`
	Repository      string    `json:"repository"`
	RepositoryID    string    `json:"repository_id"`
	GitRepositoryID string    `json:"git_repository_id,omitempty"`
	LinkedWorktree  bool      `json:"linked_worktree"`
	Leaseholder     bool      `json:"leaseholder"`
	Proof           string    `json:"proof,omitempty"`
	Surfaces        []surface `json:"surfaces"`
}

// serveHome is the home page, and for programs the answer that proves who this
// is: only a process that has read the lease file can compute the proof.
func (s *server) serveHome(w http.ResponseWriter, r *http.Request) {
	if wantsPage(r) {
		s.serveHomePage(w, r)
		return
	}
	answer := homeAnswer{
		Name:            "majordomus",
		Version:         s.set.version,
		Repository:      filepath.Base(s.checkout.root),
		RepositoryID:    s.checkout.id,
		GitRepositoryID: s.checkout.gitID,
		LinkedWorktree:  s.checkout.linked,
		Leaseholder:     s.holds(),
		Surfaces:        surfaces(),
	}
	if challenge := r.Header.Get("Majordomus-Challenge"); challenge != "" {
		if !validIdentity(challenge) {
			s.failure(w, r, 400, "invalid_input", "Majordomus-Challenge must be 32 lower-case hex digits")
			return
		}
		answer.Proof = proof(s.lease.token(), challenge)
	}
	w.Header().Set("Vary", "Accept")
	writeJSON(w, http.StatusOK, append(mustJSON(answer), '\n'))
}

// serveIndex lists the routes of the REST API.
func (s *server) serveIndex(w http.ResponseWriter, r *http.Request) {
	type route struct {
		ID      string `json:"id"`
		Method  string `json:"method"`
		Path    string `json:"path"`
		Summary string `json:"summary"`
	}
	var routes []route
	for _, c := range capabilities() {
		routes = append(routes, route{c.id, c.method, c.path, c.summary})
	}
	writeJSON(w, http.StatusOK, append(mustJSON(map[string]any{"openapi": "/openapi.json", "routes": routes}), '\n'))
}

func (s *server) serveOpenAPI(w http.ResponseWriter, r *http.Request) {
	serveAsset(w, r, "application/json", openapiJSON)
}

// serveAsset serves embedded bytes under an ETag, so that asking again is cheap.
func serveAsset(w http.ResponseWriter, r *http.Request, kind string, body []byte) {
	sum := sha256.Sum256(body)
	w.Header().Set("ETag", `"`+hex.EncodeToString(sum[:12])+`"`)
	w.Header().Set("Cache-Control", "no-cache")
	w.Header().Set("Content-Type", kind)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
}
