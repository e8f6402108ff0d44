package main

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"syscall"
)

// openWary has no counterpart here; there is no lease to read either, see flock.
const openWary = 0

// flock is not offered: without a lock that dies with its process there is no lease, and every client is served alone.
func flock(*os.File, lockKind) error { return errNoLocks }

// dieOf returns at once: no process dies of a signal here.
func dieOf(os.Signal) {}

// endPending cannot be asked here; no bridge runs here either.
func endPending(net.Conn) bool { return false }

// brokenOff cannot be asked here; no server is shared here either.
func brokenOff(net.Conn) bool { return false }

// endArrived cannot be asked either.
func endArrived(net.Conn) (closed, broken bool) { return false, false }

// ownGroup is not needed: killGroup ends the command alone.
func ownGroup(*exec.Cmd) {}

func killGroup(cmd *exec.Cmd) error { return cmd.Process.Kill() }

// closeOnExec is not needed: no handle is inherited unless it is named.
func closeOnExec() {}

func pollable(f *os.File) (*os.File, func()) { return f, func() {} }

// What follows is for spawned processes. Without a lease there is no server here that would start any.

func detach(*exec.Cmd)                             {}
func ownerOf(os.FileInfo) (uid int, known bool)    { return 0, false }
func signalGroup(int, syscall.Signal) error        { return errors.ErrUnsupported }
func groupGone(int) bool                           { return true }
func processGroup(int) int                         { return 0 }
func ownProcess() string                           { return "" }
func processGone(string) bool                      { return false }
func processStart(int) (start string, zombie bool) { return "", false }
func groupMembers(int, string) []int               { return nil }

func descriptorLimit() int { return 1 << 30 }
