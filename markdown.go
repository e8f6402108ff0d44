package main

// Markdown to HTML, for the documents of the repository: what a README is made of, not all of CommonMark.
//
// A document is text from outside. So every byte of it goes through html.EscapeString, tags and addresses are only ever
// made here, and a link leads where the caller's function says, or nowhere. Markup that is not understood stays as the text it
// is. Time and output stay proportional to the input: there is no backtracking, brackets and code spans are matched in
// one pass ahead, and containers nest to a fixed depth (FuzzMarkdown holds it to that).

import (
	"fmt"
	"html"
	"regexp"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

const (
	nestLimit    = 12   // quotes and lists within each other
	columnLimit  = 64   // of a table
	labelLimit   = 300  // bytes of a reference's label
	addressLimit = 1000 // bytes of a link's address
)

// markdown is one document being turned into HTML.
type markdown struct {
	out  strings.Builder
	link func(address string) string // what it becomes as an href; "" when it may not be one
	refs map[string]string           // addresses by label, as in [label]: address
	ids  map[string]int              // how often a heading's name was taken
}

// renderMarkdown returns HTML and the document's first heading, as text.
func renderMarkdown(text string, link func(address string) string) (body markup, title string) {
	m := &markdown{link: link, refs: map[string]string{}, ids: map[string]int{}}
	lines := markdownLines(text)
	if end := frontMatter(lines); end > 0 {
		m.code(lines[1:end])
		lines = lines[end+1:]
	}
	m.define(lines)
	m.blocks(lines, 0, false)
	return markup(m.out.String()), documentTitle(text)
}

// documentTitle is the first heading, as it is written; "" when there is none.
func documentTitle(text string) string {
	lines := markdownLines(text)
	lines = lines[min(len(lines), frontMatter(lines)):]
	fence := ""
	for i, line := range lines {
		if fence, _ = fenced(fence, line); fence != "" {
			continue
		}
		if level, title := heading(line); level > 0 && title != "" {
			return clip(title, 200)
		}
		if i > 0 && strings.TrimSpace(lines[i-1]) != "" && underline(line) > 0 {
			return clip(strings.TrimSpace(lines[i-1]), 200)
		}
	}
	return ""
}

func markdownLines(text string) []string {
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\x00", "\uFFFD").Replace(text)
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = expandTabs(line)
	}
	return lines
}

// expandTabs makes spaces of the tabs before the text of a line, for all that counts is the column where it begins.
func expandTabs(line string) string {
	rest := strings.TrimLeft(line, " \t")
	lead := line[:len(line)-len(rest)]
	if !strings.Contains(lead, "\t") {
		return line
	}
	column := 0
	for _, c := range lead {
		column++
		if c == '\t' {
			column = (column + 3) / 4 * 4
		}
	}
	return strings.Repeat(" ", column) + rest
}

// frontMatter returns the line that ends the block of settings some tools put first; 0 when there is none.
func frontMatter(lines []string) int {
	if lines[0] != "---" {
		return 0
	}
	for i := 1; i < min(len(lines), 200); i++ {
		if lines[i] == "---" {
			return i
		}
	}
	return 0
}

var definition = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^ {0,3}\[([^\[\]^][^\[\]]*)\]:[ \t]+(?:<([^<>]*)>|([^<\s]\S*))(?:[ \t]+(?:"[^"]*"|'[^']*'|\([^)]*\)))?[ \t]*$`)
})

// define collects the addresses that links refer to by label. The first of a name counts.
func (m *markdown) define(lines []string) {
	fence, inside := "", false
	for _, line := range lines {
		if fence, inside = fenced(fence, line); inside || len(line) > labelLimit+addressLimit {
			continue
		}
		if d := definition().FindStringSubmatch(line); d != nil {
			if label := foldLabel(d[1]); m.refs[label] == "" {
				m.refs[label] = d[2] + d[3]
			}
		}
	}
}

