package main

// Episodes: work that outlives a connection. A peer is a connection, an episode is a sitting of work, known by the id its
// client gives it. It lives in memory only; what survives a restart of everything is the record that the repository's own
// command keeps (episodecommand.go).
//
// What an episode is, what happens, and what it is then. The command that this starts is in brackets:
//
//	                                  unknown        open              detached           closing
//	its holder attaches it            -              open, active now  -                  -
//	a peer attaches it                open [open]    open, +1 (a)      open, +1           open, +1 [open] (b)
//	its holder attaches another       -              detached          -                  -
//	its holder's connection ends      -              detached          -                  -
//	its holder's bridge is back       open (c)       open              open               open [open]
//	the grace is over                 -              -                 closing [close]    -
//	detach                            not found      closing [close]   closing [close]    the same close is awaited
//	the command has ended             -              open              detached           gone
//	the server ends, a bridge left    -              handed on (d)     handed on (d)      gone
//	the server ends, no bridge left   -              closing [close]   closing [close]    gone
//
// +1 is one attachment more. (a) The old holder has none then, and is told. (b) The commands of one episode run one after
// another, so a re-attach during a close waits for it and wins. (c) At another server only: one that is not known where it
// was left has been closed since. It counts no attachment, since nobody took anything over. (d) The bridges learn of all
// episodes when they are sent away; the next server lists each, detached until the bridge that holds it has come.
//
// What is listed as detached can be resumed, so one that is closing still is.
//
// The grace is counted by Go's timers, whose clock no clock step moves and which stands still while the machine sleeps:
// neither can expire an episode. A server that was stopped finds its timers late; nobody could come back to it meanwhile,
// so the grace starts anew (lapseEpisode).

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
)

const (
	externalIDLimit = 200 // bytes
	providerLimit   = 64  // bytes
	episodeLimit    = 1024
	strangersLimit  = episodeLimit / 2 // of these, what unverified sessions may have opened
	lateLimit       = 5 * time.Second  // a timer that fires so late says that this process did not run
)

type episode struct {
	ExternalID   string `json:"external_id" doc:"the client's own name for this work, by which it is addressed"`
	Provider     string `json:"provider" doc:"whose client opened it, claude-code for example"`
	Peer         peerID `json:"peer,omitempty" doc:"the connection that holds it; absent while detached"`
	OpenedAt     string `json:"opened_at" doc:"when it was opened, RFC 3339 in UTC; attaching again does not change it"`
	LastActivity int64  `json:"last_activity_seconds_ago" doc:"seconds since its client last spoke" min:"0"`
	Attachments  uint32 `json:"attachments" doc:"how many times a connection took it, the first included"`
	State        string `json:"state" doc:"open, or detached: its client is gone and may come back" enum:"open,detached"`
	Repository   string `json:"repository" doc:"what the repository's own episode command said, or why there was none"`
}

type episodesInput struct{}

type episodesOutput struct {
	Open     int       `json:"open" doc:"how many are held by a connection" min:"0"`
	Detached int       `json:"detached" doc:"how many wait for their client to come back" min:"0"`
	Episodes []episode `json:"episodes" doc:"every episode, by external id"`
	Mine     *episode  `json:"mine,omitempty" doc:"the one the caller holds"`
}

type episodeAttachInput struct {
	ExternalID string `json:"external_id" required:"true" doc:"your own lasting name for this work, such as the id of the conversation: one line, at most 200 bytes"`
	Provider   string `json:"provider" doc:"whose client you are; told from your name when absent"`
}

type episodeAttachOutput struct {
	Episode episode        `json:"episode" doc:"the episode, which the caller holds now"`
	Resumed bool           `json:"resumed" doc:"whether it was known already; false: it was opened anew"`
	Grace   int64          `json:"reattach_grace_seconds" doc:"how long it waits for its client once the connection is lost" min:"0"`
	Name    string         `json:"name,omitempty" doc:"the display name that came with it, when the caller had another"`
	Claims  []announcement `json:"claims,omitempty" doc:"claims that came with it, of the connection that is gone"`
}

type episodeDetachInput struct {
	ExternalID string `json:"external_id" doc:"which one, when it is not your own but a detached one"`
}

type episodeDetachOutput struct {
	Episode episode `json:"episode" doc:"the episode as it was closed"`
}

// episodeTable is what a server knows of episodes. Its mutex is held for the moment of a read or a write; the board's may be
// taken under it, the server's not.
type episodeTable struct {
	mu   sync.Mutex
	byID map[string]*episodeEntry
	over bool      // no timer and no command starts any more
	late time.Time // when half of the time for ending had been spent on waiting for a command

	runs  sync.WaitGroup // the commands, running and waiting
	slots chan struct{}  // holds one for each that runs
	ctx   context.Context
	kill  context.CancelCauseFunc // ends them all
}

