"""Limits: when the controller lets everybody validate and stop."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from maniple.errors import InvalidArgument
from maniple.place.variables import number, seconds


@dataclass(frozen=True)
class Limits:
    """When the controller lets everybody validate and stop; 0 is never."""

    max_batches: int = 0  # over all workers
    max_epochs: int = 0
    total_duration: float = 0.0  # seconds
    validate_every: int = 0  # batches, over all workers
    patience: int = 0  # validations that bring nothing better

    def check(self) -> None:
        """Raise InvalidArgument if it makes no sense."""
        for name, value in asdict(self).items():
            if not 0 <= value < 1e15:
                option = name.replace("_", "-")
                raise InvalidArgument(f"--{option} {value} is no limit. Give a number above 0, or leave it out.")


def asked_limits(env: Mapping[str, str] = os.environ) -> Limits:
    """The limits that the environment tells."""
    limits = Limits(
        max_batches=number(env, "MANIPLE_MAX_BATCHES", 0),
        max_epochs=number(env, "MANIPLE_MAX_EPOCHS", 0),
        total_duration=seconds(env, "MANIPLE_TOTAL_DURATION", 0.0),
        validate_every=number(env, "MANIPLE_VALIDATE_EVERY", 0),
        patience=number(env, "MANIPLE_PATIENCE", 0),
    )
    limits.check()
    return limits
