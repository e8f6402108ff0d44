package main

// The board: who is attached to this server, and what each has claimed. It lives in memory only and knows nothing of
// other checkouts; gather.go puts the boards of a repository together.
//
// Everything a peer said before is immutable once it is on the board (claims are replaced, never edited), so a listing
// shares it instead of copying it, and the mutex is held for the moment of a read or a write only: never while text is
// compared, a file is looked at or a socket waits.

import (
	"cmp"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	departedLimit = 32   // departed peers that are listed for what they claimed
	goneLimit     = 1024 // peers that are not listed and keep their number in case they speak again; as many as sessions

	notInitialized = "(not initialized)"
)

type peerID string

type clientInfo struct {
	Name    string `json:"name" doc:"what the client calls itself; (not initialized) before it has said so"`
	Title   string `json:"title,omitempty" doc:"its name for people, when it sent one"`
	Version string `json:"version" doc:"its version, empty when it sent none"`
}

type peerAddress struct {
	Host     string `json:"host" doc:"the machine the client runs on"`
	PID      int    `json:"pid,omitempty" doc:"the client's own process"`
	Provider string `json:"provider,omitempty" doc:"whose session this is, claude-code for example"`
	Session  string `json:"session,omitempty" doc:"the provider's id for the session"`
	Socket   string `json:"socket,omitempty" doc:"the socket by which sessions of the same machine write to this one"`
}

type announcement struct {
	Name   string   `json:"name,omitempty" doc:"what the claim is called; absent for the unnamed one"`
	Intent string   `json:"intent" doc:"what the peer is doing, in its own words"`
	Scope  []string `json:"scope" doc:"paths it expects to touch, relative to the root; . is the whole repository"`
	At     string   `json:"at" doc:"when it was announced, RFC 3339 in UTC"`
}

type peerCheckout struct {
	ID           string `json:"id" doc:"digest that names the checkout, the same after a restart"`
	Worktree     string `json:"worktree" doc:"the directory of the checkout"`
	Branch       string `json:"branch,omitempty" doc:"the branch checked out there, when there is one"`
	ThisCheckout bool   `json:"this_checkout" doc:"whether the answering server serves it"`
}

type peerMesh struct {
	Name        string `json:"name" doc:"the name by which others address it"`
	Circle      string `json:"circle" doc:"the circle it belongs to"`
	Role        string `json:"role" doc:"agent, orchestrator, service or human"`
	Description string `json:"description,omitempty" doc:"what it says about itself"`
	TurnState   string `json:"turn_state,omitempty" doc:"pending_first_turn while a spawned peer has not spoken"`
	Unverified  bool   `json:"unverified,omitempty" doc:"attached without the token: it may be anybody on this machine"`
}

type peer struct {
	ID           peerID         `json:"id" doc:"p1, p2, … in the order of attaching; counts within one checkout"`
	Client       clientInfo     `json:"client" doc:"the client behind it"`
	Transport    string         `json:"transport" doc:"stdio for the server's own client, http for every other" enum:"stdio,http"`
	ConnectedAt  string         `json:"connected_at" doc:"when it attached, RFC 3339 in UTC"`
	LastSeen     int64          `json:"last_seen_seconds_ago" doc:"seconds since it last spoke" min:"0"`
	Attached     bool           `json:"attached" doc:"whether it is still there; one that left stays listed for what it claimed"`
	Checkout     *peerCheckout  `json:"checkout,omitempty" doc:"the checkout it is attached to"`
	Announcement *announcement  `json:"announcement,omitempty" doc:"the claim it made last"`
	Claims       []announcement `json:"claims,omitzero" doc:"every claim it holds, by name, the unnamed one first"`
	Address      *peerAddress   `json:"address,omitempty" doc:"where its client can be found outside this connection"`
	Mesh         *peerMesh      `json:"mesh,omitempty" doc:"how it is called and addressed"`
}

