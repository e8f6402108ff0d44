package main

import (
	"html"
	"regexp"
	"strings"
	"testing"
	"time"
)

func toHTML(text string) string {
	body, _ := renderMarkdown(text, func(address string) string { return documentLink("docs/guide/start.md", address) })
	return string(body)
}

func TestMarkdown(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"paragraph", "one\ntwo  \nthree\\\nfour\n\nfive", "<p>one\ntwo  <br>\nthree<br>\nfour</p>\n<p>five</p>\n"},
		{"headings", "# A `b` #\n## A b\nC\n===\n# A b", `<h1 id="h-a-b">A <code>b</code></h1>` + "\n" + `<h2 id="h-a-b-1">A b</h2>` + "\n" + `<h1 id="h-c">C</h1>` + "\n" + `<h1 id="h-a-b-2">A b</h1>` + "\n"},
		{"no heading", "#5 is one\n\n#", "<p>#5 is one</p>\n<h1 id=\"h-\"></h1>\n"},
		{"emphasis", "*a* **b** ***c*** _d_ __e__ ~~f~~", "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong> <em>d</em> <strong>e</strong> <del>f</del></p>\n"},
		{"no emphasis", "2 * 3 * 4, snake_case_name, **open, * a", "<p>2 * 3 * 4, snake_case_name, **open, * a</p>\n"},
		{"crossed emphasis", "*a **b* c**", "<p><em>a **b</em> c**</p>\n"},
		{"code", "`a` ``b ` c`` ` d", "<p><code>a</code> <code>b ` c</code> ` d</p>\n"},
		{"code is literal", "`<b> [a](b) *c* \\`", "<p><code>&lt;b&gt; [a](b) *c* \\</code></p>\n"},
		{"fence", "```go\nif a < b {\n\n\tx()\n}\n```\nafter", "<pre tabindex=\"0\"><code>if a &lt; b {\n\n    x()\n}\n</code></pre>\n<p>after</p>\n"},
		{"open fence", "~~~\n# a", "<pre tabindex=\"0\"><code># a\n</code></pre>\n"},
		{"indented code", "    a\n\n      b\n\nc", "<pre tabindex=\"0\"><code>a\n\n  b\n</code></pre>\n<p>c</p>\n"},
		{"list", "- a\n- b\n  c\n\nd", "<ul>\n<li>a\n</li>\n<li>b\nc\n</li>\n</ul>\n<p>d</p>\n"},
		{"loose list", "3. a\n\n4. b", "<ol start=\"3\">\n<li><p>a</p>\n</li>\n<li><p>b</p>\n</li>\n</ol>\n"},
		{"nested list", "* a\n  * b\n\n        c\n* [x] d", "<ul>\n<li><p>a</p>\n<ul>\n<li><p>b</p>\n<pre tabindex=\"0\"><code>c\n</code></pre>\n</li>\n</ul>\n</li>\n<li><p>☑ d</p>\n</li>\n</ul>\n"},
		{"list with code", "1. a\n\n   ```\n   b\n\n   c\n   ```\n2. d", "<ol>\n<li><p>a</p>\n<pre tabindex=\"0\"><code>b\n\nc\n</code></pre>\n</li>\n<li><p>d</p>\n</li>\n</ol>\n"},
		{"a year is no list", "It was\n1986. Then", "<p>It was\n1986. Then</p>\n"},
		{"quote", "> a\nb\n> - c\n\nd", "<blockquote>\n<p>a\nb</p>\n<ul>\n<li>c\n</li>\n</ul>\n</blockquote>\n<p>d</p>\n"},
		{"rule", "a\n\n* * *\nb", "<p>a</p>\n<hr>\n<p>b</p>\n"},
		{"table", "| a | b\\|c |\n|:-:|--:|\n| `x` | *y* | z |\n| 1 |\n\nend", "<div class=\"table\" tabindex=\"0\"><table>\n<tr><th class=\"center\">a</th><th class=\"right\">b|c</th></tr>\n<tr><td class=\"center\"><code>x</code></td><td class=\"right\"><em>y</em></td></tr>\n<tr><td class=\"center\">1</td></tr>\n</table></div>\n<p>end</p>\n"},
		{"no table", "a | b\nc | d", "<p>a | b\nc | d</p>\n"},
		{"links", "[a](b.md) [c](<d e.md>) [f](g.md \"title\") [h](i_(j).md)", `<p><a href="/docs/files/docs/guide/b.md">a</a> <a href="/docs/files/docs/guide/d%20e.md">c</a> <a href="/docs/files/docs/guide/g.md">f</a> <a href="/docs/files/docs/guide/i_%28j%29.md">h</a></p>` + "\n"},
		{"reference links", "[a][B  c] [b c] [d][]\n\n[b C]: x.md 'title'\n[d]: <https://example.com/?q=1&r=2>", `<p><a href="/docs/files/docs/guide/x.md">a</a> <a href="/docs/files/docs/guide/x.md">b c</a> <a href="https://example.com/?q=1&amp;r=2" rel="noreferrer noopener">d</a></p>` + "\n"},
		{"no links", "[a] [b][c] [d]( \\[e](f)", "<p>[a] [b][c] [d]( [e](f)</p>\n"},
		{"bare links", "see https://example.com/a_b_c, (http://example.com/) or <https://x.example/>.", `<p>see <a href="https://example.com/a_b_c" rel="noreferrer noopener">https://example.com/a_b_c</a>, (<a href="http://example.com/" rel="noreferrer noopener">http://example.com/</a>) or <a href="https://x.example/" rel="noreferrer noopener">https://x.example/</a>.</p>` + "\n"},
		{"images", "![a](b.png) [![c](https://x.example/d.svg)](https://x.example)", `<p><a href="/docs/files/docs/guide/b.png"><span class="image">a</span></a> <a href="https://x.example" rel="noreferrer noopener"><span class="image">c</span></a></p>` + "\n"},
		{"html is text", "<script>alert(1)</script> &amp; &bogus; <!-- a -->", "<p>&lt;script&gt;alert(1)&lt;/script&gt; &amp; &amp;bogus; &lt;!-- a --&gt;</p>\n"},
		{"front matter", "---\ntitle: <a>\n---\n# b", "<pre tabindex=\"0\"><code>title: &lt;a&gt;\n</code></pre>\n<h1 id=\"h-b\">b</h1>\n"},
		{"line ends", "a\r\nb\rc\x00", "<p>a\nb\nc\uFFFD</p>\n"},
		{"empty", "", ""},
	} {
		if got := toHTML(c.text); got != c.want {
			t.Errorf("%s:\n%q\ngave   %q\nwanted %q", c.name, c.text, got, c.want)
		}
	}
}

