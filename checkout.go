package main

// The checkout a directory belongs to, read from git's own files: no git is started for it, and no variable of git's is
// looked at.

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const gitFileLimit = 1 << 20 // bytes of one of git's small files that are read

var errNoCheckout = errors.New("not in a git checkout")

type checkout struct {
	root      string // canonical
	id        string // digest of root
	gitDir    string
	commonDir string // canonical; the same in every checkout of the repository
	gitID     string // digest of commonDir
	linked    bool   // made by git worktree add
}

// findCheckout finds the checkout that holds the directory: the nearest one above that contains .git decides. Where
// that is broken nothing further up is taken instead: fails closed, or a broken worktree inside a repository would be
// served as that repository.
func findCheckout(dir string) (checkout, error) {
	start, err := canonical(dir)
	if err != nil {
		return checkout{}, fmt.Errorf("looking for the checkout: %w", err)
	}
	for root := start; ; {
		_, err := os.Lstat(filepath.Join(root, ".git"))
		if err == nil {
			return readCheckout(root)
		}
		if !notThere(err) {
			return checkout{}, fmt.Errorf("looking for the checkout: %w", err)
		}
		up := filepath.Dir(root)
		if up == root {
			return checkout{}, fmt.Errorf("%w: neither %q nor a directory above it contains .git", errNoCheckout, start)
		}
		root = up
	}
}

// readCheckout reads the checkout whose canonical root is given.
func readCheckout(root string) (checkout, error) {
	none := func(format string, args ...any) (checkout, error) {
		return checkout{}, fmt.Errorf("%w: %s", errNoCheckout, fmt.Sprintf(format, args...))
	}
	dotGit := filepath.Join(root, ".git")
	gitDir, err := followGitFile(dotGit)
	if err != nil {
		return none("%v", err)
	}
	if _, err := os.Lstat(filepath.Join(gitDir, "HEAD")); err != nil {
		return none("%q leads to %q, which has no HEAD", dotGit, gitDir)
	}
	common := gitDir
	if text, err := readGitFile(filepath.Join(gitDir, "commondir")); err == nil {
		common, err = canonical(resolve(gitDir, text))
		if err != nil {
			return none("%q leads to %q, whose repository is gone: %v", dotGit, gitDir, err)
		}
	} else if !notThere(err) {
		return none("%v", err)
	}
	linked := filepath.Dir(gitDir) == filepath.Join(common, "worktrees")
	if bare, _ := coreConfig(common); bare && !linked {
		return none("%q leads to a bare repository; start in one of its worktrees", dotGit)
	}
	return checkout{root: root, id: digest(root), gitDir: gitDir, commonDir: common, gitID: digest(common), linked: linked}, nil
}

// followGitFile gives the canonical git directory that a .git is or names.
func followGitFile(dotGit string) (string, error) {
	info, err := os.Stat(dotGit)
	switch {
	case err != nil:
		return "", fmt.Errorf("%q leads nowhere: %w", dotGit, err)
	case info.IsDir():
		return canonical(dotGit)
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("%q is neither a directory nor a file", dotGit)
	}
	text, err := readGitFile(dotGit)
	if err != nil {
		return "", err
	}
	to, ok := strings.CutPrefix(text, "gitdir: ")
	if !ok {
		return "", fmt.Errorf("%q is not a git file", dotGit)
	}
	dir, err := canonical(resolve(filepath.Dir(dotGit), to))
	if err != nil {
		return "", fmt.Errorf("%q names a git directory that is not there: %w", dotGit, err)
	}
	return dir, nil
}

// readGitFile reads one of the small files of git whose whole content is one value, which may hold newlines.
func readGitFile(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() { // a pipe would be waited for
		return "", fmt.Errorf("%q is not a file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, gitFileLimit))
	return strings.TrimRight(string(data), "\r\n"), err
}

// branchOf reads the branch from HEAD; "" when it is detached or cannot be told.
func branchOf(gitDir string) string {
	head := filepath.Join(gitDir, "HEAD")
	ref, err := os.Readlink(head) // the oldest form of all
	if err != nil {
		text, err := readGitFile(head)
		if err != nil {
			return ""
		}
		ref, _ = strings.CutPrefix(text, "ref:")
		ref = strings.TrimSpace(ref)
	}
	branch, ok := strings.CutPrefix(ref, "refs/heads/")
	if !ok || branch == ".invalid" { // reftable keeps HEAD elsewhere and puts this here
		return ""
	}
	return branch
}

// coreConfig reads the two settings that say whether a git directory has a work tree and where.
func coreConfig(commonDir string) (bare bool, worktree string) {
	perWorktree := false
	set := func(section, key, value string) {
		switch section + "." + key {
		case "core.bare":
			bare = isTrue(value)
		case "core.worktree":
			worktree = value
		case "extensions.worktreeconfig":
			perWorktree = isTrue(value)
		}
	}
	readConfig(filepath.Join(commonDir, "config"), set)
	if perWorktree {
		readConfig(filepath.Join(commonDir, "config.worktree"), set)
	}
	return bare, worktree
}

// readConfig calls set for the plain settings of a git config file: no includes, no continued lines.
func readConfig(path string, set func(section, key, value string)) {
	text, err := readGitFile(path)
	if err != nil {
		return
	}
	section := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "["); ok {
			section, line, _ = strings.Cut(rest, "]")
			section, line = strings.ToLower(strings.TrimSpace(section)), strings.TrimSpace(line)
		}
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		key, value, valued := strings.Cut(line, "=")
		if !valued {
			value = "true"
		}
		value = strings.TrimSpace(value)
		if quoted, ok := strings.CutPrefix(value, `"`); ok {
			value, _, _ = strings.Cut(quoted, `"`)
		} else if i := strings.IndexAny(value, "#;"); i >= 0 {
			value = strings.TrimSpace(value[:i])
		}
		set(section, strings.ToLower(strings.TrimSpace(key)), value)
	}
}

func isTrue(value string) bool {
	switch strings.ToLower(value) {
	case "true", "yes", "on", "1":
		return true
	}
	return false
}

// digest names a checkout or a repository without telling where it is.
func digest(path string) string {
	sum := sha256.Sum256([]byte(path))
	return hex.EncodeToString(sum[:16])
}

// canonical is the one spelling of an existing path.
func canonical(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(path)
}

func canonicalOrSame(path string) string {
	if p, err := canonical(path); err == nil {
		return p
	}
	return filepath.Clean(path)
}

func resolve(dir, path string) string {
	if path = filepath.FromSlash(path); filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

func notThere(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}
