package main

// The documents that are derived from the table: JSON Schemas of the input and output types, tools/list, openapi.json.
//
// Clients differ in what they take, so a schema says only what all of them understand: one type a property, no
// references outside openapi.json, no formats, no unions. Properties stand in the order of the struct's fields, and
// the same program makes the same bytes, always: clients cache them.

import (
	"bytes"
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// field is one property of an input or output type, as its Go type and its tags declare it:
//
//	json:"view"        its name; omitempty, omitzero or a pointer type make it optional in an output
//	doc:"one line"     for people and models
//	enum:"a,b"         the words a string may be
//	default:"a"        what an absent argument counts as
//	min:"0" max:"300"  bounds of an integer
//	required:"true"    the argument must be given
type field struct {
	name     string
	index    []int // where it is, through embedded structs
	typ      reflect.Type
	doc      string
	enum     []string
	fallback any // string, bool or int64; nil when there is no default
	min, max *int64
	required bool // as an argument
	optional bool // in an output
}

// fieldsOf lists the properties that encoding/json would write for t, those of embedded structs in their place. A field
// without a json name panics: it would go out under its Go name, which nobody chose.
func fieldsOf(t reflect.Type) []field {
	var fields []field
	for i := range t.NumField() {
		sf := t.Field(i)
		name, options, _ := strings.Cut(sf.Tag.Get("json"), ",")
		switch {
		case sf.Anonymous && name == "":
			for _, f := range fieldsOf(sf.Type) {
				f.index = append([]int{i}, f.index...)
				fields = append(fields, f)
			}
		case !sf.IsExported() || name == "-":
		case name == "":
			panic(fmt.Sprintf("%v.%s has no json name", t, sf.Name))
		default:
			fields = append(fields, fieldOf(sf, name, options))
		}
	}
	return fields
}

// fieldOf reads the tags. What they say wrongly panics: a default that does not parse would be no default, silently.
func fieldOf(sf reflect.StructField, name, options string) field {
	f := field{name: name, index: sf.Index, typ: sf.Type, doc: sf.Tag.Get("doc")}
	if enum, ok := sf.Tag.Lookup("enum"); ok {
		f.enum = strings.Split(enum, ",")
	}
	if text, ok := sf.Tag.Lookup("default"); ok {
		f.fallback = f.parseDefault(text)
	}
	f.min, f.max = bound(sf, "min"), bound(sf, "max")
	f.required = sf.Tag.Get("required") == "true"
	f.optional = sf.Type.Kind() == reflect.Pointer || strings.Contains(options, "omit")
	return f
}

func (f *field) parseDefault(text string) any {
	switch f.kind() {
	case reflect.String:
		return text
	case reflect.Bool:
		return text == "true"
	case reflect.Int64:
		n, err := strconv.ParseInt(text, 10, 64)
		if err == nil {
			return n
		}
	}
	panic(fmt.Sprintf("%s: %q is no default for a %v", f.name, text, f.typ))
}

func bound(sf reflect.StructField, tag string) *int64 {
	text, ok := sf.Tag.Lookup(tag)
	if !ok {
		return nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic(fmt.Sprintf("%s: %s is %q", sf.Name, tag, text))
	}
	return &n
}

// object is a JSON object whose members keep their order. A map would sort them, and a model reads the first property
// first.
type object []pair

type pair struct {
	name  string
	value any
}

func (o object) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, m := range o {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, mustJSON(m.name)...)
		b = append(b, ':')
		b = append(b, mustJSON(m.value)...)
	}
	return append(b, '}'), nil
}

// schemas makes JSON Schemas of Go types, in one of three ways: for a tool's input, for its output, for openapi.json.
type schemas struct {
	input      bool           // of arguments: nothing else is allowed, and required is what is tagged so
	described  bool           // with descriptions
	lean       bool           // nothing is required below the first level
	nested     bool           // this is below the first level
	components map[string]any // where named structs are put to be referred to; nil: everything in its place
}

// inputSchema is what a model reads before it calls.
func inputSchema(t reflect.Type) object { return schemas{input: true, described: true}.of(t) }

// outputSchema has no descriptions: clients check answers by it, and hardly any shows it to its model. Below the first
// level it requires nothing, because the list of all tools has a limit; openapi.json says it all.
func outputSchema(t reflect.Type) object { return schemas{lean: true}.of(t) }