func TestDocumentTitle(t *testing.T) {
	for text, want := range map[string]string{
		"# A\n# B":               "A",
		"text\n\nTwo words\n---": "Two words",
		"---\na: b\n---\n\n## C": "C",
		"```\n# no\n```\n# yes":  "yes",
		"nothing":                "",
		"":                       "",
		"---":                    "",
	} {
		if got := documentTitle(text); got != want {
			t.Errorf("%q: %q, not %q", text, got, want)
		}
	}
}

func TestDocumentLink(t *testing.T) {
	for address, want := range map[string]string{
		"other.md":                   "/docs/files/docs/guide/other.md",
		"other.md#Some-Part":         "/docs/files/docs/guide/other.md#h-Some-Part",
		"#part":                      "#h-part",
		"../b.md?raw=1":              "/docs/files/docs/b.md",
		"../../README.md":            "/docs/files/README.md",
		"/AGENTS.md":                 "/docs/files/AGENTS.md",
		"a%20b.md":                   "/docs/files/docs/guide/a%20b.md",
		"a%3Fb.md":                   "/docs/files/docs/guide/a%3Fb.md",
		"https://example.com/a?b#c":  "https://example.com/a?b#c",
		"HTTP://example.com":         "http://example.com",
		"":                           "",
		"#":                          "",
		"../../../etc/passwd":        "",
		"%2e%2e/%2e%2e/%2e%2e/x":     "",
		"..":                         "/docs/files/docs",
		"/../../x":                   "/docs/files/x",
		"//evil.example/x":           "",
		"///evil.example":            "/docs/files/evil.example",
		"\\\\evil.example":           "",
		"/\\evil.example":            "",
		"javascript:alert(1)":        "",
		"JavaScript:alert(1)":        "",
		"java\tscript:alert(1)":      "",
		" javascript:alert(1)":       "",
		"\x01javascript:alert(1)":    "",
		"data:text/html,x":           "",
		"vbscript:x":                 "",
		"file:///etc/passwd":         "",
		"mailto:a@example.com":       "",
		"http:evil":                  "",
		"https:///x":                 "",
		"http://[::1":                "",
		"a:b":                        "",
		"http://user:pw@example.com": "http://user:pw@example.com",
	} {
		if got := documentLink("docs/guide/start.md", address); got != want {
			t.Errorf("%q leads to %q, not %q", address, got, want)
		}
	}
}

