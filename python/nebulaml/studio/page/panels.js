// The panels: open(main, studio) makes one, update(studio) brings it up to date, tick(studio) once a second.
import { element, named, shown, bytes, seconds, milliseconds, count, ago, clock, when, number, renew, renewChildren, Grid } from '/grid.js';
import { curves } from '/curves.js';
import { jobs } from '/jobs.js';

const wall = () => Date.now() / 1000;
const KIND = { durable: 'good', replicated: 'good', committed: 'good', failed: 'bad', lost: 'bad', damaged: 'bad' };
const state = (row) => element('span', { class: KIND[row.state] || 'faint', title: row.error ? shown(row.error) : null },
  shown(row.state) + (row.abandoned ? ', abandoned' : '') + (row.error ? `: ${shown(row.error)}` : ''));
const step = (row) => (row.step >= 0 ? row.step : null);
const places = (row) => row.where.join(' + ') || '-';
const begun = (row) => row.begun || row.committed_at;
const oldestFirst = (studio) => [...studio.state.rows.values()].sort((a, b) => begun(a) - begun(b));

async function attempt(studio, text, work) {
  studio.say(text);
  try {
    const told = await work();
    studio.say(`done: ${text}`);
    return told;
  } catch (failure) {
    studio.said = 0;
    studio.dialog('This did not work', element('p', {}, shown(failure.message)), []);
    return null;
  }
}

const many = (number, what) => `${count(number)} ${what}${number === 1 ? '' : 's'}`;
const isHung = (steps) => steps && steps.seconds > steps.limit;

function card(title, big, ...lines) {
  return element('section', { class: 'card' }, element('h2', {}, title), element('p', { class: 'big' }, big), lines.filter(Boolean).map((one) => element('p', { class: 'faint' }, one)));
}

// ---- Now
const now = {
  name: 'now', label: 'Now',
  open(main, studio) {
    this.bar = element('div', { class: 'bar control' },
      element('button', { class: 'act', type: 'button', onclick: () => attempt(studio, 'asked the job to save', () => studio.act('save-now')) }, 'Save now'),
      element('button', { class: 'act', type: 'button', onclick: () => this.flush(studio) }, 'Flush the newest version'),
      element('button', { class: 'act', type: 'button', onclick: () => prune(studio) }, 'Prune…'));
    this.cards = element('div', { class: 'cards' });
    main.append(this.bar, this.cards);
  },
  flush(studio) {
    const newest = studio.state.now?.newest;
    if (newest) attempt(studio, `flush of ${shown(newest.tag)}`, () => studio.act('flush', { tag: newest.tag }));
  },
  update(studio) { this.draw(studio); },
  tick(studio) { this.draw(studio); },
  loss(found, told) {
    if (!told.trains) return ['nothing', 'no trainer is connected'];
    if (!found) return told.readable ? ['all work', 'nothing can be loaded yet'] : ['not known', 'the storage cannot be read'];
    const lost = Math.max(0, wall() - found.at);
    const pace = told.goodput?.step_s;
    return [seconds(lost), pace ? `about ${count(lost / pace)} step${Math.round(lost / pace) === 1 ? '' : 's'}` : 'steps: not known yet', `it would go on from ${shown(found.tag)}`];
  },
  draw(studio) {
    const { now: told, agent, jobs } = studio.state;
    if (!told) return;
    const newest = told.newest;
    const ledger = told.goodput;
    const steps = studio.state.nodes?.here.jobs.map((one) => one.steps).find(Boolean);
    const used = agent ? `${bytes(agent.memory_used)} of ${bytes(agent.memory_budget)}` : 'no agent runs';
    const fresh = element('div', { class: 'cards' },
      card('Newest loadable checkpoint', newest ? named(newest.tag) : told.readable ? 'none yet' : 'not known', !newest ? (told.readable ? null : 'the storage cannot be read') : `${newest.state}, in ${newest.where.join(' and ')}, ${ago(newest.at, wall())}`, told.stuck && element('span', { class: 'bad' }, `${told.stuck.count} newer cannot be loaded: ${shown(told.stuck.tag)} ${told.stuck.state === 'failed' ? 'failed: ' : ''}${shown(told.stuck.error)}`)),
      card('Lost if all processes died now', ...this.loss(newest, told)),
      card('Lost if the node died now', ...this.loss(told.after_node, told)),
      card('Queue', told.queue.length ? `${told.queue.length} waiting` : 'empty', told.queue.length ? `${bytes(told.waiting_bytes)}: ${told.queue.map((one) => shown(one.tag) + (one.writing ? ' (being written)' : '')).slice(0, 3).join(', ')}` : 'no version waits for storage'),
      card('Memory', used, `${many(told.in_memory, 'version')} in memory`),
      card('Storage', told.readable ? bytes(told.stored_bytes) : 'cannot be read', told.readable && `${many(told.stored, 'durable version')}${studio.state.reading ? ' so far' : ''}${told.failed ? `, ${told.failed} failed` : ''}`),
      card('Goodput so far', ledger ? `${(100 * ledger.ratio).toFixed(1)} %` : 'not known yet', ledger ? `of ${seconds(ledger.span_s)}: blocked ${seconds(ledger.blocked)}, slowed ${seconds(ledger.inflated)}, lost ${seconds(ledger.lost)}, restart ${seconds(ledger.restart)}${ledger.paused ? `, paused ${seconds(ledger.paused)}` : ''}` : 'it needs a history with some saves of numbered steps', ledger && `a step takes ${seconds(ledger.step_s)}`),
      card('Trainers', !told.trains ? 'none connected' : isHung(steps) ? 'connected, no steps' : told.stuck ? 'connected, no checkpoint becomes complete' : steps ? `training, step ${count(steps.step)}` : 'training', studio.state.nodes?.here.sessions.map((one) => `rank ${one.rank} of ${one.world}, pid ${one.pid}`).slice(0, 4).join('; '), agent ? `agent pid ${agent.pid}, up ${seconds(wall() - agent.started_at)}` : null));
    renew(this.cards, fresh);
  },
};

