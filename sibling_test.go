package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// gatherServer is a server for the checkout, as far as the board needs one. It holds no lease.
func gatherServer(c checkout) *server {
	return &server{
		checkout: c, board: newBoard(), log: slog.New(slog.NewTextHandler(io.Discard, nil)), started: time.Now(),
		set: &settings{version: "1.0.0", timing: timings{probe: patience, bindGrace: 15 * time.Second}},
	}
}

func asCaller(ctx context.Context, id peerID) context.Context {
	return context.WithValue(ctx, sessionKey{}, &session{peer: id})
}

// gatherRepo makes a repository with linked worktrees of these names beside its main checkout.
func gatherRepo(t testing.TB, names ...string) (root string, at func(string) string) {
	t.Helper()
	root = gitRepo(t)
	at = func(name string) string { return filepath.Join(filepath.Dir(root), name) }
	for _, name := range names {
		gitIn(t, root, "worktree", "add", "-q", "-b", name, at(name))
	}
	return root, at
}

// gatherWorktrees makes n worktrees by writing the few files that git would write.
func gatherWorktrees(t testing.TB, root string, n int) []string {
	t.Helper()
	head := strings.TrimSpace(gitIn(t, root, "rev-parse", "HEAD"))
	var roots []string
	for i := range n {
		name := fmt.Sprint("w", i)
		wt, admin := filepath.Join(filepath.Dir(root), "wt", name), filepath.Join(root, ".git/worktrees", name)
		err := errors.Join(os.MkdirAll(wt, 0o777), os.MkdirAll(admin, 0o777),
			os.WriteFile(filepath.Join(wt, ".git"), []byte("gitdir: "+admin+"\n"), 0o666),
			os.WriteFile(filepath.Join(admin, "commondir"), []byte("../..\n"), 0o666),
			os.WriteFile(filepath.Join(admin, "gitdir"), []byte(filepath.Join(wt, ".git")+"\n"), 0o666),
			os.WriteFile(filepath.Join(admin, "HEAD"), []byte(head+"\n"), 0o666))
		if err != nil {
			t.Fatal(err)
		}
		roots = append(roots, wt)
	}
	return roots
}

// serving makes the server a leaseholder.
func serving(t testing.TB, s *server) *server {
	t.Helper()
	dir, err := stateDir(s.checkout.root)
	if err != nil {
		t.Fatal(err)
	}
	if s.lease, err = newLease(dir, gatherLease(s.checkout.root), os.Link); err != nil {
		t.Fatal(err)
	}
	if err := s.lease.publish("http://127.0.0.1:1"); err != nil { // never to be asked
		t.Fatal(err)
	}
	t.Cleanup(func() { s.lease.release() })
	return s
}

// sibling plays the server of another checkout: a board, a socket and a held lease.
type sibling struct {
	*server
	doc  leaseDocument
	file *os.File // holds the lease

	mu    sync.Mutex
	asked []string // request targets since heard was called last
	home  http.HandlerFunc
	peers http.HandlerFunc
}

// newSibling starts one for the checkout at root. It ends with the test.
func newSibling(t testing.TB, root string) *sibling {
	t.Helper()
	s := &sibling{server: gatherServer(mustFind(t, root))}
	s.home, s.peers = s.serveHome, s.servePeers
	h := httptest.NewServer(s)
	t.Cleanup(func() {
		h.CloseClientConnections()
		h.Close()
	})
	s.doc = gatherLease(s.checkout.root)
	s.doc.URL = &h.URL
	s.plant(t)
	return s
}

func (s *sibling) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.asked = append(s.asked, r.RequestURI)
	handle := s.peers
	if r.URL.Path == "/" {
		handle = s.home
	}
	s.mu.Unlock()
	handle(w, r)
}

// answers sets what the sibling says when asked who it is, and for its board; nil leaves it.
func (s *sibling) answers(home, peers http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if home != nil {
		s.home = home
	}
	if peers != nil {
		s.peers = peers
	}
}

// heard returns what it was asked since the last time.
func (s *sibling) heard() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked := s.asked
	s.asked = nil
	return asked
}

func gatherLease(root string) leaseDocument {
	return leaseDocument{
		Schema: leaseSchema, PID: os.Getpid(), Token: strings.Repeat("5e", 16), Root: root,
		StartedAt: stamp(time.Now()), Version: "1.0.0",
	}
}

// plant writes the lease and holds it.
func (s *sibling) plant(t testing.TB) {
	t.Helper()
	s.release()
	s.file = holdLease(t, s.checkout.root, s.doc)
	t.Cleanup(s.release)
}

func (s *sibling) release() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// holdLease puts a lease in place as a server does, and returns what holds it.
func holdLease(t testing.TB, root string, doc leaseDocument) *os.File {
	t.Helper()
	data, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	path := leasePath(root)
	mustWrite(t, path+".new", string(data))
	f, err := os.Open(path + ".new")
	if err != nil {
		t.Fatal(err)
	}
	if err := flock(f, lockExclusive); err != nil {
		f.Close()
		t.Skip("no file locks here: ", err)
	}
	mustRename(t, path+".new", path)
	return f
}

func (s *sibling) serveHome(w http.ResponseWriter, r *http.Request) {
	mac := hmac.New(sha256.New, []byte(s.doc.Token))
	mac.Write([]byte(r.Header.Get("Majordomus-Challenge")))
	json.NewEncoder(w).Encode(map[string]any{
		"name": "majordomus", "repository_id": digest(s.doc.Root), "leaseholder": true, "proof": hex.EncodeToString(mac.Sum(nil)),
	})
}

func (s *sibling) servePeers(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	out, err := s.peersList(r.Context(), peersInput{Checkouts: q.Get("checkouts"), View: q.Get("view")})
	if err != nil {
		http.Error(w, err.Error(), 500)
		return
	}
	json.NewEncoder(w).Encode(out)
}

func answering(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { writeJSON(w, status, []byte(body)) }
}

// attach puts a peer onto the sibling's board, with a claim.
func (s *sibling) attach(t testing.TB, intent string, scope ...string) peerID {
	t.Helper()
	id := s.board.attach(attachment{Transport: "stdio", Carried: carried{Name: filepath.Base(s.checkout.root)}})
	boardClaims(t, s.board, id, announceInput{Intent: intent, Scope: scope})
	return id
}
