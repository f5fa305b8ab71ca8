"""The program that trains or validates a model on one worker: python -m maniple.model FILE.py:CLASS"""

import argparse
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from maniple.errors import InvalidArgument, ManipleError
from maniple.model.contract import Model, load_class, make
from maniple.model.loop import Loop
from maniple.model.saved import validate_again
from maniple.spec import arguments
from maniple.worker import Worker, join


def main(words: list[str] | None = None) -> None:
    """Do what the command line asks for; an error of ours is a message and its exit code."""
    asked = _parser().parse_args(words)
    sys.excepthook = _tell  # before joining: the worker notes an error, and hands it on to this
    try:
        _act(asked)
    except ManipleError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(error.exit_code)


def _act(asked: argparse.Namespace) -> None:
    worker = join()
    settings = arguments(asked.model_arg, "--model-arg")
    kind = load_class(asked.spec)
    model = make(kind, configuration(worker) | settings)
    if asked.validate:
        validate_again(model, asked.validate, asked.other, asked.steps)
        return
    if asked.other is not None:
        raise InvalidArgument("--with is the other end of a way that begins at --validate. Add --validate PATH.")
    Loop(model, worker, snapshot_epochs=_snapshot_epochs(asked, model), is_shown=worker.rank == 0).run()


def configuration(worker: Worker) -> dict[str, Any]:
    """What a model's constructor is told."""
    return {
        "worker": worker,
        "rank": worker.rank,
        "size": worker.world,
        "device": worker.device,
        "seed": worker.seed,
        "verbose": worker.rank == 0,
    }


def _snapshot_epochs(asked: argparse.Namespace, model: Model) -> int:
    epochs = getattr(model, "snapshot_epochs", 0) if asked.snapshot_epochs is None else asked.snapshot_epochs
    return int(epochs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maniple.model",
        description="Train the model of a class, alone or as the worker that `maniple run --model` has started; or "
        "validate what was saved of it.",
    )
    parser.add_argument("spec", metavar="FILE.py:CLASS", help="the model's class")
    parser.add_argument(
        "--model-arg", action="append", default=[], metavar="NAME=VALUE", help="one more entry of config"
    )
    parser.add_argument("--snapshot-epochs", type=int, metavar="K", help="keep a snapshot after every K epochs")
    parser.add_argument(
        "--validate", type=Path, nargs="+", default=[], metavar="PATH", help="validate these snapshots or files"
    )
    parser.add_argument("--with", dest="other", type=Path, metavar="PATH", help="and all on the way to this one")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="points on the way, ends included (5)")
    return parser


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An error of ours needs no traceback."""
    if isinstance(error, ManipleError):
        print(f"maniple: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
