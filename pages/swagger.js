// The API explorer: the operations of openapi.json, each with a form that calls it here and now.

import { code, h, patch, plural, said } from './dom.js';
import { get } from './live.js';

const shown = 256 * 1024; // characters of an answer that are shown

const root = document.getElementById('operations');
const token = document.getElementById('token'); // the only place the token is kept
token.form.onsubmit = event => event.preventDefault();
const operations = []; // with what was typed and answered
let components = {};

start();

async function start() {
  try {
    const contract = await get('/openapi.json');
    components = contract.components?.schemas ?? {};
    for (const [path, methods] of Object.entries(contract.paths)) {
      for (const [method, o] of Object.entries(methods)) operations.push(operation(method.toUpperCase(), path, o));
    }
  } catch (error) {
    patch(root, [h('p', { class: 'notice bad', role: 'alert' }, 'The contract could not be read: ', said(error.message))]);
    return;
  }
  token.oninput = render;
  window.onhashchange = reveal;
  render();
  reveal();
}

// reveal opens the operation that the address names.
function reveal() {
  const named = operations.find(o => o.operationId === decodeURIComponent(location.hash.slice(1)));
  if (!named) return;
  const element = document.getElementById(named.operationId);
  element.open = true;
  element.scrollIntoView();
}

function operation(method, path, o) {
  const body = o.requestBody?.content?.['application/json']?.schema;
  const initial = body ? JSON.stringify(example(body), null, 2) : undefined;
  return {
    ...o, method, path, body, initial,
    write: method !== 'GET',
    values: {},    // parameters, as typed
    text: initial, // the body, as typed
    answer: null,
  };
}

function render() {
  const tags = [...new Set(operations.map(o => o.tags?.[0] ?? 'other'))];
  patch(root, tags.map(tag => h('section', { key: tag, class: 'area' }, h('h2', null, tag[0].toUpperCase() + tag.slice(1)),
    h('div', { class: 'cards' }, operations.filter(o => (o.tags?.[0] ?? 'other') === tag).map(show)))));
}

function show(o) {
  return h('details', { key: o.operationId, id: o.operationId, class: 'operation' },
    h('summary', null, h('span', { class: 'method ' + o.method.toLowerCase() }, o.method), h('code', null, o.path), h('span', null, o.summary), o.security && h('span', { class: 'tag' }, 'needs the token')),
    h('div', { class: 'inside' },
      h('p', { class: 'measure' }, ticked(o.description), ' ', h('a', { href: '/docs/' + o.operationId }, o.operationId)),
      h('form', { onsubmit: event => { event.preventDefault(); send(o); } },
        (o.parameters ?? []).map(p => parameter(o, p)),
        o.body && h('div', { class: 'field' }, h('label', { for: o.operationId + '-body' }, 'body'),
          h('textarea', { id: o.operationId + '-body', rows: Math.min(12, o.initial.split('\n').length + 1), spellcheck: 'false', oninput: event => { o.text = event.target.value; render(); } }, o.initial)),
        h('div', { class: 'send' }, h('button', { type: 'submit', class: 'primary', disabled: o.sending }, o.sending ? 'Sending…' : 'Send'),
          o.write && h('span', { class: 'dim' }, token.value ? 'with the token' : 'without a token'))),
      h('div', { class: 'curl' }, h('h4', null, 'curl'), h('pre', { tabindex: 0 }, h('code', null, curl(o)))),
      o.answer && answer(o.answer),
      h('details', null, h('summary', null, 'Schemas and example'),
        o.body && [h('h4', null, 'Body'), outline(o.body)],
        h('h4', null, 'Answer'), outline(answerOf(o)),
        h('h4', null, 'Example of an answer'), h('pre', { tabindex: 0 }, h('code', null, JSON.stringify(example(answerOf(o), true), null, 2))))));
}

function parameter(o, p) {
  const id = `${o.operationId}-${p.name}`;
  const change = event => { o.values[p.name] = event.target.value; render(); };
  const words = p.schema.enum ?? (p.schema.type === 'boolean' ? ['true', 'false'] : null);
  return h('div', { class: 'field' },
    h('label', { for: id }, p.name, p.required && ' (required)'),
    words
      ? h('select', { id, onchange: change }, h('option', { value: '' }, p.schema.default === undefined ? 'not given' : `not given (${p.schema.default})`), words.map(w => h('option', { value: w }, w)))
      : h('input', { id, oninput: change, inputmode: p.schema.type === 'integer' ? 'numeric' : null, placeholder: p.schema.default === undefined ? 'not given' : `not given (${p.schema.default})` }),
    h('p', { class: 'dim' }, p.description));
}