// episodeEntry is one episode: open when it has a holder, else detached or closing.
type episodeEntry struct {
	id, provider string
	opened       string
	attachments  uint32
	holder       peerID
	closing      bool
	active       time.Time   // when its client last spoke, while it has no holder
	name         string      // the display name of the holder whose connection ended
	left         peerID      // that holder
	stranger     peerID      // the unverified peer that opened it, until a trusted one takes it
	words        string      // what the repository's command said last
	last         *episodeRun // the command that was started last, running or not; nil before the first
	absence      uint64      // counts the times that its clock was started or stopped
	clock        *time.Timer // the grace, while it runs
	due          time.Time   // when the grace is over
}

func newEpisodeTable() *episodeTable {
	t := &episodeTable{byID: map[string]*episodeEntry{}, slots: make(chan struct{}, commandsTogether)}
	t.ctx, t.kill = context.WithCancelCause(context.Background())
	return t
}

func (t *episodeTable) heldLocked(peer peerID) *episodeEntry {
	for _, e := range t.byID {
		if e.holder == peer {
			return e
		}
	}
	return nil
}

// wireLocked is the episode as it is listed.
func (s *server) wireLocked(e *episodeEntry) episode {
	w := episode{
		ExternalID: e.id, Provider: e.provider, Peer: e.holder, OpenedAt: e.opened,
		Attachments: e.attachments, State: "detached", Repository: cmp.Or(e.words, "the episode command is running"),
	}
	active := e.active
	if e.holder != "" {
		w.State = "open"
		holder, _ := s.board.look(e.holder)
		active = holder.seen
	}
	w.LastActivity = max(0, int64(time.Since(active)/time.Second))
	return w
}

func (s *server) episodesList(ctx context.Context, in episodesInput) (episodesOutput, error) {
	t := s.episodes
	out := episodesOutput{Episodes: []episode{}}
	caller := callerOf(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(t.byID)) {
		w := s.wireLocked(t.byID[id])
		out.Episodes = append(out.Episodes, w)
		if w.Peer == "" {
			out.Detached++
			continue
		}
		out.Open++
		if caller != nil && caller.peer == w.Peer {
			out.Mine = &w
		}
	}
	return out, nil
}

// taken is what attaching came to.
type taken struct {
	entry       *episodeEntry
	resumed     bool
	run         *episodeRun // what has to be waited for
	from        peerID      // who held it before, here or gone
	lost        bool        // from is here and has just lost it
	inherits    bool        // its name and claims are the caller's now; never what a stranger has put there
	name        string      // the display name that goes with it
	attachments uint32
}

func (s *server) episodesAttach(ctx context.Context, in episodeAttachInput) (episodeAttachOutput, error) {
	caller, err := episodeCaller(ctx)
	if err != nil {
		return episodeAttachOutput{}, err
	}
	id, provider, err := s.checkEpisode(caller, in)
	if err != nil {
		return episodeAttachOutput{}, err
	}
	got, err := s.takeEpisode(caller, id, provider)
	if err != nil {
		return episodeAttachOutput{}, err
	}
	out := episodeAttachOutput{Resumed: got.resumed, Grace: int64((s.set.timing.reattach + time.Second - 1) / time.Second)}
	if got.inherits {
		// Mailboxes and threads go by the name: what waited for either of the two names moves along with it.
		was, _ := s.board.who(caller.peer)
		out.Name, out.Claims = s.board.inherit(caller.peer, got.name, got.from)
		if out.Name != "" {
			if err := s.moveMail(was.box, boardName{was.box.circle, out.Name}); err != nil {
				return episodeAttachOutput{}, err
			}
		}
	}
	if got.lost {
		s.tellLoser(got.from, episodeTaken{ExternalID: id, Attachments: got.attachments, Name: s.board.displayName(got.from)})
	}
	s.awaitEpisode(caller, got.run)
	s.episodes.mu.Lock()
	defer s.episodes.mu.Unlock()
	if e := got.entry; s.episodes.byID[id] != e || e.holder != caller.peer {
		return episodeAttachOutput{}, refuse("refused", "external_id: %q has been taken over or closed by another peer while its command ran", id)
	}
	out.Episode = s.wireLocked(got.entry)
	return out, nil
}

// episodeCaller refuses who would hold an episode without a connection that could end.
func episodeCaller(ctx context.Context) (*session, error) {
	caller := callerOf(ctx)
	if caller == nil || caller.peer == "" {
		return nil, refuse("refused", "this call comes from nobody on the board, so nobody would hold the episode: connect as an MCP client at /mcp, or through majordomus mcp, and attach in that session")
	}
	return caller, nil
}

