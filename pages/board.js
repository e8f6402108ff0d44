// The board: who is where, what they claim, which claims meet, and what could not be asked.

import { ago, boardLink, clock, code, h, patch, plural, said, since } from './dom.js';
import { live, Refused, source } from './live.js';
import { sections } from './sections.js';

const root = document.getElementById('board');
const title = document.title;
const server = source();

let now = null;        // the last answer
let at = 0;            // when it came
let lost = null;       // why there is none since; null while there is
let lostAt = 0;
const opened = new Set(); // lists of which all is shown

live(() => server.ask('/api/v1/peers', sections), answer => {
  lost = null;
  if (answer.other && now) { // keep what is shown: it is of another repository
    lost = new Error('other');
    lost.other = answer.other;
    lostAt ||= Date.now();
  } else {
    now = answer;
    at = Date.now();
    lostAt = 0;
  }
  render();
}, error => {
  server.lost();
  lost = error;
  lostAt ||= Date.now();
  render();
});

document.addEventListener('visibilitychange', () => {
  if (document.hidden) document.title = title; // nobody asks while it is hidden, so it must not promise anything
});

function render() {
  const overlaps = now?.board.overlaps ?? [];
  document.title = (lost ? '(lost) ' : overlaps.length ? `(${overlaps.length}!) ` : '') + title;
  patch(root, [
    statusLine(overlaps),
    lost && lostNotice(),
    now && h('div', { key: 'content', class: lost ? 'content stale' : 'content' },
      now.updated && h('p', { key: 'updated', class: 'notice' }, 'The server is now version ', said(now.about.version), '. ', h('a', { href: '/board' }, 'Load this page anew'), '.'),
      meeting(overlaps),
      unread(now.board),
      checkouts(now.board, overlaps),
      omitted(now.board),
      now.sections.map(more)),
  ]);
}

// statusLine stays in view: it says whether what is below can be believed.
function statusLine(overlaps) {
  const board = now?.board;
  const unreadable = board?.boards.filter(b => b.reason).length;
  return h('div', { key: 'status', class: 'status' },
    h('span', { class: lost ? 'state bad' : 'state good', role: 'status' }, lost ? 'Server lost' : now ? 'Live' : 'Asking the server…'),
    now && h('span', { class: 'dim' }, lost ? `since ${clock(lostAt)}` : `as of ${clock(at)}`),
    now && h('span', null, `${plural(board.count, 'peer')}, ${plural(board.covered, 'checkout')}`),
    now && overlaps.length > 0 && h('a', { class: 'state bad', href: '#meeting' }, overlaps.length === 1 ? '1 pair of claims meets' : `${overlaps.length.toLocaleString('en')} pairs of claims meet`),
    now && overlaps.length === 0 && h('span', { class: 'dim' }, board.complete ? 'no claims meet' : 'no claims meet, as far as is known'),
    now && !board.complete && h('a', { class: 'state warn', href: '#unread' }, unreadable ? `Incomplete: ${plural(unreadable, 'board')} unread` : 'Incomplete'));
}

function lostNotice() {
  if (lost.other) {
    return h('div', { key: 'lost', class: 'notice bad', role: 'alert' },
      h('strong', null, 'Another repository is served here now: '), said(lost.other.repository), '. What you see below is from before. ',
      h('a', { href: '/board' }, 'Show the other board'), '.');
  }
  return h('div', { key: 'lost', class: 'notice bad', role: 'alert' },
    h('strong', null, lost instanceof Refused ? 'The server could not answer: ' : `The server at ${location.host} does not answer. `),
    lost instanceof Refused && [said(lost.message), '. '],
    now ? `What you see below is from ${clock(at)}. ` : '',
    'Looking for the next one at this address; it takes over here as soon as it is there.');
}

// meeting comes first and is loud: two are about to do the same work. A claim that meets many is said once.
function meeting(overlaps) {
  if (!overlaps.length) return null;
  return h('section', { key: 'meeting', id: 'meeting', class: 'meeting', 'aria-labelledby': 'meeting-title' },
    h('h2', { id: 'meeting-title' }, 'Claims that meet ', h('span', { class: 'count' }, overlaps.length.toLocaleString('en'))),
    h('ul', { class: 'groups' }, some('meeting', grouped(overlaps), 3, g => h('li', { key: g.key },
      h('div', null, side(g.claim), g.one !== null && h('ul', { class: 'paths' }, h('li', null, code(g.one)), ' meets')),
      h('ul', { class: 'others' }, some('meeting ' + g.key, g.others, 4, o => h('li', { key: o.key },
        side(o.claim),
        h('ul', { class: 'paths' }, some(`meeting ${g.key} ${o.key}`, o.paths, 5, ([mine, theirs]) => h('li', null,
          g.one !== null || mine === theirs ? code(theirs) : [code(mine), ' meets ', code(theirs)]))))))))));
}

