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
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/diff"
)

// TestCapabilities walks the table: what 20-mcp §6 and the routes ask of a row, and a line of description for every
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

func TestArguments(t *testing.T) {
	c := sampleRow("GET /api/v1/sample")
	full := func(change func(*sample)) sample {
		s := sample{Text: "x", View: "summary", Mine: true, Wait: 5}
		change(&s)
		return s
	}
	for _, test := range []struct {
		args string
		want sample
	}{
		{`{"text":"x"}`, full(func(s *sample) {})},
		{" {\r\n\"text\" : \"x\" ,\t\"paths\": [ ] } ", full(func(s *sample) { s.Paths = []string{} })},
		{`{"text":"","view":"full","mine":false,"wait":0,"small":-128,"least":-2,"paths":["a","ü\u0000"]}`, sample{"", "full", false, 0, -128, -2, []string{"a", "ü\x00"}, 0}},
		{`{"text":"x","view":null,"mine":null,"wait":null,"paths":null}`, full(func(s *sample) {})},
		{`{"text":"x","wait":3e2,"small":1.0}`, full(func(s *sample) { s.Wait, s.Small = 300, 1 })},
		{`{"t\u0065xt":"\ud800"}`, full(func(s *sample) { s.Text = "\ufffd" })},
	} {
		got, err := c.call(nil, t.Context(), json.RawMessage(test.args))
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %+v, %v; want %+v", test.args, got, err, test.want)
		}
	}
}

func TestArgumentsRefused(t *testing.T) {
	c := sampleRow("GET /api/v1/sample")
	const missing = `argument "text" is required and must be a string: any text`
	for _, test := range []struct{ args, want string }{
		{``, missing},
		{`null`, missing},
		{` { } `, missing},
		{`{"text":null}`, missing},
		{`[1]`, `the arguments must be an object, not an array`},
		{`"x"`, `the arguments must be an object, not the string "x"`},
		{`{"text":"x","Text":"y"}`, `unknown argument "Text": allowed are "text", "view", "mine", "wait", "small", "least" and "paths"`},
		{`{"text":"x","Hidden":1}`, `unknown argument "Hidden": allowed are "text", "view", "mine", "wait", "small", "least" and "paths"`},
		{`{"text":"x","t\u0065xt":"y"}`, `argument "text" is given more than once`},
		{`{"text":null,"text":"y"}`, `argument "text" is given more than once; ` + missing},
		{`{"text":7}`, `argument "text" must be a string, not the number 7`},
		{`{"text":"x","view":"all"}`, `argument "view" must be "summary" or "full", not the string "all"`},
		{`{"text":"x","mine":"true"}`, `argument "mine" must be true or false, not the string "true"`},
		{`{"text":"x","mine":0}`, `argument "mine" must be true or false, not the number 0`},
		{`{"text":"x","wait":301}`, `argument "wait" must be an integer from 0 to 300, not the number 301`},
		{`{"text":"x","wait":-1}`, `argument "wait" must be an integer from 0 to 300, not the number -1`},
		{`{"text":"x","wait":1.5}`, `argument "wait" must be an integer from 0 to 300, not the number 1.5`},
		{`{"text":"x","wait":"5"}`, `argument "wait" must be an integer from 0 to 300, not the string "5"`},
		{`{"text":"x","small":128}`, `argument "small" must be an integer, not the number 128`},
		{`{"text":"x","small":1e999}`, `argument "small" must be an integer, not the number 1e999`},
		{`{"text":"x","least":-3}`, `argument "least" must be an integer of at least -2, not the number -3`},
		{`{"text":"x","least":9007199254740994.0}`, `argument "least" must be an integer of at least -2, not the number 9007199254740994.0`},
		{`{"text":"x","paths":"a"}`, `argument "paths" must be an array of strings, not the string "a"`},
		{`{"text":"x","paths":{}}`, `argument "paths" must be an array of strings, not an object`},
		{`{"text":"x","paths":["a",null]}`, `argument "paths" must be an array of strings, not an array with null at [1]`},
		{`{"view":"all","x":1,"wait":true}`, `argument "view" must be "summary" or "full", not the string "all"; ` +
			`unknown argument "x": allowed are "text", "view", "mine", "wait", "small", "least" and "paths"; ` +
			`argument "wait" must be an integer from 0 to 300, not true; ` + missing},
		{`{"text":` + strings.Repeat("9", 100) + `}`, `argument "text" must be a string, not the number ` + strings.Repeat("9", 60) + "…"},
		{`{"text":"x","view":"` + strings.Repeat("é\\n", 100) + `"}`, `argument "view" must be "summary" or "full", not the string "` + strings.Repeat(`é\n`, 20) + `…"`},
	} {
		_, err := c.call(nil, t.Context(), json.RawMessage(test.args))
		if err == nil || asRefusal(err).code != "invalid_input" || err.Error() != test.want {
			t.Errorf("%s:\n got %v\nwant %s", test.args, err, test.want)
		}
	}
}

