package main

// The account of what was spawned. It is in the journal, so that the next server knows what this one has started: a
// record from before the start to the end of the process, its first message in the same line.
//
// A pid alone is nobody: the system gives it to another when its process has ended. With the time at which the process
// started it is one process; nothing is done to a pid whose time is another.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	spawnPatience = 120 * time.Second // until a spawned peer must have attached
	spawnLook     = time.Second       // how often it is looked for until then
	spawnLooks    = 5                 // how often a log that is still empty is looked at after the end
	retiredLimit  = 1024              // identities that are refused
)

// testHookSpawnPatience replaces spawnPatience when it is set.
var testHookSpawnPatience time.Duration

var errNoSpawn = errors.New("there is no such process")

// spawned is a process that this server, or one before it, has started.
type spawned struct {
	ID       string    `json:"id"`
	Box      boardName `json:"box"`               // under which it is expected, and then the one it has
	At       place     `json:"at,omitzero"`       // the checkout in which it attaches
	Outside  bool      `json:"outside,omitempty"` // of the repository: it never attaches
	Path     string    `json:"path"`
	Command  string    `json:"command"`
	By       boardName `json:"by"` // who is told when it does not attach
	Began    int64     `json:"began"`
	PID      int       `json:"pid,omitempty"` // 0: it is being started; its process group has this number too
	Start    string    `json:"start,omitempty"`
	Window   string    `json:"window,omitempty"` // of tmux
	Log      string    `json:"log,omitempty"`
	Message  string    `json:"message,omitempty"` // names the letter in its mailbox
	Attached bool      `json:"attached,omitempty"`
	Lapsed   bool      `json:"lapsed,omitempty"` // it did not attach in time, and whoever spawned it knows
}

// pending says whether it is still expected.
func (p *spawned) pending() bool { return !p.Attached && !p.Lapsed && !p.Outside }

// here says whether it is a peer of this checkout.
func (p *spawned) here() bool { return p.At == place{} && !p.Outside }

func (p *spawned) valid() error {
	if !isID(p.ID, "spawn") || !p.Box.valid() || !p.By.valid() || p.PID < 0 || p.PID == 1 {
		return fmt.Errorf("bad record of spawn %.40q with pid %d", p.ID, p.PID)
	}
	return nil
}

// checkSpawn finds what would keep an entry about processes from being applied.
func (st *store) checkSpawn(e *entry) error {
	if e.Unspawn != "" && st.spawns[e.Unspawn] == nil {
		return errNoSpawn
	}
	if e.Spawn != nil && !e.Kept && st.spawns[e.Spawn.ID] == nil && len(st.spawns) >= spawnLimit {
		return refuse("refused", "%d spawned processes are alive, the most there may be: end one with kill_peer", spawnLimit)
	}
	return nil
}

func (st *store) applySpawn(e *entry) {
	if e.Spawn != nil {
		p := *e.Spawn
		if old := st.spawns[p.ID]; old != nil && old.Attached { // while it was being written
			p.Box, p.Attached = old.Box, true
		}
		st.spawns[p.ID] = &p
	}
	if e.Name != nil && e.Name.Left == 0 && st.spawns[e.Name.Spawn] != nil {
		p := *st.spawns[e.Name.Spawn]
		p.Box, p.Attached = e.Name.Box, true
		st.spawns[p.ID] = &p
	}
	if p := st.spawns[e.Unspawn]; p != nil {
		delete(st.spawns, e.Unspawn)
		// Nobody else is to find the message that was for this one.
		st.discard(p.Box, func(l *letter) bool {
			return p.Message != "" && l.Ref == p.Message && l.held == 0 && l.Carriers == nil
		})
	}
	if e.Retire != "" {
		st.retired[e.Retire] = e.At
		for len(st.retired) > retiredLimit {
			oldest := e.Retire
			for id, at := range st.retired {
				if at < st.retired[oldest] || at == st.retired[oldest] && id < oldest {
					oldest = id
				}
			}
			delete(st.retired, oldest)
		}
	}
}

func (st *store) spawnEntries(each func(*entry)) {
	for _, p := range st.spawns {
		each(&entry{At: st.swept, Kept: true, Spawn: p})
	}
	for id, at := range st.retired {
		each(&entry{At: at, Retire: id})
	}
}

// expects says whether a name is kept for a spawned peer that has not attached yet, and not the one that asks.
func (st *store) expects(box boardName, spawn string) bool {
	for id, p := range st.spawns {
		if p.Box == box && p.here() && p.pending() && id != spawn {
			return true
		}
	}
	return false
}

func (m *mesh) spawnedList() (list []spawned) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.state.spawns {
		list = append(list, *p)
	}
	slices.SortFunc(list, func(a, b spawned) int { return strings.Compare(a.ID, b.ID) })
	return list
}

