// The panels: open(main, studio) makes one, update(studio) brings it up to date, tick(studio) once a second.
import { element, named, shown, bytes, seconds, milliseconds, count, ago, clock, when, number, Grid } from '/grid.js';

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
    studio.dialog('This did not work', element('p', {}, shown(failure.message)), []);
    return null;
  }
}

function card(title, big, ...lines) {
  return element('section', { class: 'card' }, element('h2', {}, title), element('p', { class: 'big' }, big), lines.filter(Boolean).map((one) => element('p', { class: 'faint' }, one)));
}

// ---- Now
const now = {
  name: 'now', label: 'Now',
  open(main, studio) {
    this.bar = element('div', { class: 'bar' },
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
    const used = agent ? `${bytes(agent.memory_used)} of ${bytes(agent.memory_budget)}` : 'no agent runs';
    const fresh = element('div', { class: 'cards' },
      card('Newest loadable checkpoint', newest ? named(newest.tag) : told.readable ? 'none yet' : 'not known', !newest ? (told.readable ? null : 'the storage cannot be read') : `${newest.state}, in ${newest.where.join(' and ')}, ${ago(newest.at, wall())}`, told.stuck && element('span', { class: 'bad' }, `${told.stuck.count} newer cannot be loaded: ${shown(told.stuck.tag)} ${told.stuck.state === 'failed' ? 'failed: ' : ''}${shown(told.stuck.error)}`)),
      card('Lost if all processes died now', ...this.loss(newest, told)),
      card('Lost if the node died now', ...this.loss(told.after_node, told)),
      card('Queue', told.queue.length ? `${told.queue.length} waiting` : 'empty', told.queue.length ? `${bytes(told.waiting_bytes)}: ${told.queue.map((one) => shown(one.tag) + (one.writing ? ' (being written)' : '')).slice(0, 3).join(', ')}` : 'no version waits for storage'),
      card('Memory', used, `${told.in_memory} versions in memory`),
      card('Storage', told.readable ? bytes(told.stored_bytes) : 'cannot be read', told.readable && `${told.stored} durable versions${studio.state.reading ? ' so far' : ''}${told.failed ? `, ${told.failed} failed` : ''}`),
      card('Goodput so far', ledger ? `${(100 * ledger.ratio).toFixed(1)} %` : 'not known yet', ledger ? `of ${seconds(ledger.span_s)}: blocked ${seconds(ledger.blocked)}, slowed ${seconds(ledger.inflated)}, lost ${seconds(ledger.lost)}, restart ${seconds(ledger.restart)}${ledger.paused ? `, paused ${seconds(ledger.paused)}` : ''}` : 'it needs a history with some saves of numbered steps', ledger && `a step takes ${seconds(ledger.step_s)}`),
      card('Trainers', told.trains ? (told.stuck ? 'connected, no checkpoint becomes complete' : 'training') : 'none connected', studio.state.nodes?.here.sessions.map((one) => `rank ${one.rank} of ${one.world}, pid ${one.pid}`).slice(0, 4).join('; '), agent ? `agent pid ${agent.pid}, up ${seconds(wall() - agent.started)}` : null));
    renew(this.cards, fresh);
  },
};

// Makes `old` equal to `fresh`, and touches only what differs: a text that someone has selected stays selected.
function renew(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (!old.cloneNode(false).isEqualNode(fresh.cloneNode(false))) { old.replaceWith(fresh); return; }
  if (old.childNodes.length !== fresh.childNodes.length) { old.replaceChildren(...fresh.childNodes); return; }
  const pairs = [...old.childNodes].map((one, i) => [one, fresh.childNodes[i]]);
  for (const [one, other] of pairs) renew(one, other);
}

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
  const line = (one) => element('li', {}, named(one.tag), ` ${bytes(one.size)}`, one.pinned ? ' (pinned)' : '');
  const content = [
    element('p', {}, `${seen.removed.length} versions would be removed, ${bytes(seen.bytes)}:`),
    element('ul', {}, seen.removed.map(line)), element('p', {}, `${seen.kept.length} stay:`), element('ul', {}, seen.kept.slice(0, 200).map(line)),
  ];
  const remove = ['Remove them', 'danger', async () => {
    const told = await attempt(studio, 'pruned', () => studio.act('prune', { versions: seen.removed.map(({ tag, entry }) => ({ tag, entry })) }));
    const kept = told?.results.filter((one) => !one.removed) || [];
    if (kept.length) setTimeout(() => studio.dialog('Some stay', element('ul', {}, kept.map((one) => element('li', {}, named(one.tag), `: ${shown(one.reason)}`))), []));
  }];
  studio.dialog('Prune: preview', content, seen.removed.length ? [remove] : []);
}

