package main

// One answer from the boards of all checkouts of the repository. A server serves one checkout; what the others hold is
// asked from their servers, found by their leases. A board that could not be read is named with the reason, so that a
// short answer is never taken for an empty repository. Nothing a sibling does makes a gather fail, take longer than
// its bound, or grow without one. A gather never asks back: siblings are asked for their own board alone.

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	gatherTogether = 32       // siblings asked at once
	boardLimit     = 8 << 20  // bytes of one sibling's answer
	boardsLimit    = 64 << 20 // bytes of all answers of a gather

	// A listing takes at most the probe timeout and a second.
	gatherTime  = 800 * time.Millisecond // beyond the probe timeout
	overlapTime = 200 * time.Millisecond
)

type peersInput struct {
	Checkouts string `json:"checkouts" doc:"which checkouts to cover: all of the repository, or the one of this server alone" enum:"repository,this" default:"repository"`
	View      string `json:"view" doc:"which covered checkouts to list in boards: those with something on them, or every one" enum:"summary,full" default:"summary"`
}

type peersOutput struct {
	Count    int            `json:"count" doc:"how many peers are attached on the boards that were read, the caller included" min:"0"`
	Caller   peerID         `json:"caller,omitempty" doc:"the caller's own id, on the board of this checkout"`
	Peers    []peer         `json:"peers" doc:"the peers: this checkout's first, then checkout by checkout, in the order of attaching"`
	Covered  int            `json:"covered" doc:"how many checkouts the answer covers, listed in boards or counted in omitted" min:"0"`
	Boards   []boardView    `json:"boards" doc:"the covered checkouts, as far as view lists them; one that could not be read always"`
	Omitted  map[string]int `json:"omitted,omitzero" doc:"covered checkouts that are not listed, counted by standing: no server, nobody there"`
	Complete bool           `json:"complete" doc:"whether every board was read; if not, reason or the board's reason says why"`
	Reason   string         `json:"reason,omitempty" doc:"why checkouts may be missing altogether, in the words of git where it said something"`
	Overlaps []overlap      `json:"overlaps,omitzero" doc:"every pair of claims of two peers whose paths meet, told to the later one"`
	Stream   string         `json:"stream,omitempty" doc:"absent: this program has no mesh stream"`
}

type boardView struct {
	ID           string `json:"id" doc:"digest that names the checkout, the same after a restart"`
	Worktree     string `json:"worktree" doc:"the directory of the checkout"`
	Branch       string `json:"branch,omitempty" doc:"the branch checked out there, when there is one"`
	ThisCheckout bool   `json:"this_checkout" doc:"whether the answering server serves it"`
	Standing     string `json:"standing" doc:"how its server stands" enum:"absent,starting,ready,outdated,stale"`
	URL          string `json:"url,omitempty" doc:"the address that its lease names"`
	Attached     int    `json:"attached" doc:"how many of its peers are attached" min:"0"`
	Reason       string `json:"reason,omitempty" doc:"why this board could not be read; absent when it was"`
	Stream       string `json:"stream,omitempty" doc:"absent: this program has no mesh stream"`
}

type announceInput struct {
	Intent string   `json:"intent" required:"true" doc:"what you are about to do, in one line of at most 500 characters"`
	Scope  []string `json:"scope" doc:"paths you expect to touch, relative to the root; directories hold what is in them, globs are allowed, . is everything"`
	Claim  string   `json:"claim" doc:"name of the claim when you hold several: a new name adds one, a known one is replaced"`
}

type announceOutput struct {
	peer
	Overlaps []overlap `json:"overlaps,omitzero" doc:"claims of others that meet this one, in all checkouts"`
	Released []string  `json:"released,omitempty" doc:"paths that the replaced claim held and this one does not cover"`
	Complete bool      `json:"complete" doc:"whether every checkout could be asked for overlaps"`
}