function target(o) {
  const query = new URLSearchParams(Object.entries(o.values).filter(([, v]) => v !== ''));
  return o.path + (query.size ? '?' + query : '');
}

// quote is for a shell, where only the quotation mark itself is special within quotation marks.
const quote = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;

// curl shows the call, but not the token: the line may end up anywhere, and its arguments are everybody's to read while it
// runs. So the header comes from the lease through a pipe.
function curl(o) {
  const words = ['curl', '-sS'], bearer = o.write && (token.value || o.security);
  if (o.method !== 'GET') words.push('-X', o.method);
  if (bearer) words.push('-H', '@-');
  if (o.body) words.push('-H', quote('Content-Type: application/json'), '-d', quote(o.text));
  words.push(quote(location.origin + target(o)));
  const line = words.join(' ');
  return bearer ? `sed -n 's/.*"token": *"\\([^"]*\\)".*/Authorization: Bearer \\1/p' .ai/local/state/mcp/server.json |\n${line}` : line;
}

async function send(o) {
  o.sending = true;
  render();
  const started = performance.now();
  const headers = { Accept: 'application/json' };
  if (o.body) headers['Content-Type'] = 'application/json';
  if (o.write && token.value) headers.Authorization = `Bearer ${token.value.trim()}`;
  try {
    const response = await fetch(target(o), { method: o.method, headers, body: o.body ? o.text : undefined, cache: 'no-store' });
    const text = await response.text();
    o.answer = { status: response.status, words: response.statusText, kind: response.headers.get('Content-Type') ?? '', text, time: performance.now() - started };
  } catch (error) {
    o.answer = { status: 0, words: `no answer: ${error.message}`, kind: '', text: '', time: performance.now() - started };
  }
  o.sending = false;
  render();
}

function answer(a) {
  let text = a.text;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* shown as it came */ }
  return h('div', { class: 'answer', role: 'status' },
    h('h4', null, 'Answer ', h('span', { class: a.status >= 200 && a.status < 300 ? 'state good' : 'state bad' }, a.status ? `${a.status} ${a.words}` : a.words),
      ' ', h('span', { class: 'dim' }, `${Math.round(a.time)} ms, ${plural(new Blob([a.text]).size, 'byte')}`)),
    text && h('pre', { tabindex: 0 }, h('code', null, text.slice(0, shown))),
    text.length > shown && h('p', { class: 'dim' }, `The first ${shown.toLocaleString('en')} of ${text.length.toLocaleString('en')} characters are shown.`));
}

function answerOf(o) {
  return o.responses?.['200']?.content?.['application/json']?.schema ?? {};
}

function resolve(schema) {
  return schema.$ref ? components[schema.$ref.split('/').pop()] ?? {} : schema;
}

// typeName is one word or a few for a schema.
function typeName(schema) {
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.type === 'array') return `list of ${typeName(schema.items ?? {})}`;
  if (schema.additionalProperties) return `object of ${typeName(schema.additionalProperties)}`;
  return schema.type ?? 'anything';
}

// outline lists the properties of a schema, those of the types within it one level further in.
function outline(schema, within = []) {
  const s = resolve(schema.type === 'array' ? schema.items ?? {} : schema);
  if (!s.properties || within.includes(s)) return null;
  return h('ul', { class: 'outline' }, Object.entries(s.properties).map(([name, p]) => h('li', null,
    h('code', null, name), ' ', h('span', { class: 'dim' }, typeName(p), s.required?.includes(name) ? '' : ', optional', p.enum ? `: ${p.enum.join(', ')}` : ''), ' ', ticked(p.description ?? ''),
    outline(p, [...within, s]))));
}

// example makes a value of the right shape. Of an answer it shows what may be there; of arguments, what may be filled in.
function example(schema, full = false, within = []) {
  const s = resolve(schema);
  if (s.default !== undefined) return s.default;
  if (s.enum) return s.enum[0];
  if (s.properties) {
    if (within.includes(s)) return {};
    return Object.fromEntries(Object.entries(s.properties).map(([name, p]) => [name, example(p, full, [...within, s])]));
  }
  switch (s.type) {
    case 'array': return full ? [example(s.items ?? {}, full, within)] : [];
    case 'object': return {};
    case 'string': return full ? 'text' : '';
    case 'integer': case 'number': return s.minimum ?? 0;
    case 'boolean': return true;
  }
  return null;
}

const ticked = text => (text ?? '').split('`').map((part, i) => i % 2 ? code(part) : part);
