"""The run folder.

runs/<name>/run.json        what was asked, versions, lineage, how it ended
            events/*.jsonl  the rows of each process; a large file is followed by another
            logs/*.log      what each process printed
            center/         the shared parameters, as snapshots
            optimizer/      the state of each worker's optimizer
            token           by which workers elsewhere and the host know each other; readable by its owner alone
            host.json       where the host listens
            stop            `maniple stop` has left it: the run is to end
            submit.json     what was asked of a batch queue, if the run was submitted to one, and the ids of its jobs
runs/last -> <name>
"""

import errno
import itertools
import json
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from maniple.errors import InvalidArgument, require_printable
from maniple.record.rows import Moment

SUBMITTED = "submit.json"
_STOP = "stop"


class _Described(msgspec.Struct):
    """The parts of run.json that readers look into."""

    asked: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    lineage: str | None = None
    exit_code: int | None = None
    ended: Moment | None = None


class Folder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[Path, str] | None = None  # of a new one: the link `last`, and what it pointed at before

    @classmethod
    def create(cls, root: Path, name: str) -> "Folder":
        """Make `root/name`, which must be new, and point `root/last` at it."""
        if not name or name in {".", "..", "last"} or "/" in name:
            raise InvalidArgument(f"{name!r} cannot name a run. Use letters, digits, '-', '_' and '.', not 'last'.")
        require_printable("the run's name", name)
        folder = cls((root / name).resolve())
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            raise InvalidArgument(
                f"the run folder {folder.path} exists already, and a run never overwrites another. "
                "Choose another --name, or move the old folder away."
            ) from None
        except OSError as error:
            raise InvalidArgument(
                f"the run folder {folder.path} cannot be made: {error.strerror}. Choose another place with --runs."
            ) from error
        for part in ("events", "logs", "center"):
            (folder.path / part).mkdir()
        sync_folder(folder.path)
        link = root / "last"
        folder._last = link, str(link.readlink()) if link.is_symlink() else ""
        point(link, name)
        return folder

    def discard(self) -> None:
        """Remove the folder of a run that could not begin; `last` points at the run before it again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._last is not None:
            link, before = self._last
            with suppress(OSError):
                if str(link.readlink()) != self.path.name:
                    return  # another run has begun meanwhile
                if before and (link.parent / before).exists():
                    point(link, before)
                else:
                    link.unlink()

    @property
    def center(self) -> Path:
        """Where snapshots of the center lie."""
        return self.path / "center"

    @property
    def optimizer(self) -> Path:
        """Where workers save the state of their optimizers."""
        return self.path / "optimizer"

    def optimizers(self, pattern: str = "center-*") -> list[Path]:
        """The files there."""
        return sorted(self.optimizer.glob(pattern))

    def events(self, who: int | str) -> Path:
        """The rows of worker `who`, or of the host."""
        return self.path / "events" / f"{_name(who)}.jsonl"

    def ranks(self) -> list[int]:
        """The ranks of all workers that ever wrote a row."""
        names = (path.stem.partition("-")[2] for path in (self.path / "events").glob("worker-*.jsonl"))
        return sorted(int(name) for name in names if name.isdigit())

    def log(self, who: int | str) -> Path:
        """What worker `who`, or the host, printed."""
        return self.path / "logs" / f"{_name(who)}.log"

    @property
    def is_submitted(self) -> bool:
        """A batch queue was asked to start its workers."""
        return (self.path / SUBMITTED).exists()

    @property
    def is_stopped(self) -> bool:
        """Somebody wants the run to end."""
        with suppress(OSError):  # a file system that does not answer must not end the run
            return (self.path / _STOP).exists()
        return False

    def stop(self) -> None:
        """Say that the run is to end: its host looks for that, wherever it is."""
        try:
            (self.path / _STOP).touch()
        except OSError as error:
            raise InvalidArgument(
                f"{self.path} cannot be written ({error.strerror}), and there its host looks for the word to end. Make "
                "room, or call this as its owner."
            ) from None

    def unstop(self) -> None:
        """The run goes on after all."""
        (self.path / _STOP).unlink(missing_ok=True)

    def describe(self, **values: Any) -> None:
        """Merge `values` into run.json."""
        write_json(self.path / "run.json", self.read() | values)

    def read(self) -> dict[str, Any]:
        """What run.json says; nothing if there is none."""
        path = self.path / "run.json"
        try:
            about = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}
            msgspec.convert(about, _Described)
            return about
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} is not what maniple has written: {error}. Is {self.path.name} a run folder? Give runs/NAME."
            ) from None


def fresh_name(root: Path, script: Path) -> str:
    """A name for a run of `script` that is not taken in `root`: sortable and readable."""
    name = f"{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = (f"{name}-{number}" for number in itertools.count(2))
    return name if not (root / name).exists() else next(other for other in taken if not (root / other).exists())


def write_json(path: Path, value: Any) -> None:
    """Write `value` in a form that people can read."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n")


def json_line(value: Any) -> str:
    """`value` for a program that reads a stream: in ASCII, whatever encoding that stream has."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if text.isascii() else json.dumps(json.loads(text))


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `data` beside `path` and rename it: readers see the old file or the new one, also after a power failure."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:  # a full disk tells no name
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_once(path: Path, data: bytes) -> None:
    """Give `path` this content, unless another process was first: all readers see one whole file, that of the first."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        with suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk: what was made, renamed or removed in it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that know nothing of the kind
            raise
    finally:
        os.close(folder)


def _name(who: int | str) -> str:
    return f"worker-{who}" if isinstance(who, int) else who


def point(link: Path, target: str | Path) -> None:
    """Let a symbolic link point at `target`, from one moment to the next. Anything else that stands there stays."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    try:
        beside.replace(link)
        sync_folder(link.parent)
    except OSError:  # a real folder of that name stands there: leave it
        beside.unlink(missing_ok=True)
