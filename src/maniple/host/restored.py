"""What a center that was restored from a snapshot knows of the time before: which contributions the snapshot has."""

from pathlib import Path

import msgspec

from maniple.record.folder import write_json

_FILE = "restored"


class Restored(msgspec.Struct):
    """Where a restored center came from. A center that never was: count 0."""

    count: int = 0  # how often this lineage began again from a snapshot
    saved: float = 0.0  # when that snapshot was written; 0: nothing was contributed after it
    applied: dict[str, dict[str, list[int]]] = {}  # worker -> center -> each parameter's word at its copy
    words: dict[str, int] = {}  # worker -> its word, where that was the same at all copies
    forgotten: int = 0  # workers of which nothing was known any more
    snapshot: str = ""  # the snapshot's name, until what was validated after it is put aside

    @classmethod
    def read(cls, segment: Path) -> "Restored":
        """What was noted in the segment."""
        path = segment / _FILE
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, segment: Path) -> None:
        """Note it in the segment."""
        write_json(segment / _FILE, msgspec.to_builtins(self))

    def has(self, worker: str, center: str, i: int, word: int) -> bool:
        """The snapshot's copy of parameter i has what brought `worker` to `word`."""
        words = self.applied.get(worker, {}).get(center, [])
        return self.words.get(worker, 0) >= word or (0 <= i < len(words) and words[i] >= word)

    def recalls(self, worker: str) -> bool:
        """What is not known of `worker` here has not happened."""
        return not self.forgotten or worker in self.words or worker in self.applied
