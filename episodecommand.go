package main

// The repository's own episode command: what keeps the record of episodes beyond this server's memory. It is a program of
// the user's, so it may hang, fail, or answer without end; whatever it does, it is told as it is and bounded, and nobody
// but the one who attaches or detaches waits for it.
//
// Which program: MAJORDOMUS_EPISODE_COMMAND, else .ai/local/bin/episode. Never one that came with the repository: cloning
// must not be enough to have code run. So a file of the checkout is run only if git does not track it, by whatever case it
// is written, and no commit holds it that was checked out here, as far as git remembers; if no link leads to it, which could
// be tracked in its place; and if it lies in no repository inside this one, whose files git does not list here. Every doubt is
// a no, and fails closed: git missing, silent or refusing is one.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	episodeCommand   = ".ai/local/bin/episode"
	commandTime      = 10 * time.Second
	commandsTogether = 64
	wordsLimit       = 4 << 10 // bytes of what it says
)

// episodeRun is one run of the command, waited for by whoever caused it.
type episodeRun struct {
	words string        // what it said; set before done is closed
	done  chan struct{} // closed when it has ended
}

// startLocked runs the command for an episode, after those that run for it already and under no lock. When it has ended, an
// episode that is still closing is gone.
func (s *server) startLocked(e *episodeEntry, what, reason string) {
	t := s.episodes
	run, before := &episodeRun{done: make(chan struct{})}, e.last
	e.last = run
	if t.over {
		run.words = "the episode command was not run: " + errServerEnding.Error()
		close(run.done)
		return
	}
	stranger := e.stranger != ""
	message := append(mustJSON(struct {
		ExternalID string `json:"external_id"`
		Provider   string `json:"provider"`
		Reason     string `json:"reason"`
		Root       string `json:"root"`
	}{e.id, e.provider, reason, s.checkout.root}), '\n')
	t.runs.Go(func() {
		if before != nil {
			<-before.done
		}
		words, err := "the episode command was not run: the client came without the token", error(nil)
		if !stranger {
			words, err = s.runEpisodeCommand(t.ctx, what, message)
		}
		if err != nil && what == "close" && reason != "detach" { // there is nobody else to be told
			s.log.Warn(fmt.Sprintf("the episode command, closing %q (%s): %s", e.id, reason, clip(words, 300)))
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		run.words, e.words = words, words
		if e.last == run && e.closing && t.byID[e.id] == e {
			delete(t.byID, e.id)
		}
		close(run.done)
	})
}

// awaitEpisode waits for a command. When the server is ending or its own client has left it waits for half the time there is, so
// that closing the episodes gets the other half.
func (s *server) awaitEpisode(caller *session, run *episodeRun) {
	if run == nil {
		return // it was carried here, and no command has run since
	}
	var left <-chan struct{}
	if s.own != nil && caller.peer == s.ownPeer {
		left = s.own.ended
	}
	select {
	case <-run.done:
		return
	case <-s.ending:
	case <-left:
	}
	waitAtMost(run.done, endingTime/2)
	if !isClosed(run.done) {
		s.episodes.mu.Lock()
		s.episodes.late = time.Now()
		s.episodes.mu.Unlock()
	}
}

// runEpisodeCommand runs the command to its end and returns what it said, which is never empty. The error says that it did
// not succeed; the words say how.
func (s *server) runEpisodeCommand(ctx context.Context, what string, message []byte) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	path, err := s.findEpisodeCommand(ctx)
	switch {
	case errors.Is(err, errNoCommand):
		return err.Error(), nil
	case err != nil:
		return clip(fmt.Sprintf("the episode command was not run: %v", err), wordsLimit-4), err
	}
	select {
	case s.episodes.slots <- struct{}{}:
		defer func() { <-s.episodes.slots }()
	case <-ctx.Done():
		return fmt.Sprintf("the episode command was not run: %d others were running all the time", commandsTogether), ctx.Err()
	}
	stdout, stderr := &boundedBuffer{limit: wordsLimit + utf8.UTFMax}, &boundedBuffer{limit: wordsLimit + utf8.UTFMax}
	cmd := exec.CommandContext(ctx, path, what)
	cmd.Dir, cmd.Env = s.checkout.root, withoutGit(os.Environ())
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(message), stdout, stderr
	cmd.WaitDelay = 100 * time.Millisecond // a grandchild may hold the pipes
	ownGroup(cmd)
	cmd.Cancel = func() error { return killGroup(cmd) }
	keepDescriptors()
	if err = cmd.Run(); errors.Is(err, exec.ErrWaitDelay) {
		err = nil // it has ended well; what it left running is its own affair
	}
	said := cmp.Or(words(stdout.String()), words(stderr.String()), "the episode command said nothing")
	if err == nil {
		return said, nil
	}
	how := err.Error()
	switch {
	case errors.Is(context.Cause(ctx), errServerEnding):
		how = "killed: " + errServerEnding.Error()
	case ctx.Err() != nil:
		how = fmt.Sprintf("killed after %v", commandTime)
	}
	how = clip(" ("+printable(how)+")", 500)
	return clip(said, wordsLimit-len(how)-4) + how, err
}

