"""Steering: orders to the host of a run that goes on."""

import json
import os
import pwd
import time
from contextlib import closing
from typing import Any

from maniple.center.link import Door, checked
from maniple.errors import BadFrame, HostAway, InvalidArgument, ManipleError
from maniple.place import Place
from maniple.wire.messages import Message
from maniple.wire.proof import introduce
from maniple.wire.stream import Stream, connect
from maniple.wire.watching import Done, Order

_CONNECT_S = 5.0
TIMEOUT_S = 60.0
SAVING_S = 900.0  # a large center takes its time to be written


class Steering:
    """Gives orders to the host of `place`, each by a connection of its own. A host that is away: HostAway."""

    def __init__(self, place: Place, *, who: str | None = None) -> None:
        self._door = Door.of(place)
        self._who = who or _myself()

    def stop(self) -> str:
        """End the run, as `maniple stop` does, and do not wait for it; gives what the host says."""
        return self._order("stop", TIMEOUT_S)

    def snapshot(self, timeout_s: float = SAVING_S) -> str:
        """Write a snapshot now; gives its name."""
        return self._order("snapshot", timeout_s)

    def change(self, settings: dict[str, Any]) -> str:
        """Change settings of the rule or the pace while training goes on; gives what the host says.

        InvalidArgument if the rule that the workers share has no such setting, or not such a value.
        """
        try:
            said = json.dumps(settings, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{settings} cannot be sent: {error}. Give finite numbers, words, true, false or null."
            ) from None
        return self._order("change", TIMEOUT_S, said)

    def _order(self, what: str, timeout_s: float, said: bytes = b"") -> str:
        address = self._door.newest
        try:
            with closing(connect(address, timeout_s=_CONNECT_S, tls=self._door.tls)) as stream:
                answer = checked(self._say(stream, Order(what, self._who), said, timeout_s))
        except ManipleError:
            raise
        except OSError as error:
            raise HostAway(
                f"the host at {address} has not answered {what!r}: {error}. It may be away or have ended: look at "
                "`maniple status RUN`, and try again."
            ) from error
        if not isinstance(answer, Done):
            raise BadFrame(f"the host was told to {what}, and said something else.")
        return answer.text

    def _say(self, stream: Stream, order: Order, said: bytes, timeout_s: float) -> Message:
        introduce(stream, self._door.token, "watch", self._door.worker, timeout_s=_CONNECT_S)
        stream.set_timeout(timeout_s)
        stream.send(order, said)
        return stream.receive_message(deadline=time.monotonic() + timeout_s)


def _myself() -> str:
    """USER@NODE: who gives the orders."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename}"
