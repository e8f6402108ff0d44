package main

// What stands within a paragraph of Markdown: code, emphasis, links. See markdown.go for the rules of both.

import (
	"fmt"
	"html"
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// inline is one run of text being turned into HTML.
type inline struct {
	*markdown
	text   string
	close  map[int]int // where the bracket or the code span that opens at a byte ends
	pieces []string
	open   []emphasis // in the order they opened; never more than one of a kind
	inLink bool       // links do not hold links
}

type emphasis struct {
	mark  string // * ** _ __ ~~
	piece int    // where the mark stands, which stays text unless its counterpart comes
}

var emphasisTags = map[string]string{"*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del"}

func (m *markdown) inline(text string, inLink bool) string {
	n := &inline{markdown: m, text: text, inLink: inLink, close: pairs(text)}
	start := 0
	for i := 0; i < len(text); {
		if !strings.ContainsRune("\\\n`![<h&*_~", rune(text[i])) {
			i++
			continue
		}
		n.plain(text[start:i])
		start = i
		piece, used := n.special(i)
		if used == 0 {
			i++
			continue
		}
		if piece != "" {
			n.pieces = append(n.pieces, piece)
		}
		i += used
		start = i
	}
	n.plain(text[start:])
	return strings.Join(n.pieces, "")
}

func (n *inline) plain(text string) {
	if text != "" {
		n.pieces = append(n.pieces, html.EscapeString(text))
	}
}

// pairs finds, in one pass, where code spans and brackets end. Within code nothing else counts.
func pairs(text string) map[int]int {
	ticks := map[int][]int{} // where the rows of so many backticks are
	for i := 0; i < len(text); {
		if n := runLength(text[i:], '`'); n > 0 {
			ticks[n] = append(ticks[n], i)
			i += n
		} else {
			i++
		}
	}
	found := map[int]int{}
	var open []int
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			if i+1 < len(text) && isPunctuation(text[i+1]) {
				i++
			}
		case '[':
			open = append(open, i)
		case ']':
			if len(open) > 0 {
				found[open[len(open)-1]] = i
				open = open[:len(open)-1]
			}
		case '`':
			n := runLength(text[i:], '`')
			ends := ticks[n]
			for len(ends) > 0 && ends[0] <= i {
				ends = ends[1:]
			}
			ticks[n] = ends
			if len(ends) > 0 {
				found[i] = ends[0]
				i = ends[0]
			}
			i += n - 1
		}
	}
	return found
}

// runLength is how often c stands at the beginning of the text.
func runLength(text string, c byte) int {
	n := 0
	for n < len(text) && text[n] == c {
		n++
	}
	return n
}

// special handles what begins at a byte, if anything does: used is 0 when it is text like any other. A piece it returns is
// HTML.
func (n *inline) special(i int) (piece string, used int) {
	rest := n.text[i:]
	switch rest[0] {
	case '\\':
		switch {
		case len(rest) > 1 && rest[1] == '\n':
			return "<br>\n", 2
		case len(rest) > 1 && isPunctuation(rest[1]):
			return html.EscapeString(rest[1:2]), 2
		}
	case '\n':
		if strings.HasSuffix(n.text[:i], "  ") {
			return "<br>\n", 1
		}
	case '`':
		return n.codeSpan(i)
	case '!':
		if len(rest) > 1 && rest[1] == '[' {
			return n.image(i)
		}
	case '[':
		if !n.inLink {
			return n.bracket(i)
		}
	case '<':
		return n.autolink(rest)
	case 'h':
		return n.bareLink(i)
	case '&':
		return reference(rest)
	case '*', '_', '~':
		return n.emphasis(i)
	}
	return "", 0
}