// carried is what a process carries of its own client from one server to the next, in majordomus/attach.
type carried struct {
	Initialize  json.RawMessage  `json:"initialize,omitempty"` // the parameters of initialize, when it was called
	Version     string           `json:"version,omitempty"`    // the negotiated revision
	Claims      []announcement   `json:"claims,omitempty"`     // one per name, the latest last
	Name        string           `json:"name,omitempty"`       // the display name wanted
	Circle      string           `json:"circle,omitempty"`
	Role        string           `json:"role,omitempty"`
	Description string           `json:"description,omitempty"`
	Spawn       string           `json:"spawn,omitempty"`  // by which the client was started
	Spoken      bool             `json:"spoken,omitempty"` // it has called a tool since
	Episode     *carriedEpisode  `json:"episode,omitempty"`
	Orphans     []carriedEpisode `json:"orphans,omitempty"`      // other episodes that its last server handed on
	Idle        int64            `json:"idle_seconds,omitempty"` // since the client last spoke
}

// attachment is how a peer comes onto the board.
type attachment struct {
	Transport  string // stdio or http
	Identity   string // 32 hex digits; "" for an anonymous session
	Process    string // the bridge's, as ownProcess names it
	Address    *peerAddress
	Carried    carried
	Unverified bool
}

type board struct {
	mu      sync.Mutex
	last    int                           // the highest number given
	moves   uint64                        // counts claims and departures, which clocks do not order
	members []*boardEntry                 // by number, the unlisted ones included
	known   map[boardIdentity]*boardEntry // those with an identity
	names   map[boardName]*boardEntry     // who is attached under which name

	// Set before anybody attaches, called with mu held; nil on a board without a mesh.
	reserved func(at boardName, who boardIdentity, spawn string) bool // a free name that is not for this peer
	private  func() map[boardName]bool                                // names that no stranger gets: a part of what is reserved to him
	changed  func(nameRecord)                                         // a name has been taken or left
}

// boardIdentity keeps those who proved themselves by the token apart from those who only say who they are: knowing an
// identity must not be enough to inherit a peer.
type boardIdentity struct {
	text       string
	unverified bool
}

type boardName struct{ circle, name string }

// boardEntry is a peer on the board: attached, or departed and listed for its claims, or gone. One that is gone is not
// listed; it keeps its number and its client, for its session may speak again. An idle anonymous session costs this
// struct and its place in members and names, about half a KiB.
type boardEntry struct {
	number      int
	id          peerID
	identity    boardIdentity
	process     string
	transport   string
	client      clientInfo
	address     *peerAddress
	connected   time.Time
	seen        time.Time // its monotonic reading counts
	attached    bool
	left        uint64         // the move by which it departed
	claims      []announcement // by name; replaced as a whole, never changed
	made        []uint64       // the moves by which they were made
	wanted      string         // the display name it asked for
	name        string         // the one it has, or had when it left
	circle      string
	role        string
	described   string
	describedAt time.Time
	carried     *carried // what of its attachment is only for the next server; nil for most
	unverified  bool
	spawn       string // by which it was started
	silent      bool   // it was spawned and has not called a tool yet
}

func newBoard() *board {
	return &board{known: map[boardIdentity]*boardEntry{}, names: map[boardName]*boardEntry{}}
}

// attach puts a peer on the board. One whose identity is known is the same peer: its entry is replaced and its id
// stays.
func (b *board) attach(a attachment) peerID {
	m := newMember(a)
	b.mu.Lock()
	defer b.mu.Unlock()
	old := b.known[m.identity]
	if m.identity.text == "" || old == nil {
		b.last++
		m.number = b.last
		m.id = peerID("p" + strconv.Itoa(m.number))
		b.members = append(b.members, m)
	} else {
		m.number, m.id = old.number, old.id
		if m.circle == old.circle && (m.wanted == old.wanted || m.wanted == old.name) {
			m.name = old.name
		}
		b.unnameLocked(old)
		b.members[b.placeLocked(m.number)] = m
	}
	if m.identity.text != "" {
		b.known[m.identity] = m
	}
	for i := range m.claims {
		b.moves++
		m.made[i] = b.moves
	}
	m.sortClaims()
	b.enterLocked(m)
	return m.id
}

// knows returns the id of the peer with an identity, also of one that has left; "" when there is none. For a worker that
// carries nothing along and so must find its claims here when it speaks again.
func (b *board) knows(identity string, unverified bool) peerID {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.known[boardIdentity{identity, unverified}]; m != nil {
		return m.id
	}
	return ""
}

