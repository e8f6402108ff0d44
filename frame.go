package main

// One line of the client: how it is read, what of it is looked at before it is known who answers, and the answers that
// can be made to it without looking further.

import (
	"bufio"
	"bytes"
	"encoding/json"
	"slices"
	"time"
)

// frame is one line of the client, decoded as far as it takes to know what it is.
type frame struct {
	raw     []byte
	tooLong bool // the line was over maxMessage and has been skipped
	id      json.RawMessage
	method  string
	params  json.RawMessage
	tool    string // of tools/call
}

// readFrame looks into a line without judging it: of a line that is no JSON
// the fields may be anything.
func readFrame(raw []byte) frame {
	f := frame{raw: raw}
	members(raw, func(key string, value json.RawMessage) {
		switch key {
		case "id":
			f.id = value
		case "method":
			f.method, _ = stringOf(value)
		case "params":
			f.params = value
		}
	})
	if f.method == "tools/call" {
		f.tool = stringMember(f.params, "name")
	}
	return f
}

// waits reports whether the frame is a call that may wait, and so must not
// hold up those behind it.
func (f frame) waits() bool {
	if f.tool == "" || f.id == nil { // before the first call the table is not needed
		return false
	}
	c := toolTable()[f.tool]
	return c != nil && c.mayWait
}

// runsEpisodeCommand reports whether the frame is a call that the repository's
// episode command can hold up.
func (f frame) runsEpisodeCommand() bool {
	return f.tool == "majordomus_session_attach" || f.tool == "majordomus_session_detach"
}

// elements are the messages of a batch; nil for anything else.
func (f frame) elements() (elements []frame) {
	var raw []json.RawMessage
	if !bytes.HasPrefix(f.raw, []byte("[")) || json.Unmarshal(f.raw, &raw) != nil {
		return nil
	}
	for _, e := range raw {
		elements = append(elements, readFrame(e))
	}
	return elements
}

// failed is the answer that tells the client of an error, made for the id of
// each message: each of a batch gets it, a notification none.
func (f frame) failed(make func(id json.RawMessage) *rpcError) []byte {
	elements := f.elements()
	if elements == nil {
		switch {
		case f.id != nil && validID(f.id):
			return errorMessage(f.id, make(f.id))
		case f.id == nil && f.method != "":
			return nil
		}
		return errorMessage(nil, make(nil))
	}
	var answers [][]byte
	for _, one := range elements {
		if a := one.failed(make); a != nil {
			answers = append(answers, a)
		}
	}
	if answers == nil {
		return nil
	}
	return slices.Concat([]byte("["), bytes.Join(answers, []byte(",")), []byte("]"))
}

// repeatable reports whether the frame may be sent again although the first
// one may have been executed.
func (f frame) repeatable() bool {
	if f.method != "tools/call" {
		// What is no request executes nothing; a batch is as good as its elements.
		return !slices.ContainsFunc(f.elements(), func(e frame) bool { return !e.repeatable() })
	}
	c := toolTable()[f.tool]
	return c != nil && (!c.command || c.idempotent)
}

// readLine reads one line of about so many bytes at most into memory of its
// own; what is longer is read to its end without being kept.
func readLine(r *bufio.Reader, limit int) (line []byte, tooLong bool, err error) {
	for {
		part, err := r.ReadSlice('\n')
		if !tooLong {
			line = append(line, part...)
		}
		if len(line) > limit+16 { // with its CRLF, a BOM and some blanks
			line, tooLong = nil, true
		}
		if err != bufio.ErrBufferFull {
			return line, tooLong, err
		}
	}
}

func tooLongAnswer() []byte {
	return errorMessage(nil, rpcErrorf(codeParse, "a message may have at most %d bytes; this line was longer and has been skipped", maxMessage))
}

// wait is the time that the call itself asks to wait.
func (f frame) wait() time.Duration {
	if !f.waits() {
		return 0
	}
	var seconds float64
	json.Unmarshal(member(member(f.params, "arguments"), "wait_seconds"), &seconds)
	return time.Duration(min(max(seconds, 0), 300) * float64(time.Second))
}
