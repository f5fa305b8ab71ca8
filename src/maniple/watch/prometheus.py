"""Metrics of a run for Prometheus: the path /metrics of its page."""

from collections.abc import Iterable

from maniple.monitor import RunState, WorkerState
from maniple.monitor.measures import MEASURES, RUN_MEASURES

STATES = ("queued", "starting", "training", "done", "stopped", "ended", "failed", "killed", "dead", "lost")


def metrics_text(state: RunState, run: str) -> str:
    """The measures of a run in the text format 0.0.4 of Prometheus."""
    labels = f'run="{_escape(run)}"'
    workers = sorted(state.workers.items())
    lines: list[str] = []
    for measure in MEASURES:
        values = ((f'{labels},worker="{rank}"', measure.of(worker)) for rank, worker in workers)
        kind, suffix = ("counter", "_total") if measure.is_counter else ("gauge", "")
        lines += _family(f"maniple_worker_{measure.name}{suffix}", kind, measure.help, values)
    lines += _family("maniple_worker_state", "gauge", "1 for the worker's present state.", _states(labels, workers))
    totals = state.totals()
    for measure in RUN_MEASURES:
        value = getattr(totals, measure.name)
        lines += _family(f"maniple_run_{measure.name}", "gauge", measure.help, [(labels, value)])
    return "\n".join(lines) + "\n"


def _states(labels: str, workers: list[tuple[int, WorkerState]]) -> Iterable[tuple[str, int]]:
    for rank, worker in workers:
        for state in STATES:
            yield f'{labels},worker="{rank}",state="{state}"', int(worker.state == state)


def _family(name: str, kind: str, text: str, values: Iterable[tuple[str, float | None]]) -> list[str]:
    if name.endswith("_s"):  # units are written out
        name += "econd" if name.endswith("_per_s") else "econds"
    known = [f"{name}{{{labels}}} {float(value):.10g}" for labels, value in values if value is not None]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *known] if known else []


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
