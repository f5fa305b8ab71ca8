"""A user's calls, with one worker: what goes in comes out, of the same kind; what cannot is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maniple.collectives.api import CollectiveCalls
from maniple.collectives.engines import SingleWorker
from maniple.errors import InvalidArgument

DTYPES = ["float32", "float64", "float16", "int8", "uint64", "complex64"]
CALLS = CollectiveCalls(SingleWorker())


@given(st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0))))
def test_alone_every_call_gives_back_what_it_got(x):
    copy = x.copy()
    found = [CALLS.all_reduce(x, "sum"), CALLS.reduce(x, "prod"), CALLS.broadcast(x)]
    found += [*CALLS.all_gather(x), *(CALLS.gather(x) or [])] + ([CALLS.scatter(x)] if x.ndim else [])
    for one in found:
        assert (one.dtype, one.shape) == (x.dtype, x.shape)
        assert one.tobytes() == copy.tobytes()
        assert not np.may_share_memory(one, x) or not x.size


def test_numbers_stay_numbers_and_the_mean_of_whole_ones_is_a_float():
    assert CALLS.all_reduce(3, "sum") == 3
    assert isinstance(CALLS.all_reduce(3, "sum"), int)
    assert isinstance(CALLS.all_reduce(3), float)
    assert isinstance(CALLS.all_reduce(np.float32(2)), np.float32)
    assert CALLS.all_reduce(np.array([1, 2])).dtype == np.float64


def test_result_goes_to_what_was_given():
    x, out = np.ones((2, 3), "f4"), np.zeros((3, 2), "f4").T
    assert CALLS.all_reduce(x, "sum", out=out) is out
    assert out.tolist() == x.tolist()
    assert CALLS.all_reduce(x, "sum", out=x) is x


def test_nobody_s_values_leave_out_as_it_was():
    out = np.full(3, 7.0)
    assert CALLS.all_reduce(np.ones(3), out=out, weight=0).tolist() == [7, 7, 7]
    assert CALLS.reduce(np.ones(3), out=out, weight=0).tolist() == [7, 7, 7]


READ_ONLY = np.zeros(2)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: CALLS.all_reduce(np.ones(2), "median"), "op='median'.*sum, mean, min, max, prod"),
        (lambda: CALLS.all_reduce(np.array([True])), "dtype bool"),
        (lambda: CALLS.all_reduce(np.array(["a"]), "max"), "dtype <U1"),
        (lambda: CALLS.all_reduce(np.array([None])), "dtype object"),
        (lambda: CALLS.all_reduce(True), "bool cannot be sent"),
        (lambda: CALLS.all_reduce([1.0]), "list cannot be sent"),
        (lambda: CALLS.all_reduce(np.ones(2), wire="int8"), "wire='int8'.*bfloat16"),
        (lambda: CALLS.all_reduce(np.ones(2), weight=-1), "weight=-1"),
        (lambda: CALLS.all_reduce(np.ones(2), weight=float("nan")), "weight=nan"),
        (lambda: CALLS.all_reduce(np.ones(2), out=READ_ONLY), "read-only"),
        (lambda: CALLS.all_reduce(np.ones(2), out=np.ones(3)), r"float64\[3\].*float64\[2\]"),
        (lambda: CALLS.all_reduce(np.ones(2, int), out=np.ones(2, int)), "out is int64.*result is float64"),
        (lambda: CALLS.all_reduce(np.ones(2), out=[0, 0]), "out is a list"),
        (lambda: CALLS.all_reduce(np.ones(2, complex), "max"), "no order"),
        (lambda: CALLS.broadcast(np.ones(2), root=1), "root=1 is no worker"),
        (lambda: CALLS.reduce(np.ones(2), root=-1), "root=-1 is no worker"),
        (lambda: CALLS.scatter(np.ones(())), "single number"),
        (lambda: CALLS.scatter([np.ones(2), np.ones(2)]), "2 parts of 1 kinds for 1 workers"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(call, reason):
    with pytest.raises(InvalidArgument, match=reason):
        call()


def test_tensors_stay_tensors_of_their_kind():
    torch = pytest.importorskip("torch")
    for x in (torch.ones(2, 3).T, torch.ones(3, dtype=torch.bfloat16), torch.tensor(4), torch.ones(0)):
        found = CALLS.all_reduce(x, "sum")
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        assert torch.equal(found, x)
    x = torch.ones(3, requires_grad=True)
    (CALLS.all_reduce(x) * 5).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]
    assert not CALLS.all_reduce(x, "max").requires_grad
    with pytest.raises(InvalidArgument, match="another type"):
        CALLS.all_reduce(x.detach(), out=np.ones(3, "f4"))
