"""Settings of synchronous rules that exchange a model in fragments, or apply what they receive some steps later."""

from maniple.errors import InvalidArgument
from maniple.rules.rule import Rule, checked_count, checked_flag, checked_share


class Streaming(Rule):
    """Exchanges in fragments and in the background, for `LocalSGD` and `DiLoCo`.

    With `fragments=P` the layers of the model are dealt out to P fragments in turn: layer j belongs to fragment j
    modulo P. Each fragment is exchanged once in `every` steps, at its own offset: fragment q at step `q every / P`. The
    peak of the traffic falls by P. Douillard et al.: Streaming DiLoCo (arXiv:2501.18512).

    With `overlap=True`, or a `delay`, a round runs in the background while training continues. What this worker has
    trained since it sent its values `s` is kept when the result `y`, which would have replaced them, is applied:

        x = y + (x - s)                      no step is lost (Liang et al.: CoCoD-SGD, arXiv:1906.12043)
        x = alpha x + (1 - alpha) y          if `alpha` is given, as in Streaming DiLoCo, where it is 0.5

    One round is in flight at a time: the next one begins after the result was applied.

    Args:
        fragments: P; 1 exchanges the model as a whole.
        delay: the steps after which a result is applied, waiting for it if necessary; None: as soon as it is there with
            `overlap`, else at once. With a fixed delay, runs can be repeated to the bit.
        overlap: run rounds in the background.
        alpha: the weight of this worker's own value where a result is applied late.
    """

    def _stream(self, fragments: int, delay: int | None, alpha: float | None, *, overlap: bool) -> None:
        name = type(self).__name__
        self.fragments = checked_count("fragments", fragments, 1)
        self.delay = None if delay is None else checked_count("delay", delay, 0)
        self.alpha = self.own_share = None if alpha is None else checked_share(name, "alpha", alpha)
        self.overlap = checked_flag(name, "overlap", overlap)
        distance = max(1, self.every // self.fragments)
        if self.delay and self.delay >= distance:
            raise InvalidArgument(
                f"{name} has delay={self.delay}, but the next round begins {distance} steps "
                "later (every / fragments), and one round is in flight at a time. Choose a smaller delay."
            )
        if self.fragments > self.every:
            raise InvalidArgument(
                f"{name} has fragments={self.fragments}, but every={self.every}: each fragment needs its own step. "
                "Choose fewer fragments, or exchange less often."
            )
