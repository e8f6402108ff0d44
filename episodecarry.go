package main

// What becomes of episodes when their server ends: a process carries that of its own client to the next server, and the
// others as far as the last one handed them on. Both ends are here: the server's, and the client's process.

import (
	"cmp"
	"encoding/json"
	"fmt"
	"time"
)

const handDownLimit = 1 << 20 // bytes of the episodes that are handed on

// carriedEpisode is what a process carries of its client's episode to the next server.
type carriedEpisode struct {
	ExternalID  string `json:"external_id"`
	Provider    string `json:"provider"`
	OpenedAt    string `json:"opened_at"`
	Attachments uint32 `json:"attachments"`
	Repository  string `json:"repository"`
	Name        string `json:"name,omitempty"`         // its holder's display name, when it is handed on without one
	Idle        int64  `json:"idle_seconds,omitempty"` // the same
}

// entry makes an episode of what was carried; nil when that makes no sense.
func (c carriedEpisode) entry() *episodeEntry {
	id, err := checkExternalID(c.ExternalID)
	if err != nil || c.Attachments == 0 {
		return nil
	}
	if _, err := time.Parse(time.RFC3339, c.OpenedAt); err != nil {
		c.OpenedAt = stamp(time.Now())
	}
	return &episodeEntry{
		id: id, provider: cleanText(cmp.Or(c.Provider, "generic"), providerLimit), opened: c.OpenedAt, attachments: c.Attachments,
		words: cmp.Or(words(c.Repository), "carried over from another server"), name: c.Name,
	}
}

func (s *server) carryLocked(e *episodeEntry) carriedEpisode {
	w := s.wireLocked(e)
	c := carriedEpisode{ExternalID: w.ExternalID, Provider: w.Provider, OpenedAt: w.OpenedAt, Attachments: w.Attachments,
		Repository: w.Repository, Name: e.name, Idle: w.LastActivity}
	if e.holder != "" {
		c.Name = s.board.displayName(e.holder)
	}
	return c
}

// episodeOf is the episode that a peer holds, as its process carries it; nil for none.
func (s *server) episodeOf(peer peerID) *carriedEpisode {
	s.episodes.mu.Lock()
	defer s.episodes.mu.Unlock()
	return s.episodeOfLocked(peer)
}

func (s *server) episodeOfLocked(peer peerID) *carriedEpisode {
	e := s.episodes.heldLocked(peer)
	if e == nil {
		return nil
	}
	c := s.carryLocked(e)
	return &c
}

// handDown lists what the bridges take along when they are sent away, as much as one message carries.
func (s *server) handDown() []carriedEpisode {
	s.episodes.mu.Lock()
	defer s.episodes.mu.Unlock()
	var list []carriedEpisode
	size := 0
	for _, e := range s.episodes.byID {
		if e.closing || e.last != nil && !isClosed(e.last.done) {
			continue // who waits for its command will ask the next server again
		}
		c := s.carryLocked(e)
		if size += len(mustJSON(c)); size > handDownLimit {
			break
		}
		list = append(list, c)
	}
	return list
}

// restoreEpisodes takes up what a process brings along: its client's episode, and the others that its last server handed
// on. again says that this very server is the one it was attached to last. It returns the episode that the peer holds.
func (s *server) restoreEpisodes(peer peerID, c carried, again bool) *carriedEpisode {
	t := s.episodes
	t.mu.Lock()
	if s.lease != nil && time.Since(s.started) < s.set.timing.join { // later, others have dealt with what it brings
		for _, orphan := range c.Orphans {
			if e := orphan.entry(); e != nil && t.byID[e.id] == nil && len(t.byID) < episodeLimit {
				t.byID[e.id] = e
				s.detachLocked(e, time.Now().Add(-time.Duration(orphan.Idle)*time.Second), boardEntry{name: orphan.Name})
			}
		}
	}
	var loser peerID
	if c.Episode != nil && t.heldLocked(peer) == nil {
		loser = s.restoreLocked(peer, *c.Episode, again)
	}
	held := s.episodeOfLocked(peer)
	t.mu.Unlock()
	if loser != "" {
		s.tellLoser(loser, episodeTaken{ExternalID: held.ExternalID, Attachments: held.Attachments, Name: s.board.displayName(loser)})
	}
	return held
}

