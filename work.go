package main

// How much is worked on at once, and how much of it is memory. A stranger is here who comes without the token, or through a
// session that has not shown it: he may open many connections, ask each for what is large and read no answer.

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
)

const (
	// maxWorking bounds the requests worked on at once; a probe, a ping, a
	// watch and a call while it waits are not among them.
	maxWorking = 256
	// executedLimit is how many of them are executed at once for strangers; the others queue.
	executedLimit = 16
	// answersLimit bounds the answers of more than smallBody that are being written to strangers.
	answersLimit = 64 << 20
	// batchAnswer is after how many bytes of its answer nothing more of a stranger's batch is executed.
	batchAnswer = maxAnswer / 32
)

// work is what is worked on for one kind of caller.
type work struct {
	atomic.Int64               // requests, those that queue included
	slots        chan struct{} // what is executed holds one; nil: it needs none, and answers are not counted
	answers      atomic.Int64  // bytes of the large ones that are being written
}

// among is what a request is counted among: those that came with the token, which those of bridges do, or all others. Whoever
// opens many connections and reads no answers must not keep our own from being answered.
func (s *server) among(trusted bool) *work {
	if trusted {
		return &s.bridging
	}
	return &s.working
}

// startWork counts a request against maxWorking, among others of its kind, and waits until it may be executed. False means
// that it was refused; every true needs one end.
func (s *server) startWork(w http.ResponseWriter, r *http.Request, x *exchange, among *work) bool {
	x.work = among
	switch {
	case among.Add(1) > maxWorking:
		s.busy(w, r, fmt.Sprintf("%d requests are being worked on, which is the limit: try again", maxWorking))
	case x.begin(r.Context()):
		return true
	case s.gone():
		s.refused(w, r, errLeaseLost)
	default: // the caller has left, or was not served within the read deadline
		s.busy(w, r, fmt.Sprintf("%d requests of those without the token were being executed all the time: try again", executedLimit))
	}
	x.end()
	return false
}

func (s *server) busy(w http.ResponseWriter, r *http.Request, message string) {
	s.refusedBusy.Add(1)
	s.failure(w, r, http.StatusServiceUnavailable, "busy", message)
}

// begin waits for a slot; false when ctx ends before.
func (x *exchange) begin(ctx context.Context) bool {
	if x.work.slots == nil {
		return true
	}
	select {
	case x.work.slots <- struct{}{}:
		x.slot = true
		return true
	case <-ctx.Done():
		return false
	}
}

// executed gives the slot up, before the answer is written: who does not read it keeps nobody from being served.
func (x *exchange) executed() {
	if x.slot {
		<-x.work.slots
		x.slot = false
	}
}

// end is when the answer has been written.
func (x *exchange) end() {
	x.executed()
	x.count(0)
	x.work.Add(-1)
}

// pause takes a call out of what is worked on while it waits; the result puts it back.
func (x *exchange) pause(ctx context.Context) (resume func()) {
	if x == nil || x.work == nil {
		return func() {}
	}
	x.executed()
	x.work.Add(-1)
	return func() {
		x.work.Add(1)
		x.begin(ctx) // without a slot nobody is there to read the answer
	}
}

// count notes how large the answer is; false when there is more of them than there may be.
func (x *exchange) count(size int) bool {
	if x.work == nil || x.work.slots == nil {
		return true
	}
	if size <= smallBody {
		size = 0
	}
	more := int64(size) - x.writing
	if more == 0 {
		return true
	}
	x.writing += more
	return x.work.answers.Add(more) <= answersLimit || more < 0
}

// room counts an answer that is to be written next; false means that it was refused instead. That is said of what changes
// nothing only: "busy" means that a request may be sent again, and a command has been executed by now. The answers of
// commands are small enough that maxWorking bounds them.
func (s *server) room(w http.ResponseWriter, r *http.Request, x *exchange, size int) bool {
	if x.count(size) || x.command {
		return true
	}
	x.count(0)
	s.busy(w, r, fmt.Sprintf("answers of %d bytes are being written, which is the limit for those without the token: try again, or ask for less", answersLimit))
	return false
}