func TestArgumentsNotJSON(t *testing.T) {
	c := sampleRow("GET /api/v1/sample")
	for _, args := range []string{`{`, `{"text"}`, `{"text":"x",}`, `{"text":"x"} {}`, `{"text":"x"}x`, `{'text':1}`, `nul`, `[`, `0000`, "\v{}", "\u00a0", `{"text":01}`, `{1:2}`,
		`{"text":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + `}`} {
		_, err := c.call(nil, t.Context(), json.RawMessage(args))
		if err == nil || asRefusal(err).code != "invalid_json" {
			t.Errorf("%.40s: %v", args, err)
		}
	}
}

// A caller that is wrong all over gets an answer of bounded size.
func TestArgumentsManyProblems(t *testing.T) {
	var args []string
	for i := range 1000 {
		args = append(args, fmt.Sprintf(`"%s%d":%d`, strings.Repeat("k", 1000), i, i))
	}
	c := sampleRow("GET /api/v1/sample")
	_, err := c.call(nil, t.Context(), json.RawMessage("{"+strings.Join(args, ",")+"}"))
	if err == nil || len(err.Error()) > 2000 || !strings.HasSuffix(err.Error(), "; and 993 more") {
		t.Errorf("%v", err)
	}
}

func TestNoArguments(t *testing.T) {
	c := query("sample.none", "none", "GET /api/v1/none", "None.", "Use this never.",
		func(s *server, ctx context.Context, in struct{}) (struct{}, error) { return in, nil })
	for _, args := range []string{"", "{}", "null"} {
		if _, err := c.call(nil, t.Context(), json.RawMessage(args)); err != nil {
			t.Errorf("%q: %v", args, err)
		}
	}
	_, err := c.call(nil, t.Context(), json.RawMessage(`{"x":1}`))
	if err == nil || err.Error() != `unknown argument "x": none is allowed` {
		t.Error(err)
	}
	if got, want := string(mustJSON(inputSchema(c.in))), `{"type":"object","properties":{},"additionalProperties":false}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestQueryArguments(t *testing.T) {
	get, post := sampleRow("GET /api/v1/sample"), sampleRow("POST /api/v1/sample")
	for _, test := range []struct {
		c           *capability
		query, want string
	}{
		{&get, "", `{}`},
		{&get, "text=a%20%26b&mine=false&wait=007&view=full", `{"mine":false,"text":"a &b","view":"full","wait":7}`},
		{&get, "paths=a&paths=b", `{"paths":["a","b"]}`},
		{&get, "text=%ff", `{"text":"\ufffd"}`},
		{&get, "text=a&text=a", `parameter "text" is given more than once`},
		{&get, "View=full", `unknown parameter "View": allowed are "text", "view", "mine", "wait", "small", "least" and "paths"`},
		{&get, "view=", `parameter "view" must be "summary" or "full", not ""`},
		{&get, "wait=301&mine=1", `parameter "mine" must be true or false, not "1"; parameter "wait" must be an integer from 0 to 300, not "301"`},
		{&get, "wait=1.0", `parameter "wait" must be an integer from 0 to 300, not "1.0"`},
		{&post, "", `{}`},
		{&post, "text=a", `unknown parameter "text": none is allowed`},
	} {
		q, err := url.ParseQuery(test.query)
		if err != nil {
			t.Fatal(err)
		}
		args, err := queryArguments(test.c, q)
		got := string(args)
		if err != nil {
			got = err.Error()
			if asRefusal(err).code != "invalid_input" {
				t.Errorf("%s: code %s", test.query, asRefusal(err).code)
			}
		}
		if got != test.want {
			t.Errorf("%s:\n got %s\nwant %s", test.query, got, test.want)
		}
	}
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

// FuzzArguments holds the check of arguments against the schema that is handed out, and what is decoded against
// encoding/json.
func FuzzArguments(f *testing.F) {
	for _, seed := range []string{`{}`, `null`, `[]`, `{"text":"x"}`, `{"text":"a","view":"full","mine":false,"wait":300,"small":-1,"least":0,"paths":["a",""]}`,
		`{"Text":1}`, `{"text":"x","text":"y"}`, `{"text":"x","wait":1e2,"small":200}`, `{"text":"x","paths":[null]}`, `{"text":"x","wait":-0.0}`,
		`{"text":"\ud800","view":null}`, `{"text":"x","least":9007199254740993}`, ` { "text" : "\u00e9" } `, `{"text":"x"}}`} {
		f.Add([]byte(seed))
	}
	c := sampleRow("POST /api/v1/sample")
	var schema map[string]any
	if err := json.Unmarshal(mustJSON(inputSchema(c.in)), &schema); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, args []byte) {
		given := bytes.Clone(args)
		got, err := c.call(nil, t.Context(), args)
		if !bytes.Equal(args, given) {
			t.Fatal("the arguments were changed")
		}
		if err != nil {
			checkRefusal(t, err, len(bytes.Trim(args, " \t\r\n")) == 0 || json.Valid(args))
			if asRefusal(err).code == "invalid_json" || strings.Contains(err.Error(), "more than once") {
				return
			}
		}
		var value any
		if json.Unmarshal(args, &value) != nil || value == nil {
			value = map[string]any{}
		}
		if o, ok := value.(map[string]any); ok {
			maps.DeleteFunc(o, func(name string, v any) bool { return v == nil && schema["properties"].(map[string]any)[name] != nil })
		}
		bad := againstSchema(schema, value, "arguments")
		if (bad == nil) != (err == nil) && (err == nil || !strings.Contains(err.Error(), "an integer")) {
			t.Fatalf("the schema says %v, the check says %v", bad, err) // only the check knows the range of an int8
		}
		if err != nil {
			return
		}
		again, err := c.call(nil, t.Context(), mustJSON(got))
		if err != nil || !reflect.DeepEqual(again, got) {
			t.Fatalf("%s became %+v, then %+v, %v", args, got, again, err)
		}
		std := c.plan().defaults.Interface().(sample)
		if json.Unmarshal(args, &std) == nil && !reflect.DeepEqual(std, got) {
			t.Fatalf("%s is %+v, encoding/json has %+v", args, got, std)
		}
	})
}

