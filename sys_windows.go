package main

import (
	"net"
	"os"
	"os/exec"
)

// openWary has no counterpart here; there is no lease to read either, see flock.
const openWary = 0

// flock is not offered: without a lock that dies with its process there is no lease, and every client is served alone.
func flock(*os.File, bool) error { return errNoLocks }

// dieOf returns at once: no process dies of a signal here.
func dieOf(os.Signal) {}

// endPending cannot be asked here; no bridge runs here either.
func endPending(net.Conn) bool { return false }

// ownGroup is not needed: killGroup ends the command alone.
func ownGroup(*exec.Cmd) {}

func killGroup(cmd *exec.Cmd) error { return cmd.Process.Kill() }

// closeOnExec is not needed: no handle is inherited unless it is named.
func closeOnExec() {}

func pollable(f *os.File) (*os.File, func()) { return f, func() {} }