// of makes the schema of any type a property may have. A pointer has the schema of what it points to, because optional
// means absent here and never null; what may be anything has the empty schema.
func (s schemas) of(t reflect.Type) object {
	switch t.Kind() {
	case reflect.Pointer:
		return s.of(t.Elem())
	case reflect.String:
		return object{{"type", "string"}}
	case reflect.Bool:
		return object{{"type", "boolean"}}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return object{{"type", "integer"}}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return object{{"type", "integer"}, {"minimum", 0}}
	case reflect.Float32, reflect.Float64:
		return object{{"type", "number"}}
	case reflect.Map:
		return object{{"type", "object"}, {"additionalProperties", s.of(t.Elem())}}
	case reflect.Interface:
		return object{}
	case reflect.Slice:
		if t == reflect.TypeFor[json.RawMessage]() {
			return object{}
		}
		return object{{"type", "array"}, {"items", s.of(t.Elem())}}
	case reflect.Struct:
		return s.structure(t)
	}
	panic(fmt.Sprintf("no schema for %v", t))
}

// structure refers to a named struct where there is a place for it. One that writes itself would write something else
// than its fields say, so it panics rather than being described falsely.
func (s schemas) structure(t reflect.Type) object {
	p := reflect.PointerTo(t) // has the methods of t too
	if p.Implements(reflect.TypeFor[json.Marshaler]()) || p.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
		panic(fmt.Sprintf("no schema for %v: it writes itself", t))
	}
	if s.components == nil || t.Name() == "" {
		return s.inPlace(t)
	}
	if _, ok := s.components[t.Name()]; !ok {
		s.components[t.Name()] = nil // taken, so that a type that holds itself ends here
		s.components[t.Name()] = s.inPlace(t)
	}
	return object{{"$ref", "#/components/schemas/" + t.Name()}}
}

// inPlace leaves outputs open: a server of a later version may add a property, and one of this version must not fail
// the client's check for it. Inputs are closed, because a misspelt argument must not pass for one left out.
func (s schemas) inPlace(t reflect.Type) object {
	properties := object{} // written even when there are none: some clients insist
	var required []string
	below := s
	below.nested = true
	for _, f := range fieldsOf(t) {
		properties = append(properties, pair{f.name, below.property(f)})
		if s.input && f.required || !s.input && !f.optional {
			required = append(required, f.name)
		}
	}
	o := object{{"type", "object"}, {"properties", properties}}
	if required != nil && !(s.lean && s.nested) {
		o = append(o, pair{"required", required})
	}
	if s.input {
		o = append(o, pair{"additionalProperties", false})
	}
	return o
}

// property adds what the tags say to the schema of the type. An output declares no default: what is absent there is
// absent.
func (s schemas) property(f field) object {
	o := s.of(f.typ)
	if s.described {
		o = append(o, pair{"description", f.doc})
	}
	if f.enum != nil {
		o = append(o, pair{"enum", f.enum})
	}
	if s.input && f.fallback != nil {
		o = append(o, pair{"default", f.fallback})
	}
	if f.min != nil {
		o = append(o, pair{"minimum", *f.min})
	}
	if f.max != nil {
		o = append(o, pair{"maximum", *f.max})
	}
	return o
}

var tools struct {
	once sync.Once
	list json.RawMessage
}

// toolsList is the result of tools/list, made on first use. Callers must not change it. It is not a variable set by
// sync.OnceValue: through the table that would refer to the handlers, and they might come to refer to it.
func toolsList() json.RawMessage {
	tools.once.Do(func() {
		var list []object
		for _, c := range capabilities() {
			if c.tool != "" {
				list = append(list, c.describeTool())
			}
		}
		tools.list = mustJSON(object{{"tools", list}})
	})
	return tools.list
}

// describeTool gives all four annotations, since a client that finds one missing takes it for the worse of the two.
func (c *capability) describeTool() object {
	o := object{
		{"name", c.tool},
		{"title", c.title},
		{"description", c.description},
		{"inputSchema", inputSchema(c.in)},
	}
	if !c.textOnly {
		o = append(o, pair{"outputSchema", withInboxSchema(outputSchema(c.out))})
	}
	return append(o, pair{"annotations", object{
		{"readOnlyHint", !c.command},
		{"destructiveHint", c.destructive},
		{"idempotentHint", c.idempotent},
		{"openWorldHint", false}, // nothing here reaches beyond the repository and its peers
	}})
}

