// State, requests and the panels' frame. The token stands after '#' in the address that `nebula studio` prints: no server sees it there.
import { element, shown, clock, bytes, renewChildren } from '/grid.js';
import { panels } from '/panels.js';

// Then '#' is followed by the panel, by '/' and the words of what it shows (tags), and by '?' and its choices: #version/global_step500?job=run7
function parts() {
  const [path, query] = location.hash.slice(1).split('?');
  const words = path.split('/').map((text) => { try { return decodeURIComponent(text); } catch { return text; } });
  return { words, query: Object.fromEntries(new URLSearchParams(query)) };
}
const asked = parts();
const isPanel = (name) => panels.some((one) => one.name === name);
// In the storage of the browser, so that a second tab and an address without the token work. The next start of the studio makes another token.
if (asked.words[0] && !isPanel(asked.words[0])) localStorage.setItem('nebula-token', asked.words.shift());
const token = localStorage.getItem('nebula-token') || '';
const $ = (id) => document.getElementById(id);

export const studio = {
  state: { rows: new Map(), events: [], now: null },
  panel: null,
  chosen: new Set(), // keys of versions, to compare
  tag: null, // of the panel "One checkpoint"
  job: '', // its name, if the studio serves several
  async ask(name, query = {}) {
    return answer(await fetch(`/api/${name}?${new URLSearchParams({ job: this.job, ...query })}`, { headers: { 'X-Nebula-Token': token } }));
  },
  async act(name, body = {}) {
    return answer(await fetch(`/api/${name}`, {
      method: 'POST', headers: { 'X-Nebula-Token': token, 'Content-Type': 'application/json' }, body: JSON.stringify({ job: this.job, ...body }),
    }));
  },
  // Long work of the server: shown above each panel with its progress, and a button that stops it. Returns its answer.
  async work(name, body) {
    const { job } = this;
    const { work } = await this.act(name, body);
    for (;;) {
      const changed = new Promise((done) => { waiting.push(done); });
      const found = await this.ask('work', { job, id: work });
      if (found.state === 'stopped') throw new Error(`${found.what} was stopped`);
      if (found.state === 'failed') throw new Error(found.error);
      if (found.state === 'done') return found.answer;
      await changed;
    }
  },
  // The panel of all jobs.
  showAll(told) {
    showVerdict(null);
    $('path').textContent = '';
    document.title = 'Nebula studio';
    $('problems').replaceChildren(...(told.problems || []).map((text) => element('p', {}, shown(text))));
  },
  // The words of an action stay for ten seconds: the time of the next update does not take their place before anybody has read them.
  said: 0,
  say(text, stays = 10_000) {
    this.said = performance.now() + stays;
    $('live').textContent = text;
  },
  open(tag) { this.tag = tag; choose('version', true); },
  // The address of what is shown. `replaces`: the address before it needs no place in the browser's history.
  address(replaces = false) {
    const { words = [], query = {} } = this.panel.place?.(this) || {};
    const chosen = Object.entries({ job: this.panel.isOfAll ? '' : this.job, ...query }).filter(([, value]) => value !== '' && value !== null && value !== undefined);
    const hash = `#${[this.panel.name, ...words].map(encodeURIComponent).join('/')}${chosen.length ? `?${new URLSearchParams(chosen)}` : ''}`;
    if (hash !== location.hash) history[replaces ? 'replaceState' : 'pushState'](null, '', hash);
  },
  goTo(words, query = {}) { goTo({ words, query: { job: this.job, ...query } }, false); },
  // A dialog. buttons: [label, class, action]; an action that returns false keeps it open.
  dialog(title, content, buttons) {
    const node = $('dialog');
    const close = () => node.close();
    const made = buttons.map(([label, kind, action]) => element('button', {
      class: `act ${kind}`, type: 'button', onclick: async () => { if ((await action?.()) !== false) close(); },
    }, label));
    node.replaceChildren(element('h2', { id: 'dialog-title' }, title), element('div', {}, content),
      element('div', { class: 'bar' }, ...made, element('button', { class: 'act', type: 'button', onclick: close }, buttons.length ? 'Cancel' : 'Close')));
    node.showModal();
  },
};

async function answer(response) {
  const told = await response.json().catch(() => ({ error: `the answer (${response.status}) is no JSON` }));
  if (!response.ok) throw new Error(told.error || `the server answers ${response.status}`);
  return told;
}

function choose(name, focus = false, replaces = false) {
  if (studio.several && !studio.job) name = 'jobs';
  studio.panel = panels.find((one) => one.name === name);
  studio.address(replaces);
  for (const tab of $('tabs').children) {
    const is = tab.dataset.name === name;
    tab.setAttribute('aria-selected', String(is));
    tab.tabIndex = is ? 0 : -1;
    if (is) tab.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  }
  $('main').setAttribute('role', 'tabpanel');
  $('main').setAttribute('aria-labelledby', `tab-${name}`);
  $('main').replaceChildren();
  studio.panel.open($('main'), studio);
  if (studio.panel.isOfAll || of !== studio.job) { showVerdict(null); showWorks([]); }
  else { showVerdict(studio.state.verdict); showWorks(studio.state.works); $('path').textContent = shown(studio.state.path || ''); }
  if (of === studio.job) studio.panel.update?.(studio);
  if (focus) $('main').focus({ preventScroll: true });
}

