// Asking the server again and again, as long as somebody looks. What is shown is never older than it says: when the server does not
// answer, the page says so and goes on asking, for the next server takes the same port when it can.

const every = 2000;     // ms between an answer and the next question
const searching = 1000; // the same while there is no server
const patience = 8000;  // a server that says nothing for so long is not there; a gather takes three seconds at most

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// get asks for JSON. It throws Refused when the server says no, and something else when there is no server.
export async function get(path) {
  const response = await fetch(path, {
    headers: { Accept: 'application/json' },
    cache: 'no-store',
    signal: AbortSignal.timeout(patience),
  });
  const body = await response.json();
  if (!response.ok) throw new Refused(response.status, body?.error?.message ?? response.statusText);
  return body;
}

// live calls ask, which returns a promise, and hands what comes of it to show, or the failure to lose.
export function live(ask, show, lose) {
  let timer = 0;
  let asking = false;
  const turn = async () => {
    clearTimeout(timer);
    if (asking || document.hidden) return;
    asking = true;
    let wait = every;
    let answer;
    try {
      answer = await ask();
    } catch (error) {
      wait = searching;
      lose(error);
    }
    asking = false;
    timer = setTimeout(turn, wait);
    if (answer) show(answer); // a mistake in here must not pass for a lost server
  };
  document.addEventListener('visibilitychange', turn);
  turn();
}

// source knows the server behind the page: which checkout it serves, and which routes it has.
export function source() {
  let known = null; // what the server said of itself; asked again after every loss
  let first = null; // what the first one said
  return {
    lost() { known = null; },
    async ask(path, more = []) {
      const fresh = !known;
      if (fresh) {
        const [about, index] = await Promise.all([get('/'), get('/api/v1')]);
        known = { about, routes: new Set(index.routes.filter(r => r.method === 'GET').map(r => r.path)) };
        first ??= about;
      }
      const there = more.filter(s => known.routes.has(s.path.split('?')[0]));
      const [board, ...rest] = await Promise.all([get(path), ...there.map(s => get(s.path).then(answer => ({ answer }), problem))]);
      const here = board.boards.find(b => b.this_checkout)?.id;
      if (!fresh && here && here !== known.about.repository_id) { // another server took the port between two questions
        known = null;
        return this.ask(path, more);
      }
      return {
        board,
        about: known.about,
        other: !sameRepository(known.about, first) && known.about,
        updated: known.about.version !== first.version,
        sections: there.map((section, i) => ({ section, ...rest[i] })),
      };
    },
  };
}

// problem lets one section fail without the others. No answer at all is a lost server, which the board will notice.
function problem(error) {
  if (error instanceof Refused) return { problem: error.message };
  throw error;
}

function sameRepository(a, b) {
  return a.repository_id === b.repository_id || Boolean(a.git_repository_id) && a.git_repository_id === b.git_repository_id;
}
