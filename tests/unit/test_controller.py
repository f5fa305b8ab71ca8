"""What the default controller decides, given what happened and when. No worker, no clock."""

import math

import msgspec
import pytest

from maniple.controller import ControllerState, DefaultPolicy, number_of
from maniple.errors import InvalidArgument
from maniple.host.heartbeat_service import heartbeat_interval_s
from maniple.settings.options import Limits

A, B, C = (0, 1), (1, 1), (2, 1)  # workers: rank and incarnation
NOW = 1000.0


def decided(**limits) -> DefaultPolicy:
    return DefaultPolicy(Limits(**limits))


class Kept:
    """What the controller has done besides answering."""

    live = 2

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.dead: set[tuple[int, int]] = set()

    def is_live(self, who: tuple[int, int]) -> bool:
        return who not in self.dead

    def keep_candidate(self) -> None:
        self.acts.append("candidate")

    def discard_candidate(self) -> None:
        self.acts.append("discard")

    def keep_best(self, number: int, loss: float) -> None:
        self.acts.append("best")


def test_batches_are_the_sum_over_workers_and_their_lives():
    made = decided()
    made.count(A, 10, 100)
    made.count(B, 7, 70)
    assert made.state.made == (17, 170)
    made.count(A, 12, 120)
    assert made.state.made == (19, 190), "a worker tells its sum, not what is new"
    made.count((0, 2), 3, 30)
    assert made.state.made == (22, 220), "what a worker made before it died still counts"


def test_counts_that_come_late_or_twice_change_nothing():
    made = decided()
    for steps in (10, 4, 10):
        made.count(A, steps, 10 * steps)
    assert made.state.made == (10, 100)


def test_batches_reported_by_done_add_up_and_are_not_counted_twice():
    made = decided()
    for _ in range(3):
        made.answer(A, "next", {"done": 5})
    assert made.state.made[0] == 15
    made.count(A, 14, 0)  # it shares a model as well: the same batches, counted in another way
    assert made.state.made[0] == 15
    made.count(A, 16, 0)
    assert made.state.made[0] == 16


def test_without_limits_everybody_trains_for_ever():
    made = decided()
    for number in range(100):
        made.count(A, number, number)
        assert made.answer(A, "next", {}) == "train"
        assert made.check_limits(NOW + 1e6 * number) == ""


def test_everybody_stops_at_max_batches():
    made = decided(max_batches=20)
    made.count(A, 10, 0)
    made.count(B, 9, 0)
    assert made.check_limits(NOW) == ""
    assert made.next(A) == "train"
    made.count(B, 10, 0)
    assert "--max-batches 20" in made.check_limits(NOW)
    assert [made.next(who) for who in (A, B, C)] == ["stop"] * 3


@pytest.mark.parametrize("first", [(1, 10), (0, 10)], ids=["step", "sample, where no model is shared"])
def test_everybody_stops_after_total_duration_since_the_first_step_of_any(first):
    made = decided(total_duration=60)
    made.count(A, 0, 0)
    assert made.check_limits(NOW - 1000) == "", "it was heard of, and has not begun to train"
    assert made.check_limits(NOW - 1) == ""
    made.count(B, *first)
    assert made.check_limits(NOW) == ""
    made.count(A, 1, 10)
    assert made.check_limits(NOW + 59.9) == ""
    assert "60 s" in made.check_limits(NOW + 60)
    assert made.next(A) == "stop"


def test_first_reason_to_stop_stays():
    made = decided(max_batches=1)
    made.stop("enough")
    made.stop("more than enough")
    made.count(A, 5, 0)
    assert made.check_limits(NOW) == "enough"
    nameless = decided()
    nameless.stop("")
    assert nameless.check_limits(NOW), "a stop without a reason is a stop"


def test_one_worker_validates_while_the_others_train():
    made = decided(validate_every=10)
    assert made.next(A) == "train"
    made.count(A, 10, 0)
    assert [made.next(who) for who in (B, A, C)] == ["validate", "train", "train"]
    made.count(A, 50, 0)
    assert made.next(A) == "train", "however many batches are made meanwhile"
    made.finish_validation(B, 1.0)
    assert made.next(A) == "validate"


def test_next_validation_is_counted_from_the_beginning_of_the_last():
    made = decided(validate_every=10)
    made.count(A, 12, 0)
    assert made.next(A) == "validate"
    made.count(B, 9, 0)
    made.finish_validation(A, 1.0)
    assert made.next(B) == "train"
    made.count(B, 10, 0)
    assert made.next(B) == "validate"


