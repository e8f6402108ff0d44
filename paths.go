package main

// A claimed path: relative to the root of its checkout and separated by /, on every system; bytes compare as they are.
// "." is the whole repository. A path that holds *, ? or [ is a glob. Whether two paths meet is only ever decided on
// their texts: a claim may name files that do not exist yet, and another checkout's files are not ours to look at.

import (
	"iter"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

// clean gives the one spelling of a path. It reports false for a path that leads out of the repository.
func clean(p string) (string, bool) {
	p = path.Clean(p)
	if p == ".." || strings.HasPrefix(p, "../") || path.IsAbs(p) {
		return p, false
	}
	return p, true
}

// relative cleans a path as a client writes it: an absolute one inside the checkout at root becomes relative. The
// client may know the root by another spelling than ours (a link, another case), so the directories above the path
// are compared with it as files. It does I/O: call it under no mutex.
func relative(root, p string) (string, bool) {
	if !filepath.IsAbs(p) {
		return clean(p)
	}
	if root == "" {
		return p, false
	}
	p = filepath.Clean(p)
	if rest, ok := below(root, p); ok {
		return clean(filepath.ToSlash(rest))
	}
	info, err := os.Stat(root)
	if err != nil {
		return p, false
	}
	for dir := p; ; {
		if at, err := os.Stat(dir); err == nil && os.SameFile(at, info) {
			rest, _ := below(dir, p)
			return clean(filepath.ToSlash(rest))
		}
		up := filepath.Dir(dir)
		if up == dir {
			return p, false
		}
		dir = up
	}
}

// below gives what is left of the cleaned path p under dir.
func below(dir, p string) (string, bool) {
	if rest, ok := strings.CutPrefix(p, dir); ok && (rest == "" || os.IsPathSeparator(rest[0]) || os.IsPathSeparator(dir[len(dir)-1])) {
		return strings.TrimPrefix(rest, string(filepath.Separator)), true
	}
	return "", false
}

// anchor gives the part of a cleaned path that is fixed: all of it, or of a glob the directories before its first
// special character. The whole repository and a glob that begins at once are anchored at "".
func anchor(p string) (fixed string, glob bool) {
	if p == "." {
		return "", false
	}
	special := strings.IndexAny(p, "*?[")
	if special < 0 {
		return p, false
	}
	return p[:max(0, strings.LastIndexByte(p[:special], '/'))], true
}

// within reports whether the plain path p is dir or lies inside it; "" holds everything.
func within(p, dir string) bool {
	return dir == "" || strings.HasPrefix(p, dir) && (len(p) == len(dir) || p[len(dir)] == '/')
}

// meets reports whether two cleaned paths may name the same file. It is symmetric, and when in doubt it says yes.
func meets(a, b string) bool {
	x, xglob := anchor(a)
	y, yglob := anchor(b)
	switch {
	case !within(x, y) && !within(y, x):
		return false
	case xglob == yglob:
		return true // plain: one contains the other; globs: nothing excludes it
	case xglob:
		return within(x, y) || globReaches(a, b)
	default:
		return within(y, x) || globReaches(b, a)
	}
}

// covers reports whether the cleaned path a holds all of b's ground; when in doubt it says no.
func covers(a, b string) bool {
	x, xglob := anchor(a)
	y, yglob := anchor(b)
	switch {
	case a == b:
		return true
	case !xglob:
		return within(y, x)
	case !yglob:
		return b != "." && globHolds(a, b)
	default:
		all, ok := strings.CutSuffix(a, "/**")
		return a == "**" || ok && all == x && within(y, x)
	}
}

// above yields the directories that hold the plain path, up to "", which holds everything.
func above(p string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for p != "" {
			p = p[:max(0, strings.LastIndexByte(p, '/'))]
			if !yield(p) {
				return
			}
		}
	}
}

// globReaches reports whether the glob matches the plain path, a parent of it, or could match something inside it.
func globReaches(glob, plain string) bool {
	holds, inside := runGlob(glob, plain)
	return holds || inside
}

// globHolds reports whether the glob matches the plain path or a parent of it.
func globHolds(glob, plain string) bool {
	holds, _ := runGlob(glob, plain)
	return holds
}

// A glob is run as a set of positions in its tokens, so that no glob and path can make it slow: each character of the
// path moves every position at once. Backtracking would be shorter and exponential.

type globKind uint8

