// Floor is the least program of majordomus's shape, to measure majordomus against: the first process in a directory
// answers its client and listens; a later one finds the address in a file and relays. Nothing that it says is real.
//
//	floor             serve this directory, or relay to who does
//	floor ADDR        relay to the server at an address, whatever it is
package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
)

const addressFile = ".git/floor"

func main() {
	in := bufio.NewReaderSize(os.Stdin, 64<<10)
	if len(os.Args) > 1 {
		relay(in, os.Args[1])
		return
	}
	if addr, err := os.ReadFile(addressFile); err == nil {
		relay(in, string(addr))
		return
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	http.HandleFunc("/mcp", func(w http.ResponseWriter, r *http.Request) {
		body := make([]byte, r.ContentLength)
		io.ReadFull(r.Body, body)
		w.Header()["Content-Type"] = []string{"application/json"}
		w.Write(answer(body))
	})
	go http.Serve(l, nil)
	if err := os.WriteFile(addressFile+"~", []byte(l.Addr().String()), 0o600); err != nil {
		panic(err)
	}
	os.Rename(addressFile+"~", addressFile)
	defer os.Remove(addressFile)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		os.Stdout.Write(append(answer(line), '\n'))
	}
}

func answer(line []byte) []byte {
	var m struct{ ID json.RawMessage }
	json.Unmarshal(line, &m)
	return append(append([]byte(`{"jsonrpc":"2.0","id":`), m.ID...), `,"result":{}}`...)
}

// relay posts each line by a request written by hand, and writes the answer's body.
func relay(in *bufio.Reader, addr string) {
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		panic(err)
	}
	far, session := bufio.NewReader(c), ""
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		request := append([]byte("POST /mcp HTTP/1.1\r\nHost: "+addr+"\r\n"+session+"Content-Type: application/json\r\nContent-Length: "),
			strconv.Itoa(len(line))...)
		c.Write(append(append(request, "\r\n\r\n"...), line...))
		length := 0
		for {
			head, err := far.ReadSlice('\n')
			if err != nil {
				return
			}
			name, value, _ := strings.Cut(strings.TrimRight(string(head), "\r\n"), ": ")
			if name == "" {
				break
			}
			switch strings.ToLower(name) {
			case "content-length":
				length, _ = strconv.Atoi(value)
			case "mcp-session-id":
				session = "Mcp-Session-Id: " + value + "\r\n"
			}
		}
		body := make([]byte, length+1)
		io.ReadFull(far, body[:length])
		body[length] = '\n'
		os.Stdout.Write(body)
	}
}
