//go:build unix

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// do does one thing.
func (c *stormClient) do(a action) {
	s := c.s
	s.count("actions")
	to := s.peers[a.to].name
	switch a.kind {
	case "inbox":
		c.tool("inbox", fmt.Sprintf(`{"wait_seconds":%d}`, a.n%3), nil)
	case "ping":
		c.current().call("ping", "{}", nil)
	case "tools":
		c.current().call("tools/list", "{}", nil)
	case "notify", "ask", "schedule":
		c.send(a, to)
	case "broadcast":
		text := fmt.Sprintf("all %d of %s", a.n, c.name)
		if c.numbers[text]++; c.numbers[text] > 1 {
			return
		}
		begun := time.Now()
		c.tool("broadcast", fmt.Sprintf(`{"message":%q}`, text), func(answer *stormAnswer) {
			if answer.outcome() == "acked" {
				s.settleBroadcast(text, c.name, answer.text(), begun)
			}
		})
	case "ack", "reply":
		c.acknowledge(a.kind == "reply")
	case "announce":
		c.announce(a)
	case "describe":
		c.tool("set_description", fmt.Sprintf(`{"description":"busy with %d"}`, a.n), nil)
	case "attach":
		id := fmt.Sprintf("%s-%d", c.name, a.n%3)
		c.tool("majordomus_session_attach", fmt.Sprintf(`{"external_id":%q}`, id), func(answer *stormAnswer) {
			c.hold(id, answer)
		})
	case "detach":
		c.tool("majordomus_session_detach", `{}`, func(answer *stormAnswer) {
			c.hold("", answer)
		})
	case "peers":
		c.tool("majordomus_peers", `{}`, c.checkPeers)
	case "list":
		c.tool("list_peers", `{}`, c.checkList)
	case "episodes":
		c.tool("majordomus_episodes", `{}`, c.checkEpisodes)
	default:
		panic("no such action: " + a.kind)
	}
}

// hold notes which episode the client holds now.
func (c *stormClient) hold(id string, a *stormAnswer) {
	c.holding = append(c.holding, fmt.Sprintf("%s %s %q %s: %s", time.Now().Format(time.StampMilli), c.current().session, id, a.outcome(), clipped(a.Line, 400)))
	c.holding = c.holding[max(0, len(c.holding)-6):]
	switch a.outcome() {
	case "acked":
		c.episode = []string{id}
	case "unknown":
		c.episode = append(c.episode, id)
	}
}

// send writes to somebody, now or later.
func (c *stormClient) send(a action, to string) {
	c.numbers[to]++
	text := c.s.write(a.kind, c.name, to, c.numbers[to])
	tool, arguments := "notify_peer", fmt.Sprintf(`{"peer_name":%q,"message":%q}`, to, text)
	switch a.kind {
	case "ask":
		tool, arguments = "ask", fmt.Sprintf(`{"peer_name":%q,"query":%q}`, to, text)
	case "schedule":
		kind := []string{"notify", "ask"}[a.n%2]
		at := c.s.clockNow().Add(time.Duration(a.n%600) * time.Second)
		tool, arguments = "schedule_create", fmt.Sprintf(`{"to_peer":%q,"text":%q,"kind":%q,"fire_at":%q}`, to, text, kind, stamp(at))
	}
	c.tool(tool, arguments, func(answer *stormAnswer) {
		c.s.settleMessage(text, answer)
	})
}

// settleMessage notes what became of a message, and says why one was refused.
func (s *storm) settleMessage(text string, a *stormAnswer) {
	s.settle(text, a.outcome(), a.Line)
	if a.outcome() == "refused" && testing.Verbose() {
		s.t.Logf("%q: %s", text, clipped(strings.TrimSpace(a.Line), 400))
	}
}

// acknowledge answers the oldest ask, with words or without.
func (c *stormClient) acknowledge(words bool) {
	c.known.Lock()
	if len(c.asks) == 0 {
		c.known.Unlock()
		return
	}
	asked := c.asks[0]
	c.asks = c.asks[1:]
	c.known.Unlock()
	if !words {
		c.tool("ack", fmt.Sprintf(`{"correlation_id":%q}`, asked.id), nil)
		return
	}
	c.numbers[asked.from]++
	text := c.s.write("ack", c.name, asked.from, c.numbers[asked.from])
	c.tool("ack", fmt.Sprintf(`{"correlation_id":%q,"message":%q}`, asked.id, text), func(answer *stormAnswer) {
		c.s.settleMessage(text, answer)
	})
}

