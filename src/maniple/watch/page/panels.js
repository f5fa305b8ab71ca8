// What is told in words: the totals, the table of workers, events and settings.

import { changed, workerColour } from "./drawing.js";
import { BAD, GONE } from "./store.js";
import { bytes, count, duration, number, percent, short, told } from "./words.js";

const MOST_EVENTS = 300;
const find = (id) => document.getElementById(id);

// Set a text only where it differs: a reader of the screen is not told again what stays.
function put(element, text) { if (element.textContent !== text) element.textContent = text; }

export class Totals {
  constructor() { this.cells = new Map(); }

  show({ totals, run }) {
    const per = totals.samples ? ["samples/s", totals.samples_per_s] : ["steps/s", totals.steps_per_s];
    const epochs = run.epoch_size ? `${(totals.samples / run.epoch_size).toFixed(2)} epochs` : "";
    this.#put("rate", per[0], short(per[1]), "", "of all workers, now");
    this.#put("busy", "busy workers", totals.busy_workers.toFixed(2), `of ${totals.workers}`, "how many workers compute, in the mean; not how many times as fast they are as one");
    this.#put("goodput", "goodput", percent(totals.goodput), "", "the part of all workers' time spent for training itself");
    this.#put("sync", "sync share", percent(totals.sync_share), "", "the part of it spent in exchanges and waiting for others");
    this.#put("live", "workers", String(totals.live), `of ${totals.workers}`, "that train");
    this.#put("version", "center version", count(totals.version), "", "how many exchanges or rounds have changed the center");
    this.#put("samples", totals.samples ? "samples" : "steps", short(totals.samples || totals.steps), epochs, "of all workers");
    this.#put("bytes", "exchanged", ...bytes(totals.bytes).split(" "), "in both directions");
  }

  #put(key, name, value, unit, help) {
    if (!this.cells.has(key)) {
      const cell = document.createElement("div");
      cell.append(document.createElement("dt"), document.createElement("dd"));
      cell.lastChild.append(document.createElement("span"), " ", document.createElement("small"));
      cell.id = `total-${key}`;
      cell.title = help;
      find("totals").append(cell);
      this.cells.set(key, cell);
    }
    const [term, value_] = this.cells.get(key).children;
    put(term, name);
    put(value_.firstChild, value);
    put(value_.lastChild, unit);
  }
}

export class Workers {
  constructor() {
    this.rows = new Map();
    this.hidden = new Set(); // ranks that are not wanted in charts
    find("all").addEventListener("change", (event) => {
      for (const rank of this.rows.keys()) this.hidden[event.target.checked ? "delete" : "add"](rank);
      this.#tick();
    });
  }

  isShown(rank) { return !this.hidden.has(rank); }

  show(workers, hasSamples) {
    put(find("speed"), hasSamples ? "samples/s" : "steps/s");
    for (const one of workers) {
      const row = this.rows.get(one.rank) ?? this.#add(one.rank);
      const texts = [
        one.shown + (one.lives > 1 ? ` (life ${one.lives})` : ""), count(one.step), short(hasSamples ? one.samples_per_s : one.steps_per_s),
        number(one.loss), percent(one.sync_share), one.staleness === null ? "–" : one.staleness.toFixed(1), one.cores.toFixed(2), bytes(one.memory_bytes),
      ];
      texts.forEach((text, i) => put(row.cells[i + 1], text));
      if (row.dataset.state && row.dataset.state !== one.state) this.#say(one);
      row.dataset.state = one.state;
      row.toggleAttribute("data-is-bad", BAD.has(one.state));
      row.toggleAttribute("data-is-gone", GONE.has(one.state));
      row.title = [one.node, one.rule, one.pace].filter(Boolean).join(", ");
    }
  }

  #say(one) { put(find("said"), `worker ${one.rank} is ${one.state}`); }

  #add(rank) {
    const body = find("workers").tBodies[0], row = document.createElement("tr");
    row.id = `worker-${rank}`;
    for (let i = 0; i < 9; i++) row.insertCell();
    row.cells[0].innerHTML = `<label><input type="checkbox"><span class="chip"></span>W${Number(rank)}</label>`;
    row.cells[1].className = "state";
    row.querySelector("input").addEventListener("change", (event) => {
      this.hidden[event.target.checked ? "delete" : "add"](rank);
      this.#tick();
    });
    body.insertBefore(row, [...body.rows].find((other) => Number(other.id.slice(7)) > rank) ?? null);
    this.rows.set(rank, row);
    this.colour();
    return row;
  }

  #tick() {
    find("all").checked = this.hidden.size === 0;
    find("all").indeterminate = this.hidden.size > 0 && this.hidden.size < this.rows.size;
    this.colour();
    changed(undefined, true);
  }

  colour() {
    for (const [rank, row] of this.rows) {
      row.querySelector("input").checked = this.isShown(rank);
      row.querySelector(".chip").style.background = this.isShown(rank) ? workerColour(rank) : "";
    }
  }
}

export class Events {
  show(happened, since) {
    const list = find("events"), items = [];
    for (const row of happened) {
      const words = told(row);
      if (!words) continue;
      const item = document.createElement("li"), time = document.createElement("time"), text = document.createElement("span");
      const seconds = since ? row.timestamp - since : 0;
      time.textContent = (seconds <= -1 ? "−" : "") + duration(Math.abs(seconds));
      time.title = new Date(1000 * row.timestamp).toLocaleString();
      text.textContent = `${words.who} ${words.text}`;
      if (words.isBad) text.className = "bad";
      item.append(time, text);
      items.push({ item, at: row.timestamp });
    }
    items.sort((a, b) => b.at - a.at);
    list.prepend(...items.map((one) => one.item));
    while (list.children.length > MOST_EVENTS) list.lastChild.remove();
  }

  clear() { find("events").replaceChildren(); }
}

// How many workers share by which rule and pace now, then what was asked for.
export function showSettings({ described = {}, folder }, workers) {
  const counted = (name) => {
    const counts = new Map();
    for (const one of workers) if (one[name]) counts.set(one[name], (counts.get(one[name]) ?? 0) + 1);
    return [...counts].map(([text, n]) => (counts.size > 1 ? `${text} (${n} workers)` : text)).join("; ");
  };
  const asked = Object.entries(described.asked ?? {}).filter(([, value]) => !isEmpty(value));
  const pairs = [["rule now", counted("rule")], ["pace now", counted("pace")], ["folder", folder], ["node", described.node],
    ["started", described.started && new Date(1000 * described.started).toLocaleString()], ...asked,
    ["versions", Object.entries(described.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ")], ["lineage", described.lineage]];
  const cells = pairs.filter(([, value]) => !isEmpty(value)).flatMap(([name, value]) => {
    const [term, text] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name.replaceAll("_", " ");
    text.textContent = typeof value === "object" ? (Array.isArray(value) ? value.join(" ") : JSON.stringify(value)) : String(value);
    text.dataset.name = name;
    return [term, text];
  });
  find("settings").replaceChildren(...cells);
}

function isEmpty(value) { return value === null || value === undefined || value === "" || value === false || value === 0 || (Array.isArray(value) && !value.length); }