// found is one checkout as a gather finds it.
type found struct {
	listed
	standing string
	why      string // the standing explained, where the word alone does not
	reason   string // why its board was not read; "" when it was
	lease    *leaseView
	peers    []peer
}

// gathered is one look at the repository. This checkout comes first; outside of a checkout there is none.
type gathered struct {
	boards []found
	reason string
}

func (s *server) peersList(ctx context.Context, in peersInput) (peersOutput, error) {
	own := s.board.peers()
	g := s.gather(ctx, in.Checkouts != "this", s.set.timing.probe+gatherTime, own)
	out := peersOutput{
		Peers: []peer{}, Covered: len(g.boards), Boards: []boardView{}, Omitted: map[string]int{},
		Complete: g.complete(), Reason: g.reason,
	}
	if c := callerOf(ctx); c != nil {
		out.Caller = c.peer
		c.listed.Store(true)
	}
	for i, f := range g.boards {
		out.Peers = append(out.Peers, f.peers...)
		out.Count += attached(f.peers)
		if in.View != "full" && i > 0 && f.empty() {
			out.Omitted[f.standing]++
			continue
		}
		out.Boards = append(out.Boards, f.board(i == 0))
	}
	if len(g.boards) == 0 {
		out.Peers, out.Count = own, attached(own)
	}
	ctx, cancel := context.WithTimeout(ctx, overlapTime)
	defer cancel()
	all := false
	if out.Overlaps, all = overlapsAmong(ctx, out.Peers); !all {
		out.Complete, out.Reason = false, joined(out.Reason, fmt.Sprintf("not all overlaps are listed: there are more than fit into an answer, or finding them took over %v", overlapTime))
	}
	return out, nil
}

func (s *server) announce(ctx context.Context, in announceInput) (announceOutput, error) {
	caller := callerOf(ctx)
	if caller == nil {
		return announceOutput{}, refuse("refused", "this call comes from nobody on the board, so nobody would hold the claim: connect as an MCP client, through majordomus mcp or at /mcp, and announce in that session; a client of revision 2026-07-28 at /mcp says who it is by a header with each request, Majordomus-Client: 32 hex digits of its own choice")
	}
	// The write comes before the questions, here and in every sibling: of two peers who announce in two checkouts at
	// once, at least one sees the other.
	done, err := s.board.announce(caller.peer, in, s.checkout.root)
	if err != nil {
		return announceOutput{}, err
	}
	g := s.gather(ctx, true, s.set.timing.probe, done.others)
	others := done.others
	if len(g.boards) > 0 {
		others = nil
	}
	for _, f := range g.boards {
		others = append(others, f.peers...)
	}
	out := announceOutput{peer: done.peer, Released: done.released}
	ctx, cancel := context.WithTimeout(ctx, overlapTime)
	defer cancel()
	all := false
	out.Overlaps, all = overlapsWith(ctx, done.claim, others)
	out.Complete = all && g.complete()
	return out, nil
}

func (g *gathered) complete() bool {
	return g.reason == "" && !slices.ContainsFunc(g.boards, func(f found) bool { return f.reason != "" })
}

// empty says that listing the checkout would only say that it exists.
func (f *found) empty() bool {
	return len(f.peers) == 0 && f.reason == "" && (f.standing == standingAbsent || f.standing == standingStale)
}

func (f *found) board(this bool) boardView {
	v := boardView{
		ID: f.id, Worktree: f.root, Branch: f.branch, ThisCheckout: this,
		Standing: f.standing, Attached: attached(f.peers), Reason: f.reason,
	}
	if f.lease != nil {
		v.URL = f.lease.URL
	}
	return v
}

func attached(peers []peer) int {
	n := 0
	for i := range peers {
		if peers[i].Attached {
			n++
		}
	}
	return n
}

