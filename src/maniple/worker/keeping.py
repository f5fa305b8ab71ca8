"""What the center is to show of a replica whose rule meets in the circle."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from maniple.adapters import Adapter
from maniple.contracts import Array
from maniple.layout import Layout
from maniple.rules import Rule


@contextmanager
def shown(model: Adapter, rule: Rule, layout: Layout, memory: Sequence[Array] | None) -> Generator[None]:
    """In this block the model holds what the center shows, which some rules keep apart from the replica."""
    if memory is None:
        yield
        return
    own = layout.views(layout.allocate())
    model.begin()
    for i, value in enumerate(own):
        value[:] = model.array(i)
        if rule.norm != "local" or not model.is_buffer(i):  # of which there is no mean
            model.array(i)[:] = rule.shared(value, memory[i])
        model.commit(i)
    try:
        yield
    finally:
        model.begin()
        for i, value in enumerate(own):
            model.array(i)[:] = value
            model.commit(i)