// words makes text of what the command wrote: at most wordsLimit bytes, whole characters, nothing blank around them.
func words(written string) string {
	if n := wordsLimit; len(written) > n {
		for n > 0 && !utf8.RuneStart(written[n]) {
			n--
		}
		written = written[:n]
	}
	text := strings.TrimSpace(strings.ToValidUTF8(written, "\uFFFD"))
	if len(text) > wordsLimit { // invalid bytes have grown
		text = clip(text, wordsLimit-4)
	}
	return text
}

// withoutGit removes what a hook exports: the command works in the checkout it is started in.
func withoutGit(environ []string) []string {
	var env []string
	for _, v := range environ {
		if !strings.HasPrefix(v, "GIT_") {
			env = append(env, v)
		}
	}
	return env
}

// keepDescriptors keeps from what we start the descriptors that we were started with ourselves. Those that we opened are
// kept by the runtime.
var keepDescriptors = sync.OnceFunc(closeOnExec)

var errNoCommand = errors.New("no episode command")

// findEpisodeCommand gives the program to run. errNoCommand: there is none, and none was named.
func (s *server) findEpisodeCommand(ctx context.Context) (path string, err error) {
	root, named := s.checkout.root, s.set.episode
	switch {
	case root == "":
		return "", fmt.Errorf("%w: this is no git checkout", errNoCommand)
	case named == "":
		path = filepath.Join(root, filepath.FromSlash(episodeCommand))
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("%w: put an executable at %s, or name one in MAJORDOMUS_EPISODE_COMMAND", errNoCommand, episodeCommand)
		}
	case filepath.IsAbs(named):
		path = filepath.Clean(named)
	case filepath.Base(named) == named:
		if path, err = exec.LookPath(named); err == nil {
			path, err = filepath.Abs(path)
		}
		if err != nil {
			return "", fmt.Errorf("MAJORDOMUS_EPISODE_COMMAND: %v", err)
		}
	default:
		return "", errors.New("MAJORDOMUS_EPISODE_COMMAND must be an absolute path, or a name in PATH")
	}
	what := cmp.Or(named, episodeCommand)
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", fmt.Errorf("%q: %v", what, err)
	}
	info, err := os.Stat(real)
	switch {
	case err != nil:
		return "", fmt.Errorf("%q: %v", what, err)
	case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
		return "", fmt.Errorf("%q is not an executable file", what)
	}
	if rel, inside := relative(root, path); inside && filepath.Join(root, filepath.FromSlash(rel)) != real {
		return "", fmt.Errorf("%q is reached through a link, which the repository might track", what)
	}
	if rel, inside := below(root, real); inside {
		if othersFile(info, root) || info.Mode().Perm()&0o002 != 0 {
			return "", fmt.Errorf("%q may have been written by another user: its owner must be you, and its mode not let everybody write", what)
		}
		err := s.checkUntracked(ctx, root, filepath.ToSlash(rel))
		if err == nil {
			err = s.checkNeverThere(ctx, root, filepath.ToSlash(rel))
		}
		if err != nil {
			return "", fmt.Errorf("%q %w", what, err)
		}
	}
	return real, nil
}

var errTracked = errors.New("is tracked by git: nothing that came with the repository is run or trusted")

// checkUntracked refuses a file of a checkout that may have come with the repository.
func (s *server) checkUntracked(ctx context.Context, root, rel string) error {
	for at, c := range rel + "/" {
		if c != '/' {
			continue
		}
		above, name := filepath.Split(filepath.Join(root, filepath.FromSlash(rel[:at])))
		// A file system that folds more letters than git does would find a tracked file under a name that git does not know.
		entries, err := os.ReadDir(above)
		switch {
		case err != nil:
			return fmt.Errorf("might be tracked: %v", err)
		case !slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == name }):
			return errors.New("might be tracked: it is spelled otherwise where it lies")
		case at == len(rel):
			continue
		}
		if _, err := os.Lstat(filepath.Join(above, name, ".git")); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: it lies in a repository inside this one", errTracked)
		}
	}
	return askTracked(ctx, root, rel, s.set.timing.probe)
}

// askTracked asks git whether it tracks a file of a checkout: nil, errTracked, or why it cannot say.
func askTracked(ctx context.Context, root, rel string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	out, err := runGit(ctx, root, "ls-files", "-z", "--", ":(top,literal,icase)"+rel)
	switch {
	case err != nil:
		return fmt.Errorf("might be tracked: %v", err)
	case out != "":
		return errTracked
	}
	return nil
}

// checkNeverThere refuses what a commit holds that was checked out here, as far as git remembers: a reset, or taking a file out
// of the index, leaves it behind as if it were the user's.
func (s *server) checkNeverThere(ctx context.Context, root, rel string) error {
	ctx, cancel := context.WithTimeout(ctx, s.set.timing.probe)
	defer cancel()
	out, err := runGit(ctx, root, "rev-list", "--walk-reflogs", "--all", "--max-count=500")
	if commits := strings.Fields(out); err == nil && len(commits) > 0 {
		args := append([]string{"grep", "--files-with-matches", "-z", "-e", ""}, commits...)
		out, err = runGit(ctx, root, append(args, "--", ":(top,literal,icase)"+rel)...)
	}
	switch {
	case errors.Is(err, errGitNone), err == nil && out == "":
		return nil
	case err != nil:
		return fmt.Errorf("might have come with a commit: %v", err)
	}
	return fmt.Errorf("came with commit %.12s, and %w", out, errTracked)
}
