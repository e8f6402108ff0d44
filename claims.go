package main

// Claims: what may be announced, and which claims of a board or of a whole repository meet.

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	intentLimit = 500  // characters
	nameLimit   = 200  // bytes of a claim's name
	scopeLimit  = 256  // paths of a claim
	pathLimit   = 1024 // bytes of a path
	claimLimit  = 64   // claims of a peer

	claimsLimit  = 512 << 10 // bytes of all claims of a board, with which it is still read by the other checkouts
	overlapLimit = 10_000    // pairs of paths in one answer: all claiming "." would be quadratic
	overlapText  = 256 << 10 // bytes of these paths
)

type overlap struct {
	Peer     peerID        `json:"peer" doc:"the other peer"`
	Checkout *peerCheckout `json:"checkout,omitempty" doc:"the checkout the other peer is attached to"`
	Attached bool          `json:"attached" doc:"whether the other peer is still there"`
	Intent   string        `json:"intent" doc:"what the other peer said it was doing"`
	Paths    []overlapPath `json:"paths" doc:"the paths that meet"`
	Claimant *claimant     `json:"claimant,omitempty" doc:"in a listing: the peer whose paths are called yours"`
}

type overlapPath struct {
	Yours  string `json:"yours" doc:"the path claimed by the peer that is told"`
	Theirs string `json:"theirs" doc:"the path claimed by the other peer"`
}

type claimant struct {
	Peer     peerID        `json:"peer" doc:"its id"`
	Checkout *peerCheckout `json:"checkout,omitempty" doc:"the checkout it is attached to"`
	Intent   string        `json:"intent" doc:"what it said it was doing"`
}

// checkClaim turns what a client announced into a claim, or refuses it naming the limit.
func checkClaim(in announceInput, root string) (announcement, error) {
	a := announcement{Name: strings.TrimSpace(in.Claim), Intent: strings.TrimSpace(in.Intent), Scope: []string{}}
	switch {
	case a.Intent == "":
		return a, refuse("invalid_input", "intent: is blank; say in one line what you are about to do")
	case !oneLine(a.Intent):
		return a, refuse("invalid_input", "intent: must be one line, without characters that turn its direction")
	case utf8.RuneCountInString(a.Intent) > intentLimit:
		return a, refuse("invalid_input", "intent: has %d characters, at most %d are allowed", utf8.RuneCountInString(a.Intent), intentLimit)
	case !oneLine(a.Name):
		return a, refuse("invalid_input", "claim: must be one line, without characters that turn its direction")
	case len(a.Name) > nameLimit:
		return a, refuse("invalid_input", "claim: has %d bytes, at most %d are allowed", len(a.Name), nameLimit)
	case len(in.Scope) > scopeLimit:
		return a, refuse("invalid_input", "scope: has %d paths, at most %d are allowed; claim the directory that holds them", len(in.Scope), scopeLimit)
	}
	seen := make(map[string]bool, len(in.Scope))
	for _, p := range in.Scope {
		c, err := checkPath(root, p)
		if err != nil {
			return a, err
		}
		if !seen[c] {
			seen[c] = true
			a.Scope = append(a.Scope, c)
		}
	}
	return a, nil
}

// size is how many bytes a claim has.
func (a *announcement) size() int {
	n := len(a.Name) + len(a.Intent)
	for _, p := range a.Scope {
		n += len(p)
	}
	return n
}

func checkPath(root, p string) (string, error) {
	c, ok := relative(root, p)
	switch {
	case strings.ContainsRune(p, 0):
		return "", refuse("invalid_input", "scope: %q holds a zero byte", clip(p, 120))
	case strings.ContainsFunc(p, steersText):
		return "", refuse("invalid_input", "scope: %q holds characters that turn the direction of text or that nobody sees", clip(p, 120))
	case !ok:
		return "", refuse("invalid_input", "scope: %q leads out of this checkout; paths are relative to its root", clip(p, 120))
	case len(c) > pathLimit:
		return "", refuse("invalid_input", "scope: %q has %d bytes, at most %d are allowed", clip(c, 120), len(c), pathLimit)
	}
	return c, nil
}

// restoreClaim checks a claim that was accepted before, by another server and perhaps another version of this program:
// what does not fit is left out instead of refused, since nobody is there to mend it.
func restoreClaim(a announcement) (announcement, error) {
	in := announceInput{Claim: a.Name, Intent: a.Intent}
	for _, p := range a.Scope[:min(len(a.Scope), scopeLimit)] {
		if _, err := checkPath("", p); err == nil {
			in.Scope = append(in.Scope, p)
		}
	}
	c, err := checkClaim(in, "")
	c.At = a.At
	return c, err
}