// grouped puts each pair under whichever of its claims meets more, the widest first.
function grouped(overlaps) {
  const key = c => `${c.checkout?.id}/${c.peer}/${c.intent}`;
  const meets = new Map();
  for (const o of overlaps) {
    for (const c of [o, o.claimant ?? {}]) meets.set(key(c), (meets.get(key(c)) ?? 0) + 1);
  }
  const groups = new Map();
  for (const o of overlaps) {
    const yours = o.claimant ?? {};
    const [mine, theirs, paths] = meets.get(key(o)) > meets.get(key(yours))
      ? [o, yours, o.paths.map(p => [p.theirs, p.yours])]
      : [yours, o, o.paths.map(p => [p.yours, p.theirs])];
    if (!groups.has(key(mine))) groups.set(key(mine), { key: key(mine), claim: mine, others: [] });
    groups.get(key(mine)).others.push({ key: key(theirs), claim: theirs, paths, here: here(mine) && here(theirs) });
  }
  const list = [...groups.values()];
  for (const g of list) {
    g.others.sort((a, b) => b.here - a.here); // a meeting with somebody who has left can wait
    const mine = new Set(g.others.flatMap(o => o.paths.map(p => p[0])));
    g.one = mine.size === 1 ? [...mine][0] : null; // then it need not be said with each
  }
  return list.sort((a, b) => b.others[0].here - a.others[0].here || b.others.length - a.others.length);
}

const owner = c => now.board.peers.find(p => p.id === c.peer && p.checkout?.id === c.checkout?.id);
const here = c => owner(c)?.attached ?? c.attached ?? true;

function side(c) {
  const p = owner(c);
  return h('div', { class: 'side' },
    h('p', null, h('a', { href: '#' + anchor(c.checkout, c.peer) }, said(p ? name(p) : c.peer)), ' ',
      h('span', { class: 'dim' }, said(c.peer), c.checkout && [' in ', said(place(c.checkout))]),
      !here(c) && [' ', h('span', { class: 'tag' }, 'has left')]),
    h('p', { class: 'intent' }, said(c.intent ?? '')));
}

// unread says which boards are missing, and why. What is not shown may hold anybody.
function unread(board) {
  if (board.complete) return null;
  const silent = board.boards.filter(b => b.reason);
  return h('section', { key: 'unread', id: 'unread', class: 'notice warn', 'aria-labelledby': 'unread-title' },
    h('h2', { id: 'unread-title' }, 'Not everything could be read'),
    board.reason && h('p', null, 'Checkouts may be missing: ', said(board.reason)),
    silent.length > 0 && h('ul', null, silent.map(b => h('li', { key: b.id },
      h('strong', null, said(place(b))), ' ', h('span', { class: 'dim' }, said(b.worktree)), ': ', said(b.reason)))));
}

function checkouts(board, overlaps) {
  const hot = meetingPaths(overlaps);
  const groups = board.boards.map(b => ({ ...b, peers: [] }));
  const byID = new Map(groups.map(g => [g.id, g]));
  for (const p of board.peers) {
    const at = p.checkout ?? { id: '', worktree: 'outside of a checkout' };
    if (!byID.has(at.id)) {
      byID.set(at.id, { ...at, peers: [] });
      groups.push(byID.get(at.id));
    }
    byID.get(at.id).peers.push(p);
  }
  return groups.map(g => checkout(g, hot));
}

function checkout(g, hot) {
  const attached = g.peers.filter(p => p.attached).length;
  const other = g.this_checkout ? null : boardLink(g.url);
  return h('section', { key: 'checkout ' + g.id, class: 'checkout', 'aria-label': `checkout ${place(g)}` },
    h('header', null,
      h('h2', null, said(base(g.worktree)), g.branch && [' ', h('span', { class: 'branch' }, said(g.branch))]),
      g.this_checkout && h('span', { class: 'tag' }, 'this checkout'),
      g.standing && g.standing !== 'ready' && h('span', { class: g.reason ? 'tag warn' : 'tag' }, 'server ' + g.standing),
      h('span', { class: 'dim' }, plural(attached, 'peer')),
      other && h('a', { href: other }, 'its own board'),
      h('span', { class: 'path dim' }, said(g.worktree ?? ''))),
    g.reason && h('p', { class: 'unreadable' }, 'Could not be read: ', said(g.reason)),
    g.peers.length > 0 && h('ul', { class: 'peers' }, g.peers.map(p => peer(p, hot))),
    g.peers.length === 0 && !g.reason && h('p', { class: 'none' }, 'Nobody is attached. ', h('a', { href: '/' }, 'Let a client in'), '.'));
}