// ---- Prune, with a preview
async function prune(studio) {
  const keep = element('input', { type: 'number', min: 1, value: 3, id: 'keep-last' });
  const gone = element('input', { type: 'checkbox', id: 'abandoned' });
  studio.dialog('Prune: what would be removed?', [
    element('p', {}, element('label', { htmlFor: 'keep-last' }, 'Keep the newest '), keep, ' versions of each job'),
    element('p', {}, gone, element('label', { htmlFor: 'abandoned' }, ' also remove abandoned ones')),
  ], [['Show', '', async () => {
    const seen = await attempt(studio, 'looked what would go', () => studio.ask('prune-preview', { keep_last: keep.value, abandoned: gone.checked ? 1 : 0 }));
    if (seen) setTimeout(() => preview(studio, seen));
  }]]);
}
function preview(studio, seen) {
  const line = (one) => element('li', {}, named(one.tag), ` ${bytes(one.size)}`, one.pinned !== null ? ' (pinned)' : '');
  const content = [
    element('p', {}, `${many(seen.removed.length, 'version')} would be removed, ${bytes(seen.bytes)}:`),
    element('ul', {}, seen.removed.map(line)), element('p', {}, `${seen.kept.length} stay:`), element('ul', {}, seen.kept.slice(0, 200).map(line)),
  ];
  studio.dialog('Prune: preview', content, seen.removed.length ? [['Remove them', 'danger', () => { remove(studio, seen.removed); }]] : []);
}
async function remove(studio, versions) {
  const told = await attempt(studio, 'pruned', () => studio.work('prune', { versions: versions.map(({ tag, entry }) => ({ tag, entry })) }));
  const kept = told?.results.filter((one) => !one.removed) || [];
  if (kept.length) studio.dialog('Some stay', element('ul', {}, kept.map((one) => element('li', {}, named(one.tag), `: ${shown(one.reason)}`))), []);
}

// ---- Checkpoints
const metricText = (row) => Object.entries(row.metrics).map(([name, value]) => `${shown(name)} ${number(value)}`).join(', ');
const names = (studio) => [...new Set([...studio.state.rows.values()].flatMap((row) => Object.keys(row.metrics)))].sort();
const SORT = 'at', DESCENDING = true;
const checkpoints = {
  name: 'checkpoints', label: 'Checkpoints',
  filter: '', only: '', sort: SORT, descending: DESCENDING,
  place() {
    const isUsual = this.sort === SORT && this.descending === DESCENDING;
    return { query: { filter: this.filter, show: this.only, sort: isUsual ? '' : this.sort, order: isUsual ? '' : this.descending ? 'down' : 'up' } };
  },
  arrive(words, query) {
    Object.assign(this, { filter: query.filter || '', only: query.show || '', sort: query.sort || SORT, descending: query.sort ? query.order === 'down' : DESCENDING });
  },
  open(main, studio) {
    const known = names(studio);
    this.known = known.join('\0');
    const pick = (row) => element('input', {
      type: 'checkbox', checked: studio.chosen.has(row.key), 'aria-label': `compare ${shown(row.tag)}`, 'data-field': 'pick',
      onchange: (event) => {
        event.target.checked ? studio.chosen.add(row.key) : studio.chosen.delete(row.key);
        event.target.closest('tr').setAttribute('aria-selected', String(event.target.checked));
        this.buttons(studio);
      },
    });
    const columns = [
      { name: 'pick', label: 'Compare', width: 'pick', cell: pick },
      { name: 'tag', label: 'Tag', width: 'name', value: (row) => row.tag, cell: (row) => element('button', { class: 'tag', type: 'button', 'data-field': 'tag', title: shown(row.tag), onclick: () => studio.open(row.tag) }, named(row.tag)) },
      { name: 'step', label: 'Step', number: true, value: step, cell: (row) => String(step(row) ?? '-') },
      { name: 'state', label: 'State', width: 'brief', value: (row) => row.state, cell: state },
      { name: 'at', label: 'When', number: true, value: begun, cell: (row) => when(begun(row)) },
      ...known.map((name) => ({ name: `metric ${name}`, label: shown(name), number: true, width: 'metric', value: (row) => row.metrics[name] ?? null, cell: (row) => number(row.metrics[name]) })),
      { name: 'where', label: 'Where', value: places, cell: places },
      { name: 'size', label: 'Size', number: true, value: (row) => row.size, cell: (row) => bytes(row.size) },
      { name: 'written', label: 'Written', number: true, value: (row) => row.written, cell: (row) => (row.written === null ? '-' : element('span', { title: `${bytes(Math.max(0, row.size - row.written))} were in storage before` }, bytes(row.written))) },
      { name: 'blocked', label: 'Blocked', number: true, value: (row) => row.blocked_ms, cell: (row) => milliseconds(row.blocked_ms) },
      { name: 'durable', label: 'Durable', number: true, value: (row) => (row.durable ? row.durable - row.begun : null), cell: (row) => (row.durable ? element('span', { title: `committed after ${seconds(row.committed - row.begun)}` }, `+${seconds(row.durable - row.begun)}`) : '-') },
      { name: 'verified', label: 'Verified', number: true, value: (row) => row.verified_at ?? null, cell: (row) => checked(row) },
      { name: 'pin', label: 'Pin', width: 'brief', value: (row) => row.pinned, cell: (row) => (row.pinned === null ? '' : row.pinned ? `pinned: ${shown(row.pinned)}` : 'pinned') },
    ];
    const isThere = columns.some((one) => one.value && one.name === this.sort); // a metric comes later than the page
    this.grid = new Grid(columns, {
      label: 'Checkpoints', sort: isThere ? this.sort : SORT, descending: isThere ? this.descending : DESCENDING, select: true, selected: (row) => studio.chosen.has(row.key), height: Math.max(360, innerHeight - 170),
      sorted: () => { [this.sort, this.descending] = [this.grid.sort, this.grid.descending]; studio.address(); },
    });
    this.count = element('span', { class: 'faint', role: 'status' });
    this.compareButton = element('button', { class: 'act', type: 'button', onclick: () => studio.goTo(['compare', ...chosenTags(studio)]) }, 'Compare');
    const search = element('input', { type: 'search', id: 'filter', value: this.filter, placeholder: 'tag, state, metric', oninput: (event) => { this.filter = event.target.value; studio.address(true); this.update(studio); } });
    const only = element('select', { id: 'only', onchange: (event) => { this.only = event.target.value; studio.address(); this.update(studio); } },
      ['', 'durable', 'memory', 'failed', 'pinned', 'abandoned'].map((name) => element('option', { value: name, selected: this.only === name }, name || 'all')));
    main.append(element('div', { class: 'bar' }, element('span', {}, element('label', { htmlFor: 'filter' }, 'Filter'), search), element('span', {}, element('label', { htmlFor: 'only' }, 'Show'), only),
      this.compareButton, element('button', { class: 'act control', type: 'button', onclick: () => prune(studio) }, 'Prune…'), this.count), this.grid.node);
    this.buttons(studio);
  },
  buttons(studio) { this.compareButton.disabled = studio.chosen.size < 2; },
  matches(row) {
    if (this.only === 'durable' && !row.where.includes('storage')) return false;
    if (this.only === 'memory' && !row.where.includes('memory')) return false;
    if (this.only === 'failed' && row.state !== 'failed') return false;
    if (this.only === 'pinned' && row.pinned === null) return false;
    if (this.only === 'abandoned' && !row.abandoned) return false;
    return !this.filter || `${row.tag} ${row.state} ${row.error} ${metricText(row)}`.toLowerCase().includes(this.filter.toLowerCase());
  },
  update(studio) {
    if (names(studio).join('\0') !== this.known) { // the first metrics have come, or others
      const main = this.grid.node.parentNode;
      const typed = document.activeElement?.id;
      main.replaceChildren();
      this.open(main, studio);
      if (typed) document.getElementById(typed)?.focus();
    }
    const all = [...studio.state.rows.values()];
    for (const key of studio.chosen) if (!studio.state.rows.has(key)) studio.chosen.delete(key);
    const rows = all.filter((row) => this.matches(row));
    this.grid.set(rows);
    this.count.textContent = `${rows.length} of ${all.length}${studio.state.hidden ? `, and ${studio.state.hidden} older ones that are not shown` : ''}`;
    this.buttons(studio);
  },
};
const checked = (row) => (row.verified_at ? element('span', { class: row.verified_ok ? null : 'bad', title: clock(row.verified_at) }, row.verified_ok ? when(row.verified_at) : 'DAMAGED') : '-');
// An earlier writing of a tag has its sequence behind the tag.
const chosenTags = (studio) => [...studio.chosen].map((key) => studio.state.rows.get(key)).filter(Boolean).sort((a, b) => begun(a) - begun(b)).map((row) => (latest(studio, row.tag) === row ? row.tag : `${row.tag}@${row.sequence}`));
const latest = (studio, tag) => [...studio.state.rows.values()].filter((one) => one.tag === tag).sort((a, b) => begun(b) - begun(a))[0];
function rowOf(studio, word) {
  const found = latest(studio, word);
  if (found) return found;
  const [, tag, sequence] = word.match(/^(.*)@(\d+)$/s) || [];
  return [...studio.state.rows.values()].find((one) => one.tag === tag && one.sequence === +sequence);
}