const (
	globText  globKind = iota // this very character
	globOne                   // ?
	globClass                 // [a-z], [!a-z]
	globRun                   // *: anything but /
	globAll                   // **: anything
	globDirs                  // **/ at the start of a segment: directories, or none
	globDir                   // the same once inside a directory: not to be left before its /
)

type globToken struct {
	kind globKind
	text string
}

// globTokens splits a glob. What is not a well-formed class is text.
func globTokens(glob string) []globToken {
	list := make([]globToken, 0, len(glob))
	for i := 0; i < len(glob); {
		rest := glob[i:]
		switch {
		case strings.HasPrefix(rest, "**"):
			n := len(rest) - len(strings.TrimLeft(rest, "*"))
			if (i == 0 || glob[i-1] == '/') && n < len(rest) && rest[n] == '/' {
				list = append(list, globToken{kind: globDirs}, globToken{kind: globDir})
				n++
			} else {
				list = append(list, globToken{kind: globAll})
			}
			i += n
		case rest[0] == '*':
			list = append(list, globToken{kind: globRun})
			i++
		case rest[0] == '?':
			list = append(list, globToken{kind: globOne})
			i++
		case rest[0] == '[' && classEnd(rest) > 0:
			n := classEnd(rest)
			list = append(list, globToken{kind: globClass, text: rest[1 : n-1]})
			i += n
		default:
			_, n := utf8.DecodeRuneInString(rest)
			list = append(list, globToken{text: rest[:n]})
			i += n
		}
	}
	return list
}

// classEnd is the length of the class that s begins with, 0 when it is none: it closes before the next /, and a ]
// right at its start is a member.
func classEnd(s string) int {
	i := 1
	if i < len(s) && (s[i] == '!' || s[i] == '^') {
		i++
	}
	for start := i; i < len(s) && s[i] != '/'; i++ {
		if s[i] == ']' && i > start {
			return i + 1
		}
	}
	return 0
}

// inClass looks a character up in a class without its brackets.
func inClass(class, c string) bool {
	negated := class[0] == '!' || class[0] == '^'
	if negated {
		class = class[1:]
	}
	r, _ := utf8.DecodeRuneInString(c)
	members := []rune(class)
	for i := 0; i < len(members); i++ {
		low, high := members[i], members[i]
		if i+2 < len(members) && members[i+1] == '-' {
			high = members[i+2]
			i += 2
		}
		if low <= r && r <= high {
			return !negated
		}
	}
	return negated
}

// runGlob reports whether the glob matches the path or a parent of it, and whether it could match something inside.
func runGlob(glob, plain string) (holds, inside bool) {
	list := globTokens(glob)
	var room [2][160]bool
	now, next := room[0][:], room[1][:]
	if n := len(list) + 1; n <= len(now) {
		now, next = now[:n], next[:n]
	} else {
		now, next = make([]bool, n), make([]bool, n)
	}
	now[0] = true
	globSettle(list, now)
	for i := 0; i < len(plain); {
		if plain[i] == '/' && now[len(list)] {
			return true, true
		}
		_, n := utf8.DecodeRuneInString(plain[i:])
		if !globStep(list, now, next, plain[i:i+n]) {
			return false, false
		}
		now, next = next, now
		i += n
	}
	return now[len(list)], now[len(list)] || globStep(list, now, next, "/")
}

// globSettle adds the positions that are reached without a character.
func globSettle(list []globToken, at []bool) {
	for i, t := range list {
		if !at[i] {
			continue
		}
		switch t.kind {
		case globRun, globAll:
			at[i+1] = true
		case globDirs:
			at[i+2] = true
		}
	}
}

// globStep moves every position over one character of the path and reports whether any is left.
func globStep(list []globToken, now, next []bool, c string) (alive bool) {
	clear(next)
	for i, t := range list {
		if !now[i] {
			continue
		}
		if to, ok := t.move(i, c); ok {
			next[to], alive = true, true
		}
	}
	globSettle(list, next)
	return alive
}

// move says where position i, which is t's, goes on the character c.
func (t globToken) move(i int, c string) (to int, ok bool) {
	slash := c == "/"
	switch t.kind {
	case globText:
		return i + 1, t.text == c
	case globOne:
		return i + 1, !slash
	case globClass:
		return i + 1, !slash && inClass(t.text, c)
	case globRun:
		return i, !slash
	case globDirs:
		return i + 1, true
	case globDir:
		if slash {
			return i - 1, true // the directory ends: another, or what follows
		}
	}
	return i, true
}
