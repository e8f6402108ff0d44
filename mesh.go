package main

// The mesh: peers write to each other. This file is what a server keeps for it at run time; mailbox.go is the state
// that outlives the server, journal.go the file, talk.go the tools, inbox.go the way of a message to its reader,
// deliver.go the way to another checkout.
//
// Order of locks: server.mu and board.mu may be held when mesh.mu is taken, never the other way round.

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// nameGrace is how long after a take-over the names of the peers of the server before are kept for them.
const nameGrace = 10 * time.Second

// human is who speaks over plain HTTP with the lease's token.
var human = boardName{"default", "human"}

type mesh struct {
	log     *slog.Logger
	journal *journal // nil: nothing outlives this process

	mu        sync.Mutex
	state     *store
	parcels   map[int64]*parcel             // given out and not settled
	readers   map[boardName][]chan struct{} // who waits for the next letter; a receive means that there may be one
	working   map[peerID]int                // calls in flight
	kept      map[boardName]nameRecord      // names that belong to the identities that held them, until keptUntil
	keptUntil time.Time
	former    map[peerID]boardName // who had which id at the server before; only read
	humanSeen time.Time
	awaited   map[string]chan handed // by key: who waits for a delivery to be settled
	lanes     map[string]chan struct{}
	links     map[string]*link // idle connections to other servers, by root

	tend    chan struct{} // a receive means that something may have to be handed over or to lapse
	tending sync.WaitGroup
	tendOn  bool
	closed  bool

	scheduled chan struct{} // a receive means that there is a new schedule
	runs      bool          // somebody looks at the schedules
	spawning  chan struct{} // full while a process is started
}

func newMesh(log *slog.Logger) *mesh {
	return &mesh{
		log: log, state: newStore(),
		parcels: map[int64]*parcel{}, readers: map[boardName][]chan struct{}{}, working: map[peerID]int{},
		awaited: map[string]chan handed{}, lanes: map[string]chan struct{}{}, links: map[string]*link{},
		tend: make(chan struct{}, 1), scheduled: make(chan struct{}, 1),
		spawning: make(chan struct{}, 1),
	}
}

// readJournalOf reads the journal of a checkout of this repository, unless it may be a stranger's who has put it into the
// repository. Where git cannot say, it is read: fails open, since it holds what was acknowledged, and information only.
func (s *server) readJournalOf(ctx context.Context, root string, st *store) report {
	path := journalPath(root)
	if _, err := os.Lstat(path); err == nil {
		if err := s.checkUntracked(ctx, root, leaseDir+"/"+journalName); errors.Is(err, errTracked) {
			return report{found: true, err: err}
		}
	}
	return readJournal(path, st)
}

// held is how many bytes of messages, and how many schedules, this checkout keeps.
func (m *mesh) held() (texts, schedules int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state.size, len(m.state.schedules)
}

// openMesh reads what the servers before this one left, and begins to write. The lease is in place.
func (s *server) openMesh() {
	m := s.mesh
	path := journalPath(s.checkout.root)
	r := s.readJournalOf(context.Background(), s.checkout.root, m.state)
	if text := r.String(); text != "" {
		text = fmt.Sprintf("the journal %s/%s %s; %s", leaseDir, journalName, text, r.setAside(path, s.lease))
		if errors.Is(r.err, errTracked) {
			text += "; your next commit would hold the peers' messages; " + untrack
		}
		s.log.Warn(text)
	}
	for _, letters := range m.state.boxes {
		for _, l := range letters {
			l.Again = l.Again || l.Carriers != nil
		}
	}
	now := time.Now()
	m.kept, m.keptUntil, m.former = map[boardName]nameRecord{}, now.Add(nameGrace), map[peerID]boardName{}
	for box, held := range m.state.names {
		if held.Left != 0 {
			continue
		}
		held.Left = now.UnixMilli() // nobody knows when it left
		m.former[held.Peer] = box
		// The client of the server itself died with it, and cannot want its name back.
		if held.Identity != "" && !held.Own {
			m.kept[box] = *held
		}
	}
	scheduled := len(m.state.schedules) > 0
	m.journal = &journal{root: s.checkout.root, path: path, lease: s.lease, log: s.log, apply: m.applyAll, state: m.everything}
	m.journal.start(r.found)
	s.lease.askWhenGone(m.journal.overtaken)
	s.tendSoon()
	if scheduled {
		s.runSoon()
	}
	s.adoptSpawned()
}

// closeMesh ends what the mesh does by itself and writes what is still to be written.
func (s *server) closeMesh() {
	m := s.mesh
	m.mu.Lock()
	m.closed = true // nobody begins to tend any more
	m.mu.Unlock()
	m.tending.Wait()
	if m.journal != nil {
		m.journal.close()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.links {
		l.conn.close()
	}
	m.links = nil
}

// settled waits until what an earlier server left is in a file of this server's own: before that nothing is answered.
func (m *mesh) settled() {
	if m.journal != nil {
		<-m.journal.ready
	}
}

func millis() int64 { return time.Now().UnixMilli() }

// commit makes an entry count.
func (m *mesh) commit(e *entry, how durability) (applied, error) { return m.commitOf(nil, e, how) }

// commitOf makes an entry count that somebody wants in a session, unless that has ended.
func (m *mesh) commitOf(n *session, e *entry, how durability) (applied, error) {
	e.At = millis()
	if m.journal == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.applyLocked(e)
	}
	c := &commit{entry: e, how: how, of: n, done: make(chan struct{})}
	m.journal.submit(c)
	if how <= loose {
		return applied{}, nil
	}
	<-c.done
	return c.out, c.err
}

