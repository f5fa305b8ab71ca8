"""The program that trains or validates a model on one worker: python -m maniple.model FILE.py:CLASS"""

import argparse
import sys
from pathlib import Path
from types import TracebackType

from maniple.errors import InvalidArgument, ManipleError
from maniple.model.contract import load_class, make
from maniple.model.loop import Loop
from maniple.model.validation import validate_saved
from maniple.user_class import parse_arguments
from maniple.worker import join


def main() -> None:
    """Run the command line. An error of maniple is printed as a message, and sets the exit code."""
    options = _parser().parse_args()
    sys.excepthook = _print_error  # before joining: the worker records an error and passes it on to this hook
    try:
        _run(options)
    except ManipleError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(error.exit_code)


def _run(options: argparse.Namespace) -> None:
    worker = join()
    config = {
        "worker": worker,
        "rank": worker.rank,
        "size": worker.world,
        "device": worker.device,
        "seed": worker.seed,
        "verbose": worker.rank == 0,
    }
    given = parse_arguments(options.model_arg, "--model-arg")
    model = make(load_class(options.spec), config | given)
    if options.validate:
        validate_saved(model, options.validate, options.other, options.steps)
        return
    if options.other is not None:
        raise InvalidArgument("--with is the second end of a line that begins at --validate. Add --validate PATH.")
    epochs = getattr(model, "snapshot_epochs", 0) if options.snapshot_epochs is None else options.snapshot_epochs
    Loop(model, worker, snapshot_epochs=int(epochs), is_shown=worker.rank == 0).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maniple.model",
        description="Train the model of a class, alone or as a worker of `maniple run --model`; or validate saved "
        "models.",
    )
    parser.add_argument("spec", metavar="FILE.py:CLASS", help="the model's class")
    parser.add_argument("--model-arg", action="append", default=[], metavar="NAME=VALUE", help="add an entry to config")
    parser.add_argument("--snapshot-epochs", type=int, metavar="K", help="save a snapshot after every K epochs")
    parser.add_argument(
        "--validate", type=Path, nargs="+", default=[], metavar="PATH", help="validate these snapshots or files"
    )
    parser.add_argument("--with", dest="other", type=Path, metavar="PATH", help="and points on the line to this one")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="points on the line, ends included (5)")
    return parser


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of maniple without its traceback."""
    if isinstance(error, ManipleError):
        print(f"maniple: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


main()
