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
	"slices"
	"strings"
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

var definition = regexp.MustCompile(`^ {0,3}\[([^\[\]^][^\[\]]*)\]:[ \t]+(?:<([^<>]*)>|([^<\s]\S*))(?:[ \t]+(?:"[^"]*"|'[^']*'|\([^)]*\)))?[ \t]*$`)

// define collects the addresses that links refer to by label. The first of a name counts.
func (m *markdown) define(lines []string) {
	fence, inside := "", false
	for _, line := range lines {
		if fence, inside = fenced(fence, line); inside || len(line) > labelLimit+addressLimit {
			continue
		}
		if d := definition.FindStringSubmatch(line); d != nil {
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
		case len(line) <= labelLimit+addressLimit && definition.MatchString(line):
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

// marker is what a list item begins with.
type marker struct {
	kind   byte // - * + . )
	number int  // -1 without one
	width  int  // columns before the item's text; 0 when the line begins no item
}

func markerOf(line string) marker {
	lead := indent(line)
	s := line[lead:]
	digits := len(s) - len(strings.TrimLeft(s, "0123456789"))
	if lead > 3 || s == "" || digits > 9 || digits == len(s) {
		return marker{}
	}
	m := marker{kind: s[digits], number: -1, width: lead + digits + 1}
	if digits > 0 {
		fmt.Sscan(s[:digits], &m.number)
	}
	if digits == 0 && !strings.ContainsRune("-*+", rune(m.kind)) || digits > 0 && m.kind != '.' && m.kind != ')' {
		return marker{}
	}
	rest := line[m.width:]
	spaces := indent(rest)
	switch {
	case rest == "" || spaces == len(rest):
		m.width = min(len(line), m.width+1)
	case spaces == 0 && rest[0] != '\t':
		return marker{}
	case spaces > 4:
		m.width++ // the rest is the indentation of code
	case rest[0] == '\t':
		m.width++
	default:
		m.width += spaces
	}
	return m
}

// list writes the items of one list. A blank line between them, or within one, makes all of them paragraphs.
func (m *markdown) list(lines []string, depth int) int {
	first := markerOf(lines[0])
	var items [][]string
	loose, n := false, 0
	for n < len(lines) {
		at := markerOf(lines[n])
		if at.width == 0 || at.kind != first.kind || rule(lines[n]) {
			break
		}
		item, used := gatherItem(lines[n:], at.width, depth)
		n += used
		items = append(items, item)
		gap := n
		for n < len(lines) && blank(lines[n]) {
			n++
		}
		more := n < len(lines) && markerOf(lines[n]).kind == first.kind && !rule(lines[n])
		loose = loose || more && n > gap || slices.ContainsFunc(item, blank) && !blank(item[0])
		if !more {
			break
		}
	}
	open, end := "<ul>", "</ul>"
	if first.number >= 0 {
		open, end = "<ol>", "</ol>"
		if first.number != 1 {
			open = fmt.Sprintf(`<ol start="%d">`, first.number)
		}
	}
	m.out.WriteString(open + "\n")
	for _, item := range items {
		m.out.WriteString("<li>")
		m.blocks(taskItem(item), depth+1, !loose)
		m.out.WriteString("</li>\n")
	}
	m.out.WriteString(end + "\n")
	return n
}

// gatherItem takes the lines of one item off a list, without its indentation and without blank lines at its end.
func gatherItem(lines []string, width, depth int) (item []string, used int) {
	item = []string{lines[0][width:]}
	used = 1
	fence, _ := fenced("", item[0])
	for i := 1; i < len(lines); i++ {
		line := lines[i]
		switch {
		case blank(line):
			line = ""
			if i == 1 && blank(item[0]) {
				return item, 1 // an item may begin with one blank line only
			}
		case indent(line) >= width:
			line = line[width:]
			used = i + 1
		case fence != "" || blank(lines[i-1]) || markerOf(line).width > 0 || interrupts(line, depth):
			return item[:used], used
		default: // goes on with the paragraph above it
			used = i + 1
		}
		item = append(item, line)
		fence, _ = fenced(fence, line)
	}
	return item[:used], used
}

// taskItem shows the box of a task as a character: a form field would have to do something.
func taskItem(item []string) []string {
	for mark, box := range map[string]string{"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "} {
		if rest, ok := strings.CutPrefix(item[0], mark); ok {
			return append([]string{box + rest}, item[1:]...)
		}
	}
	return item
}

var delimiterRow = regexp.MustCompile(`^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$`)

func tableBegins(line, next string) bool {
	return strings.Contains(line, "|") && len(next) < 10_000 && delimiterRow.MatchString(next) &&
		strings.Contains(next, "|") && len(cells(line)) == len(cells(next))
}

// cells splits a row at the bars that are not escaped.
func cells(line string) []string {
	line = strings.TrimPrefix(strings.TrimSpace(line), "|")
	var list []string
	start := 0
	for i := 0; i < len(line) && len(list) < columnLimit; i++ {
		switch line[i] {
		case '\\':
			i++
		case '|':
			list = append(list, line[start:i])
			start = i + 1
		}
	}
	if rest := line[start:]; !blank(rest) {
		list = append(list, rest)
	}
	for i, c := range list {
		list[i] = strings.ReplaceAll(strings.TrimSpace(c), `\|`, "|")
	}
	return list
}

// table leaves cells out where a row has fewer: filling them in would make a small file a large page.
func (m *markdown) table(lines []string) int {
	sides := cells(lines[1])
	row := func(tag, line string) {
		m.out.WriteString("<tr>")
		for i, c := range cells(line)[:min(len(cells(line)), len(sides))] {
			class := ""
			if strings.HasSuffix(sides[i], ":") {
				class = ` class="right"`
				if strings.HasPrefix(sides[i], ":") {
					class = ` class="center"`
				}
			}
			fmt.Fprintf(&m.out, "<%s%s>%s</%s>", tag, class, m.inline(c, false), tag)
		}
		m.out.WriteString("</tr>\n")
	}
	m.out.WriteString("<div class=\"table\" tabindex=\"0\"><table>\n")
	row("th", lines[0])
	n := 2
	for ; n < len(lines) && !blank(lines[n]) && strings.Contains(lines[n], "|"); n++ {
		row("td", lines[n])
	}
	m.out.WriteString("</table></div>\n")
	return n
}

// isPunctuation is what a backslash can take its meaning from.
func isPunctuation(c byte) bool {
	return c < utf8.RuneSelf && (unicode.IsPunct(rune(c)) || unicode.IsSymbol(rune(c)))
}
