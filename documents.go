package main

// The repository's own documents, shown under /docs/files/. They are listed once, shortly after the server was published
// (with --strict before), and read again each time one is shown.
//
// Only what the list holds is ever opened, and only through os.Root, which follows no link and no name out of the checkout.
// A document that cannot be shown is listed with the reason: one that is missing from the list would be taken for one that
// does not exist.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"
)

const (
	documentLimit  = 1 << 20 // bytes of a document that is shown
	documentsLimit = 5000    // documents that are listed
	walkLimit      = 100_000 // names that a walk looks at
	indexTime      = 10 * time.Second
	// indexDelay keeps the index out of the way of what clients ask first, unless somebody asks for it.
	indexDelay = 500 * time.Millisecond
	// indexPatience is how long a page waits for the index.
	indexPatience = 5 * time.Second
)

type document struct {
	file    string // where it lies: under its path, or under that of the document to which it links
	path    string // relative to the root, with slashes
	title   string // its first heading; "" when it has none
	problem string // why it cannot be shown; "" when it can
}

// documents is the index of one server.
type documents struct {
	root, mode string
	wanted     chan struct{} // closed when somebody waits for the index
	want       sync.Once
	ready      chan struct{} // closed when list and reason are set
	list       []document    // by path
	reason     string        // why the list may be short
}

func newDocuments(root, mode string) *documents {
	return &documents{root: root, mode: mode, wanted: make(chan struct{}), ready: make(chan struct{})}
}

// index lists the documents, in its own time.
func (d *documents) index(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, indexTime)
	defer cancel()
	d.list, d.reason = listDocuments(ctx, d.root, d.mode)
	close(d.ready)
}

// indexLater is index in the background: at once when somebody waits for it. It ends by itself, and when ending is closed.
func (d *documents) indexLater(ctx context.Context, ending <-chan struct{}) {
	t := time.NewTimer(indexDelay)
	defer t.Stop()
	select {
	case <-t.C:
	case <-d.wanted:
	case <-ending:
		return
	}
	d.index(ctx)
}

// wait returns when the list is there; false when that takes too long.
func (d *documents) wait(ctx context.Context) bool {
	d.want.Do(func() { close(d.wanted) })
	t := time.NewTimer(indexPatience)
	defer t.Stop()
	select {
	case <-d.ready:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

func (d *documents) find(name string) (document, bool) {
	i, ok := slices.BinarySearchFunc(d.list, name, func(e document, name string) int { return strings.Compare(e.path, name) })
	if !ok {
		return document{}, false
	}
	return d.list[i], true
}

// problems names the documents that cannot be shown, and why the list may be short.
func (d *documents) problems() []string {
	var all []string
	if d.reason != "" {
		all = append(all, d.reason)
	}
	for _, e := range d.list {
		if e.problem != "" {
			all = append(all, fmt.Sprintf("%q cannot be read: %s", e.path, e.problem))
		}
	}
	if most := 10; len(all) > most {
		all = append(all[:most], fmt.Sprintf("and %d more", len(all)-most))
	}
	return all
}

// strictRefusal is the refusal to serve a checkout whose documents cannot all be read: exit 10.
type strictRefusal struct{ problems []string }

func (e *strictRefusal) Error() string {
	return "--strict: " + strings.Join(e.problems, "; ")
}

// refuses looks at the documents before anybody is told of this server, when --strict was given and this is what the process
// begins with: then it does not serve. One that has answered its client as a bridge, or alone, must not leave it for that.
func (p *process) refuses(ctx context.Context, d *documents) bool {
	if !p.set.strict || p.roles > 1 {
		return false
	}
	d.index(ctx)
	if problems := d.problems(); len(problems) > 0 {
		p.refusal = &strictRefusal{problems}
		return true
	}
	return false
}

// indexDocuments is the server's index in the background.
func (s *server) indexDocuments() {
	select {
	case <-s.docs.ready: // before publishing, for --strict
		return
	default:
	}
	s.docs.indexLater(s.calls, s.ending)
	if s.set.strict && !s.gone() {
		for _, problem := range s.docs.problems() {
			s.log.Warn(problem + "; --strict does not end a process that took over while its client works")
		}
	}
}

// listDocuments finds the documents and looks at each.
func listDocuments(ctx context.Context, dir, mode string) (list []document, reason string) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, "the checkout cannot be opened: " + reasonOf(err)
	}
	defer root.Close()
	names, reason := trackedDocuments, ""
	if mode == "filesystem" {
		names = walkDocuments
	}
	list, reason = names(ctx, root)
	slices.SortFunc(list, func(a, b document) int { return strings.Compare(a.path, b.path) })
	list = slices.CompactFunc(list, func(a, b document) bool { return a.path == b.path }) // git lists a conflict three times
	if len(list) > documentsLimit {
		list, reason = list[:documentsLimit:documentsLimit], joined(reason, fmt.Sprintf("only the first %d documents are listed", documentsLimit))
	}
	kept := make([]document, 0, len(list))
	for _, e := range list {
		if ctx.Err() != nil {
			return kept, joined(reason, fmt.Sprintf("listing the documents took longer than %v", indexTime))
		}
		if e.problem == "" {
			text := ""
			if e.file, err = fileOf(root, e.path, list); err == nil {
				text, err = readDocument(root, e.file)
			}
			if errors.Is(err, errNotHere) {
				continue
			}
			if e.title = documentTitle(text); err != nil {
				e.problem = reasonOf(err)
			}
		}
		kept = append(kept, e)
	}
	return slices.Clip(kept), reason
}

