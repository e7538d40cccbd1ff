// Texts made harmless and readable, elements, and a table that draws only the rows in view.

const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udfff](?![\udc00-\udfff])/g;

// Characters that show nothing, or that turn others around, as escapes. What the page shows of a name is never markup: see `element`.
export function shown(text) {
  return String(text).replace(/[\ud800-\udbff][\udc00-\udfff]|[\s\S]/g, (one) =>
    one.length === 2 ? one : one.replace(HIDDEN, (bad) => `\\u{${bad.codePointAt(0).toString(16)}}`));
}

// An element with attributes, listeners (on...), and children; texts become text nodes.
export function element(name, attributes = {}, ...children) {
  const made = name.startsWith('svg:') ? document.createElementNS('http://www.w3.org/2000/svg', name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else if (key === 'dir' || key === 'class' || key.includes('-') || made instanceof SVGElement) made.setAttribute(key, value === true ? '' : value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value === true ? '' : value);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== false) made.append(child);
  return made;
}

// A name from storage: isolated, so that right-to-left letters do not move what stands beside it.
export const named = (text) => element('bdi', {}, shown(text));

// Numbers and their units are one word: a line never ends between them.
const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
export function bytes(value) {
  if (value === null || value === undefined) return '-';
  let unit = 0;
  while (value >= 1023.95 && unit < UNITS.length - 1) { value /= 1024; unit++; }
  return `${unit ? value.toFixed(1) : Math.round(value)}\u00a0${UNITS[unit]}`;
}
export const milliseconds = (value) => (value === null || value === undefined ? '-' : `${value.toFixed(1)}\u00a0ms`);
export function seconds(value) {
  if (value === null || value === undefined || !isFinite(value)) return '-';
  if (value < 1) return milliseconds(value * 1000);
  if (value < 10) return `${value.toFixed(1)}\u00a0s`;
  if (value < 120) return `${Math.round(value)}\u00a0s`;
  if (value < 7200) return `${Math.round(value / 60)}\u00a0min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)}\u00a0h`;
  return `${Math.round(value / 86400)}\u00a0days`;
}
export const ago = (at, now) => (!at ? '-' : now - at < 2 ? 'just now' : `${seconds(now - at)} ago`);
// The time of day, after the date if that is not today's.
export function clock(at) {
  if (!at) return '-';
  const time = new Date(at * 1000);
  const [today, day] = [new Date(), time].map((one) => one.toLocaleDateString('sv'));
  const hours = time.toLocaleTimeString('sv');
  return day === today ? hours : `${day} ${hours}`;
}
// The same for a column of a table: shorter, and the whole time when the pointer rests on it.
export function when(at) {
  const [day, hours] = clock(at).split(' ');
  if (!hours) return day;
  const isThisYear = day.slice(0, 4) === new Date().toLocaleDateString('sv').slice(0, 4);
  return element('span', { title: clock(at) }, isThisYear ? `${day.slice(5)} ${hours.slice(0, 5)}` : day);
}
export const count = (value) => Math.round(value).toLocaleString('en');
export const number = (value) => (value === null || value === undefined ? '-' : Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-3) ? value.toExponential(3) : String(+value.toPrecision(6)));

// Makes `old` equal to `fresh`, and touches only what differs: a text that someone has selected stays selected. What a person can press is
// replaced as a whole, with its listeners.
const PRESSED = /^(button|input|select|a)$/i;
export function renew(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== 1 || old.nodeName !== fresh.nodeName || PRESSED.test(old.nodeName)) { old.replaceWith(fresh); return; }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.childNodes.length !== fresh.childNodes.length) { old.replaceChildren(...fresh.childNodes); return; }
  const pairs = [...old.childNodes].map((one, i) => [one, fresh.childNodes[i]]);
  for (const [one, other] of pairs) renew(one, other);
}
// The same for the children of `node`. Children with the same data-key are the same, also if others come before them.
export function renewChildren(node, fresh) {
  const known = new Map([...node.children].filter((one) => one.dataset.key !== undefined).map((one) => [one.dataset.key, one]));
  const stays = new Set();
  const wanted = fresh.map((one) => {
    const old = known.get(one.dataset?.key) ?? [...node.childNodes].find((other) => !stays.has(other) && other.isEqualNode(one));
    const is = old && old.nodeName === one.nodeName && !stays.has(old) ? old : one;
    if (is !== one) renew(is, one);
    stays.add(is);
    return is;
  });
  for (const one of [...node.childNodes]) if (!stays.has(one)) one.remove();
  wanted.forEach((one, i) => { if (node.childNodes[i] !== one) node.insertBefore(one, node.childNodes[i] ?? null); });
}

