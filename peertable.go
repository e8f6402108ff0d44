package main

// Who can be written to, as a table, and what a peer says of itself there. One that is attached is called by its number on
// the board, pN@checkout; one that has left by its name, circle/name@checkout, since the number may be another's by now.

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

type listPeersInput struct {
	Offline bool `json:"show_offline" doc:"also the peers that have left" default:"false"`
	Self    bool `json:"include_self" doc:"also the caller" default:"false"`
}

type noInput struct{}

type describeInput struct {
	Description string `json:"description" required:"true" doc:"what you are working on, at most 500 characters; empty clears it"`
}

// meshPeer is a row of list_peers; its fields are the columns, in order.
type meshPeer struct {
	PeerID      string `json:"peer_id" doc:"unique in the repository"`
	Name        string `json:"name" doc:"the name by which others address it"`
	Project     string `json:"project" doc:"name of the repository's main directory"`
	Circle      string `json:"circle" doc:"the circle it belongs to"`
	Role        string `json:"role" doc:"agent, orchestrator, service or human"`
	Status      string `json:"status" doc:"busy: a call is in flight" enum:"online,busy,offline"`
	Path        string `json:"path" doc:"its checkout"`
	Machine     string `json:"machine" doc:"the machine its client runs on"`
	Description string `json:"description" doc:"what it says it is working on"`
	Backend     string `json:"backend" doc:"the client behind it"`
	LastSeen    string `json:"last_seen" doc:"when it last spoke, RFC 3339 in UTC"`
	TurnState   string `json:"turn_state" doc:"pending_first_turn while a spawned peer has not spoken, else empty"`
	here        bool   // on this server
	local       peerID // there, while it is attached
	spawn       string // by which it was started, as far as this server knows
}

func (p *meshPeer) columns() []string {
	return []string{p.PeerID, p.Name, p.Project, p.Circle, p.Role, p.Status, p.Path, p.Machine, p.Description, p.Backend, p.LastSeen, p.TurnState}
}

func (p *meshPeer) box() boardName { return boardName{p.Circle, p.Name} }

func (p *meshPeer) crosses() bool { return p.Role != "agent" }

const peerColumns = "peer_id\tname\tproject\tcircle\trole\tstatus\tpath\tmachine\tdescription\tbackend\tlast_seen\tturn_state"

// line is the row as text: nothing in a value can begin a column or a row.
func (p *meshPeer) line() string {
	columns := p.columns()
	for i, c := range columns {
		columns[i] = oneCell(c)
	}
	return strings.Join(columns, "\t")
}

func oneCell(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r <= 0x9f || r == '\u2028' || r == '\u2029' || steersText(r) {
			return ' '
		}
		return r
	}, s)
}

// tame puts right what another version of this program, or a broken one, may answer.
func (p *meshPeer) tame(root string) {
	p.Path, p.here, p.local = root, false, ""
	p.Name, p.Circle, p.Role = cleanName(p.Name, "peer"), cleanName(p.Circle, "default"), cleanRole(p.Role)
	if p.Status != "online" && p.Status != "busy" {
		p.Status = "offline"
	}
}

type peersTableOutput struct {
	Peers []meshPeer `json:"peers" doc:"the peers, this checkout's first"`
	Note  string     `json:"note,omitempty" doc:"checkouts that could not be asked, and why"`
}

func (o peersTableOutput) blocks() []string {
	text, note := peerColumns, o.Note
	size := len(text)
	for i := range o.Peers {
		line := o.Peers[i].line()
		if size += utf8.RuneCountInString(line) + 1; size > listingLimit {
			note = joined(note, fmt.Sprintf("%d more peers are left out here: GET /api/v1/mesh/peers lists all", len(o.Peers)-i))
			break
		}
		text += "\n" + line
	}
	return withNote(text, note)
}

type whoamiOutput struct {
	Peers []meshPeer `json:"peers" doc:"the caller"`
}

func (o whoamiOutput) blocks() []string { return []string{o.Peers[0].line()} }

// listPeers lists the mesh.
func (s *server) listPeers(ctx context.Context, in listPeersInput) (peersTableOutput, error) {
	self := peerID("")
	if n := callerOf(ctx); n != nil {
		self = n.peer
		n.listed.Store(true)
	}
	list, silent := s.meshEverywhere(ctx)
	out := peersTableOutput{Peers: []meshPeer{}, Note: silentNote(silent)}
	for _, p := range list {
		switch {
		case self != "" && p.local == self:
			if in.Self {
				out.Peers = append(out.Peers, s.self(p, self))
			}
		case p.Status != "offline" || in.Offline:
			out.Peers = append(out.Peers, p)
		}
	}
	return out, nil
}