func (n *inline) codeSpan(i int) (string, int) {
	ticks := runLength(n.text[i:], '`')
	end, ok := n.close[i]
	if !ok {
		return n.text[i : i+ticks], ticks
	}
	code := strings.ReplaceAll(n.text[i+ticks:end], "\n", " ")
	if len(code) > 2 && code[0] == ' ' && code[len(code)-1] == ' ' && !blank(code) {
		code = code[1 : len(code)-1]
	}
	return "<code>" + html.EscapeString(code) + "</code>", end + ticks - i
}

// reference undoes the few character references that people write, so that they are not shown escaped.
func reference(rest string) (string, int) {
	for _, r := range []struct{ name, shown string }{
		{"&amp;", "&amp;"}, {"&lt;", "&lt;"}, {"&gt;", "&gt;"}, {"&quot;", "&#34;"}, {"&#39;", "&#39;"}, {"&nbsp;", "\u00a0"},
		{"&mdash;", "—"}, {"&ndash;", "–"}, {"&hellip;", "…"}, {"&copy;", "©"}, {"&rarr;", "→"}, {"&larr;", "←"},
	} {
		if strings.HasPrefix(rest, r.name) {
			return r.shown, len(r.name)
		}
	}
	return "", 0
}

// bracket is a link, if what follows the brackets says where it leads.
func (n *inline) bracket(i int) (string, int) {
	label, address, used := n.target(i)
	if used == 0 {
		return "", 0
	}
	return n.anchor(address, n.markdown.inline(label, true)), used
}

// image is shown as what it is called: nothing is loaded, from here or elsewhere.
func (n *inline) image(i int) (string, int) {
	label, address, used := n.target(i + 1)
	if used == 0 {
		return "", 0
	}
	if blank(label) {
		label = "image"
	}
	text := `<span class="image">` + html.EscapeString(label) + "</span>"
	if n.inLink {
		return text, used + 1
	}
	return n.anchor(address, text), used + 1
}

// target reads [label](address), [label][name] or [label] at a bracket; used is 0 when it is none of them.
func (n *inline) target(i int) (label, address string, used int) {
	end, ok := n.close[i]
	if !ok {
		return "", "", 0
	}
	label = n.text[i+1 : end]
	if rest := n.text[end+1:]; strings.HasPrefix(rest, "(") {
		if address, used := inlineAddress(rest); used > 0 {
			return label, address, end + 1 + used - i
		}
	}
	name, after := label, end+1
	if to, ok := n.close[end+1]; ok && strings.HasPrefix(n.text[end+1:], "[") {
		if after = to + 1; to > end+2 {
			name = n.text[end+2 : to]
		}
	}
	if len(name) > labelLimit {
		return "", "", 0
	}
	address, ok = n.refs[foldLabel(name)]
	if !ok {
		return "", "", 0
	}
	return label, address, after - i
}

// inlineAddress reads (address "title"). Parentheses within the address come in pairs.
func inlineAddress(rest string) (address string, used int) {
	rest = rest[:min(len(rest), addressLimit)]
	depth, quote := 0, byte(0)
	for i := 0; i < len(rest); i++ {
		switch c := rest[i]; {
		case c == '\\' && i+1 < len(rest):
			i++
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case (c == '"' || c == '\'') && (rest[i-1] == ' ' || rest[i-1] == '\n'):
			quote = c
		case c == '(':
			depth++
		case c == ')':
			if depth--; depth == 0 {
				return firstAddress(rest[1:i]), i + 1
			}
		}
	}
	return "", 0
}

