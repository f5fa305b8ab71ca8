// What is known of the run: everything first, then what is new. Times are seconds since the first worker began.

export const CENTER = -1;
export const BAD = new Set(["dead", "failed", "lost", "killed"]);
export const GONE = new Set(["done", "stopped", "ended", ...BAD]);

const EMPTY = new Float32Array(0);

export class Store {
  constructor() { this.clear(); }

  clear() {
    this.small = {};
    this.curves = new Map(); // by kind/name, then by rank: {xs, ys}
    this.lanes = new Map(); // by rank: stretches of six numbers each
    this.happened = [];
    this.since = 0;
    this.workers = [];
    this.clock = [EMPTY, EMPTY];
  }

  // Take news in; true if the run is seen from another moment, so that nothing known before counts.
  apply(news) {
    const isNew = "since" in news;
    if (isNew) { this.clear(); this.since = news.since; }
    const { curves = [], lanes = [], happened = [], clock, ...small } = news;
    Object.assign(this.small, small);
    if (clock) this.clock = clock.map(numbers);
    if (small.workers) this.workers = small.workers.map((row) => this.#worker(row));
    for (const [kind, name, rank, first, xs, ys] of curves) this.#grow(kind, name, rank, first, numbers(xs), numbers(ys));
    for (const [rank, first, stretches] of lanes) {
      this.lanes.set(rank, joined(this.lanes.get(rank) ?? EMPTY, 6 * first, numbers(stretches)));
    }
    this.happened = [...this.happened, ...happened].slice(-2000);
    return isNew;
  }

  named(kind, name) { return this.curves.get(`${kind}/${name}`) ?? new Map(); }

  names(kind) {
    return [...this.curves.keys()].filter((key) => key.startsWith(`${kind}/`)).map((key) => key.slice(kind.length + 1));
  }

  get until() { return this.small.run?.until ?? 0; }

  // The samples of all workers at a moment.
  samplesAt(moment) { return between(this.clock[0], this.clock[1], moment); }

  #worker([rank, ...values]) {
    const worker = { rank };
    this.small.columns.forEach((name, i) => { worker[name] = values[i]; });
    return worker;
  }

  #grow(kind, name, rank, first, xs, ys) {
    const key = `${kind}/${name}`;
    if (!this.curves.has(key)) this.curves.set(key, new Map());
    const known = this.curves.get(key).get(rank) ?? { xs: EMPTY, ys: EMPTY };
    this.curves.get(key).set(rank, { xs: joined(known.xs, first, xs), ys: joined(known.ys, first, ys) });
  }
}

function joined(known, first, added) {
  const all = new Float32Array(first + added.length);
  all.set(known.subarray(0, first));
  all.set(added, first);
  return all;
}

// Numbers as they travel: float32 in base64.
function numbers(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

// The first place in sorted `xs` that is not below `x`.
export function place(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}

function between(xs, ys, x) {
  if (!xs.length) return 0;
  const right = place(xs, x);
  if (right === 0) return ys[0];
  if (right === xs.length) return ys[ys.length - 1];
  const share = (x - xs[right - 1]) / (xs[right] - xs[right - 1] || 1);
  return ys[right - 1] + share * (ys[right] - ys[right - 1]);
}
