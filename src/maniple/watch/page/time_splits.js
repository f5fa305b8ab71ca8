// Where the time goes: a lane for each worker, with what each interval was spent on and when the worker was dead.

import { duration, timeUnit } from "./format.js";
import { colour, drawWhenSeen } from "./redraw.js";

const AXIS = 20; // pixels for the times below
const MIN_SHARE = 0.02; // smaller shares may round to no pixel; larger ones get at least one
const find = (id) => document.getElementById(id);

export class TimeSplits {
  constructor(store) {
    this.store = store;
    this.canvas = find("lanes");
    drawWhenSeen(this.canvas, () => this.#draw());
    this.canvas.addEventListener("mousemove", (event) => this.#showTip(event));
    this.canvas.addEventListener("mouseleave", () => { find("lane-tip").hidden = true; });
  }

  get #rows() { return this.store.workers; }

  get #height() {
    const count = this.#rows.length;
    return count <= 8 ? 26 : count <= 24 ? 16 : 11;
  }

  get #begin() {
    const span = Number(find("span").value);
    return span ? Math.max(0, this.store.until - span) : 0;
  }

  get #parts() { return Object.keys(this.store.schema.parts); }

  #draw() {
    if (!this.store.schema) return;
    this.#showLegend();
    this.#name();
    const width = this.canvas.clientWidth, height = this.#rows.length * this.#height + AXIS, scale = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const begin = this.#begin, end = Math.max(begin + 1, this.store.until);
    const x = (moment) => ((Math.max(begin, moment) - begin) / (end - begin)) * width;
    this.#drawAxis(context, begin, end, x, height);
    context.fillStyle = colour("ground");
    this.#rows.forEach((_, row) => {
      context.fillRect(0, row * this.#height + 1, width, this.#height - 2);
    });
    this.#drawParts(context, begin, x);
    this.#drawDeaths(context, begin, end, x);
    const bad = this.#rows.filter((one) => this.store.isBad(one.state)).length;
    this.canvas.setAttribute("aria-label", `${this.#rows.length} lanes, ${bad} of them dead, over ${duration(end - begin)}`);
  }

  // One pass over all lanes per colour: changing the colour is what takes long.
  #drawParts(context, begin, x) {
    const inner = this.#height - 2;
    for (const part of [0, 3, 2, 1]) { // exchanges last, on top: they matter most
      context.fillStyle = colour(this.#parts[part]);
      this.#rows.forEach(({ rank }, row) => {
        const lane = this.store.timeSplits.get(rank);
        if (!lane) return;
        const bottom = row * this.#height + 1 + inner;
        for (let i = 0; i < lane.length; i += 6) {
          if (lane[i + 1] < begin || !lane[i + 2 + part]) continue;
          const whole = lane[i + 2] + lane[i + 3] + lane[i + 4] + lane[i + 5];
          let below = 0;
          for (let k = 0; k < part; k++) below += lane[i + 2 + k];
          const left = Math.floor(x(lane[i])), wide = Math.max(1, Math.ceil(x(lane[i + 1])) - left); // no seams
          const share = lane[i + 2 + part] / whole, foot = bottom - Math.round((inner * below) / whole);
          const head = bottom - Math.round((inner * (below + lane[i + 2 + part])) / whole);
          const high = Math.max(foot - head, part && share >= MIN_SHARE ? 1 : 0);
          context.fillRect(left, Math.max(bottom - inner, foot - high), wide, high);
        }
      });
    }
  }

  #drawDeaths(context, begin, end, x) {
    const [red, pale] = [colour("dead"), colour("dead-ground")];
    this.#rows.forEach(({ rank }, row) => {
      const states = this.store.small.states?.[rank] ?? [];
      states.forEach(([when, state], i) => {
        const until = states[i + 1]?.[0] ?? end;
        if (!this.store.isBad(state) || until < begin) return;
        context.fillStyle = pale;
        context.fillRect(x(when), row * this.#height + 1, x(until) - x(when), this.#height - 2);
        context.fillStyle = red;
        if (when >= begin) context.fillRect(Math.min(x(when), this.canvas.clientWidth - 3), row * this.#height + 1, 3, this.#height - 2);
      });
    });
  }

  #drawAxis(context, begin, end, x, height) {
    const [unit, seconds] = timeUnit(end), raw = (end - begin) / seconds / Math.max(2, this.canvas.clientWidth / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
    context.fillStyle = colour("quiet");
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    for (let tick = Math.ceil(begin / seconds / step) * step; tick * seconds <= end; tick += step) {
      const at = x(tick * seconds), text = `${Number(tick.toPrecision(6))} ${unit}`;
      const left = Math.min(Math.max(0, at - context.measureText(text).width / 2), this.canvas.clientWidth - context.measureText(text).width);
      context.fillText(text, left, height - 4);
    }
  }

  #showLegend() {
    const { parts, unmeasured } = this.store.schema, legend = find("legend");
    const isMeasured = this.#rows.every((worker) => worker.measures_data || !worker.step);
    const entries = [...Object.entries(isMeasured ? parts : { ...parts, data: unmeasured }), ["dead", "dead"]];
    if (entries.map(([, text]) => text).join() === [...legend.children].map((item) => item.textContent).join()) return;
    legend.replaceChildren(...entries.map(([part, text]) => Object.assign(document.createElement("li"), { className: part, textContent: text })));
  }

  #name() {
    const list = find("lane-names");
    list.style.setProperty("--row", `${this.#height}px`);
    while (list.children.length < this.#rows.length) list.append(document.createElement("li"));
    while (list.children.length > this.#rows.length) list.lastChild.remove();
    this.#rows.forEach(({ rank, state }, row) => {
      const item = list.children[row], isBad = this.store.isBad(state);
      const text = isBad && this.#height > 20 ? `W${rank} ${state}` : `W${rank}`;
      if (item.textContent !== text) item.textContent = text;
      item.dataset.state = state;
      item.toggleAttribute("data-is-bad", isBad);
    });
  }

  #showTip(event) {
    const tip = find("lane-tip"), box = this.canvas.getBoundingClientRect();
    const worker = this.#rows[Math.floor((event.clientY - box.top) / this.#height)];
    const begin = this.#begin, end = Math.max(begin + 1, this.store.until);
    const moment = begin + ((event.clientX - box.left) / box.width) * (end - begin);
    const lane = worker && this.store.timeSplits.get(worker.rank);
    tip.hidden = true;
    if (!lane) return;
    for (let i = 0; i < lane.length; i += 6) {
      if (lane[i] > moment || lane[i + 1] < moment) continue;
      const parts = lane.subarray(i + 2, i + 6), whole = parts.reduce((a, b) => a + b, 0) || 1;
      const shares = Object.values(this.store.schema.parts).map((name, k) => [name, parts[k] / whole]).filter(([, share]) => share >= 0.0005);
      const lines = shares.map(([name, share]) => `${name} ${(100 * share).toFixed(1)} %`);
      tip.textContent = [`W${worker.rank}, ${duration(moment)}`, ...lines, ...(worker.measures_data ? [] : [this.store.schema.unmeasured])].join("\n");
      tip.hidden = false;
      tip.style.left = `${Math.min(event.clientX - box.left + this.canvas.offsetLeft + 12, this.canvas.offsetLeft + box.width - tip.offsetWidth)}px`;
      tip.style.top = `${event.clientY - box.top + 16}px`;
      return;
    }
  }
}
