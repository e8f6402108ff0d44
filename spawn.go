package main

// spawn_peer: start an agent that the user has allowed.
//
// What may be started stands in the user's own configuration and nowhere else: not in a repository, which a stranger may
// have written, and not in anything that a client sends. A command is allowed as a whole, byte for byte. Everything else
// that comes from a caller (the directory, the name, the circle, the message) reaches the command by chdir and by the
// environment, never through a shell.
//
// command.go starts a command, spawned.go keeps account of what was started, kill.go ends it.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	spawnLimit  = 16       // alive at once
	configLimit = 64 << 10 // bytes
)

type spawnInput struct {
	Path    string `json:"path" required:"true" doc:"directory to start in"`
	Command string `json:"command" required:"true" doc:"exactly as the user has allowed it"`
	Circle  string `json:"circle" doc:"circle of the new peer" default:"default"`
	Message string `json:"message" doc:"its first message, at most 16384 bytes"`
}

// config is the part of the user's configuration that is read here.
type config struct {
	Spawn struct {
		Commands []string `json:"allowed_commands"`
		Paths    []string `json:"allowed_paths"`
	} `json:"spawn"`
}

// configPath is where the user's configuration is.
func configPath() (string, error) {
	if path := os.Getenv("MAJORDOMUS_CONFIG"); path != "" {
		return filepath.Abs(path)
	}
	dir, err := os.UserConfigDir()
	return filepath.Join(dir, "majordomus", "config.json"), err
}

// readUserConfig reads the user's configuration; absent, it allows nothing.
func readUserConfig(path string) (c config, err error) {
	real, err := canonical(path) // a link of the user's own is fine, where it leads counts
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, err
	}
	f, err := os.OpenFile(real, os.O_RDONLY|openWary, 0)
	if err != nil {
		return c, errors.New(reasonOf(err))
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return c, err
	}
	if err := usersOwn(real, info); err != nil {
		return c, err
	}
	text, err := io.ReadAll(io.LimitReader(f, configLimit+1))
	switch {
	case err != nil:
		return c, errors.New(reasonOf(err))
	case len(text) > configLimit:
		return c, fmt.Errorf("it has more than %d bytes", configLimit)
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return config{}, fmt.Errorf("it is not what majordomus reads: %v", err)
	}
	return c, nil
}

// usersOwn refuses a configuration that somebody else may have written. Fails closed.
func usersOwn(path string, info os.FileInfo) error {
	dir := filepath.Dir(path)
	if root := insideCheckout(dir); root != "" {
		return fmt.Errorf("it is in the git checkout %q, and what a repository brings along allows nothing: keep it elsewhere", root)
	}
	above, err := os.Stat(dir)
	if err != nil {
		return errors.New(reasonOf(err))
	}
	switch owner, known := ownerOf(info); {
	case !info.Mode().IsRegular():
		return errors.New(describe(info.Mode()))
	case known && owner != os.Geteuid():
		return fmt.Errorf("it belongs to user %d, not to you (%d)", owner, os.Geteuid())
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("its mode is %04o, so others may write it: chmod go-w %s", info.Mode().Perm(), path)
	case above.Mode().Perm()&0o002 != 0 && above.Mode()&fs.ModeSticky == 0:
		return fmt.Errorf("everybody may replace it, for the mode of %s is %04o: chmod o-w %s", dir, above.Mode().Perm(), dir)
	}
	return nil
}

// insideCheckout is the nearest directory from dir upwards that contains .git, whatever that is; "" when there is none.
func insideCheckout(dir string) string {
	for {
		if _, err := os.Lstat(filepath.Join(dir, ".git")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			return ""
		}
		dir = up
	}
}

// mayRun is who acts in a call that starts or ends processes: one of the user's own processes, or the user.
func (s *server) mayRun(ctx context.Context) (actor, error) {
	n := callerOf(ctx)
	switch {
	case s.lease == nil:
		return actor{}, refuse("refused", "this process serves its client alone (%s): it keeps no account of processes, so it starts and ends none", s.why)
	case n != nil && !n.trusted:
		return actor{}, refuse("forbidden", "this session came without the token of this server's lease file, so it may be anybody on this machine: "+
			"connect through majordomus mcp, or send Authorization: Bearer with the token")
	}
	return s.actor(ctx)
}

// spawnPeer starts a peer.
func (s *server) spawnPeer(ctx context.Context, in spawnInput) (saidOutput, error) {
	a, err := s.mayRun(ctx)
	if err != nil {
		return saidOutput{}, err
	}
	message := letter{}
	if strings.ContainsRune(in.Message, 0) {
		return saidOutput{}, refuse("invalid_input", "message: holds a zero byte, which no environment can")
	}
	if in.Message != "" {
		if message, err = s.letterFrom(a, "notify", s.mesh.newID("notif"), "message", in.Message); err != nil {
			return saidOutput{}, err
		}
	}
	p := spawned{By: a.box, Command: in.Command}
	if err := s.allowed(in, &p); err != nil {
		return saidOutput{}, err
	}
	select {
	case s.mesh.spawning <- struct{}{}: // one at a time: each needs a name and a place among the living
		defer func() { <-s.mesh.spawning }()
	case <-ctx.Done():
		return saidOutput{}, errCancelled
	}
	if err := s.enlist(ctx, &p, cleanName(in.Circle, "default"), message); err != nil {
		return saidOutput{}, err
	}
	if err := s.startSpawned(ctx, &p, message.Text); err != nil {
		return saidOutput{}, err
	}
	return s.spawnedText(&p, in.Message != ""), nil
}

