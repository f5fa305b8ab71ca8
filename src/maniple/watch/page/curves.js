// Curves for charts: smoothed, thinned, cut, or summarized where there are too many.

import { lowerBound } from "./store.js";

export const MAX_LINES = 8; // in a small chart; more become their mean, minimum and maximum
export const MAX_WORKER_LINES = 3; // of a logged value, as in plots

// An exponential moving average with decay `share`, corrected for its start at zero.
export function smoothed(ys, share) {
  if (!share) return ys;
  const out = new Float32Array(ys.length);
  let mean = 0, weight = 0;
  for (let i = 0; i < ys.length; i++) {
    mean = share * mean + (1 - share) * ys[i];
    weight = share * weight + (1 - share);
    out[i] = mean / weight;
  }
  return out;
}

// At most about `most` points: the lowest and the highest of each bucket, so that peaks stay visible.
export function thinned(xs, ys, most) {
  if (xs.length <= most) return { xs, ys };
  const kept = [0], step = (2 * (xs.length - 2)) / most;
  for (let begin = 1; begin < xs.length - 1; begin += step) {
    let low = Math.floor(begin), high = low;
    for (let i = low; i < Math.min(xs.length - 1, Math.floor(begin + step)); i++) {
      if (ys[i] < ys[low]) low = i;
      if (ys[i] > ys[high]) high = i;
    }
    kept.push(Math.min(low, high));
    if (low !== high) kept.push(Math.max(low, high));
  }
  kept.push(xs.length - 1);
  return { xs: kept.map((i) => xs[i]), ys: kept.map((i) => ys[i]) };
}

// The part of a curve from a moment on.
export function from({ xs, ys }, begin) {
  const first = begin > 0 ? lowerBound(xs, begin) : 0;
  return { xs: xs.subarray(first), ys: ys.subarray(first) };
}

// Many curves as one: their mean, minimum and maximum in each of `count` intervals of time.
export function summed(curves, begin, end, count = 120) {
  const cells = Array.from({ length: count }, () => ({ low: Infinity, high: -Infinity, sum: 0, n: 0 }));
  const width = (end - begin) / count || 1;
  for (const { xs, ys } of curves) {
    for (let i = 0; i < xs.length; i++) {
      const cell = cells[Math.min(count - 1, Math.floor((xs[i] - begin) / width))];
      if (!cell) continue;
      cell.low = Math.min(cell.low, ys[i]);
      cell.high = Math.max(cell.high, ys[i]);
      cell.sum += ys[i];
      cell.n += 1;
    }
  }
  const xs = [], mean = [], low = [], high = [];
  cells.forEach((cell, i) => {
    if (!cell.n) return;
    xs.push(begin + (i + 0.5) * width);
    mean.push(cell.sum / cell.n);
    low.push(cell.low);
    high.push(cell.high);
  });
  return { xs, mean, low, high };
}