function peer(p, hot) {
  const claims = p.claims?.length ? p.claims : p.announcement ? [p.announcement] : [];
  const mine = hot.get(`${p.checkout?.id}/${p.id}`);
  const about = [p.client.title ?? p.client.name, p.client.version].filter(Boolean).join(' ');
  return h('li', { key: p.id, id: anchor(p.checkout, p.id), class: (p.attached ? 'peer' : 'peer left') + (mine ? ' hot' : '') },
    h('div', { class: 'who' },
      h('p', null, h('strong', null, said(name(p))), ' ', h('span', { class: 'dim' }, said(p.id)),
        tags(p).map(([word, kind]) => [' ', h('span', { class: kind ? 'tag ' + kind : 'tag' }, said(word))])),
      h('p', { class: 'dim' }, said(about)),
      p.mesh?.description && h('p', { class: 'description' }, said(p.mesh.description))),
    claims.length === 0
      ? h('p', { class: 'claims none' }, 'claims nothing')
      : h('ul', { class: 'claims' }, claims.map(c => claim(p, c, mine))),
    h('p', { class: 'seen dim' }, p.attached ? ['seen ', ago(p.last_seen_seconds_ago)] : 'has left', h('br'), p.attached ? since(p.connected_at, 'here for ') : since(p.connected_at, 'came ', ' ago')));
}

// tags name what is out of the ordinary.
function tags(p) {
  const list = [];
  if (!p.attached) list.push(['has left']);
  if (p.mesh?.role && p.mesh.role !== 'agent') list.push([p.mesh.role]);
  if (p.mesh?.circle && p.mesh.circle !== 'default') list.push([`circle ${p.mesh.circle}`]);
  if (p.mesh?.unverified) list.push(['unverified', 'warn']);
  if (p.mesh?.turn_state) list.push([p.mesh.turn_state.replaceAll('_', ' ')]);
  return list;
}

function claim(p, c, mine) {
  return h('li', { key: c.name ?? '' },
    h('p', { class: 'intent' }, c.name && [h('span', { class: 'tag' }, said(c.name)), ' '], said(c.intent), ' ', h('span', { class: 'dim' }, since(c.at, '', ' ago'))),
    c.scope?.length > 0 && h('ul', { class: 'paths' }, some(`scope ${p.checkout?.id} ${p.id} ${c.name}`, c.scope, 10, path =>
      h('li', null, h('code', mine?.has(path) ? { class: 'hot', title: 'meets the claim of another' } : null, said(path === '.' ? '. (everything)' : path))))));
}

function meetingPaths(overlaps) {
  const hot = new Map(); // by checkout and peer: its paths that meet others
  const add = (s, path) => {
    const key = `${s?.checkout?.id}/${s?.peer}`;
    if (!hot.has(key)) hot.set(key, new Set());
    hot.get(key).add(path);
  };
  for (const o of overlaps) {
    for (const p of o.paths) {
      add(o.claimant, p.yours);
      add(o, p.theirs);
    }
  }
  return hot;
}

function omitted(board) {
  const kinds = Object.entries(board.omitted ?? {}).filter(([, n]) => n > 0);
  if (!kinds.length) return null;
  const total = kinds.reduce((sum, [, n]) => sum + n, 0);
  return h('p', { key: 'omitted', class: 'dim' }, `And ${plural(total, 'more checkout')} with nobody there (${kinds.map(([standing, n]) => `${standing === 'absent' ? 'no server' : 'server ' + standing}: ${n.toLocaleString('en')}`).join(', ')}).`);
}

// more shows one of the sections: a heading and its items, or why there are none to show.
function more({ section, answer, problem }) {
  const items = problem ? [] : section.items(answer);
  return h('section', { key: section.id, id: section.id, class: items.length || problem ? 'more' : 'more empty', 'aria-labelledby': section.id + '-title' },
    h('h2', { id: section.id + '-title' }, section.title, items.length > 0 && [' ', h('span', { class: 'count' }, items.length.toLocaleString('en'))]),
    problem && h('p', { class: 'notice warn' }, 'Could not be read: ', said(problem)),
    !problem && items.length === 0 && h('p', { class: 'none' }, section.none),
    items.length > 0 && h('ul', { class: 'items' }, some(section.id, items, 20, item => h('li', { key: item.key },
      h('p', null, h('strong', null, said(item.title)), (item.tags ?? []).filter(Boolean).map(word => [' ', h('span', { class: 'tag' }, said(word))])),
      h('p', { class: 'dim' }, item.facts.filter(Boolean).map((fact, i) => [i > 0 && ' · ', typeof fact === 'string' ? said(fact) : fact])),
      item.text && h('p', { class: 'text' }, said(item.text))))));
}

// some shows the first of a long list, and a button for the rest.
function some(id, list, most, row) {
  if (list.length <= most + 1 || opened.has(id)) return list.map(row);
  return [...list.slice(0, most).map(row), h('li', { key: 'more' },
    h('button', { type: 'button', onclick: () => { opened.add(id); render(); } }, `show ${(list.length - most).toLocaleString('en')} more`))];
}

const name = p => p.mesh?.name ?? p.client.title ?? p.client.name;
const base = path => (path ?? '').split('/').filter(Boolean).pop() ?? path ?? '';
const place = c => base(c.worktree) + (c.branch && c.branch !== base(c.worktree) ? ` (${c.branch})` : '');
const anchor = (checkout, id) => `peer-${checkout?.id ?? ''}-${id}`;