// ---- Checkpoints
const metricText = (row) => Object.entries(row.metrics).map(([name, value]) => `${shown(name)} ${number(value)}`).join(', ');
const checkpoints = {
  name: 'checkpoints', label: 'Checkpoints',
  filter: '', only: '', metric: '',
  names(studio) { return [...new Set([...studio.state.rows.values()].flatMap((row) => Object.keys(row.metrics)))].sort(); },
  open(main, studio) {
    const names = this.names(studio);
    if (!names.includes(this.metric)) this.metric = names[0] || '';
    this.known = names.join('\0');
    const pick = (row) => element('input', {
      type: 'checkbox', checked: studio.chosen.has(row.key), 'aria-label': `compare ${shown(row.tag)}`, 'data-field': 'pick',
      onchange: (event) => {
        event.target.checked ? studio.chosen.add(row.key) : studio.chosen.delete(row.key);
        event.target.closest('tr').setAttribute('aria-selected', String(event.target.checked));
        this.buttons(studio);
      },
    });
    const columns = [
      { name: 'pick', label: 'Compare', cell: pick },
      { name: 'tag', label: 'Tag', width: 'name', value: (row) => row.tag, cell: (row) => element('button', { class: 'tag', type: 'button', 'data-field': 'tag', title: shown(row.tag), onclick: () => studio.open(row.tag) }, named(row.tag)) },
      { name: 'step', label: 'Step', number: true, value: step, cell: (row) => String(step(row) ?? '-') },
      { name: 'state', label: 'State', width: 'brief', value: (row) => row.state, cell: state },
      { name: 'at', label: 'When', number: true, value: begun, cell: (row) => when(begun(row)) },
      { name: 'where', label: 'Where', value: places, cell: places },
      { name: 'size', label: 'Size', number: true, value: (row) => row.size, cell: (row) => bytes(row.size) },
      { name: 'written', label: 'Written', number: true, value: (row) => row.written, cell: (row) => (row.written === null ? '-' : bytes(row.written)) },
      { name: 'unchanged', label: 'Unchanged', number: true, value: (row) => (row.written === null ? null : row.size - row.written), cell: (row) => (row.written === null ? '-' : bytes(Math.max(0, row.size - row.written))) },
      { name: 'blocked', label: 'Blocked', number: true, value: (row) => row.blocked_ms, cell: (row) => milliseconds(row.blocked_ms) },
      { name: 'committed', label: 'Committed', number: true, value: (row) => (row.committed ? row.committed - row.begun : null), cell: (row) => (row.committed ? `+${seconds(row.committed - row.begun)}` : '-') },
      { name: 'durable', label: 'Durable', number: true, value: (row) => (row.durable ? row.durable - row.begun : null), cell: (row) => (row.durable ? `+${seconds(row.durable - row.begun)}` : '-') },
      ...(this.metric ? [{ name: 'metric', label: shown(this.metric), number: true, width: 'brief', value: (row) => row.metrics[this.metric] ?? null, cell: (row) => element('span', { title: metricText(row) }, number(row.metrics[this.metric])) }] : []),
      { name: 'pin', label: 'Pin', width: 'brief', value: (row) => row.pinned, cell: (row) => (row.pinned === null ? '' : row.pinned ? `pinned: ${shown(row.pinned)}` : 'pinned') },
    ];
    this.grid = new Grid(columns, { label: 'Checkpoints', sort: 'at', select: true, selected: (row) => studio.chosen.has(row.key), height: Math.max(360, innerHeight - 170) });
    this.count = element('span', { class: 'faint', role: 'status' });
    this.compareButton = element('button', { class: 'act', type: 'button', onclick: () => compare(studio) }, 'Compare two');
    const search = element('input', { type: 'search', id: 'filter', value: this.filter, placeholder: 'tag, state, metric', oninput: (event) => { this.filter = event.target.value; this.update(studio); } });
    const only = element('select', { id: 'only', onchange: (event) => { this.only = event.target.value; this.update(studio); } },
      ['', 'durable', 'memory', 'failed', 'pinned', 'abandoned'].map((name) => element('option', { value: name, selected: this.only === name }, name || 'all')));
    const metric = names.length > 1 && element('select', { id: 'metric', onchange: (event) => { this.metric = event.target.value; main.replaceChildren(); this.open(main, studio); this.update(studio); } },
      names.map((name) => element('option', { value: name, selected: this.metric === name }, shown(name))));
    main.append(element('div', { class: 'bar' }, element('span', {}, element('label', { htmlFor: 'filter' }, 'Filter'), search), element('span', {}, element('label', { htmlFor: 'only' }, 'Show'), only),
      metric && element('span', {}, element('label', { htmlFor: 'metric' }, 'Metric'), metric),
      this.compareButton, element('button', { class: 'act', type: 'button', onclick: () => prune(studio) }, 'Prune…'), this.count), this.grid.node);
    this.buttons(studio);
  },
  buttons(studio) { this.compareButton.disabled = studio.chosen.size !== 2; },
  matches(row) {
    if (this.only === 'durable' && !row.where.includes('storage')) return false;
    if (this.only === 'memory' && !row.where.includes('memory')) return false;
    if (this.only === 'failed' && row.state !== 'failed') return false;
    if (this.only === 'pinned' && row.pinned === null) return false;
    if (this.only === 'abandoned' && !row.abandoned) return false;
    return !this.filter || `${row.tag} ${row.state} ${row.error} ${metricText(row)}`.toLowerCase().includes(this.filter.toLowerCase());
  },
  update(studio) {
    if (this.names(studio).join('\0') !== this.known) { // the first metrics have come, or others
      const main = this.grid.node.parentNode;
      main.replaceChildren();
      this.open(main, studio);
    }
    const all = [...studio.state.rows.values()];
    for (const key of studio.chosen) if (!studio.state.rows.has(key)) studio.chosen.delete(key);
    const rows = all.filter((row) => this.matches(row));
    this.grid.set(rows);
    this.count.textContent = `${rows.length} of ${all.length}${studio.state.hidden ? `, and ${studio.state.hidden} older ones that are not shown` : ''}`;
    this.buttons(studio);
  },
};

