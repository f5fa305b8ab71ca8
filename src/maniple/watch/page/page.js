// The page of a run: receives updates and shows them.

import { Charts } from "./charts.js";
import { Commands } from "./commands.js";
import { duration } from "./format.js";
import { Events, showSettings, Totals, Workers } from "./panels.js";
import { changed } from "./redraw.js";
import { Store } from "./store.js";
import { TimeSplits } from "./time_splits.js";

const STOPPED = 130; // exit code of a run that a person has stopped
const RETRY_MS = 2000;
const OVER_MS = 60000; // the server usually ends with the run
const SILENCE_MS = 15000; // updates come every one or two seconds
const THEMES = { "": "theme: auto", light: "theme: light", dark: "theme: dark" };
const find = (id) => document.getElementById(id);

history.replaceState(null, "", location.pathname); // the token is in a cookie now; remove it from the address

const store = new Store();
const totals = new Totals(), workers = new Workers(), events = new Events(), commands = new Commands(store);
const charts = new Charts(store, (rank) => workers.isShown(rank));
new TimeSplits(store);
let isConnected = false;

function show(update) {
  const isNew = store.apply(update);
  const { small } = store;
  if (isNew) events.clear();
  find("name").textContent = small.name;
  totals.show(store);
  workers.show(store);
  events.show(isNew ? store.happened : update.happened ?? [], store.since);
  if (isNew || update.described || update.workers) showSettings(small, store.workers);
  charts.update();
  showState();
  changed();
}

function showState() {
  const [kind, text] = state();
  const pill = find("state");
  if (pill.textContent !== text) { pill.textContent = text; document.title = `${text} · ${store.small.name ?? "maniple"}`; }
  pill.className = `pill ${kind}`;
  find("elapsed").textContent = store.until ? duration(store.until) : "";
  find("where").textContent = isConnected && !isOver() ? `host ${store.small.host?.words ?? ""}` : "";
  commands.show(Boolean(store.small.may_steer), isOver(), isConnected);
}

function isOver() { return (store.small.described?.exit_code ?? store.small.run?.exit_code ?? null) !== null; }

function state() {
  const { small } = store, code = small.described?.exit_code ?? small.run?.exit_code ?? null;
  if (isConnected && !small.is_complete) return ["wait", "reading the record"];
  if (code === STOPPED) return ["", "stopped"];
  if (code !== null) return code === 0 ? ["", "ended well"] : ["bad", `ended with exit code ${code}`];
  if (!isConnected) return ["bad", "lost the server of this page, retrying"];
  if (small.described.asked?.center === "mpi") return small.totals.live ? ["good", "training"] : ["", "no worker trains"]; // it has no host
  if (small.host.words.startsWith("has not begun")) return ["wait", "has not begun yet"];
  if (!small.host.is_alive) return ["bad", "the host does not answer"];
  if (small.run.stop) return ["wait", `stopping: ${small.run.stop}`];
  return small.totals.live ? ["good", "training"] : ["wait", "starting"];
}

let silence = 0;
function follow() {
  const source = new EventSource("updates");
  const again = () => {
    clearTimeout(silence);
    source.close();
    isConnected = false;
    showState();
    setTimeout(follow, isOver() ? OVER_MS : RETRY_MS);
  };
  const wait = () => { clearTimeout(silence); silence = setTimeout(again, SILENCE_MS); };
  source.onmessage = (message) => {
    wait();
    isConnected = true;
    show(JSON.parse(message.data));
  };
  source.onerror = again;
  wait();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = THEMES[theme];
  localStorage.setItem("maniple-theme", theme);
  workers.colour();
  changed(undefined, true);
}

find("theme").addEventListener("click", () => {
  const all = Object.keys(THEMES);
  setTheme(all[(all.indexOf(document.documentElement.dataset.theme ?? "") + 1) % all.length]);
});
setTheme(localStorage.getItem("maniple-theme") ?? "");
follow();
