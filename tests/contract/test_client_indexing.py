"""Parts and single elements of named arrays, as NumPy indexes them, over every transport."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import maniple
from maniple.errors import InvalidArgument
from maniple.wire.tls import make_certificate

from ..serving import TOKEN, Serving
from .test_client import COMPLEX, DTYPES

# Parts


def test_part_at_the_crossing_of_index_lists(client):
    whole = np.arange(60.0).reshape(3, 4, 5)
    client.create("a", whole)
    lists = [[2, 0], [1, 3, -1], [0]]
    np.testing.assert_array_equal(client.pull_part("a", lists), whole[np.ix_(*lists)])
    client.push_part("a", [[2, 0], [1, 2], [0, 4]], np.ones((2, 2, 2)), alpha=0, beta=1)
    whole[np.ix_([2, 0], [1, 2], [0, 4])] = 1
    np.testing.assert_array_equal(client.pull("a"), whole)


def test_single_coordinates(client):
    whole = np.arange(12, dtype="int32").reshape(3, 4)
    client.create("a", whole)
    at = [[0, 0], [2, -1], [1, 2]]
    np.testing.assert_array_equal(client.pull_at("a", at), [0, 11, 6])
    client.push_at("a", at, [100, 100, 100], alpha=2, beta=1)
    assert client.pull_at("a", at).tolist() == [100, 122, 112]
    assert client.pull("a")[0, 1] == 1


def test_no_coordinates_and_no_axes(client):
    client.create("a", np.zeros((2, 2)))
    assert client.pull_at("a", []).shape == (0,)
    assert client.pull_part("a", [[], [0]]).shape == (0, 1)
    client.create("s", np.array(4.0))
    assert client.pull_part("s", []) == 4
    client.push_at("s", np.zeros((1, 0), int), [6], alpha=0.5, beta=0.5)
    assert client.pull("s") == 5


def test_values_for_the_same_element_add_up_as_differences_only(client):
    client.create("a", np.zeros(4))
    client.push_at("a", [[1], [1], [2]], [1, 2, 3], alpha=1, beta=2)
    np.testing.assert_array_equal(client.pull("a"), [0, 6, 6, 0])
    with pytest.raises(InvalidArgument, match="given twice"):
        client.push_at("a", [[1], [1]], [1, 2], alpha=0.5, beta=0.5)


# Against NumPy, over every transport

NUMBERS = itertools.count()  # hypothesis repeats examples, and an array of a name is made once
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["tcp", "unix", "tls"])
def over(request, tmp_path, monkeypatch):
    """A client of a host that listens in one of the ways there are."""
    files = {}
    if request.param == "tls":
        files = {"certificate": tmp_path / "certificate.pem", "key": tmp_path / "key.pem"}
        make_certificate(**files)
        monkeypatch.setenv("MANIPLE_CERTIFICATE", str(tmp_path / "certificate.pem"))
    host = Serving(tmp_path / "host", unix=request.param == "unix", **files)
    monkeypatch.setenv("MANIPLE_ADDRESS", str(host.address))
    monkeypatch.setenv("MANIPLE_TOKEN", TOKEN)
    with maniple.Client(timeout_s=10) as client:
        yield client
    host.close()


@st.composite
def cases(draw, *, is_part: bool):
    """An array, indices in any order that may repeat and count from the end, values, weights."""
    dtype = draw(st.sampled_from(DTYPES + COMPLEX))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    axes = [st.integers(-size, size - 1) for size in shape]
    if is_part:
        is_once = draw(st.booleans())
        at = [
            draw(st.lists(axis, max_size=5, unique_by=(lambda i, n=n: i % n) if is_once else None))
            for axis, n in zip(axes, shape, strict=True)
        ]
        count = tuple(len(one) for one in at)
        flat = np.ravel_multi_index(np.ix_(*(np.array(o, int) % n for o, n in zip(at, shape, strict=True))), shape)
    else:
        at = draw(st.lists(st.tuples(*axes), max_size=8))
        count = (len(at),)
        flat = np.array([np.ravel_multi_index(np.array(one) % shape, shape) for one in at], int)
    repeats = np.unique(flat).size < flat.size
    size = int(np.prod(count))
    values = np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), dtype).reshape(count)
    alpha, beta = (1 if repeats else draw(st.integers(0, 3))), draw(st.integers(0, 3))
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape), at, flat, values, alpha, beta


def weighed(whole, flat, values, alpha, beta) -> np.ndarray:
    """What NumPy makes of it."""
    new = whole.copy().reshape(-1)
    if alpha != 1:
        new[flat] *= new.dtype.type(alpha)
    np.add.at(new, flat.reshape(-1), (values * new.dtype.type(beta)).reshape(-1))
    return new.reshape(whole.shape)


@MANY
@given(case=cases(is_part=False))
def test_elements_are_pushed_and_pulled_as_numpy_indexes_them(over, case):
    whole, at, flat, values, alpha, beta = case
    name = f"a{next(NUMBERS)}"
    over.create(name, whole)
    np.testing.assert_array_equal(over.pull_at(name, at), whole.reshape(-1)[flat])
    over.push_at(name, at, values, alpha=alpha, beta=beta)
    np.testing.assert_array_equal(over.pull(name), weighed(whole, flat, values, alpha, beta))


@MANY
@given(case=cases(is_part=True))
def test_parts_are_pushed_and_pulled_as_numpy_indexes_them(over, case):
    whole, at, flat, values, alpha, beta = case
    name = f"p{next(NUMBERS)}"
    over.create(name, whole)
    np.testing.assert_array_equal(over.pull_part(name, at), whole.reshape(-1)[flat])
    over.push_part(name, at, values, alpha=alpha, beta=beta)
    np.testing.assert_array_equal(over.pull(name), weighed(whole, flat, values, alpha, beta))
