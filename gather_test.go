package main

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"testing"
	"time"
)

// gatherServer is a server for the checkout, as far as the board needs one. It holds no lease.
func gatherServer(c checkout) *server {
	return &server{
		checkout: c, board: newBoard(), log: slog.New(slog.NewTextHandler(io.Discard, nil)), started: time.Now(),
		set: &settings{version: "1.0.0", timing: timings{probe: 2 * time.Second, bindGrace: 15 * time.Second}},
	}
}

func asCaller(ctx context.Context, id peerID) context.Context {
	return context.WithValue(ctx, sessionKey{}, &session{peer: id})
}

func TestBoardOfOneCheckout(t *testing.T) {
	s := gatherServer(mustFind(t, gitRepo(t)))
	id := s.board.attach(attachment{Transport: "stdio", Carried: carried{Name: "main"}})
	other := s.board.attach(attachment{Transport: "http"})
	if _, err := s.announce(t.Context(), announceInput{Intent: "x"}); !boardRefused(err, "refused") {
		t.Errorf("nobody announces: %v", err)
	}
	if _, err := s.announce(asCaller(t.Context(), other), announceInput{Intent: "y", Scope: []string{"src"}}); err != nil {
		t.Error(err)
	}
	said, err := s.announce(asCaller(t.Context(), id), announceInput{Intent: "x", Scope: []string{s.checkout.root + "/src/a.go"}})
	if err != nil || !said.Complete || said.ID != id || len(said.Overlaps) != 1 || said.Overlaps[0].Checkout.ID != s.checkout.id {
		t.Errorf("%+v, %v", said, err)
	}
	list, err := s.peersList(asCaller(t.Context(), id), peersInput{})
	if err != nil || list.Caller != id || list.Count != 2 || list.Covered != 1 || !list.Complete || len(list.Overlaps) != 1 || len(list.Boards) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if b := list.Boards[0]; b.ID != s.checkout.id || b.Branch != "main" || !b.ThisCheckout || b.Attached != 2 || b.Standing != "absent" {
		t.Errorf("%+v", b)
	}
	status, err := s.status(t.Context(), statusInput{})
	if err != nil || status.CheckoutID != s.checkout.id || status.Git.Linked || len(status.Servers) != 1 || !status.Servers[0].Primary || status.Servers[0].Peers != 2 {
		t.Errorf("%+v, %v", status, err)
	}

	outside := gatherServer(checkout{})
	outside.board.attach(attachment{Transport: "stdio"})
	list, err = outside.peersList(t.Context(), peersInput{})
	text, _ := json.Marshal(list)
	if err != nil || list.Count != 1 || list.Covered != 0 || !list.Complete || list.Caller != "" {
		t.Errorf("%s, %v", text, err)
	}
	if _, err := outside.announce(asCaller(t.Context(), "p1"), announceInput{Intent: "x", Scope: []string{"a"}}); err != nil {
		t.Error(err)
	}
	if _, err := outside.status(t.Context(), statusInput{}); err != nil {
		t.Error(err)
	}
}