func (m *mesh) spawnOf(id string) (spawned, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.state.spawns[id]; p != nil {
		return *p, true
	}
	return spawned{}, false
}

// enlist gives the new peer a name and puts it into the account, with its first message.
func (s *server) enlist(ctx context.Context, p *spawned, circle string, message letter) error {
	list := s.mesh.spawnedList()
	for _, old := range list { // those that ended without anybody noticing
		switch {
		case old.alive():
		case old.pending():
			s.lookAfter(&old, old.Window != "" && len(list) < spawnLimit) // its place is needed more than its last word
		default:
			s.mesh.spawnEnded(old.ID)
		}
	}
	p.ID, p.Began = "spawn-"+randomHex(4), millis()
	p.Box = s.freeName(ctx, p, circle)
	e := &entry{Spawn: p}
	if message.Text != "" && !p.Outside {
		message.To = []boardName{p.Box}
		if p.here() {
			p.Message = message.Ref
			e.Store = []letter{message}
		} else {
			out := s.outgoing(e, p.At.Root, message)
			out.To = p.At
			e.Queue = []outgoing{out}
		}
	}
	if _, err := s.mesh.commit(e, synced); err != nil {
		return s.notStored(err)
	}
	return nil
}

// freeName is the name of the directory, with the first number that makes it nobody else's.
func (s *server) freeName(ctx context.Context, p *spawned, circle string) boardName {
	taken := func(box boardName) bool { return false }
	switch {
	case p.here():
		taken = s.board.taken
	case !p.Outside:
		there, _ := s.meshAt(ctx, p.At.Root)
		taken = func(box boardName) bool {
			return slices.ContainsFunc(there, func(m meshPeer) bool { return m.box() == box && m.Status != "offline" })
		}
	}
	list := s.mesh.spawnedList()
	for n := 1; ; n++ {
		box := boardName{circle, numbered(cleanName(filepath.Base(p.Path), "peer"), n)}
		if !taken(box) && !slices.ContainsFunc(list, func(o spawned) bool { return o.Box == box && o.At == p.At }) {
			return box
		}
	}
}

// startSpawned starts what was enlisted, or takes it off the account.
func (s *server) startSpawned(ctx context.Context, p *spawned, message string) error {
	err := s.run(ctx, p, message)
	if err != nil {
		s.mesh.commit(&entry{Unspawn: p.ID}, written)
		return refuse("refused", "%s could not be started: %v", quote(p.Command), err)
	}
	if _, err := s.mesh.commit(&entry{Spawn: p}, synced); err != nil {
		p.end(nil)
		s.mesh.commit(&entry{Unspawn: p.ID}, loose)
		return s.notStored(err)
	}
	if p.Outside {
		s.mesh.spawnEnded(p.ID) // it may be over already
	}
	if !p.Outside {
		s.watchSpawned(p.ID)
	}
	return nil
}

// spawnEnded takes a process off the account that has ended. One that left others of its group behind stays.
func (m *mesh) spawnEnded(id string) {
	// One that is expected is watched, and its end is told along with that.
	if p, ok := m.spawnOf(id); ok && !p.pending() && !p.alive() {
		m.commit(&entry{Unspawn: id}, written)
	}
}

// watchSpawned looks after a process until it has attached, or was given up.
func (s *server) watchSpawned(id string) {
	s.mesh.mu.Lock()
	defer s.mesh.mu.Unlock()
	if s.mesh.closed {
		return
	}
	s.mesh.tending.Go(func() { // ends with the server, or when nothing is expected any more
		t := time.NewTicker(spawnLook)
		defer t.Stop()
		for ended := 0; ; {
			p, ok := s.mesh.spawnOf(id)
			if !ok || !p.pending() {
				return
			}
			if !p.alive() {
				ended++
			}
			// tmux writes the log, and may do so after the end.
			if s.lookAfter(&p, p.Window != "" && ended <= spawnLooks) {
				return
			}
			select {
			case <-s.ending:
				return
			case <-t.C:
			}
		}
	})
}