// oneLine is strict: the text is also shown on terminals, and in listings whose lines must not be forged.
func oneLine(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsControl(r) && r != '\t' || r == '\u2028' || r == '\u2029' || steersText(r)
	})
}

// released lists the paths of an earlier claim that the one in its place does not cover.
func released(before, after []string) []string {
	var gone []string
next:
	for _, b := range before {
		for _, a := range after {
			if covers(a, b) {
				continue next
			}
		}
		gone = append(gone, b)
	}
	return gone
}

// ground is an index of claimed paths. What may meet a path is found by its anchor and the directories above and below
// that, so that a board of thousands of claims is not compared path by path.
type ground struct {
	at    map[string][]plot // by anchor
	under map[string][]plot // by directory: what is anchored below it
}

type plot struct {
	path  string
	claim int
}

func newGround() *ground {
	return &ground{at: map[string][]plot{}, under: map[string][]plot{}}
}

func (g *ground) add(p string, claim int) {
	fixed, _ := anchor(p)
	g.at[fixed] = append(g.at[fixed], plot{p, claim})
	for dir := range above(fixed) {
		g.under[dir] = append(g.under[dir], plot{p, claim})
	}
}

// meeting appends every plot that meets the path to list.
func (g *ground) meeting(p string, list []plot) []plot {
	fixed, _ := anchor(p)
	list = appendMeeting(list, p, g.at[fixed])
	list = appendMeeting(list, p, g.under[fixed])
	for dir := range above(fixed) {
		list = appendMeeting(list, p, g.at[dir])
	}
	return list
}

func appendMeeting(list []plot, p string, plots []plot) []plot {
	for _, other := range plots {
		if meets(p, other.path) {
			list = append(list, other)
		}
	}
	return list
}

// search looks paths up in a ground until it has found too much for one answer, or its time is over.
type search struct {
	ctx    context.Context
	ground *ground
	left   int // how many pairs may still be found
	room   int // how many bytes they may have
	near   []plot
}

func newSearch(ctx context.Context) *search {
	return &search{ctx: ctx, ground: newGround(), left: overlapLimit, room: overlapText}
}

// meeting gives what meets the path, until the next call, and false when that is not all.
func (s *search) meeting(p string) ([]plot, bool) {
	if s.ctx.Err() != nil {
		return nil, false
	}
	s.near = s.ground.meeting(p, s.near[:0])
	n := 0
	for n < min(len(s.near), s.left) && s.room > 0 {
		s.room -= len(p) + len(s.near[n].path)
		n++
	}
	s.left -= n
	return s.near[:n], n == len(s.near)
}

// overlapsAmong finds every pair of claims of two peers that meet, once, reported against the later of the two in
// the listing. It reports false when that is not all.
func overlapsAmong(ctx context.Context, peers []peer) ([]overlap, bool) {
	type claim struct {
		peer   *peer
		intent string
	}
	var claims []claim
	list, s := []overlap{}, newSearch(ctx)
	for i := range peers {
		later := &peers[i]
		for _, mine := range later.Claims {
			found, all := s.pairs(mine.Scope)
			for _, n := range slices.Sorted(maps.Keys(found)) {
				o := overlapWith(claims[n].peer, claims[n].intent, found[n])
				o.Claimant = &claimant{Peer: later.ID, Checkout: later.Checkout, Intent: mine.Intent}
				list = append(list, o)
			}
			if !all {
				return list, false
			}
		}
		// One's own claims never collide: they join the ground when all of them have been looked up.
		for _, mine := range later.Claims {
			for _, p := range mine.Scope {
				s.ground.add(p, len(claims))
			}
			claims = append(claims, claim{later, mine.Intent})
		}
	}
	return list, true
}

// pairs finds the paths that meet those of a scope, by the claim they belong to.
func (s *search) pairs(scope []string) (found map[int][]overlapPath, all bool) {
	for _, p := range scope {
		near, all := s.meeting(p)
		for _, other := range near {
			if found == nil {
				found = map[int][]overlapPath{}
			}
			found[other.claim] = append(found[other.claim], overlapPath{Yours: p, Theirs: other.path})
		}
		if !all {
			return found, false
		}
	}
	return found, true
}

// overlapsWith finds the claims of others that meet mine. It reports false when that is not all.
func overlapsWith(ctx context.Context, mine announcement, others []peer) ([]overlap, bool) {
	list, s := []overlap{}, newSearch(ctx)
	for _, p := range mine.Scope {
		s.ground.add(p, 0)
	}
	for i := range others {
		for _, theirs := range others[i].Claims {
			found, all := s.pairs(theirs.Scope)
			if paths := found[0]; paths != nil {
				for j, p := range paths {
					paths[j] = overlapPath{Yours: p.Theirs, Theirs: p.Yours} // it was they who were looked up
				}
				list = append(list, overlapWith(&others[i], theirs.Intent, paths))
			}
			if !all {
				return list, false
			}
		}
	}
	return list, true
}