// announce claims ground under one of three names.
func (c *stormClient) announce(a action) {
	claim := []string{"", "tests", "docs"}[a.n%3]
	c.announced++
	intent := fmt.Sprintf("work %d of %s", c.announced, c.current().session)
	arguments := map[string]any{"intent": intent, "scope": []string{fmt.Sprint("dir", a.n%7), fmt.Sprint("dir", a.to, "/file.go")}}
	if claim != "" {
		arguments["claim"] = claim
	}
	c.tool("majordomus_announce", string(mustJSON(arguments)), func(answer *stormAnswer) {
		switch was := c.claims[claim]; {
		case answer.outcome() == "acked":
			c.claims[claim] = []string{intent}
		case was == nil:
			c.claims[claim] = []string{"", intent}
		default:
			c.claims[claim] = append(was, intent)
		}
	})
}

// checkPeers holds a board against what the client knows of itself.
func (c *stormClient) checkPeers(a *stormAnswer) {
	var out peersOutput
	if a.outcome() != "acked" {
		c.s.note("majordomus_peers", a)
		return
	}
	if err := json.Unmarshal(a.Result.StructuredContent, &out); err != nil {
		c.s.t.Errorf("%s: %v in %s", c.name, err, clipped(a.Line, 500))
		return
	}
	c.s.checkTwice(c.name, out.Peers)
	for _, p := range out.Peers {
		if p.ID != out.Caller || p.Checkout == nil || !p.Checkout.ThisCheckout || p.Address == nil || p.Address.Session != c.current().session {
			continue
		}
		held := map[string]string{}
		for _, claim := range p.Claims {
			held[claim.Name] = claim.Intent
		}
		for name, intents := range c.claims {
			if !slices.Contains(intents, held[name]) {
				c.s.t.Errorf("%s claims %q for one of %q, and the board says %q: %s", c.current().session, name, intents, held[name], clipped(a.Line, 3000))
			}
		}
		if !p.Attached || p.Mesh == nil || p.Mesh.Name != c.name {
			c.s.t.Errorf("%s is listed as %+v, %+v", c.name, p, p.Mesh)
		}
		return
	}
	c.s.t.Errorf("%s is not on its own board: %s", c.current().session, clipped(a.Line, 3000))
}

// checkTwice finds peers that are there twice, by name or by process.
func (s *storm) checkTwice(who string, peers []peer) {
	there := map[string]peerID{}
	for _, p := range peers {
		if !p.Attached || p.Checkout == nil || p.Mesh == nil || p.Address == nil {
			continue
		}
		for _, key := range []string{p.Checkout.ID + " " + p.Mesh.Circle + "/" + p.Mesh.Name, p.Address.Session} {
			if other, ok := there[key]; ok {
				s.t.Errorf("%s sees %q twice, as %s and %s: %+v", who, key, other, p.ID, peers)
			}
			there[key] = p.ID
		}
	}
}

func (c *stormClient) checkList(a *stormAnswer) {
	if a.outcome() != "acked" {
		c.s.note("list_peers", a)
		return
	}
	lines := strings.Split(a.text(), "\n")
	if lines[0] != peerColumns {
		c.s.t.Errorf("%s: a listing begins with %q", c.name, lines[0])
	}
	there := map[string]bool{}
	for _, line := range lines[1:] {
		id, _, _ := strings.Cut(line, "\t")
		if there[id] {
			c.s.t.Errorf("%s sees %s twice: %q", c.name, id, lines)
		}
		there[id] = true
	}
}

func (c *stormClient) checkEpisodes(a *stormAnswer) {
	var out episodesOutput
	if a.outcome() != "acked" || json.Unmarshal(a.Result.StructuredContent, &out) != nil {
		c.s.note("majordomus_episodes", a)
		return
	}
	mine := ""
	if out.Mine != nil {
		mine = out.Mine.ExternalID
	}
	if !slices.Contains(c.episode, mine) {
		c.s.t.Errorf("%s %s holds one of the episodes %q, and is told %q: %s\n%s", time.Now().Format(time.StampMilli), c.current().session, c.episode, mine,
			clipped(a.Line, 3000), strings.Join(c.holding, "\n"))
	}
}

// note complains of a question that is safe to repeat and was not answered.
func (s *storm) note(what string, a *stormAnswer) {
	if a.Line != "" {
		s.t.Errorf("%s: %s", what, clipped(a.Line, 500))
	}
}