// ---- Compare
const compare = {
  name: 'compare', label: 'Compare',
  tags: [],
  place() { return { words: this.tags }; },
  arrive(words) { this.tags = words.filter(Boolean); },
  open(main, studio) {
    this.facts = element('div');
    this.tensors = element('div');
    this.shownFor = null;
    this.files = new Map();
    main.append(this.facts, this.tensors);
  },
  update(studio) {
    const rows = this.tags.map((word) => rowOf(studio, word));
    if (rows.filter(Boolean).length < 2) {
      renewChildren(this.facts, [element('p', {}, this.tags.length > 1 ? 'These checkpoints are not there, or no longer: ' : 'Choose two or more in ', this.tags.length > 1 ? this.tags.map(shown).join(', ') : 'Checkpoints', '.')]);
      return;
    }
    rows.forEach((row, i) => row || this.tags.splice(i, 1));
    const present = rows.filter(Boolean);
    for (const row of present) if (!this.files.has(row.key)) { this.files.set(row.key, null); this.load(studio, row); }
    const metrics = [...new Set(present.flatMap((row) => Object.keys(row.metrics)))].sort();
    const fileNames = [...new Set(present.flatMap((row) => [...(this.files.get(row.key)?.keys() || [])]))].sort().slice(0, 300);
    const lines = [
      ['tag', (row) => element('button', { class: 'tag', type: 'button', onclick: () => studio.open(row.tag) }, named(row.tag))], ['step', (row) => String(step(row) ?? '-')], ['entry', (row) => String(row.entry ?? '-')], ['state', state], ['saved', (row) => clock(begun(row))],
      ...metrics.map((name) => [shown(name), (row) => number(row.metrics[name])]),
      ['size', (row) => bytes(row.size)], ['blocked', (row) => milliseconds(row.blocked_ms)], ['durable after', (row) => seconds(row.durable && row.durable - row.begun)],
      ['pin', (row) => (row.pinned === null ? '-' : shown(row.pinned) || 'pinned')],
      ...fileNames.map((name) => [named(name), (row) => bytes(this.files.get(row.key)?.get(name))]),
    ];
    const fresh = element('div', { class: 'grid' }, element('table', { class: 'plain', 'aria-label': 'Checkpoints side by side' },
      element('tbody', {}, lines.map(([name, cell]) => element('tr', {}, element('th', { scope: 'row' }, name), present.map((row) => element('td', {}, cell(row))))))));
    renewChildren(this.facts, [this.facts.firstChild?.isEqualNode(fresh) ? this.facts.firstChild : fresh]);
    if (this.shownFor !== this.tags.join('\0')) {
      this.shownFor = this.tags.join('\0');
      this.tensors.replaceChildren(element('h2', {}, 'Tensors'), element('button', { class: 'act', type: 'button', onclick: () => this.diff(studio, present) }, 'Compare the tensors'));
    }
  },
  async load(studio, row) {
    const told = await studio.ask('version', { tag: row.tag }).catch(() => ({}));
    // Storage has the files of a tag's last writing only.
    this.files.set(row.key, new Map((told.version?.sequence === row.sequence ? told.version.files : []).map((file) => [file.name, file.size])));
    if (studio.panel === this) this.update(studio);
  },
  // Each later one with the first, one after the other: they read the same bytes.
  async diff(studio, [first, ...others]) {
    const found = element('div');
    this.tensors.replaceChildren(element('h2', {}, 'Tensors'), found);
    for (const other of others) {
      const part = element('section', {}, element('p', { class: 'faint' }, `reading ${shown(first.tag)} and ${shown(other.tag)}…`));
      found.append(part);
      let told;
      try { told = await studio.work('diff', { tag: first.tag, other: other.tag }); } catch (failure) { part.replaceChildren(element('p', { class: 'bad' }, shown(failure.message))); continue; }
      const rows = told.files.flatMap((file) => [
        ...(file.tensors || []).map((one, i) => ({ ...one, file: file.name, key: `${file.name}\0${i}` })),
        ...(file.tensors?.length || file.result.startsWith('equal') ? [] : [{ file: file.name, name: file.tensors ? '(other)' : '(file)', result: file.result, key: file.name }]),
      ]);
      const grid = new Grid([
        { name: 'file', label: 'File', width: 'name', value: (one) => one.file, cell: (one) => named(one.file) },
        { name: 'name', label: 'Tensor', value: (one) => one.name, cell: (one) => named(one.name) },
        { name: 'result', label: 'Result', value: (one) => one.result, cell: (one) => shown(one.result) },
        { name: 'largest', label: 'Largest difference', number: true, value: (one) => (typeof one.largest === 'number' ? one.largest : null), cell: (one) => (typeof one.largest === 'string' ? one.largest : number(one.largest)) },
        { name: 'differing', label: 'Differ', number: true, value: (one) => one.differing ?? null, cell: (one) => (one.differing === undefined ? '-' : `${count(one.differing)} of ${count(one.elements)}`) },
      ], { label: `Tensors of ${shown(first.tag)} and ${shown(other.tag)}`, sort: 'largest', height: 360 });
      part.replaceChildren(element('p', { class: rows.length ? null : 'good' }, named(first.tag), ' and ', named(other.tag), rows.length ? `: ${count(rows.length)} tensors or files differ` : ': all is equal'), rows.length ? grid.node : '');
      grid.set(rows);
    }
  },
};

