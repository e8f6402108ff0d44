package main

// broadcast: one message to everybody who is online in a circle, in whichever checkout.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

type broadcastInput struct {
	Message string `json:"message" required:"true" doc:"the message, at most 16384 bytes"`
}

// broadcast sends to everybody in the caller's circle who is online.
func (s *server) broadcast(ctx context.Context, in broadcastInput) (saidOutput, error) {
	a, err := s.actor(ctx)
	if err != nil {
		return saidOutput{}, err
	}
	l, err := s.letterFrom(a, "broadcast", s.mesh.newID("notif"), "message", in.Message)
	if err != nil {
		return saidOutput{}, err
	}
	list, silent := s.meshEverywhere(ctx)
	reached, failed := map[string][]boardName{}, map[string]string{}
	var roots []string // remote ones, in order
	for i := range list {
		p := &list[i]
		if p.Status == "offline" || p.here && p.box() == a.box || !a.crosses() && !p.crosses() && p.Circle != a.box.circle {
			continue
		}
		key := p.Path
		if p.here {
			key = ""
		} else if !slices.Contains(roots, key) {
			roots = append(roots, key)
		}
		reached[key] = append(reached[key], p.box())
	}
	if err := s.fanOut(ctx, l, reached, roots, failed); err != nil {
		return saidOutput{}, err
	}
	return saidOutput{broadcastText(a, reached, append([]string{""}, roots...), failed), silentNote(silent)}, nil
}

// fanOut stores a letter in many mailboxes: those here at once, those elsewhere through their servers. What fails is
// taken out of reached and named.
func (s *server) fanOut(ctx context.Context, l letter, reached map[string][]boardName, roots []string, failed map[string]string) error {
	e := &entry{}
	if len(reached[""]) > 0 {
		here := l
		here.To = reached[""]
		e.Store = []letter{here}
	}
	outs := make([]outgoing, len(roots))
	for i, root := range roots {
		far := l
		far.To = reached[root]
		outs[i] = s.outgoing(e, root, far)
	}
	if s.lease != nil {
		e.Queue = outs
	}
	full := func(root string, boxes []boardName) {
		for _, box := range boxes {
			failed[box.name] = "its mailbox is full"
		}
		reached[root] = slices.DeleteFunc(reached[root], func(b boardName) bool { return slices.Contains(boxes, b) })
	}
	if e.Store != nil || e.Queue != nil {
		done, err := s.commitFor(ctx, e)
		if len(reached[""]) == 1 && len(roots) == 0 && errors.As(err, new(*refusal)) {
			done.full, err = reached[""], nil
		}
		if err != nil {
			return s.notStored(err)
		}
		full("", done.full)
	}
	results := make([]handed, len(roots))
	var all sync.WaitGroup
	for i := range outs {
		all.Go(func() {
			if s.lease == nil {
				results[i] = s.deliver(ctx, &outs[i])
			} else {
				results[i] = s.handOver(ctx, outs[i].To, outs[i].Entry.Key)
			}
		})
	}
	all.Wait()
	for i, h := range results {
		switch {
		case h.err != nil && len(reached[roots[i]]) > 0:
			for _, box := range reached[roots[i]] {
				failed[box.name] = h.err.Error()
				if errors.Is(h.err, errNotServed) && s.lease != nil {
					failed[box.name] = "queued, " + h.err.Error()
				}
			}
			reached[roots[i]] = nil
		default:
			full(roots[i], h.full)
		}
	}
	return nil
}

func broadcastText(a actor, reached map[string][]boardName, roots []string, failed map[string]string) string {
	var names, errs []string
	for _, root := range roots {
		for _, box := range reached[root] {
			names = append(names, box.name)
		}
	}
	for name, why := range failed {
		errs = append(errs, name+" ("+why+")")
	}
	slices.Sort(errs)
	text := fmt.Sprintf("broadcast to %d peers: %s", len(names), strings.Join(names, ", "))
	switch len(names) {
	case 0:
		text = fmt.Sprintf("broadcast to 0 peers: nobody else is online in circle %s", a.box.circle)
		if errs != nil {
			text = "broadcast to 0 peers"
		}
	case 1:
		text = "broadcast to 1 peer: " + names[0]
	}
	if errs != nil {
		text += "; failed: " + strings.Join(errs, ", ")
	}
	return text
}
