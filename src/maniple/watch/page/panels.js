// The parts of the page that are text: totals, the table of workers, events and settings.

import { duration, eventText, formats, targetText } from "./format.js";
import { changed, workerColour } from "./redraw.js";

const MAX_EVENTS = 300;
const find = (id) => document.getElementById(id);

// Set a text only where it differs, so that a screen reader does not repeat it.
function put(element, text) { if (element.textContent !== text) element.textContent = text; }

export class Totals {
  constructor() { this.cells = new Map(); }

  show(store) {
    const { totals, run } = store.small;
    for (const measure of store.schema.totals) {
      if (!store.isCounted(measure) || (measure.is_optional && !this.#isKnown(measure, totals))) continue;
      let label = measure.label, text = formats[measure.format](totals[measure.name]), note = measure.beside ? `of ${totals[measure.beside]}` : "";
      if (measure.format === "bytes") [text, note] = text.split(" ");
      if (measure.name === "samples" && run.epoch_size) note = `${(totals.samples / run.epoch_size).toFixed(2)} epochs`;
      if (measure.name === "target_s") {
        label = `time to ${targetText(totals.target)}`;
        note = totals.target_s === null && totals.target.best !== null ? `best ${formats.number(totals.target.best)}` : "";
      }
      this.#put(measure.name.replace("steps", "samples"), label, text, note, measure.help); // one cell for either
    }
  }

  // A target has its field from the beginning, other optional values once they are known.
  #isKnown({ name }, totals) { return name === "target_s" ? totals.target !== null : totals[name] !== null; }

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

// The list of workers. Its columns are the measures with a `cell` in monitor/measures.py.
export class Workers {
  constructor() {
    this.rows = new Map();
    this.hidden = new Set(); // ranks that are left out of charts
    find("all").addEventListener("change", (event) => {
      for (const rank of this.rows.keys()) this.hidden[event.target.checked ? "delete" : "add"](rank);
      this.#tick();
    });
  }

  isShown(rank) { return !this.hidden.has(rank); }

  show(store) {
    const isKnown = ({ name }) => store.workers.some((worker) => worker[name] !== null);
    const measures = store.schema.measures.filter((one) => one.cell && store.isCounted(one) && (!one.is_optional || isKnown(one)));
    this.#showHead(measures);
    for (const one of store.workers) {
      const row = this.rows.get(one.rank) ?? this.#add(one.rank, measures.length);
      while (row.cells.length < measures.length + 2) row.insertCell();
      put(row.cells[1], one.state_text + (one.lives > 1 ? ` (life ${one.lives})` : ""));
      measures.forEach(({ name, format }, i) => put(row.cells[i + 2], formats[format](one[name])));
      if (row.dataset.state && row.dataset.state !== one.state) put(find("said"), `worker ${one.rank} is ${one.state}`);
      row.dataset.state = one.state;
      row.toggleAttribute("data-is-bad", store.isBad(one.state));
      row.toggleAttribute("data-is-gone", store.schema.gone_states.includes(one.state));
      row.title = [one.node, one.rule, one.pace].filter(Boolean).join(", ");
    }
  }

  #showHead(measures) {
    const head = find("workers").tHead.rows[0];
    while (head.cells.length < measures.length + 2) head.append(Object.assign(document.createElement("th"), { scope: "col" }));
    measures.forEach(({ cell, help }, i) => { put(head.cells[i + 2], cell); head.cells[i + 2].title = help; });
  }

  #add(rank, measures) {
    const body = find("workers").tBodies[0], row = document.createElement("tr");
    row.id = `worker-${rank}`;
    for (let i = 0; i < measures + 2; i++) row.insertCell();
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
      const event = eventText(row);
      if (!event) continue;
      const item = document.createElement("li"), time = document.createElement("time"), text = document.createElement("span");
      const seconds = since ? row.timestamp - since : 0;
      time.textContent = (seconds <= -1 ? "−" : "") + duration(Math.abs(seconds));
      time.title = new Date(1000 * row.timestamp).toLocaleString();
      text.textContent = `${event.who} ${event.text}`;
      if (event.isBad) text.className = "bad";
      item.append(time, text);
      items.push({ item, at: row.timestamp });
    }
    items.sort((a, b) => b.at - a.at);
    list.prepend(...items.map((one) => one.item));
    while (list.children.length > MAX_EVENTS) list.lastChild.remove();
  }

  clear() { find("events").replaceChildren(); }
}

// The rules and paces that workers use now, then the options of the run.
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