func (m *mesh) applyAll(batch []*commit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range batch {
		if c.err == nil && c.entry != nil && c.how > prompt {
			c.out, c.err = m.applyLocked(c.entry)
		}
	}
}

func (m *mesh) applyLocked(e *entry) (applied, error) {
	done, err := m.state.apply(e)
	for _, box := range done.stored {
		done.handed = done.handed || len(m.readers[box]) > 0
		m.wakeLocked(box)
	}
	return done, err
}

func (m *mesh) wakeLocked(box boardName) {
	for _, r := range m.readers[box] {
		signalOn(r)
	}
}

// everything gives the entries of the present state. They are handed out when the mutex has been given back: to encode a
// full journal takes as long as to read it, and a client that has just started would wait for it. All that they refer to
// is changed by the journal's writer only, which is who calls this.
func (m *mesh) everything(each func(*entry)) (vital bool) {
	var all []*entry
	m.mu.Lock()
	m.state.sweep(millis())
	m.state.entries(func(e *entry) { all = append(all, e) })
	vital = m.state.vital()
	m.mu.Unlock()
	for _, e := range all {
		each(e)
	}
	return vital
}

// nameChanged notes that a name has been taken or left. The board's mutex is held, which keeps the order; the human is not
// on the board. It counts at once: who has just left is still known.
func (m *mesh) nameChanged(r nameRecord) {
	e := &entry{At: millis(), Name: &r}
	m.mu.Lock()
	m.state.apply(e)
	m.mu.Unlock()
	how := prompt // the next server gives it to nobody else
	if r.Own {    // nor needs it, since its client dies with this one
		how = lazy
	}
	if m.journal != nil {
		m.journal.submit(&commit{entry: e, how: how, done: make(chan struct{})})
	}
}

// reserved says whether a free name is not for this peer: another's who may come back for it, that of a spawned peer who
// is expected, the human's, or one to which something is or may come that a stranger must not read.
func (m *mesh) reserved(at boardName, who boardIdentity, spawn string) bool {
	if m.journal == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if at == human || m.state.expects(at, spawn) || who.unverified && m.isPrivateLocked(at) {
		return true
	}
	// Whoever is started in place of a bridge that died with its server gets its name, and what waits for it, at once.
	held, ok := m.kept[at]
	return ok && time.Now().Before(m.keptUntil) && (who.unverified || held.Identity != who.text) && !processGone(held.Process)
}

// isPrivateLocked is private for one name.
func (m *mesh) isPrivateLocked(at boardName) bool {
	for box := range m.state.private {
		if box == at {
			return true
		}
	}
	return false
}

// private lists the names that no stranger gets because of what is or may come there.
func (m *mesh) private() map[boardName]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := map[boardName]bool{}
	for box := range m.state.private {
		list[box] = true
	}
	return list
}

// actor is who acts in a call.
type actor struct {
	box     boardName
	role    string
	session *session // nil for the human
}

func (a actor) crosses() bool { return a.role != "agent" }

// stranger is who attached without the token. He leaves room for the others in whatever is bounded.
func (a actor) stranger() bool { return a.session != nil && !a.session.trusted }

type humanKey struct{}

// asHuman marks a call as coming over plain HTTP with the token.
func asHuman(ctx context.Context) context.Context { return context.WithValue(ctx, humanKey{}, true) }

// actor finds out who calls.
func (s *server) actor(ctx context.Context) (actor, error) {
	if n := callerOf(ctx); n != nil {
		if who, ok := s.board.who(n.peer); ok {
			return actor{who.box, who.role, n}, nil
		}
	}
	if ctx.Value(humanKey{}) == nil {
		return actor{}, refuse("refused", "this call comes from nobody on the board: connect as an MCP client, through majordomus mcp or with initialize at /mcp, and call in that session")
	}
	m := s.mesh
	m.mu.Lock()
	m.humanSeen = time.Now()
	known := m.state.names[human]
	m.mu.Unlock()
	if now := millis(); known == nil || now-known.Left > time.Minute.Milliseconds() {
		m.nameChanged(nameRecord{Box: human, Role: "human", Seen: now, Left: now}) // at once: an answer may come at once
	}
	return actor{box: human, role: "human"}, nil
}

// newID makes an id that no message or thread here has.
func (m *mesh) newID(kind string) string {
	for {
		id := kind + "-" + randomHex(4)
		m.mu.Lock()
		taken := m.state.threads[id] != nil || m.state.schedules[id] != nil
		m.mu.Unlock()
		if !taken {
			return id
		}
	}
}

// randomNumber is what a parcel is called. It is hard to guess, and exact in every language's numbers.
func randomNumber() int64 {
	var b [8]byte
	rand.Read(b[:])
	return int64(binary.LittleEndian.Uint64(b[:])>>12) | 1
}

// work counts the calls of a peer that are in flight.
func (m *mesh) work(id peerID, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.working[id] += n; m.working[id] == 0 {
		delete(m.working, id)
	}
}

// busy is who has calls in flight.
func (m *mesh) busy() map[peerID]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make(map[peerID]bool, len(m.working))
	for id := range m.working {
		list[id] = true
	}
	return list
}

// moveMail lets what waits under the name that a peer had come along to the one that it has taken up with its work, and
// with it its threads. Whoever waits for messages finds out under which name it does so now.
func (s *server) moveMail(from, to boardName) error {
	_, err := s.mesh.commit(&entry{Move: &move{From: from, To: to}}, synced)
	s.mesh.mu.Lock()
	defer s.mesh.mu.Unlock()
	s.mesh.wakeLocked(from)
	s.mesh.wakeLocked(to)
	if err != nil {
		return refuse("internal", "the name is yours, but what waits under %q could not be brought along (%v)", from.name, err)
	}
	return nil
}
