package main

// How the servers of the repository's checkouts stand.

import (
	"cmp"
	"context"
	"fmt"
	"time"
)

// statusListed is how many checkouts are all listed. With more of them, those without a server are only counted, or the
// answer would be past what a client shows to its model.
const statusListed = 64

type statusInput struct {
	Checkouts string `json:"checkouts" doc:"which checkouts to look at: all of the repository, or the one of this server alone" enum:"repository,this" default:"repository"`
}

type statusOutput struct {
	CheckoutID  string           `json:"checkout_id,omitempty" doc:"digest that names this checkout; absent outside of one"`
	Git         *gitView         `json:"git,omitempty" doc:"the repository"`
	Desired     desiredView      `json:"desired" doc:"what this process was started to be"`
	ThisProcess *leaseView       `json:"this_process,omitempty" doc:"the lease this process has published; absent when it is not the server"`
	Standing    string           `json:"standing" doc:"how the server of this checkout stands" enum:"absent,starting,ready,outdated,stale"`
	Servers     []serverView     `json:"servers" doc:"the server of each covered checkout, this one's first"`
	Omitted     map[string]int   `json:"omitted,omitempty" doc:"checkouts that are not listed because there are very many, counted by standing: no server, nobody there"`
	Complete    bool             `json:"complete" doc:"whether every checkout could be looked at"`
	Reason      string           `json:"reason,omitempty" doc:"why checkouts may be missing, in the words of git where it said something"`
	Connections connectionCounts `json:"connections" doc:"the connections of this process"`
}

type gitView struct {
	CommonDir string `json:"common_dir" doc:"the git directory that all checkouts share"`
	ID        string `json:"id" doc:"digest that names the repository"`
	Linked    bool   `json:"linked" doc:"whether this checkout is a linked worktree"`
}

type desiredView struct {
	Host       string       `json:"host" doc:"the address it binds, always loopback"`
	Port       int          `json:"port" doc:"the port it was told to bind; 0 is any"`
	Version    string       `json:"version" doc:"its version"`
	Executable *programFile `json:"executable,omitempty" doc:"its program file when it started"`
}

type programFile struct {
	Path  string `json:"path" doc:"where it is"`
	Mtime int64  `json:"mtime" doc:"when it was modified, in milliseconds since 1970"`
	Size  int64  `json:"size" doc:"its size in bytes"`
}

type leaseView struct {
	PID        int          `json:"pid" doc:"the server's process"`
	URL        string       `json:"url,omitempty" doc:"where it answers; absent until it does"`
	StartedAt  string       `json:"started_at" doc:"when the lease was taken, RFC 3339 in UTC"`
	Executable *programFile `json:"executable,omitempty" doc:"its program file when it started"`
	Version    string       `json:"version" doc:"its version"`
}

type serverView struct {
	Worktree     string     `json:"worktree" doc:"the directory of the checkout"`
	Branch       string     `json:"branch,omitempty" doc:"the branch checked out there, when there is one"`
	CheckoutID   string     `json:"checkout_id" doc:"digest that names the checkout"`
	Primary      bool       `json:"primary" doc:"whether it is the main checkout and no linked worktree"`
	ThisCheckout bool       `json:"this_checkout" doc:"whether it is the checkout of the answering process"`
	Standing     string     `json:"standing" doc:"how its server stands" enum:"absent,starting,ready,outdated,stale"`
	Reason       string     `json:"reason,omitempty" doc:"why it stands so, or could not be asked"`
	Lease        *leaseView `json:"lease,omitempty" doc:"what its lease says"`
	Peers        int        `json:"peers" doc:"how many peers are attached there, as far as it could be asked" min:"0"`
}

type connectionCounts struct {
	Sessions         int   `json:"sessions" doc:"sessions attached over HTTP" min:"0"`
	ClosedByDeadline int64 `json:"closed_by_deadline" doc:"connections closed because nothing came, or was read, within the read deadline" min:"0"`
	RefusedBusy      int64 `json:"refused_busy" doc:"requests refused because too many were at work" min:"0"`
}