func (s *server) checkEpisode(caller *session, in episodeAttachInput) (id, provider string, err error) {
	if id, err = checkExternalID(in.ExternalID); err != nil {
		return "", "", err
	}
	switch provider = strings.TrimSpace(in.Provider); {
	case !oneLine(provider) || len(provider) > providerLimit:
		return "", "", refuse("invalid_input", "provider: must be one line of at most %d bytes", providerLimit)
	case provider == "":
		me, _ := s.board.look(caller.peer)
		provider = providerOf(me.client.Name)
	}
	return id, provider, nil
}

func checkExternalID(text string) (string, error) {
	id := strings.TrimSpace(text)
	switch {
	case id == "":
		return "", refuse("invalid_input", "external_id: is blank; give a name that you will know again, such as the id of your conversation")
	case !oneLine(id), strings.ContainsFunc(id, func(r rune) bool { return unicode.Is(unicode.Cf, r) }):
		return "", refuse("invalid_input", "external_id: must be one line, without invisible characters")
	case len(id) > externalIDLimit:
		return "", refuse("invalid_input", "external_id: has %d bytes, at most %d are allowed", len(id), externalIDLimit)
	}
	return id, nil
}

// providerOf tells from what a client calls itself whose it is.
func providerOf(client string) string {
	client = strings.ReplaceAll(strings.ToLower(client), " ", "-")
	for _, provider := range []string{"claude-code", "codex", "gemini", "opencode", "cursor"} {
		if strings.Contains(client, provider) {
			return provider
		}
	}
	return "generic"
}

// takeEpisode makes the caller the holder.
func (s *server) takeEpisode(caller *session, id, provider string) (taken, error) {
	t := s.episodes
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byID[id]
	if e != nil && e.holder == caller.peer {
		return taken{entry: e, resumed: true, run: e.last}, nil
	}
	if err := t.admitLocked(caller, e, id); err != nil {
		return taken{}, err
	}
	if old := t.heldLocked(caller.peer); old != nil {
		// Its name and claims stay with the caller, who is still here.
		s.detachLocked(old, time.Now(), boardEntry{})
	}
	got := taken{entry: e, resumed: e != nil}
	if e == nil {
		e = &episodeEntry{id: id, provider: provider, opened: stamp(time.Now())}
		t.byID[id], got.entry = e, e
		if !caller.trusted {
			e.stranger = caller.peer
		}
		s.startLocked(e, "open", "attach")
	} else {
		got.from, got.name = e.left, e.name
		if e.holder != "" {
			got.from, got.name, got.lost = e.holder, s.board.displayName(e.holder), true
		}
	}
	if was := e.stranger; caller.trusted {
		got.inherits = got.resumed && was == ""
		if e.stranger = ""; was != "" && got.resumed && !e.closing {
			s.startLocked(e, "open", "attach") // the record has not heard of it so far
		}
	}
	s.holdLocked(e, caller.peer)
	e.attachments++
	got.run, got.attachments = e.last, e.attachments
	return got, nil
}

// admitLocked refuses what the caller may not take, or nobody any more. e is nil when the id is unknown.
func (t *episodeTable) admitLocked(caller *session, e *episodeEntry, id string) error {
	strangers := 0
	for _, other := range t.byID {
		if other.stranger != "" {
			strangers++
		}
	}
	switch {
	case e != nil && !caller.trusted && e.stranger != caller.peer:
		return refuse("refused", "external_id: %q is not yours: an unverified session resumes only what it has opened itself", id)
	case e == nil && len(t.byID) >= episodeLimit, e == nil && !caller.trusted && strangers >= strangersLimit:
		return refuse("busy", "this server keeps %d episodes, which is its limit: close some with majordomus_session_detach, or wait until they expire", len(t.byID))
	}
	return nil
}

// holdLocked gives an episode a holder. One that was about to be closed is opened again in the repository's record.
func (s *server) holdLocked(e *episodeEntry, peer peerID) {
	e.holder, e.name, e.left = peer, "", ""
	e.stopClock()
	if e.closing {
		e.closing = false
		s.startLocked(e, "open", "attach")
	}
}

// detachLocked takes the holder from an episode and starts the clock. left is that holder when its connection has ended.
func (s *server) detachLocked(e *episodeEntry, active time.Time, left boardEntry) {
	e.holder, e.active, e.name, e.left = "", active, left.name, left.id
	s.clockLocked(e)
}

// clockLocked starts the grace.
func (s *server) clockLocked(e *episodeEntry) {
	e.stopClock()
	if s.episodes.over {
		return
	}
	absence, grace := e.absence, s.set.timing.reattach
	e.due = time.Now().Add(grace)
	e.clock = time.AfterFunc(grace, func() { s.lapseEpisode(e, absence) })
}

