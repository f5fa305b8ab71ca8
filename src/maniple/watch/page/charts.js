// The charts, drawn by plotly.js from the plotly wheel.

import { from, MAX_LINES, MAX_WORKER_LINES, smoothed, summed, thinned } from "./curves.js";
import { targetText, timeUnit } from "./format.js";
import { changed, colour, drawWhenSeen, workerColour } from "./redraw.js";
import { CENTER } from "./store.js";

// How the axis of a measure's chart is labelled, by the format of the measure.
const TICKS = { percent: ".2~%", bytes: "~s" };
const find = (id) => document.getElementById(id);

let loading = null;
function plotly() {
  loading ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = "plotly.js";
    script.onload = () => resolve(window.Plotly);
    document.head.append(script);
  });
  return loading;
}

export class Charts {
  // `shown` says whether a worker is to be drawn.
  constructor(store, shown) {
    this.store = store;
    this.shown = shown;
    const inputs = [["value", "change"], ["against", "change"], ["smooth", "input"], ["log", "change"]];
    for (const [id, event] of inputs) find(id).addEventListener(event, () => changed([find("values")], true));
    find("span").addEventListener("change", () => changed(undefined, true));
    drawWhenSeen(find("values"), () => this.#drawValues());
    this.known = new Set(); // measures that have a chart
  }

  // Add the charts of measures, those of optional ones when they are first recorded, and offer the logged names.
  update() {
    const isFirst = !this.known.size;
    for (const measure of this.store.schema.measures) {
      const { name, chart, is_optional } = measure;
      if (!chart.length || this.known.has(name) || (is_optional && !this.store.names("measured").includes(name))) continue;
      this.known.add(name);
      this.#panel(...chart, (into) => this.#drawMeasured(into, measure));
    }
    if (isFirst) {
      this.#panel("Workers alive", "", (into) => this.#drawLive(into));
      this.#panel("Staleness of exchanges", "how many were this old", (into) => this.#drawAges(into));
      this.#panel("Participation", "who took part in exchanges or rounds", (into) => this.#drawTogether(into));
    }
    const names = this.store.names("logged").sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
    const select = find("value");
    if (names.length && names.join() !== [...select.options].map((one) => one.value).join()) {
      const before = select.value;
      select.replaceChildren(...names.map((name) => new Option(name)));
      select.value = names.includes(before) ? before : names[0];
    }
  }

  get #begin() {
    const span = Number(find("span").value);
    return span ? Math.max(0, this.store.until - span) : 0;
  }

