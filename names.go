package main

// Display names and the other short texts by which peers are shown: cleaned, never refused, since most come from the
// environment and nobody is there to be told.

import (
	"cmp"
	"strconv"
	"strings"
	"time"
	"unicode"
)

const (
	displayNameLimit = 64  // characters
	descriptionLimit = 500 // characters
	clientLimit      = 200 // characters of what a client says of itself
)

// cleanName makes a name that can be typed and quoted: what is no letter, digit, dot, underscore or dash becomes one
// dash between what is, and nothing at the ends.
func cleanName(s, otherwise string) string {
	words := strings.FieldsFunc(s, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("._-", r)
	})
	return cmp.Or(firstRunes(strings.Join(words, "-"), displayNameLimit), otherwise)
}

// numbered is the nth choice for a peer that wants the name: itself, then name-2, name-3, …
func numbered(name string, n int) string {
	if n == 1 {
		return name
	}
	suffix := "-" + strconv.Itoa(n)
	return firstRunes(name, displayNameLimit-len(suffix)) + suffix
}

func cleanRole(s string) string {
	switch s {
	case "orchestrator", "service", "human":
		return s
	}
	return "agent"
}

// cleanText makes one line of a short text from outside, which stands in listings whose lines must not be forged.
func cleanText(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if !oneLine(string(r)) {
			return ' '
		}
		return r
	}, firstRunes(strings.TrimSpace(s), limit))
	return strings.TrimSpace(s)
}

func firstRunes(s string, n int) string {
	for i := range s {
		if n--; n < 0 {
			return s[:i]
		}
	}
	return s
}

// holder is who a peer is to the others.
type holder struct {
	box        boardName
	role       string
	attached   bool
	unverified bool
}

func (b *board) who(id peerID) (holder, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.findLocked(id)
	if m == nil {
		return holder{}, false
	}
	return holder{boardName{m.circle, m.name}, m.role, m.attached, m.unverified}, true
}

// holds is the attached peer of that name, "" when there is none.
func (b *board) holds(box boardName) peerID {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.names[box]; m != nil {
		return m.id
	}
	return ""
}

// describe sets what a peer says about itself.
func (b *board) describe(id peerID, text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.findLocked(id); m != nil {
		m.described, m.describedAt = text, time.Now()
		b.tellLocked(m)
	}
}

// tellLocked tells the mesh of a name that has been taken or left.
func (b *board) tellLocked(m *boardEntry) {
	if b.changed == nil {
		return
	}
	now := millis()
	r := nameRecord{
		Box: boardName{m.circle, m.name}, Own: m.transport == "stdio", Peer: m.id, Role: m.role,
		Client: m.client.Name, Description: m.described, Seen: now,
	}
	if !m.unverified {
		r.Identity, r.Process = m.identity.text, m.process
	}
	r.Spawn = m.spawn
	if m.described != "" {
		r.Described = m.describedAt.UnixMilli()
	}
	if b.names[r.Box] != m {
		r.Left = now
	}
	b.changed(r)
}

// taken says whether a name is somebody's, or kept for somebody.
func (b *board) taken(at boardName) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.freeLocked(at, &boardEntry{})
}

// spoke notes that a peer has called a tool.
func (b *board) spoke(id peerID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.findLocked(id); m != nil {
		m.silent = false
	}
}

// origin is what a peer proves to be, "" for nothing, how it came, and by which spawn it was started.
func (b *board) origin(id peerID) (identity, transport, spawn string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.findLocked(id); m != nil {
		return m.identity.text, m.transport, m.spawn
	}
	return "", "", ""
}
