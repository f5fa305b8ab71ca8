// Commands to the run: stop, snapshot, change of settings. The reply of the host is shown as it is.

const find = (id) => document.getElementById(id);
const PACES = { Every: "every", RateLimit: "maximum_rate" };

export class Commands {
  constructor(store) {
    this.store = store;
    find("snapshot").addEventListener("click", () => this.#send(find("snapshot"), { command: "snapshot" }, notice));
    find("stop").addEventListener("click", () => open("stop-box"));
    find("change").addEventListener("click", () => { this.#offer(); open("change-box"); });
    this.#confirm("stop-box", () => ({ command: "stop" }));
    this.#confirm("change-box", () => ({ command: "change", settings: this.#changes() }));
  }

  // Commands are offered while the run is live and its server answers.
  show(maySteer, isOver, isConnected) {
    find("commands").hidden = !maySteer || isOver;
    for (const button of find("commands").children) button.disabled = !isConnected || button.dataset.busy === "1";
  }

  #confirm(id, command) {
    const box = find(id), answer = box.querySelector(".answer"), button = box.querySelector(".main");
    box.querySelector("[value=cancel]").addEventListener("click", () => box.close());
    box.querySelector("form").addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.#send(button, command(), (text, isBad) => {
        if (isBad) { answer.textContent = text; return; }
        box.close();
        notice(text, false);
      });
    });
  }

  async #send(button, command, tell) {
    button.disabled = true;
    button.dataset.busy = "1";
    try {
      const answer = await fetch("commands", { method: "POST", headers: { "X-Maniple": "1", "Content-Type": "application/json" }, body: JSON.stringify(command) });
      if (!answer.ok) throw new Error(`the server of this page refused it (${answer.status}). Open the page again.`);
      const { done, text } = await answer.json();
      tell(text, !done);
    } catch (error) {
      tell(error instanceof TypeError ? "The server of this page does not answer. Is `maniple` still running there?" : error.message, true);
    }
    button.disabled = false;
    delete button.dataset.busy;
  }

  // A field for each setting of the workers' present rule, and one for the pace.
  #offer() {
    const one = this.store.workers.find((worker) => worker.state === "training" && worker.rule) ?? this.store.workers.find((worker) => worker.rule) ?? {};
    const settings = [...(one.rule ?? "").matchAll(/(\w+)=('[^']*'|[^,)]+)/g)].map(([, name, value]) => [name, plain(value)]);
    const [, kind, pace] = (one.pace ?? "").match(/^(\w+)\((?:\w+=)?([^,)]*)/) ?? [];
    const fields = settings.flatMap(([name, value]) => field(name, value));
    const label = Object.assign(document.createElement("label"), { htmlFor: "set-pace", textContent: "exchange" });
    const two = Object.assign(document.createElement("div"), { className: "two" });
    const select = Object.assign(document.createElement("select"), { id: "set-pace-kind", ariaLabel: "kind of pace" });
    select.append(new Option("every … steps", "every"), new Option("at most this share of time", "maximum_rate"));
    select.value = PACES[kind] ?? "every";
    two.append(select, input("pace", pace ?? ""));
    this.before = { settings: Object.fromEntries(settings), pace: pace ?? "", kind: select.value };
    find("change-title").textContent = one.rule ? `Change settings of ${one.rule.split("(")[0]}` : "Change settings";
    find("change-fields").replaceChildren(...fields, label, two);
  }

  #changes() {
    const changes = {};
    for (const [name, before] of Object.entries(this.before.settings)) {
      const now = find(`set-${name}`).value.trim();
      if (now !== before) changes[name] = now;
    }
    const pace = find("set-pace").value.trim(), kind = find("set-pace-kind").value;
    if (pace !== this.before.pace || kind !== this.before.kind) changes[kind] = pace;
    return changes;
  }
}

function open(id) {
  find(id).querySelector(".answer").textContent = "";
  find(id).showModal();
}

// As a person writes it: strings without quotes, None and False as in JSON.
function plain(value) { return { None: "null", True: "true", False: "false" }[value] ?? value.replaceAll("'", ""); }

function input(name, value) {
  return Object.assign(document.createElement("input"), { type: "text", id: `set-${name}`, value, autocomplete: "off", spellcheck: false });
}

function field(name, value) {
  return [Object.assign(document.createElement("label"), { htmlFor: `set-${name}`, textContent: name.replaceAll("_", " ") }), input(name, value)];
}

let timer = 0;
export function notice(text, isBad) {
  const box = find("notice");
  box.textContent = text;
  box.className = isBad ? "bad" : "";
  box.hidden = !text;
  clearTimeout(timer);
  if (!isBad) timer = setTimeout(() => { box.hidden = true; }, 10000);
}