func (s *server) status(ctx context.Context, in statusInput) (statusOutput, error) {
	g := s.gather(ctx, in.Checkouts != "this", s.set.timing.probe+gatherTime, s.board.peers())
	out := statusOutput{
		CheckoutID: s.checkout.id,
		Desired: desiredView{
			Host: "127.0.0.1", Port: s.set.httpPort, Version: s.set.version, Executable: (*programFile)(s.set.exe),
		},
		Standing: standingAbsent,
		Servers:  []serverView{},
		Complete: g.complete(), Reason: g.reason,
		Connections: s.connections(),
	}
	if s.checkout.root != "" {
		out.Git = &gitView{CommonDir: s.checkout.commonDir, ID: s.checkout.gitID, Linked: s.checkout.linked}
	}
	if s.lease != nil {
		out.ThisProcess = viewLease(s.lease.document())
	}
	for i, f := range g.boards {
		if i == 0 {
			out.Standing = f.standing
		} else if len(g.boards) > statusListed && f.empty() {
			if out.Omitted == nil {
				out.Omitted = map[string]int{}
			}
			out.Omitted[f.standing]++
			continue
		}
		out.Servers = append(out.Servers, serverView{
			Worktree: f.root, Branch: f.branch, CheckoutID: f.id, Primary: f.primary, ThisCheckout: i == 0,
			Standing: f.standing, Reason: cmp.Or(f.reason, f.why), Lease: f.lease, Peers: attached(f.peers),
		})
	}
	return out, nil
}

const (
	standingAbsent   = "absent"
	standingStarting = "starting"
	standingReady    = "ready"
	standingOutdated = "outdated"
	standingStale    = "stale"
)

// evidence is all that a standing may depend on.
type evidence struct {
	reading   reading
	age       time.Duration // of the lease file
	probe     probeResult
	detail    string      // how the probe failed
	disk      *executable // what stands now where the server's program was
	version   string      // ours
	bindGrace time.Duration
}

// standing says where a checkout's server stands, and why where the word alone does not tell.
func standing(e evidence) (word, why string) {
	r := e.reading
	switch {
	case r.state == readingAbsent:
		return standingAbsent, ""
	case r.state != readingDocument:
		return standingStale, "its lease is none: " + r.why
	case !r.held:
		return standingStale, "no process holds its lease"
	case e.probe == probeProven && r.doc.Executable != nil && (e.disk == nil || *e.disk != *r.doc.Executable):
		return standingOutdated, fmt.Sprintf("its program file %q was replaced or removed since it started", r.doc.Executable.Path)
	case e.probe == probeProven && r.doc.Version == "":
		return standingOutdated, "it does not say its version"
	case e.probe == probeProven && olderRelease(r.doc.Version, e.version):
		return standingOutdated, fmt.Sprintf("it is release %q, this is %q", r.doc.Version, e.version)
	case e.probe == probeProven:
		return standingReady, ""
	case r.doc.URL == nil && e.age < e.bindGrace:
		return standingStarting, "its server has not said yet where it answers"
	case r.doc.URL == nil:
		return standingStale, fmt.Sprintf("a process holds its lease and has not said for %v where it answers", e.bindGrace)
	case e.detail == "":
		return standingStale, fmt.Sprintf("a process holds its lease, and %s was not asked", *r.doc.URL)
	}
	return standingStale, fmt.Sprintf("a process holds its lease, but %s does not answer for it: %s", *r.doc.URL, e.detail)
}

// judge notes what the evidence says about the server, and why its board is not read unless it is asked for next.
func (f *found) judge(e evidence) {
	if e.reading.doc.Executable != nil {
		e.disk = statExecutable(e.reading.doc.Executable.Path)
	}
	f.standing, f.why = standing(e)
	if e.reading.state == readingDocument {
		f.lease = viewLease(e.reading.doc)
	}
	if e.reading.held && e.probe != probeProven {
		f.reason = f.why // whoever holds a lease may have peers
	}
}

// viewLease shows a lease without its token.
func viewLease(doc leaseDocument) *leaseView {
	v := &leaseView{PID: doc.PID, StartedAt: doc.StartedAt, Version: doc.Version}
	if doc.URL != nil {
		v.URL = *doc.URL
	}
	if doc.Executable != nil {
		v.Executable = (*programFile)(doc.Executable)
	}
	return v
}