func newMember(a attachment) *boardEntry {
	now := time.Now()
	m := &boardEntry{
		transport: a.Transport, address: a.Address, unverified: a.Unverified,
		identity:  boardIdentity{a.Identity, a.Unverified},
		process:   a.Process,
		client:    clientInfo{Name: notInitialized},
		connected: now, seen: now.Add(-time.Duration(max(0, a.Carried.Idle)) * time.Second),
		wanted:    cleanName(a.Carried.Name, "peer"),
		circle:    cleanName(a.Carried.Circle, "default"),
		role:      cleanRole(a.Carried.Role),
		described: oneCell(cleanText(a.Carried.Description, descriptionLimit)), describedAt: now,
	}
	if isID(a.Carried.Spawn, "spawn") && !a.Unverified {
		m.spawn, m.silent = a.Carried.Spawn, !a.Carried.Spoken
	}
	if a.Carried.Initialize != nil || a.Carried.Version != "" || a.Carried.Episode != nil {
		m.carried = &carried{Initialize: a.Carried.Initialize, Version: a.Carried.Version, Episode: a.Carried.Episode}
	}
	m.identify(readClientInfo(member(a.Carried.Initialize, "clientInfo")))
	at := stamp(now)
	for _, c := range a.Carried.Claims {
		c, err := restoreClaim(c)
		if err != nil || m.holds(c.Name) < 0 && len(m.claims) == claimLimit {
			continue
		}
		if _, err := time.Parse(time.RFC3339, c.At); err != nil {
			c.At = at
		}
		m.dropClaim(c.Name)
		m.claims, m.made = append(m.claims, c), append(m.made, 0)
	}
	return m
}

// identify notes what a client says about itself in initialize. A blank name changes nothing.
func (b *board) identify(id peerID, c clientInfo) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.findLocked(id); m != nil && m.identify(c) && m.attached {
		b.tellLocked(m)
	}
}

// readClientInfo takes keys by their exact case, as everywhere; what is no string is not there.
func readClientInfo(info json.RawMessage) clientInfo {
	return clientInfo{Name: stringMember(info, "name"), Title: stringMember(info, "title"), Version: stringMember(info, "version")}
}

// identify reports whether that changed anything: modern clients say who they are with every request.
func (m *boardEntry) identify(c clientInfo) bool {
	name := cleanText(c.Name, clientLimit)
	if name == "" {
		return false
	}
	before := m.client
	m.client = clientInfo{Name: name, Title: cleanText(c.Title, clientLimit), Version: cleanText(c.Version, clientLimit)}
	return m.client != before
}

// touch notes a message of the client. A peer that was detached is attached again, even one that was forgotten:
// whoever still holds its session speaks under its id.
func (b *board) touch(id peerID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.findLocked(id)
	if m == nil {
		if m = b.recallLocked(id); m == nil {
			return
		}
	}
	m.seen = time.Now()
	if !m.attached {
		b.enterLocked(m)
	}
}

// recallLocked makes a forgotten peer's entry anew, bare, if its id was ever given.
func (b *board) recallLocked(id peerID) *boardEntry {
	number, err := strconv.Atoi(strings.TrimPrefix(string(id), "p"))
	if err != nil || number < 1 || number > b.last || string(id) != "p"+strconv.Itoa(number) {
		return nil
	}
	m := newMember(attachment{Transport: "http", Unverified: true})
	m.number, m.id = number, id
	b.members = slices.Insert(b.members, b.placeLocked(number), m)
	return m
}

// detach takes a peer from the board, or leaves it there as departed when it holds a claim.
func (b *board) detach(id peerID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.findLocked(id)
	if m == nil || !m.attached {
		return
	}
	b.moves++
	m.attached, m.left = false, b.moves
	b.unnameLocked(m)
	b.forgetLocked()
}

// forgetLocked keeps what is left behind within bounds: of the departed the newest stay listed, and of those that are
// gone the newest keep their number.
func (b *board) forgetLocked() {
	departed, gone := 0, 0
	var oldest, lost *boardEntry
	for _, m := range b.members {
		switch {
		case m.attached:
		case len(m.claims) > 0:
			// A stranger's first: he must not push out what one of our own has left.
			if departed++; oldest == nil || m.unverified && !oldest.unverified || m.unverified == oldest.unverified && m.left < oldest.left {
				oldest = m
			}
		default:
			if gone++; lost == nil || m.left < lost.left {
				lost = m
			}
		}
	}
	if departed > departedLimit {
		oldest.claims, oldest.made = nil, nil
	}
	if gone > goneLimit {
		i := b.placeLocked(lost.number)
		b.members = slices.Delete(b.members, i, i+1)
		if b.known[lost.identity] == lost {
			delete(b.known, lost.identity)
		}
	}
}

