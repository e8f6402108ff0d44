// What the pages are built of. h describes a node; patch makes the document match a description and touches only what
// differs, so that focus, selection, scrolling and what somebody has opened stay as they are.
//
// Everything is set as text or as an attribute's value. There is no way here to write markup, on purpose: names, intents and
// paths come from whoever is attached.

export function h(tag, attributes, ...children) {
  return { tag, attributes: attributes ?? {}, children: children.flat(Infinity).filter(c => c !== null && c !== undefined && c !== false && c !== '') };
}

const described = new WeakMap(); // by node: the description it matches now

export function patch(parent, children) {
  const keyed = new Map();
  const others = [];
  for (const node of parent.childNodes) {
    const key = described.get(node)?.attributes?.key;
    if (key === undefined) others.push(node);
    else keyed.set(key, node);
  }
  const wanted = children.flat(Infinity).filter(c => c !== null && c !== undefined && c !== false && c !== '');
  const nodes = wanted.map(d => {
    const node = reuse(d, keyed, others) ?? create(d);
    update(node, d);
    return node;
  });
  const keep = new Set(nodes);
  for (const node of [...parent.childNodes]) if (!keep.has(node)) node.remove();
  let at = parent.firstChild;
  for (const node of nodes) {
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at); // moving a node takes its focus, so only what is out of place moves
  }
}

function reuse(d, keyed, others) {
  const tag = typeof d === 'object' ? d.tag : '#text';
  const key = d.attributes?.key;
  if (key !== undefined) {
    const node = keyed.get(key);
    keyed.delete(key);
    return node?.nodeName.toLowerCase() === tag ? node : undefined;
  }
  const i = others.findIndex(node => node.nodeName.toLowerCase() === tag);
  return i < 0 ? undefined : others.splice(0, i + 1)[i];
}

function create(d) {
  return typeof d === 'object' ? document.createElement(d.tag) : document.createTextNode('');
}

function update(node, d) {
  if (typeof d !== 'object') {
    if (node.data !== String(d)) node.data = String(d);
    return;
  }
  const before = described.get(node)?.attributes ?? Object.fromEntries([...node.attributes].map(a => [a.name, a.value])); // as the server sent it
  for (const name of new Set([...Object.keys(before), ...Object.keys(d.attributes)])) {
    if (before[name] !== d.attributes[name]) setAttribute(node, name, d.attributes[name]);
  }
  described.set(node, d);
  patch(node, d.children);
}

function setAttribute(node, name, value) {
  if (name === 'key') return;
  if (name.startsWith('on')) node[name] = value ?? null;
  else if (value === undefined || value === null || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? '' : value);
}

// said is text of somebody else: its direction must not turn what stands around it.
export const said = text => h('bdi', null, text);

export const code = text => h('code', null, said(text));

export function plural(n, one, many = one + 's') {
  return `${n.toLocaleString('en')} ${n === 1 ? one : many}`;
}

// span says roughly how long: a figure that changes every second is noise.
export function span(seconds) {
  if (seconds < 10) return 'moments';
  if (seconds < 60) return `${Math.floor(seconds / 10) * 10} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return plural(Math.floor(seconds / 86400), 'day');
}

export function ago(seconds) {
  return seconds < 10 ? 'now' : span(seconds) + ' ago';
}

// since shows a time of the server, which is a time of this machine.
export function since(stamp, before = '', after = '') {
  const at = Date.parse(stamp);
  if (Number.isNaN(at)) return null;
  const seconds = (Date.now() - at) / 1000;
  const text = seconds < -10 ? 'in ' + span(-seconds) : before + (after ? span(Math.max(0, seconds)) + after : span(Math.max(0, seconds)));
  return h('time', { datetime: stamp, title: new Date(at).toLocaleString() }, text);
}

export const clock = at => new Date(at).toLocaleTimeString('en-GB');

// boardLink leads to another server's board. The address comes from that server's lease, so it has to look like one.
export function boardLink(url) {
  return /^http:\/\/127\.0\.0\.1:\d{1,5}$/.test(url ?? '') ? url + '/board' : null;
}