async function compare(studio) {
  const [left, right] = [...studio.chosen].map((key) => studio.state.rows.get(key)).sort((a, b) => begun(a) - begun(b));
  const told = await attempt(studio, 'compared', () => Promise.all([left, right].map((row) => studio.ask('version', { tag: row.tag }).catch((failure) => ({ error: failure.message })))));
  if (!told) return;
  // Storage has the files of a tag's last generation only.
  const files = (row, one) => (one.version?.generation === row.generation ? one.version.files : []);
  const sizes = [left, right].map((row, i) => new Map(files(row, told[i]).map((file) => [file.name, file.size])));
  const lines = [
    ['tag', named(left.tag), named(right.tag)], ['generation', String(left.generation), String(right.generation)], ['state', state(left), state(right)], ['size', bytes(left.size), bytes(right.size)],
    ['blocked', milliseconds(left.blocked_ms), milliseconds(right.blocked_ms)],
    ['durable after', seconds(left.durable && left.durable - left.begun), seconds(right.durable && right.durable - right.begun)],
    ...[...new Set([...Object.keys(left.metrics), ...Object.keys(right.metrics)])].map((name) => [shown(name), number(left.metrics[name]), number(right.metrics[name])]),
    ...[...new Set([...sizes[0].keys(), ...sizes[1].keys()])].slice(0, 300).map((name) => [named(name), bytes(sizes[0].get(name)), bytes(sizes[1].get(name))]),
  ];
  studio.dialog('Two checkpoints', element('table', { class: 'plain' },
    element('thead', {}, element('tr', {}, element('td'), element('th', { scope: 'col' }, 'earlier'), element('th', { scope: 'col' }, 'later'))),
    element('tbody', {}, lines.map(([name, a, b]) => element('tr', {}, element('th', { scope: 'row' }, name), element('td', {}, a), element('td', {}, b))))), []);
}