function makeTabs() {
  $('tabs').replaceChildren(...panels.filter((one) => studio.several || !one.isOfAll).map((one) => element('button', {
    role: 'tab', id: `tab-${one.name}`, type: 'button', 'data-name': one.name, 'aria-controls': 'main', onclick: () => choose(one.name),
    onkeydown: (event) => {
      const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!turn) return;
      const all = [...$('tabs').children];
      const next = all[(all.indexOf(event.currentTarget) + turn + all.length) % all.length];
      choose(next.dataset.name);
      next.focus();
    },
  }, one.label)));
}

// The agent's verdict on the job, above each panel. A job that is fine needs no banner.
function showVerdict(verdict) {
  const isTrouble = verdict && verdict.state !== 'fine';
  const lines = isTrouble ? [`${verdict.job ? `${shown(verdict.job)} is ` : ''}${verdict.state} since ${clock(verdict.since)}:`, shown(verdict.reason), 'What to do:', shown(verdict.cure)] : [];
  $('verdict').className = isTrouble ? verdict.state.replace(' ', '-') : '';
  const paragraph = (title, text) => element('p', {}, element('strong', {}, title), ` ${text}`);
  const fresh = isTrouble ? [paragraph(lines[0], lines[1]), paragraph(lines[2], lines[3])] : [];
  if ([...$('verdict').children].map((one) => one.textContent).join('\n') === fresh.map((one) => one.textContent).join('\n')) return; // a screen reader says it once
  $('verdict').replaceChildren(...fresh);
}

const waiting = []; // calls that continue when a state has come
function showWorks(works) {
  const running = (works || []).filter((one) => one.state === 'running');
  renewChildren($('works'), running.map((one) => {
    const { done, total } = one.progress || {};
    return element('p', { 'data-key': String(one.id) }, element('span', {}, shown(one.what)), total ? element('progress', { max: total, value: Math.min(done, total), 'aria-label': `progress of ${shown(one.what)}` }) : element('progress', { 'aria-label': `progress of ${shown(one.what)}` }),
      element('span', { class: 'faint' }, total ? `${bytes(done)} of ${bytes(total)}` : ''), element('button', { class: 'act', type: 'button', onclick: () => studio.act('stop', { id: one.id }) }, 'Stop'));
  }));
}
let of = ''; // the job whose state is shown
function take(told, job) {
  const { state } = studio;
  if (job !== of) { state.rows = new Map(); studio.chosen.clear(); }
  of = job;
  if (told.all) state.rows.clear();
  for (const key of told.gone) state.rows.delete(key);
  for (const [key, row] of Object.entries(told.rows)) state.rows.set(key, { ...row, key });
  const { rows, gone, all, ...rest } = told;
  Object.assign(state, rest);
  $('path').textContent = shown(state.path || '');
  document.title = `${state.verdict && state.verdict.state !== 'fine' ? `${state.verdict.state}: ` : ''}${shown(state.path || '')} - Nebula studio`;
  showVerdict(state.verdict);
  $('problems').replaceChildren(...(state.problems || []).map((text) => element('p', {}, shown(text))));
  showWorks(state.works);
  for (const done of waiting.splice(0)) done();
  if (!studio.panel?.isOfAll) studio.panel?.update?.(studio);
}

let leave = new AbortController();
async function follow() {
  let epoch = '', since = 0;
  for (;;) {
    const job = studio.job;
    if (studio.several && !job) { await new Promise((done) => setTimeout(done, 200)); continue; }
    if (job !== of) [epoch, since] = ['', 0];
    try {
      leave = new AbortController();
      const told = await answer(await fetch(`/api/state?${new URLSearchParams({ job, epoch, since })}`, { headers: { 'X-Nebula-Token': token }, signal: leave.signal }));
      if (job !== studio.job) continue;
      if (told.revision !== since || told.epoch !== epoch) take(told, job);
      [epoch, since] = [told.epoch, told.revision];
      const { reading } = studio.state;
      if (performance.now() >= studio.said) studio.say(told.revision && !reading ? `live, ${clock(Date.now() / 1000)}` : `reading the storage…${reading ? ` ${reading.read} of ${reading.of} versions` : ''}`, 0);
    } catch (failure) {
      if (failure.name === 'AbortError') continue;
      studio.say('not connected', 0);
      $('problems').replaceChildren(element('p', {}, failure instanceof TypeError ? 'The studio does not answer: start `nebula studio` again, and open the address that it prints.' : failure.message));
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
}

function goTo({ words: [name, ...words], query }, replaces) {
  const { job = '', ...rest } = query;
  const panel = panels.find((one) => one.name === name);
  if (job !== studio.job && !panel?.isOfAll) { Object.assign(studio, { job, tag: null }); leave.abort(); }
  const first = studio.several && !studio.job ? 'jobs' : 'now';
  panel?.arrive?.(words, rest, studio);
  choose(panel && (studio.several || !panel.isOfAll) ? name : first, false, replaces);
}

async function begin() {
  for (;;) {
    try {
      const told = await studio.ask('about');
      Object.assign(studio, { several: told.several, readOnly: told.read_only });
      document.body.classList.toggle('read-only', told.read_only);
      break;
    } catch (failure) {
      studio.say('not connected', 0);
      $('problems').replaceChildren(element('p', {}, failure instanceof TypeError ? 'The studio does not answer: start `nebula studio` again, and open the address that it prints.' : failure.message));
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
  $('problems').replaceChildren();
  makeTabs();
  goTo(asked, true);
  addEventListener('popstate', () => goTo(parts(), true));
  setInterval(() => studio.panel?.tick?.(studio), 1000); // ages go on between two answers
  follow();
}
begin();
