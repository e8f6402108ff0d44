package main

// kill_peer: end a peer. One that was spawned is ended with its whole process group; of any other only the session is
// ended, and its identity refused from then on: whose process it is, is not for us to say.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	killGrace = 5 * time.Second // between TERM and KILL
	killLook  = 50 * time.Millisecond
)

type killInput struct {
	Peer   string `json:"peer_identifier" required:"true" doc:"name or peer_id"`
	Circle string `json:"circle" doc:"circle of the peer, when two share the name"`
}

// killParams ask the server of another checkout to end a peer there: majordomus/kill.
type killParams struct {
	Peer string `json:"peer"` // peer_id
}

// killPeer ends a peer.
func (s *server) killPeer(ctx context.Context, in killInput) (saidOutput, error) {
	a, err := s.mayRun(ctx)
	if err != nil {
		return saidOutput{}, err
	}
	p, mine, err := s.victim(ctx, a, in)
	if err != nil {
		return saidOutput{}, err
	}
	switch {
	case a.session != nil && p.here && p.local == a.session.peer:
		return saidOutput{}, refuse("refused", "that is yourself: end your own session by leaving")
	case mine != nil:
		return s.killSpawned(p, mine)
	case p.Status == "offline":
		return saidOutput{}, refuse("refused", "@%s is offline already", p.Name)
	case p.here:
		return s.retire(p)
	}
	answer, err := s.callServer(ctx, p.Path, "majordomus/kill", killParams{Peer: p.PeerID})
	switch {
	case errors.Is(err, errUnanswered):
		return saidOutput{}, outcomeUnknown(fmt.Sprintf("the server of %s was lost while it was to end @%s", p.Path, p.Name))
	case errors.Is(err, errNotServed):
		return saidOutput{}, refuse("refused", "@%s was not ended: %v", p.Name, err)
	}
	var out saidOutput
	if err == nil && json.Unmarshal(answer, &out) != nil {
		err = refuse("refused", "@%s was not ended, as far as its server's answer can be read", p.Name)
	}
	return saidOutput{Text: cleanText(out.Text, 1000)}, err
}

// victim finds whom the caller means, and what was spawned for it, if it was.
func (s *server) victim(ctx context.Context, a actor, in killInput) (*meshPeer, *spawned, error) {
	name := strings.TrimPrefix(strings.TrimSpace(in.Peer), "@")
	spawns := s.mesh.spawnedList()
	list, silent := s.meshEverywhere(ctx)
	for i := range spawns { // what never attached, or is outside the repository, is no peer, and can be ended all the same
		p := &spawns[i]
		if name == p.ID || p.alive() && !slices.ContainsFunc(list, func(m meshPeer) bool { return p.is(&m) }) {
			row := meshPeer{PeerID: p.ID, Name: p.Box.name, Circle: p.Box.circle, Role: "agent", Status: "online", Path: p.Path, spawn: p.ID, here: p.here()}
			if name == p.ID {
				return &row, p, nil
			}
			list = append(list, row)
		}
	}
	found, err := s.pick(list, silent, a, name, in.Circle)
	if r := (*refusal)(nil); errors.As(err, &r) {
		err = refuse(r.code, "%s", strings.NewReplacer("nothing was sent", "nothing was done", "peer_name:", "peer_identifier:").Replace(r.message))
	}
	if err != nil {
		return nil, nil, err
	}
	for i := range spawns {
		if spawns[i].is(found) && spawns[i].alive() {
			return found, &spawns[i], nil
		}
	}
	return found, nil, nil
}

// is says whether a peer is what was spawned.
func (p *spawned) is(m *meshPeer) bool {
	switch {
	case m.spawn != "":
		return m.spawn == p.ID
	case p.Outside || !p.here() && m.here:
		return false
	case p.here():
		return m.here && p.pending() && m.box() == p.Box
	}
	return m.Path == p.At.Root && m.box() == p.Box
}

// killSpawned ends a process group, and the session of its peer: what leaves its group must not stay a peer.
func (s *server) killSpawned(m *meshPeer, p *spawned) (saidOutput, error) {
	if p.PID <= 1 {
		return saidOutput{}, refuse("refused", "@%s is being started: try again", m.Name)
	}
	if processGroup(0) == p.PID {
		return saidOutput{}, refuse("refused", "@%s was not ended: this server runs in its process group %d, and would end with it", m.Name, p.PID)
	}
	if p.pending() { // whoever watches it need not say that it ended
		watched := *p
		watched.Lapsed = true
		s.mesh.commit(&entry{Spawn: &watched}, written)
	}
	how, err := p.end(s.calls.Done())
	if err != nil {
		return saidOutput{}, refuse("refused", "@%s was not ended: %v", m.Name, err)
	}
	e := &entry{Unspawn: p.ID}
	if peer := s.board.holds(m.box()); m.here && peer != "" {
		if identity, _, spawn := s.board.origin(peer); spawn == p.ID {
			e.Retire = identity
			defer s.endSessions(peer)
		}
	}
	if p.pending() && p.here() {
		e.Name = &nameRecord{Box: p.Box, Role: "agent", Seen: p.Began, Left: millis()}
	}
	_, err = s.mesh.commit(e, synced)
	if errors.Is(err, errNoSpawn) { // whoever waited for its end was faster
		e.Unspawn = ""
		_, err = s.mesh.commit(e, synced)
	}
	if err != nil {
		return saidOutput{}, s.notStored(err)
	}
	return saidOutput{Text: fmt.Sprintf("killed @%s: process %d and its group %s", m.Name, p.PID, how)}, nil
}