// self is the caller's own row: the call that asks for it does not make it busy.
func (s *server) self(p meshPeer, id peerID) meshPeer {
	s.mesh.mu.Lock()
	defer s.mesh.mu.Unlock()
	if s.mesh.working[id] <= 1 {
		p.Status = "online"
	}
	return p
}

// whoami is the caller's own row.
func (s *server) whoami(ctx context.Context, in noInput) (whoamiOutput, error) {
	n := callerOf(ctx)
	if n != nil {
		for _, p := range s.meshHere() {
			if p.local == n.peer {
				return whoamiOutput{[]meshPeer{s.self(p, n.peer)}}, nil
			}
		}
	}
	return whoamiOutput{}, refuse("refused", "this call comes from nobody on the board: connect as an MCP client and call in that session")
}

// describe sets the caller's description.
func (s *server) describe(ctx context.Context, in describeInput) (saidOutput, error) {
	n := callerOf(ctx)
	if n == nil {
		return saidOutput{}, refuse("refused", "this call comes from nobody on the board: connect as an MCP client and call in that session")
	}
	if c := utf8.RuneCountInString(in.Description); c > descriptionLimit {
		return saidOutput{}, refuse("invalid_input", "description: has %d characters, at most %d are allowed", c, descriptionLimit)
	}
	text := oneCell(cleanText(in.Description, descriptionLimit))
	s.board.describe(n.peer, text)
	return saidOutput{Text: "description updated: " + text}, nil
}

func (s *server) fullID(id string) string { return id + "@" + s.shortID() }

// shortID names this checkout in peer_ids.
func (s *server) shortID() string {
	if s.checkout.id == "" {
		return "alone"
	}
	return s.checkout.id[:8]
}

var hostname = sync.OnceValue(func() string {
	name, _ := os.Hostname()
	return name
})

// meshHere lists who can be written to on this server, online or known.
func (s *server) meshHere() []meshPeer {
	now, project := time.Now(), s.checkout.project()
	peers := s.board.peers()
	m := s.mesh
	busy := m.busy()
	list := make([]meshPeer, 0, len(peers))
	there := make(map[boardName]bool, len(peers))
	for _, p := range peers {
		if !p.Attached || p.Mesh == nil {
			continue
		}
		row := meshPeer{
			PeerID: s.fullID(string(p.ID)), Name: p.Mesh.Name, Project: project, Circle: p.Mesh.Circle, Role: p.Mesh.Role,
			Status: "online", Path: s.checkout.root, Machine: hostname(), Description: p.Mesh.Description, Backend: p.Client.Name,
			LastSeen: stamp(now.Add(-time.Duration(p.LastSeen) * time.Second)), TurnState: p.Mesh.TurnState, here: true, local: p.ID,
		}
		if p.Address != nil {
			row.Machine = cmp.Or(p.Address.Host, hostname())
		}
		_, _, row.spawn = s.board.origin(p.ID)
		if busy[p.ID] {
			row.Status = "busy"
		}
		there[row.box()] = true
		list = append(list, row)
	}
	for _, row := range s.spawnRows(list, true) {
		there[row.box()] = true
		list = append(list, row)
	}
	var known []nameRecord
	m.mu.Lock()
	for box, held := range m.state.names {
		if !there[box] && (held.Left == 0 || !expired(held.Left, now.UnixMilli()) || m.state.boxes[box] != nil) {
			known = append(known, *held)
		}
	}
	humanHere := now.Sub(m.humanSeen) < s.set.timing.sessionIdle
	m.mu.Unlock()
	slices.SortFunc(known, func(a, b nameRecord) int {
		return cmp.Or(cmp.Compare(a.Box.name, b.Box.name), cmp.Compare(a.Box.circle, b.Box.circle))
	})
	for i := range known {
		row := s.offlinePeer(&known[i], s.checkout.root)
		row.here = true
		if row.box() == human && humanHere {
			row.Status = "online"
		}
		list = append(list, row)
	}
	return list
}

// offlinePeer is the row of a peer that has left. Its number may be another's by now, so it is called by its name.
func (s *server) offlinePeer(held *nameRecord, root string) meshPeer {
	row := meshPeer{
		PeerID: held.Box.circle + "/" + held.Box.name + "@" + digest(root)[:8], Name: held.Box.name, Project: s.checkout.project(),
		Circle: held.Box.circle, Role: cleanRole(held.Role), Status: "offline", Path: root, Machine: hostname(), Backend: held.Client,
		LastSeen: stamp(time.UnixMilli(held.Seen)),
	}
	if millis()-held.Described < describeTime.Milliseconds() {
		row.Description = held.Description
	}
	return row
}

// project is the name of the repository's main directory, the same in every worktree.
func (c checkout) project() string {
	if filepath.Base(c.commonDir) == ".git" {
		return filepath.Base(filepath.Dir(c.commonDir))
	}
	return strings.TrimSuffix(filepath.Base(c.commonDir), ".git")
}
