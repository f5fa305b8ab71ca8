"""The messages between a doctor and a host."""

from maniple.wire.said import Said


class Examine(Said, frozen=True, tag=60):
    """Doctor: how are you?"""


class Examined(Said, frozen=True, tag=61):
    """Host: my clock says `time`, and so many workers are alive; versions and centers are in the payload, as JSON."""

    time: float
    node: str
    live: int


class Echo(Said, frozen=True, tag=62):
    """Doctor: say after me what is in the payload. Host: I do."""


DoctorMessage = Examine | Examined | Echo