def test_dead_validator_is_replaced_at_once():
    made = decided(validate_every=10)
    made.host = host = Kept()
    made.count(A, 10, 0)
    assert made.next(A) == "validate"
    assert made.next(B) == "train"
    host.dead.add(A)
    assert made.next(B) == "validate"
    assert made.next(C) == "train"
    made.finish_validation(B, 0.5)
    assert made.state.best == 0.5


def test_late_loss_of_a_replaced_validator_does_not_end_the_other_one():
    made = decided(validate_every=10)
    made.host = host = Kept()
    made.count(A, 10, 0)
    made.next(A)
    host.dead.add(A)  # it was only stopped for a while
    made.next(B)
    made.finish_validation(A, 0.5)
    assert made.state.validator == B
    made.count(B, 90, 0)
    assert made.next(C) == "train"


def test_validator_that_asks_on_without_a_loss_has_given_up():
    """Its answer was lost to a deadline, say. Else nobody would ever validate again."""
    made = decided(validate_every=10)
    made.count(A, 10, 0)
    assert made.next(A) == "validate"
    assert made.next(A) == "train"
    made.count(A, 20, 0)
    assert made.next(B) == "validate"


def test_nobody_validates_after_the_stop():
    made = decided(validate_every=1, max_batches=5)
    made.count(A, 5, 0)
    made.check_limits(NOW)
    assert made.next(A) == "stop"


def test_best_is_the_lowest_finite_loss():
    made = decided()
    assert [made.finish_validation(A, loss) for loss in (3.0, 2.0, 2.0, math.nan, math.inf, -math.inf, 2.5, 1.0)] == [
        True, True, False, False, False, False, False, True,
    ]  # fmt: skip
    assert made.state.best == 1.0


def test_patience_counts_validations_in_a_row():
    made = decided(patience=3)
    for loss in (3.0, 4.0, 4.0, 2.0, 4.0, 4.0):
        made.finish_validation(A, loss)
        assert not made.state.reason
    made.finish_validation(A, 4.0)
    assert "--patience" in made.state.reason
    assert "the best was 2" in made.state.reason


def test_losses_that_are_not_finite_use_patience_up():
    made = decided(patience=2)
    made.finish_validation(A, math.nan)
    assert not made.state.reason
    made.finish_validation(A, math.inf)
    assert "none was finite" in made.state.reason


def test_without_patience_bad_losses_stop_nobody():
    made = decided()
    made.finish_validation(A, 1.0)
    for _ in range(100):
        made.finish_validation(A, 2.0)
    assert made.next(A) == "train"


def test_answers_of_the_default_controller():
    made, kept = decided(validate_every=2, patience=1), Kept()
    made.host = kept
    assert made.answer(A, "next", {"done": 1}) == "train"
    assert made.answer(A, "next", {"done": 1}) == "validate"
    assert made.answer(A, "validated", {"loss": 0.5}) == {"best": True, "stop": False}
    assert made.answer(B, "next", {"done": 2}) == "validate"
    assert made.answer(B, "validated", {"loss": 0.7}) == {"best": False, "stop": True}
    assert made.answer(A, "next", {"done": 1}) == "stop"
    assert kept.acts == ["candidate", "best", "candidate", "discard"]


def test_anybody_can_stop_everybody():
    made = decided()
    assert made.answer(B, "stop", {"reason": "the lights went out"}) == {"stop": True}
    assert made.check_limits(NOW) == "the lights went out"
    assert made.answer(A, "next", {}) == "stop"


def test_worker_whose_samples_are_finished_stops_alone():
    made = decided(validate_every=1)
    made.count(A, 5, 0)
    assert made.answer(A, "next", {}, is_finished=True) == "stop"
    assert made.answer(B, "next", {}) == "validate"


@pytest.mark.parametrize("loss", [None, "nan", "inf", math.nan])
def test_loss_without_a_number_in_json_is_no_best(loss):
    made = decided()
    assert made.answer(A, "validated", {"loss": loss})["best"] is False


def test_unknown_request_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidArgument, match=r"'nxet'.*'next', 'validated', 'keep' and 'stop'.*--controller"):
        decided().answer(A, "nxet", {})


@pytest.mark.parametrize(
    ("request_", "info"),
    [
        ("validated", {}),
        ("validated", {"loss": "low"}),
        ("validated", {"loss": [1.0]}),
        ("next", {"done": "some"}),
        ("next", {"done": None}),
        ("next", {"done": math.inf}),
        ("next", {"done": -1}),
    ],
)
def test_what_is_no_number_is_refused_and_counts_for_nothing(request_, info):
    made = decided()
    with pytest.raises(InvalidArgument, match=f"'{request_}' came with "):
        made.answer(A, request_, info)
    assert (made.state.made[0], made.state.misses) == (0, 0)


