// Majordomus makes the agents that work on one repository visible to each
// other. `majordomus mcp` is started by an MCP client in a checkout; the first
// one serves, the later ones bridge their clients to it.
//
// To read it: this file is the command line, process.go the life of one
// process, lease.go and election.go who of them serves, bridge.go what the
// others do, server.go what the server does. The head of each says by which rules.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = `Usage:
    majordomus mcp [--standalone] [--http-port N] [--repo DIR]
                   [--discovery vcs|filesystem] [--strict]
    majordomus version
    majordomus help [command]

mcp is started by an MCP client inside a git checkout. The first process of a
checkout is its server; every later one bridges its client to it.

Example, for Claude Code:
    claude mcp add majordomus -- majordomus mcp
`

const usageMCP = `Usage: majordomus mcp [flags]

Serves one MCP client on stdin and stdout, and the checkout beside it: as its
server on loopback, or as a bridge to the server that is already there.

    --standalone       serve this client alone: no port, no lease, no file
    --http-port N      port to listen on (default 8741; taken: a free one; 0: any)
    --repo DIR         look for the checkout here instead of the working directory
    --discovery MODE   which documents of the repository are shown:
                       vcs (tracked files, the default) or filesystem
    --strict           refuse to start (exit 10) when one of them cannot be read

