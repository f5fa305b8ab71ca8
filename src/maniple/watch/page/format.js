// Numbers and events as text.

const whole = new Intl.NumberFormat("en");
const UNKNOWN = "–";

function count(value) { return whole.format(Math.round(value ?? 0)); }

function short(value) {
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)}G`;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e5) return `${(value / 1e3).toPrecision(3)}k`;
  return value >= 100 || value === 0 ? count(value) : value.toPrecision(3);
}

function number(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : value.toPrecision(4);
}

function percent(share) { return `${(100 * (share ?? 0)).toFixed(1)} %`; }

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[unit]}`;
}

// By the names that measures declare; see monitor/measures.py.
export const formats = {
  count, short, number, percent, bytes,
  tenths: (value) => (value === null ? UNKNOWN : value.toFixed(1)),
  seconds: (value) => (value === null ? "not yet" : `${value.toFixed(1)} s`),
  hundredths: (value) => (value === null ? UNKNOWN : value.toFixed(2)),
};

// A target with its direction, which is unknown until the value is logged.
export function targetText({ name, value, falling }) { return `${name} ${falling === null ? "=" : falling ? "≤" : "≥"} ${Number(value.toPrecision(6))}`; }

export function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds)), two = (n) => String(n).padStart(2, "0");
  const clock = `${Math.floor(s / 60) % 60}:${two(s % 60)}`;
  return s < 3600 ? clock : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

// The unit for times up to `until`: its name, and its seconds.
export function timeUnit(until) { return until < 300 ? ["s", 1] : until < 7200 ? ["min", 60] : ["h", 3600]; }

function settings(row) { return Object.entries(row.settings ?? {}).map(([name, value]) => `${name} = ${value}`).join(", "); }

const EVENTS = {
  start: (row) => `started, for ${row.workers ?? 0} workers`,
  started: (row) => `started, pid ${row.pid}`,
  joined: (row) => `joined from ${row.node}; ${row.live} live`,
  restarted: (row) => `joined again; ${row.live} live`,
  returned: (row) => `came back; ${row.live} live`,
  left: (row) => `left; ${row.live} live`,
  lost: (row) => `was lost: ${row.reason ?? "no heartbeat"}`,
  "given up": (row) => `is not started again, ${row.reason ?? "lost"}: the others continue`,
  exit: (row) => (row.stopped ? "stopped" : row.killed_after ? `killed after ${Math.round(row.killed_after)} s` : row.died ? `died, ${exit(row.exit_code)}` : `ended, ${exit(row.exit_code)}`),
  late: (row) => `joined too late and made no step: ${row.reason}`,
  failed: (row) => `failed: ${row.error ?? ""}`,
  snapshot: (row) => `saved ${row.name}${row.asked_by ? `, asked by ${row.asked_by}` : ""}`,
  changed: (row) => (row.refused ? `refused ${settings(row)}: ${row.refused}` : `changed ${settings(row)}${row.asked_by ? `, by ${row.asked_by}` : ""}`),
  ordered: (row) => `asked to ${row.order} by ${row.asked_by}`,
  sampled: (row) => `counts ${row.unfinished} samples of unfinished leases`,
  stop: (row) => `stops the run: ${row.reason}`,
  best: (row) => `saved the best center so far, loss ${number(row.loss)}`,
  serving: () => "accepts workers",
  server: (row) => `started its server, pid ${row.pid}`,
  "server died": (row) => `restarts its server, which died: ${exit(row.exit_code)}`,
  end: (row) => `ended the run, ${exit(row.exit_code)}`,
};
const GOOD_EXITS = new Set([0, 143, -15, 130, -2]); // success, or ended on request by SIGTERM or SIGINT
const HIDDEN = new Set(["event", "timestamp", "datestamp", "worker", "traceback"]);

function exit(code) { return code < 0 ? `killed by signal ${-code}` : `exit code ${code}`; }

// The text of an event, whom it is about and whether it is bad; null for those that only repeat another.
export function eventText(row) {
  if (row.event === "changed" && row.worker !== undefined && !row.refused) return null; // the host has reported it for all
  const rest = () => Object.entries(row).filter(([name]) => !HIDDEN.has(name))
    .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  const text = EVENTS[row.event]?.(row) ?? `${row.event} ${rest()}`.trim();
  const isBad = row.died || ["lost", "failed", "server died", "unsaved", "handler failed"].includes(row.event)
    || (["exit", "end"].includes(row.event) && !row.stopped && !GOOD_EXITS.has(row.exit_code)) || Boolean(row.refused);
  return { who: row.worker === undefined ? "host" : `worker ${row.worker}`, text, isBad };
}