func joined(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// gather looks at this checkout, and when wide at every other of the repository, for so long. Own is what this
// process's board holds; it is never asked for over the wire.
func (s *server) gather(ctx context.Context, wide bool, limit time.Duration, own []peer) gathered {
	if s.checkout.root == "" {
		return gathered{}
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	g := gathered{boards: []found{s.lookHere(own)}}
	if wide {
		s.gatherOthers(ctx, &g)
	}
	for i := range g.boards {
		f := &g.boards[i]
		at := &peerCheckout{ID: f.id, Worktree: f.root, Branch: f.branch, ThisCheckout: i == 0}
		for j := range f.peers {
			f.peers[j].Checkout = at
		}
	}
	return g
}

func (s *server) gatherOthers(ctx context.Context, g *gathered) {
	here := &g.boards[0]
	list := s.enumerate(ctx)
	g.reason = list.reason
	var others []listed
	for _, c := range list.checkouts {
		if c.root == here.root {
			here.listed = c
		} else {
			others = append(others, c)
		}
	}
	if s.lease != nil {
		g.boards = append(g.boards, s.lookAll(ctx, others)...)
		return
	}
	// Alone, we are a guest in our own checkout: its server is asked like a sibling, and the two boards are shown as one.
	seen := s.lookAll(ctx, append([]listed{here.listed}, others...))
	seen[0].peers = append(here.peers, seen[0].peers...)
	g.boards = seen
}

// lookHere is this checkout without asking anybody.
func (s *server) lookHere(own []peer) found {
	f := found{listed: s.checkout.listed(), peers: own}
	e := evidence{version: s.set.version, bindGrace: s.set.timing.bindGrace}
	if s.lease != nil {
		e.reading = reading{state: readingDocument, held: true, doc: s.lease.document()}
		e.probe = probeProven // we are here
	} else {
		e.reading = readLease(leasePath(f.root))
	}
	f.judge(e)
	if s.lease != nil {
		f.reason = "" // read from memory
	} else if e.reading.held {
		f.reason = "this process serves its client alone, and the server of this checkout was not asked"
	}
	return f
}

// enumerate lists the checkouts of the repository. Gathers at the same time share one run of git.
func (s *server) enumerate(ctx context.Context) listing {
	run := s.listing.DoChan("", func() (any, error) {
		// Not under the context of whoever came first: the others wait for it too.
		ctx, cancel := context.WithTimeout(context.Background(), s.set.timing.probe)
		defer cancel()
		return s.checkout.enumerate(ctx), nil
	})
	select {
	case r := <-run:
		return r.Val.(listing)
	case <-ctx.Done():
		return listing{checkouts: []listed{s.checkout.listed()}, reason: "git worktree list did not answer in time"}
	}
}

// lookAll looks at each of the checkouts and returns by the deadline of ctx, whatever they do.
func (s *server) lookAll(ctx context.Context, list []listed) []found {
	seen := make([]found, len(list))
	for i, c := range list {
		seen[i] = found{listed: c, standing: standingStale, reason: "there was no time to look at it"}
	}
	// Those who look end a little before, so that their own words are heard.
	limit, _ := ctx.Deadline()
	soft, cancel := context.WithDeadline(ctx, limit.Add(-time.Until(limit)/20))
	defer cancel()
	type result struct {
		i int
		f found
	}
	results := make(chan result, len(list)) // a receive is one checkout looked at; room for all: nobody waits to send
	var size atomic.Int64
	go func() { // ends with soft; not waited for, because a file system that hangs would hold the gather
		var group errgroup.Group
		group.SetLimit(gatherTogether)
		for i, c := range list {
			group.Go(func() error {
				results <- result{i, s.look(soft, c, &size)}
				return nil
			})
		}
		group.Wait()
	}()
	for range list {
		select {
		case r := <-results:
			seen[r.i] = r.f
		case <-ctx.Done():
			return seen
		}
	}
	return seen
}

// look reads the lease of a checkout and asks the server it names for its board. size counts the bytes of all answers.
func (s *server) look(ctx context.Context, c listed, size *atomic.Int64) found {
	path := leasePath(c.root)
	for {
		if ctx.Err() != nil {
			return found{listed: c, standing: standingStale, reason: "there was no time to look at it"}
		}
		r := readLease(path)
		f := s.ask(ctx, c, r, size)
		if f.reason == "" || readLease(path).same(r) {
			return f
		}
		// The server left or changed while it was asked: its successor knows.
	}
}

func (s *server) ask(ctx context.Context, c listed, r reading, size *atomic.Int64) found {
	f := found{listed: c, standing: standingAbsent}
	if r.state == readingAbsent {
		return f
	}
	if there, err := readCheckout(c.root); err == nil && there.commonDir != s.checkout.commonDir {
		f.why = "another repository's checkout stands there now"
		return f
	}
	if s.checkout.strange(c.root) {
		f.why = "it belongs to another user, and is not asked"
		return f
	}
	e := evidence{reading: r, version: s.set.version, bindGrace: s.set.timing.bindGrace}
	if r.info != nil {
		e.age = time.Since(r.info.ModTime())
	}
	if !r.held || r.doc.URL == nil {
		f.judge(e)
		return f
	}
	if !sameDir(r.doc.Root, c.root) {
		e.probe, e.detail = probeForeign, fmt.Sprintf("its lease is for %q", r.doc.Root)
		f.judge(e)
		return f
	}
	server, probe, err := dialHolder(ctx, r.doc, s.set.timing.probe)
	if e.probe = probe; probe != probeProven {
		e.detail = fmt.Sprint(err)
		f.judge(e)
		return f
	}
	defer server.close()
	f.judge(e)
	if f.peers, err = readBoard(ctx, server, s.set.timing.probe, size); err != nil {
		f.reason = "its server answers, but its board could not be read: " + err.Error()
	}
	return f
}

// readBoard asks a server for its own board.
func readBoard(ctx context.Context, server *conn, patience time.Duration, size *atomic.Int64) ([]peer, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	status, body, err := server.get(ctx, "/api/v1/peers?checkouts=this&view=full", boardLimit)
	switch {
	case err != nil:
		return nil, err
	case status != 200:
		return nil, fmt.Errorf("it answered with status %d", status)
	case size.Add(int64(len(body))) > boardsLimit:
		return nil, fmt.Errorf("the boards together are over %d bytes", boardsLimit)
	}
	return decodeBoard(body)
}

// decodeBoard takes what a server of another version, or a broken one, may answer: every optional property may be
// missing, and what this server would never answer is put right, for our own answer is held against its schema.
func decodeBoard(body []byte) ([]peer, error) {
	var answer struct {
		Peers *[]peer `json:"peers"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("its answer is not a board: %.200q", err.Error())
	}
	if answer.Peers == nil {
		return nil, errors.New("its answer is not a board: it has no peers")
	}
	peers := *answer.Peers
	for i := range peers {
		peers[i].tame()
	}
	return peers, nil
}

func (p *peer) tame() {
	p.Client.Name = cmp.Or(p.Client.Name, notInitialized)
	p.LastSeen = max(0, p.LastSeen)
	if p.Transport != "stdio" {
		p.Transport = "http"
	}
	if p.Announcement != nil {
		p.Announcement.tame()
		if len(p.Claims) == 0 {
			p.Claims = []announcement{*p.Announcement}
		}
	}
	if p.Claims == nil {
		p.Claims = []announcement{}
	}
	for i := range p.Claims {
		p.Claims[i].tame()
	}
}

// tame gives every path its one spelling, once.
func (a *announcement) tame() {
	scope := make([]string, 0, len(a.Scope))
	seen := make(map[string]bool, len(a.Scope))
	for _, p := range a.Scope {
		p, ok := clean(p)
		if ok && !seen[p] {
			seen[p] = true
			scope = append(scope, p)
		}
	}
	a.Scope = scope
}
