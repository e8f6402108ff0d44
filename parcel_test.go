//go:build unix

package main

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"
)

// Two answers that are written at once may arrive in either order, so what a sender wrote is never in both: the later
// letter waits until it is known that the earlier one has arrived, or comes behind it when it has not.
func TestTwoAnswersAtOnce(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	c, n := speak(s, "c")
	take := func() (*exchange, []string) {
		x := &exchange{}
		out, err := s.inbox(withExchange(c, x), inboxInput{})
		must(t, err)
		var texts []string
		for _, m := range out.Messages {
			texts = append(texts, m.Text)
		}
		return x, texts
	}
	send(t, s, a, "c", "one")
	first, texts := take()
	wantTexts(t, texts, "one")
	send(t, s, a, "c", "two")
	send(t, s, b, "c", "another's")
	second, texts := take()
	wantTexts(t, texts, "another's")
	s.mesh.confirm(written, first.parcels...)
	third, texts := take()
	wantTexts(t, texts, "two")
	s.mesh.confirm(written, second.parcels...)

	send(t, s, a, "c", "three")
	_, texts = take()
	wantTexts(t, texts)
	s.mesh.sessionEnded(n)
	_, texts = take()
	wantTexts(t, texts, "two", "three")
	s.mesh.confirm(written, third.parcels...) // too late to be of use
}

// Who waits for what had to stay behind gets it as soon as it may come.
func TestWaitBehindAnAnswer(t *testing.T) {
	root := newCheckout(t)
	synctest.Test(t, func(t *testing.T) {
		s := meshServer(t, root, io.Discard)
		a, _ := speak(s, "a")
		b, _ := speak(s, "b")
		send(t, s, a, "b", "one")
		first := &exchange{}
		_, err := s.inbox(withExchange(b, first), inboxInput{})
		must(t, err)
		send(t, s, a, "b", "two")
		got := make(chan inboxOutput)
		go func() {
			ctx, cancel := context.WithTimeout(b, time.Minute)
			defer cancel()
			out, _ := s.inbox(withExchange(ctx, &exchange{}), inboxInput{Wait: 30})
			got <- out
		}()
		synctest.Wait()
		at := time.Now()
		s.mesh.confirm(written, first.parcels...)
		if out := <-got; len(out.Messages) != 1 || out.Messages[0].Text != "two" || time.Since(at) > time.Second {
			t.Errorf("%+v after %v", out, time.Since(at))
		}
	})
}