// end ends the group: TERM, and KILL for what is left of it after a while. stop, if not nil, shortens that.
func (p *spawned) end(stop <-chan struct{}) (how string, err error) {
	if !p.alive() {
		return "had ended already", nil
	}
	if err := signalGroup(p.PID, syscall.SIGTERM); err != nil {
		return "", err
	}
	if p.endsWithin(killGrace, stop) {
		return "ended when asked to (TERM)", nil
	}
	if err := signalGroup(p.PID, syscall.SIGKILL); err != nil && !p.endsWithin(0, nil) {
		return "", err
	}
	if !p.endsWithin(killGrace, nil) {
		return "", fmt.Errorf("process group %d is still there after KILL", p.PID)
	}
	return fmt.Sprintf("ended by force (KILL, %v after TERM)", killGrace), nil
}

// endsWithin waits until nothing runs in the group. Whether the group is there is asked without a gap long enough for its
// number to be given away again: that takes as many new processes as there are numbers.
func (p *spawned) endsWithin(d time.Duration, stop <-chan struct{}) bool {
	limit := time.NewTimer(d)
	defer limit.Stop()
	t := time.NewTicker(killLook)
	defer t.Stop()
	for {
		if groupGone(p.PID) {
			return true
		}
		select {
		case <-t.C:
		case <-limit.C:
			return groupGone(p.PID)
		case <-stop:
			return groupGone(p.PID)
		}
	}
}

// retire ends the session of a peer and refuses its identity from now on.
func (s *server) retire(p *meshPeer) (saidOutput, error) {
	peer := p.local
	if peer == "" {
		return saidOutput{}, refuse("refused", "@%s is not attached", p.Name)
	}
	identity, transport, _ := s.board.origin(peer)
	if transport == "stdio" {
		return saidOutput{}, refuse("refused", "@%s is the client of the process that serves this checkout, and was not spawned here: end that client itself", p.Name)
	}
	if identity != "" {
		if _, err := s.mesh.commit(&entry{Retire: identity}, synced); err != nil {
			return saidOutput{}, s.notStored(err)
		}
	}
	s.endSessions(peer)
	text := fmt.Sprintf("ended the session of @%s; its process was not spawned here and is left running, and is served alone from now on", p.Name)
	if identity == "" {
		text = fmt.Sprintf("ended the session of @%s; its process was not spawned here and is left running, and may attach again", p.Name)
	}
	return saidOutput{Text: text}, nil
}

// endSessions ends every session of a peer.
func (s *server) endSessions(peer peerID) {
	var ended []*session
	s.mu.Lock()
	for _, n := range s.sessions {
		if n.peer == peer {
			ended = append(ended, n)
		}
	}
	s.mu.Unlock()
	for _, n := range ended {
		s.dismiss(n)
	}
}

// refuseRetired refuses whoever was ended by kill_peer.
func (s *server) refuseRetired(identity string) error {
	s.mesh.mu.Lock()
	defer s.mesh.mu.Unlock()
	if _, ok := s.mesh.state.retired[identity]; ok && identity != "" {
		return refuse("retired", "this peer was ended by kill_peer")
	}
	return nil
}

// serveKill ends a peer here for another checkout's server.
func (s *server) serveKill(w http.ResponseWriter, r *http.Request, m message) {
	var params killParams
	if json.Unmarshal(m.params, &params) != nil {
		s.refused(w, r, refuse("invalid_input", "majordomus/kill: the parameters make no sense"))
		return
	}
	s.mesh.settled()
	if !s.holds() {
		s.refused(w, r, errLeaseLost)
		return
	}
	out, err := saidOutput{}, refuse("not_found", "there is no peer %q here any more", clip(params.Peer, 100))
	spawns := s.mesh.spawnedList()
	for _, p := range s.meshHere() {
		if !p.isCalled(params.Peer) {
			continue
		}
		out, err = saidOutput{}, nil
		if i := slices.IndexFunc(spawns, func(sp spawned) bool { return sp.is(&p) && sp.alive() }); i >= 0 {
			out, err = s.killSpawned(&p, &spawns[i])
		} else {
			out, err = s.retire(&p)
		}
		break
	}
	if err != nil {
		s.refused(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, resultMessage(m.id, mustJSON(out)))
}
