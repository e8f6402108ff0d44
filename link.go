package main

// The servers of the other checkouts: where they are, a connection to each that has proven itself, and who is to be
// found there.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"
)

// errUnanswered means that it was asked, and may have done what it was asked for.
var errUnanswered = errors.New("it was lost while it was asked")

// errNotServed means that there is no server, or none that answers: what was not stored may be stored later.
var errNotServed = errors.New("its server does not answer")

// lookParams ask a server what only it knows: majordomus/look.
type lookParams struct {
	Thread string `json:"thread,omitempty"`
}

type lookResult struct {
	Peers []meshPeer `json:"peers"`
	Open  bool       `json:"open,omitempty"` // the thread
}

// link is an idle connection to another checkout's server.
type link struct {
	conn  *conn
	token string
}

// here is this checkout as others know it.
func (s *server) here() place { return place{Root: s.checkout.root, GitDir: s.checkout.gitDir} }

// callServer calls a private method of the server of a checkout. errNotServed wraps whatever a later try may cure; a
// refusal is final.
func (s *server) callServer(ctx context.Context, root, method string, params any) (json.RawMessage, error) {
	body := request(method, mustJSON(params))
	asked := false // and not told what became of it
	failed := func(err error) error {
		if asked {
			return fmt.Errorf("%w: %w", err, errUnanswered)
		}
		return err
	}
	for {
		l, reused, err := s.dialCheckout(ctx, root)
		if err != nil {
			return nil, failed(err)
		}
		r, err := l.conn.exchange(ctx, "POST", "/mcp", "Authorization: Bearer "+l.token+"\r\n", body, maxAnswer)
		if err != nil {
			asked = true
			if reused && ctx.Err() == nil {
				continue // the server may have gone since; the key sees to it that nothing is done twice
			}
			return nil, failed(fmt.Errorf("%w: %v", errNotServed, err))
		}
		switch code := r.code(); {
		case r.status == http.StatusOK && code == "":
			s.keepLink(root, l)
			return member(r.body, "result"), nil
		case code == "refused", code == "invalid_input", code == "not_found":
			s.keepLink(root, l)
			return nil, refuse(code, "%s", clip(r.message(), 500))
		default:
			asked = asked || code == "lease_lost" // it may be in the journal by now, which the next server reads
			l.conn.close()
			if reused && ctx.Err() == nil {
				continue // another process may be the server there by now
			}
			return nil, failed(fmt.Errorf("%w: %s", errNotServed, clip(r.message(), 200)))
		}
	}
}

// dialCheckout gives a connection to the server of a checkout that has proven itself.
func (s *server) dialCheckout(ctx context.Context, root string) (l *link, reused bool, err error) {
	m := s.mesh
	m.mu.Lock()
	l = m.links[root]
	delete(m.links, root)
	m.mu.Unlock()
	if l != nil {
		if l.conn.stillOpen(s.set.timing.read) {
			return l, true, nil
		}
		l.conn.close()
	}
	r := readLease(leasePath(root))
	if !r.held {
		return nil, false, fmt.Errorf("%w: none is running", errNotServed)
	}
	// Names of checkouts come from other servers and from the journal: no token leaves this repository.
	there, err := readCheckout(root)
	switch {
	case err != nil || there.commonDir != s.checkout.commonDir || s.checkout.strange(root):
		return nil, false, fmt.Errorf("%w: %q is no checkout of this repository now", errNotServed, root)
	case r.doc.URL == nil:
		return nil, false, fmt.Errorf("%w: it is starting", errNotServed)
	case !sameDir(r.doc.Root, root):
		return nil, false, fmt.Errorf("%w: its lease is for %q", errNotServed, r.doc.Root)
	}
	c, _, err := dialHolder(ctx, r.doc, s.set.timing.probe)
	if err != nil {
		return nil, false, fmt.Errorf("%w: %v", errNotServed, err)
	}
	return &link{c, r.doc.Token}, false, nil
}

func (s *server) keepLink(root string, l *link) {
	m := s.mesh
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.links == nil || m.links[root] != nil {
		l.conn.close()
		return
	}
	m.links[root] = l
}

