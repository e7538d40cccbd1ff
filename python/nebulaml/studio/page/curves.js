// Metrics over steps, and the lines of history: where the job went back, and what it left behind.
import { element, shown, clock, count, number, renewChildren } from '/grid.js';

const begun = (row) => row.begun || row.committed_at;
const LARGER_IS_BETTER = /acc|auc|f1|bleu|rouge|reward|score|precision|recall|map\b|mfu|success/i;

// The line of a version: when it began, and the step after which it began. The first line has began 0.
const lineOf = (row) => (row.line?.length ? { began: row.line.at(-1)[0], after: row.line.at(-1)[1], parent: row.line.at(-2)?.[0] ?? 0 } : { began: 0, after: null, parent: null });
// A version that is gone is known from the history alone, which tells no line: it belongs to the one that had begun before it was saved.
function linesOf(rows) { // sets `began` of each row
  const lines = new Map();
  const known = [...rows].filter((row) => row.where.length).map(lineOf).sort((a, b) => b.began - a.began);
  for (const row of rows) {
    const line = row.where.length ? lineOf(row) : known.find((one) => one.began <= (row.committed_at || begun(row)) * 1e9) || lineOf(row);
    row.began = line.began;
    if (!lines.has(line.began)) lines.set(line.began, { ...line, rows: [] });
    lines.get(line.began).rows.push(row);
  }
  const sorted = [...lines.values()].sort((a, b) => a.began - b.began);
  for (const one of sorted) one.rows.sort((a, b) => a.step - b.step || a.sequence - b.sequence);
  return sorted;
}

// The best of a metric: a version that can be loaded, unless there is none.
function bestOf(rows, name, largest) {
  const known = rows.filter((row) => Number.isFinite(row.metrics[name]));
  const loadable = known.filter((row) => row.where.length && !row.abandoned);
  return (loadable.length ? loadable : known).reduce((best, row) => (best === null || (largest ? row.metrics[name] > best.metrics[name] : row.metrics[name] < best.metrics[name]) ? row : best), null);
}

const svg = (name, attributes, ...children) => element(`svg:${name}`, attributes, ...children);
function ticks(low, high, many = 4) {
  const rough = (high - low) / many || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / size) * size; at <= high + size * 1e-9; at += size) found.push(+at.toPrecision(12));
  return found;
}

