//go:build unix

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A bridge that has an answer in its client's hands says so to the next server, which then has nothing to repeat.
func TestConfirmToTheNextServer(t *testing.T) {
	root := newCheckout(t)
	s := meshServer(t, root, io.Discard)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	send(t, s, a, "b", "one")
	x := &exchange{}
	s.inbox(withExchange(b, x), inboxInput{})

	s2 := meshServer(t, root, io.Discard)
	s2.mesh.confirm(written, x.parcels...)
	s2.mesh.keptUntil = time.Now()
	b2, _ := speak(s2, "b")
	wantTexts(t, read(t, s2, b2))
}

// A lost session's messages come again, to whoever has the name then.
func TestSessionEnds(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	b, n := speak(s, "b")
	must(t, s.admit(n))
	send(t, s, a, "b", "one")
	x := &exchange{}
	s.inbox(withExchange(b, x), inboxInput{})
	wantTexts(t, read(t, s, b)) // in no other answer of a living session
	s.dismiss(n)
	b2, _ := speak(s, "b")
	wantTexts(t, read(t, s, b2), "(again) one")

	// An answer that was never made gives its messages back unmarked.
	send(t, s, a, "b", "two")
	x = &exchange{}
	s.inbox(withExchange(b2, x), inboxInput{})
	s.mesh.unanswered(x)
	wantTexts(t, read(t, s, b2), "two")
}

// A request of which something had arrived before the answer was written does not confirm that answer, whatever else of it
// comes later; the next one does.
func TestEarlyRequest(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	s.set.httpPort = 0
	ln, err := s.listen()
	must(t, err)
	hs := s.httpServer()
	served := make(chan struct{})
	spy := &spyListener{&deadlineListener{ln, s}, make(chan *deadlineConn, 9)}
	go func() { defer close(served); hs.Serve(spy) }()
	t.Cleanup(func() { hs.Close(); <-served })
	a, _ := speak(s, "a")
	_, n := speak(s, "b")
	must(t, s.admit(n))

	dial := func() (net.Conn, *bufio.Reader) {
		c, err := net.Dial("tcp", ln.Addr().String())
		must(t, err)
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(30 * time.Second))
		return c, bufio.NewReader(c)
	}
	request := func(tool string) string {
		body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":` + tool + `}}`
		return fmt.Sprintf("POST /mcp HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nMcp-Session-Id: %s\r\nContent-Length: %d\r\n\r\n%s", ln.Addr(), n.id, len(body), body)
	}
	answer := func(r *bufio.Reader) string {
		response, err := http.ReadResponse(r, nil)
		must(t, err)
		body, err := io.ReadAll(response.Body)
		must(t, err)
		return string(body)
	}
	open := func() int {
		s.mesh.mu.Lock()
		defer s.mesh.mu.Unlock()
		return len(s.mesh.parcels)
	}
	waiting := func() bool {
		s.mesh.mu.Lock()
		defer s.mesh.mu.Unlock()
		return len(s.mesh.readers) == 1
	}
	c, r := dial()
	fmt.Fprint(c, request(`"inbox","arguments":{"wait_seconds":30}`))
	for !waiting() {
		runtime.Gosched()
	}
	next := request(`"whoami"`)
	fmt.Fprint(c, next[:20])
	for seen := receive(t, spy.conns); seen.early.Load() == 0; {
		runtime.Gosched()
	}
	send(t, s, a, "b", "one")
	if text := answer(r); !strings.Contains(text, "] one") {
		t.Error(text)
	}
	fmt.Fprint(c, next[20:])
	if text := answer(r); strings.Contains(text, "] one") || open() != 1 {
		t.Errorf("it was confirmed too early: %s", text)
	}
	c2, r2 := dial()
	fmt.Fprint(c2, next)
	if text := answer(r2); strings.Contains(text, "] one") {
		t.Errorf("the next request, on another connection, got it too: %s", text)
	}
	eventually(t, "it is confirmed, since nothing was broken off", func() bool { return open() == 0 })
}

// spyListener hands on the connections that a server accepts.
type spyListener struct {
	*deadlineListener
	conns chan *deadlineConn
}

func (l *spyListener) Accept() (net.Conn, error) {
	c, err := l.deadlineListener.Accept()
	if err == nil {
		l.conns <- c.(*deadlineConn)
	}
	return c, err
}

// A wait is woken by the first message, whoever of many sends it, and the sender is told that it was handed over.
func TestWaitIsHanded(t *testing.T) {
	s := meshServer(t, newCheckout(t), io.Discard)
	a, _ := speak(s, "a")
	b, _ := speak(s, "b")
	for range 20 {
		got := make(chan inboxOutput, 1)
		go func() {
			x := &exchange{}
			out, _ := s.inbox(withExchange(b, x), inboxInput{Wait: 30})
			s.mesh.confirm(written, x.parcels...)
			got <- out
		}()
		for waits := false; !waits; {
			s.mesh.mu.Lock()
			waits = len(s.mesh.readers) == 1
			s.mesh.mu.Unlock()
		}
		if out := send(t, s, a, "b", "now"); out.Note != "" {
			t.Errorf("it was handed over: %q", out.Note)
		}
		if out := receive(t, got); len(out.Messages) != 1 {
			t.Errorf("%+v", out)
		}
	}
}

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

		// Who does not wait is told that there is more, or gets it when the answer before is confirmed in this moment.
		send(t, s, a, "b", "three")
		if out, err := s.inbox(withExchange(b, &exchange{}), inboxInput{}); err != nil || len(out.Messages) != 0 || !strings.Contains(out.Note, "1 more messages wait: call inbox again") {
			t.Errorf("%+v, %v", out, err)
		}
		s.mesh.mu.Lock()
		var numbers []int64
		for number := range s.mesh.parcels {
			numbers = append(numbers, number)
		}
		s.mesh.mu.Unlock()
		time.AfterFunc(confirmTime, func() { s.mesh.confirm(written, numbers...) })
		if out, err := s.inbox(withExchange(b, &exchange{}), inboxInput{}); err != nil || len(out.Messages) != 1 || out.Messages[0].Text != "three" {
			t.Errorf("%+v, %v", out, err)
		}
	})
}
