"""The page of a run in a real browser: one run and one browser for all tests, which come in the order of the file.

Screenshots are kept in `artefacts/` (git-ignored), for a person to look at.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.process.conftest import BARE, MANIPLE, Run
from tests.waiting import PATIENCE_S, await_

ARTEFACTS = Path(__file__).parents[2] / "artefacts"
CHROMIUM = shutil.which("chromium")
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
SOON_MS = 1000 * PATIENCE_S
SCRIPT = """
import time
import numpy as np, maniple
worker = maniple.join()
data = worker.sampler(range(5000))
params, target = {"w": np.zeros(1000)}, np.linspace(-1, 1, 1000)
replica = worker.share(params)
epoch = iter(())
while not worker.should_stop:
    batch = next(epoch, None)
    if batch is None:
        epoch = iter(data.batches(10))
        continue
    time.sleep(0.02)
    params["w"] += 0.002 * (target - params["w"])
    replica.step()
    worker.log(loss=float(np.mean((params["w"] - target) ** 2)), lr=0.002)
    if worker.rank == 0 and replica.steps % 50 == 0:
        with replica.center():
            worker.log(val_loss=float(np.mean((params["w"] - target) ** 2)), center=True)
"""


class Shown(Run):
    """A run with a page."""

    @property
    def address(self) -> str:
        """With the token."""
        log = self.folder.parent.parent / "printed"
        return await_(lambda: re.search(r"page: (http\S+)", log.read_text()))[1]

    @property
    def base(self) -> str:
        return self.address.partition("/?")[0]

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    require("chromium", CHROMIUM is not None, "chromium is not installed")
    require("chromium", find_spec("playwright") is not None, "playwright is not installed")
    folder = tmp_path_factory.mktemp("web")
    (folder / "train.py").write_text(SCRIPT)
    # Its output to a file: nobody reads a pipe while the tests look at the page.
    options = "-n 2 --strict --name web --web --listen 127.0.0.1:0 --target 'loss<=0.3'"
    command = f"exec {MANIPLE} run {options} train.py > printed 2>&1"
    run = Shown(folder, "web", ["sh", "-c", command], BARE)
    yield run
    if run.process.poll() is None:
        run.signal(signal.SIGTERM)
        run.wait()


@pytest.fixture(scope="module")
def only_shown(run: Shown) -> Iterator[str]:
    """The same run shown through its host, as from another machine, and for reading only; the address of its page."""
    host = json.loads((run.folder / "host.json").read_text())["address"]
    command = [str(MANIPLE), "watch", host, "--token-file", str(run.folder / "token"), "--web", "--read-only"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        yield next(found[0] for line in watch.stdout if (found := re.search(r"http\S+", line)))
        watch.send_signal(signal.SIGINT)
        assert watch.wait(PATIENCE_S) == 0


@pytest.fixture(scope="module")
def browser(run: Shown) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(run: Shown, browser: Any) -> Any:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.set_default_timeout(SOON_MS)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda said: said.type == "error" and page.errors.append(said.text))
    page.goto(run.address)
    return page


def await_true(page: Any, expression: str) -> None:
    """Until it is true in the page. Not `wait_for_function`: the page forbids to evaluate words as code."""
    await_(lambda: page.evaluate(expression))


def shoot(page: Any, name: str) -> None:
    """Keep a picture of the whole page, with all charts drawn."""
    ARTEFACTS.mkdir(exist_ok=True)
    page.evaluate(
        """async () => {
            for (let y = 0; y < document.body.scrollHeight; y += 500) {
                scrollTo(0, y);
                await new Promise((wait) => setTimeout(wait, 150));
            }
            scrollTo(0, 0);
        }"""
    )
    page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)


def curve(page: Any, name: str) -> tuple[list[float], list[float]]:
    """The points that are drawn of one worker or of the center."""
    return page.evaluate(
        """(name) => {
            const trace = (document.getElementById("values").data ?? []).find((one) => one.name === name);
            return trace ? [[...trace.x], [...trace.y]] : [[], []];
        }""",
        name,
    )


def test_the_page_shows_both_workers_and_a_loss_that_falls_and_goes_on(run, page):
    await_true(page, "document.querySelectorAll('tr[data-state=training]').length === 2")
    await_true(page, "document.getElementById('values').data?.length >= 3")  # both, and the target
    await_(lambda: page.locator("#state").text_content() == "training")
    first = {
        name: await_(lambda name=name: xs if len((xs := curve(page, name))[0]) > 20 else None) for name in ("W0", "W1")
    }
    for name, (xs, _) in first.items():
        grown = await_(lambda name=name, xs=xs: now if (now := curve(page, name))[0][-1] > xs[-1] + 2 else None)
        assert grown[1][-1] < grown[1][0], "it falls"
    await_true(page, "Number(document.getElementById('total-version').innerText.match(/\\d+/)[0]) > 0")
    assert page.errors == []


def test_the_page_shows_the_target_and_when_it_was_reached(page):
    await_(lambda: re.fullmatch(r"[\d.]+ s", page.locator("#total-target_s dd span").text_content()))
    assert page.locator("#total-target_s dt").text_content() == "time to loss ≤ 0.3"
    assert curve(page, "target loss ≤ 0.3")[1] == [0.3, 0.3]
    names = "document.getElementById('values').data.map((one) => one.name)"
    mark = await_(lambda: next((name for name in page.evaluate(names) if name.startswith("reached after")), None))
    assert curve(page, mark)[1] == [0.3]


def test_each_worker_has_a_time_split_in_which_it_computes(page):
    await_(lambda: page.locator("#lane-names li").all_text_contents() == ["W0", "W1"])
    compute = "getComputedStyle(document.querySelector('.legend .compute'), '::before').backgroundColor"
    pixel = """(row) => {
        const canvas = document.getElementById("lanes"), scale = devicePixelRatio;
        const at = canvas.getContext("2d").getImageData(0.8 * canvas.width, (26 * row + 20) * scale, 1, 1).data;
        return `rgb(${at[0]}, ${at[1]}, ${at[2]})`;
    }"""
    colour = page.evaluate(compute)
    for row in (0, 1):
        await_(lambda row=row: page.evaluate(pixel, row) == colour)
    assert "2 lanes, 0 of them dead" in page.locator("#lanes").get_attribute("aria-label")


def test_values_of_the_center_axes_smoothing_and_log_scale(page):
    page.select_option("#value", "val_loss")
    await_(lambda: len(curve(page, "center")[0]) > 1)
    page.select_option("#against", "samples")
    await_(lambda: "samples" in page.evaluate("document.getElementById('values').layout.xaxis.title.text"))
    xs, _ = await_(lambda: now if (now := curve(page, "center"))[0][-1] > 500 else None)
    page.select_option("#against", "epochs")
    await_(lambda: "5000" in page.evaluate("document.getElementById('values').layout.xaxis.title.text"))
    assert 0 < curve(page, "center")[0][-1] < xs[-1] / 1000
    page.check("#log")
    page.fill("#smooth", "0.9")
    await_(lambda: page.evaluate("document.getElementById('values').layout.yaxis.type") == "log")
    page.uncheck("#log")
    page.fill("#smooth", "0")
    page.select_option("#value", "loss")
    page.select_option("#against", "time")
    await_(lambda: curve(page, "W1")[0])
    page.uncheck("#worker-0 input")
    await_(lambda: not curve(page, "W0")[0] and curve(page, "W1")[0])
    page.check("#all")
    await_(lambda: curve(page, "W0")[0])
    assert page.errors == []


def test_the_token_leaves_the_address_and_a_cookie_holds_it(run, page):
    assert page.url == f"{run.base}/"
    (cookie,) = page.context.cookies()
    assert (cookie["value"], cookie["httpOnly"], cookie["sameSite"]) == (run.token, True, "Strict")
    assert page.evaluate("document.cookie") == ""


def test_the_keyboard_reaches_every_control(page):
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reached: list[str] = []
    for _ in range(40):  # all around, from wherever it begins
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.closest('tr')?.id || ''"))
    wanted = {
        "snapshot",
        "change",
        "stop",
        "theme",
        "value",
        "against",
        "smooth",
        "log",
        "all",
        "worker-0",
        "worker-1",
        "span",
    }
    assert wanted <= set(reached)
    page.focus("#theme")
    outline = page.evaluate("getComputedStyle(document.getElementById('snapshot')).outlineStyle")
    page.keyboard.press("Shift+Tab")
    assert outline == "none" and page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_alpha_changed_in_the_page_is_followed_by_the_workers(run, page):
    page.click("#change")
    assert page.locator("#change-box").is_visible()
    assert page.input_value("#set-alpha") == "auto"
    page.fill("#set-alpha", "7")
    page.keyboard.press("Enter")
    await_(lambda: "alpha" in page.locator("#change-box .answer").text_content())  # refused, in words
    page.fill("#set-alpha", "0.25")
    page.fill("#set-pace", "5")
    page.keyboard.press("Enter")
    await_true(page, "!document.getElementById('change-box').open")
    for rank in (0, 1):
        row = run.await_event(rank, "changed")[-1]
        assert row["settings"] == {"alpha": 0.25, "every": 5}
        assert "alpha=0.25" in row["rule"] and row["pace"] == "Every(5)"
    await_(lambda: "alpha=0.25" in page.locator("dd[data-name='rule now']").text_content())
    await_(lambda: "changed alpha = 0.25, every = 5" in page.locator("#events").text_content())
    assert page.errors == []


def test_a_snapshot_is_written_when_the_page_asks_for_it(run, page):
    page.click("#snapshot")
    await_(lambda: "saved: snapshot-" in page.locator("#notice").text_content())
    assert (run.folder / "center" / page.locator("#notice").text_content().split()[-1]).is_dir()


@pytest.mark.parametrize("width", [1650, 1440, 1350, 1300, 1000, 761])
def test_no_column_of_the_workers_is_cut_off(page, width):
    before = page.viewport_size
    page.set_viewport_size({"width": width, "height": 1000})
    await_(lambda: page.evaluate("document.documentElement.scrollWidth") <= width)
    needed, given = page.evaluate(
        """() => {
            const state = "waiting for workers 0, 1, 3 (1234 s)";
            const texts = [state, "2,456,655", "3.43M", "2.307e-7", "12.3 %", "1234.5", "64.00", "123 GB"];
            const cells = [...document.getElementById("worker-0").cells].slice(1);
            const old = cells.map((cell) => cell.textContent);
            cells.forEach((cell, i) => { cell.textContent = texts[i]; });
            const box = document.getElementById("workers").parentElement, sizes = [box.scrollWidth, box.clientWidth];
            cells.forEach((cell, i) => { cell.textContent = old[i]; });
            return sizes;
        }"""
    )
    page.set_viewport_size(before)
    assert needed <= given


def test_pictures_for_a_person(run, page, browser):
    shoot(page, "page-light")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 22)"
    shoot(page, "page-dark")
    page.click("#theme")
    phone = browser.new_page(viewport={"width": 390, "height": 844})
    phone.goto(run.address)
    phone.wait_for_selector("#values[data-points]", timeout=SOON_MS)
    shoot(phone, "page-phone")
    assert phone.evaluate("document.documentElement.scrollWidth") == 390, "nothing sticks out"
    phone.close()
    assert page.errors == []


def test_only_who_knows_the_token_may_look(run, browser):
    import httpx

    with httpx.Client(base_url=run.base) as client:
        for path in ("/", "/?token=wrong", "/updates", "/metrics", "/plotly.js", "/page/page.js", "/nowhere"):
            answer = client.get(path)
            assert answer.status_code == 403 and "token" in answer.text
        known = {"Authorization": f"Bearer {run.token}"}
        assert client.get("/metrics", headers=known).text.startswith("# HELP maniple_worker_step")
        assert 'worker="1"' in client.get(f"/metrics?token={run.token}").text
        assert client.get("/page/../site.py", headers=known).status_code == 404
        # A name that somebody else lets point at this machine.
        assert client.get("/", headers=known | {"Host": "evil.example"}).status_code == 403
        assert client.get("/", headers=known | {"Host": "localhost:9"}).status_code == 200
    stranger = browser.new_page()
    assert stranger.goto(f"{run.base}/?token=wrong").status == 403
    assert "maniple watch RUN --web" in stranger.locator("body").text_content()
    stranger.close()


def test_orders_come_from_the_page_alone(run):
    import httpx

    known = {"Cookie": f"maniple-{run.base.rpartition(':')[2]}={run.token}"}
    with httpx.Client(base_url=run.base) as client:
        for headers in ({}, {"X-Maniple": "1", "Origin": "http://evil.example"}):
            answer = client.post("/commands", headers=known | headers, json={"command": "stop"})
            assert answer.status_code == 403
        own = known | {"X-Maniple": "1", "Origin": run.base}
        assert client.post("/commands", headers={"X-Maniple": "1"}, json={"command": "stop"}).status_code == 403
        assert client.post("/commands", headers=own, content=b"{").status_code == 400
        answer = client.post("/commands", headers=own, json={"command": "change", "settings": {"beta": 1}}).json()
        assert not answer["done"] and "'beta' cannot be changed" in answer["text"]
    assert run.process.poll() is None


def test_a_page_for_reading_only_takes_no_orders(only_shown, browser):
    import httpx

    page = browser.new_page()
    page.goto(only_shown)
    await_true(page, "document.querySelectorAll('tr[data-state=training]').length === 2")
    assert not page.locator("#commands").is_visible()
    base, _, token = only_shown.partition("/?token=")
    headers = {"Authorization": f"Bearer {token}", "X-Maniple": "1"}
    answer = httpx.post(f"{base}/commands", headers=headers, json={"command": "stop"}).json()
    assert not answer["done"] and "--read-only" in answer["text"]
    page.close()


def test_the_terminal_shows_a_run_through_its_host(run, tmp_path):
    host = json.loads((run.folder / "host.json").read_text())["address"]
    command = [str(MANIPLE), "watch", "--once", "--json", host, "--token-file"]
    done = subprocess.run([*command, str(run.folder / "token")], capture_output=True, text=True, timeout=PATIENCE_S)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert [one["state"] for one in printed["workers"]] == ["training", "training"]
    (tmp_path / "token").write_text("another")
    done = subprocess.run([*command, str(tmp_path / "token")], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0 and "token" in done.stderr and "Traceback" not in done.stderr


def test_a_page_that_is_killed_comes_back_and_the_run_goes_on(run, page):
    children = Path(f"/proc/{run.process.pid}/task")
    pids = {int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()}
    (pid,) = [pid for pid in pids if b"maniple.watch" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(pid, signal.SIGKILL)
    await_(lambda: "lost the server" in page.locator("#state").text_content())
    steps = run.events(0, "progress")[-1]["step"]
    await_(lambda: page.locator("#state").text_content() == "training")
    assert run.await_event(0, "progress")[-1]["step"] > steps
    assert all("net::ERR_" in error for error in page.errors)  # the browser's own words for a server that is away
    page.errors.clear()


def test_a_dead_worker_is_seen_within_three_seconds_and_so_is_the_end(run, page):
    page.evaluate(
        """() => new MutationObserver(() => {
            if (document.getElementById("worker-1").dataset.state === "dead") window.seenAt ??= Date.now() / 1000;
        }).observe(document.getElementById("worker-1"), { attributes: true })"""
    )
    killed_at = time.time()
    os.kill(run.pid(1), signal.SIGKILL)
    await_true(page, "window.seenAt")
    assert page.evaluate("window.seenAt") - killed_at < 3
    await_true(page, "document.querySelector('#lane-names li[data-is-bad]')?.textContent === 'W1 dead'")
    assert run.wait() == 1
    await_(lambda: page.locator("#state").text_content() == "ended with exit code 1")
    assert "worker 1 died, killed by signal 9" in page.locator("#events").text_content()
    shoot(page, "page-dead")
    assert page.locator("#lane-names li[data-is-bad]").count() == 1
    assert [error for error in page.errors if "net::ERR_" not in error] == []
    assert json.loads((run.folder / "run.json").read_text())["exit_code"] == 1
