"""The controller: decides when everybody trains, validates and stops, and answers whatever else workers ask."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from maniple.decisions import Decisions, Holder
from maniple.errors import InvalidArgument


class Controller:
    """Answers `worker.ask(request, **info)`. This one is the default; derive from it and override `handle_control`.

    It knows four requests:

        next       info: done (batches made since the last time; not needed where a model is shared)
                   answer: "train", "validate" (you alone; look at the center) or "stop"
        validated  info: loss (of the center); published (the center is exactly what was validated; the worker adds it)
                   answer: {"best": true if it was the best so far, "stop": true if it was the last}
                   or info: means, weight, batches, of, epoch: what was found on a part of the data. The answer has
                   the means over all parts as `means` once they make `of` batches
        keep       info: epoch. Keep the center as a snapshot; answer: {"name": "epoch-0003"}, in the run's folder
                   `center`, for the first who asks, and None for all others
        stop       info: reason. Everybody stops

    Questions come one at a time, from all workers. An exception in the handler is raised where the question was
    asked, and the run goes on.

    Attributes:
        state: whatever the controller should remember, as JSON knows it (dicts with words as keys, lists, numbers).
            It outlives the controller's process, and snapshots have it. Other attributes do neither.
    """

    state: dict[str, Any]
    decisions: Decisions
    asking: Holder  # who asks the question being answered: rank and incarnation
    is_finished: bool  # the samples of who asks have come to their end

    def __init_subclass__(cls, **settings: Any) -> None:
        """Refuse a handler that cannot be called, where it is defined and not at the first question."""
        super().__init_subclass__(**settings)
        handler = inspect.getattr_static(cls, "handle_control")
        wants = "handle_control(self, request, worker, info): the request, the rank of who asks, and a dict"
        if not inspect.isfunction(handler) or inspect.iscoroutinefunction(handler):
            kind = "a coroutine" if inspect.iscoroutinefunction(handler) else f"a {type(handler).__name__}"
            raise InvalidArgument(
                f"{cls.__qualname__}.handle_control is {kind}, and cannot answer questions. Define a method {wants}."
            )
        signature = inspect.signature(handler)
        try:
            signature.bind(None, "", 0, {})
        except TypeError as error:
            raise InvalidArgument(
                f"{cls.__qualname__}.handle_control{signature} cannot be called with three arguments ({error}). Define "
                f"it as {wants}."
            ) from None

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Ready to use, whether or not a derived class calls this one's `__init__`."""
        del args, settings
        self = super().__new__(cls)
        self.state = {}
        self.decisions = Decisions()
        self.asking, self.is_finished = (-1, 0), False
        return self

    def handle_control(self, request: str, worker: int, info: Mapping[str, Any]) -> Any:
        """The answer to a question of rank `worker`: anything that JSON knows."""
        del worker
        return self.decisions.answer(self.asking, request, info, is_finished=self.is_finished)

    def stop(self, reason: str = "") -> None:
        """Let all workers stop, each at its next look."""
        self.decisions.stop(reason)

    @property
    def is_stopping(self) -> bool:
        """Somebody has said stop, or a limit is reached."""
        return bool(self.decisions.known.reason)

    @property
    def batches(self) -> int:
        """The batches that all workers have made."""
        return self.decisions.batches

    @property
    def samples(self) -> int:
        """The samples that all workers have seen."""
        return self.decisions.samples

    @property
    def live(self) -> int:
        """The workers alive now."""
        return 0 if self.decisions.powers is None else self.decisions.powers.live

    def serve(self, port: int = 0, *, host: str = "127.0.0.1", name: str | None = None, runs: str = "runs") -> None:
        """Be the host of a run in this very process, until Ctrl-C or SIGTERM; workers join by `maniple.join(address)`.

        Address and token are written to the run folder, as `maniple serve` does; but if this process is killed,
        nobody starts it again, and `maniple serve --resume` does not know this controller.
        """
        from maniple.controller.alone import serve

        serve(self, port, host=host, name=name, runs=Path(runs))