func foldLabel(s string) string { return strings.ToLower(strings.Join(strings.Fields(s), " ")) }

func indent(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }

func blank(line string) bool { return strings.TrimSpace(line) == "" }

// blocks writes the blocks of some lines. In a tight list a paragraph is no block of its own.
func (m *markdown) blocks(lines []string, depth int, tight bool) {
	for i := 0; i < len(lines); {
		line := lines[i]
		level, title := heading(line)
		switch {
		case blank(line):
			i++
		case indent(line) >= 4:
			i += m.indented(lines[i:])
		case opensFence(line) != "":
			i += m.fence(lines[i:])
		case level > 0:
			m.heading(level, title)
			i++
		case rule(line):
			m.out.WriteString("<hr>\n")
			i++
		case depth < nestLimit && isQuote(line):
			i += m.quote(lines[i:], depth)
		case depth < nestLimit && markerOf(line).width > 0:
			i += m.list(lines[i:], depth)
		case i+1 < len(lines) && tableBegins(line, lines[i+1]):
			i += m.table(lines[i:])
		case len(line) <= labelLimit+addressLimit && definition().MatchString(line):
			i++
		default:
			i += m.paragraph(lines[i:], depth, tight)
		}
	}
}

// interrupts says that a line ends the paragraph before it without a blank line between.
func interrupts(line string, depth int) bool {
	if indent(line) >= 4 {
		return false
	}
	level, _ := heading(line)
	item := markerOf(line)
	return level > 0 || opensFence(line) != "" || rule(line) ||
		depth < nestLimit && (isQuote(line) || item.width > 0 && (item.number < 0 || item.number == 1) && !blank(line[item.width:]))
}

func (m *markdown) paragraph(lines []string, depth int, tight bool) int {
	n := 1
	for n < len(lines) && !blank(lines[n]) {
		if level := underline(lines[n]); level > 0 {
			m.heading(level, strings.Join(lines[:n], "\n"))
			return n + 1
		}
		if interrupts(lines[n], depth) {
			break
		}
		n++
	}
	text := make([]string, n)
	for i, line := range lines[:n] {
		text[i] = strings.TrimLeft(line, " ")
	}
	body := m.inline(strings.TrimRight(strings.Join(text, "\n"), " "), false)
	if tight {
		m.out.WriteString(body + "\n")
	} else {
		m.out.WriteString("<p>" + body + "</p>\n")
	}
	return n
}

// heading reads a line that begins with number signs; level 0 when it is none.
func heading(line string) (level int, title string) {
	s := strings.TrimLeft(line, " ")
	rest := strings.TrimLeft(s, "#")
	level = len(s) - len(rest)
	if len(line)-len(s) > 3 || level == 0 || level > 6 || rest != "" && rest[0] != ' ' && rest[0] != '\t' {
		return 0, ""
	}
	title = strings.TrimSpace(rest)
	if bare := strings.TrimRight(title, "#"); bare == "" || strings.HasSuffix(bare, " ") {
		title = strings.TrimSpace(bare)
	}
	return level, title
}

// underline is the level of the heading that a line makes of the text above it.
func underline(line string) int {
	s := strings.TrimSpace(line)
	switch {
	case indent(line) > 3 || s == "":
		return 0
	case strings.Trim(s, "=") == "":
		return 1
	case strings.Trim(s, "-") == "":
		return 2
	}
	return 0
}

// heading gives each heading a name of its own. The prefix keeps it apart from what the page around it is made of.
func (m *markdown) heading(level int, title string) {
	body := m.inline(strings.TrimSpace(title), false)
	id := slug(body)
	if n := m.ids[id]; n > 0 {
		m.ids[id]++
		id = fmt.Sprintf("%s-%d", id, n)
	}
	m.ids[id]++
	fmt.Fprintf(&m.out, "<h%d id=\"%s%s\">%s</h%d>\n", level, headingPrefix, html.EscapeString(id), body, level)
}