// restoreLocked gives a peer back the episode that its process carries, unless that is out of date: whoever took it over
// counts more attachments. Where nobody has it, one that was opened anew since is not out of date. It returns who thereby loses it.
func (s *server) restoreLocked(peer peerID, c carriedEpisode, again bool) (loser peerID) {
	t := s.episodes
	back := c.entry()
	if back == nil {
		return ""
	}
	switch e := t.byID[back.id]; {
	case e == nil && (again || len(t.byID) >= episodeLimit):
		return ""
	case e == nil:
		t.byID[back.id] = back
	case e.holder == "" && (back.opened > e.opened || back.attachments >= e.attachments), back.attachments > e.attachments:
		loser = e.holder
		e.attachments, e.opened, e.provider, e.stranger = back.attachments, back.opened, back.provider, ""
		back = e
	default:
		return ""
	}
	s.holdLocked(back, peer)
	return loser
}

// episodeTaken tells a process whose client is still here that another peer has taken its episode over, so that it does not
// bring it along to the next server. As an error it is why the process's watch is answered.
type episodeTaken struct {
	ExternalID  string `json:"external_id"`
	Attachments uint32 `json:"attachments"` // since
	Name        string `json:"name"`        // the display name its client has now
}

func (e episodeTaken) Error() string {
	return fmt.Sprintf("episode %q has been taken over", e.ExternalID)
}

func (s *server) tellLoser(loser peerID, lost episodeTaken) {
	if s.own != nil && loser == s.ownPeer {
		s.own.loseEpisode(lost)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.sessions {
		if n.peer != loser || !n.attached {
			continue
		}
		n.lost = &lost
		if n.ended != nil {
			n.ended(lost)
		}
	}
}

// rememberEpisode keeps what an answer to attach or detach changed.
func (c *client) rememberEpisode(answer []byte) {
	var got struct {
		Episode *carriedEpisode `json:"episode"`
		Resumed *bool           `json:"resumed"` // in an answer to attach only
		Name    string          `json:"name"`
		Claims  []announcement  `json:"claims"`
	}
	if len(answer) == 0 || json.Unmarshal(answer, &got) != nil || got.Episode == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch mine := c.carried.Episode; {
	case got.Resumed == nil:
		if mine != nil && mine.ExternalID == got.Episode.ExternalID {
			c.carried.Episode = nil
		}
	case c.lost.ExternalID == got.Episode.ExternalID && c.lost.Attachments > got.Episode.Attachments:
		// The news that it is lost again has come first, by another connection.
	default:
		c.carried.Episode = got.Episode
		c.carried.Name = cmp.Or(got.Name, c.carried.Name)
		c.carried.Claims = append(got.Claims, c.carried.Claims...)
	}
}

func (c *client) loseEpisode(lost episodeTaken) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost = lost
	c.carried.Name = cmp.Or(lost.Name, c.carried.Name)
	if mine := c.carried.Episode; mine != nil && mine.ExternalID == lost.ExternalID && mine.Attachments < lost.Attachments {
		c.carried.Episode = nil
	}
}

// takeAlong keeps what a server handed on, for the next one only.
func (c *client) takeAlong(orphans []carriedEpisode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.carried.Orphans, c.orphaned = orphans, time.Now()
}

// settle notes at which server the client is attached now, and the episode that it holds there.
func (c *client) settle(server string, held *carriedEpisode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.server, c.carried.Episode, c.carried.Orphans = server, held, nil
}

// wasAt reports whether the server with this token is the one that the client was attached to last.
func (c *client) wasAt(token string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.server == token
}