var rootDocuments = []string{"AGENTS.md", "CLAUDE.md", "README.md"}

func isDocument(name string) bool {
	return slices.Contains(rootDocuments, name) || strings.HasPrefix(name, "docs/") && strings.HasSuffix(name, ".md")
}

// trackedDocuments asks git what it tracks.
func trackedDocuments(ctx context.Context, root *os.Root) ([]document, string) {
	args := append([]string{"ls-files", "-z", "--"}, rootDocuments...)
	out, err := runGit(ctx, root.Name(), append(args, "docs")...)
	if err != nil {
		return nil, fmt.Sprintf("git ls-files could not list the documents: %v", err)
	}
	var list []document
	for name := range strings.SplitSeq(out, "\x00") {
		if isDocument(name) {
			list = append(list, document{path: name})
		}
	}
	return list, ""
}

// walkDocuments looks for itself. Directories that tools keep for themselves hold no documents of the repository.
func walkDocuments(ctx context.Context, root *os.Root) (list []document, reason string) {
	for _, name := range rootDocuments {
		list = append(list, document{path: name})
	}
	seen := 0
	fs.WalkDir(root.FS(), "docs", func(name string, d fs.DirEntry, err error) error {
		seen++
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			list = append(list, document{path: name, problem: reasonOf(err)})
			return nil
		case ctx.Err() != nil || seen > walkLimit:
			reason = fmt.Sprintf("docs holds more than could be looked at: %d names", seen-1)
			return fs.SkipAll
		case d.IsDir() && (d.Name() == "node_modules" || strings.HasPrefix(d.Name(), ".")):
			return fs.SkipDir
		case !d.IsDir() && isDocument(name):
			list = append(list, document{path: name})
		}
		return nil
	})
	return list, reason
}

var (
	errNotHere  = errors.New("there is no such file here") // tracked, and not checked out or deleted since
	errNotText  = errors.New("it is not UTF-8 text")
	errTooLarge = fmt.Errorf("it has more than %d bytes", documentLimit)
	errBadName  = errors.New("its name is not one that a browser can ask for")
)

var errLink = errors.New("it is a link, and only one to another of these documents is followed")

// fileOf is where a document lies: under its own name, or under that of another document to which it links. A link that came with
// the repository could lead to anything else in the checkout: the lease, the journal, git's configuration.
func fileOf(root *os.Root, name string, list []document) (string, error) {
	if link, err := firstLink(root, name); link != name {
		return name, err
	}
	target, err := root.Readlink(name)
	if err != nil {
		return name, err
	}
	to := path.Join(path.Dir(name), filepath.ToSlash(target))
	if filepath.IsAbs(target) || !slices.ContainsFunc(list, func(d document) bool { return d.path == to }) {
		return name, errLink
	}
	return to, nil
}

// firstLink is the first component of a path that is a link; "" for none.
func firstLink(root *os.Root, name string) (string, error) {
	for at := range name + "/" {
		if at < len(name) && name[at] != '/' {
			continue
		}
		info, err := root.Lstat(name[:at])
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return "", errNotHere
		case err != nil:
			return "", err
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			return name[:at], nil
		}
	}
	return "", nil
}

