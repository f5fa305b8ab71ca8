// The charts, drawn by the plotly.js that the plotly wheel carries.

import { from, MOST_LINES, smoothed, summed, thinned } from "./curves.js";
import { changed, colour, drawn, workerColour } from "./drawing.js";
import { CENTER } from "./store.js";
import { timeUnit } from "./words.js";

const MEASURED = [
  ["samples_per_s", "Samples/s", "of each worker"],
  ["sync_share", "Sync share", "time spent in exchanges"],
  ["staleness", "Staleness", "exchanges of others missed"],
  ["bytes_per_s", "Bytes/s", "in both directions"],
  ["cores", "Cores", "kept busy"],
  ["memory_bytes", "Memory", "of the process"],
];
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
  // `shown` tells which workers are wanted.
  constructor(store, shown) {
    this.store = store;
    this.shown = shown;
    const acts = [["value", "change"], ["against", "change"], ["smooth", "input"], ["log", "change"]];
    for (const [id, event] of acts) find(id).addEventListener(event, () => changed([find("values")], true));
    find("span").addEventListener("change", () => changed(undefined, true));
    drawn(find("values"), () => this.#drawValues());
    for (const [name, title, note] of MEASURED) this.#panel(title, note, (into) => this.#drawMeasured(into, name));
    this.#panel("Workers alive", "", (into) => this.#drawLive(into));
    this.#panel("Staleness of exchanges", "how many were so old", (into) => this.#drawAges(into));
    this.#panel("Participation", "who took part in exchanges or rounds", (into) => this.#drawTogether(into));
  }

  // Offer the names that were logged, and a chart of what only some workers measure.
  offerNames() {
    if (!this.hasGpu && this.store.names("measured").includes("gpu_memory_bytes")) {
      this.hasGpu = true;
      this.#panel("GPU memory", "of the process", (into) => this.#drawMeasured(into, "gpu_memory_bytes"));
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
    drawn(plot, () => draw(plot));
  }

  #drawValues() {
    const name = find("value").value, against = find("against").value;
    const curves = [...this.store.named("logged", name)].filter(([rank]) => rank === CENTER || this.shown(rank));
    const most = Math.max(120, Math.min(1000, Math.floor(12000 / Math.max(1, curves.length))));
    const isCrowd = curves.length > MOST_LINES;
    const traces = curves.sort((a, b) => b[0] - a[0]).map(([rank, curve]) => {
      const { xs, ys } = from(curve, against === "time" ? this.#begin : 0);
      const few = thinned(xs, smoothed(ys, Number(find("smooth").value)), most);
      return this.#line(few, this.#axis(against).of, rank, isCrowd);
    });
    if (isCrowd) traces.push(this.#mean(curves.filter(([rank]) => rank !== CENTER).map(([, curve]) => curve), this.#axis(against).of));
    const broken = this.store.small.broken?.[name];
    const note = find("values-note");
    note.textContent = broken ? `${broken} values were no finite numbers, and are left out. ` : "";
    if (isCrowd) note.append("Bold: the mean of the workers. ");
    if (this.store.named("logged", name).has(CENTER)) {
      const chip = Object.assign(document.createElement("span"), { className: "chip" });
      chip.style.background = colour("text");
      note.append(chip, " center; workers have the colours of the table");
    }
    draw(find("values"), traces, { x: this.#axis(against).title, isLog: find("log").checked, isCrowd });
  }

  // How moments become places on an axis.
  #axis(against) {
    const size = this.store.small.run?.epoch_size;
    if (against === "samples") return { title: this.store.small.totals?.samples ? "samples of all workers" : "samples: nobody has counted them", of: (t) => this.store.samplesAt(t) };
    if (against === "epochs") {
      return { title: size ? `epochs of ${size} samples` : "epochs: no sampler has told their size",
        of: (t) => (size ? this.store.samplesAt(t) / size : 0) };
    }
    const [unit, seconds] = timeUnit(this.store.until);
    return { title: `${unit} since the first worker began`, of: (t) => t / seconds };
  }

  #line({ xs, ys }, of, rank, isCrowd) {
    const isCenter = rank === CENTER;
    return {
      x: Array.from(xs, of), y: ys, type: "scatter", mode: xs.length === 1 ? "markers" : isCenter && xs.length < 60 ? "lines+markers" : "lines",
      name: isCenter ? "center" : `W${rank}`, line: { color: isCenter ? colour("text") : workerColour(rank), width: isCenter ? 2.2 : isCrowd ? 0.8 : 1.5 },
      opacity: isCrowd && !isCenter ? 0.4 : 1, marker: { size: 5 }, hovertemplate: "%{y:.4g}",
    };
  }

  #mean(curves, of) {
    const { xs, mean } = summed(curves, 0, this.store.until, 200);
    return { ...this.#line({ xs, ys: mean }, of, 0, true), name: "mean of the workers", opacity: 1, line: { color: colour("accent"), width: 2.5 } };
  }

  #drawMeasured(into, name) {
    const curves = [...this.store.named("measured", name)].filter(([rank]) => this.shown(rank));
    const of = this.#axis("time").of, cut = curves.map(([rank, curve]) => [rank, from(curve, this.#begin)]);
    const traces = cut.length <= MOST_LINES
      ? cut.map(([rank, curve]) => this.#line(thinned(curve.xs, curve.ys, 300), of, rank, false))
      : this.#band(summed(cut.map(([, curve]) => curve), this.#begin, this.store.until), of);
    const isBytes = name.includes("bytes");
    draw(into, traces, { ticks: name === "sync_share" ? ".2~%" : isBytes ? "~s" : "", fromZero: true, unit: isBytes ? "B" : "" });
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

  // ages[k] counts those of 2^(k-1) up to 2^k - 1 exchanges.
  #drawAges(into) {
    const ages = this.store.small.ages ?? [];
    const name = (k) => (k < 2 ? String(k) : `${2 ** (k - 1)}–${2 ** k - 1}`);
    this.#bars(into, ages.map(([k]) => name(k)), ages.map(([, n]) => n), "exchanges of others in between");
  }

  // Who takes part: in rounds of all, how many workers were in them; in exchanges with the center, who made how many.
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
    draw(into, [{ x, y, type: "bar", marker: { color: colour("accent") }, hovertemplate: "%{y}<extra></extra>" }], { x: y.length ? title : "none were made", isNamed: true });
  }
}

// Draw lines or bars into an element, in the colours of the page.
async function draw(into, traces, { x = "", isLog = false, ticks = "", fromZero = false, isCrowd = false, isNamed = false, unit = "" }) {
  const axis = { gridcolor: colour("edge"), linecolor: colour("edge"), zeroline: false, automargin: true, fixedrange: true, tickfont: { size: 11 } };
  const small = into.classList.contains("tall") ? 0 : 1;
  const layout = {
    margin: { l: 44, r: 6, t: 8, b: x ? 36 : 22 }, showlegend: false, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("quiet") },
    hovermode: isCrowd || isNamed ? "closest" : "x unified",
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("edge"), font: { color: colour("text") } },
    xaxis: { ...axis, showgrid: false, title: x ? { text: x, font: { size: 11.5 }, standoff: 6 } : undefined, type: isNamed ? "category" : "linear", nticks: small ? 6 : 10 },
    yaxis: { ...axis, type: isLog ? "log" : "linear", tickformat: ticks || undefined, ticksuffix: unit, rangemode: fromZero || isNamed ? "tozero" : "normal", nticks: small ? 5 : 8 },
  };
  const Plotly = await plotly();
  await Plotly.react(into, traces, layout, { displayModeBar: false, responsive: true });
  into.dataset.points = traces.reduce((sum, one) => sum + one.y.length, 0);
}