// serveLook answers what another checkout's server asks.
func (s *server) serveLook(w http.ResponseWriter, r *http.Request, m message) {
	var p lookParams
	if len(m.params) > 0 && json.Unmarshal(m.params, &p) != nil {
		s.refused(w, r, refuse("invalid_input", "majordomus/look: the parameters make no sense"))
		return
	}
	s.mesh.settled()
	if !s.holds() {
		s.refused(w, r, errLeaseLost)
		return
	}
	result := lookResult{Peers: s.meshHere()}
	if p.Thread != "" {
		s.mesh.mu.Lock()
		t := s.mesh.state.threads[p.Thread]
		result.Open = t != nil && t.Closed == 0 && !expired(t.At, millis())
		s.mesh.mu.Unlock()
	}
	writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(result)))
}

// siblings lists the other checkouts of the repository, by git's own files: this is looked up for every message, and
// starting git takes longer than all the rest. Alone, this checkout's own server is a sibling too. skipped names those of which
// git does not tell where they are; "" for none.
func (s *server) siblings() (list []listed, skipped string) {
	c := s.checkout
	several := c.root != "" && (c.linked || hasEntries(filepath.Join(c.commonDir, "worktrees")))
	if c.root == "" || !several && s.lease != nil {
		return nil, ""
	}
	list = []listed{c.listed()}
	if several {
		var records []worktreeRecord
		for i, path := range registeredWorktrees(c.commonDir) {
			r := worktreeRecord{path: path}
			if i == 0 {
				r.bare, _ = coreConfig(c.commonDir)
			}
			records = append(records, r)
		}
		placed := c.placeRecords(records, nil)
		list, skipped = placed.checkouts, placed.reason
	}
	return slices.DeleteFunc(list, func(l listed) bool { return l.root == c.root && s.lease != nil }), skipped
}

// meshEverywhere lists who can be written to in the repository, this checkout first, and the checkouts that could not
// be asked: of those it lists whom their journal names, since what is sent to them waits here.
func (s *server) meshEverywhere(ctx context.Context) (list []meshPeer, silent []string) {
	// Also for a caller that hangs up: what it has asked for is done to the right peer or not at all.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.set.timing.probe)
	defer cancel()
	list = s.meshHere()
	siblings, skipped := s.siblings()
	if skipped != "" {
		silent = append(silent, skipped)
	}
	there := make([][]meshPeer, len(siblings))
	failed := make([]error, len(siblings))
	var group errgroup.Group
	group.SetLimit(gatherTogether)
	for i, c := range siblings {
		group.Go(func() error {
			there[i], failed[i] = s.meshAt(ctx, c.root)
			return nil
		})
	}
	group.Wait()
	for i, c := range siblings {
		for j := range there[i] {
			if s.lease == nil && len(list) > 0 && list[0].PeerID == there[i][j].PeerID {
				list[0].PeerID = "alone-" + list[0].PeerID // this checkout has a server too, whose peers are numbered like ours
			}
		}
		list = append(list, there[i]...)
		if failed[i] != nil {
			silent = append(silent, fmt.Sprintf("%s: %v", c.root, failed[i]))
		} else if s.waitsFor(c.root) {
			s.tendSoon()
		}
	}
	return append(list, s.spawnRows(list, false)...), silent
}

// meshAt asks the server of one checkout, or its journal. An error means that there is a server and it did not answer.
func (s *server) meshAt(ctx context.Context, root string) ([]meshPeer, error) {
	answer, err := s.callServer(ctx, root, "majordomus/look", lookParams{})
	var r lookResult
	if err == nil && json.Unmarshal(answer, &r) == nil {
		for i := range r.Peers {
			r.Peers[i].tame(root)
		}
		return r.Peers, nil
	}
	st := newStore()
	if !s.checkout.strange(root) {
		s.readJournalOf(ctx, root, st)
	}
	var list []meshPeer
	for _, held := range st.names {
		list = append(list, s.offlinePeer(held, root))
	}
	if !readLease(leasePath(root)).held {
		err = nil
	}
	return list, err
}