var (
	tagText  = regexp.MustCompile(`<[^<>]*>`)
	knownTag = regexp.MustCompile(`^</?(?:p|h[1-6]|pre|code|ul|ol|li|blockquote|hr|br|em|strong|del|a|span|div|table|tr|th|td)(?: (?:id="h-[^"]*"|href="[^"]*"|rel="noreferrer noopener"|class="(?:unlinked|image|table|center|right)"|title="[^"]*"|tabindex="0"|start="[0-9]+"))*>$`)
	tagName  = regexp.MustCompile(`[a-z0-9]+`)
	hrefText = regexp.MustCompile(` href="([^"]*)"`)
	goodHref = regexp.MustCompile(`^(?:https?://[^/]|/docs/files/|#h-)`)
)

// checkMarkup holds HTML to what may come out of a document: tags of ours, balanced, links that lead nowhere else.
func checkMarkup(t *testing.T, text, body string) {
	t.Helper()
	var open []string
	for _, tag := range tagText.FindAllString(body, -1) {
		if !knownTag.MatchString(tag) {
			t.Fatalf("%q gave the tag %s", text, tag)
		}
		name := tagName.FindString(tag)
		switch {
		case name == "br" || name == "hr":
		case tag[1] != '/':
			open = append(open, name)
		case len(open) == 0 || open[len(open)-1] != name:
			t.Fatalf("%q ends %s within %v:\n%s", text, tag, open, body)
		default:
			open = open[:len(open)-1]
		}
	}
	if len(open) > 0 {
		t.Fatalf("%q leaves %v open:\n%s", text, open, body)
	}
	if rest := tagText.ReplaceAllString(body, ""); strings.ContainsAny(rest, "<>\x00") {
		t.Fatalf("%q gave markup that is no tag of ours: %s", text, rest)
	}
	for _, m := range hrefText.FindAllStringSubmatch(body, -1) {
		if href := html.UnescapeString(m[1]); !goodHref.MatchString(href) || strings.ContainsAny(href, "\\ \t\n") {
			t.Fatalf("%q leads to %q", text, href)
		}
	}
}

func FuzzMarkdown(f *testing.F) {
	for _, text := range []string{
		"# a\n\n*b* **c** `d` [e](f) ![g](h)\n\n- i\n  - j\n\n1. k\n\n> l\n\n| m | n |\n|---|---|\n| o | p |\n\n```\nq\n```\n\n---\n",
		"<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "[a](<\" onmouseover=\"x>)", "[\"><script>](https://x.example/\"><script>)",
		"***a** b*", "[[a](b)](c)", "`[`](`x)", "[a]: b\n[a]", "\\<a\\>", "<https://x.example/\"onclick=x>", "- - - a", "> > > a", "a\n=\n-", "|\n|-", "&lt;b&gt;",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		text = strings.ToValidUTF8(text, "\uFFFD") // as the documents are
		start := time.Now()
		body, _ := renderMarkdown(text, func(address string) string { return documentLink("docs/a.md", address) })
		if took := time.Since(start); took > patienceForMarkup {
			t.Errorf("%d bytes took %v", len(text), took)
		}
		checkMarkup(t, text, string(body))
	})
}

// TestMarkdownHostile holds much of each kind of nonsense to a time and a size that the page can bear.
func TestMarkdownHostile(t *testing.T) {
	for _, piece := range []string{
		"[", "![", "](", "[a](", "[a][", "`", "*a ", "_a_", "**", "~~", "<https://", "> ", "- ", "1. ", "#", "|", "|-", "\\", "&", "http://a",
		"a\n", "\n", "- a\n", "> a\n", "    a\n", "\t", "[a]: b\n", "| a | b |\n|--|--|\n", "```\n", "<!--", "[a]", "***a", "* * a\n", "a`b``c```d````",
	} {
		text := strings.Repeat(piece, much/len(piece))
		start := time.Now()
		body := toHTML(text)
		if took := time.Since(start); took > patienceForMarkup {
			t.Errorf("much of %q took %v", piece, took)
		}
		if len(body) > 40*much {
			t.Errorf("much of %q gave %d bytes", piece, len(body))
		}
		for i := 0; i < 3; i++ { // and a deep one
			checkMarkup(t, piece, toHTML(strings.Repeat(piece, 20+i)+"x"))
		}
	}
}

const much = documentLimit / 8 // where anything quadratic takes minutes

// patienceForMarkup is far from what it takes, also where the race detector looks on.
const patienceForMarkup = 20 * time.Second
