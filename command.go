package main

// How an allowed command is run: in a window of tmux when that is there, else detached, with its output in a log file.
//
// It gets no descriptor of this process above 2 and none of its standard streams, so that it can neither read a client's
// messages nor keep a port, a lock or a pipe; and it is a group of its own, which outlives this process and can be ended
// as a whole.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

const tmuxTime = 10 * time.Second // for a command that only makes a window

// ours begins the names of variables that tell a program whose child it is, or are this program's own.
var ours = []string{"GIT_", "CLAUDECODE=", "CLAUDE_CODE_", "CLAUDE_PID=", "CLAUDE_PROJECT_DIR=", "CLAUDE_PLUGIN_", "CODEX_", "GEMINI_CLI=", "OPENCODE=", "CURSOR_TRACE_ID=", "CURSOR_AGENT=", "MAJORDOMUS_"}

// ofTerminal begins the names of variables that describe a terminal: a window has its own.
var ofTerminal = []string{"TMUX=", "TMUX_PANE=", "TERM=", "TERMINFO=", "COLUMNS=", "LINES=", "STY=", "SHLVL=", "OLDPWD=", "PWD=", "_="}

// ofShell are variables that a shell keeps for itself: to set one ends some shells at once.
var ofShell = []string{"UID=", "EUID=", "PPID=", "SHELLOPTS=", "BASHOPTS=", "BASH_VERSINFO=", "OPTIND=", "IFS="}

func stripped(env []string, prefixes []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(v string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(v, p) })
	})
}

// environ is the environment of what is spawned.
func (p *spawned) environ(env []string, message string) []string {
	env = append(stripped(env, ours), "MAJORDOMUS_SPAWN="+p.ID, "MAJORDOMUS_CIRCLE="+p.Box.circle, "MAJORDOMUS_NAME="+p.Box.name)
	if message != "" {
		env = append(env, "MAJORDOMUS_MESSAGE="+message)
	}
	return env
}

// errMayRun means that a command must not be started again: tmux has taken it, and has not said what became of it.
var errMayRun = errors.New("tmux may have started it: look with tmux list-windows -a")

// run starts the command and fills in its process.
func (s *server) run(ctx context.Context, p *spawned, message string) error {
	dir, err := stateDir(s.checkout.root)
	if err == nil {
		dir = filepath.Join(dir, "spawn")
		_, err = realDir(dir, true)
	}
	if err != nil {
		return err
	}
	p.Log = filepath.Join(dir, clipBytes(p.Box.name, 200)+".log")
	if slices.ContainsFunc(s.mesh.spawnedList(), func(o spawned) bool { return o.ID != p.ID && o.Log == p.Log && o.alive() }) {
		// Of the same name in another circle or checkout: each has a log of its own.
		p.Log = strings.TrimSuffix(p.Log, ".log") + "-" + p.ID + ".log"
	}
	log, err := os.OpenFile(p.Log, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND|openWary, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	if info, err := log.Stat(); err != nil || !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a plain file", p.Log)
	}
	log.Chmod(0o600) // it may have been there
	env := p.environ(os.Environ(), message)
	keepDescriptors()
	if tmux, err := exec.LookPath("tmux"); err == nil {
		err = s.runInWindow(ctx, tmux, dir, p, env)
		if err == nil || errors.Is(err, errMayRun) {
			return err
		}
		s.log.Warn(fmt.Sprintf("tmux makes no window (%v): spawning without one", err))
	}
	return s.runDetached(p, env, log)
}

// runDetached starts the command without a terminal.
func (s *server) runDetached(p *spawned, env []string, log *os.File) error {
	cmd := exec.Command("/bin/sh", "-c", p.Command)
	cmd.Dir, cmd.Env = p.Path, append(stripped(env, ofTerminal), "PWD="+p.Path)
	cmd.Stdout, cmd.Stderr = log, log // and no stdin: it reads the null device
	detach(cmd)
	if err := cmd.Start(); err != nil {
		return err
	}
	p.PID = cmd.Process.Pid
	p.Start, _ = processStart(p.PID)
	id := p.ID
	go func() { // ends with the command, which may outlive the server: the next one keeps account of it then
		cmd.Wait()
		s.mesh.spawnEnded(id)
	}()
	return nil
}

