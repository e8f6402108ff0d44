// Who is here, in short, on the home page; and the buttons that copy what is to be pasted.

import { clock, h, patch, plural, said } from './dom.js';
import { live, source } from './live.js';

const root = document.getElementById('now');
const server = source();
const most = 12; // peers that are named here; the board has all
let at = 0;

live(() => server.ask('/api/v1/peers'), ({ board }) => {
  at = Date.now();
  const here = board.peers.filter(p => p.attached);
  const overlaps = board.overlaps?.length ?? 0;
  patch(root, [
    h('p', null, here.length === 0 ? 'Nobody is attached.'
      : [h('a', { href: '/board' }, plural(board.count, 'peer')), ` in ${plural(new Set(here.map(p => p.checkout?.id)).size, 'checkout')}`],
      overlaps > 0 && [' ', h('a', { class: 'state bad', href: '/board#meeting' }, overlaps === 1 ? '1 pair of claims meets' : `${overlaps} pairs of claims meet`)],
      !board.complete && [' ', h('a', { class: 'state warn', href: '/board#unread' }, 'Incomplete')]),
    h('ul', { class: 'names' }, here.slice(0, most).map(p => h('li', { key: `${p.checkout?.id} ${p.id}` },
      h('strong', null, said(p.mesh?.name ?? p.client.name)), ' ', h('span', { class: 'dim' }, said(p.announcement?.intent ?? 'claims nothing'))))),
    here.length > most && h('p', null, h('a', { href: '/board' }, `and ${here.length - most} more`)),
  ]);
}, () => {
  server.lost();
  patch(root, [h('p', { class: 'notice bad', role: 'alert' }, `The server does not answer${at ? ` since ${clock(at)}` : ''}. Looking for the next one at this address.`)]);
});

for (const pre of document.querySelectorAll('.configurations pre')) {
  const button = document.createElement('button');
  button.type = 'button';
  button.textContent = 'Copy';
  button.onclick = async () => {
    await navigator.clipboard.writeText(pre.textContent);
    button.textContent = 'Copied';
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  };
  pre.before(button);
}
