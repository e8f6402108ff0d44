package main

// What a caller gave, held against the input type of a capability: the arguments of a tool call or the body of a
// POST, which are JSON, and the parameters of a GET, which are text.
//
// What passes here is what the schema of the same type promises (FuzzArguments holds one against the other), with two
// additions: no key may come twice, and null for an optional argument is as good as leaving it out, since some
// clients fill in every property they know. Nothing is guessed: "5" is no number, 1 is not true, and a key that
// differs by case is unknown. A value that was bent into shape would make a call other than the one meant.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// plan is what a call needs to know of its input type, looked up once.
type plan struct {
	fields   []field
	allowed  string        // the names of the fields, as a message lists them; "" when there are none
	defaults reflect.Value // an input as it is when nothing is given
}

// planOf panics when the type holds what no argument may be: the table is broken then, and every test says so.
func planOf(t reflect.Type) *plan {
	p := &plan{fields: fieldsOf(t), defaults: reflect.New(t).Elem()}
	names := make([]string, len(p.fields))
	for i := range p.fields {
		f := &p.fields[i]
		names[i] = f.name
		v := p.defaults.FieldByIndex(f.index)
		switch {
		case f.kind() == reflect.Invalid:
			panic(fmt.Sprintf("%v.%s: an argument cannot be a %v", t, f.name, f.typ))
		case f.fallback != nil:
			v.Set(reflect.ValueOf(f.fallback).Convert(f.typ))
		}
	}
	p.allowed = quoted(names, "and")
	return p
}

// kind is String, Bool, Int64 (any signed integer), Slice (of strings) or, for what no argument may be, Invalid.
func (f *field) kind() reflect.Kind {
	switch k := f.typ.Kind(); k {
	case reflect.String, reflect.Bool:
		return k
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return reflect.Int64
	case reflect.Slice:
		if f.typ.Elem().Kind() == reflect.String {
			return k
		}
	}
	return reflect.Invalid
}

// find is a walk and no map: an input has a handful of fields. It returns -1 when there is no such field.
func (p *plan) find(name string) int {
	return slices.IndexFunc(p.fields, func(f field) bool { return f.name == name })
}

// decode reads args into v, an input. Keys count by exact case, a null argument is an absent one, and absent ones
// take their defaults. It names every problem at once: a model that learns of one mistake a call gives up.
func (p *plan) decode(args json.RawMessage, v reflect.Value) error {
	v.Set(p.defaults)
	c := check{plan: p, noun: "argument", given: make([]bool, len(p.fields))}
	args = bytes.Trim(args, " \t\r\n") // what JSON calls blank; TrimSpace takes more
	switch {
	case len(args) == 0 || string(args) == "{}" || string(args) == "null":
	case args[0] == '{':
		if err := c.object(args, v); err != nil {
			return refuse("invalid_json", "the arguments are not valid JSON: %v", err)
		}
	case json.Valid(args):
		return refuse("invalid_input", "the arguments must be an object, not %s", show(args))
	default:
		return refuse("invalid_json", "the arguments are not valid JSON: they begin with %s", quote(string(args)))
	}
	c.missing()
	return c.verdict()
}

// check is one reading of arguments or parameters: what was given so far, and what was wrong with it.
type check struct {
	*plan
	noun     string // "argument" or "parameter"
	seen     []int  // fields that were named, null or not
	given    []bool // by field: it has a value, good or bad
	problems []string
	more     int // problems beyond maxProblems
}

// maxProblems bounds what is said of arguments that are wrong all over.
const maxProblems = 8

// problem counts when it no longer notes, so that four megabytes of nonsense cost no more text than nine mistakes.
func (c *check) problem(format string, args ...any) {
	if len(c.problems) == maxProblems {
		c.more++
		return
	}
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// object walks the members with a token decoder, because decoding into a map or a struct would fold case and let the
// last of two twins win without a word. The error is one of syntax.
func (c *check) object(args json.RawMessage, v reflect.Value) error {
	d := json.NewDecoder(bytes.NewReader(args))
	if _, err := d.Token(); err != nil {
		return err
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return err
		}
		c.member(key.(string), value, v)
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("something follows the object")
	}
	return nil
}

// member notes a name even when its value is null: one of two twins is null in some generated calls, and which of them
// was meant is not ours to say.
func (c *check) member(name string, value json.RawMessage, v reflect.Value) {
	i := c.find(name)
	switch {
	case i < 0:
		c.unknown(name)
		return
	case slices.Contains(c.seen, i):
		c.problem("%s %q is given more than once", c.noun, name)
		return
	}
	c.seen = append(c.seen, i)
	if string(value) == "null" {
		return
	}
	c.given[i] = true
	f := &c.fields[i]
	if got := f.set(v.FieldByIndex(f.index), value); got != "" {
		c.wrong(f, got)
	}
}

// wrong is the one sentence for a bad type, a word outside the enum and a number out of range.
func (c *check) wrong(f *field, got string) {
	c.problem("%s %q must be %s, not %s", c.noun, f.name, f.want(), got)
}

// unknown lists what there is, which is also how a misspelt name is found.
func (c *check) unknown(name string) {
	if c.allowed == "" {
		c.problem("unknown %s %s: none is allowed", c.noun, quote(name))
		return
	}
	c.problem("unknown %s %s: allowed are %s", c.noun, quote(name), c.allowed)
}

// missing comes last: only when all was read is it known what is not there. The field's description is added,
// because whoever left it out needs to know what to put in.
func (c *check) missing() {
	for i := range c.fields {
		if f := &c.fields[i]; f.required && !c.given[i] {
			c.problem("%s %q is required and must be %s: %s", c.noun, f.name, f.want(), f.doc)
		}
	}
}