// checkRefusal wants something named, in bounded space, in clean text.
func checkRefusal(t *testing.T, err error, wellFormed bool) {
	t.Helper()
	r := asRefusal(err)
	want := "invalid_json"
	if wellFormed {
		want = "invalid_input"
	}
	named := strings.Contains(r.message, `"`) || strings.Contains(r.message, "the arguments")
	if r.code != want || !named || len(r.message) > 4000 || !utf8.ValidString(r.message) || strings.ContainsAny(r.message, "\n\x00") {
		t.Fatalf("%s: %q", r.code, r.message)
	}
}

func FuzzQuery(f *testing.F) {
	for _, seed := range []string{"", "text=x", "text=x&view=full&mine=true&wait=3&small=1&least=-2&paths=a&paths=b", "text=x&text=y", "Text=x", "wait=+5", "wait=1e2", "mine=TRUE", "paths", "text=%00%ff", "a=1&b=2"} {
		f.Add(seed)
	}
	c := sampleRow("GET /api/v1/sample")
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		args, err := queryArguments(&c, q)
		if err != nil {
			checkRefusal(t, err, true)
			return
		}
		out, err := c.call(nil, t.Context(), args)
		if err != nil { // nothing but what is missing may be left for call to find
			if q.Has("text") {
				t.Fatalf("%s gave %s, then %v", query, args, err)
			}
			return
		}
		got := out.(sample)
		for name, values := range q {
			back := map[string]string{"text": got.Text, "view": string(got.View), "mine": strconv.FormatBool(got.Mine), "paths": strings.Join(got.Paths, "\x00"),
				"wait": strconv.Itoa(got.Wait), "small": strconv.Itoa(int(got.Small)), "least": strconv.Itoa(got.Least)}[name]
			want := string([]rune(strings.Join(values, "\x00"))) // each bad byte becomes U+FFFD
			if n, err := strconv.Atoi(want); err == nil && name != "text" && name != "paths" {
				want = strconv.Itoa(n)
			}
			if back != want {
				t.Fatalf("%s: %s came back as %q", query, name, back)
			}
		}
	})
}

func BenchmarkCapabilities(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		capabilities()
	}
}

func BenchmarkArguments(b *testing.B) {
	echo := sampleRow("POST /api/v1/sample")
	for _, bench := range []struct {
		c    *capability
		args string
	}{
		{&capabilities()[0], `{}`},
		{&echo, `{"text":"fix the parser","paths":["cmd/parse","docs"],"wait":30}`},
	} {
		b.Run(bench.c.tool, func(b *testing.B) {
			p, v := bench.c.plan(), reflect.New(bench.c.in).Elem()
			b.ReportAllocs()
			for b.Loop() {
				if err := p.decode(json.RawMessage(bench.args), v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
