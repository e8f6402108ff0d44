//go:build unix

package main

// What the pages look like with much on the board: made up, since so many clients would take long to start.

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// serveGallery serves the pages of a server whose board holds so many peers, some of whom are in each other's way.
func serveGallery(t *testing.T, peers int) (url string) {
	dir := newRepository(t)
	s := newPageServer(t, dir, "vcs")
	board := galleryBoard(s.checkout, peers)
	return servePages(t, s, func(guarded http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/api/v1/peers":
				writeJSON(w, 200, mustJSON(board))
			case "/api/v1":
				writeJSON(w, 200, []byte(`{"routes":[{"method":"GET","path":"/api/v1/peers"},{"method":"GET","path":"/api/v1/episodes"},{"method":"GET","path":"/api/v1/schedules"},{"method":"GET","path":"/api/v1/mesh/asks"}]}`))
			case "/api/v1/episodes":
				writeJSON(w, 200, mustJSON(galleryEpisodes(peers)))
			case "/api/v1/schedules":
				writeJSON(w, 200, mustJSON(gallerySchedules(peers)))
			case "/api/v1/mesh/asks":
				writeJSON(w, 200, mustJSON(galleryAsks(peers)))
			default:
				guarded.ServeHTTP(w, r)
			}
		})
	})
}

var galleryWork = []struct{ client, intent, scope string }{
	{"claude-code", "teach the parser to recover after a missing brace", "parser,lexer/token.go"},
	{"codex", "a new lexer that keeps comments", "lexer,parser/lex.go"},
	{"gemini-cli", "", ""},
	{"opencode", "bring the documentation of the configuration file up to date", "docs/configuration.md"},
	{"cursor", "find out why the nightly build has failed since Tuesday", ".github/workflows"},
	{"claude-code", "move the HTTP handlers into one package and give each a test", "internal/http,internal/server/handlers_test.go,internal/server/routes.go"},
	{"vscode", "upgrade the linter and fix what it finds", "**/*.go"},
}

func galleryBoard(at checkout, n int) peersOutput {
	places := []peerCheckout{
		{ID: at.id, Worktree: at.root, Branch: "main", ThisCheckout: true},
		{ID: digest("a"), Worktree: "/home/kim/work/compiler-lexer", Branch: "lexer"},
		{ID: digest("b"), Worktree: "/home/kim/work/compiler-docs-of-the-configuration-file", Branch: "docs/configuration-file-reference"},
		{ID: digest("c"), Worktree: "/home/kim/work/compiler-nightly", Branch: "fix/nightly"},
		{ID: digest("d"), Worktree: "/home/kim/work/compiler-http", Branch: "http"},
	}
	out := peersOutput{Peers: []peer{}, Boards: []boardView{}, Complete: true, Omitted: map[string]int{}}
	used := min(len(places), 1+n/2)
	attachedAt := map[string]int{}
	now := time.Now()
	for i := range n {
		work := galleryWork[i%len(galleryWork)]
		where := &places[i*used/n]
		p := peer{
			ID: peerID(fmt.Sprintf("p%d", i+1)), Client: clientInfo{Name: work.client, Version: fmt.Sprintf("2.%d.1", i%7)}, Transport: "http",
			ConnectedAt: stamp(now.Add(-time.Duration(i*i*40+50) * time.Second)), LastSeen: int64(i * i % 400), Attached: i%11 != 9, Checkout: where, Claims: []announcement{},
			Mesh: &peerMesh{Name: strings.ToLower(filepath.Base(where.Worktree)), Circle: "default", Role: "agent"},
		}
		if i%used != 0 {
			p.Mesh.Name = fmt.Sprintf("%s-%d", p.Mesh.Name, i)
		}
		switch i % 9 {
		case 1:
			p.Mesh.Role = "orchestrator"
		case 4:
			p.Mesh.Circle, p.Mesh.Description = "release", "keeps the nightly build green and answers questions about it"
		case 7:
			p.Mesh.Unverified = true
		}
		if work.intent != "" {
			a := announcement{Intent: work.intent, Scope: strings.Split(work.scope, ","), At: p.ConnectedAt}
			if i >= len(galleryWork) && i%5 != 0 { // not everybody is in everybody's way
				a.Scope = []string{fmt.Sprintf("module%d", i), fmt.Sprintf("module%d_test", i)}
			}
			p.Announcement, p.Claims = &a, []announcement{a}
			if i%8 == 5 {
				p.Claims = append(p.Claims, announcement{Name: "subagent", Intent: "measure the cold start", Scope: []string{"bench"}, At: p.ConnectedAt})
			}
		}
		if p.Attached {
			out.Count++
			attachedAt[where.ID]++
		}
		out.Peers = append(out.Peers, p)
	}
	for i, c := range places[:used] {
		v := boardView{ID: c.ID, Worktree: c.Worktree, Branch: c.Branch, ThisCheckout: c.ThisCheckout, Standing: "ready", URL: fmt.Sprintf("http://127.0.0.1:%d", 40000+i), Attached: attachedAt[c.ID]}
		if i == 3 {
			v.Standing = "outdated"
		}
		out.Boards = append(out.Boards, v)
	}
	if n > 3 {
		out.Complete = false
		out.Boards = append(out.Boards, boardView{ID: digest("e"), Worktree: "/home/kim/work/compiler-release", Branch: "release/2.0", Standing: "stale", Reason: "a process holds its lease, but http://127.0.0.1:41873 does not answer for it: it did not answer within 2s"})
		out.Omitted = map[string]int{"absent": 601, "stale": 4}
	}
	out.Covered = len(out.Boards) + out.Omitted["absent"] + out.Omitted["stale"]
	out.Overlaps, _ = overlapsAmong(context.Background(), out.Peers)
	return out
}

type galleryThing map[string]any

func galleryEpisodes(n int) galleryThing {
	list := []galleryThing{}
	for i := range min(n, 4) {
		e := galleryThing{"external_id": fmt.Sprintf("conv-%d", 42+i), "provider": "claude-code", "opened_at": stamp(time.Now().Add(-time.Hour)), "last_activity_seconds_ago": 40, "attachments": i + 1, "state": "open", "peer": "p1", "repository": "opened record 0042-parser-recovery"}
		if i == 2 {
			e["state"] = "detached"
			delete(e, "peer")
		}
		list = append(list, e)
	}
	return galleryThing{"open": len(list), "detached": 0, "episodes": list}
}

func gallerySchedules(n int) galleryThing {
	list := []galleryThing{}
	for i := range min(n, 2) {
		list = append(list, galleryThing{"schedule_id": fmt.Sprintf("sched-0badcaf%d", i), "from_peer": "compiler", "to_peer": "compiler-lexer", "kind": "notify", "fire_at": stamp(time.Now().Add(50 * time.Minute)), "cron": []string{"", "0 7 * * mon-fri"}[i]})
	}
	return galleryThing{"schedules": list}
}

func galleryAsks(n int) galleryThing {
	list := []galleryThing{}
	if n > 0 {
		list = append(list, galleryThing{"id": "ask-c1a1c7dd", "from": "compiler", "to": "compiler-lexer", "state": "unread", "age_seconds": 430})
	}
	return galleryThing{"asks": list}
}