// withInboxSchema adds the messages that may ride on the answer of any tool: withInbox puts them there.
func withInboxSchema(o object) object {
	properties := o[1].value.(object)
	o[1].value = append(slices.Clip(properties), pair{"inbox", object{{"type", "array"}, {"items", object{{"type", "object"}}}}})
	return o
}

// renderOpenAPI makes openapi.json, which is checked in, embedded and served as it is; TestOpenAPI keeps it in step.
func renderOpenAPI() []byte { return openAPI(capabilities()) }

// openAPI sorts paths and components by name, so that a row that moves in the table changes nothing here.
func openAPI(rows []capability) []byte {
	components := make(map[string]any) // maps are written sorted
	paths := make(map[string]map[string]object)
	token := false
	for _, c := range rows {
		if paths[c.path] == nil {
			paths[c.path] = make(map[string]object)
		}
		paths[c.path][strings.ToLower(c.method)] = c.operation(components)
		token = token || c.token
	}
	shared := object{
		{"responses", object{{"error", errorResponse(components)}}},
		{"schemas", components},
	}
	if token {
		shared = append(shared, pair{"securitySchemes", object{{"token", object{
			{"type", "http"},
			{"scheme", "bearer"},
			{"description", "The token in .ai/local/state/mcp/server.json of the checkout, which only its owner can read."},
		}}}})
	}
	doc := object{
		{"openapi", "3.1.0"},
		{"info", object{
			{"title", "majordomus"},
			{"description", "Who works on this repository, and on what: the server of one checkout, on loopback. MCP is spoken at /mcp."},
			{"version", "1"}, // of this interface: the program's own would change the file with every build
		}},
		{"paths", paths},
		{"components", shared},
	}
	var b bytes.Buffer
	if err := json.Indent(&b, mustJSON(doc), "", "  "); err != nil {
		panic(err)
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// operation is what openapi.json says of one row; the named types it meets go into components.
func (c *capability) operation(components map[string]any) object {
	area, _, _ := strings.Cut(c.id, ".")
	o := object{
		{"operationId", c.id},
		{"tags", []string{area}},
		{"summary", c.summary},
		{"description", c.description},
	}
	in := schemas{input: true, described: true, components: components}
	if fields := fieldsOf(c.in); c.method == "GET" {
		if len(fields) > 0 {
			o = append(o, pair{"parameters", in.parameters(fields)})
		}
	} else {
		o = append(o, pair{"requestBody", object{
			{"required", slices.ContainsFunc(fields, func(f field) bool { return f.required })},
			{"content", jsonContent(in.of(c.in))},
		}})
	}
	if c.token {
		o = append(o, pair{"security", []object{{{"token", []string{}}}}})
	}
	out := schemas{described: true, components: components}
	return append(o, pair{"responses", object{
		{"200", object{{"description", "The answer."}, {"content", jsonContent(out.of(c.out))}}},
		{"default", object{{"$ref", "#/components/responses/error"}}},
	}})
}

// parameters puts the description beside the schema, where tools that render OpenAPI look for it.
func (s schemas) parameters(fields []field) []object {
	var list []object
	for _, f := range fields {
		o := object{{"name", f.name}, {"in", "query"}, {"description", f.doc}}
		if f.required {
			o = append(o, pair{"required", true})
		}
		list = append(list, append(o, pair{"schema", schemas{input: true}.property(f)}))
	}
	return list
}

// errorResponse stands for every status but 200, with the words that each may carry.
func errorResponse(components map[string]any) object {
	var words []string
	for _, c := range codes {
		words = append(words, fmt.Sprintf("%s (%d)", c.code, c.status))
	}
	s := schemas{described: true, components: components}.of(reflect.TypeFor[errorAnswer]())
	return object{
		{"description", "What went wrong, in a word: " + strings.Join(words, ", ") + "."},
		{"content", jsonContent(s)},
	}
}

func jsonContent(schema object) object {
	return object{{"application/json", object{{"schema", schema}}}}
}