// peers lists the board in the order of attaching.
func (b *board) peers() []peer {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]peer, 0, len(b.members))
	for _, m := range b.members {
		if m.attached || len(m.claims) > 0 {
			list = append(list, m.wire(now))
		}
	}
	return list
}

// displayName is the name by which others address the peer, "" when there is no such peer.
func (b *board) displayName(id peerID) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.findLocked(id); m != nil {
		return m.name
	}
	return ""
}

// look copies an entry, that of a peer that has left included. What it shares is immutable.
func (b *board) look(id peerID) (boardEntry, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.findLocked(id); m != nil {
		return *m, true
	}
	return boardEntry{id: id}, false
}

// inherit gives a peer what goes with the work that it takes up from another: the display name, unless a third goes by it,
// and, when the other has left, its claims. If it is still here it gets the next free name. What the peer did not have
// before is returned.
func (b *board) inherit(id peerID, name string, from peerID) (newName string, claims []announcement) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m, other := b.findLocked(id), b.findLocked(from)
	if m == nil || !m.attached {
		return "", nil
	}
	if other != nil && other != m && !other.attached {
		claims = b.moveClaimsLocked(m, other)
	}
	at := boardName{m.circle, name}
	holder := b.names[at]
	if name == "" || holder == m || holder != nil && holder != other {
		return "", claims
	}
	b.unnameLocked(m)
	if holder != nil {
		b.unnameLocked(holder)
		holder.name = ""
	}
	m.name = name
	b.names[at] = m
	b.tellLocked(m)
	if holder != nil {
		b.enterLocked(holder)
	}
	return name, claims
}

// enterLocked makes an entry one of the attached: it takes the name it had, else the one it wants, else that with the
// next free number. To ask whether one name is reserved costs as much as to list all that no stranger gets, and there may
// be thousands: after the first refusal a stranger is asked only about what is not on the list.
func (b *board) enterLocked(m *boardEntry) {
	m.attached = true
	var private map[boardName]bool
	for n := 0; ; n++ {
		name := m.name
		if n > 0 {
			name = numbered(m.wanted, n)
		}
		at := boardName{m.circle, name}
		switch {
		case name == "" || b.names[at] != nil || private[at]:
		case b.freeLocked(at, m):
			m.name = name
			b.names[at] = m
			b.tellLocked(m)
			return
		case m.unverified && private == nil:
			private = b.private()
		}
	}
}

func (b *board) freeLocked(at boardName, m *boardEntry) bool {
	return b.names[at] == nil && (b.reserved == nil || !b.reserved(at, m.identity, m.spawn))
}

// unnameLocked frees the name of a peer that leaves or is replaced.
func (b *board) unnameLocked(m *boardEntry) {
	if at := (boardName{m.circle, m.name}); b.names[at] == m {
		delete(b.names, at)
		b.tellLocked(m)
	}
}

// placeLocked is where the peer of that number is among the members, or would be.
func (b *board) placeLocked(number int) int {
	i, _ := slices.BinarySearchFunc(b.members, number, func(m *boardEntry, n int) int { return cmp.Compare(m.number, n) })
	return i
}

func (b *board) findLocked(id peerID) *boardEntry {
	number, err := strconv.Atoi(strings.TrimPrefix(string(id), "p"))
	if err != nil {
		return nil
	}
	if i := b.placeLocked(number); i < len(b.members) && b.members[i].id == id {
		return b.members[i]
	}
	return nil
}

// wire is the entry as peers.list shows it. It shares what is immutable.
func (m *boardEntry) wire(now time.Time) peer {
	p := peer{
		ID: m.id, Client: m.client, Transport: m.transport, Attached: m.attached, Address: m.address,
		ConnectedAt: stamp(m.connected), LastSeen: max(0, int64(now.Sub(m.seen)/time.Second)),
		Claims: []announcement{},
		Mesh:   &peerMesh{Name: m.name, Circle: m.circle, Role: m.role, Description: m.described, Unverified: m.unverified},
	}
	if m.silent {
		p.Mesh.TurnState = "pending_first_turn"
	}
	if len(m.claims) > 0 {
		p.Claims = m.claims
		p.Announcement = &m.claims[slices.Index(m.made, slices.Max(m.made))]
	}
	return p
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
