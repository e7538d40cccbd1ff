// State, requests and the panels' frame. The token stands after '#' in the address that `nebula studio` prints: no server sees it there.
import { element, shown, clock } from '/grid.js';
import { panels } from '/panels.js';

// Then '#' is followed by the panel, and '/' and the tag of "One checkpoint".
const parts = () => location.hash.slice(1).split('/').map((text) => { try { return decodeURIComponent(text); } catch { return text; } });
const asked = parts();
const isPanel = (name) => panels.some((one) => one.name === name);
if (asked[0] && !isPanel(asked[0])) sessionStorage.setItem('nebula-token', asked.shift());
const token = sessionStorage.getItem('nebula-token') || '';
const $ = (id) => document.getElementById(id);

export const studio = {
  state: { rows: new Map(), events: [], now: null },
  panel: null,
  chosen: new Set(), // keys of versions, to compare
  tag: null, // of the panel "One checkpoint"
  async ask(name, query = {}) {
    return answer(await fetch(`/api/${name}?${new URLSearchParams(query)}`, { headers: { 'X-Nebula-Token': token } }));
  },
  async act(name, body = {}) {
    return answer(await fetch(`/api/${name}`, {
      method: 'POST', headers: { 'X-Nebula-Token': token, 'Content-Type': 'application/json' }, body: JSON.stringify(body),
    }));
  },
  say(text) { $('live').textContent = text; },
  open(tag) { this.tag = tag; choose('version', true); },
  // The address of what is shown. `replaces`: the address before it needs no place in the browser's history.
  address(replaces = false) {
    const hash = `#${[this.panel.name, ...(this.panel.name === 'version' && this.tag !== null ? [this.tag] : [])].map(encodeURIComponent).join('/')}`;
    if (hash !== location.hash) history[replaces ? 'replaceState' : 'pushState'](null, '', hash);
  },
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
  studio.panel = panels.find((one) => one.name === name);
  studio.address(replaces);
  for (const tab of $('tabs').children) {
    const is = tab.dataset.name === name;
    tab.setAttribute('aria-selected', String(is));
    tab.tabIndex = is ? 0 : -1;
  }
  $('main').setAttribute('role', 'tabpanel');
  $('main').setAttribute('aria-labelledby', `tab-${name}`);
  $('main').replaceChildren();
  studio.panel.open($('main'), studio);
  studio.panel.update?.(studio);
  if (focus) $('main').focus({ preventScroll: true });
}

function makeTabs() {
  $('tabs').replaceChildren(...panels.map((one) => element('button', {
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
  const lines = isTrouble ? [`${verdict.job ? `${shown(verdict.job)} is ` : ''}${verdict.state} since ${clock(verdict.since)}: ${shown(verdict.reason)}`, `What to do: ${shown(verdict.cure)}`] : [];
  $('verdict').className = isTrouble ? verdict.state.replace(' ', '-') : '';
  if ([...$('verdict').children].map((one) => one.textContent).join('\n') === lines.join('\n')) return; // a screen reader says it once
  $('verdict').replaceChildren(...lines.map((line) => element('p', {}, line)));
}

function take(told) {
  const { state } = studio;
  if (told.all) state.rows.clear();
  for (const key of told.gone) state.rows.delete(key);
  for (const [key, row] of Object.entries(told.rows)) state.rows.set(key, { ...row, key });
  const { rows, gone, all, ...rest } = told;
  Object.assign(state, rest);
  $('path').textContent = shown(state.path || '');
  showVerdict(state.verdict);
  $('problems').replaceChildren(...(state.problems || []).map((text) => element('p', {}, shown(text))));
  studio.panel?.update?.(studio);
}

async function follow() {
  let epoch = '', since = 0;
  for (;;) {
    try {
      const told = await studio.ask('state', { epoch, since });
      if (told.revision !== since || told.epoch !== epoch) take(told);
      [epoch, since] = [told.epoch, told.revision];
      const { reading } = studio.state;
      studio.say(told.revision && !reading ? `live, ${clock(Date.now() / 1000)}` : `reading the storage…${reading ? ` ${reading.read} of ${reading.of} versions` : ''}`);
    } catch (failure) {
      studio.say('not connected');
      $('problems').replaceChildren(element('p', {}, failure instanceof TypeError ? 'The studio does not answer: start `nebula studio` again, and open the address that it prints.' : failure.message));
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
}

function goTo([name, tag], replaces) {
  if (tag !== undefined) studio.tag = tag;
  choose(isPanel(name) ? name : 'now', false, replaces);
}

makeTabs();
goTo(asked, true);
addEventListener('popstate', () => goTo(parts(), true));
setInterval(() => studio.panel?.tick?.(studio), 1000); // ages go on between two answers
follow();
