"""The run folder: its layout, run.json, and files that are written atomically."""

import errno
import itertools
import json
import os
import platform
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from maniple.clock import clock
from maniple.errors import InvalidArgument, require_printable
from maniple.record.rows import Moment

SUBMITTED = "submit.json"
_STOP = "stop"


class _Described(msgspec.Struct):
    """The entries of run.json that readers use."""

    asked: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    lineage: str | None = None
    exit_code: int | None = None
    ended: Moment | None = None


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[Path, str] | None = None  # of a new run: the link `last` and its former target

    @classmethod
    def create(cls, root: Path, name: str) -> "RunFolder":
        """Create `root/name`, which must not exist, and point `root/last` at it."""
        if not name or name in {".", "..", "last"} or "/" in name:
            raise InvalidArgument(f"{name!r} cannot name a run. Use letters, digits, '-', '_' and '.', but not 'last'.")
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
                f"the run folder {folder.path} cannot be created: {error.strerror}. Choose another folder with --runs."
            ) from error
        for part in ("events", "logs", "center"):
            (folder.path / part).mkdir()
        sync_folder(folder.path)
        link = root / "last"
        folder._last = link, str(link.readlink()) if link.is_symlink() else ""
        point(link, name)
        return folder

    def discard(self) -> None:
        """Remove the folder of a run that could not start, and point `last` at the run before it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._last is not None:
            link, before = self._last
            with suppress(OSError):
                if str(link.readlink()) != self.path.name:
                    return  # another run has started in the meantime
                if before and (link.parent / before).exists():
                    point(link, before)
                else:
                    link.unlink()

    @property
    def center(self) -> Path:
        """Folder of the center's snapshots."""
        return self.path / "center"

    @property
    def optimizer(self) -> Path:
        """Folder of the workers' optimizer states."""
        return self.path / "optimizer"

    def optimizers(self, pattern: str = "center-*") -> list[Path]:
        """The files of optimizer states."""
        return sorted(self.optimizer.glob(pattern))

    def events(self, who: int | str) -> Path:
        """The file with the rows of worker `who`, or of the host or server."""
        return self.path / "events" / f"{_name(who)}.jsonl"

    def ranks(self) -> list[int]:
        """The ranks of all workers that have written a row."""
        names = (path.stem.partition("-")[2] for path in (self.path / "events").glob("worker-*.jsonl"))
        return sorted(int(name) for name in names if name.isdigit())

    def log(self, who: int | str) -> Path:
        """The file with the output of worker `who`, or of the host or server."""
        return self.path / "logs" / f"{_name(who)}.log"

    @property
    def is_submitted(self) -> bool:
        """True if its workers were submitted to a batch queue."""
        return (self.path / SUBMITTED).exists()

    @property
    def is_stopped(self) -> bool:
        """True if `stop` was called."""
        with suppress(OSError):  # a file system that does not answer must not end the run
            return (self.path / _STOP).exists()
        return False

    def stop(self) -> None:
        """Ask the host to end the run, on whatever machine it is: it looks for this mark."""
        try:
            (self.path / _STOP).touch()
        except OSError as error:
            raise InvalidArgument(
                f"{self.path} cannot be written ({error.strerror}), so its host cannot be asked to end. Free some disk "
                "space, or run this as the owner of the folder."
            ) from None

    def unstop(self) -> None:
        """Withdraw the request to end."""
        (self.path / _STOP).unlink(missing_ok=True)

    def describe(self, **values: Any) -> None:
        """Merge `values` into run.json."""
        write_json(self.path / "run.json", self.read() | values)

    def read(self) -> dict[str, Any]:
        """The contents of run.json; empty if there is none."""
        path = self.path / "run.json"
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}
            msgspec.convert(values, _Described)
            return values
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} was not written by maniple: {error}. Is {self.path.name} a run folder? Give runs/NAME."
            ) from None


def fresh_name(root: Path, script: Path) -> str:
    """An unused name in `root` for a run of `script`, with the time so that names sort by it."""
    name = f"{script.stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(clock.time()))}"
    taken = (f"{name}-{number}" for number in itertools.count(2))
    return name if not (root / name).exists() else next(other for other in taken if not (root / other).exists())


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect results."""
    from importlib import metadata  # 15 ms, which only the host of a run needs

    found = {"python": platform.python_version()}
    for name in ("maniple", "numpy", "torch", "numba", "mpi4py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n")


def json_line(value: Any) -> str:
    """`value` as one line of ASCII, which any encoding of a stream can carry."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if text.isascii() else json.dumps(json.loads(text))


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a power failure."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:  # of a full disk, which does not name the file
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_once(path: Path, data: bytes) -> None:
    """Write `path` unless another process was first: all readers see the whole file of the first one."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        with suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: what was created, renamed or removed in it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without it
            raise
    finally:
        os.close(folder)


def _name(who: int | str) -> str:
    return f"worker-{who}" if isinstance(who, int) else who


def point(link: Path, target: str | Path) -> None:
    """Set a symbolic link atomically. Anything else of that name is left alone."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    try:
        beside.replace(link)
        sync_folder(link.parent)
    except OSError:  # a real folder has that name
        beside.unlink(missing_ok=True)