func overlapWith(p *peer, intent string, paths []overlapPath) overlap {
	return overlap{Peer: p.ID, Checkout: p.Checkout, Attached: p.Attached, Intent: intent, Paths: paths}
}

// announced is what a claim came to: the peer as it is now, and the others as they were in the moment of the write.
type announced struct {
	peer     peer
	claim    announcement
	others   []peer
	released []string // ground that the replaced claim held and the new one does not cover
}

// announce makes a claim. The others are read under the lock of the write, so that of two peers who claim the same
// ground at once, at least the second is told.
func (b *board) announce(id peerID, in announceInput, root string) (announced, error) {
	claim, err := checkClaim(in, root)
	if err != nil {
		return announced{}, err
	}
	before, done, err := b.write(id, claim)
	if err != nil {
		return announced{}, err
	}
	done.released = released(before, done.claim.Scope)
	return done, nil
}

func (b *board) write(id peerID, claim announcement) (before []string, done announced, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.findLocked(id)
	if m == nil {
		return nil, done, refuse("refused", "peer %q is not on this board", id)
	}
	if !m.attached {
		b.enterLocked(m)
	}
	i := m.holds(claim.Name)
	if i < 0 && len(m.claims) >= claimLimit {
		return nil, done, refuse("invalid_input", "claim: you hold %d claims, the most a peer may; announce under one of their names to replace it", claimLimit)
	}
	if i >= 0 {
		before = m.claims[i].Scope
	}
	if b.claimedLocked(m, claim) {
		return nil, done, refuse("refused", "scope: the claims of this checkout have %d KiB, the most that they may: claim directories instead of files", claimsLimit>>10)
	}
	now := time.Now()
	claim.At = stamp(now)
	b.moves++
	m.claims, m.made = slices.Clone(m.claims), slices.Clone(m.made)
	m.dropClaim(claim.Name)
	m.claims, m.made = append(m.claims, claim), append(m.made, b.moves)
	m.sortClaims()
	done = announced{peer: m.wire(now), claim: claim, others: make([]peer, 0, len(b.members))}
	for _, other := range b.members {
		if other != m && len(other.claims) > 0 {
			done.others = append(done.others, other.wire(now))
		}
	}
	return before, done, nil
}

// claimedLocked says that there is no room for one more claim of a peer. Half of it is not for strangers.
func (b *board) claimedLocked(m *boardEntry, claim announcement) bool {
	size, strangers := claim.size(), claim.size()
	for _, other := range b.members {
		for i := range other.claims {
			if other == m && other.claims[i].Name == claim.Name {
				continue
			}
			n := other.claims[i].size()
			if size += n; other.unverified {
				strangers += n
			}
		}
	}
	return size > claimsLimit || m.unverified && strangers > claimsLimit/2
}

// moveClaimsLocked moves the claims of a peer that has left to another, where that has none of the name.
func (b *board) moveClaimsLocked(to, from *boardEntry) []announcement {
	var moved []announcement
	to.claims, to.made = slices.Clone(to.claims), slices.Clone(to.made)
	for i, c := range from.claims {
		if to.holds(c.Name) < 0 && len(to.claims) < claimLimit {
			to.claims, to.made = append(to.claims, c), append(to.made, from.made[i])
			moved = append(moved, c)
		}
	}
	to.sortClaims()
	from.claims, from.made = nil, nil
	return moved
}

// holds is the index of the claim of that name, -1 when there is none.
func (m *boardEntry) holds(name string) int {
	return slices.IndexFunc(m.claims, func(c announcement) bool { return c.Name == name })
}

func (m *boardEntry) dropClaim(name string) {
	if i := m.holds(name); i >= 0 {
		m.claims, m.made = slices.Delete(m.claims, i, i+1), slices.Delete(m.made, i, i+1)
	}
}

// sortClaims orders claims by name, which puts the unnamed one first.
func (m *boardEntry) sortClaims() {
	for i := 1; i < len(m.claims); i++ { // by insertion, since two slices move together
		for j := i; j > 0 && m.claims[j].Name < m.claims[j-1].Name; j-- {
			m.claims[j], m.claims[j-1] = m.claims[j-1], m.claims[j]
			m.made[j], m.made[j-1] = m.made[j-1], m.made[j]
		}
	}
}
