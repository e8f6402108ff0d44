package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

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
