// What the board shows below the peers: one entry a section. A section is there when the server has its route, so a new one
// needs an entry here and nothing else. items turns the answer of the route into
// { key, title, tags, facts, text }: facts are texts or nodes in one line.

import { ago, plural, since, span } from './dom.js';

export const sections = [
  {
    id: 'asks',
    title: 'Open asks of this checkout',
    path: '/api/v1/mesh/asks',
    none: 'Nobody waits for an answer.',
    items: answer => answer.asks.map(a => ({
      key: a.id,
      title: `${a.from} waits for ${a.to}`,
      tags: [{ queued: 'on the way', unread: 'unread' }[a.state]],
      facts: [a.id, `for ${span(a.age_seconds)}`],
    })),
  },
  {
    id: 'episodes',
    title: 'Episodes of this checkout',
    path: '/api/v1/episodes',
    none: 'No episode is open.',
    items: answer => answer.episodes.map(e => ({
      key: e.external_id,
      title: e.external_id,
      tags: [e.state === 'open' ? '' : e.state],
      facts: [
        e.provider,
        e.peer ? `held by ${e.peer}` : 'waits for its client',
        since(e.opened_at, 'opened ', ' ago'),
        `active ${ago(e.last_activity_seconds_ago)}`,
        plural(e.attachments, 'attachment'),
      ],
      text: e.repository,
    })),
  },
  {
    id: 'schedules',
    title: 'Schedules of this checkout',
    path: '/api/v1/schedules?mine_only=false&include_cron=true',
    none: 'Nothing is scheduled.',
    items: answer => answer.schedules.map(s => ({
      key: s.schedule_id,
      title: `${s.from_peer} to ${s.to_peer}`,
      tags: [s.kind, s.cron ? 'recurring' : ''],
      facts: [s.schedule_id, since(s.fire_at, 'due for ') ?? s.fire_at, s.cron ? `cron ${s.cron}` : ''],
    })),
  },
];
