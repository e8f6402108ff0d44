package main

// Lists and tables of Markdown. See markdown.go for the rules of both.

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

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

var delimiterRow = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$`)
})

func tableBegins(line, next string) bool {
	return strings.Contains(line, "|") && len(next) < 10_000 && delimiterRow().MatchString(next) &&
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