const ROW = 30;
const AHEAD = 12;
const MAY_BE_CUT = 8; // a cell with more characters shows its whole text when the pointer rests on it

// columns: {name, label, number, width, value: row => comparable, cell: row => node or text}. Sorted by a click or Enter on a heading.
// width: 'name' or 'brief' cuts a long text earlier than others, so that all columns of a wide table are in view. fit: the table is as wide as
// its content, not as the page. sorted: called when a person has sorted.
export class Grid {
  constructor(columns, { label, height = 520, sort, descending = true, select = null, selected = () => false, fit = false, sorted = null } = {}) {
    Object.assign(this, { columns, sort, descending, select, selected, sorted });
    this.rows = [];
    this.cells = new Map();
    this.head = element('tr', { 'aria-rowindex': 1 });
    this.body = element('tbody');
    this.table = element('table', { 'aria-label': label }, element('thead', {}, this.head), this.body);
    this.node = element('div', { class: fit ? 'grid fit' : 'grid', tabIndex: 0, role: 'region', 'aria-label': label }, this.table);
    this.node.style.maxHeight = `${height}px`;
    this.height = height;
    this.node.addEventListener('scroll', () => this.draw(), { passive: true });
    this.drawHead();
  }
  drawHead() {
    this.head.replaceChildren(...this.columns.map((column) => {
      const sorted = this.sort === column.name;
      const turn = () => {
        if (this.sort === column.name) this.descending = !this.descending;
        else { this.sort = column.name; this.descending = Boolean(column.number); }
        this.drawHead();
        this.set(this.rows);
        this.sorted?.();
        this.head.querySelector(`[data-name="${column.name}"]`).focus();
      };
      const sign = sorted ? (this.descending ? ' \u2193' : ' \u2191') : '';
      const kind = [column.number && 'num', column.width].filter(Boolean).join(' ');
      return element('th', { scope: 'col', class: kind || null, title: column.label.length > MAY_BE_CUT ? column.label : null, 'aria-sort': sorted ? (this.descending ? 'descending' : 'ascending') : null },
        column.value ? element('button', { 'data-name': column.name, type: 'button', onclick: turn }, column.label + sign) : column.label);
    }));
  }
  set(rows) {
    const column = this.columns.find((one) => one.name === this.sort);
    this.rows = [...rows];
    if (column) {
      const turn = this.descending ? -1 : 1;
      this.rows.sort((a, b) => {
        const x = column.value(a), y = column.value(b);
        const missing = (x === null || x === undefined) - (y === null || y === undefined);
        if (missing) return missing;
        return (x < y ? -1 : x > y ? 1 : 0) * turn;
      });
    }
    this.table.setAttribute('aria-rowcount', this.rows.length + 1);
    this.first = -1;
    this.draw();
  }
  draw() {
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW) - AHEAD);
    const last = Math.min(this.rows.length, first + Math.ceil(this.height / ROW) + 2 * AHEAD);
    if (first === this.first && last === this.last) return;
    const focused = document.activeElement?.closest?.('tr')?.dataset?.key;
    const field = document.activeElement?.dataset?.field;
    [this.first, this.last] = [first, last];
    const space = (count) => element('tr', { class: 'space', 'aria-hidden': 'true' }, element('td', { colSpan: this.columns.length, style: '' }));
    const above = space(), below = space();
    above.firstChild.style.height = `${first * ROW}px`;
    below.firstChild.style.height = `${(this.rows.length - last) * ROW}px`;
    const drawn = this.rows.slice(first, last).map((row, i) => element('tr', {
      'aria-rowindex': first + i + 2, 'data-key': row.key, 'aria-selected': this.select ? String(this.selected(row)) : null,
    }, this.columns.map((column) => {
      const cell = column.cell(row);
      const text = cell?.textContent ?? cell;
      return element('td', { class: [column.number && 'num', column.width].filter(Boolean).join(' ') || null, title: text.length > MAY_BE_CUT && !cell.title ? text : null }, cell);
    })));
    renewChildren(this.body, [...(first ? [above] : []), ...drawn, ...(last < this.rows.length ? [below] : [])]);
    if (focused && field && this.node.isConnected)
      [...this.body.children].find((one) => one.dataset.key === focused)?.querySelector(`[data-field="${field}"]`)?.focus({ preventScroll: true });
  }
}
