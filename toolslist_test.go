package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// askLine has a line of the process's own client answered.
func askLine(t *testing.T, s *server, n *session, format string, args ...any) []byte {
	t.Helper()
	answer, err := s.answerFrame(t.Context(), n, fmt.Appendf(nil, format, args...))
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// TestToolsListForClients reads the answer to tools/list as a client does that may have known it from another server, and
// holds it against what each of the known clients does to such a list (docs/clients.md).
func TestToolsListForClients(t *testing.T) {
	s := newServer(&settings{version: "1.2.3"}, mustFind(t, gitRepo(t)), quietServer().log, nil)
	list := askLine(t, s, quietSession(s), `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	if again := askLine(t, s, quietSession(s), `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":{"progressToken":1}}}`); !bytes.Equal(again, list) {
		t.Error("another session gets another list")
	}
	checkTimeless(t, s, list)
	var answer struct {
		Result map[string]json.RawMessage
	}
	var tools []map[string]any
	if err := json.Unmarshal(list, &answer); err != nil || json.Unmarshal(answer.Result["tools"], &tools) != nil {
		t.Fatalf("%s", list)
	}
	if len(answer.Result) != 1 { // Gemini CLI reads the first page only, and a legacy list has nothing else
		t.Errorf("the result has %v", slices.Collect(maps.Keys(answer.Result)))
	}
	for _, tool := range tools {
		checkTool(t, tool)
	}
}

// checkTimeless looks for what would be another at another place, or tomorrow.
func checkTimeless(t *testing.T, s *server, list []byte) {
	host, _ := os.Hostname()
	home, _ := os.UserHomeDir()
	for _, word := range []string{s.checkout.root, os.TempDir(), home, host, s.set.version} {
		if len(word) > 3 && bytes.Contains(list, []byte(word)) {
			t.Errorf("the list contains %q", word)
		}
	}
	// TypeScript's SDK throws the list away for one null.
	if found := regexp.MustCompile(`[:\[,]null|\d{4}-\d\d-\d\d|\d\d:\d\d|127\.0\.0\.1|localhost|/(home|root|tmp|usr)/`).Find(list); found != nil {
		t.Errorf("the list contains %q", found)
	}
}

func checkTool(t *testing.T, tool map[string]any) {
	name, _ := tool["name"].(string)
	text := func(key string, most int) {
		if s, ok := tool[key].(string); !ok || s == "" || len(s) > most || s != strings.TrimSpace(s) {
			t.Errorf("%s: %s %q", name, key, tool[key])
		}
	}
	// Cursor allows 60 characters for server and tool, Claude's API 64 for mcp__majordomus__ and the tool.
	if !regexp.MustCompile(`^[a-zA-Z0-9_-]{1,40}$`).MatchString(name) {
		t.Errorf("%s: not a name for every client", name)
	}
	text("title", 100)
	text("description", 2000) // Claude Code cuts it there
	annotations, _ := tool["annotations"].(map[string]any)
	for _, hint := range []string{"readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"} {
		if _, ok := annotations[hint].(bool); !ok || len(annotations) != 4 {
			t.Errorf("%s: annotations %v", name, annotations)
		}
	}
	c := toolTable()[name]
	if c == nil || annotations["readOnlyHint"] == c.command || annotations["readOnlyHint"] == true && annotations["destructiveHint"] == true {
		t.Errorf("%s: the annotations are not those of its handler", name)
	}
	input, _ := tool["inputSchema"].(map[string]any)
	if _, ok := input["properties"].(map[string]any); !ok || input["type"] != "object" || input["additionalProperties"] != false {
		t.Errorf("%s: inputSchema %v", name, input)
	}
	checkSchema(t, name+" takes", input, true)
	if output, ok := tool["outputSchema"].(map[string]any); ok {
		if output["type"] != "object" {
			t.Errorf("%s: outputSchema %v", name, output)
		}
		checkSchema(t, name+" answers", output, false)
	}
	for key := range tool {
		if !slices.Contains([]string{"name", "title", "description", "inputSchema", "outputSchema", "annotations"}, key) {
			t.Errorf("%s: a client may not know %q", name, key)
		}
	}
}

// schemaWords are those that every known client takes, each with the types it may stand beside.
var schemaWords = map[string]string{
	"type": "", "description": "", "default": "", "enum": "string",
	"properties": "object", "required": "object", "additionalProperties": "object",
	"items": "array", "minimum": "integer number", "maximum": "integer number",
}

// checkSchema walks a schema. What describes an argument is described; what describes an answer is kept short.
func checkSchema(t *testing.T, at string, schema map[string]any, input bool) {
	kind, ok := schema["type"].(string) // Gemini CLI refuses arrays of types
	if len(schema) > 0 && !ok {
		t.Errorf("%s: type %v", at, schema["type"])
	}
	for word := range schema {
		beside, known := schemaWords[word]
		if !known || beside != "" && !slices.Contains(strings.Fields(beside), kind) {
			t.Errorf("%s: %s beside type %s", at, word, kind)
		}
	}
	if _, described := schema["description"]; described && !input {
		t.Errorf("%s: an answer explains itself, and every client pays for its schema", at)
	}
	if value, ok := schema["default"]; ok {
		if err := againstSchema(schema, value, at); err != nil {
			t.Error(err)
		}
	}
	if enum, ok := schema["enum"].([]any); ok && (len(enum) == 0 || slices.ContainsFunc(enum, func(v any) bool { s, ok := v.(string); return !ok || s == "" })) {
		t.Errorf("%s: enum %v", at, enum)
	}
	properties, _ := schema["properties"].(map[string]any)
	if required, ok := schema["required"].([]any); ok && len(required) == 0 {
		t.Errorf("%s: required is empty", at)
	} else {
		for _, name := range required {
			if properties[name.(string)] == nil {
				t.Errorf("%s: %v is required and unknown", at, name)
			}
		}
	}
	for name, p := range properties {
		property, ok := p.(map[string]any)
		if !ok || !regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,64}$`).MatchString(name) { // so Claude's API
			t.Errorf("%s: property %q is %v", at, name, p)
		}
		if _, described := property["description"].(string); input && !described {
			t.Errorf("%s: %s is not described", at, name)
		}
		checkSchema(t, at+"."+name, property, input)
	}
	if items, ok := schema["items"].(map[string]any); ok {
		checkSchema(t, at+"[]", items, input)
	} else if kind == "array" {
		t.Errorf("%s: an array without items", at)
	}
	if values, ok := schema["additionalProperties"].(map[string]any); ok {
		checkSchema(t, at+".*", values, input)
	}
}

// TestToolAnswers calls every tool and holds what comes back against its outputSchema, and its two forms against each
// other: a client shows its model one or the other.
func TestToolAnswers(t *testing.T) {
	s := newServer(&settings{version: "1.2.3"}, mustFind(t, gitRepo(t)), quietServer().log, nil)
	s.set.timing, _ = readTimings(func(string) string { return "" })
	n := quietSession(s)
	askLine(t, s, quietSession(s), `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"majordomus_announce","arguments":{"intent":"theirs","scope":["a"],"claim":"x"}}}`)
	var list struct {
		Result struct {
			Tools []struct {
				Name         string
				OutputSchema map[string]any
			}
		}
	}
	must(t, json.Unmarshal(askLine(t, s, n, `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`), &list))
	for _, tool := range list.Result.Tools {
		if toolTable()[tool.Name].mayWait {
			continue
		}
		args := "{}"
		if tool.Name == "majordomus_announce" {
			args = `{"intent":"mine <&> \u2028","scope":["a/b","c"]}`
		}
		checkToolAnswer(t, tool.Name, tool.OutputSchema, askLine(t, s, n, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%q,"arguments":%s}}`, tool.Name, args))
		checkToolAnswer(t, tool.Name, tool.OutputSchema, askLine(t, s, n, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%q,"arguments":{"no such":1}}}`, tool.Name))
		checkToolAnswer(t, tool.Name, tool.OutputSchema, askLine(t, s, n, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%q,"arguments":[]}}`, tool.Name))
	}
}