const headingPrefix = "h-"

// slug makes the name by which others link to a heading out of its HTML: letters and digits, dashes for spaces.
func slug(body string) string {
	var b strings.Builder
	skip := rune(0) // what ends a tag or a character reference
	for _, r := range strings.ToLower(body) {
		switch {
		case skip != 0:
			if r == skip {
				skip = 0
			}
		case r == '<':
			skip = '>'
		case r == '&':
			skip = ';'
		case r == ' ' || r == '\n':
			b.WriteByte('-')
		case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
			b.WriteRune(r)
		}
	}
	return firstRunes(b.String(), 100)
}

func rule(line string) bool {
	s := strings.ReplaceAll(strings.TrimSpace(line), " ", "")
	return indent(line) < 4 && len(s) >= 3 && (strings.Trim(s, "-") == "" || strings.Trim(s, "*") == "" || strings.Trim(s, "_") == "")
}

// opensFence is the row of backticks or tildes that opens a block of code; "" when the line does not.
func opensFence(line string) string {
	s := strings.TrimLeft(line, " ")
	for _, c := range "`~" {
		rest := strings.TrimLeft(s, string(c))
		if n := len(s) - len(rest); n >= 3 && len(line)-len(s) < 4 && (c == '~' || !strings.Contains(rest, "`")) {
			return s[:n]
		}
	}
	return ""
}

// fenced follows fences from line to line. Open is the fence that is open before and after; inside says that the line
// belongs to the block, its fences included.
func fenced(open, line string) (after string, inside bool) {
	if open == "" {
		open = opensFence(line)
		return open, open != ""
	}
	if closesFence(open, line) {
		return "", true
	}
	return open, true
}

func closesFence(open, line string) bool {
	s := strings.TrimSpace(line)
	return indent(line) < 4 && len(s) >= len(open) && strings.Trim(s, open[:1]) == ""
}

func (m *markdown) fence(lines []string) int {
	open, lead := opensFence(lines[0]), indent(lines[0])
	n := 1
	var code []string
	for ; n < len(lines); n++ {
		if closesFence(open, lines[n]) {
			n++
			break
		}
		code = append(code, lines[n][min(lead, indent(lines[n])):])
	}
	m.code(code)
	return n
}

func (m *markdown) code(lines []string) {
	m.out.WriteString(`<pre tabindex="0"><code>`)
	for _, line := range lines {
		m.out.WriteString(html.EscapeString(line) + "\n")
	}
	m.out.WriteString("</code></pre>\n")
}

func (m *markdown) indented(lines []string) int {
	var code []string
	end := 0
	for i, line := range lines {
		if !blank(line) && indent(line) < 4 {
			break
		}
		code = append(code, line[min(4, indent(line)):])
		if !blank(line) {
			end = i + 1
		}
	}
	m.code(code[:end])
	return end
}

func isQuote(line string) bool {
	return indent(line) < 4 && strings.HasPrefix(strings.TrimLeft(line, " "), ">")
}

func (m *markdown) quote(lines []string, depth int) int {
	n := 0
	var inner []string
	for ; n < len(lines) && !blank(lines[n]); n++ {
		s := lines[n]
		if isQuote(s) {
			s = expandTabs(strings.TrimPrefix(strings.TrimLeft(s, " ")[1:], " "))
		} else if blank(inner[n-1]) || interrupts(s, depth) {
			break
		}
		inner = append(inner, s)
	}
	m.out.WriteString("<blockquote>\n")
	m.blocks(inner, depth+1, false)
	m.out.WriteString("</blockquote>\n")
	return n
}

// isPunctuation is what a backslash can take its meaning from.
func isPunctuation(c byte) bool {
	return c < utf8.RuneSelf && (unicode.IsPunct(rune(c)) || unicode.IsSymbol(rune(c)))
}
