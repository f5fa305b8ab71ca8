// What is known of the run, put together from updates. Times are seconds since the first step of any worker.

export const CENTER = -1; // in place of a rank
const INTERVAL = 6; // numbers of an interval: begin, end, seconds of the four parts
const MAX_EVENTS = 2000;
const EMPTY = new Float32Array(0);

export class Store {
  constructor() { this.clear(); }

  clear() {
    this.small = {}; // values that are sent whole
    this.curves = new Map(); // by kind/name, then by rank: {xs, ys}
    this.timeSplits = new Map(); // by rank: intervals of six numbers each
    this.happened = [];
    this.since = 0;
    this.workers = [];
    this.clock = [EMPTY, EMPTY];
  }

  // Apply an update; returns true if it starts again, with times relative to another moment.
  apply(update) {
    const isNew = "since" in update;
    if (isNew) { this.clear(); this.since = update.since; }
    const { curves = [], time_splits = [], happened = [], clock, ...small } = update;
    Object.assign(this.small, small);
    if (clock) this.clock = clock.map(unpacked);
    if (small.workers) this.workers = small.workers.map((row) => this.#worker(row));
    for (const [kind, name, rank, first, xs, ys] of curves) this.#grow(kind, name, rank, first, unpacked(xs), unpacked(ys));
    for (const [rank, first, intervals] of time_splits) {
      this.timeSplits.set(rank, joined(this.timeSplits.get(rank) ?? EMPTY, INTERVAL * first, unpacked(intervals)));
    }
    this.happened = [...this.happened, ...happened].slice(-MAX_EVENTS);
    return isNew;
  }

  // What the server declares about measures, totals and states.
  get schema() { return this.small.schema; }

  get hasSamples() { return this.small.totals?.samples > 0; }

  // Measures of samples are for runs that count them, those of steps for all others.
  isCounted(measure) { return !measure.counted || measure.counted === (this.hasSamples ? "samples" : "steps"); }

  isBad(state) { return this.schema.bad_states.includes(state); }

  named(kind, name) { return this.curves.get(`${kind}/${name}`) ?? new Map(); }

  names(kind) {
    return [...this.curves.keys()].filter((key) => key.startsWith(`${kind}/`)).map((key) => key.slice(kind.length + 1));
  }

  get until() { return this.small.run?.until ?? 0; }

  // The samples of all workers at a moment.
  samplesAt(moment) { return interpolated(this.clock[0], this.clock[1], moment); }

  #worker([rank, ...values]) {
    const worker = { rank };
    this.schema.columns.forEach((name, i) => { worker[name] = values[i]; });
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

// Arrays travel as float32 in base64.
function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

// The first index of sorted `xs` whose value is not below `x`.
export function lowerBound(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}

function interpolated(xs, ys, x) {
  if (!xs.length) return 0;
  const right = lowerBound(xs, x);
  if (right === 0) return ys[0];
  if (right === xs.length) return ys[ys.length - 1];
  const share = (x - xs[right - 1]) / (xs[right] - xs[right - 1] || 1);
  return ys[right - 1] + share * (ys[right] - ys[right - 1]);
}