func checkToolAnswer(t *testing.T, name string, schema map[string]any, answer []byte) {
	t.Helper()
	var a struct {
		Result struct {
			Meta struct {
				Error *struct{ Code string } `json:"majordomus/error"`
			} `json:"_meta"`
			Content           []textBlock
			StructuredContent json.RawMessage
			IsError           bool
		}
	}
	must(t, json.Unmarshal(answer, &a))
	r := a.Result
	if len(r.Content) == 0 || r.Content[0].Type != "text" || strings.TrimSpace(r.Content[0].Text) == "" {
		t.Fatalf("%s answers no text: %s", name, answer)
	}
	switch {
	case r.IsError:
		if r.StructuredContent != nil || r.Meta.Error == nil || r.Meta.Error.Code == "internal" || httpStatus(r.Meta.Error.Code) == 500 {
			t.Errorf("%s fails with %s", name, answer)
		}
	case schema == nil:
		if r.StructuredContent != nil {
			t.Errorf("%s answers structure without a schema: %s", name, answer)
		}
	default:
		var value any
		must(t, json.Unmarshal(r.StructuredContent, &value))
		if err := againstSchema(schema, value, name); err != nil {
			t.Error(err)
		}
		if r.Content[0].Text != string(r.StructuredContent) {
			t.Errorf("%s says\n%s\nand answers\n%s", name, r.Content[0].Text, r.StructuredContent)
		}
	}
}
