package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/diff"
)

// TestCapabilities walks the table: what tools and routes ask of a row, and a line of description for every
// field that a row's types bring along.
func TestCapabilities(t *testing.T) {
	var mux http.ServeMux // panics when two routes meet
	seen := make(map[string]string)
	unique := func(id, what string) {
		if other, ok := seen[what]; ok {
			t.Errorf("%s: %s is already that of %s", id, what, other)
		}
		seen[what] = id
	}
	for _, c := range capabilities() {
		unique(c.id, "id "+c.id)
		if c.tool != "" {
			unique(c.id, "tool "+c.tool)
		}
		unique(c.id, "title "+c.title)
		mux.HandleFunc(c.method+" "+c.path, func(http.ResponseWriter, *http.Request) {})
		checkRow(t, &c)
		checkFields(t, c.in, make(map[reflect.Type]bool))
		checkFields(t, c.out, make(map[reflect.Type]bool))
	}
}

func checkRow(t *testing.T, c *capability) {
	for _, rule := range []struct{ what, value, pattern string }{
		{"id", c.id, `^[a-z]+\.[a-z]+$`},
		{"tool", c.tool, `^[a-zA-Z0-9_-]{0,40}$`},
		{"method", c.method, `^(GET|POST)$`},
		{"path", c.path, `^/api/v1(/[a-z]+)+$`},
		{"summary", c.summary, `^[A-Z][^\n]{1,78}\.$`},
		{"description", c.description, `^Use this [^\n]+\.$`},
	} {
		if !regexp.MustCompile(rule.pattern).MatchString(rule.value) {
			t.Errorf("%s: %s %q does not match %s", c.id, rule.what, rule.value, rule.pattern)
		}
	}
	if n := len(c.description); n > 2000 {
		t.Errorf("%s: description has %d bytes, clients cut it at 2,000", c.id, n)
	}
	if !c.command && (c.destructive || !c.idempotent || c.method != http.MethodGet) {
		t.Errorf("%s: a query is called by GET, may be repeated and destroys nothing", c.id)
	}
	if c.command && c.method != http.MethodPost {
		t.Errorf("%s: a command is called by POST", c.id)
	}
	c.plan() // panics when the input holds what no argument may be
}