def test_numbers_may_come_as_words():
    assert number_of({"loss": "0.25"}, "loss", "validated") == 0.25


def interval_s(made: DefaultPolicy, now: float) -> float:
    return heartbeat_interval_s(made.next_check_s(now), live=2)


def test_heartbeats_are_more_frequent_as_the_limit_comes_near():
    made = decided(max_batches=1000)
    made.check_limits(NOW)
    assert interval_s(made, NOW) == 1.0, "nothing is known yet"
    made.count(A, 100, 0)
    assert interval_s(made, NOW + 10) == 1.0, "90 s are left"
    made.count(A, 990, 0)
    assert interval_s(made, NOW + 99) == pytest.approx(0.5), "1 s is left: halfway there"
    made.count(A, 999, 0)
    assert interval_s(made, NOW + 99.9) == pytest.approx(0.05), "no more than 20 times a second"
    made.count(A, 1005, 0)
    assert interval_s(made, NOW + 101) == 0.05


def test_heartbeats_are_due_when_the_time_is_over():
    made = decided(total_duration=10)
    made.check_limits(NOW)
    assert interval_s(made, NOW) == 0.5, "soon, until the first step"
    made.count(A, 1, 1)
    made.check_limits(NOW)
    assert interval_s(made, NOW + 1) == 1.0
    assert interval_s(made, NOW + 9.6) == pytest.approx(0.4)
    assert interval_s(made, NOW + 11) == 0.05


def test_without_limits_heartbeats_come_once_a_second():
    made = decided()
    made.count(A, 10**9, 0)
    assert interval_s(made, NOW) == 1.0


def test_all_that_is_known_survives_json():
    made = decided(validate_every=2, patience=5)
    made.check_limits(NOW)
    made.answer(A, "next", {"done": 3})
    made.finish_validation(B, 0.5)
    again = msgspec.json.decode(msgspec.json.encode(made.state), type=ControllerState)
    assert again == made.state
    assert DefaultPolicy(made.limits, again).next(B) == "train", "the validator is known"


def test_run_that_goes_on_forgets_why_it_stopped_and_nothing_else():
    made = decided(max_batches=10, patience=1, validate_every=10)
    made.check_limits(NOW)
    made.count(A, 10, 100)
    made.finish_validation(A, 0.5)
    made.finish_validation(A, 0.6)
    made.check_limits(NOW)
    known = made.state
    known.reset_for_resume()
    again = DefaultPolicy(Limits(max_batches=20, patience=1, total_duration=60), known)
    assert again.next(A) == "train"
    assert (*again.state.made, known.best, known.misses) == (10, 100, 0.5, 0)
    assert again.check_limits(NOW + 1000) == ""
    again.count((0, 2), 1, 10)
    assert again.check_limits(NOW + 2000) == ""
    assert again.check_limits(NOW + 2059) == "", "--total-duration is counted anew, from the first step of this life"
    assert "60 s" in again.check_limits(NOW + 2060)


def test_two_runs_of_one_process_know_nothing_of_each_other():
    first, second = DefaultPolicy(), DefaultPolicy()
    first.count(A, 5, 5)
    assert second.state.made[0] == 0


def test_validation_of_a_worker_that_was_given_up_changes_nothing():
    one = decided(validate_every=10, patience=1)
    one.host = host = Kept()
    one.count(A, 10, 0)
    assert one.answer(A, "next", {}) == "validate"
    host.dead.add(A)
    assert one.answer(B, "next", {}) == "validate"
    host.dead.remove(A)
    assert one.answer(A, "validated", {"loss": 0.1}) == {"best": False, "stop": False}
    assert one.answer(B, "validated", {"loss": 0.5}) == {"best": True, "stop": False}
    assert (one.state.best, one.state.bests) == (0.5, 1)


def test_a_center_that_was_published_for_its_validation_is_kept_and_not_the_older_candidate():
    made = decided(validate_every=1)
    made.host = kept = Kept()
    made.count(A, 1, 0)
    assert made.answer(A, "next", {}) == "validate"
    assert made.answer(A, "validated", {"loss": 1.0, "published": True})["best"]
    assert made.answer(B, "validated", {"loss": 0.5})["best"], "that of another rule: the candidate, if there is one"
    assert kept.acts == ["candidate", "discard", "best", "best"]
