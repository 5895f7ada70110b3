// Draws GET v1/status, once a second. Names come from strangers: they become text nodes and
// attributes, never markup.
'use strict';

const PERIOD_MS = 1000;
const HISTORY = 120;  // samples per line: two minutes

const SVG = 'http://www.w3.org/2000/svg';
const history = new Map();  // job → rounds per second, oldest first
const boxHistory = [];      // bytes per second, in and out, of all jobs

// element('p.note', {title: …}, child, …): children are elements or text.
function element(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split('.');
  const svg = ['svg', 'path', 'line', 'text'].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) made.setAttribute('class', classes.join(' '));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  for (const child of children.flat()) {
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

// Makes `old` look like `wanted`, and keeps its nodes where it can: a selection survives.
function patch(old, wanted) {
  for (const {name} of [...old.attributes]) {
    if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const {name, value} of wanted.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const children = [...wanted.childNodes];
  while (old.childNodes.length > children.length) old.lastChild.remove();
  children.forEach((child, i) => {
    const now = old.childNodes[i];
    if (!now) old.append(child);
    else if (now.nodeName !== child.nodeName) now.replaceWith(child);
    else if (child.nodeType === Node.TEXT_NODE) {
      if (now.data !== child.data) now.data = child.data;
    } else patch(now, child);
  });
}

function fill(id, ...children) {
  const old = document.getElementById(id);
  const wanted = old.cloneNode(false);
  wanted.append(...children.flat());
  patch(old, wanted);
}

// Numbers for people.
const grouped = (n) => Math.round(n).toLocaleString('en-US');
function short(n) {
  if (n === 0) return '0';
  if (n < 10) return n.toFixed(2);
  return n < 100 ? n.toFixed(1) : grouped(n);
}
function scaled(n, base, units) {
  let unit = 0;
  while (n >= base && unit + 1 < units.length) n /= base, ++unit;
  return `${unit === 0 ? Math.round(n) : n < 10 ? n.toFixed(2) : n.toFixed(1)} ${units[unit]}`;
}
const bytes = (n) => scaled(n, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB']);
const rate = (n) => scaled(n, 1000, ['B/s', 'kB/s', 'MB/s', 'GB/s', 'TB/s']);
function duration(s) {
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60 % 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600 % 24)} h`;
}
const plural = (n, word) => `${grouped(n)} ${word}${n === 1 ? '' : 's'}`;

const NO_FLOW = {chunks_per_s: 0, bytes_in_per_s: 0, bytes_out_per_s: 0, chunks: 0};
const flowOf = (part) => ({...NO_FLOW, ...part.flow});

function figure(label, value, note = '') {
  return element('div.figure', {}, element('b', {}, value), element('span', {}, label),
      note ? element('small', {}, note) : []);
}

// One or two lines over time; all lines have the scale of the highest value.
function chart(label, lines, show, caption = [label]) {
  const [width, height] = [300, 60];
  const top = Math.max(1e-9, ...lines.flat());
  const step = width / (HISTORY - 1);
  const paths = lines.map((values, i) => {
    const at = (v, k) => `${(width - (values.length - 1 - k) * step).toFixed(1)} ` +
        `${(height - 1 - v / top * (height - 4)).toFixed(1)}`;
    return element(`path.line${i}`, {d: values.length < 2 ? '' : 'M' + values.map(at).join('L')});
  });
  const box = element('svg', {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none',
    role: 'img', 'aria-label': label}, element('line', {x1: 0, x2: width, y1: height - 0.5,
    y2: height - 0.5}), paths);
  return element('figure', {}, element('figcaption', {}, caption), box,
      element('span.top', {}, top > 1e-6 ? show(top) : ''), element('span.axis', {}, '2 min ago'));
}

// What has to be known about a job, as sentences.
function notes(job) {
  const out = [];
  const say = (kind, ...text) => out.push(element(`p.note.${kind}`, {}, ...text));
  if (job.error) say('bad', job.error);
  const missing = job.missing || [];
  if (missing.length) {
    say('bad', element('b', {}, `Missing: rank ${missing.slice(0, 20).join(', ')}` +
        (missing.length > 20 ? ' …' : '')),
    job.state === 'assembling' ? ' · the job begins when all are there' : '');
  }
  for (const rank of job.ranks) {
    if (rank.state === 'lost') {
      say('bad', element('b', {}, `Rank ${rank.rank} is lost`), rank.reason ? ` · ${rank.reason}` : '');
    }
  }
  const waited = job.ranks.filter((rank) => (job.waiting_for || []).includes(rank.rank));
  for (const rank of waited.slice(0, 5)) {
    if (!rank.waited_key) {
      say('wait', element('b', {}, `Waits for rank ${rank.rank}`), ' · the initial parameters');
      continue;
    }
    say('wait', element('b', {}, `Round ${rank.waited_round} waits for rank ${rank.rank}`),
        ' · key ', element('code', {}, rank.waited_key),
        rank.waited_chunks > 1 ? ` and others: ${plural(rank.waited_chunks, 'chunk')}` : '',
        rank.waited_s ? ` · silent for ${duration(rank.waited_s)}` : '');
  }
  for (const rank of job.ranks) {
    if (!rank.late) continue;
    say('wait', element('b', {}, `Rank ${rank.rank} is late`),
        ` · ${plural(rank.late, 'round')} went on without it`);
  }
  if (waited.length > 5) say('wait', `… and for ${waited.length - 5} more ranks`);
  for (const remark of job.remarks || []) {
    say('remark', element('b', {}, remark.subject), ` · ${remark.text}`);
  }
  return out;
}

function rankTile(job, rank) {
  const awaited = (job.waiting_for || []).includes(rank.rank) && rank.waited_chunks > 0;
  const state = rank.state === 'live' && awaited ? 'awaited' : rank.state;
  const facts = [`rank ${rank.rank}: ${rank.state}`, `incarnation ${rank.incarnation}`,
    plural(rank.contributions || 0, 'contribution')];
  if (rank.state === 'live') facts.push(`heartbeat ${duration(rank.lease_age_s || 0)} ago`);
  if (rank.waited_key) facts.push(`${plural(rank.waited_chunks, 'chunk')} behind, first of ${rank.waited_key}`);
  return element('li', {'data-rank': rank.rank, 'data-state': state, title: facts.join('\n')},
      element('b', {}, rank.rank), element('span', {}, state === 'live' ? '' : state));
}

function lossFigure(of) {
  const loss = of.nonfinite ? 'not finite' : Number((of.loss || 0).toPrecision(4));
  return figure(of.name || 'loss', loss, `round ${grouped(of.round)}`);
}

function jobCard(job) {
  const flow = flowOf(job);
  const rounds = history.get(job.name);
  const live = job.ranks.filter((rank) => rank.state === 'live').length;
  return element('article', {'data-job': job.name, 'data-state': job.state},
      element('h3', {}, element('span', {}, job.name), element('em', {'data-state': job.state}, job.state)),
      notes(job),
      element('div.columns', {},
          element('div.figures', {},
              figure('round', grouped(job.completed_round)),
              ...(job.durable_round ? [figure('saved round', grouped(job.durable_round))] : []),
              figure('rounds/s', short(job.rounds_per_s)),
              figure('chunks/s', grouped(flow.chunks_per_s)),
              figure('gradients in', rate(flow.bytes_in_per_s)),
              figure('results out', rate(flow.bytes_out_per_s)),
              ...(job.losses || []).map(lossFigure)),
          chart('rounds/s', [rounds], short)),
      element('div.columns', {},
          element('h4', {}, `${live} of ${plural(job.max_ranks || job.ranks.length, 'rank')} live`),
          element('p.facts', {}, [job.optimizer === 'none' ? 'all-reduce' : job.optimizer,
            `over ${job.transport || '?'}`, plural(job.keys, 'key'), plural(job.chunks, 'chunk'),
            `${grouped(job.elements)} elements`, bytes(job.memory_bytes)].join(' · '))),
      element('ul.ranks', {}, job.ranks.map((rank) => rankTile(job, rank))));
}

function coreTile(core) {
  const flow = flowOf(core);
  const awake = Math.round((core.awake || 0) * 100);
  return element('li', {'data-core': core.core,
    title: `core ${core.core}, CPU ${core.cpu}\nawake ${awake}% of the last second\n` +
        `${grouped(flow.chunks)} chunks so far\n${grouped(core.sleeps || 0)} sleeps`},
  element('b', {}, core.core), element('span', {}, `${awake}%`),
  element('svg', {viewBox: '0 0 100 4', preserveAspectRatio: 'none', 'aria-hidden': true},
      element('line', {x1: 0, x2: 100, y1: 2, y2: 2}),
      element('path', {d: `M0 2H${awake}`})),
  element('small', {}, flow.chunks_per_s ? `${grouped(flow.chunks_per_s)} chunks/s` : 'idle'));
}

function nicTile(nic) {
  const flow = flowOf(nic);
  return element('li', {'data-nic': nic.name, title: `over ${nic.transport}`},
      element('b', {}, nic.name), element('span', {}, nic.transport),
      element('small', {}, `in ${rate(flow.bytes_in_per_s)}`),
      element('small', {}, `out ${rate(flow.bytes_out_per_s)}`),
      nic.budget_bytes_per_s ? element('small.budget', {}, `at most ${rate(nic.budget_bytes_per_s)}`) :
        []);
}

function nodeCard(node) {
  const nics = node.nics || [];
  const cores = node.cores || [];
  return element('article', {'data-node': node.node},
      element('h3', {}, element('span', {}, `NUMA node ${node.node}`),
          node.memory_bytes ? element('em', {}, bytes(node.memory_bytes)) : []),
      element('h4', {}, 'NICs'),
      nics.length ? element('ul.nics', {}, nics.map(nicTile)) :
        element('p.none', {}, 'none in use'),
      element('h4', {}, `${plural(cores.length, 'core')} · awake in the last second`),
      element('ul.cores', {}, cores.map(coreTile)));
}

function remember(status) {
  const names = new Set(status.jobs.map((job) => job.name));
  for (const name of history.keys()) if (!names.has(name)) history.delete(name);
  let [inward, outward] = [0, 0];
  for (const job of status.jobs) {
    const rounds = history.get(job.name) || [];
    history.set(job.name, [...rounds, job.rounds_per_s].slice(-HISTORY));
    inward += flowOf(job).bytes_in_per_s;
    outward += flowOf(job).bytes_out_per_s;
  }
  boxHistory.push([inward, outward]);
  if (boxHistory.length > HISTORY) boxHistory.shift();
}

function parentText(status) {
  if (!status.parent) return '';
  const most = status.parent_budget_bytes_per_s;
  return ` · a rack of ${status.parent}` + (most ? `, at most ${rate(most)} from each NIC` : '');
}

function draw(status) {
  const ranks = status.jobs.flatMap((job) => job.ranks);
  const live = ranks.filter((rank) => rank.state === 'live').length;
  const chunks = status.jobs.reduce((sum, job) => sum + flowOf(job).chunks_per_s, 0);
  const [inward, outward] = boxHistory[boxHistory.length - 1];
  document.title = `phub · ${plural(status.jobs.length, 'job')}`;
  fill('server', `${status.topology} · ${plural(status.cores, 'core')} · ` +
      `${status.transports.join(', ')} · up ${duration(status.uptime_s)}${parentText(status)}`);
  fill('totals', element('div.figures', {},
      figure('jobs', status.jobs.length),
      figure('ranks live', live, live === ranks.length ? '' : `of ${ranks.length}`),
      figure('chunks/s', grouped(chunks)),
      figure('gradients in', rate(inward)),
      figure('results out', rate(outward)),
      figure('memory of jobs', bytes(status.memory_bytes), `of ${bytes(status.memory_limit_bytes)}`)),
  chart('bytes/s in and out', [boxHistory.map((pair) => pair[0]), boxHistory.map((pair) => pair[1])],
      rate, [element('span.line0', {}, 'gradients in'), ' and ', element('span.line1', {}, 'results out')]));
  fill('jobs', status.jobs.length ? status.jobs.map(jobCard) :
    element('p.none', {}, 'No jobs. The first worker that joins makes one.'));
  fill('nodes', (status.nodes || []).map(nodeCard));
}

// The token of a server that asks for one. It is kept here, and nowhere else.
let token = '';
const login = document.getElementById('login');
login.addEventListener('submit', (event) => {
  event.preventDefault();
  const field = document.getElementById('token');
  token = field.value.trim();
  field.value = '';
  login.hidden = true;
});

let lastAnswer = null;
async function poll() {
  const shown = token;
  try {
    const answer = await fetch('v1/status', {cache: 'no-store', signal: AbortSignal.timeout(5000),
      headers: shown ? {Authorization: `Bearer ${shown}`} : {}});
    if (answer.status === 401 || answer.status === 403) {
      login.hidden = false;
      if (token === shown) token = '';
      throw new Error((await answer.json()).detail);
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const status = await answer.json();
    remember(status);
    draw(status);
    lastAnswer = new Date();
    fill('alarm');
  } catch (error) {
    const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString()}: what is below is old` : '';
    fill('alarm', `No answer from the server${since} (${error.message})`);
  }
  document.body.toggleAttribute('data-stale', document.getElementById('alarm').textContent !== '');
  setTimeout(poll, PERIOD_MS);
}
poll();