// lookAfter says whether a process need not be looked after any more. Something may still be written into the log of one
// that has ended, if more says so.
func (s *server) lookAfter(p *spawned, more bool) bool {
	patience := spawnPatience
	if testHookSpawnPatience != 0 {
		patience = testHookSpawnPatience
	}
	alive := p.alive()
	if late := time.Since(time.UnixMilli(p.Began)) >= patience; alive && !late {
		if !p.here() && s.waitsFor(p.At.Root) {
			s.tendSoon() // it becomes the server there, and should find its message
		}
		return false
	}
	if !p.here() {
		ctx, cancel := context.WithTimeout(s.calls, s.set.timing.probe)
		defer cancel()
		there, _ := s.meshAt(ctx, p.At.Root)
		if slices.ContainsFunc(there, func(m meshPeer) bool { return m.box() == p.Box && m.Status != "offline" }) {
			p.Attached = true
			_, err := s.mesh.commit(&entry{Spawn: p}, synced)
			return err == nil
		}
	}
	now := millis()
	text := fmt.Sprintf("@%s, which you spawned, has not attached within %v", p.Box.name, patience)
	e := &entry{}
	if alive {
		p.Lapsed = true
		e.Spawn = p
		text += fmt.Sprintf("; its process %d is running", p.PID)
	} else {
		e.Unspawn = p.ID
		text = fmt.Sprintf("@%s, which you spawned, has ended without attaching", p.Box.name)
	}
	if p.here() {
		e.Name = &nameRecord{Box: p.Box, Role: "agent", Seen: p.Began, Left: now}
	}
	if last := lastLine(p.Log); last == "" && more && !alive {
		return false
	} else if last != "" {
		text += fmt.Sprintf("; the last line of its output: %q", last)
	} else {
		text += "; it has written nothing"
	}
	e.Store = []letter{s.notice(p.By, text)}
	_, err := s.mesh.commit(e, synced)
	return err == nil || errors.Is(err, errLeaseLost)
}

// adoptSpawned takes over what the server before has started.
func (s *server) adoptSpawned() {
	for _, p := range s.mesh.spawnedList() {
		switch {
		case p.PID == 0, !p.pending() && !p.alive(): // it died while it started a process, of which nothing is known; or that ended
			s.mesh.commit(&entry{Unspawn: p.ID}, loose)
		case p.pending():
			s.watchSpawned(p.ID)
		}
	}
}

// spawnRows lists the spawned peers that are expected, here or elsewhere, and not listed already.
func (s *server) spawnRows(listed []meshPeer, here bool) (rows []meshPeer) {
	for _, p := range s.mesh.spawnedList() {
		if !p.pending() || p.PID == 0 || p.here() != here {
			continue
		}
		row := meshPeer{
			Name: p.Box.name, Project: s.checkout.project(), Circle: p.Box.circle, Role: "agent", Status: "online", Path: s.checkout.root,
			Machine: hostname(), LastSeen: stamp(time.UnixMilli(p.Began)), TurnState: "pending_first_turn", here: here, spawn: p.ID,
		}
		if !here {
			row.Path = p.At.Root
		}
		row.PeerID = p.Box.circle + "/" + p.Box.name + "@" + digest(row.Path)[:8]
		if !slices.ContainsFunc(listed, func(m meshPeer) bool { return m.box() == row.box() && m.Path == row.Path && m.Status != "offline" }) {
			rows = append(rows, row)
		}
	}
	return rows
}

// recognize finds out that a client was spawned, where its own client has kept that from it: some give the servers they
// start hardly any environment. Its parent is in the group of what was started.
func (s *server) recognize(p *attachParams) {
	if p.Carried.Spawn != "" || p.Address == nil || p.Address.PID <= 1 {
		return
	}
	for _, sp := range s.mesh.spawnedList() {
		if sp.pending() && sp.here() && sp.PID > 1 && sp.PID == processGroup(p.Address.PID) {
			p.Carried.Spawn, p.Carried.Name, p.Carried.Circle = sp.ID, sp.Box.name, sp.Box.circle
		}
	}
}

// alive says whether the process, or anything of its group, is still the one that was started.
func (p *spawned) alive() bool {
	if p.PID <= 1 {
		return p.PID == 0 && time.Since(time.UnixMilli(p.Began)) < time.Minute
	}
	start, zombie := processStart(p.PID)
	return start != "" && start == p.Start && !zombie || len(p.members()) > 0
}

// members lists the processes of its group that prove by their environment that they are of this spawn. It is for the
// case that the first one has ended and its number proves nothing any more.
func (p *spawned) members() []int {
	return groupMembers(p.PID, "MAJORDOMUS_SPAWN="+p.ID)
}

// lastLine is the end of a log, fit to be shown.
func lastLine(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|openWary, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > 4096 {
		f.Seek(-4096, io.SeekEnd)
	}
	text, _ := io.ReadAll(io.LimitReader(f, 4096))
	terminalCodes := regexp.MustCompile("\x1b(\\[[0-9;?]*[a-zA-Z]|\\][^\x07\x1b]*(\x07|\x1b\\\\)|[()][A-Z0-9]|.)")
	lines := strings.FieldsFunc(terminalCodes.ReplaceAllString(string(text), ""), func(r rune) bool { return r == '\n' || r == '\r' })
	for _, l := range slices.Backward(lines) {
		if l = cleanText(l, 300); l != "" {
			return l
		}
	}
	return ""
}
