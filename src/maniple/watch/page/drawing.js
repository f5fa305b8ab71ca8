// When to draw: only what is seen, one thing per frame, and never for more than a tenth of the time.

const drawables = new Map(); // by element
let isPlanned = false, timer = 0;

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) drawables.get(entry.target).isSeen = entry.isIntersecting;
  plan();
}, { rootMargin: "150px" });

// Let `draw` be called when what it shows has changed and `element` can be seen.
export function drawn(element, draw) {
  drawables.set(element, { draw, isSeen: false, isDirty: true, due: 0 });
  seen.observe(element);
}

// Something has changed: all drawings, or those of some elements. A person's own act is not kept waiting.
export function changed(elements = [...drawables.keys()], isAct = false) {
  for (const element of elements) {
    const drawable = drawables.get(element);
    drawable.isDirty = true;
    if (isAct) drawable.due = 0;
  }
  if (isAct && timer) { clearTimeout(timer); timer = 0; isPlanned = false; }
  plan();
}

function plan() {
  if (isPlanned || document.hidden) return;
  const waiting = [...drawables.values()].filter((one) => one.isDirty && one.isSeen);
  if (!waiting.length) return;
  isPlanned = true;
  const wait = Math.min(...waiting.map((one) => one.due)) - performance.now();
  const frame = () => { timer = 0; requestAnimationFrame(() => { isPlanned = false; drawOne(); plan(); }); };
  if (wait <= 0) frame(); else timer = setTimeout(frame, wait);
}

function drawOne() {
  const begin = performance.now();
  const ready = [...drawables.values()].filter((one) => one.isDirty && one.isSeen && one.due <= begin);
  if (!ready.length) return;
  const one = ready.reduce((a, b) => (a.due <= b.due ? a : b));
  one.isDirty = false;
  one.draw();
  const cost = performance.now() - begin;
  one.due = begin + 10 * cost;
}

document.addEventListener("visibilitychange", plan);
new ResizeObserver(() => changed()).observe(document.documentElement);

// A colour of the style sheet, as canvases and charts want it.
const probe = document.createElement("span");
export function colour(name) {
  if (!probe.isConnected) { probe.hidden = true; document.body.append(probe); }
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const night = matchMedia("(prefers-color-scheme: dark)");
night.addEventListener("change", () => changed(undefined, true));

// A colour of its own for each worker: steps of the golden angle stay apart however many there are.
export function workerColour(rank) {
  const isDark = (document.documentElement.dataset.theme || (night.matches ? "dark" : "light")) === "dark";
  return `hsl(${(190 + 137.508 * rank) % 360} ${isDark ? "60% 62%" : "62% 42%"})`;
}