func (c *check) verdict() error {
	if len(c.problems) == 0 {
		return nil
	}
	text := strings.Join(c.problems, "; ")
	if c.more > 0 {
		text += fmt.Sprintf("; and %d more", c.more)
	}
	return refuse("invalid_input", "%s", text)
}

// set puts a JSON value that is not null into v. It returns "" or, when the value is not what the field takes, what
// it is instead, in words.
func (f *field) set(v reflect.Value, value json.RawMessage) (got string) {
	switch f.kind() {
	case reflect.String:
		s, ok := stringOf(value)
		if !ok || f.enum != nil && !slices.Contains(f.enum, s) {
			return show(value)
		}
		v.SetString(s)
	case reflect.Bool:
		if s := string(value); s != "true" && s != "false" {
			return show(value)
		}
		v.SetBool(value[0] == 't')
	case reflect.Int64:
		n, ok := integer(value)
		if !ok || v.OverflowInt(n) || f.min != nil && n < *f.min || f.max != nil && n > *f.max {
			return show(value)
		}
		v.SetInt(n)
	case reflect.Slice:
		return f.setList(v, value)
	}
	return ""
}

// setList looks at each element on its own, to say which of them is wrong.
func (f *field) setList(v reflect.Value, value json.RawMessage) (got string) {
	var elements []json.RawMessage
	if value[0] != '[' || json.Unmarshal(value, &elements) != nil {
		return show(value)
	}
	list := reflect.MakeSlice(f.typ, len(elements), len(elements))
	for i, e := range elements {
		s, ok := stringOf(e)
		if !ok { // null too: decoding into []string would make it ""
			return fmt.Sprintf("an array with %s at [%d]", show(e), i)
		}
		list.Index(i).SetString(s)
	}
	v.Set(list)
	return ""
}

// integer takes 3.0 and 3e2 as well: to JSON Schema they are integers, and some clients know no others. Beyond 2^53 a
// float is no longer the number that was meant.
func integer(value json.RawMessage) (n int64, ok bool) {
	if n, err := strconv.ParseInt(string(value), 10, 64); err == nil {
		return n, true
	}
	x, err := strconv.ParseFloat(string(value), 64)
	if err != nil || x != math.Trunc(x) || math.Abs(x) > 1<<53 {
		return 0, false
	}
	return int64(x), true
}

// want says in words what the field takes. It names enum and bounds even when the type was wrong already: the next
// attempt should be the last.
func (f *field) want() string {
	switch f.kind() {
	case reflect.String:
		if f.enum != nil {
			return quoted(f.enum, "or")
		}
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice:
		return "an array of strings"
	}
	switch {
	case f.min != nil && f.max != nil:
		return fmt.Sprintf("an integer from %d to %d", *f.min, *f.max)
	case f.min != nil:
		return fmt.Sprintf("an integer of at least %d", *f.min)
	case f.max != nil:
		return fmt.Sprintf("an integer of at most %d", *f.max)
	}
	return "an integer"
}

// show says in words what a JSON value is, in a bounded number of them.
func show(value json.RawMessage) string {
	switch value[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		s, _ := stringOf(value)
		return "the string " + quote(s)
	case 't', 'f', 'n':
		return string(value)
	}
	return "the number " + clip(string(value), 60)
}

// quote is %q for what came from outside and may be long.
func quote(s string) string { return strconv.Quote(clip(s, 60)) }

// quoted lists words as a sentence would: "a", "b" or "c".
func quoted(words []string, last string) string {
	var b strings.Builder
	for i, w := range words {
		switch {
		case i > 0 && i == len(words)-1:
			b.WriteString(" " + last + " ")
		case i > 0:
			b.WriteString(", ")
		}
		b.WriteString(strconv.Quote(w))
	}
	return b.String()
}

// queryArguments turns the parameters of a request's URL into the arguments that call takes. A capability that is not
// called by GET has none there. Missing ones are left for call to name.
func queryArguments(c *capability, q url.Values) (json.RawMessage, error) {
	if len(q) == 0 {
		return json.RawMessage("{}"), nil
	}
	p := &plan{}
	if c.method == http.MethodGet {
		p = c.plan()
	}
	k := check{plan: p, noun: "parameter"}
	args := make(map[string]json.RawMessage)
	for _, name := range slices.Sorted(maps.Keys(q)) { // sorted, so that the same request gets the same answer
		k.parameter(name, q[name], args)
	}
	if err := k.verdict(); err != nil {
		return nil, err
	}
	return mustJSON(args), nil
}

func (c *check) parameter(name string, values []string, args map[string]json.RawMessage) {
	i := c.find(name)
	if i < 0 {
		c.unknown(name)
		return
	}
	f := &c.fields[i]
	if len(values) != 1 && f.kind() != reflect.Slice {
		c.problem("%s %q is given more than once", c.noun, name)
		return
	}
	value, ok := f.parse(values)
	if !ok {
		c.wrong(f, quote(values[0]))
		return
	}
	if got := f.set(reflect.New(f.typ).Elem(), value); got != "" {
		c.wrong(f, quote(values[0]))
		return
	}
	args[name] = value
}

// parse turns the text of a parameter into JSON of the field's type. For a list the parameter is repeated, which is
// what OpenAPI takes for granted.
func (f *field) parse(values []string) (value json.RawMessage, ok bool) {
	switch f.kind() {
	case reflect.Slice:
		return mustJSON(values), true
	case reflect.Bool:
		return json.RawMessage(values[0]), values[0] == "true" || values[0] == "false"
	case reflect.Int64:
		n, err := strconv.ParseInt(values[0], 10, 64)
		return strconv.AppendInt(nil, n, 10), err == nil
	}
	return mustJSON(values[0]), true
}
