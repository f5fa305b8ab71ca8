"""The subject: the run that is watched, in its folder here or mirrored from another machine."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from maniple.errors import HostAway, InvalidArgument, ManipleError
from maniple.host.reach import reach_to_watch
from maniple.launch.whereabouts import Whereabouts, find_host
from maniple.record import Folder
from maniple.watch.mirror import Mirror
from maniple.watch.steering import Steering


class Subject:
    """A run that is watched from here; close it by a `with` block.

    Attributes:
        name: of the run, or where its host is.
        folder: with its rows; `bring` brings it up to date.
    """

    def __init__(self, host: str, token_file: Path | None = None, certificate: Path | None = None) -> None:
        self.name = host
        self._reach: Callable[[], Steering] = lambda: Steering(reach_to_watch(host, token_file, certificate))
        self._mirror: Mirror | None = None
        self._close = ExitStack()
        run = Path(host)
        if run.is_dir():
            if not (run / "run.json").exists():
                raise InvalidArgument(f"{run} is no run folder: it has no run.json. Give runs/NAME or runs/last.")
            self.folder, self.name = Folder(run.resolve()), run.resolve().name
            return
        if ":" not in host:
            raise InvalidArgument(f"{host} is no run folder, and no HOST:PORT. Give runs/NAME, runs/last or HOST:PORT.")
        place = reach_to_watch(host, token_file, certificate)
        path = Path(self._close.enter_context(tempfile.TemporaryDirectory(prefix="maniple-watch-")))
        self._mirror, self.folder = Mirror(place, path), Folder(path)
        self._close.callback(self._mirror.close)
        self._find()

    def __enter__(self) -> "Subject":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close.close()

    def _find(self) -> None:
        """See the host once, so that a wrong address or token is told at the beginning; later it may be away."""
        try:
            self.bring()
        except BaseException:
            self._close.close()
            raise
        if self._mirror is not None and self._mirror.is_away:
            self._close.close()
            raise HostAway(f"no host answers at {self.name}: {self._mirror.away}. Check the address, or give a folder.")

    def bring(self) -> None:
        """Bring the folder up to date, if the run is elsewhere."""
        if self._mirror is not None:
            self._mirror.refresh()

    @property
    def is_elsewhere(self) -> bool:
        """Its folder is not seen from here."""
        return self._mirror is not None

    @property
    def is_over(self) -> bool:
        """A host elsewhere has ended the run; of one whose folder is here its rows tell."""
        return self._mirror is not None and self._mirror.is_over

    def where(self) -> Whereabouts:
        """What is known of the host. It may take some seconds to answer."""
        if self._mirror is None:
            return find_host(self.folder.path)
        if self._mirror.is_over:
            return Whereabouts("has ended the run", has_ended=True)
        if self._mirror.is_away:
            return Whereabouts(f"does not answer: {self._mirror.away}")
        return Whereabouts(f"is alive, listening on {self.name}", is_alive=True)

    def steering(self) -> Steering:
        """By which its host is given orders; ManipleError if it cannot be reached."""
        return self._reach()


def told(act: Callable[[], str]) -> tuple[bool, str]:
    """Do something that a person has asked for; gives whether it was done, and what is to be said of it."""
    try:
        return True, act()
    except ManipleError as error:
        return False, str(error)
