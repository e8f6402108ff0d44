package main

// The checkouts of the repository, by git's word: git worktree list. Paths and branch names may hold anything a file
// name can, so nothing is split on blanks or lines where a better form can be had, and git's output is input from outside.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	gitOutputLimit = 16 << 20 // bytes of git's answer that are read; 625 checkouts are 100 KiB
	gitWordsLimit  = 1 << 10  // bytes of git's complaint that are kept
)

var (
	errGitUsage = errors.New("this git does not know an option") // before 2.36 there is no -z
	errGitNone  = errors.New("git found nothing")                // the 1 of git grep
)

// listed is a checkout that the repository registers, whatever has become of it.
type listed struct {
	root    string // canonical as far as it exists
	id      string
	branch  string
	primary bool // the one that holds the repository
}

// listing is what enumerating came to. With a reason it may be short.
type listing struct {
	checkouts []listed // in git's order
	reason    string   // in git's words, where git said something
}

func (c checkout) listed() listed {
	return listed{root: c.root, id: c.id, branch: branchOf(c.gitDir), primary: !c.linked}
}

// enumerate lists the checkouts of the repository, c included. Git is not started where it has nothing to add.
func (c checkout) enumerate(ctx context.Context) listing {
	alone := listing{checkouts: []listed{c.listed()}}
	if !c.linked && !hasEntries(filepath.Join(c.commonDir, "worktrees")) { // git removes it with the last of them
		return alone
	}
	dir := c.root
	if _, err := os.Stat(dir); err != nil {
		dir = c.commonDir // the checkout was removed under us; the repository is still there
	}
	records, skipped, err := worktreeList(ctx, dir, c.commonDir)
	if err != nil {
		alone.reason = err.Error()
		return alone
	}
	return c.placeRecords(records, skipped)
}

// worktreeList asks git for its worktrees. Paths that an old git does not set apart are returned as skipped.
func worktreeList(ctx context.Context, dir, commonDir string) (records []worktreeRecord, skipped []string, err error) {
	out, err := runGit(ctx, dir, "worktree", "list", "--porcelain", "-z")
	if err == nil {
		records, err = parseWorktrees(out)
	}
	if !errors.Is(err, errGitUsage) {
		return records, nil, err
	}
	out, err = runGit(ctx, dir, "worktree", "list", "--porcelain")
	if err != nil {
		return nil, nil, err
	}
	registered := registeredWorktrees(commonDir)
	paths, skipped := parseWorktreeLines(out, registered)
	for _, p := range paths {
		r := worktreeRecord{path: p}
		if c, err := readCheckout(canonicalOrSame(p)); err == nil {
			r.branch = branchOf(c.gitDir)
		}
		if p == registered[0] {
			r.bare, _ = coreConfig(commonDir)
		}
		records = append(records, r)
	}
	return records, skipped, nil
}

// placeRecords turns git's records into checkouts. Each is listed once, however often it is registered.
func (c checkout) placeRecords(records []worktreeRecord, skipped []string) listing {
	var l listing
	seen := map[string]bool{}
	where := newPlaces()
	for i, r := range records {
		if r.bare {
			continue
		}
		root := where.canonical(filepath.FromSlash(r.path))
		if root == c.commonDir {
			// The main checkout's .git is a file or a link: git shows what that leads to in place of the checkout.
			if root = c.mainRoot(); root == "" {
				skipped = append(skipped, r.path)
				continue
			}
		}
		if !seen[root] {
			seen[root] = true
			l.checkouts = append(l.checkouts, listed{root: root, id: digest(root), branch: r.branch, primary: i == 0})
		}
	}
	if skipped != nil {
		l.reason = fmt.Sprintf("skipped because git's answer does not tell where they are: %q", skipped)
	}
	if !seen[c.root] {
		l.checkouts = append([]listed{c.listed()}, l.checkouts...)
		l.reason = joined(l.reason, "git does not list this checkout, so nobody in another one sees who is here; hint: if it was moved, git worktree repair here")
	}
	return l
}