func firstAddress(s string) string {
	s = strings.TrimSpace(s)
	if inner, ok := strings.CutPrefix(s, "<"); ok {
		address, _, _ := strings.Cut(inner, ">")
		return address
	}
	if i := strings.IndexAny(s, " \n"); i >= 0 {
		s = s[:i]
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) && isPunctuation(s[i+1]) {
			i++
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// anchor makes a link of HTML. One that may not lead anywhere shows where it wanted to.
func (n *inline) anchor(address, text string) string {
	href := n.link(address)
	if href == "" {
		return fmt.Sprintf(`<span class="unlinked" title="%s">%s</span>`, html.EscapeString(address), text)
	}
	rel := ""
	if strings.HasPrefix(href, "http") {
		rel = ` rel="noreferrer noopener"`
	}
	return fmt.Sprintf(`<a href="%s"%s>%s</a>`, html.EscapeString(href), rel, text)
}

func (n *inline) autolink(rest string) (string, int) {
	if !strings.HasPrefix(rest, "<http://") && !strings.HasPrefix(rest, "<https://") {
		return "", 0
	}
	rest = rest[:min(len(rest), addressLimit)]
	end := strings.IndexAny(rest[1:], "<> \n")
	if n.inLink || end < 0 || rest[1+end] != '>' {
		return "", 0
	}
	address := rest[1 : 1+end]
	return n.anchor(address, html.EscapeString(address)), end + 2
}

// bareLink is an address in the middle of text. What ends a sentence is not part of it.
func (n *inline) bareLink(i int) (string, int) {
	rest := n.text[i:]
	before, _ := around(n.text, i, i)
	if n.inLink || inWord(before) || !strings.HasPrefix(rest, "http://") && !strings.HasPrefix(rest, "https://") {
		return "", 0
	}
	rest = rest[:min(len(rest), addressLimit)]
	if end := strings.IndexAny(rest, " \n\"'<>`|[]*"); end >= 0 {
		rest = rest[:end]
	}
	rest = strings.TrimRight(rest, ".,;:!?_~")
	if strings.Count(rest, ")") > strings.Count(rest, "(") {
		rest = strings.TrimRight(rest, ").,;:!?")
	}
	if u, err := url.Parse(rest); err != nil || u.Host == "" {
		return "", 0
	}
	return n.anchor(rest, html.EscapeString(rest)), len(rest)
}

// emphasis opens or closes at a row of marks. A mark is written as text first and becomes a tag when its counterpart comes,
// so that what never ends stays as it was typed.
func (n *inline) emphasis(i int) (string, int) {
	c := n.text[i]
	count := runLength(n.text[i:], c)
	if count > 3 || c == '~' && count != 2 {
		return n.text[i : i+count], count
	}
	before, after := around(n.text, i, i+count)
	opens, closes := !unicode.IsSpace(after), !unicode.IsSpace(before)
	if c == '_' {
		opens, closes = opens && !inWord(before), closes && !inWord(after)
	}
	for left := count; left > 0; {
		mark := n.text[i : i+min(left, 2)]
		if at := n.openBefore(c, left); closes && at >= 0 {
			mark = n.open[at].mark
			n.pieces[n.open[at].piece] = "<" + emphasisTags[mark] + ">"
			n.pieces = append(n.pieces, "</"+emphasisTags[mark]+">")
			n.open = n.open[:at] // what opened since then and did not end was no mark
		} else {
			if opens && !n.isOpen(mark) {
				n.open = append(n.open, emphasis{mark, len(n.pieces)})
			}
			n.pieces = append(n.pieces, mark)
		}
		left -= len(mark)
	}
	return "", count
}

// around gives the characters beside a part of the text, a blank at its ends.
func around(text string, from, to int) (before, after rune) {
	before, after = ' ', ' '
	if from > 0 {
		before, _ = utf8.DecodeLastRuneInString(text[:from])
	}
	if to < len(text) {
		after, _ = utf8.DecodeRuneInString(text[to:])
	}
	return before, after
}

func inWord(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }

// openBefore finds the last open mark of the character that is no longer than what is left of a row; -1 when there is none.
func (n *inline) openBefore(c byte, left int) int {
	for at := len(n.open) - 1; at >= 0; at-- {
		if mark := n.open[at].mark; mark[0] == c && len(mark) <= left {
			return at
		}
	}
	return -1
}

func (n *inline) isOpen(mark string) bool {
	return slices.ContainsFunc(n.open, func(e emphasis) bool { return e.mark == mark })
}
