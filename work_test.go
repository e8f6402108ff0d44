//go:build unix

package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// notRead is the answer to somebody who does not read it: writing comes back when read is closed.
type notRead struct {
	*httptest.ResponseRecorder
	writing chan<- struct{}
	read    <-chan struct{}
}

func (u *notRead) Write(b []byte) (int, error) {
	u.writing <- struct{}{}
	<-u.read
	return u.ResponseRecorder.Write(b)
}

func (g *httpRig) get(ctx context.Context, path string, w http.ResponseWriter) {
	r := httptest.NewRequestWithContext(ctx, "GET", path, nil)
	r.Host = "127.0.0.1:8741"
	g.handler.ServeHTTP(w, r)
}

// Strangers queue for a slot, leave the queue when they hang up, and our own do not queue.
func TestStrangersQueue(t *testing.T) {
	g := newHTTPRig(t)
	g.restore()
	for range executedLimit {
		g.working.slots <- struct{}{}
	}
	const list = `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`
	for _, header := range []string{"Mcp-Session-Id: {bridge}", "Mcp-Session-Id: {bridge}\r\nAuthorization: Bearer {token}"} {
		if w := g.do(t, walked{"POST", "/mcp"}, list, rigHost, "Content-Type: application/json", header); w.Code != 200 {
			t.Errorf("%s: %d %s", header, w.Code, w.Body)
		}
	}
	ctx, hangUp := context.WithCancel(t.Context())
	left, served := httptest.NewRecorder(), httptest.NewRecorder()
	var all sync.WaitGroup
	all.Go(func() { g.get(ctx, "/api/v1/peers", left) })
	eventually(t, "one queues", func() bool { return g.working.Load() == 1 })
	hangUp()
	all.Wait()
	all.Go(func() { g.get(t.Context(), "/docs/", served) })
	eventually(t, "another queues", func() bool { return g.working.Load() == 1 })
	<-g.working.slots
	all.Wait()
	if left.Code != 503 || served.Code != 200 || g.working.Load() != 0 || len(g.working.slots) != executedLimit-1 {
		t.Errorf("%d %d, %d at work, %d executed", left.Code, served.Code, g.working.Load(), len(g.working.slots))
	}
}

// A call that waits, and an answer that nobody reads, hold no slot.
func TestSlotIsGivenUp(t *testing.T) {
	g := newHTTPRig(t)
	g.restore()
	ctx, hangUp := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() {
		body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"inbox","arguments":{"wait_seconds":300}}}`
		r := httptest.NewRequestWithContext(ctx, "POST", "/mcp", strings.NewReader(body))
		r.Host = "127.0.0.1:8741"
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Mcp-Session-Id", g.names.Replace("{new}"))
		g.handler.ServeHTTP(httptest.NewRecorder(), r)
	})
	eventually(t, "it waits", func() bool {
		g.mesh.mu.Lock()
		defer g.mesh.mu.Unlock()
		return len(g.mesh.readers) == 1 && len(g.working.slots) == 0 && g.working.Load() == 0
	})
	writing, read := make(chan struct{}), make(chan struct{})
	for range 2 * executedLimit {
		all.Go(func() { g.get(t.Context(), "/api/v1/peers", &notRead{httptest.NewRecorder(), writing, read}) })
	}
	for range 2 * executedLimit {
		<-writing
	}
	if len(g.working.slots) != 0 || g.working.Load() != 2*executedLimit {
		t.Errorf("%d at work, %d executed", g.working.Load(), len(g.working.slots))
	}
	hangUp()
	close(read)
	all.Wait()
	if len(g.working.slots) != 0 || g.working.Load() != 0 {
		t.Errorf("afterwards %d at work, %d executed", g.working.Load(), len(g.working.slots))
	}
}

// Large answers that strangers do not read are bounded; nothing that was executed is said to be busy.
func TestAnswersAreBounded(t *testing.T) {
	g := newHTTPRig(t)
	g.restore()
	for range 100 {
		g.board.attach(attachment{Transport: "http", Unverified: true})
	}
	writing, read := make(chan struct{}), make(chan struct{})
	var one sync.WaitGroup
	one.Go(func() { g.get(t.Context(), "/api/v1/peers?view=full", &notRead{httptest.NewRecorder(), writing, read}) })
	<-writing
	if n := g.working.answers.Load(); n < 100*100 {
		t.Errorf("%d bytes are counted", n)
	}
	close(read)
	one.Wait()
	if n := g.working.answers.Load(); n != 0 {
		t.Errorf("%d bytes are left", n)
	}

	g.working.answers.Store(answersLimit)
	const (
		list  = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"majordomus_peers","arguments":{}}}`
		claim = `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"majordomus_announce","arguments":{"intent":"i","scope":["a"]}}}`
		ping  = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"whoami","arguments":{}}}`
	)
	for _, c := range []struct {
		body, header string
		want         int
	}{
		{list, "Mcp-Session-Id: {new}", 503}, {list, "Mcp-Session-Id: {bridge}", 200},
		{claim, "Mcp-Session-Id: {new}", 200}, {ping, "Mcp-Session-Id: {new}", 200},
		{"[" + claim + "]", "Mcp-Session-Id: {old}", 503}, {"[" + claim + "]", "Mcp-Session-Id: {bridge}", 200},
	} {
		refused := g.refusedBusy.Load()
		w := g.do(t, walked{"POST", "/mcp"}, c.body, rigHost, "Content-Type: application/json", c.header)
		if w.Code != c.want || c.want == 503 && (jsonCode(w) != "busy" || w.Header().Get("Retry-After") != "1" || g.refusedBusy.Load() != refused+1) {
			t.Errorf("%s, %s: %d %.200s", c.body, c.header, w.Code, w.Body)
		}
	}
	for _, header := range []string{"X: y", "Authorization: Bearer {token}"} {
		want := map[bool]int{true: 503, false: 200}[header == "X: y"]
		if w := g.do(t, walked{"GET", "/api/v1/peers?view=full"}, "", rigHost, header); w.Code != want {
			t.Errorf("%s: %d %.200s", header, w.Code, w.Body)
		}
	}
	if n := g.working.answers.Load(); n != answersLimit {
		t.Errorf("%d bytes are counted", n)
	}
	for _, n := range g.kept {
		if m, _ := g.board.look(n.peer); n.id == g.names.Replace("{old}") && len(m.claims) > 0 {
			t.Error("what was refused as busy has been executed")
		}
	}
}