// mainRoot is the root of the main checkout when the common directory does not lie in it; "" when unknown.
func (c checkout) mainRoot() string {
	if !c.linked {
		return c.root
	}
	_, worktree := coreConfig(c.commonDir)
	if worktree == "" {
		return ""
	}
	main, err := readCheckout(canonicalOrSame(resolve(c.commonDir, worktree)))
	if err != nil || main.commonDir != c.commonDir {
		return ""
	}
	return main.root
}

// worktreeRecord is one entry of git worktree list.
type worktreeRecord struct {
	path   string
	branch string
	bare   bool
}

// parseWorktrees reads the -z form: fields end with a zero byte and records with an empty field. No path and no lock
// reason can hold a zero byte, so none can forge a field; only a record's first field is a path.
func parseWorktrees(out string) ([]worktreeRecord, error) {
	var records []worktreeRecord
	var r *worktreeRecord
	if !strings.HasSuffix(out, "\x00\x00") {
		return nil, fmt.Errorf("git worktree list: %d bytes that are no whole list", len(out))
	}
	for field := range strings.SplitSeq(out, "\x00") {
		switch {
		case field == "":
			r = nil
		case r == nil:
			path, ok := strings.CutPrefix(field, "worktree ")
			if !ok || path == "" {
				return nil, fmt.Errorf("git worktree list: a record begins with %q instead of a worktree", clip(field, 80))
			}
			records = append(records, worktreeRecord{path: path})
			r = &records[len(records)-1]
		case field == "bare":
			r.bare = true
		default:
			if ref, ok := strings.CutPrefix(field, "branch "); ok {
				r.branch = strings.TrimPrefix(ref, "refs/heads/")
			}
		}
	}
	return records, nil
}

// parseWorktreeLines reads the form of git before 2.36, in which a path may hold what looks like the next line. So a
// line counts only when it names a registered worktree, and nothing but the path is taken from it: what a forged line
// could say is then true. Registered ones that no line names are returned as missed.
func parseWorktreeLines(out string, registered []string) (paths, missed []string) {
	open := map[string]bool{}
	for _, p := range registered {
		open[p] = true
	}
	for line := range strings.SplitSeq(out, "\n") {
		p, ok := strings.CutPrefix(line, "worktree ")
		if ok && strings.HasPrefix(p, `"`) { // no absolute path begins so: it is quoted
			p, ok = unquoteC(p)
		}
		if ok && open[p] {
			open[p] = false
			paths = append(paths, p)
		}
	}
	for _, p := range registered {
		if open[p] {
			open[p] = false
			missed = append(missed, p)
		}
	}
	return paths, missed
}