  #panel(title, note, draw) {
    const panel = document.createElement("div");
    panel.className = "panel";
    panel.innerHTML = '<div class="head"><h2></h2><span></span></div><div class="plot" role="img"></div>';
    panel.querySelector("h2").textContent = title;
    panel.querySelector("span").textContent = note;
    const plot = panel.querySelector(".plot");
    plot.setAttribute("aria-label", `${title}, ${note}`);
    find("measured").append(panel);
    drawWhenSeen(plot, () => draw(plot));
  }

  #drawValues() {
    const name = find("value").value, against = find("against").value;
    const curves = [...this.store.named("logged", name)].filter(([rank]) => rank === CENTER || this.shown(rank));
    const begin = against === "time" ? this.#begin : 0, of = this.#axis(against).of;
    const shown = curves.sort((a, b) => b[0] - a[0]).map(([rank, curve]) => {
      const { xs, ys } = from(curve, begin);
      return [rank, { xs, ys: smoothed(ys, Number(find("smooth").value)) }];
    });
    const workers = shown.filter(([rank]) => rank !== CENTER), isCrowd = workers.length > MAX_WORKER_LINES;
    const traces = isCrowd ? this.#band(summed(workers.map(([, curve]) => curve), begin, this.store.until, 200), of) : [];
    for (const [rank, { xs, ys }] of shown) if (!isCrowd || rank === CENTER) traces.push(this.#line(thinned(xs, ys, 1000), of, rank));
    traces.push(...this.#target(name, of));
    const nonFinite = this.store.small.non_finite?.[name];
    const note = find("values-note");
    note.textContent = nonFinite ? `${nonFinite} values were not finite and are left out. ` : "";
    if (isCrowd) note.append(`Line and area: the mean, the lowest and the highest of ${workers.length} workers. `);
    if (this.store.named("logged", name).has(CENTER)) {
      const chip = Object.assign(document.createElement("span"), { className: "chip" });
      chip.style.background = colour("text");
      note.append(chip, isCrowd ? " center" : " center; workers as in the table");
    }
    draw(find("values"), traces, { x: this.#axis(against).title, isLog: find("log").checked });
  }

  // The title of an axis, and the position of a moment on it.
  #axis(against) {
    const size = this.store.small.run?.epoch_size;
    if (against === "samples") return { title: this.store.small.totals?.samples ? "samples of all workers" : "samples: none were counted", of: (t) => this.store.samplesAt(t) };
    if (against === "epochs") {
      return { title: size ? `epochs of ${size} samples` : "epochs: without a sampler their size is unknown",
        of: (t) => (size ? this.store.samplesAt(t) / size : 0) };
    }
    const [unit, seconds] = timeUnit(this.store.until);
    return { title: `${unit} since the first step`, of: (t) => t / seconds };
  }

  // A dashed line at the run's target, and a mark at the time when it was reached.
  #target(name, of) {
    const { target = null, target_s: reached } = this.store.small.totals ?? {}, at = this.store.small.run?.target_at ?? null;
    if (target === null || target.name !== name) return [];
    const common = { type: "scatter", hovertemplate: "%{y:.4g}", name: `target ${targetText(target)}` };
    const line = { color: colour("quiet"), width: 1.2, dash: "dash" };
    const traces = [{ ...common, x: [this.#begin, this.store.until].map(of), y: [target.value, target.value], mode: "lines", line }];
    const marker = { symbol: "star", size: 13, color: colour("accent"), line: { color: colour("panel"), width: 1 } };
    if (at !== null) traces.push({ ...common, x: [of(at)], y: [target.value], mode: "markers", marker, name: `reached after ${reached.toFixed(1)} s` });
    return traces;
  }

  #line({ xs, ys }, of, rank) {
    const isCenter = rank === CENTER;
    return {
      x: Array.from(xs, of), y: ys, type: "scatter", mode: xs.length === 1 ? "markers" : isCenter && xs.length < 60 ? "lines+markers" : "lines",
      name: isCenter ? "center" : `W${rank}`, line: { color: isCenter ? colour("text") : workerColour(rank), width: isCenter ? 2.2 : 1.5 },
      marker: { size: 5 }, hovertemplate: "%{y:.4g}",
    };
  }

  #drawMeasured(into, { name, format }) {
    const curves = [...this.store.named("measured", name)].filter(([rank]) => this.shown(rank));
    const of = this.#axis("time").of, cut = curves.map(([rank, curve]) => [rank, from(curve, this.#begin)]);
    const traces = cut.length <= MAX_LINES
      ? cut.map(([rank, curve]) => this.#line(thinned(curve.xs, curve.ys, 300), of, rank))
      : this.#band(summed(cut.map(([, curve]) => curve), this.#begin, this.store.until), of);
    draw(into, traces, { ticks: TICKS[format] ?? "", fromZero: true, unit: format === "bytes" ? "B" : "" });
  }

  #band({ xs, mean, low, high }, of) {
    const x = xs.map(of), accent = colour("accent");
    const edge = { x, type: "scatter", mode: "lines", line: { width: 0 }, hovertemplate: "%{y:.4g}" };
    return [
      { ...edge, y: low, name: "lowest" },
      { ...edge, y: high, name: "highest", fill: "tonexty", fillcolor: accent.replace("rgb(", "rgba(").replace(")", ", 0.2)") },
      { ...edge, y: mean, name: "mean", line: { color: accent, width: 1.5 } },
    ];
  }

  #drawLive(into) {
    const curve = this.store.named("live", "live").get(0);
    const of = this.#axis("time").of, last = curve ? curve.ys[curve.ys.length - 1] : 0;
    const xs = curve ? [...curve.xs, this.store.until] : [], ys = curve ? [...curve.ys, last] : [];
    const line = { color: colour("accent"), width: 1.5, shape: "hv" };
    draw(into, [{ x: xs.map((t) => of(Math.max(0, t))), y: ys, type: "scatter", mode: "lines", name: "alive", line, hovertemplate: "%{y}" }], { fromZero: true });
  }

  // ages[k] counts exchanges with parameters 2^(k-1) to 2^k - 1 exchanges old.
  #drawAges(into) {
    const ages = this.store.small.ages ?? [];
    const name = (k) => (k < 2 ? String(k) : `${2 ** (k - 1)}–${2 ** k - 1}`);
    this.#bars(into, ages.map(([k]) => name(k)), ages.map(([, n]) => n), "exchanges of others in between");
  }

  // Participation: rounds by their number of workers, or exchanges with the center by worker.
  #drawTogether(into) {
    const together = this.store.small.together ?? [];
    if (together.length) {
      this.#bars(into, together.map(([n]) => String(n)), together.map(([, n]) => n), "workers in a round");
      return;
    }
    const made = this.store.workers.filter((one) => one.exchanges);
    this.#bars(into, made.map((one) => `W${one.rank}`), made.map((one) => one.exchanges), "exchanges of each worker");
  }

  #bars(into, x, y, title) {
    draw(into, [{ x, y, type: "bar", marker: { color: colour("accent") }, hovertemplate: "%{y}<extra></extra>" }], { x: y.length ? title : "none yet", isNamed: true });
  }
}

// Draw lines or bars in the colours of the page.
async function draw(into, traces, { x = "", isLog = false, ticks = "", fromZero = false, isNamed = false, unit = "" }) {
  const axis = { gridcolor: colour("edge"), linecolor: colour("edge"), zeroline: false, automargin: true, fixedrange: true, tickfont: { size: 11 } };
  const small = into.classList.contains("tall") ? 0 : 1;
  const layout = {
    margin: { l: 44, r: 6, t: 8, b: x ? 36 : 22 }, showlegend: false, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("quiet") },
    hovermode: isNamed ? "closest" : "x unified",
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("edge"), font: { color: colour("text") } },
    xaxis: { ...axis, showgrid: false, title: x ? { text: x, font: { size: 11.5 }, standoff: 6 } : undefined, type: isNamed ? "category" : "linear", nticks: small ? 6 : 10 },
    yaxis: { ...axis, type: isLog ? "log" : "linear", tickformat: ticks || undefined, ticksuffix: unit, rangemode: fromZero || isNamed ? "tozero" : "normal", nticks: small ? 5 : 8 },
  };
  const Plotly = await plotly();
  await Plotly.react(into, traces, layout, { displayModeBar: false, responsive: true });
  into.dataset.points = traces.reduce((sum, one) => sum + one.y.length, 0);
}
