"""The mean of all replicas of a model, from their mailboxes: what the center of a run without a center is."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from maniple.center.arrays import GivenValues
from maniple.center.shared import SharedCenter
from maniple.contracts import Array
from maniple.layout import Layout
from maniple.memory.segment import DEAD, Segment
from maniple.peers.mailbox import Mailbox, Vectors, has_outbox
from maniple.rules import noted_rule


def mailbox_paths(segment: Segment, model: int) -> dict[int, Path]:
    """The files of the mailboxes of a shared model, by the ranks of their owners."""
    prefix = f"peers-{model}."
    return {int(path.name.removeprefix(prefix)): path for path in segment.path.glob(f"{prefix}*")}


def mean_of(
    boxes: Mapping[int, Mailbox], counting: Collection[int], layout: Layout, names: Sequence[str]
) -> Vectors | None:
    """The weighted mean of the first vectors in `boxes` and of the messages on their way; None without any weight.

    Nobody is stopped for it: a message that is taken meanwhile may be missing or count twice.

    Args:
        counting: the ranks whose share counts. A message counts if its sender or its receiver does.
    """
    total, copied, headers = layout.allocate(), layout.allocate(), dict[int, Array]()
    weight = 0.0
    for rank, box in boxes.items():
        headers[rank] = header = box.copy(names[0], copied)
        share = float(header["weight"][0])
        if rank in counting and share:
            weight += share
            _add(total, copied, share)
    for rank, header in headers.items() if has_outbox(names) else ():
        receiver, number = int(header["receiver"][0]), int(header["number"][0])
        if receiver not in headers or headers[receiver]["applied"][0, rank] >= number:
            continue
        if rank in counting or receiver in counting:
            for dtype, vector in boxes[rank].outbox.items():
                copied[dtype][:] = vector
            now = boxes[rank].header()
            if now is not None and int(now["number"][0]) == number:  # else a newer one may be in the copy
                weight += float(header["message_weight"][0])
                _add(total, copied, float(header["message_mass"][0]))
    if not weight:
        return None
    for vector in total.values():
        vector /= vector.dtype.type(weight)
    return total


def publish_mean(mean: Vectors | None, center: SharedCenter, layout: Layout) -> None:
    """Set the center to a mean of all, if there is one."""
    if mean is not None:
        values = layout.views(mean)
        center.push(GivenValues(layout.entries, values.__getitem__))


def collect_into_centers(segment: Segment) -> int:
    """Set each center of a run whose host and workers have died to the mean of its mailboxes, and remove these.

    The center may be behind, since only one worker brings it up to date from time to time. Returns how many centers
    there were to set.
    """
    count = 0
    for path in segment.centers():
        center = SharedCenter.open(segment, path)
        if center is None or not path.name.startswith("center-"):
            continue
        with closing(center):
            count += _collect(segment, center, int(path.name.removeprefix("center-")))
    return count


def _collect(segment: Segment, center: SharedCenter, model: int) -> bool:
    """Set one center; False if its workers did not exchange with peers."""
    rule, paths = noted_rule(center.note), mailbox_paths(segment, model)
    if rule is None or not rule.has_peers or not paths:
        return False
    layout = Layout(center.layout.entries)
    found = {rank: Mailbox.find(path, layout, rule.mailbox_vectors) for rank, path in paths.items()}
    boxes = {rank: box for rank, box in found.items() if box is not None}
    counting = {rank for rank in boxes if segment.state(rank) != DEAD or rank in segment.died_with_host}
    mean = mean_of(boxes, counting, layout, rule.mailbox_vectors)
    publish_mean(mean, center, layout)
    for path in paths.values():
        path.unlink(missing_ok=True)
    return mean is not None


def _add(total: Vectors, vectors: Vectors, share: float) -> None:
    for dtype, vector in vectors.items():
        vector *= vector.dtype.type(share)
        total[dtype] += vector
