package main

// The open asks of this checkout, for the board that people look at.

import (
	"cmp"
	"context"
	"slices"
)

type asksInput struct{}

type asksOutput struct {
	Asks    []waitingAsk `json:"asks" doc:"the open asks that begin or end in this checkout, the oldest first"`
	Omitted int          `json:"omitted,omitempty" doc:"how many more there are" min:"0"`
}

// waitingAsk does not tell what was asked: the route is open to everybody on this machine, and that is for the two.
type waitingAsk struct {
	ID    string `json:"id" doc:"of the thread"`
	From  string `json:"from" doc:"name of the peer that asked"`
	To    string `json:"to" doc:"name of the peer that is asked"`
	State string `json:"state" doc:"queued: on the way; unread: in the mailbox; read; stored: in the other checkout's mailbox" enum:"queued,unread,read,stored"`
	Age   int64  `json:"age_seconds" doc:"how long it has been open" min:"0"`
}

func (s *server) listAsks(context.Context, asksInput) (asksOutput, error) {
	m := s.mesh
	m.mu.Lock()
	defer m.mu.Unlock()
	now := millis()
	out := asksOutput{Asks: []waitingAsk{}}
	for _, t := range m.state.threads {
		if t.Closed == 0 && !expired(t.At, now) {
			out.Asks = append(out.Asks, waitingAsk{
				ID: t.ID, From: t.From.Box.name, To: t.To.Box.name, State: m.askStateLocked(t), Age: max(0, now-t.At) / 1000,
			})
		}
	}
	slices.SortFunc(out.Asks, func(a, b waitingAsk) int { return cmp.Or(cmp.Compare(b.Age, a.Age), cmp.Compare(a.ID, b.ID)) })
	if len(out.Asks) > asksLimit {
		out.Asks, out.Omitted = out.Asks[:asksLimit], len(out.Asks)-asksLimit
	}
	return out, nil
}
