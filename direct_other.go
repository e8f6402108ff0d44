//go:build !linux

package main

import "io"

// directly is f: elsewhere there is no other way than Go's.
func directly(f io.ReadWriter, _ bool) io.ReadWriter { return f }
