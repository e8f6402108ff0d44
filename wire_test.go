//go:build unix

// What scenarios say over TCP. The server meant is the one at $URL, which holder, plant and watch for a lease set.
//
//	http [-H 'KEY: VALUE']... WANT METHOD PATH|URL [BODY|@FILE]
//		one request; WANT is the status, or status/word where word is the error's code of the body. Prints the status,
//		the headers in order and the body; sets SESSION when a session was opened. A body is JSON unless -H says so;
//		`-H 'KEY:'` leaves a header out.
//	raw WANT LINE... '' [PART...]
//		the lines with CRLF, then the parts as they are, with the escapes of `bytes`. WANT lists with commas the answers
//		that come before the server closes, which it must do: one more request is sent after them, as a fence, unless
//		WANT ends with `closed`, which waits until it closes by itself. `hangup` reads one byte of the answer and closes,
//		`hangup:FILE` none, when FILE is there.
//	closed URL
//		wait until nobody listens there.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// plainHTTP knows no proxy, keeps nothing open and follows nothing.
var plainHTTP = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Timeout:       patience,
}

func cmdHTTP(ts *testscript.TestScript, neg bool, args []string) {
	set, args := takeOptions(ts, args, "-H=")
	checkUsage(ts, neg || len(args) < 3 || len(args) > 4, "http [-H 'KEY: VALUE']... WANT METHOD PATH|URL [BODY|@FILE]")
	body := ""
	if len(args) == 4 {
		body = args[3]
		if file, ok := strings.CutPrefix(body, "@"); ok {
			body = ts.ReadFile(file)
		}
	}
	response, text := sendHTTP(ts, args[1], args[2], strings.Split(set["-H"], "\n"), body)
	if id := response.Header.Get("Mcp-Session-Id"); id != "" {
		ts.Setenv("SESSION", id)
	}
	out := ts.Stdout()
	fmt.Fprintf(out, "%d\n", response.StatusCode)
	var lines []string
	for key, values := range response.Header {
		for _, value := range values {
			lines = append(lines, key+": "+value)
		}
	}
	slices.Sort(lines)
	fmt.Fprintf(out, "%s\n\n%s\n", strings.Join(lines, "\n"), text)
	if !statusIs(response.StatusCode, text, args[0]) {
		ts.Fatalf("wanted %s", args[0])
	}
}

func sendHTTP(ts *testscript.TestScript, method, target string, headers []string, body string) (*http.Response, string) {
	if strings.HasPrefix(target, "/") {
		target = ts.Getenv("URL") + target
	}
	r, err := http.NewRequest(method, target, strings.NewReader(body))
	ts.Check(err)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for _, header := range headers {
		switch key, value, _ := strings.Cut(header, ":"); {
		case key == "":
		case strings.EqualFold(key, "Host"):
			r.Host = strings.TrimSpace(value)
		case strings.TrimSpace(value) == "":
			r.Header.Del(key)
		default:
			r.Header.Add(key, strings.TrimSpace(value))
			if strings.EqualFold(key, "Content-Type") {
				r.Header.Set(key, strings.TrimSpace(value))
			}
		}
	}
	response, err := plainHTTP.Do(r)
	ts.Check(err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	ts.Check(err)
	if worldOf(ts).tells(string(text)) || worldOf(ts).tells(fmt.Sprint(response.Header)) {
		ts.Fatalf("%s %s told a token: %s", method, target, text)
	}
	return response, string(text)
}

// statusIs compares an answer with what was wanted: `404`, `404/session_not_found`, `200/-32601`.
func statusIs(status int, body, want string) bool {
	number, word, worded := strings.Cut(want, "/")
	if number != fmt.Sprint(status) {
		return false
	}
	return !worded || slices.Contains(errorCodes(body), word)
}

// errorCodes are the codes an error's body carries, the word of the API or of JSON-RPC's data, and JSON-RPC's number.
func errorCodes(body string) (codes []string) {
	var parsed struct {
		Error struct {
			Code json.RawMessage
			Data struct{ Code string }
		}
	}
	if json.Unmarshal([]byte(body), &parsed) == nil {
		codes = append(codes, strings.Trim(string(parsed.Error.Code), `"`), parsed.Error.Data.Code)
	}
	return codes
}

func cmdRaw(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) < 2, "raw WANT LINE... '' [PART...]")
	var request string
	head := true
	for _, part := range parts(ts, args[1:]) {
		request += part
		if head {
			request += "\r\n"
		}
		head = head && part != ""
	}
	conn, err := net.Dial("tcp", ts.Getenv("HOST"))
	ts.Check(err)
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	send := func(text string) {
		if _, err := io.WriteString(conn, text); err != nil && !hungUp(err) { // a refusal may come before all was sent
			ts.Fatalf("sending: %v", err)
		}
	}
	send(request)
	if file, ok := strings.CutPrefix(args[0], "hangup:"); ok {
		until(ts, func() string {
			if _, err := os.Stat(ts.MkAbs(file)); err != nil {
				return err.Error()
			}
			return ""
		})
		return
	}
	if args[0] == "hangup" {
		_, err := conn.Read(make([]byte, 1))
		ts.Check(err)
		return
	}
	method, _, _ := strings.Cut(request, " ")
	want := strings.Split(args[0], ",")
	var got []string
	for r := bufio.NewReader(conn); ; {
		response, err := http.ReadResponse(r, &http.Request{Method: method})
		if err != nil {
			if err != io.EOF && !errors.Is(err, io.ErrUnexpectedEOF) && !hungUp(err) {
				ts.Fatalf("got %q, then %v", got, err)
			}
			if want[len(want)-1] == "closed" {
				got = append(got, "closed")
			}
			break
		}
		body, _ := io.ReadAll(response.Body)
		fmt.Fprintf(ts.Stdout(), "%s\n%s\n", response.Status, body)
		status := fmt.Sprint(response.StatusCode)
		if len(got) < len(want) && statusIs(response.StatusCode, string(body), want[len(got)]) {
			status = want[len(got)]
		}
		got = append(got, status)
		if slices.Equal(got, want) {
			send("GET / HTTP/1.1\r\nHost: " + ts.Getenv("HOST") + "\r\nConnection: close\r\n\r\n")
		}
	}
	if !slices.Equal(got, want) {
		ts.Fatalf("wanted %q, got %q", want, got)
	}
}

func hungUp(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func cmdClosed(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg || len(args) != 1, "closed URL")
	until(ts, func() string {
		conn, err := net.DialTimeout("tcp", strings.TrimPrefix(args[0], "http://"), time.Second)
		if err == nil {
			conn.Close()
			return "somebody listens at " + args[0]
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return err.Error()
		}
		return ""
	})
}