Environment: MAJORDOMUS_NAME, MAJORDOMUS_CIRCLE and MAJORDOMUS_ROLE name this
client to the others; MAJORDOMUS_EPISODE_COMMAND names the command that records
episodes (default .ai/local/bin/episode); MAJORDOMUS_LOG is debug, info, warn or
error.
`

// Exit codes beside 0.
const (
	exitUsage    = 2
	exitStrict   = 10
	exitInternal = 13
)

// usageError is the caller's mistake: exit 2.
type usageError struct{ error }

func main() {
	ctx := notifySignals()
	err := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	exit(ctx, exitCode(err, os.Stderr))
}

// exitCode is the one place that turns an error into an exit code.
func exitCode(err error, stderr io.Writer) int {
	refused := (*strictRefusal)(nil)
	switch wrong := (usageError{}); {
	case err == nil:
		return 0
	case errors.As(err, &refused):
		fmt.Fprintf(stderr, "majordomus: %s\nhint: mend it, or start without --strict, which lists it as unreadable\n", printable(err.Error()))
		return exitStrict
	case errors.As(err, &wrong):
		fmt.Fprintf(stderr, "majordomus: %s\nhint: majordomus help\n", printable(err.Error()))
		return exitUsage
	default:
		fmt.Fprintf(stderr, "majordomus: %s\n", printable(err.Error()))
		return exitInternal
	}
}

// run is one command: mcp, version or help.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	command := "help"
	if len(args) > 0 {
		command, args = args[0], args[1:]
	}
	switch command {
	case "mcp":
		return commandMCP(ctx, args, stdin, stdout, stderr)
	case "version", "--version", "-version":
		fmt.Fprintln(stdout, "majordomus "+programVersion())
		return nil
	case "help", "--help", "-help", "-h":
		text := usage
		if len(args) > 0 && args[0] == "mcp" {
			text = usageMCP
		}
		fmt.Fprint(stdout, text)
		return nil
	}
	return usageError{fmt.Errorf("there is no command %q", command)}
}

// settings is what a process is told by its flags and its environment, and what it is.
type settings struct {
	dir        string // where to look for the checkout
	standalone bool
	httpPort   int
	discovery  string // vcs or filesystem
	strict     bool
	timing     timings
	episode    string // the repository's episode command, where one is named
	version    string
	exe        *executable // this program's file, noted at start; nil when unknown
}

// timings are bounds: docs/timings.md says of what, and the defaults.
type timings struct {
	probe       time.Duration // an answer to the question who a server is
	bindGrace   time.Duration // a lease without a url
	busyGrace   time.Duration // a server that is silent
	join        time.Duration // an election
	sessionIdle time.Duration // a session over HTTP that says nothing
	ping        time.Duration // a watch: how long a bridge goes without a sign of life
	read        time.Duration // whatever is read from a connection, and an idle one
	reattach    time.Duration // an episode whose client is gone
}

// readTimings takes the defaults and what the environment changes: a seam for
// tests and operators.
func readTimings(getenv func(string) string) (timings, error) {
	var t timings
	for _, v := range []struct {
		name     string
		field    *time.Duration
		standard time.Duration
	}{
		{"MAJORDOMUS_PROBE_TIMEOUT", &t.probe, 2 * time.Second},
		{"MAJORDOMUS_BIND_GRACE", &t.bindGrace, 15 * time.Second},
		{"MAJORDOMUS_BUSY_GRACE", &t.busyGrace, 10 * time.Second},
		{"MAJORDOMUS_JOIN_TIMEOUT", &t.join, 20 * time.Second},
		{"MAJORDOMUS_SESSION_IDLE", &t.sessionIdle, 90 * time.Second},
		{"MAJORDOMUS_PING_INTERVAL", &t.ping, 20 * time.Second},
		{"MAJORDOMUS_READ_DEADLINE", &t.read, 30 * time.Second},
		{"MAJORDOMUS_REATTACH_GRACE", &t.reattach, 15 * time.Minute},
	} {
		*v.field = v.standard
		text := getenv(v.name)
		if text == "" {
			continue
		}
		d, err := time.ParseDuration(text)
		if err != nil || d <= 0 {
			return t, usageError{fmt.Errorf("%s=%q: give a positive duration, for example %v", v.name, text, v.standard)}
		}
		*v.field = d
	}
	if t.busyGrace >= t.join {
		return t, usageError{fmt.Errorf("MAJORDOMUS_BUSY_GRACE (%v) must be below MAJORDOMUS_JOIN_TIMEOUT (%v)", t.busyGrace, t.join)}
	}
	return t, nil
}

// readSettings reads flags and environment. flag.ErrHelp means that the usage
// was asked for.
func readSettings(args []string, getenv func(string) string) (*settings, error) {
	set := &settings{version: programVersion(), exe: ownExecutable(), episode: getenv("MAJORDOMUS_EPISODE_COMMAND")}
	flags := flag.NewFlagSet("mcp", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.BoolVar(&set.standalone, "standalone", false, "")
	flags.IntVar(&set.httpPort, "http-port", 8741, "")
	flags.StringVar(&set.dir, "repo", "", "")
	flags.StringVar(&set.discovery, "discovery", "vcs", "")
	flags.BoolVar(&set.strict, "strict", false, "")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return nil, err
	case err != nil:
		return nil, usageError{fmt.Errorf("mcp: %w", err)}
	case flags.NArg() > 0:
		return nil, usageError{fmt.Errorf("mcp takes no argument, got %q", flags.Arg(0))}
	case set.httpPort < 0 || set.httpPort > 65535:
		return nil, usageError{fmt.Errorf("--http-port %d: give a port from 0 to 65535", set.httpPort)}
	case set.discovery != "vcs" && set.discovery != "filesystem":
		return nil, usageError{fmt.Errorf("--discovery %q: give vcs or filesystem", set.discovery)}
	}
	if set.dir != "" {
		if info, err := os.Stat(set.dir); err != nil || !info.IsDir() {
			return nil, usageError{fmt.Errorf("--repo %q is not a directory", set.dir)}
		}
	}
	var err error
	set.timing, err = readTimings(getenv)
	return set, err
}

// commandMCP is one process's time: settings, log, the checkout, the client, whose input is read from then on; then process.run
// (process.go): elect, serve or follow or alone, elect again, until the client has left and everybody whom this process serves.
func commandMCP(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	set, err := readSettings(args, os.Getenv)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stderr, usageMCP)
		return nil
	}
	if err != nil {
		return err
	}
	level, err := logLevel(os.Getenv("MAJORDOMUS_LOG"))
	if err != nil {
		return err
	}
	lines := newLineWriter(stderr)
	defer lines.flush()
	log := slog.New(&lineHandler{out: lines, level: level})
	greet(stdin, log)
	// Polled, so that to wait for input keeps no thread, and a write that nobody reads can be given up.
	if f, ok := stdin.(*os.File); ok {
		polled, restore := pollable(f)
		defer restore()
		stdin = polled
	}
	if f, ok := stdout.(*os.File); ok {
		polled, restore := pollable(f)
		defer restore()
		stdout = polled
	}
	p := newProcess(set, stdin, stdout, log)
	p.run(ctx)
	return p.refusal
}

// greet tells a person who started the program in a terminal what it is
// waiting for. A client's pipe gets none of it.
func greet(stdin io.Reader, log *slog.Logger) {
	f, ok := stdin.(*os.File)
	if !ok {
		return
	}
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return
	}
	if null, err := os.Stat(os.DevNull); err == nil && os.SameFile(info, null) {
		return
	}
	log.Info("waiting for an MCP client's messages on standard input, one JSON object a line; this is started by a client, see majordomus help; end it with ctrl-d or ctrl-c")
}

// logLevel reads MAJORDOMUS_LOG.
func logLevel(text string) (slog.Level, error) {
	switch text {
	case "debug":
		return slog.LevelDebug, nil
	case "", "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, usageError{fmt.Errorf("MAJORDOMUS_LOG=%q: give debug, info, warn or error", text)}
}

// signalled is the cause of a context that a signal has ended.
type signalled struct{ os.Signal }

func (s signalled) Error() string { return "signal: " + s.String() }

// notifySignals gives a context that ends at the first signal, upon which the lease is released. At a second one, or when ending
// takes longer than endingTime and a half second (somebody does not read our stdout, or a server hangs), the process ends as it is.
func notifySignals() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 2)
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(sig) { // nohup means what it says
			signal.Notify(signals, sig)
		}
	}
	// Notified rather than ignored: an ignored SIGPIPE would be inherited by
	// the processes we start. A broken stdout then is a write error.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() { // ends with the process
		first := <-signals
		cancel(signalled{first})
		select {
		case <-signals:
		case <-time.After(endingTime + time.Second/2):
		}
		exit(ctx, exitInternal)
	}()
	return ctx
}

// exit ends the process: by the signal that has ended ctx, so that its parent can tell, or with a code where there was none or
// it does not kill.
func exit(ctx context.Context, code int) {
	if s := (signalled{}); errors.As(context.Cause(ctx), &s) {
		dieOf(s.Signal)
	}
	os.Exit(code)
}
