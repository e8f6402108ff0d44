package main

// The reference under /docs/: a page for each row of the table of capabilities, made of the row and its types.

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
)

// serveDocs lists the capabilities by area, and the documents of the repository.
func (s *server) serveDocs(w http.ResponseWriter, r *http.Request) {
	x := &exchange{}
	if !s.startWork(w, r, x, &s.working) {
		return
	}
	defer x.end()
	p := page{title: "Documentation", section: "/docs/"}
	p.add(`<h1>Documentation</h1>`)
	p.add(`<p class="lead">Everything this server can do, each in one place: as a tool for agents and as a route for everybody else.</p>`)
	p.add(`<p>The same, for programs: <a href="/openapi.json">OpenAPI document</a>, <a href="/api/v1">index of the routes</a>. To try a route, use the <a href="/swagger">API explorer</a>.</p>`)
	rows := capabilities()
	for len(rows) > 0 {
		name := rows[0].area()
		p.add(`<section class="area"><h2 id="area-%s">%s</h2><ul class="index">`, name, areaTitle(name))
		rest := rows[:0:0]
		for _, c := range rows {
			if c.area() != name {
				rest = append(rest, c)
				continue
			}
			p.add(`<li><a href="/docs/%s"><code>%s</code></a> <span>%s</span> <span class="tag">%s</span></li>`, c.id, c.id, c.summary, c.kind())
		}
		p.add(`</ul></section>`)
		rows = rest
	}
	s.addDocuments(&p, r, x)
	x.executed()
	s.servePage(w, r, &p)
}

// area is what stands before the dot of the id; operations are grouped by it.
func (c *capability) area() string {
	area, _, _ := strings.Cut(c.id, ".")
	return area
}

func areaTitle(area string) string { return strings.ToUpper(area[:1]) + area[1:] }

func (c *capability) kind() string {
	if c.command {
		return "command"
	}
	return "query"
}

// addDocuments lists the documents, those too that cannot be shown.
func (s *server) addDocuments(p *page, r *http.Request, x *exchange) {
	p.add(`<section><h2 id="documents">Documents of this repository</h2>`)
	defer p.add(`</section>`)
	if !s.documentsListed(r, x) {
		p.add(`<p class="notice">They are still being listed: reload this page in a moment.</p>`)
		return
	}
	how := "git tracks"
	if s.docs.mode == "filesystem" {
		how = "are in the file system"
	}
	p.add(`<p>README.md, AGENTS.md, CLAUDE.md and the Markdown under docs/, as far as they %s (<code>--discovery %s</code>), listed when this server started.</p>`, markup(strings.Replace(how, "git tracks", "are tracked by git", 1)), s.docs.mode)
	if s.docs.reason != "" {
		p.add(`<p class="notice warn">The list may be short: %s.</p>`, s.docs.reason)
	}
	if len(s.docs.list) == 0 {
		p.add(`<p class="none">There are none.</p>`)
		return
	}
	p.add(`<ul class="index">`)
	for _, e := range s.docs.list {
		if e.problem != "" {
			p.add(`<li><code class="unlinked">%s</code> <span class="bad">unreadable: %s</span></li>`, printable(e.path), e.problem)
			continue
		}
		p.add(`<li><a href="%s"><code>%s</code></a> <span>%s</span></li>`, documentURL(e.path), printable(e.path), e.title)
	}
	p.add(`</ul>`)
}

// serveReference is the page of one capability.
func (s *server) serveReference(w http.ResponseWriter, r *http.Request) {
	rows := capabilities()
	i := slices.IndexFunc(rows, func(c capability) bool { return c.id == r.PathValue("id") })
	if i < 0 {
		s.pageFailure(w, r, 404, "not_found", fmt.Sprintf("There is no capability %q", clip(r.PathValue("id"), 100)))
		return
	}
	c := &rows[i]
	p := page{title: c.id, section: "/docs/"}
	p.add(`<nav class="trail" aria-label="You are here"><a href="/docs/">Documentation</a> <a href="/docs/#area-%s">%s</a> <span aria-current="page">%s</span></nav>`, c.area(), areaTitle(c.area()), c.id)
	p.add(`<h1><code>%s</code> <span class="tag">%s</span></h1>`, c.id, c.kind())
	p.add(`<p class="lead">%s</p>`, c.summary)
	p.add(`<p class="measure">%s</p>`, ticked(c.description))
	p.addExposure(c)
	p.addPolicies(c)
	p.addType("Input", "input", schemas{input: true, described: true}, c.in)
	p.addType("Output", "output", schemas{described: true}, c.out)
	s.servePage(w, r, &p)
}

// ticked escapes a description and sets its backticked words as code.
func ticked(text string) markup {
	var b strings.Builder
	for i, part := range strings.Split(text, "`") {
		if i%2 == 1 {
			fmt.Fprintf(&b, "<code>%s</code>", escape(part))
		} else {
			b.WriteString(escape(part))
		}
	}
	return markup(b.String())
}

// addExposure says where the capability can be reached. What is absent gets a dash: absence is said, not left out.
func (p *page) addExposure(c *capability) {
	p.add(`<section><h2 id="exposure">Exposure</h2><p>Where this one definition can be reached. A dash: not there.</p>`)
	p.add(`<div class="table" tabindex="0"><table class="facts"><tr><th scope="col">surface</th><th scope="col">as</th></tr>`)
	cell := func(surface, value string, details ...any) {
		p.add(`<tr><th scope="row">%s</th><td>`, surface)
		if value == "" {
			p.add(`<span title="not there">—</span>`)
		} else {
			p.add(value, details...)
		}
		p.add(`</td></tr>`)
	}
	tool, route := "", ""
	if c.tool != "" {
		tool = `tool <code>%s</code>`
	}
	if c.path != "" {
		route = `<code>%s %s</code>, operationId <a href="/swagger#%s"><code>%s</code></a>`
	}
	cell("MCP", tool, c.tool)
	cell("HTTP", route, c.method, c.path, c.id, c.id)
	cell("command line", "")
	p.add(`</table></div></section>`)
}

