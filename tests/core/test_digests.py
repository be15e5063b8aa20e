"""Digests: equal exactly if the values are, for each kind of value; and where arrays differ."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from monarch._core.digests.arrays import PART, digest_array
from monarch._core.digests.digest import Digest, describe_difference
from monarch._core.digests.values import digest_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

KINDS = [np.float64, np.float32, np.float16, np.int32, np.bool_, np.complex64, np.dtype(">f4")]


def whole(value: Any) -> str:
    digest = digest_of(value)
    assert digest is not None, f"no digest of {value!r}"
    return digest.whole


def difference(one: Any, other: Any) -> str:
    first, second = digest_of(one), digest_of(other)
    assert first is not None and second is not None
    return describe_difference(first, second)


numbers = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary(max_size=8)
)
values = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.frozensets(st.integers(), max_size=4),
    ),
    max_leaves=12,
)


def canonical(value: Any) -> Any:
    """Return what two values have in common exactly if they are equal here: types, order, signs of zeros."""
    if type(value) is float:
        return ("float", "nan" if value != value else struct.pack("<d", value))
    if type(value) is complex:
        return ("complex", canonical(value.real), canonical(value.imag))
    if type(value) is dict:
        return ("dict", tuple((canonical(key), canonical(each)) for key, each in value.items()))
    if type(value) in (list, tuple):
        return (type(value).__name__, tuple(map(canonical, value)))
    return (type(value).__name__, value)


@settings(max_examples=400)
@given(values, values)
def test_digests_are_equal_exactly_if_values_are(one: Any, other: Any) -> None:
    assert (whole(one) == whole(other)) == (canonical(one) == canonical(other))


@settings(max_examples=200)
@given(values)
def test_digest_repeats_for_a_copy(value: Any) -> None:
    import copy

    assert whole(copy.deepcopy(value)) == whole(value)


@given(st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=2)), min_size=65, max_size=80), st.data())
def test_one_changed_item_of_a_long_list_changes_the_digest(items: list[Any], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(items) - 1))
    item = data.draw(st.one_of(st.integers(), st.floats(), st.text(max_size=2), st.booleans()))
    changed = [*items[:at], item, *items[at + 1 :]]
    assert (whole(items) == whole(changed)) == (canonical(items) == canonical(changed))


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(st.sampled_from(KINDS), arrays.array_shapes(max_dims=3, max_side=5, min_side=0)),
    st.data(),
)
def test_arrays_have_equal_digests_exactly_if_equal(value: Any, data: st.DataObject) -> None:
    other = value.copy()
    if value.size and data.draw(st.booleans()):
        strategy = arrays.from_dtype(value.dtype)
        other.reshape(-1)[data.draw(st.integers(0, value.size - 1))] = data.draw(strategy)
    equal = np.array_equal(_bits(value), _bits(other))
    assert (whole(value) == whole(other)) == equal
    assert whole(np.asfortranarray(value)) == whole(value)


def _bits(value: Any) -> Any:
    """Return the bytes of an array with one kind of NaN."""
    value = np.ascontiguousarray(value).reshape(-1)
    if value.dtype.kind in "fc":
        value = value.astype(value.dtype.newbyteorder("=")).view(value.real.dtype.newbyteorder("="))
        value = np.where(np.isnan(value), np.array(np.nan, value.dtype), value)
    return value.view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_changes_the_digest_of_a_tensor(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, 7).to(dtype)
    for at in ((0, 0), (2, 3), (4, 6)):
        other = tensor.clone()
        other[at] = 0
        assert whole(other) != whole(tensor)
        assert difference(tensor, other) == "at 1 of 35 elements"
    assert whole(tensor.clone()) == whole(tensor)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex], ids=str)
def test_signs_of_zeros_differ_and_nans_do_not(dtype: torch.dtype) -> None:
    zero, negative = (torch.tensor([1.0, sign * 0.0]).to(dtype) for sign in (1, -1))
    if dtype != torch.complex64 and dtype != torch.complex128:
        assert whole(zero) != whole(negative)
    one, other = (torch.tensor([1.0, sign * float("nan")]).to(dtype) for sign in (1, -1))
    assert whole(one) == whole(other) != whole(zero)


@given(st.integers(1, (1 << 22) - 1), st.integers(1, (1 << 22) - 1), st.booleans())
def test_payloads_of_nans_do_not_matter(one: int, other: int, sign: bool) -> None:
    first, second = (
        np.array([0x7F800000 | payload, 0], np.uint32).view(np.float32) for payload in (one, other)
    )  # fmt: skip
    if sign:
        second.view(np.uint32)[0] |= 0x80000000
    assert whole(first) == whole(second)
    assert whole(torch.from_numpy(first)) == whole(torch.from_numpy(second))


def test_type_dtype_and_shape_are_compared() -> None:
    ones = torch.ones(6)
    forms = [
        ones, ones.double(), ones.int(), ones.reshape(2, 3), ones.reshape(3, 2), ones.reshape(6, 1), ones.numpy(),
        torch.nn.Parameter(ones), ones.to_sparse(), ones.reshape(2, 3).to_sparse_csr(), ones.tolist(),
        tuple(ones.tolist()), [1] * 6, torch.ones(6, device="meta"), torch.empty(0), torch.empty(0, 3),
    ]  # fmt: skip
    assert len({whole(each) for each in forms}) == len(forms)


@pytest.mark.parametrize("layout", ["t", "step", "expand", "flip", "offset", "permute"])
def test_layout_in_memory_does_not_matter(layout: str) -> None:
    base = torch.arange(600.0).reshape(4, 10, 15)
    view = {
        "t": base[0].t(), "step": base[::2, ::3, 1::2], "expand": base[:, :1].expand(4, 5, 15), "flip": base.flip(1),
        "offset": base[1:], "permute": base.permute(2, 0, 1),
    }[layout]  # fmt: skip
    assert whole(view) == whole(view.clone(memory_format=torch.contiguous_format))
    assert whole(view.numpy()) == whole(view.numpy().copy())


def test_lazy_conjugates_and_negations_are_read_as_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert whole(tensor.conj()) == whole(tensor.conj().resolve_conj()) != whole(tensor)
    assert whole(tensor.conj().imag) == whole(tensor.conj().imag.resolve_neg())


@pytest.mark.parametrize("shape", [(3 * 5000,), (5, 3001), (70, 300), (2, 3, 4100), (1, 1, 20000), (100, 0, 5), ()])
def test_large_arrays_say_which_blocks_differ(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    digest = digest_array(tensor)
    assert sum(size for size, _ in digest.blocks) == tensor.numel()
    if tensor.numel() > 5000:
        other = tensor.clone()
        other.view(-1)[-1] += 1
        text = difference(tensor, other)
        assert text.startswith(f"in 1 of {len(digest.blocks)} blocks"), text
        assert f"-{tensor.numel() - 1:,} in row-major order" in text


def test_blocks_are_bounded_and_no_copy_is_larger() -> None:
    digest = digest_array(torch.zeros(3, dtype=torch.uint8).expand(40, PART // 8, 3))
    assert all(size <= PART for size, _ in digest.blocks) and len(digest.blocks) <= 128


def test_digest_changes_nothing() -> None:
    tensor = torch.tensor([1.0, float("nan"), -0.0], requires_grad=True)
    doubled = tensor * 2
    before = doubled.detach().numpy().tobytes(), doubled._version
    digest_of(doubled)
    assert (doubled.detach().numpy().tobytes(), doubled._version) == before
    doubled.sum().backward()
    array = np.array([np.nan, 1.0])
    bits = array.view(np.uint64) | 5
    array.view(np.uint64)[:] = bits
    digest_of(array)
    assert (array.view(np.uint64) == bits).all()


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = dataclasses.field(default=0, repr=False)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


class Broken:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("cannot be copied")


DIFFERENT = [
    Point(1), Point(1.0), Point(1, 2), Point(torch.ones(3)), Point(torch.zeros(3)), Color.RED, Color.BLUE,
    pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b"), Fraction(1, 2), Fraction(1, 3), Counter("ab"),
    Counter("aa"), OrderedDict(a=1), {"a": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, defaultdict(list, a=1),
    defaultdict(int, a=1),
    deque([1]), deque([1], 5), torch.float32, torch.float64, torch.device("cpu"), torch.Size([1, 2]), (1, 2),
    Plain(a=1), Plain(a=torch.ones(2)), Plain(a=torch.zeros(2)), np.float32(1), np.float64(1), np.int64(1), 1, True,
    1.0, range(3), slice(1, 2), {1, 2}, frozenset({1, 2}), {1, 3}, [[1], 2], [[1, 2]], [1, [2]], "ab", ["ab"],
    ["a", "b"],
    b"ab", bytearray(b"ab"), None, ..., int, float, len, np.array(["a", "b"]), np.array(["a", "bc"]),
    np.array([1, "a"], object), np.array([1, "b"], object), np.zeros(2, [("a", "i4"), ("b", "f8")]),
    np.ones(2, [("a", "i4"), ("b", "f8")]), np.array("2020-01-01", "M8[D]"), np.array("2020-01-02", "M8[D]"),
]  # fmt: skip


def test_values_of_many_types_differ() -> None:
    digests = [whole(each) for each in DIFFERENT]
    same = [
        (one, other)
        for number, one in enumerate(DIFFERENT)
        for place, other in enumerate(DIFFERENT[:number])
        if digests[number] == digests[place]
    ]
    assert not same


@pytest.mark.parametrize(
    "value",
    [(number for number in range(3)), lambda: 1, Broken(), [Broken()]],
    ids=["generator", "function", "broken", "inside"],
)
def test_unreadable_contents_have_no_digest(value: Any) -> None:
    assert digest_of(value) is None


def test_tensors_of_subclasses_have_no_digest() -> None:
    class Mine(torch.Tensor):
        pass

    assert digest_of(torch.ones(2).as_subclass(Mine)) is None
    assert digest_of([np.ma.masked_array([1, 2], [False, True])]) is None


def test_nested_tensors_are_compared_by_their_members() -> None:
    def nested(value: float, layout: torch.layout, width: int = 3) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, width), float(value))], layout=layout)

    for layout in (torch.strided, torch.jagged):
        assert whole(nested(1, layout)) == whole(nested(1, layout)) != whole(nested(2, layout))
    assert whole(nested(1, torch.strided)) != whole(nested(1, torch.strided, 5))


def test_quantized_tensors_are_compared_by_integers_and_scale() -> None:
    def quantized(last: float = 1, scale: float = 0.1, zero: int = 0) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.tensor([0.0, last]).repeat(5000, 1), scale, zero, torch.qint8)

    def channels(zero: int = 0, axis: int = 0) -> torch.Tensor:
        scales = torch.tensor([0.1, 0.2], dtype=torch.float64)
        return torch.quantize_per_channel(torch.ones(2, 2), scales, torch.tensor([0, zero]), axis, torch.quint8)

    made = [quantized(), quantized(2), quantized(scale=0.2), quantized(zero=1), channels(), channels(1), channels(0, 1)]
    assert whole(quantized()) == whole(quantized()) and whole(channels()) == whole(channels())
    assert len({whole(each) for each in made}) == len(made)


def test_sets_do_not_depend_on_order() -> None:
    assert whole({"a", "b", "c", 1, 9}) == whole({9, "c", 1, "b", "a"})


def test_containers_may_contain_themselves() -> None:
    def endless(item: Any) -> list[Any]:
        made = [item]
        made.append(made)
        return made

    assert whole(endless(1)) == whole(endless(1)) != whole(endless(2))


def test_modules_are_compared_by_their_state() -> None:
    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    assert whole(model(1)) == whole(model(1)) != whole(model(2))
    other: Any = model(1)
    other[1].running_mean += 1
    assert whole(other) != whole(model(1))


def test_modules_are_compared_by_mode_and_their_own_attributes() -> None:
    class Mine(torch.nn.Module):
        def __init__(self, scale: Any = 1.0) -> None:
            super().__init__()
            self.inner, self.scale, self.call = torch.nn.Dropout(0.1), scale, lambda: 1

    assert whole(Mine()) == whole(Mine())
    table = torch.ones(2)
    others = [Mine(2.0), Mine([1.0]), Mine({"a": table}), Mine({"a": table * 2}), Mine().eval()]
    assert len({whole(each) for each in [Mine(), *others]}) == 6
    inside = Mine()
    inside.inner.eval()
    assert whole(inside) != whole(Mine())


def test_optimizers_are_compared_by_their_state() -> None:
    def optimizer(steps: int) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(3))
        made = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        for _ in range(steps):
            weight.sum().backward()
            made.step()
        return made

    assert whole(optimizer(1)) == whole(optimizer(1)) != whole(optimizer(2))


def test_digests_of_different_forms_do_not_describe_a_difference() -> None:
    assert difference(torch.ones(2), torch.ones(3)) == "" == difference([1], [2])
    assert describe_difference(Digest("a"), Digest("b")) == ""


def test_data_frames_are_compared_by_their_contents() -> None:
    pandas = pytest.importorskip("pandas")

    def frame(**columns: Any) -> Any:
        return pandas.DataFrame({"a": [1, 2, 3], "b": ["x", "y", None], "c": [0.5, float("nan"), 2.0], **columns})

    different = [
        frame(), frame(a=[1, 2, 4]), frame(a=[1.0, 2.0, 3.0]), frame(b=["x", "y", "z"]), frame(b=["x", "z", None]),
        frame(c=[0.5, float("nan"), -0.0]), frame()[["b", "a", "c"]], frame().set_index("a"), frame().T, frame()["a"],
        frame()["a"].rename("z"), frame(b=pandas.Categorical(["x", "y", "x"])),
        frame(b=pandas.Categorical(["y", "x", "y"])),
        frame(a=pandas.to_datetime(["2020", "2021", "2022"])), frame(a=pandas.array([1, 2, None], "Int64")),
        frame().iloc[[2, 1, 0]], frame().set_index(["a", "b"]), frame().rename(columns={"a": "q"}),
    ]  # fmt: skip
    assert len({whole(each) for each in different}) == len(different)
    assert whole(frame()) == whole(frame()) == whole(frame().copy())