// ---- One checkpoint
const version = {
  name: 'version', label: 'One checkpoint',
  place(studio) { return { words: studio.tag === null ? [] : [studio.tag] }; },
  arrive(words, query, studio) { if (words.length) studio.tag = words[0]; },
  open(main, studio) {
    this.main = main;
    this.shownFor = null;
    this.update(studio);
  },
  async update(studio) {
    studio.tag ??= studio.state.now?.newest?.tag ?? null;
    const row = this.row(studio);
    const key = studio.tag === null ? 'none' : `${studio.tag}\0${row?.sequence}\0${row?.state}\0${row?.pinned}\0${row?.where}`;
    if (this.shownFor === key) {
      if (!this.found && this.check && this.verifiedAt !== row?.verified_at) this.check.replaceChildren(this.checkText(null, row)); // someone else has verified it
      this.verifiedAt = row?.verified_at;
      return;
    }
    this.shownFor = key;
    if (studio.tag === null) { this.main.replaceChildren(element('p', {}, 'There is no checkpoint yet.')); return; }
    const tag = studio.tag;
    let told;
    try { told = await studio.ask('version', { tag }); } catch (failure) { told = { error: failure.message }; }
    if (studio.panel === this && studio.tag === tag) this.draw(studio, row, told);
  },
  row(studio) { return latest(studio, studio.tag); },
  draw(studio, row, told) {
    const tag = studio.tag;
    const again = () => { this.shownFor = null; this.update(studio); };
    const choice = element('select', { id: 'which', onchange: (event) => { studio.tag = event.target.value; studio.address(); again(); } },
      [...new Set([...studio.state.rows.values()].sort((a, b) => begun(b) - begun(a)).map((one) => one.tag))].slice(0, 2000).map((one) => element('option', { value: one, selected: one === tag }, shown(one))));
    const check = element('dd', { id: 'check' }, this.checkText(told.check, row));
    Object.assign(this, { check, found: told.check, verifiedAt: row?.verified_at });
    const bar = element('div', { class: 'bar' }, element('label', { htmlFor: 'which' }, 'Checkpoint'), choice,
      element('button', { class: 'act control', type: 'button', onclick: async (event) => {
        event.target.disabled = true;
        check.textContent = 'reading every byte…';
        const found = await attempt(studio, `verify of ${shown(tag)}`, () => studio.work('verify', { tag }));
        this.found = found;
        check.replaceChildren(this.checkText(found, row));
        event.target.disabled = false;
      } }, 'Verify'),
      row?.pinned === null || row === undefined
        ? element('button', { class: 'act control', type: 'button', onclick: () => pin(studio, tag) }, 'Pin…')
        : element('button', { class: 'act control', type: 'button', onclick: () => attempt(studio, `${shown(tag)} unpinned`, () => studio.act('unpin', { tag })) }, 'Unpin'),
      element('button', { class: 'act control', type: 'button', onclick: () => copyTo(studio, tag) }, 'Copy to…'),
      element('button', { class: 'act control', type: 'button', onclick: () => exportTo(studio, tag) }, 'Export…'),
      element('button', { class: 'act control', type: 'button', disabled: row?.where.includes('storage'), onclick: () => attempt(studio, `flush of ${shown(tag)}`, () => studio.act('flush', { tag })) }, 'Flush'),
      told.restore && element('button', { class: 'act', type: 'button', onclick: () => copy(studio, told.restore) }, 'Copy the restore command'));
    const facts = element('dl', {}, [
      ['tag', named(tag)], ['state', row ? state(row) : '-'],
      ['size', bytes(told.version?.size ?? row?.size)], ['copies', row ? places(row) : '-'],
      ['lineage', `entry ${told.version?.entry ?? row?.entry ?? '-'}${told.version?.run ? `, run ${shown(told.version.run)}` : ''}${row?.abandoned ? ', abandoned: the job went back before it' : ''}`],
      ['blocked', milliseconds(row?.blocked_ms)],
      row && Object.keys(row.metrics).length ? ['metrics', metricText(row)] : null, row && row.pinned !== null ? ['pin', shown(row.pinned) || 'pinned, without a reason'] : null,
    ].filter(Boolean).map(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]), element('dt', {}, 'check'), check);
    this.main.replaceChildren(bar, element('div', { class: 'two' }, element('section', {}, element('h2', {}, 'Facts'), facts), this.waterfall(told.version, told.error)), this.files(studio, tag, told.version));
  },
  checkText(found, row) {
    if (!found && row?.verified_at) return element('span', { class: row.verified_ok ? 'good' : 'bad' }, row.verified_ok ? `every byte was as it was written, ${clock(row.verified_at)}` : `DAMAGED, ${clock(row.verified_at)}: verify it again for the places`);
    if (!found) return element('span', { class: 'faint' }, 'never verified');
    if (found.ok) return element('span', { class: 'good' }, `every byte is as it was written (${bytes(found.answer.bytes)} in ${seconds(found.answer.seconds)})`);
    const damaged = (found.answer.versions || []).flatMap((one) => [...one.files, ...one.documents]).filter((one) => !one.ok);
    return element('span', { class: 'bad' }, `DAMAGED: ${damaged.map((one) => `${shown(one.name)} at byte ${one.damage[0]?.offset ?? '?'}`).join(', ')}`);
  },
  waterfall(told, error) {
    const section = element('section', {}, element('h2', {}, 'Ranks and phases'));
    const ranks = (told?.ranks || []).filter((one) => one.begun && one.persisted >= one.begun).sort((a, b) => a.rank - b.rank);
    if (!ranks.length) { section.append(element('p', { class: 'faint' }, error ? shown(error) : 'Times of ranks are known when the version is in storage.')); return section; }
    const start = Math.min(...ranks.map((one) => one.begun));
    const end = Math.max(...ranks.map((one) => one.persisted), start + 1e-3);
    const slowest = [...ranks].sort((a, b) => b.persisted - b.begun - (a.persisted - a.begun)).slice(0, 5);
    const width = 620, line = ranks.length > 200 ? 3 : ranks.length > 40 ? 8 : 18;
    const canvas = element('canvas', { width, height: ranks.length * line, role: 'img', 'aria-label': `${ranks.length} ranks, ${seconds(end - start)} from the first begin to the last write; slowest: rank ${slowest[0].rank}` });
    const draw = () => {
      const style = getComputedStyle(document.documentElement);
      const paint = canvas.getContext('2d');
      const x = (at) => ((at - start) / (end - start)) * width;
      paint.clearRect(0, 0, width, canvas.height);
      ranks.forEach((one, i) => {
        const bar = (from, to, colour) => { paint.fillStyle = style.getPropertyValue(colour); paint.fillRect(x(from), i * line + (line > 5 ? 1 : 0), Math.max(1, x(to) - x(from)), line > 5 ? line - 2 : line - 1); };
        bar(one.begun, one.captured, '--mark');
        bar(one.captured, one.persisted, '--mark2');
        if (one.rank === slowest[0].rank) { paint.fillStyle = style.getPropertyValue('--bad'); paint.fillRect(0, i * line, 4, line); }
      });
    };
    draw();
    section.append(element('div', { class: 'legend' }, element('span', {}, swatch('--mark'), 'captured'), element('span', {}, swatch('--mark2'), 'on its way to storage'), element('span', {}, swatch('--bad'), `slowest: rank ${slowest[0].rank}`), element('span', {}, `${seconds(end - start)} in all`)),
      element('div', { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Waterfall of ranks' }, canvas));
    const grid = new Grid([
      { name: 'rank', label: 'Rank', number: true, value: (one) => one.rank, cell: (one) => String(one.rank) },
      { name: 'captured', label: 'Captured after', number: true, value: (one) => one.captured - one.begun, cell: (one) => seconds(one.captured - one.begun) },
      { name: 'persisted', label: 'In storage after', number: true, value: (one) => one.persisted - one.begun, cell: (one) => seconds(one.persisted - one.begun) },
    ], { label: 'Times of ranks, slowest first', sort: 'persisted', height: 200 });
    section.append(element('h2', {}, 'Slowest first'), grid.node);
    grid.set(ranks);
    return section;
  },
  files(studio, tag, told) {
    const section = element('section', {}, element('h2', {}, 'Files'));
    if (!told?.files?.length) return section;
    const inside = element('div');
    const grid = new Grid([
      { name: 'name', label: 'Name', value: (one) => one.name, cell: (one) => named(one.name) },
      { name: 'rank', label: 'Rank', number: true, value: (one) => one.rank, cell: (one) => String(one.rank ?? '-') },
      { name: 'size', label: 'Size', number: true, value: (one) => one.size, cell: (one) => bytes(one.size) },
      { name: 'sequence', label: 'Written', value: (one) => one.sequence, cell: (one) => `${one.sequence ? clock(one.sequence / 1e9) : '-'}${one.sequence < told.sequence ? ', unchanged' : ''}` },
      { name: 'format', label: 'Format', value: (one) => one.format, cell: (one) => one.format || '-' },
      { name: 'look', label: 'Tensors', cell: (one) => (one.format === 'zip' ? element('button', { class: 'act', type: 'button', 'aria-label': `tensors of ${shown(one.name)}`, onclick: () => this.tensors(studio, tag, one.name, inside) }, 'Look inside') : '-') },
    ], { label: 'Files', sort: 'name', descending: false, height: 300 });
    section.append(grid.node, inside);
    grid.set(told.files);
    return section;
  },
  async tensors(studio, tag, name, inside) {
    inside.replaceChildren(element('p', { class: 'faint' }, 'reading…'));
    let told;
    try { told = await studio.ask('tensors', { tag, name }); } catch (failure) { inside.replaceChildren(element('p', { class: 'bad' }, shown(failure.message))); return; }
    const broken = told.tensors.filter((one) => one.nan || one.infinite).length;
    const grid = new Grid([
      { name: 'name', label: 'Tensor', value: (one) => one.name, cell: (one) => named(one.name) },
      { name: 'dtype', label: 'Type', value: (one) => one.dtype, cell: (one) => one.dtype },
      { name: 'shape', label: 'Shape', value: (one) => one.shape.join('×'), cell: (one) => one.shape.join(' × ') || 'scalar' },
      { name: 'min', label: 'Smallest', number: true, value: (one) => one.min, cell: (one) => number(one.min) },
      { name: 'max', label: 'Largest', number: true, value: (one) => one.max, cell: (one) => number(one.max) },
      { name: 'norm', label: 'Norm', number: true, value: (one) => one.norm, cell: (one) => number(one.norm) },
      { name: 'nan', label: 'NaN', number: true, value: (one) => one.nan, cell: (one) => element('span', { class: one.nan ? 'bad' : null }, String(one.nan ?? '-')) },
      { name: 'infinite', label: 'Infinite', number: true, value: (one) => one.infinite, cell: (one) => element('span', { class: one.infinite ? 'bad' : null }, String(one.infinite ?? '-')) },
    ], { label: `Tensors of ${shown(name)}`, sort: 'name', descending: false, height: 360 });
    inside.replaceChildren(element('h2', {}, 'Tensors of ', named(name)), element('p', { class: broken ? 'bad' : 'good' }, `${told.tensors.length} tensors, ${broken} with NaN or infinite values`), grid.node);
    grid.set(told.tensors.map((one, i) => ({ ...one, key: String(i) })));
  },
};
const swatch = (colour, kind = null) => { const made = element('i', { class: kind }); made.style.background = `var(${colour})`; return made; };

function pin(studio, tag) {
  const reason = element('input', { id: 'reason', value: '', maxLength: 200 });
  studio.dialog('Pin a checkpoint', [element('p', {}, named(tag)), element('p', {}, element('label', { htmlFor: 'reason' }, 'Reason (may be empty) '), reason)],
    [['Pin', '', () => attempt(studio, `${shown(tag)} pinned`, () => studio.act('pin', { tag, reason: reason.value.trim() }))]]);
}
function copyTo(studio, tag) {
  const place = element('input', { id: 'copy-to', size: 40, placeholder: 'a directory, or a URL such as az://account/container/run7' });
  studio.dialog('Copy a checkpoint', [element('p', {}, named(tag)), element('p', {}, element('label', { htmlFor: 'copy-to' }, 'To '), place)],
    [['Copy', '', () => { attempt(studio, `copy of ${shown(tag)}`, () => studio.work('copy', { tag, to: place.value.trim() })); }]]);
}
function exportTo(studio, tag) {
  const place = element('input', { id: 'export-to', size: 40, placeholder: '/models/step500, or a URL' });
  const base = element('input', { id: 'export-config', size: 40, placeholder: 'with config.json and the tokenizer' });
  const dtype = element('select', { id: 'export-dtype' }, [['', 'as saved'], ['bf16', 'bf16'], ['fp16', 'fp16'], ['fp32', 'fp32']].map(([value, text]) => element('option', { value }, text)));
  const line = (id, text, input) => element('p', {}, element('label', { htmlFor: id }, text), input);
  studio.dialog('Export the weights for Hugging Face', [element('p', {}, named(tag)), line('export-to', 'New directory ', place), line('export-config', 'Configuration from (may be empty) ', base), line('export-dtype', 'Floats ', dtype)],
    [['Export', '', () => { attempt(studio, `export of ${shown(tag)}`, () => studio.work('export', { tag, to: place.value.trim(), config: base.value.trim(), dtype: dtype.value })); }]]);
}
async function copy(studio, text) {
  try { await navigator.clipboard.writeText(text); studio.say('the restore command is in the clipboard'); } catch { /* it can be copied from the dialog */ }
  studio.dialog('Restore command', element('p', { class: 'mono' }, text), []);
}

// Places of times from 0 to 1. A pause of many saves' length takes the room of some saves: a night must not squeeze the days beside it.
const PAUSE = 12, DRAWN = 4; // intervals between saves: the shortest pause, and the room that a pause gets
function timeScale(times, saves) {
  const sorted = [...new Set(times)].sort((a, b) => a - b);
  const between = saves.slice(1).map((at, i) => at - saves[i]).filter((one) => one > 0).sort((a, b) => a - b);
  const usual = between.length > 2 ? between[between.length >> 1] : Infinity;
  const starts = [0], pauses = [];
  sorted.slice(1).forEach((at, i) => {
    const gap = at - sorted[i];
    const isPause = gap > PAUSE * usual;
    if (isPause) pauses.push([sorted[i], at]);
    starts.push(starts[i] + (isPause ? DRAWN * usual : gap));
  });
  const whole = starts.at(-1) || 1;
  const place = (at) => {
    const i = Math.max(0, sorted.findLastIndex((one) => one <= at));
    return (starts[i] + (i + 1 < sorted.length ? ((at - sorted[i]) / (sorted[i + 1] - sorted[i])) * (starts[i + 1] - starts[i]) : 0)) / whole;
  };
  return { place, pauses };
}

// ---- Timeline
const EVENT = { end: 'bad', restore: 'warn', pause: 'warn', start: 'good' };
const timeline = {
  name: 'timeline', label: 'Timeline',
  from: null, to: null, // seconds since 1970; null: all
  place() { return { query: { from: this.from && this.from.toFixed(1), to: this.to && this.to.toFixed(1) } }; },
  arrive(words, query) { [this.from, this.to] = [query.from, query.to].map((text) => (Number.isFinite(+text) && text ? +text : null)); },
  // Shows the part between the shares `left` and `right` of what is shown now.
  zoom(studio, left, right) {
    const [first, last] = this.shownTimes || [];
    if (left === -Infinity) [this.from, this.to] = [null, null];
    else if (first === undefined || last === undefined) return; // there are no saves yet
    else [this.from, this.to] = [first + left * (last - first), first + right * (last - first)];
    if (this.all && this.from <= this.all[0] && this.to >= this.all[1]) [this.from, this.to] = [null, null];
    studio.address(true);
    this.update(studio);
  },
  open(main, studio) {
    const steps = { '+': [0.25, 0.75], '=': [0.25, 0.75], '-': [-0.5, 1.5], 0: [-Infinity, Infinity], ArrowLeft: [-0.25, 0.75], ArrowRight: [0.25, 1.25] };
    this.picture = element('div', { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Saves over time; keys: + and - zoom, arrows move, 0 shows all',
      onkeydown: (event) => { if (steps[event.key] && event.target === event.currentTarget) { event.preventDefault(); this.zoom(studio, ...steps[event.key]); } } });
    const button = (text, key) => element('button', { class: 'act', type: 'button', onclick: () => this.zoom(studio, ...steps[key]) }, text);
    this.list = element('ul', { class: 'events' });
    main.append(element('h2', {}, 'Saves'), element('div', { class: 'bar' }, button('Zoom in', '+'), button('Zoom out', '-'), button('Earlier', 'ArrowLeft'), button('Later', 'ArrowRight'), button('All', '0')), element('div', { class: 'legend' }, element('span', {}, swatch('--mark3'), 'durable'), element('span', {}, swatch('--mark'), 'in memory, or replaced there'), element('span', {}, swatch('--bad'), 'failed'), element('span', {}, swatch('--bad', 'line'), 'end of a trainer'), element('span', {}, swatch('--warn', 'line'), 'load, return to an earlier step, pause'), element('span', {}, swatch('--faint', 'line'), 'start')),
      this.picture, element('h2', {}, 'Step inflation'), this.inflation = element('p'), element('h2', {}, 'Events, newest first'), this.list);
  },
  update(studio) {
    const every = oldestFirst(studio).filter(begun);
    const isShown = (at) => (this.from === null || at >= this.from) && (this.to === null || at <= this.to);
    const rows = every.filter((row) => isShown(begun(row))).slice(-1000);
    const all = studio.state.events || [], events = all.filter((one) => isShown(one.at));
    if (every.length) this.all = [Math.min(begun(every[0]), ...all.map((one) => one.at)), Math.max(begun(every.at(-1)), ...all.map((one) => one.at))];
    renewChildren(this.list, events.slice(-200).reverse().map((one) => element('li', { 'data-key': `${one.at} ${one.text}` }, element('span', { class: EVENT[one.kind] || 'faint' }, one.kind), ` ${clock(one.at)} `, shown(one.text))));
    if (!events.length) this.list.replaceChildren(element('li', { class: 'faint' }, 'nothing has happened since the studio started, and the history shows no way back'));
    const slow = rows.filter((row) => row.inflation !== null).sort((a, b) => b.inflation - a.inflation).slice(0, 3);
    this.inflation.replaceChildren(slow.length ? `Steps took longest before ${slow.map((row) => `${shown(row.tag)} (${(100 * row.inflation).toFixed(0)} % over the usual)`).join(', ')}.` : 'Not known yet: it needs three saves of numbered steps.');
    if (!rows.length) { this.picture.replaceChildren(element('p', { class: 'faint' }, every.length ? 'no saves in this part: press 0, or All' : 'no saves yet')); this.shownTimes = [this.from ?? this.all?.[0], this.to ?? this.all?.[1]]; return; }
    const width = Math.max(300, this.picture.clientWidth), height = 260;
    const marks = events.filter((one) => one.at >= begun(rows[0]) - 60);
    const from = Math.min(begun(rows[0]), ...marks.map((one) => one.at));
    const to = Math.max(begun(rows.at(-1)), ...marks.map((one) => one.at), from + 1);
    this.shownTimes = [this.from ?? from, this.to ?? to];
    const known = rows.map(step).filter((value) => value !== null);
    const numbered = known.length > 0;
    const low = numbered ? Math.min(...known) : 0, high = Math.max(...known, low + 1);
    const left = numbered ? Math.max(52, 22 + 8 * count(high).length) : 12;
    const scale = timeScale([...rows.map(begun), ...marks.map((one) => one.at)], rows.map(begun));
    const x = (at) => left + scale.place(at) * (width - left - 12);
    const y = (value) => height - 34 - ((value - low) / (high - low)) * (height - 54);
    const label = (text, at) => {
      const made = element('svg:text', { 'font-size': 13, ...at }, text);
      made.style.fill = 'var(--faint)';
      return made;
    };
    const svg = element('svg:svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'group', 'aria-label': `${rows.length} saves from step ${low} to ${high}, ${marks.length} events` });
    const colour = (row) => (row.state === 'failed' ? '--bad' : row.durable || row.where.includes('storage') ? '--mark3' : '--mark');
    const line = (at, colour, ...children) => {
      const made = element('svg:line', at, ...children);
      made.style.stroke = `var(${colour})`;
      svg.append(made);
    };
    if (numbered) {
      svg.append(label('step', { x: left - 8, y: height - 8, 'text-anchor': 'end' }));
      for (const value of new Set([low, Math.round((low + high) / 2), high])) {
        line({ x1: left, x2: width - 12, y1: y(value), y2: y(value) }, '--line');
        svg.append(label(count(value), { x: left - 8, y: y(value) + 4, 'text-anchor': 'end' }));
      }
    }
    for (const one of marks) {
      const kind = EVENT[one.kind];
      const colour = kind === 'bad' || kind === 'warn' ? `--${kind}` : '--faint';
      line({ x1: x(one.at), x2: x(one.at), y1: 8, y2: height - 28, 'stroke-width': 2, 'stroke-dasharray': colour === '--faint' ? '3 4' : '' }, colour, element('svg:title', {}, `${one.kind}: ${shown(one.text)}`));
    }
    for (const [start, end] of scale.pauses) {
      const middle = (x(start) + x(end)) / 2;
      line({ x1: middle, x2: middle, y1: 24, y2: height - 28, 'stroke-width': 10 }, '--line', element('svg:title', {}, `${seconds(end - start)} without a save, drawn shorter`));
      svg.append(label(seconds(end - start), { x: middle, y: 18, 'text-anchor': 'middle' }));
    }
    let reached = low; // a version without a number is as high as the one before it
    for (const row of rows) {
      reached = step(row) ?? reached;
      const mark = element('svg:circle', { cx: x(begun(row)), cy: y(reached), r: rows.length > 300 ? 2.5 : 4.5, class: 'dot', role: 'link', tabindex: rows.length > 100 ? -1 : 0, 'aria-label': `${shown(row.tag)}, ${row.state}`, onclick: () => studio.open(row.tag), onkeydown: (event) => { if (event.key === 'Enter') studio.open(row.tag); } }, element('svg:title', {}, `${shown(row.tag)}, ${row.state}, blocked ${milliseconds(row.blocked_ms)}`));
      mark.style.fill = `var(${colour(row)})`;
      svg.append(mark);
    }
    // As many times as fit, at saves: a time between two saves can be in a pause, which is drawn shorter.
    const room = 24 + 8 * clock(to).length;
    const ends = [[from, 'start'], [to, 'end']];
    let reachedX = x(from) + room * 1.2;
    for (const row of rows) {
      const at = x(begun(row));
      if (at < reachedX || at > x(to) - room * 1.2) continue;
      ends.push([begun(row), 'middle']);
      reachedX = at + room;
    }
    for (const [at, anchor] of ends) svg.append(label(clock(at), { x: x(at), y: height - 8, 'text-anchor': anchor }));
    if (!this.picture.firstChild?.isEqualNode(svg)) this.picture.replaceChildren(svg);
  },
};

// ---- Nodes
const nodes = {
  name: 'nodes', label: 'Nodes',
  open(main) { this.main = main; },
  update(studio) {
    const { nodes: told, agent } = studio.state;
    if (!told) return;
    const here = told.here;
    const job = here.jobs[0];
    const lag = here.oldest ? wall() - here.oldest : 0;
    const facts = [
      ['agent', agent ? element('span', { class: 'good' }, `runs, pid ${agent.pid}, nebula ${shown(agent.version)}`) : element('span', { class: 'bad' }, 'does not run')],
      agent && ['since', ago(agent.started_at, wall())], agent && ['memory', `${bytes(agent.memory_used)} of ${bytes(agent.memory_budget)} in ${shown(agent.memory_directory || 'memfds')}`],
      ['waiting for storage', here.waiting ? `${here.waiting} versions, the oldest for ${seconds(lag)}` : 'nothing'],
      job && ['in memory', `${job.memory_count} versions`], job?.storage_error && ['storage', element('span', { class: 'bad' }, shown(job.storage_error))],
    ].filter(Boolean);
    const ranks = new Grid([
      { name: 'rank', label: 'Rank', number: true, value: (one) => one.rank, cell: (one) => `${one.rank} of ${one.world}` },
      { name: 'pid', label: 'Process', number: true, value: (one) => one.pid, cell: (one) => String(one.pid) },
      { name: 'since', label: 'Connected', value: (one) => one.since, cell: (one) => clock(one.since) },
    ], { label: 'Ranks on this node', sort: 'rank', descending: false, height: 300, fit: true });
    const copies = new Grid([
      { name: 'node', label: 'Node', value: (one) => one.node, cell: (one) => named(one.node) },
      { name: 'since', label: 'Announced', value: (one) => one.since, cell: (one) => ago(one.since, wall()) },
    ], { label: 'Nodes that keep copies for each other', sort: 'node', descending: false, height: 300, fit: true });
    const replicas = [...studio.state.rows.values()].filter((row) => row.where.includes('peer')).length;
    this.main.replaceChildren(element('h2', {}, 'This node'), element('dl', {}, facts.map(([name, value]) => [element('dt', {}, name), element('dd', {}, value)])),
      element('h2', {}, 'Ranks on this node'), here.sessions.length ? ranks.node : element('p', { class: 'faint' }, 'no trainer is connected'),
      element('h2', {}, 'Nodes with copies'), element('p', {}, `${replicas} versions are in the memory of a peer.`), told.others.length ? copies.node : element('p', { class: 'faint' }, 'No node has announced itself in this storage: a job with replicas=1 or more does.'));
    ranks.set(here.sessions);
    copies.set(told.others);
  },
};

// ---- Configuration
const config = {
  name: 'config', label: 'Configuration',
  open(main, studio) {
    this.advice = element('ul');
    this.body = element('tbody');
    this.checks = element('div');
    main.append(element('h2', {}, 'Advice'), this.advice, element('h2', {}, 'Values'), element('div', { class: 'grid' }, element('table', { class: 'plain', 'aria-label': 'Values' }, element('thead', {}, element('tr', {}, ['Name', 'Value', 'Where it came from'].map((one) => element('th', { scope: 'col' }, one)))), this.body)),
      element('h2', {}, 'This machine'), this.checks);
    this.checks.append(element('button', { class: 'act', type: 'button', onclick: () => this.doctor(studio) }, 'Run nebula doctor'));
  },
  async doctor(studio) {
    this.checks.replaceChildren(element('p', { class: 'faint' }, 'checking…'));
    const told = await attempt(studio, 'nebula doctor', () => studio.ask('doctor'));
    const kind = { ok: 'good', note: 'warn', BAD: 'bad' };
    this.checks.replaceChildren(element('div', { class: 'grid' }, element('table', { class: 'plain', 'aria-label': 'Checks' }, element('tbody', {}, (told?.checks || []).map((one) => element('tr', {}, element('th', { scope: 'row' }, one.check), element('td', { class: kind[one.result] }, one.result), element('td', {}, shown(one.found), one.advice ? element('div', { class: 'faint' }, shown(one.advice)) : '')))))));
  },
  update(studio) {
    const told = studio.state.config;
    if (!told) return;
    this.advice.replaceChildren(...(told.advice.length ? told.advice : ['None yet: it needs three durable versions with times.']).map((one) => element('li', {}, shown(one))));
    this.body.replaceChildren(...told.values.map((one) => element('tr', {}, element('th', { scope: 'row' }, one.name.split(/(?<=_)/).flatMap((part) => [part, element('wbr')])), element('td', { class: 'mono' }, one.unit === 'bytes' ? bytes(+one.value) : shown(one.value)), element('td', {}, shown(one.origin)))));
  },
};

export const panels = [jobs, now, checkpoints, curves, version, compare, timeline, nodes, config];
