"""What a run tells Prometheus: its standings and totals, in the text format 0.0.4."""

from collections.abc import Callable, Iterable

from maniple.story import Standing, Story

STATES = ("queued", "starting", "training", "done", "stopped", "ended", "failed", "killed", "dead", "lost")
# Name, kind, help, and what it is of a worker; None is not told.
_OF_WORKERS: tuple[tuple[str, str, str, Callable[[Standing], float | None]], ...] = (
    ("step", "gauge", "Steps of this life of the worker.", lambda one: one.now.step),
    ("samples_total", "counter", "Samples of all its lives.", lambda one: one.total.samples),
    ("samples_per_second", "gauge", "Samples per second, now.", lambda one: one.samples_per_s),
    ("loss", "gauge", "The newest loss that it has logged.", lambda one: one.loss),
    ("sync_share", "gauge", "The share of its time spent in exchanges.", lambda one: one.sync_share),
    ("staleness", "gauge", "How many exchanges of others its parameters missed.", lambda one: one.staleness),
    ("exchanges_total", "counter", "Exchanges with the center.", lambda one: one.total.exchanges),
    ("rounds_total", "counter", "Rounds with all workers.", lambda one: one.total.rounds),
    ("bytes_total", "counter", "Bytes of exchanges and rounds.", lambda one: one.total.bytes),
    ("memory_bytes", "gauge", "Memory of its process.", lambda one: one.memory_bytes),
    ("cores", "gauge", "Processors that it keeps busy.", lambda one: one.cores),
)
_TOTALS = {
    "workers": "Workers that belong to the run.",
    "live": "Workers that train.",
    "samples": "Samples of all workers.",
    "samples_per_s": "Samples per second of all workers, now.",
    "busy_workers": "How many workers are busy computing, in the mean.",
    "goodput": "The part of all workers' time spent for training itself.",
    "sync_share": "The part of it spent in exchanges.",
    "version": "How many exchanges or rounds have changed the center.",
}


def metrics_text(story: Story, run: str) -> str:
    """All of it."""
    lines: list[str] = []
    standings = sorted(story.standings.items())
    for name, kind, text, of in _OF_WORKERS:
        values = ((f'run="{_quoted(run)}",worker="{rank}"', of(one)) for rank, one in standings)
        lines += _family(f"maniple_worker_{name}", kind, text, values)
    lines += _family("maniple_worker_state", "gauge", "1 for the state that it is in.", _states(run, standings))
    totals = story.totals()
    for name, text in _TOTALS.items():
        own = f"maniple_run_{name.replace('_per_s', '_per_second')}"
        lines += _family(own, "gauge", text, [(f'run="{_quoted(run)}"', getattr(totals, name))])
    return "\n".join(lines) + "\n"


def _states(run: str, standings: list[tuple[int, Standing]]) -> Iterable[tuple[str, int]]:
    for rank, one in standings:
        for state in STATES:
            yield f'run="{_quoted(run)}",worker="{rank}",state="{state}"', int(one.state == state)


def _family(name: str, kind: str, text: str, values: Iterable[tuple[str, float | None]]) -> list[str]:
    told = [f"{name}{{{labels}}} {float(value):.10g}" for labels, value in values if value is not None]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *told] if told else []


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
