// All jobs of the studio, the worst first.
import { element, named, shown, bytes, ago, Grid } from '/grid.js';

const RANK = { broken: 0, 'at risk': 1 };
const rank = (job) => (job.reason ? 0 : RANK[job.verdict?.state] ?? 2);
const EVERY_MS = 2000;

export const jobs = {
  name: 'jobs', label: 'Jobs', isOfAll: true,
  filter: '',
  place() { return { query: { filter: this.filter } }; },
  arrive(words, query) { this.filter = query.filter || ''; },
  open(main, studio) {
    const open = (job) => studio.goTo(['now'], { job: job.name });
    this.grid = new Grid([
      { name: 'name', label: 'Job', width: 'name', value: (job) => job.name, cell: (job) => element('button', { class: 'tag', type: 'button', 'data-field': 'name', title: shown(job.path), onclick: () => open(job) }, named(job.name)) },
      { name: 'verdict', label: 'Verdict', width: 'wide', value: rank, cell: (job) => (job.reason ? element('span', { class: 'bad' }, shown(job.reason)) : job.verdict ? element('span', { class: { fine: 'good', 'at risk': 'warn', broken: 'bad' }[job.verdict.state], title: job.verdict.cure ? shown(job.verdict.cure) : null }, job.verdict.state === 'fine' ? 'fine' : `${job.verdict.state}: ${shown(job.verdict.reason)}`) : element('span', { class: 'faint', title: 'no agent of this machine has the job' }, '-')) },
      { name: 'newest', label: 'Newest', width: 'name', value: (job) => job.newest, cell: (job) => (job.newest ? named(job.newest) : job.memory_count ? 'only in memory' : 'none yet') },
      { name: 'step', label: 'Step', number: true, value: (job) => (job.step >= 0 ? job.step : null), cell: (job) => (job.step >= 0 ? String(job.step) : '-') },
      { name: 'age', label: 'Age', number: true, value: (job) => job.committed_at || null, cell: (job) => ago(job.committed_at, Date.now() / 1000) },
      { name: 'goodput', label: 'Goodput', number: true, value: (job) => job.goodput ?? null, cell: (job) => (job.goodput === null || job.goodput === undefined ? '-' : `${(100 * job.goodput).toFixed(1)} %`) },
      { name: 'size', label: 'Size', number: true, value: (job) => job.size || null, cell: (job) => (job.size ? bytes(job.size) : '-') },
      { name: 'trainers', label: 'Trainers here', number: true, value: (job) => job.trainer_count, cell: (job) => String(job.trainer_count) },
    ], { label: 'Jobs', sort: 'verdict', descending: false, height: Math.max(360, innerHeight - 170) });
    this.count = element('span', { class: 'faint', role: 'status' });
    const search = element('input', { type: 'search', id: 'job-filter', value: this.filter, placeholder: 'job, verdict', oninput: (event) => { this.filter = event.target.value; studio.address(true); this.draw(studio); } });
    main.append(element('div', { class: 'bar' }, element('span', {}, element('label', { htmlFor: 'job-filter' }, 'Filter'), search), this.count), this.grid.node);
    this.known ||= { jobs: [], problems: [] };
    this.asked = 0;
    this.draw(studio);
    this.tick(studio);
  },
  async tick(studio) {
    if (Date.now() - this.asked < EVERY_MS) return;
    this.asked = Date.now();
    try { this.known = await studio.ask('jobs'); } catch (failure) { this.known = { ...this.known, problems: [failure.message] }; }
    if (studio.panel === this) this.draw(studio);
  },
  draw(studio) {
    const all = this.known.jobs.map((job) => ({ ...job, key: job.name }));
    const rows = all.filter((job) => !this.filter || `${job.name} ${job.reason} ${job.verdict?.state} ${job.verdict?.reason} ${job.newest}`.toLowerCase().includes(this.filter.toLowerCase()));
    const count = (state) => all.filter((job) => rank(job) === state).length;
    this.grid.set(rows);
    this.count.textContent = `${rows.length} of ${all.length} jobs: ${count(0)} broken, ${count(1)} at risk${this.known.looked_at ? `, looked at ${ago(this.known.looked_at, Date.now() / 1000)}` : ', being looked at'}`;
    studio.showAll(this.known);
  },
};