// ---- One checkpoint
const version = {
  name: 'version', label: 'One checkpoint',
  open(main, studio) {
    this.main = main;
    this.shownFor = null;
    this.update(studio);
  },
  async update(studio) {
    studio.tag ??= studio.state.now?.newest?.tag ?? null;
    const row = this.row(studio);
    const key = studio.tag === null ? 'none' : `${studio.tag}\0${row?.generation}\0${row?.state}\0${row?.pinned}\0${row?.where}`;
    if (this.shownFor === key) return;
    this.shownFor = key;
    if (studio.tag === null) { this.main.replaceChildren(element('p', {}, 'There is no checkpoint yet.')); return; }
    const tag = studio.tag;
    let told;
    try { told = await studio.ask('version', { tag }); } catch (failure) { told = { error: failure.message }; }
    if (studio.panel === this && studio.tag === tag) this.draw(studio, row, told);
  },
  row(studio) { return [...studio.state.rows.values()].filter((one) => one.tag === studio.tag).sort((a, b) => b.generation - a.generation)[0]; },
  draw(studio, row, told) {
    const tag = studio.tag;
    const again = () => { this.shownFor = null; this.update(studio); };
    const choice = element('select', { id: 'which', onchange: (event) => { studio.tag = event.target.value; studio.address(); again(); } },
      [...new Set([...studio.state.rows.values()].sort((a, b) => begun(b) - begun(a)).map((one) => one.tag))].slice(0, 2000).map((one) => element('option', { value: one, selected: one === tag }, shown(one))));
    const check = element('dd', { id: 'check' }, this.checkText(told.check));
    const bar = element('div', { class: 'bar' }, element('label', { htmlFor: 'which' }, 'Checkpoint'), choice,
      element('button', { class: 'act', type: 'button', onclick: async (event) => {
        event.target.disabled = true;
        check.textContent = 'reading every byte…';
        const found = await attempt(studio, `verify of ${shown(tag)}`, () => studio.act('verify', { tag }));
        check.replaceChildren(this.checkText(found));
        event.target.disabled = false;
      } }, 'Verify'),
      row?.pinned === null || row === undefined
        ? element('button', { class: 'act', type: 'button', onclick: () => pin(studio, tag) }, 'Pin…')
        : element('button', { class: 'act', type: 'button', onclick: () => attempt(studio, `${shown(tag)} unpinned`, () => studio.act('unpin', { tag })) }, 'Unpin'),
      element('button', { class: 'act', type: 'button', disabled: row?.where.includes('storage'), onclick: () => attempt(studio, `flush of ${shown(tag)}`, () => studio.act('flush', { tag })) }, 'Flush'),
      told.restore && element('button', { class: 'act', type: 'button', onclick: () => copy(studio, told.restore) }, 'Copy the restore command'));
    const facts = element('dl', {}, [
      ['tag', named(tag)], ['state', row ? state(row) : '-'],
      ['size', bytes(told.version?.size ?? row?.size)], ['copies', row ? places(row) : '-'],
      ['lineage', `generation ${told.version?.generation ?? row?.generation}${told.version?.run ? `, run ${shown(told.version.run)}` : ''}${row?.abandoned ? ', abandoned: the job went back before it' : ''}`],
      ['blocked', milliseconds(row?.blocked_ms)],
      row && Object.keys(row.metrics).length ? ['metrics', metricText(row)] : null, row && row.pinned !== null ? ['pin', shown(row.pinned) || 'pinned, without a reason'] : null,
    ].filter(Boolean).map(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]), element('dt', {}, 'check'), check);
    this.main.replaceChildren(bar, element('div', { class: 'two' }, element('section', {}, element('h2', {}, 'Facts'), facts), this.waterfall(told.version, told.error)), this.files(studio, tag, told.version));
  },
  checkText(found) {
    if (!found) return element('span', { class: 'faint' }, 'not verified since the studio started');
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
      { name: 'generation', label: 'From generation', number: true, value: (one) => one.generation, cell: (one) => `${one.generation ?? '-'}${one.generation < told.generation ? ', unchanged' : ''}` },
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
  open(main) {
    this.picture = element('div', { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Saves over time' });
    this.list = element('ul', { class: 'events' });
    main.append(element('h2', {}, 'Saves'), element('div', { class: 'legend' }, element('span', {}, swatch('--mark3'), 'durable'), element('span', {}, swatch('--mark'), 'in memory, or replaced there'), element('span', {}, swatch('--bad'), 'failed'), element('span', {}, swatch('--bad', 'line'), 'end of a trainer'), element('span', {}, swatch('--warn', 'line'), 'load, return to an earlier step, pause'), element('span', {}, swatch('--faint', 'line'), 'start')),
      this.picture, element('h2', {}, 'Step inflation'), this.inflation = element('p'), element('h2', {}, 'Events, newest first'), this.list);
  },
  update(studio) {
    const rows = oldestFirst(studio).filter(begun).slice(-1000);
    const events = studio.state.events || [];
    this.list.replaceChildren(...events.slice(-200).reverse().map((one) => element('li', {}, element('span', { class: EVENT[one.kind] || 'faint' }, one.kind), ` ${clock(one.at)} `, shown(one.text))));
    if (!events.length) this.list.replaceChildren(element('li', { class: 'faint' }, 'nothing has happened since the studio started, and the history shows no way back'));
    const slow = rows.filter((row) => row.inflation !== null).sort((a, b) => b.inflation - a.inflation).slice(0, 3);
    this.inflation.replaceChildren(slow.length ? `Steps took longest before ${slow.map((row) => `${shown(row.tag)} (${(100 * row.inflation).toFixed(0)} % over the usual)`).join(', ')}.` : 'Not known yet: it needs three saves of numbered steps.');
    if (!rows.length) { this.picture.replaceChildren(element('p', { class: 'faint' }, 'no saves yet')); return; }
    const width = Math.max(300, this.picture.clientWidth), height = 260;
    const marks = events.filter((one) => one.at >= begun(rows[0]) - 60);
    const from = Math.min(begun(rows[0]), ...marks.map((one) => one.at));
    const to = Math.max(begun(rows.at(-1)), ...marks.map((one) => one.at), from + 1);
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
    const svg = element('svg:svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': `${rows.length} saves from step ${low} to ${high}, ${marks.length} events` });
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
      const mark = element('svg:circle', { cx: x(begun(row)), cy: y(reached), r: rows.length > 300 ? 2.5 : 4.5 }, element('svg:title', {}, `${shown(row.tag)}, ${row.state}, blocked ${milliseconds(row.blocked_ms)}`));
      mark.style.fill = `var(${colour(row)})`;
      svg.append(mark);
    }
    for (const [at, anchor] of [[from, 'start'], [to, 'end']]) svg.append(label(clock(at), { x: x(at), y: height - 8, 'text-anchor': anchor }));
    this.picture.replaceChildren(svg);
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
      agent && ['since', ago(agent.started, wall())], agent && ['memory', `${bytes(agent.memory_used)} of ${bytes(agent.memory_budget)} in ${shown(agent.memory_directory || 'memfds')}`],
      ['waiting for storage', here.waiting ? `${here.waiting} versions, the oldest for ${seconds(lag)}` : 'nothing'],
      job && ['in memory', `${job.versions_in_memory} versions`], job?.storage_error && ['storage', element('span', { class: 'bad' }, shown(job.storage_error))],
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
    this.checks.replaceChildren(element('div', { class: 'grid' }, element('table', { class: 'plain', 'aria-label': 'Checks' }, element('tbody', {}, (told?.checks || []).map((one) => element('tr', {}, element('th', { scope: 'row' }, one.check), element('td', { class: kind[one.verdict] }, one.verdict), element('td', {}, shown(one.found), one.advice ? element('div', { class: 'faint' }, shown(one.advice)) : '')))))));
  },
  update(studio) {
    const told = studio.state.config;
    if (!told) return;
    this.advice.replaceChildren(...(told.advice.length ? told.advice : ['None yet: it needs three durable versions with times.']).map((one) => element('li', {}, shown(one))));
    this.body.replaceChildren(...told.values.map((one) => element('tr', {}, element('th', { scope: 'row' }, one.name.split(/(?<=_)/).flatMap((part) => [part, element('wbr')])), element('td', { class: 'mono' }, one.unit === 'bytes' ? bytes(+one.value) : shown(one.value)), element('td', {}, shown(one.origin)))));
  },
};

export const panels = [now, checkpoints, version, timeline, nodes, config];