func (p *page) addPolicies(c *capability) {
	p.add(`<section><h2 id="policies">Policies</h2><div class="table" tabindex="0"><table class="facts"><tr><th scope="col">policy</th><th scope="col">holds</th><th scope="col">which means</th></tr>`)
	answers := "the tool answers text and the value below"
	if c.tool == "" {
		answers = "there is no tool; the route answers the value below"
	}
	for _, policy := range []struct {
		name    string
		holds   bool
		yes, no string
	}{
		{"read-only", !c.command, "changes nothing", "changes state"},
		{"safe to repeat", c.idempotent, "a second call with the same arguments changes nothing more", "a second call does it again: look before you repeat one whose answer was lost"},
		{"destructive", c.destructive, "may end or overwrite what belongs to others", "ends and overwrites nothing of others"},
		{"may wait", c.mayWait, "may be held for a while before it answers", "answers as soon as it can"},
		{"needs the token", c.token, "the route wants Authorization: Bearer with the token of the lease file", "the route asks for no token"},
		{"text only", c.textOnly, "the tool answers text; the route answers the value below", answers},
	} {
		word, means := "no", policy.no
		if policy.holds {
			word, means = "yes", policy.yes
		}
		p.add(`<tr><th scope="row">%s</th><td>%s</td><td>%s</td></tr>`, policy.name, word, means)
	}
	p.add(`</table></div></section>`)
}

// addType shows a type as a table, the types within it each as one more, and all of it as JSON Schema.
func (p *page) addType(title, id string, s schemas, t reflect.Type) {
	p.add(`<section><h2 id="%s">%s <span class="tag">%s</span></h2>`, id, title, t.Name())
	if s.input && len(fieldsOf(t)) == 0 {
		p.add(`<p>No arguments.</p>`)
	}
	for i, u := range typesWithin(t) {
		if i > 0 {
			p.add(`<h3 id="%s-%s"><code>%s</code></h3>`, id, u.Name(), u.Name())
		}
		p.addFields(id, s, u)
	}
	var schema bytes.Buffer
	if err := json.Indent(&schema, mustJSON(s.of(t)), "", "  "); err != nil {
		panic(err)
	}
	p.add(`<details><summary>JSON Schema</summary><pre tabindex="0"><code>%s</code></pre></details></section>`, schema.String())
}

func (p *page) addFields(id string, s schemas, t reflect.Type) {
	fields := fieldsOf(t)
	if len(fields) == 0 {
		return
	}
	p.add(`<div class="table" tabindex="0"><table class="fields"><tr><th scope="col">property</th><th scope="col">type</th><th scope="col">required</th><th scope="col">description</th></tr>`)
	for _, f := range fields {
		required := "no"
		if s.input && f.required || !s.input && !f.optional {
			required = "yes"
		}
		p.add(`<tr><th scope="row"><code>%s</code></th><td>%s</td><td>%s</td><td>%s%s</td></tr>`,
			f.name, typeLink(id, f.typ), required, ticked(f.doc), f.rules(s.input))
	}
	p.add(`</table></div>`)
}

// rules says what the tags of a field say beside its description.
func (f *field) rules(input bool) markup {
	var p page
	if f.enum != nil {
		p.add(` <span class="rule">one of`)
		for i, word := range f.enum {
			p.add(`%s <code>%s</code>`, strings.Repeat(",", min(i, 1)), word)
		}
		p.add(`</span>`)
	}
	if input && f.fallback != nil {
		p.add(` <span class="rule">default <code>%s</code></span>`, fmt.Sprint(f.fallback))
	}
	if f.min != nil {
		p.add(` <span class="rule">at least <code>%s</code></span>`, fmt.Sprint(*f.min))
	}
	if f.max != nil {
		p.add(` <span class="rule">at most <code>%s</code></span>`, fmt.Sprint(*f.max))
	}
	return markup(p.body.String())
}

// typesWithin lists a struct and the structs that its fields lead to, each once.
func typesWithin(t reflect.Type) []reflect.Type {
	list := []reflect.Type{t}
	for i := 0; i < len(list); i++ {
		for _, f := range fieldsOf(list[i]) {
			if u := elementOf(f.typ); u.Kind() == reflect.Struct && !slices.Contains(list, u) {
				list = append(list, u)
			}
		}
	}
	return list
}

// elementOf is what pointers, lists and maps of a type hold in the end.
func elementOf(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
		if t == reflect.TypeFor[json.RawMessage]() {
			break
		}
		t = t.Elem()
	}
	return t
}

// typeLink names a type as the schema does, and leads to its table.
func typeLink(id string, t reflect.Type) markup {
	switch {
	case t.Kind() == reflect.Pointer:
		return typeLink(id, t.Elem())
	case t == reflect.TypeFor[json.RawMessage]() || t.Kind() == reflect.Interface:
		return "anything"
	case t.Kind() == reflect.Slice:
		return "list of " + typeLink(id, t.Elem())
	case t.Kind() == reflect.Map:
		return "object of " + typeLink(id, t.Elem())
	case t.Kind() == reflect.Struct:
		return markup(fmt.Sprintf(`<a href="#%s-%s">%s</a>`, id, escape(t.Name()), escape(t.Name())))
	}
	for _, member := range (schemas{}).of(t) {
		if word, ok := member.value.(string); ok && member.name == "type" {
			return markup(escape(word))
		}
	}
	return "anything"
}