// allowed applies the user's rules, and says of a refusal which one it is and how to allow what was asked for.
func (s *server) allowed(in spawnInput, p *spawned) error {
	path, err := configPath()
	if err != nil {
		return refuse("refused", "spawn is off: there is no place for the configuration that could allow it (%v)", err)
	}
	c, err := readUserConfig(path)
	switch {
	case err != nil:
		return refuse("refused", "spawn is off: %s is not used: %v", path, err)
	case strings.TrimSpace(in.Command) == "":
		return refuse("invalid_input", "command: is blank")
	case strings.TrimSpace(in.Path) == "":
		return refuse("invalid_input", "path: is blank; give the directory to start in, . for the root of this checkout")
	case len(c.Spawn.Commands) == 0:
		return refuse("refused", "spawn is off: the user has allowed no command. To allow one, the user writes into %s: %s", path, example("allowed_commands", in.Command))
	case !slices.Contains(c.Spawn.Commands, in.Command):
		return refuse("refused", "command: %s is none of those that the user has allowed: %s. It must equal one of them exactly; to allow it, the user adds it to spawn.allowed_commands in %s",
			quote(in.Command), quoted(c.Spawn.Commands, "or"), path)
	}
	if !filepath.IsAbs(in.Path) {
		in.Path = filepath.Join(s.checkout.root, in.Path)
	}
	dir, err := canonical(in.Path)
	if err != nil {
		return refuse("invalid_input", "path: %q cannot be used: %s", clip(in.Path, 200), reasonOf(err))
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return refuse("invalid_input", "path: %q is not a directory", clip(dir, 200))
	}
	if root := insideCheckout(dir); root != "" && innards(root, dir) {
		return refuse("refused", "path: %q is where git, or majordomus itself, keeps its files: nothing is started there", clip(dir, 200))
	}
	p.Path = dir
	if s.placeSpawned(p) {
		return nil
	}
	for _, allowed := range c.Spawn.Paths {
		if real, err := canonical(allowed); err == nil && filepath.IsAbs(allowed) {
			if _, ok := below(real, dir); ok {
				p.Outside = true
				return nil
			}
		}
	}
	return refuse("refused", "path: %q is in no checkout of this repository. To allow it, the user adds it, or a directory above it, to spawn.allowed_paths in %s: %s",
		clip(dir, 200), path, example("allowed_paths", dir))
}

func example(key, value string) string {
	return string(mustJSON(map[string]any{"spawn": map[string]any{key: []string{clip(value, 200)}}}))
}

// innards says whether a directory of a checkout is one in which nobody works. Some systems take .GIT for the same.
func innards(root, dir string) bool {
	path, _ := below(root, dir)
	path = strings.ToLower(filepath.ToSlash(path)) + "/"
	return strings.HasPrefix(path, ".git/") || strings.HasPrefix(path, filepath.ToSlash(filepath.Dir(leaseDir))+"/")
}

// placeSpawned finds the checkout of this repository in which a directory is; false when it is in none. A directory that
// only says that it belongs to the repository is in none: git must know it too.
func (s *server) placeSpawned(p *spawned) bool {
	c, err := findCheckout(p.Path)
	if err != nil || c.commonDir != s.checkout.commonDir || s.checkout.strange(c.root) {
		return false
	}
	if c.root == s.checkout.root {
		return true
	}
	p.At = place{Root: c.root, GitDir: c.gitDir}
	siblings, _ := s.siblings()
	return slices.ContainsFunc(siblings, func(l listed) bool { return l.root == c.root })
}

// spawnedText tells the caller what it has started.
func (s *server) spawnedText(p *spawned, message bool) saidOutput {
	out := saidOutput{Text: fmt.Sprintf("spawned @%s (process %d) in %s; watch it with: ", p.Box.name, p.PID, p.Path)}
	if p.Window != "" {
		out.Text += fmt.Sprintf("tmux attach -t %s", shellQuote(p.session()))
	} else {
		out.Text += "tail -f " + shellQuote(p.Log)
	}
	switch {
	case p.Outside && message:
		out.Note = "it is outside this repository and will not be a peer here; the message is in its environment only, as MAJORDOMUS_MESSAGE"
	case p.Outside:
		out.Note = "it is outside this repository and will not be a peer here"
	case message:
		out.Note = "the message waits in its inbox; until it has made its first call it is listed as pending_first_turn"
	}
	return out
}
