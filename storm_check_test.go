//go:build unix

package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

var (
	servedAt  = regexp.MustCompile(`serving this checkout at (http://127\.0\.0\.1:\d+): `)
	brokeDown = regexp.MustCompile(`DATA RACE|(?m)^(panic|fatal error):|panic serving|internal error`)
)

// urlsOf lists where a process said that it serves.
func (r *stormRun) urlsOf() (list []string) {
	log, _ := os.ReadFile(r.log)
	for _, m := range servedAt.FindAllStringSubmatch(string(log), -1) {
		list = append(list, m[1])
	}
	return list
}

// ended looks at what a process has left behind.
func (s *storm) ended(r *stormRun) {
	log, _ := os.ReadFile(r.log)
	r.dump = string(log)
	if strings.Contains(r.dump, aloneWords) {
		r.c.alone.Store(true)
	}
	if brokeDown.Match(log) {
		s.t.Errorf("%s broke down:\n%s", r.session, clipped(string(log), 20000))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, url := range r.urlsOf() {
		s.urls[url] = s.dirs[r.c.worktree]
	}
	s.runs = slices.DeleteFunc(s.runs, func(other *stormRun) bool { return other == r })
	if !s.t.Failed() {
		os.Remove(r.log)
	}
}

// watch looks at the servers along the way.
func (s *storm) watch(calm <-chan struct{}) {
	for !isClosed(calm) {
		for w := range s.dirs {
			s.checkHolders(w)
		}
		waitAtMost(calm, 300*time.Millisecond)
	}
}

// checkHolders asks the servers of a checkout, one after the other and twice. A server's time is one piece: who says both
// times that it is the leaseholder was it in between, and then nobody else can have been.
func (s *storm) checkHolders(w int) {
	s.mu.Lock()
	runs := slices.DeleteFunc(slices.Clone(s.runs), func(r *stormRun) bool { return r.c.worktree != w })
	s.mu.Unlock()
	var urls []string
	for _, r := range runs {
		urls = append(urls, r.urlsOf()...)
	}
	var said []string
	for range 2 {
		for _, url := range urls {
			if holdsLease(url, s.dirs[w]) {
				said = append(said, url)
			}
		}
	}
	s.count("looks at leaseholders")
	for i, url := range said {
		if again := slices.Index(said[i+1:], url); again > 0 {
			s.t.Errorf("several servers of %s say that they are the leaseholder: %v", s.dirs[w], said)
		}
	}
}

// holdsLease asks a server. One that does not answer soon says nothing.
func holdsLease(url, root string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "GET", url+"/", nil)
	if err != nil {
		return false
	}
	r.Header.Set("Accept", "application/json")
	response, err := plainHTTP.Do(r)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	var home homeAnswer
	text, _ := io.ReadAll(response.Body)
	return json.Unmarshal(text, &home) == nil && home.Name == "majordomus" && home.RepositoryID == digest(root) && home.Leaseholder
}

// checkCalm holds all boards against all clients when nothing happens any more.
func (s *storm) checkCalm() {
	for _, c := range s.peers {
		for deadline := time.Now().Add(patience); ; {
			n, why := 0, ""
			c.s.await(c.current(), c.tool("majordomus_peers", `{}`, func(a *stormAnswer) {
				c.checkPeers(a)
				var out peersOutput
				json.Unmarshal(a.Result.StructuredContent, &out)
				n, why = out.Count, out.Reason
				for _, b := range out.Boards {
					why = joined(why, b.Worktree+" "+b.Standing+" "+b.Reason)
				}
			}))
			if n == len(s.peers) {
				break
			}
			if time.Now().After(deadline) {
				s.t.Errorf("%s sees %d peers, and there are %d: %s", c.name, n, len(s.peers), why)
				break
			}
			<-time.After(50 * time.Millisecond)
		}
		c.s.await(c.current(), c.tool("majordomus_episodes", `{}`, c.checkEpisodes))
	}
}

// checkEnd has all clients leave, and sees to it that nothing is left.
func (s *storm) checkEnd() {
	last := s.serverOf(0)
	s.checkHeld()
	for _, c := range s.peers {
		if r := c.current(); r != last {
			r.leave()
		}
	}
	s.mu.Lock()
	runs := slices.DeleteFunc(slices.Clone(s.runs), func(r *stormRun) bool { return r == last })
	s.mu.Unlock()
	for _, r := range runs {
		waitAtMost(r.over, 2*patience)
		if !isClosed(r.over) {
			s.t.Errorf("%s has not ended %v after its client left", r.session, 2*patience)
		}
	}
	if s.t.Failed() || last == nil {
		return
	}
	last.checkGoroutines()
	for i, dir := range s.dirs {
		if r := readLease(s.path(leasePath(dir))); r.held || i > 0 && r.state != readingAbsent {
			s.t.Errorf("%s has a lease: %+v", dir, r)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for url, dir := range s.urls {
		if holdsLease(url, dir) {
			s.t.Errorf("somebody still serves %s at %s", dir, url)
		}
	}
	nothingLeft(s.t, s.mark)
}

// checkHeld sees to it that no server holds more descriptors than its sessions need.
func (s *storm) checkHeld() {
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		return
	}
	for w, clients := range s.plan.each {
		most := 32 + 4*clients + 4*len(s.dirs)
		if r := s.serverOf(w); r != nil {
			if now := usageOf(s.t, r.cmd.Process.Pid); now.descriptors > most {
				s.t.Errorf("the server of %s holds %d descriptors for %d clients", s.dirs[w], now.descriptors, clients)
			}
		}
	}
}

var goroutineLine = regexp.MustCompile(`(?m)^goroutine [1-9]`)

// checkGoroutines has a server whose own client is its last say what it is doing, which ends it.
func (r *stormRun) checkGoroutines() {
	r.doom(syscall.SIGQUIT)
	<-r.over
	if n := len(goroutineLine.FindAllString(r.dump, -1)); n > 40 {
		r.c.s.t.Errorf("%s has %d goroutines for one client:\n%s", r.session, n, r.dump)
	} else {
		r.c.s.t.Logf("the last server had %d goroutines", n)
	}
}

// endAll ends what is still there, after a failure.
func (s *storm) endAll() {
	s.mu.Lock()
	runs := slices.Clone(s.runs)
	s.mu.Unlock()
	for _, r := range runs {
		r.kill()
	}
	if !s.t.Failed() {
		return
	}
	s.t.Logf("the latest faults:\n%s", strings.Join(s.history[max(0, len(s.history)-40):], "\n"))
	logs, _ := os.ReadDir(strings.TrimSuffix(s.clock, "clock"))
	for _, log := range logs {
		if text, _ := os.ReadFile(strings.TrimSuffix(s.clock, "clock") + log.Name()); strings.HasSuffix(log.Name(), ".log") {
			s.t.Logf("%s:\n%s", log.Name(), clipped(string(text), 4000))
		}
	}
}
