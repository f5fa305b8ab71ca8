"""News of a run, and what Prometheus is told: nothing is sent twice, and nothing is left out."""

import json
from base64 import b64decode

import numpy as np
import pytest

from maniple.story import Story
from maniple.watch.metrics import metrics_text
from maniple.watch.news import COLUMNS, News
from tests.unit.test_story import T0, Written


class Viewer:
    """Puts news together, as the page does."""

    def __init__(self) -> None:
        self.small: dict = {}
        self.curves: dict = {}
        self.lanes: dict = {}
        self.happened: list = []
        self.received = 0

    def hear(self, news: bytes) -> None:
        self.received += len(news)
        told = json.loads(news)
        if "since" in told:
            self.__init__()
        for kind, name, rank, first, *points in told.pop("curves", []):
            known = self.curves.get((kind, name, rank), [np.empty(0)] * 2)
            self.curves[kind, name, rank] = [
                np.r_[old[:first], numbers(new)] for old, new in zip(known, points, strict=True)
            ]
        for rank, first, stretches in told.pop("lanes", []):
            known = self.lanes.get(rank, np.empty((0, 6)))
            self.lanes[rank] = np.r_[known[:first], numbers(stretches).reshape(-1, 6)]
        self.happened += told.pop("happened", [])
        self.small |= told


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), np.float32)


@pytest.fixture
def written(tmp_path) -> Written:
    return Written(tmp_path / "run")


def write(written: Written, i: int) -> None:
    for rank in (0, 1):
        if i == 0:
            written.row(rank, "join", 0.0, node="a")
        written.row(rank, "log", i + 1, step=i, loss=1 / (i + 1))
        written.progress(rank, i + 1, step=i, samples=10 * i, exchange=0.1 * i, cpu=0.5 * i, ages=[1, 2])
    if i % 10 == 0:
        written.row("server", "joined", i, worker=0, live=2)


def test_news_add_up_to_what_is_told_at_once(written):
    story = Story(written.folder, limit=20)  # so that points are dropped again and again
    news, viewer = News(), Viewer()
    for i in range(200):
        write(written, i)
        story.refresh()
        viewer.hear(news.tell(story, {"name": "run"}))
    whole = Viewer()
    whole.hear(News().tell(story, {"name": "run"}))
    assert viewer.small == whole.small
    assert viewer.happened == whole.happened
    assert (
        viewer.curves.keys()
        == whole.curves.keys()
        >= {("logged", "loss", 0), ("measured", "cores", 1), ("live", "live", 0)}
    )
    for key, points in whole.curves.items():
        np.testing.assert_array_equal(viewer.curves[key], points)
    np.testing.assert_array_equal(viewer.lanes[1], whole.lanes[1])
    xs, ys = story.logged.named["loss"][0].points()
    np.testing.assert_allclose(whole.curves["logged", "loss", 0], [np.array(xs) - T0, ys], rtol=1e-6)


def test_what_has_not_changed_is_not_sent_again(written):
    for i in range(50):
        write(written, i)
    story, news = written.story(), News()
    assert len(news.tell(story, {"name": "run"})) > 1000
    assert news.tell(story, {"name": "run"}) == b"{}"
    written.row(0, "log", 60, step=60, loss=0.5)
    story.refresh()
    assert json.loads(news.tell(story, {"name": "run"})).keys() == {"curves", "run", "totals", "workers", "clock"}


def test_an_earlier_beginning_begins_anew(written):
    write(written, 0)
    story, news, viewer = written.story(), News(), Viewer()
    viewer.hear(news.tell(story, {}))
    written.row(2, "join", -5.0)
    story.refresh()
    viewer.hear(news.tell(story, {}))
    assert viewer.curves["logged", "loss", 0][0].tolist() == [6.0]
    assert [row[0] for row in viewer.small["workers"]] == [0, 1, 2]


def test_a_run_of_which_nothing_is_known_has_news(written):
    viewer = Viewer()
    viewer.hear(News().tell(Story(written.folder, workers=2), {}))
    assert [row[1] for row in viewer.small["workers"]] == ["starting", "starting"]
    assert len(viewer.small["workers"][0]) == 1 + len(COLUMNS)


def test_metrics_are_in_the_format_of_prometheus(written):
    write(written, 0)
    written.progress(0, 2.0, step=30, samples=320, bytes=1000, memory=4096, staleness=2.5)
    written.row("host", "exit", 2, worker=1, exit_code=-9, died=True)
    text = metrics_text(written.story(), 'a "run"')
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values[r'maniple_worker_step{run="a \"run\"",worker="0"}'] == "30"
    assert values[r'maniple_worker_samples_per_second{run="a \"run\"",worker="0"}'] == "320"
    assert values[r'maniple_worker_state{run="a \"run\"",worker="1",state="dead"}'] == "1"
    assert values[r'maniple_run_workers{run="a \"run\""}'] == "2"
    assert r'maniple_worker_staleness{run="a \"run\"",worker="1"}' not in values  # nothing is known of it
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert text.endswith("\n")