// stopClock ends the grace, also one that is just running out: lapseEpisode sees that it is another absence. A clock that is
// not stopped would be kept until it is due, one for each time that a client came and went.
func (e *episodeEntry) stopClock() {
	e.absence++
	if e.clock != nil {
		e.clock.Stop()
		e.clock = nil
	}
}

// lapseEpisode closes an episode whose client did not come back.
func (s *server) lapseEpisode(e *episodeEntry, absence uint64) {
	if !s.holds() {
		return // its successor's clock counts
	}
	s.episodes.mu.Lock()
	defer s.episodes.mu.Unlock()
	switch {
	case e.absence != absence || s.episodes.over:
	case time.Since(e.due) > lateLimit:
		s.clockLocked(e)
	default:
		s.closeLocked(e, "expired")
	}
}

// closeLocked has an episode closed in the repository's record; it is gone when that is done.
func (s *server) closeLocked(e *episodeEntry, reason string) {
	e.holder, e.closing = "", true
	e.stopClock()
	s.startLocked(e, "close", reason)
}

func (s *server) episodesDetach(ctx context.Context, in episodeDetachInput) (episodeDetachOutput, error) {
	caller, err := episodeCaller(ctx)
	if err != nil {
		return episodeDetachOutput{}, err
	}
	id := ""
	if in.ExternalID != "" {
		if id, err = checkExternalID(in.ExternalID); err != nil {
			return episodeDetachOutput{}, err
		}
	}
	closed, run, err := s.dropEpisode(caller, id)
	if err != nil {
		return episodeDetachOutput{}, err
	}
	s.awaitEpisode(caller, run)
	if isClosed(run.done) {
		closed.Repository = run.words
	}
	return episodeDetachOutput{Episode: closed}, nil
}

// dropEpisode starts closing the caller's episode, or the detached one of that id.
func (s *server) dropEpisode(caller *session, id string) (episode, *episodeRun, error) {
	t := s.episodes
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byID[id]
	if id == "" {
		e = t.heldLocked(caller.peer)
	}
	switch {
	case e == nil && id == "":
		return episode{}, nil, refuse("refused", "you hold no episode: name a detached one in external_id")
	case e == nil:
		return episode{}, nil, refuse("not_found", "external_id: there is no episode %q; majordomus_episodes lists all", id)
	case e.holder != "" && e.holder != caller.peer:
		return episode{}, nil, refuse("refused", "external_id: %q is held by %s, who must detach it; to take it over, attach it", id, e.holder)
	case !caller.trusted && e.stranger != caller.peer && e.holder != caller.peer:
		return episode{}, nil, refuse("refused", "external_id: %q is not yours: an unverified session closes only what it has opened itself", id)
	case e.holder == caller.peer:
		e.active = time.Now()
	}
	if !e.closing {
		s.closeLocked(e, "detach")
	}
	return s.wireLocked(e), e.last, nil
}

// leaveEpisode detaches what a peer held whose connection has ended.
func (s *server) leaveEpisode(left boardEntry) {
	s.episodes.mu.Lock()
	defer s.episodes.mu.Unlock()
	if e := s.episodes.heldLocked(left.id); e != nil {
		s.detachLocked(e, left.seen, left)
	}
}

// closeEpisodes closes every episode of a server that nobody follows, all at once and within the time that is left. One
// that hands its bridges on closes nothing: the work goes on elsewhere.
func (s *server) closeEpisodes(ctx context.Context) {
	t := s.episodes
	if s.handingOn() {
		return
	}
	t.mu.Lock()
	limit := endingTime
	if time.Since(t.late) < endingTime {
		limit /= 2
	}
	var closing []*episodeRun
	for _, e := range t.byID {
		if !e.closing {
			s.closeLocked(e, "shutdown")
		}
		closing = append(closing, e.last)
	}
	t.over = true
	t.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, run := range closing {
		select {
		case <-run.done:
		case <-ctx.Done():
		}
	}
	if ctx.Err() != nil {
		s.log.Warn("the episode command had no time to close every episode")
	}
}

// stopEpisodes ends clocks and commands.
func (s *server) stopEpisodes() {
	t := s.episodes
	t.mu.Lock()
	t.over = true
	for _, e := range t.byID {
		e.stopClock()
	}
	t.mu.Unlock()
	t.kill(errServerEnding)
	stopped := make(chan struct{})
	go func() { // ends with the commands, which have been killed
		t.runs.Wait()
		close(stopped)
	}()
	waitAtMost(stopped, time.Second)
}

var errServerEnding = errors.New("the server is ending")
