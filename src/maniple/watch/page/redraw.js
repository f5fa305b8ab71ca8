// Redrawing: only what is visible, one element per frame, and for at most a tenth of the time.

const drawables = new Map(); // by element
let isPlanned = false, timer = 0;

const visibility = new IntersectionObserver((entries) => {
  for (const entry of entries) drawables.get(entry.target).isVisible = entry.isIntersecting;
  plan();
}, { rootMargin: "150px" });

// Call `draw` when its data have changed and `element` is visible.
export function drawWhenSeen(element, draw) {
  drawables.set(element, { draw, isVisible: false, isDirty: true, due: 0 });
  visibility.observe(element);
}

// Data have changed, of all elements or of some. Input of a person is drawn without delay.
export function changed(elements = [...drawables.keys()], isInput = false) {
  for (const element of elements) {
    const drawable = drawables.get(element);
    drawable.isDirty = true;
    if (isInput) drawable.due = 0;
  }
  if (isInput && timer) { clearTimeout(timer); timer = 0; isPlanned = false; }
  plan();
}

function plan() {
  if (isPlanned || document.hidden) return;
  const waiting = [...drawables.values()].filter((one) => one.isDirty && one.isVisible);
  if (!waiting.length) return;
  isPlanned = true;
  const wait = Math.min(...waiting.map((one) => one.due)) - performance.now();
  const frame = () => { timer = 0; requestAnimationFrame(() => { isPlanned = false; drawOne(); plan(); }); };
  if (wait <= 0) frame(); else timer = setTimeout(frame, wait);
}

function drawOne() {
  const begin = performance.now();
  const ready = [...drawables.values()].filter((one) => one.isDirty && one.isVisible && one.due <= begin);
  if (!ready.length) return;
  const one = ready.reduce((a, b) => (a.due <= b.due ? a : b));
  one.isDirty = false;
  one.draw();
  const cost = performance.now() - begin;
  one.due = begin + 10 * cost;
}

document.addEventListener("visibilitychange", plan);
new ResizeObserver(() => changed()).observe(document.documentElement);

// A colour of the style sheet as rgb(), for canvases and charts.
const probe = document.createElement("span");
export function colour(name) {
  if (!probe.isConnected) { probe.hidden = true; document.body.append(probe); }
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const night = matchMedia("(prefers-color-scheme: dark)");
night.addEventListener("change", () => changed(undefined, true));

// The colour of a worker: steps of the golden angle stay apart however many workers there are.
export function workerColour(rank) {
  const isDark = (document.documentElement.dataset.theme || (night.matches ? "dark" : "light")) === "dark";
  return `hsl(${(190 + 137.508 * rank) % 360} ${isDark ? "60% 62%" : "62% 42%"})`;
}