// runInWindow starts the command in a new window of tmux. A tmux that runs already has an environment of its own, which
// is not this one, and arguments can be read by everybody: so the window runs a file that sets the environment and
// removes itself.
func (s *server) runInWindow(ctx context.Context, tmux, dir string, p *spawned, env []string) error {
	script := filepath.Join(dir, p.ID+".sh")
	run := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, tmuxTime)
		defer cancel()
		cmd := exec.CommandContext(ctx, tmux, args...)
		cmd.Env = stripped(os.Environ(), ours) // should this be what starts tmux
		cmd.Dir, cmd.WaitDelay = "/", time.Second
		out, err := cmd.Output()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			err = errors.New(cleanText(string(exit.Stderr), 200))
		}
		return strings.TrimSpace(string(out)), err
	}
	known, _ := run("show-environment", "-g")
	f, err := os.OpenFile(script, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(windowScript(script, p, env, known))
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(script)
		return err
	}
	target := "=" + p.session() + ":"
	format := "#{pane_pid} #{window_id}"
	// Into the window that was just made: it is the current one, and nobody comes between the commands of one call.
	rest := []string{"-n", p.Box.name, "-P", "-F", format, "/bin/sh", script, ";", "pipe-pane", "-t", target, tmuxQuote("cat >>" + shellQuote(p.Log))}
	newSession := []string{"new-session", "-d", "-s", p.session()}
	// Twice: the tmux that is asked for a session may be just about to end with its last one.
	for _, how := range [][]string{{"new-window", "-t", target}, newSession, newSession} {
		var out string
		out, err = run(slices.Concat(how, rest)...)
		pid, window, _ := strings.Cut(out, " ")
		if n, bad := strconv.Atoi(pid); bad == nil {
			p.PID, p.Window = n, window
			p.Start, _ = processStart(p.PID)
			return nil
		}
		if _, gone := os.Lstat(script); gone != nil {
			return fmt.Errorf("%w: %v", errMayRun, err)
		}
	}
	if os.Remove(script) != nil {
		return fmt.Errorf("%w: %v", errMayRun, err)
	}
	return err
}

// session is the tmux session of the circle. A dot or a colon in a target means something else.
func (p *spawned) session() string {
	return "majordomus-" + regexp.MustCompile(`[^a-zA-Z0-9_-]`).ReplaceAllString(p.Box.circle, "_")
}

// windowScript sets exactly this environment, but for what belongs to the window, and becomes the command.
func windowScript(script string, p *spawned, env []string, known string) string {
	shellName := regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	var b strings.Builder
	fmt.Fprintf(&b, "rm -f -- %s\n", shellQuote(script))
	others := slices.Concat(ofTerminal, ofShell)
	keep := stripped(env, others)
	for line := range strings.Lines(known) {
		name, _, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok && shellName.MatchString(name) && len(stripped([]string{name + "="}, others)) > 0 {
			fmt.Fprintf(&b, "unset %s\n", name)
		}
	}
	for _, v := range keep {
		if name, value, _ := strings.Cut(v, "="); shellName.MatchString(name) {
			fmt.Fprintf(&b, "export %s=%s\n", name, shellQuote(value))
		}
	}
	fmt.Fprintf(&b, "cd -- %s || exit\nexec /bin/sh -c %s\n", shellQuote(p.Path), shellQuote(p.Command))
	return b.String()
}

func shellQuote(s string) string {
	if regexp.MustCompile(`^[a-zA-Z0-9_./=@%+-]+$`).MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// tmuxQuote keeps tmux from reading formats and times into a command.
func tmuxQuote(s string) string {
	return strings.ReplaceAll(strings.ReplaceAll(s, "#", "##"), "%", "%%")
}

func clipBytes(s string, n int) string { return strings.TrimSuffix(clip(s, n), "…") }