// unquoteC undoes git's quoting of a path, in which bytes are written as in C.
func unquoteC(s string) (string, bool) {
	if len(s) < 2 || s[0] != '"' || s[len(s)-1] != '"' {
		return "", false
	}
	s = s[1 : len(s)-1]
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '"' {
			return "", false
		}
		if s[i] != '\\' {
			b.WriteByte(s[i])
			continue
		}
		if i++; i == len(s) {
			return "", false
		}
		if at := strings.IndexByte(`abtnvfr"\`, s[i]); at >= 0 {
			b.WriteByte("\a\b\t\n\v\f\r\"\\"[at])
			continue
		}
		n := 0
		for end := i + 3; i < end; i++ {
			if i == len(s) || s[i] < '0' || s[i] > '7' {
				return "", false
			}
			n = n<<3 | int(s[i]-'0')
		}
		i--
		if n > 255 {
			return "", false
		}
		b.WriteByte(byte(n))
	}
	return b.String(), true
}

// registeredWorktrees reads the paths from git's own files, the main one first. Only for a git whose answer needs it.
func registeredWorktrees(commonDir string) []string {
	main := commonDir
	if filepath.Base(commonDir) == ".git" {
		main = filepath.Dir(commonDir)
	}
	paths := []string{main}
	admin, _ := os.ReadDir(filepath.Join(commonDir, "worktrees")) // unreadable: then git fails as well
	for _, entry := range admin {
		dir := filepath.Join(commonDir, "worktrees", entry.Name())
		if text, err := readGitFile(filepath.Join(dir, "gitdir")); err == nil {
			paths = append(paths, filepath.Dir(resolve(dir, text)))
		}
	}
	return paths
}

// runGit runs git where it cannot be led to another repository by the environment, speaks English, answers within
// bounds and leaves nothing running. Its error is in git's words where git said something.
func runGit(ctx context.Context, dir string, args ...string) (string, error) {
	what := "git " + strings.Join(args[:min(2, len(args))], " ")
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	out := &boundedBuffer{limit: gitOutputLimit, full: func() {
		stop(fmt.Errorf("%s answered more than %d bytes", what, gitOutputLimit))
	}}
	words := &boundedBuffer{limit: gitWordsLimit}
	// The monitor that a configuration may name is a program of somebody's that no question of ours has need to start.
	cmd := exec.CommandContext(ctx, "git", append([]string{"-c", "core.fsmonitor=false"}, args...)...)
	cmd.Dir = dir
	// Nothing is fetched: what is missing in a partial clone would be asked for by a program that its configuration names.
	cmd.Env = append(gitEnvironment(os.Environ()), "GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=")
	cmd.Stdout, cmd.Stderr = out, words
	cmd.WaitDelay = time.Second // for what it leaves behind with our pipe; long, or a busy machine would cut its answer
	ownGroup(cmd)
	cmd.Cancel = func() error { return killGroup(cmd) }
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out.String(), nil
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		return "", fmt.Errorf("%s did not answer in time", what)
	case context.Cause(ctx) != nil:
		return "", context.Cause(ctx)
	case errors.Is(err, exec.ErrNotFound):
		return "", errors.New("git is not in the PATH of this server")
	case errors.As(err, &exit) && exit.ExitCode() == 129:
		return "", errGitUsage
	case errors.As(err, &exit) && exit.ExitCode() == 1 && words.String() == "":
		return "", errGitNone
	}
	return "", errors.New(cmp.Or(cleanText(words.String(), gitWordsLimit), fmt.Sprintf("%s: %v", what, err)))
}

// gitEnvironment is the environment for a git of ours: without what a hook exports, and with messages in English.
func gitEnvironment(environ []string) []string {
	env := make([]string, 0, len(environ)+1)
	for _, v := range environ {
		if !strings.HasPrefix(v, "GIT_") && !strings.HasPrefix(v, "LC_ALL=") {
			env = append(env, v)
		}
	}
	return append(env, "LC_ALL=C")
}

// boundedBuffer keeps the first bytes up to its limit. One that has a full takes no more and calls it. The buffer is
// not embedded: io.Copy would find its ReadFrom, which knows no limit.
type boundedBuffer struct {
	kept  bytes.Buffer
	limit int
	full  func()
}

func (b *boundedBuffer) String() string { return b.kept.String() }

func (b *boundedBuffer) Write(p []byte) (int, error) {
	room := b.limit - b.kept.Len()
	if len(p) <= room {
		return b.kept.Write(p)
	}
	b.kept.Write(p[:room])
	if b.full != nil {
		b.full()
		return room, io.ErrShortWrite
	}
	return len(p), nil
}

// places makes many paths canonical that mostly stand side by side, and of missing ones what is left of them.
type places struct {
	parents map[string]string
}

func newPlaces() *places { return &places{parents: map[string]string{}} }

func (w *places) canonical(path string) string {
	path = filepath.Clean(path)
	if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		return canonicalOrSame(path)
	}
	dir, name := filepath.Split(path)
	parent, ok := w.parents[dir]
	if !ok {
		parent = canonicalOrSame(dir)
		w.parents[dir] = parent
	}
	return filepath.Join(parent, name)
}

func hasEntries(dir string) bool {
	f, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer f.Close()
	names, _ := f.Readdirnames(1)
	return len(names) > 0
}
