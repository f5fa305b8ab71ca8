"""Values that are not finite: found and named; two in a row are tolerated, the third ends the training."""

import numpy as np
import pytest

from maniple import BSP, EASGD
from maniple.contracts import Entry, Outcome, Round
from maniple.errors import Diverged
from maniple.layout import Layout
from maniple.record import Events, read_events
from maniple.replica.nonfinite import Contributions, Refusals, is_finite, nonfinite_entry
from tests.unit.engines import engine

LAYOUT = Layout([Entry("w", (3,), "float32"), Entry("n", (2,), "float64"), Entry("b", (2,), "float32")])


def flat(**values: float) -> dict[str, np.ndarray]:
    """Flat vectors of zeros, with these values in place of the first elements of the entries."""
    vectors = LAYOUT.allocate()
    for name, value in values.items():
        dtype, start, _ = LAYOUT.places[[entry.name for entry in LAYOUT.entries].index(name)]
        vectors[dtype][start] = value
    return vectors


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found(value):
    values = np.zeros(1000, "float32")
    assert is_finite(values)
    values[777] = value
    assert not is_finite(values)


def test_large_values_whose_squares_overflow_are_finite():
    assert is_finite(np.full(10, 3e38, "float32")) and is_finite(np.array([-1.7e308])) and is_finite(np.empty(0))


def test_tensors_are_checked_too():
    torch = engine("torch")
    assert is_finite(torch.full((10,), 3e38)) and not is_finite(torch.tensor([0.0, float("nan")]))


def test_the_first_entry_that_is_not_finite_is_found_within_a_part():
    vectors = flat(w=np.nan, b=np.inf)
    assert nonfinite_entry(LAYOUT, vectors, ("float32", 0, 5)) == 0
    assert nonfinite_entry(LAYOUT, vectors, ("float32", 1, 5)) == 2, "element 0 is not in that part"
    assert nonfinite_entry(LAYOUT, vectors, ("float64", 0, 2)) is None


def test_a_center_that_refuses_values_is_a_warning_twice_and_then_an_error():
    refusals, refused, fine = Refusals(), Outcome(refused=["w", "b"]), Outcome()
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"refused non-finite values of 'w' .*\(2 parameters\)"):
            refusals.check(refused)
    refusals.check(fine)
    for _ in range(2):
        with pytest.warns(UserWarning):
            refusals.check(refused)
    with pytest.raises(Diverged, match=r"3 exchanges in a row \(limit 3\), first in 'w'.*Lower the learning rate"):
        refusals.check(refused)


def contributions(rule, *, rank: int = 0, events: Events | None = None) -> Contributions:
    return Contributions(rule, LAYOUT, rank=rank, events=events or Events(None))


def test_a_contribution_is_sent_with_its_weight_or_with_what_is_wrong_with_it():
    checked = contributions(BSP())
    assert checked.checked_weight(2.0, flat()) == 2.0
    assert checked.checked_weight(2.0, flat(b=np.nan)) < 0
    assert checked.checked_weight(0.0, flat(b=np.nan)) == 0.0, "it counts for nothing anyway"


def test_a_nonfinite_contribution_ends_the_run_unless_the_rule_skips_it():
    error = contributions(BSP()).check_round(Round((0,), nonfinite={1: 2}), 7)
    assert isinstance(error, Diverged)
    assert "the gradient of 'b' of worker 1 holds NaN or infinity in step 7" in str(error)
    assert "nonfinite='skip' leaves such contributions out" in str(error)
    averaged = contributions(BSP("parameters", every=2)).check_round(Round((), nonfinite={2: 0, 1: 2}), 7)
    assert str(averaged).startswith("'b' of workers 1, 2 holds NaN")


def test_a_rule_that_skips_ends_the_run_when_one_worker_fails_three_times_in_a_row():
    checked = contributions(BSP(nonfinite="skip"))
    for ranks in ({1: 2}, {1: 2}, {}, {1: 2}, {2: 2}, {1: 2}, {1: 2, 2: 0}):
        assert checked.check_round(Round((0,), nonfinite=ranks), 7) is None
    error = checked.check_round(Round((0,), nonfinite={1: 2}), 8)
    assert isinstance(error, Diverged) and "and 3 times in a row (limit 3)" in str(error)


def test_the_worker_itself_is_warned_and_records_it(tmp_path):
    checked = contributions(EASGD(sync=True, nonfinite="skip"), rank=1, events=Events(tmp_path / "worker-1.jsonl"))
    with pytest.warns(UserWarning, match=r"'n' of this worker is not finite in step 7: left out of the mean"):
        assert checked.check_round(Round((0,), nonfinite={1: 1}), 7) is None
    (row,) = read_events(tmp_path / "worker-1.jsonl")
    assert (row["event"], row["parameter"], row["step"], row["in_a_row"]) == ("nonfinite", "n", 7, 1)
