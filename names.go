package main

// Display names and the other short texts by which peers are shown: cleaned, never refused, since most come from the
// environment and nobody is there to be told.

import (
	"cmp"
	"strconv"
	"strings"
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