func checkFields(t *testing.T, typ reflect.Type, seen map[reflect.Type]bool) {
	for typ.Kind() != reflect.Struct {
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			typ = typ.Elem()
		default:
			return
		}
	}
	if seen[typ] {
		return
	}
	seen[typ] = true
	names := make(map[string]bool)
	for _, f := range fieldsOf(typ) {
		if !regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`).MatchString(f.name) || names[f.name] {
			t.Errorf("%v: property %q is there twice, or is not written so", typ, f.name)
		}
		names[f.name] = true
		if f.typ.Kind() == reflect.Pointer && !strings.Contains(typ.FieldByIndex(f.index).Tag.Get("json"), ",omit") {
			t.Errorf("%v.%s would be written as null, which its schema does not allow: add omitzero", typ, f.name)
		}
		if f.doc != strings.TrimSpace(f.doc) || f.doc == "" || len(f.doc) > 300 || strings.ContainsAny(f.doc, "\n\t") {
			t.Errorf("%v.%s: doc %q is not one line", typ, f.name, f.doc)
		}
		checkFields(t, f.typ, seen)
	}
}

func TestToolsList(t *testing.T) {
	list := toolsList()
	var answer struct {
		Tools []struct {
			Name, Title, Description  string
			InputSchema, OutputSchema json.RawMessage
			Annotations               map[string]bool
		}
	}
	if err := json.Unmarshal(list, &answer); err != nil {
		t.Fatal(err)
	}
	rows := slices.DeleteFunc(capabilities(), func(c capability) bool { return c.tool == "" })
	if len(answer.Tools) != len(rows) {
		t.Fatalf("%d tools for %d capabilities", len(answer.Tools), len(rows))
	}
	model := 0
	for i, tool := range answer.Tools {
		c := rows[i]
		model += len(tool.Name) + len(tool.Title) + len(tool.Description) + len(tool.InputSchema)
		want := map[string]bool{"readOnlyHint": !c.command, "destructiveHint": c.destructive, "idempotentHint": c.idempotent, "openWorldHint": false}
		if tool.Name != c.tool || !maps.Equal(tool.Annotations, want) {
			t.Errorf("%s: %+v", c.id, tool)
		}
		if (tool.OutputSchema == nil) != c.textOnly {
			t.Errorf("%s: structure is declared by an outputSchema, text is not", c.id)
		}
		for _, word := range []string{`"$ref"`, `"oneOf"`, `"anyOf"`, `"allOf"`, `"format"`, `"type":[`} {
			if bytes.Contains(list, []byte(word)) {
				t.Errorf("%s is not understood by every client", word)
			}
		}
		if !bytes.HasPrefix(tool.InputSchema, []byte(`{"type":"object","properties":{`)) || !bytes.HasSuffix(tool.InputSchema, []byte(`"additionalProperties":false}`)) {
			t.Errorf("%s: inputSchema %s", c.id, tool.InputSchema)
		}
	}
	t.Logf("%d tools: %d bytes, of which a model sees %d", len(rows), len(list), model)
	if model >= 12<<10 || len(list) >= 24<<10 {
		t.Errorf("%d bytes for the model (limit 12 KiB), %d in all (limit 24 KiB)", model, len(list))
	}
	var again []object
	for _, c := range rows {
		again = append(again, c.describeTool())
	}
	if !bytes.Equal(mustJSON(object{{"tools", again}}), list) {
		t.Error("the list differs when made again")
	}
}

// update also makes scenarios accept what they get, see script_test.go.
var update = flag.Bool("update", false, "accept the answers of this run as the expected ones")

// TestOpenAPI keeps the checked-in openapi.json in step with the table.
func TestOpenAPI(t *testing.T) {
	const file = "openapi.json"
	want := renderOpenAPI()
	if *update {
		if err := os.WriteFile(file, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
	}
	if !bytes.Equal(have, want) {
		t.Errorf("%s is not what the table says:\n%s\nto accept it: go test -run OpenAPI -update .", file, diff.Diff(file, have, "the table", want))
	}
}

// sample has every kind an argument may be, and one of each rule.
type sample struct {
	Text   string     `json:"text" doc:"any text" required:"true"`
	View   sampleView `json:"view" doc:"how much" enum:"summary,full" default:"summary"`
	Mine   bool       `json:"mine" doc:"only mine" default:"true"`
	Wait   int        `json:"wait" doc:"how long" default:"5" min:"0" max:"300"`
	Small  int8       `json:"small" doc:"bounded by its type"`
	Least  int        `json:"least" doc:"bounded below" min:"-2"`
	Paths  []string   `json:"paths" doc:"where"`
	Hidden int        `json:"-"`
}

type sampleView string

type sampleOutput struct {
	sampleBase
	Next   *sampleNode     `json:"next" doc:"may be absent"`
	Counts map[string]int  `json:"counts,omitempty" doc:"counted"`
	Raw    json.RawMessage `json:"raw,omitzero" doc:"anything"`
	Size   uint32          `json:"size" doc:"not negative"`
}

type sampleBase struct {
	ID string `json:"id" doc:"which <one> & only"`
}

type sampleNode struct {
	Next *sampleNode `json:"next" doc:"holds itself"`
	Load float64     `json:"load" doc:"a fraction"`
}

func sampleRow(route string, marks ...mark) capability {
	make := query[sample, sample]
	if strings.HasPrefix(route, "POST") {
		make = command[sample, sample]
	}
	return make("sample.echo", "echo", route, "Echo.", "Use this never.",
		func(s *server, ctx context.Context, in sample) (sample, error) { return in, nil }, marks...)
}

func TestSchemas(t *testing.T) {
	for _, test := range []struct {
		schema object
		want   string
	}{
		{inputSchema(reflect.TypeFor[sample]()), `{"type":"object","properties":{` +
			`"text":{"type":"string","description":"any text"},` +
			`"view":{"type":"string","description":"how much","enum":["summary","full"],"default":"summary"},` +
			`"mine":{"type":"boolean","description":"only mine","default":true},` +
			`"wait":{"type":"integer","description":"how long","default":5,"minimum":0,"maximum":300},` +
			`"small":{"type":"integer","description":"bounded by its type"},` +
			`"least":{"type":"integer","description":"bounded below","minimum":-2},` +
			`"paths":{"type":"array","items":{"type":"string"},"description":"where"}},` +
			`"required":["text"],"additionalProperties":false}`},
		{outputSchema(reflect.TypeFor[struct {
			sampleBase
			Counts map[string]int  `json:"counts,omitempty"`
			Raw    json.RawMessage `json:"raw"`
			Any    any             `json:"any,omitzero"`
			Sizes  []*uint8        `json:"sizes"`
			Deep   *struct {
				Load float64 `json:"load"`
			} `json:"deep"`
			Skip int `json:"-"`
		}]()), `{"type":"object","properties":{` +
			`"id":{"type":"string"},"counts":{"type":"object","additionalProperties":{"type":"integer"}},"raw":{},"any":{},` +
			`"sizes":{"type":"array","items":{"type":"integer","minimum":0}},` +
			`"deep":{"type":"object","properties":{"load":{"type":"number"}}}},` +
			`"required":["id","raw","sizes"]}`},
	} {
		if got := string(mustJSON(test.schema)); got != test.want {
			t.Errorf("\n got %s\nwant %s", got, test.want)
		}
	}
}

// A component holds itself, a name is embedded, and a route wants the token: none of it is in the table yet.
func TestOpenAPIComponents(t *testing.T) {
	echo := command("sample.echo", "echo", "POST /api/v1/sample", "Echo.", "Use this <never> & so on.",
		func(s *server, ctx context.Context, in sample) (sampleOutput, error) { return sampleOutput{}, nil }, needsToken)
	var doc struct {
		Paths map[string]map[string]struct {
			Security    []map[string][]string
			RequestBody struct{ Required bool }
		}
		Components struct{ Schemas, Responses, SecuritySchemes map[string]json.RawMessage }
	}
	text := openAPI([]capability{sampleRow("GET /api/v1/sample"), echo})
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	op := doc.Paths["/api/v1/sample"]["post"]
	if len(op.Security) != 1 || !op.RequestBody.Required || doc.Components.SecuritySchemes["token"] == nil {
		t.Errorf("%+v", op)
	}
	if len(doc.Paths["/api/v1/sample"]) != 2 || doc.Paths["/api/v1/sample"]["get"].Security != nil {
		t.Errorf("%+v", doc.Paths)
	}
	for _, name := range []string{"sample", "sampleOutput", "sampleNode", "errorAnswer", "errorDetail"} {
		if doc.Components.Schemas[name] == nil {
			t.Errorf("no component %s in %s", name, text)
		}
	}
	for _, part := range []string{`"which <one> & only"`, `"$ref": "#/components/schemas/sampleNode"`, "session_required (400)"} {
		if !bytes.Contains(text, []byte(part)) {
			t.Errorf("no %s in %s", part, text)
		}
	}
	if bytes.Contains(text, []byte("sampleBase")) {
		t.Error("an embedded struct is not a type of its own")
	}
}

// What cannot be an argument, or has no schema, must not wait for a client to be found.
func TestBrokenTypes(t *testing.T) {
	type nested struct {
		A struct{} `json:"a"`
	}
	type numbers struct {
		A []int `json:"a"`
	}
	type unnamed struct{ A string }
	type badDefault struct {
		A int `json:"a" default:"x"`
	}
	type badBound struct {
		A int `json:"a" min:"x"`
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[nested](), reflect.TypeFor[numbers](), reflect.TypeFor[unnamed](), reflect.TypeFor[badDefault](), reflect.TypeFor[badBound]()} {
		mustPanic(t, typ.Name(), func() { planOf(typ) })
	}
	mustPanic(t, "chan", func() { outputSchema(reflect.TypeFor[chan int]()) })
	mustPanic(t, "regexp.Regexp", func() { outputSchema(reflect.TypeFor[*regexp.Regexp]()) })
}

func mustPanic(t *testing.T, name string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s: no panic", name)
		}
	}()
	f()
}

func TestRefusals(t *testing.T) {
	wrapped := fmt.Errorf("asking: %w", refuse("ambiguous", "%q is two peers", "a"))
	for _, test := range []struct {
		err           error
		code, message string
		status        int
	}{
		{refuse("refused", "100%% sure"), "refused", "100% sure", 422},
		{wrapped, "ambiguous", `"a" is two peers`, 409},
		{fmt.Errorf("x: %w", errLeaseLost), "lease_lost", "this server has handed its checkout on; ask the next one", 409},
		{errors.New("token 0123"), "internal", "something failed inside the server; its log on stderr says what", 500},
		{refuse("invented", "x"), "invented", "x", 500},
	} {
		r := asRefusal(test.err)
		if r.code != test.code || r.message != test.message || httpStatus(r.code) != test.status {
			t.Errorf("%v: %+v %d", test.err, r, httpStatus(r.code))
		}
	}
	if asRefusal(nil) != nil {
		t.Error("nil is no refusal")
	}
}

// againstSchema holds a value, as encoding/json decodes it, against a schema of the kind made here. It knows the few
// words of JSON Schema that are used; a word it does not know is an error.
func againstSchema(schema map[string]any, value any, at string) error {
	for word := range schema {
		switch word {
		case "type", "properties", "required", "additionalProperties", "items", "enum", "minimum", "maximum", "description", "default":
		default:
			return fmt.Errorf("%s: unknown word %s", at, word)
		}
	}
	if enum, ok := schema["enum"].([]any); ok && !slices.Contains(enum, value) {
		return fmt.Errorf("%s: %v is not in %v", at, value, enum)
	}
	ok := schema["type"] == nil
	switch v := value.(type) {
	case string:
		ok = ok || schema["type"] == "string"
	case bool:
		ok = ok || schema["type"] == "boolean"
	case float64:
		ok = ok || schema["type"] == "number" || schema["type"] == "integer" && v == math.Trunc(v)
		if least, is := schema["minimum"].(float64); is && v < least {
			ok = false
		}
		if most, is := schema["maximum"].(float64); is && v > most {
			ok = false
		}
	case []any:
		ok = ok || schema["type"] == "array"
		items, _ := schema["items"].(map[string]any)
		for i, e := range v {
			if err := againstSchema(items, e, fmt.Sprintf("%s[%d]", at, i)); err != nil {
				return err
			}
		}
	case map[string]any:
		ok = ok || schema["type"] == "object"
		if err := membersAgainstSchema(schema, v, at); err != nil {
			return err
		}
	}
	if !ok {
		return fmt.Errorf("%s: %v does not match %v", at, value, schema)
	}
	return nil
}

func membersAgainstSchema(schema, value map[string]any, at string) error {
	required, _ := schema["required"].([]any)
	for _, name := range required {
		if _, ok := value[name.(string)]; !ok {
			return fmt.Errorf("%s: %v is missing", at, name)
		}
	}
	properties, _ := schema["properties"].(map[string]any)
	for name, v := range value {
		s, ok := properties[name].(map[string]any)
		if !ok {
			s, ok = schema["additionalProperties"].(map[string]any)
		}
		if !ok && schema["additionalProperties"] == false {
			return fmt.Errorf("%s: %s is not allowed", at, name)
		}
		if err := againstSchema(s, v, at+"."+name); err != nil {
			return err
		}
	}
	return nil
}

func BenchmarkCapabilities(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		capabilities()
	}
}
