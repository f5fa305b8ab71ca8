"""Values of collective calls: what can be sent, what comes back, and how half precision travels."""

import numpy as np
import pytest

from maniple.collectives import values
from maniple.errors import InvalidArgument
from tests.unit.engines import engine


@pytest.mark.parametrize(
    ("x", "kind"), [(np.ones((2, 3), "float16"), "array"), (np.float32(2), "number"), (3, "number"), (1j, "number")]
)
def test_a_result_has_the_type_of_what_was_given(x, kind):
    read = values.read(x)
    assert read.kind == kind
    back = read.close(read.array)
    assert type(back) is type(x) and np.array_equal(back, x)


@pytest.mark.parametrize("x", ["text", None, True, [1.0], object()])
def test_what_is_no_value_is_refused_by_its_type(x):
    with pytest.raises(InvalidArgument, match=rf"{type(x).__qualname__} cannot be sent.*a NumPy array, a number"):
        values.read(x)


@pytest.mark.parametrize("dtype", ["bool", "O", "datetime64[s]", "U3"])
def test_a_dtype_that_cannot_be_sent_is_named(dtype):
    with pytest.raises(InvalidArgument, match=r"cannot be sent \(one of float32, .*complex128\)\. Convert them"):
        values.read(np.empty(2, dtype))


def test_the_mean_of_whole_numbers_is_computed_in_float64_and_a_copy_is_flat():
    read = values.read(np.arange(6, dtype="int32").reshape(2, 3)[:, ::2])
    assert read.flat().dtype == "int32" and read.flat(is_mean=True).dtype == "float64"
    assert read.flat().tolist() == [0, 2, 3, 5]
    read.flat()[:] = 9
    assert read.array.max() == 5


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        (np.empty(3, "float32"), r"out is float32\[3\], but the result is float32\[2\]"),
        (np.empty(2, "float64"), r"out is float64\[2\], but the result is float32\[2\]"),
        (7.0, r"out is a float, but x is of another type"),
        (np.frombuffer(bytes(8), "float32"), r"out is read-only"),
    ],
)
def test_an_output_that_cannot_take_the_result_is_refused(out, reason):
    with pytest.raises(InvalidArgument, match=reason):
        values.check_out(out, values.read(np.ones(2, "float32")), np.dtype("float32"))


def test_an_output_that_fits_gets_the_result():
    x, out = np.ones(2, "float32"), np.zeros(2, "float32")
    for one in (None, out):
        values.check_out(one, values.read(x), x.dtype)
    assert values.write(out, x) is out and out.tolist() == [1, 1]


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floating_point_values_travel_in_half_precision_if_asked_for(wire, dtype):
    x = np.array([1.0, -0.5, 384.0], dtype)
    sent = values.packed(x, wire)
    assert sent.nbytes == 6 and values.empty_packed(3, dtype, wire).nbytes == 6
    np.testing.assert_array_equal(values.opened(sent, dtype, wire), x)


@pytest.mark.parametrize(("dtype", "wire"), [("float32", "float32"), ("int64", "float16"), ("float16", "bfloat16")])
def test_other_values_travel_as_they_are(dtype, wire):
    x = np.arange(3).astype(dtype)
    assert values.packed(x, wire) is x and values.opened(x, dtype, wire) is x
    assert values.empty_packed(3, dtype, wire).dtype == dtype


def test_tensors_come_back_as_tensors_and_bfloat16_as_bfloat16():
    torch = engine("torch")
    for dtype, kind in ((torch.float64, "tensor"), (torch.bfloat16, "bfloat16")):
        x = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
        read = values.read(x)
        assert read.kind == kind and torch.equal(read.close(read.array), x.detach())
        out = torch.zeros(2, dtype=dtype)
        values.check_out(out, read, read.array.dtype)
        assert torch.equal(values.write(out, read.array), x.detach())
        assert values.written(kind, read.array).dtype == dtype
    with pytest.raises(InvalidArgument, match="out is float32"):
        values.check_out(torch.zeros(2), values.read(torch.zeros(2, dtype=torch.bfloat16)), np.dtype("float32"))