export const curves = {
  name: 'metrics', label: 'Metrics',
  metric: '', best: '',
  place() { return { query: { metric: this.metric, best: this.best } }; },
  arrive(words, query) { Object.assign(this, { metric: query.metric || '', best: query.best || '' }); },
  open(main, studio) {
    this.bar = element('div', { class: 'bar' });
    this.told = element('p', { class: 'faint', role: 'status' });
    this.chart = element('div', { class: 'scroll chart' });
    this.graph = element('div', { class: 'scroll chart' });
    this.lines = element('ul', { class: 'events' });
    this.metrics = null;
    main.append(this.bar, this.chart, this.told, element('h2', {}, 'Lineage'), this.graph, this.lines);
  },
  choices(studio, names) {
    if (!names.includes(this.metric)) this.metric = names[0] || '';
    if (this.metrics === names.join('\0')) return;
    this.metrics = names.join('\0');
    const again = () => { studio.address(); this.update(studio); };
    this.bar.replaceChildren(...(names.length ? [
      element('span', {}, element('label', { htmlFor: 'metric' }, 'Metric'), element('select', { id: 'metric', onchange: (event) => { this.metric = event.target.value; again(); } }, names.map((name) => element('option', { value: name, selected: name === this.metric }, shown(name))))),
      element('span', {}, element('label', { htmlFor: 'best' }, 'Best is'), element('select', { id: 'best', onchange: (event) => { this.best = event.target.value; again(); } },
        [['', 'as the name says'], ['min', 'the smallest'], ['max', 'the largest']].map(([value, text]) => element('option', { value, selected: value === this.best }, text)))),
    ] : []));
  },
  update(studio) {
    const rows = [...studio.state.rows.values()].filter((row) => row.step >= 0);
    const names = [...new Set([...studio.state.rows.values()].flatMap((row) => Object.keys(row.metrics)))].sort();
    this.choices(studio, names);
    const largest = this.best ? this.best === 'max' : LARGER_IS_BETTER.test(this.metric);
    const measured = rows.filter((row) => Number.isFinite(row.metrics[this.metric]));
    const best = bestOf(rows, this.metric, largest);
    renewChildren(this.told, [best ? element('span', {}, `The ${largest ? 'largest' : 'smallest'} ${shown(this.metric)} that can be loaded: ${number(best.metrics[this.metric])} in `, this.link(studio, best)) : element('span', {}, names.length ? 'no version with a step has this metric' : 'No version has metrics yet: nm.Checkpoint(tag, metrics={"loss": 0.1}) or Manager.save(metrics=...) gives it some.')]);
    this.draw(this.chart, measured.length ? this.curve(studio, measured, best) : null);
    this.draw(this.graph, rows.length ? this.lineage(studio, rows) : null);
    const lines = linesOf(rows).filter((one) => one.began);
    renewChildren(this.lines, lines.length ? lines.reverse().map((one) => element('li', { 'data-key': String(one.began) }, `${clock(one.began / 1e9)} the job went back to ${one.after >= 0 ? `step ${count(one.after)}` : 'its begin'}: ${count(one.rows.length)} versions since, from step ${count(one.rows[0].step)} to ${count(one.rows.at(-1).step)}`))
      : [element('li', { class: 'faint' }, 'The job never went back to an earlier step.')]);
  },
  link: (studio, row) => element('button', { class: 'tag', type: 'button', onclick: () => studio.open(row.tag) }, element('bdi', {}, shown(row.tag))),
  draw(node, made) { if (!made) node.replaceChildren(); else if (!node.firstChild?.isEqualNode(made)) node.replaceChildren(made); },
  frame(label, low, high, height, left) {
    const width = Math.max(300, this.chart.clientWidth || 300);
    const x = (step) => left + ((step - low) / (high - low || 1)) * (width - left - 16);
    const made = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'group', 'aria-label': label });
    for (const at of ticks(low, high, width < 500 ? 3 : 6)) made.append(text(count(at), { x: x(at), y: height - 8, 'text-anchor': x(at) > width - 40 ? 'end' : 'middle' }));
    made.append(text('step', { x: left - 8, y: height - 8, 'text-anchor': 'end' }));
    return { made, x, width };
  },
  dot(studio, row, x, y, extra = '') {
    const words = `${shown(row.tag)}${row.entry > 1 ? `, entry ${row.entry}` : ''}, ${row.abandoned ? 'abandoned' : row.state}${extra}`;
    const mark = svg('circle', { cx: x, cy: y, r: 4.5, class: `dot ${row.abandoned || !row.where.length ? 'left' : ''}`, tabindex: 0, role: 'link', 'aria-label': words, onclick: () => studio.open(row.tag),
      onkeydown: (event) => { if (event.key === 'Enter') studio.open(row.tag); } }, svg('title', {}, words));
    return mark;
  },
  curve(studio, rows, best) {
    const values = rows.map((row) => row.metrics[this.metric]), steps = rows.map((row) => row.step);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    const height = 280, marks = ticks(low, high);
    const left = 26 + 8 * Math.max(...marks.map((one) => number(one).length), 3);
    const { made, x, width } = this.frame(`${shown(this.metric)} over steps, ${rows.length} versions`, Math.min(...steps), Math.max(...steps), height, left);
    const y = (value) => height - 30 - ((value - low) / (high - low)) * (height - 60);
    for (const one of marks) {
      made.append(svg('line', { x1: left, x2: width - 12, y1: y(one), y2: y(one), class: 'rule' }), text(number(one), { x: left - 8, y: y(one) + 4, 'text-anchor': 'end' }));
    }
    // A line of history is one curve. It begins at the version from which the job went on.
    for (const line of linesOf(rows)) {
      const from = line.parent === null ? undefined : rows.filter((row) => row.began === line.parent && row.step <= line.after).sort((a, b) => a.step - b.step).at(-1);
      const points = [...(from ? [from] : []), ...line.rows];
      made.append(svg('polyline', { points: points.map((row) => `${x(row.step)},${y(row.metrics[this.metric])}`).join(' '), class: `curve ${line.rows.every((row) => row.abandoned) ? 'left' : ''}` }));
      if (from) made.append(svg('line', { x1: x(from.step), x2: x(from.step), y1: 14, y2: height - 28, class: 'back' }, svg('title', {}, `the job went back to step ${count(line.after)}, ${clock(line.began / 1e9)}`)));
    }
    for (const row of rows.length > 600 ? rows.filter((row) => row === best) : rows) made.append(this.dot(studio, row, x(row.step), y(row.metrics[this.metric]), `, ${this.metric} ${number(row.metrics[this.metric])}`));
    if (best) {
      const at = x(best.step), isRight = at > width - 160;
      made.append(svg('circle', { cx: at, cy: y(best.metrics[this.metric]), r: 9, class: 'best' }), text(`best: ${number(best.metrics[this.metric])}`, { x: at + (isRight ? -14 : 14), y: Math.max(16, y(best.metrics[this.metric]) - 8), 'text-anchor': isRight ? 'end' : 'start', class: 'strong' }));
    }
    return made;
  },
  lineage(studio, rows) {
    const lines = linesOf(rows), lane = new Map(lines.map((one, i) => [one.began, i]));
    const high = 34, height = 40 + high * lines.length, left = 30 + 8 * Math.max(...lines.map((one) => (one.began ? clock(one.began / 1e9) : 'first line').length));
    const steps = rows.map((row) => row.step);
    const low = Math.min(...steps, ...lines.filter((one) => one.after !== null && one.after >= 0).map((one) => one.after));
    const { made, x } = this.frame(`${lines.length} line${lines.length === 1 ? '' : 's'} of history`, low, Math.max(...steps, low + 1), height, left);
    const y = (began) => 22 + high * (lane.get(began) ?? 0);
    for (const line of lines) {
      const isLeft = line.rows.every((row) => row.abandoned), start = line.after === null ? line.rows[0].step : Math.max(line.after, low);
      if (line.began && lane.has(line.parent)) made.append(svg('path', { d: `M ${x(start)} ${y(line.parent)} V ${y(line.began)}`, class: 'curve' }));
      made.append(svg('line', { x1: x(start), x2: x(line.rows.at(-1).step), y1: y(line.began), y2: y(line.began), class: `curve ${isLeft ? 'left' : ''}` }),
        text(line.began ? clock(line.began / 1e9) : 'first line', { x: left - 10, y: y(line.began) + 4, 'text-anchor': 'end' }));
    }
    const dots = rows.length > 600 ? rows.filter((row) => row.pinned !== null) : rows;
    for (const row of dots) made.append(this.dot(studio, row, x(row.step), y(row.began), row.pinned === null ? '' : ', pinned'));
    return made;
  },
};
const text = (content, attributes) => svg('text', { 'font-size': 13, ...attributes }, content);
