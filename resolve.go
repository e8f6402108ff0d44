package main

// Whom a name means. The whole repository is looked through, so that nobody is written to by mistake and a misspelt name
// is an error that names the right one.

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

// resolve finds the one peer that a name or a peer_id means.
func (s *server) resolve(ctx context.Context, a actor, name, circle string) (*meshPeer, error) {
	name = strings.TrimPrefix(strings.TrimSpace(name), "@")
	list, silent := s.meshFor(ctx, name)
	return s.pick(list, silent, a, name, circle)
}

// pick finds the one peer of a list. Each server numbers its peers anew: a caller that has not looked since may mean another one
// by an id.
func (s *server) pick(list []meshPeer, silent []string, a actor, name, circle string) (*meshPeer, error) {
	p, err := pick(list, silent, a, name, circle)
	if err != nil || !p.here || name != p.PeerID || a.session == nil || a.session.listed.Load() {
		return p, err
	}
	if was, ok := s.mesh.former[p.local]; ok && was != p.box() {
		return nil, refuse("ambiguous", "%s is %q now, and was %q before another process became the server; nothing was sent: give the name", p.PeerID, p.Name, was.name)
	}
	return p, nil
}

func pick(list []meshPeer, silent []string, a actor, name, circle string) (*meshPeer, error) {
	found := matching(list, a, name, strings.TrimSpace(circle))
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		var ids []string
		for _, p := range found {
			ids = append(ids, fmt.Sprintf("%s (circle %s, %s, in %s)", p.PeerID, p.Circle, p.Status, oneCell(p.Path)))
		}
		return nil, refuse("ambiguous", "%q is %d peers; nothing was sent: give the peer_id of one: %s", name, len(found), clip(strings.Join(ids, ", "), 2000))
	}
	text := fmt.Sprintf("there is no peer %q", clip(name, 100))
	if name == "" {
		text = "peer_name: is blank"
	} else if circle != "" {
		text += fmt.Sprintf(" in circle %q", clip(circle, 100))
	}
	text += "; nothing was sent" + nearest(list, a, name)
	if note := silentNote(silent); note != "" {
		text += "; " + note
	}
	if name == "" {
		return nil, refuse("invalid_input", "%s", text)
	}
	return nil, refuse("not_found", "%s", text)
}

// meshFor lists the peers among which a name is looked for: a peer_id says itself in which checkout.
func (s *server) meshFor(ctx context.Context, name string) (list []meshPeer, silent []string) {
	_, at, isID := strings.Cut(name, "@")
	switch {
	case isID && at == s.shortID() && s.lease != nil:
		list = s.meshHere()
	case isID:
		siblings, _ := s.siblings()
		for _, c := range siblings {
			if c.id[:8] == at {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.set.timing.probe)
				defer cancel()
				list, _ = s.meshAt(ctx, c.root)
			}
		}
	}
	if slices.ContainsFunc(list, func(p meshPeer) bool { return p.isCalled(name) }) {
		return list, nil
	}
	return s.meshEverywhere(ctx)
}

// isCalled compares with the peer_id. Every peer answers to its name in full as well, which outlives its number.
func (p *meshPeer) isCalled(id string) bool {
	_, at, _ := strings.Cut(p.PeerID, "@")
	return id == p.PeerID || id == p.Circle+"/"+p.Name+"@"+at
}

// matching applies the rules of addressing. Among several a living peer is meant before one that has left.
func matching(list []meshPeer, a actor, name, circle string) []*meshPeer {
	pick := func(match func(*meshPeer) bool) (found []*meshPeer) {
		for i := range list {
			if match(&list[i]) {
				found = append(found, &list[i])
			}
		}
		if online := slices.DeleteFunc(slices.Clone(found), func(p *meshPeer) bool { return p.Status == "offline" }); len(online) > 0 {
			return online
		}
		return found
	}
	if name == "" {
		return nil
	}
	if found := pick(func(p *meshPeer) bool { return p.isCalled(name) && (circle == "" || p.Circle == circle) }); found != nil {
		return found
	}
	if circle != "" {
		return pick(func(p *meshPeer) bool { return p.Name == name && p.Circle == circle })
	}
	if found := pick(func(p *meshPeer) bool { return p.Name == name && p.Circle == a.box.circle }); found != nil {
		return found
	}
	return pick(func(p *meshPeer) bool { return p.Name == name && (a.crosses() || p.crosses()) })
}

// nearest names the known peers that are most like the name.
func nearest(list []meshPeer, a actor, name string) string {
	type known struct {
		name     string
		distance int
	}
	var names []known
	for i := range list {
		p := &list[i]
		called := p.Name
		if p.Circle != a.box.circle {
			called += " (circle " + p.Circle + ")"
		}
		if !slices.ContainsFunc(names, func(k known) bool { return k.name == called }) {
			names = append(names, known{called, distance(strings.ToLower(p.Name), strings.ToLower(name))})
		}
	}
	if len(names) == 0 {
		return "; nobody is known here"
	}
	slices.SortStableFunc(names, func(a, b known) int { return cmp.Or(cmp.Compare(a.distance, b.distance), cmp.Compare(a.name, b.name)) })
	var text []string
	for _, k := range names[:min(len(names), 8)] {
		text = append(text, k.name)
	}
	return "; known: " + strings.Join(text, ", ")
}

// distance counts the edits between two names.
func distance(a, b string) int {
	from, to := []rune(a), []rune(firstRunes(b, 2*displayNameLimit))
	row := make([]int, len(to)+1)
	for j := range row {
		row[j] = j
	}
	for i := range from {
		diagonal := row[0]
		row[0] = i + 1
		for j := range to {
			change := diagonal
			if from[i] != to[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, diagonal+1)
		}
	}
	return row[len(to)]
}