// readDocument reads a document within all limits, and through no link. The descriptor is looked at after opening, and must be
// what the name leads to: between a look at a name and its opening another file, or a link, could take the name.
func readDocument(root *os.Root, name string) (string, error) {
	if !plainPath("/"+name) || !fs.ValidPath(name) {
		return "", errBadName
	}
	switch link, err := firstLink(root, name); {
	case err != nil:
		return "", err
	case link != "":
		return "", errLink
	}
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // no pipe is waited for
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	now, err := root.Lstat(name)
	switch {
	case err != nil:
		return "", err
	case !info.Mode().IsRegular():
		return "", errors.New(describe(info.Mode()))
	case !os.SameFile(now, info):
		return "", errLink
	case info.Size() > documentLimit:
		return "", errTooLarge
	}
	text, err := io.ReadAll(io.LimitReader(f, documentLimit+1))
	switch {
	case err != nil:
		return "", err
	case len(text) > documentLimit:
		return "", errTooLarge
	case !utf8.Valid(text):
		return "", errNotText
	}
	return strings.TrimPrefix(string(text), "\ufeff"), nil
}

// documentURL is where a document is shown.
func documentURL(name string) string { return (&url.URL{Path: "/docs/files/" + name}).EscapedPath() }

// documentLink says where a link of the document leads: to http and https, or, within the repository, to another document.
// A browser takes more for an address than url.Parse does, so a relative one is not passed on but made anew.
func documentLink(name, address string) string {
	if strings.ContainsFunc(address, func(r rune) bool { return r < ' ' || r == '\\' || r == 0x7f }) {
		return ""
	}
	u, err := url.Parse(address)
	switch {
	case err != nil:
		return ""
	case u.Scheme == "http" || u.Scheme == "https":
		if u.Host == "" {
			return ""
		}
		return u.String()
	case u.Scheme != "" || u.Host != "" || u.User != nil || u.Opaque != "":
		return ""
	}
	fragment := ""
	if u.Fragment != "" {
		fragment = "#" + (&url.URL{Path: headingPrefix + u.Fragment}).EscapedPath()
	}
	if u.Path == "" {
		return fragment
	}
	target := path.Join(path.Dir("/"+name), u.Path)
	if path.IsAbs(u.Path) { // from the root of the repository
		target = path.Clean(u.Path)
	} else if rel := path.Join(path.Dir(name), u.Path); rel == ".." || strings.HasPrefix(rel, "../") {
		return ""
	}
	return documentURL(strings.TrimPrefix(target, "/")) + fragment
}

// serveDocument shows a document of the repository. What is not in the list is not looked for.
func (s *server) serveDocument(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("path")
	if name == "" {
		http.Redirect(w, r, "/docs/#documents", http.StatusFound)
		return
	}
	x := &exchange{}
	if !s.startWork(w, r, x, &s.working) {
		return
	}
	defer x.end()
	if !s.documentsListed(r, x) {
		s.pageFailure(w, r, 503, "busy", "The documents of this repository are still being listed: try again")
		return
	}
	e, ok := s.docs.find(name)
	if !ok {
		s.pageFailure(w, r, 404, "not_found", fmt.Sprintf("%q is not among the documents that are shown here", clip(name, 200)))
		return
	}
	text, err := s.docs.read(e)
	if err != nil {
		s.pageFailure(w, r, 404, "not_found", fmt.Sprintf("%q cannot be shown: %s", clip(name, 200), reasonOf(err)))
		return
	}
	body, title := renderMarkdown(text, func(address string) string { return documentLink(name, address) })
	p := page{title: title, section: "/docs/"}
	if title == "" {
		p.title = name
	}
	p.add(`<nav class="trail" aria-label="You are here"><a href="/docs/">Documentation</a> <a href="/docs/#documents">Documents</a> <span aria-current="page">%s</span></nav>`, name)
	p.add(`<article class="prose">%s</article>`, body)
	x.executed()
	s.servePage(w, r, &p)
}

// documentsListed waits for the list of documents; false when there is none for now.
func (s *server) documentsListed(r *http.Request, x *exchange) bool {
	defer x.pause(r.Context())()
	return s.docs != nil && s.docs.wait(r.Context())
}

func (d *documents) read(e document) (string, error) {
	if e.problem != "" {
		return "", errors.New(e.problem)
	}
	root, err := os.OpenRoot(d.root)
	if err != nil {
		return "", err
	}
	defer root.Close()
	return readDocument(root, e.file)
}
