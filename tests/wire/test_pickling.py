"""Pickling with separate buffers: what round-trips, and what leaves the body."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import subprocess
import sys
import types
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.issuing import encoding
from monarch._wire import pickler, pickling
from monarch._wire.pickle_sink import THRESHOLD
from monarch._wire.pickling import dumps, dumps_call, dumps_whole, loads
from monarch._wire.plain import loads_plain

LARGE = 2 * THRESHOLD


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # From torch itself, wherever it builds such tensors.
        warnings.filterwarnings("ignore", message=".*(in beta state|in prototype stage|CSR|deprecated).*")
        yield


def sent(obj: Any) -> Any:
    """Return the object as it arrives: on writable copies of the buffers, like a private mapping."""
    body, buffers = dumps(obj)
    assert all(buffer.c_contiguous and buffer.format == "B" and buffer.ndim == 1 for buffer in buffers)
    return loads(body, [memoryview(bytearray(buffer)) for buffer in buffers])


def sizes(obj: Any) -> list[int]:
    return [buffer.nbytes for buffer in dumps(obj)[1]]


@pytest.mark.parametrize(
    "obj",
    [
        b"x" * LARGE,
        ("step", [b"x" * LARGE, bytearray(LARGE)]),
        {"a": np.arange(LARGE)},
        [torch.arange(LARGE)],
        {1, "a"},
    ],
)
def test_whole_body_needs_no_buffers(obj: Any) -> None:
    """Requests and answers of services carry nothing beside their body."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = loads(dumps_whole(obj))
    assert repr(back) == repr(obj)
    assert type(back) is type(obj)


def test_whole_body_of_bytes_names_no_class() -> None:
    """The receiving thread accepts only plain values."""
    assert loads_plain(dumps_whole(("token", [b"x" * LARGE], bytearray(LARGE)))) == (
        "token",
        [b"x" * LARGE],
        bytearray(LARGE),
    )


# Plain values


@pytest.mark.parametrize(
    "obj",
    [((3,), {}), None, ((), {"lr": 0.1, "name": "x"}), ([1, [2.0, b"x"], {"a": (True, 1j)}], {}), "x" * LARGE],
)
def test_plain_value_is_pickled_plainly(obj: Any) -> None:
    assert dumps(obj) == (pickle.dumps(obj, 5), [])
    assert loads(dumps(obj)[0]) == obj


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2.5, "three", None, True, 1j), {}), (tuple(range(100)), {}), ((1,), {"x": 2}), (([1],), {}),
     ((b"x" * THRESHOLD,), {}), (("x" * THRESHOLD,), {}), ((np.arange(4), print), {})],
)  # fmt: skip
def test_arguments_are_pickled_as_any_pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    body, buffers = dumps_call(args, kwargs)
    assert repr(loads(body, [bytes(each) for each in buffers])) == repr((args, kwargs))
    assert len(buffers) == len(dumps((args, kwargs))[1])


@dataclasses.dataclass
class Report:
    text: str
    more: Any = None


def test_classes_without_code_are_pickled_plainly_like_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "plain_classes", {Report})
    plain = Report("a", [1, Report("b")])
    assert dumps(plain) == (pickle.dumps(plain, 5), []) and loads(dumps(plain)[0]) == plain
    array = Report("a", np.arange(3))
    assert loads(*dumps(array)).more.tolist() == [0, 1, 2]
    # What plain pickle refuses travels as before.
    assert loads(*dumps(Report("a", lambda: 7))).more() == 7


def test_recursive_list_is_not_walked_for_ever() -> None:
    loop: list[Any] = []
    loop.append(loop)
    back = sent(loop)
    assert back[0] is back


def test_torch_is_not_imported_for_other_types() -> None:
    code = """
import sys, numpy
from monarch._wire.pickling import dumps, loads
loads(*dumps([numpy.zeros(100_000), bytes(100_000), lambda: 3]))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_main_definitions_are_sent_by_value() -> None:
    code = """
import sys
from monarch._wire.pickling import dumps
scale = 3
class Model:
    def __init__(self): self.x = 2
    def double(self): return helper(self.x)
def helper(x): return x * scale
sys.stdout.buffer.write(dumps(((Model(), helper), {}))[0])
"""
    body = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    (model, helper), _ = loads(body)
    assert (model.double(), helper(5)) == (6, 15)


def test_module_definitions_are_sent_by_reference() -> None:
    assert sent(OrderedDict) is OrderedDict
    assert len(dumps(subprocess.run)[0]) < 100


# Bytes


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and same(self.inside, other.inside)

    __hash__ = None  # pyright: ignore


class Name(bytes):
    pass


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


# Beginnings that look like opcodes of the stream, and sizes about the threshold.
BEGINNINGS = [
    b"",
    b"\x95",
    b"\x95" + (9).to_bytes(8, "little"),
    b"\x95" + THRESHOLD.to_bytes(8, "little"),
    b"B\0\0\1\0",
]
PAYLOADS = st.builds(
    lambda kind, begin, size: kind((begin + bytes(size))[:size]),
    st.sampled_from([bytes, bytearray, Name, lambda data: np.frombuffer(data, np.uint8).copy()]),
    st.sampled_from(BEGINNINGS),
    st.sampled_from([0, 9, THRESHOLD - 1, THRESHOLD, THRESHOLD + 9, LARGE]),
)
LEAVES = st.integers() | st.text() | PAYLOADS | st.builds(lambda size: ["x" * 99] * size, st.sampled_from([1, 2000]))
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Box, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(NESTED, st.booleans())
def test_bytes_round_trip_anywhere(obj: Any, twice: bool) -> None:
    if twice:
        obj = [obj, obj]
    body, buffers = dumps(obj)
    assert all(buffer.nbytes >= THRESHOLD for buffer in buffers)
    back = loads(body, [memoryview(bytearray(buffer)) for buffer in buffers])
    assert same(back, obj)
    assert same(loads(body, [bytes(buffer) for buffer in buffers]), obj)
    if twice and not isinstance(obj[0], int):
        assert back[0] is back[1]


def test_many_small_values_stay_in_the_body() -> None:
    obj = [[str(number), number, float(number)] for number in range(5_000)]
    assert sizes(obj) == []
    assert sent(obj) == obj


# Arrays and tables


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE).reshape(2, -1),
        np.asfortranarray(np.arange(LARGE).reshape(64, -1)),
        np.arange(LARGE)[::3],
        np.arange(LARGE).reshape(64, -1)[:, 5:90],
        np.zeros(LARGE, [("a", "i4"), ("b", "f8")]),
        np.float32(3.5),
        np.zeros((0, 5)),
        np.array("2026-01-01", "M8[D]"),
        np.arange(10),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_round_trip(array: Any) -> None:
    back = sent(array)
    assert (back.dtype, back.shape, type(back)) == (array.dtype, array.shape, type(array))
    assert np.array_equal(back, array)
    if isinstance(back, np.ndarray):
        assert back.flags.writeable
        assert bool(sizes(array)) == (array.nbytes >= THRESHOLD)


def test_object_and_read_only_arrays_round_trip() -> None:
    assert sent(np.array([1, "a", None], object)).tolist() == [1, "a", None]
    fixed = np.arange(LARGE)
    fixed.flags.writeable = False
    assert not sent(fixed).flags.writeable


def test_table_is_not_copied() -> None:
    table = pa.table({"a": np.arange(LARGE), "b": np.ones(LARGE), "c": ["x"] * LARGE})
    body, buffers = dumps(table)
    assert len(body) < 5000
    memory = [memoryview(bytearray(buffer)) for buffer in buffers]
    back = loads(body, memory)
    assert back.equals(table)
    memory[0][:8] = (7).to_bytes(8, "little")
    assert back["a"][0].as_py() == 7


# Tensors


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.uint8, torch.float64]


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of some storages, overlapping or not, with any strides."""
    made: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(0, 60))
        dtype = draw(st.sampled_from(DTYPES))
        base = torch.arange(count).to(dtype)
        for _ in range(draw(st.integers(1, 3))):
            steps = draw(st.lists(st.integers(0, 7), max_size=3))
            left = draw(st.integers(0, max(count - 1, 0)))
            offset, shape = left, []
            for step in steps:
                room = (count - 1 - left) // step if step else 3
                size = draw(st.integers(0, min(room + 1, 5))) if count else 0
                left += step * max(size - 1, 0)
                shape.append(size)
            if not count and not shape:
                continue
            view = base.as_strided(shape, steps, offset)
            made.append(view.detach().requires_grad_(draw(st.booleans()) and dtype.is_floating_point))
    return draw(st.permutations(made))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.requires_grad == other.requires_grad
        and torch.equal(one, other)
    )


@settings(max_examples=400, deadline=None)
@given(tensors(), st.data())
def test_tensors_keep_shared_storages(made: list[torch.Tensor], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        threshold = data.draw(st.sampled_from([64, THRESHOLD]))
        patch.setattr(pickling, "THRESHOLD", threshold)
        patch.setattr(pickler, "THRESHOLD", threshold)
        back, again = sent(made), sent(made)
    assert all(map(equal, back, made))
    for one, other in zip(back, made, strict=True):
        if one.untyped_storage().nbytes() == other.untyped_storage().nbytes():
            assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
    before = [tensor.detach().clone() for tensor in made]
    written = [index for index, tensor in enumerate(made) if tensor.numel()]
    for _ in range(4 if written else 0):
        # A write to one shows in the others, here and there.
        index = data.draw(st.sampled_from(written))
        place = tuple(data.draw(st.integers(0, size - 1)) for size in made[index].shape)
        with torch.no_grad():
            back[index][place] = made[index][place] = 0 if made[index].dtype is torch.bool else 99
        assert all(map(equal, back, made))
    # And never in another message.
    assert all(torch.equal(one, other) for one, other in zip(again, before, strict=True))


def test_large_tensor_leaves_body_without_copy() -> None:
    tensor = torch.zeros(LARGE)
    body, buffers = dumps(((tensor,), {"twice": tensor}))
    assert len(body) < 300
    tensor[0] = 5
    (one,), two = loads(body, buffers)
    assert one is two["twice"]
    assert one[0] == 5


def test_small_part_of_large_tensor_is_sent_alone() -> None:
    base = torch.arange(LARGE)
    assert sizes(base[:4]) == []
    assert sizes(base[: LARGE // 4]) == [LARGE * 2]
    assert sizes(base[: LARGE // 2]) == [LARGE * 8]
    assert sizes([base[:4], base[10:14]]) == []
    # If it would be visible, the storage is sent: a part and the whole in either order, overlaps, many parts.
    for views in ([base[:4], base], [base, base[:4]], [base[:4], base[3:6]], list(base.split(LARGE // 8))):
        assert sizes(views) == [LARGE * 8]
    column = base.view(-1, 64)[:, 3]
    assert sizes(column) == []
    assert torch.equal(sent(column), column)
    assert sizes([base[:4], base.untyped_storage()]) == [LARGE * 8]
    assert sizes(base[:1].expand(9)) == [LARGE * 8]


def test_module_keeps_its_tied_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    model[1].weight = model[0].weight
    back = sent(model)
    assert back[0].weight is back[1].weight
    assert isinstance(back[0].weight, torch.nn.Parameter)
    state = sent(model.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in state.items())
    back(torch.ones(3, 200)).sum().backward()


class Tagged(torch.Tensor):
    pass


def test_tensors_of_other_kinds_round_trip() -> None:
    dense = torch.randn(4, 40_000)
    for tensor in (
        dense.to(torch.complex64).conj(),
        dense.to(torch.complex64).conj().imag,
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to(torch.uint16),
        dense.to(torch.float8_e4m3fn),
        torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.zeros(1).expand(100_000),
        dense.t(),
    ):
        back = sent(tensor)
        assert (back.dtype, back.layout, back.shape) == (tensor.dtype, tensor.layout, tensor.shape)
        assert back.is_conj() == tensor.is_conj()
        one, other = (
            (x.dequantize() if x.is_quantized else x.to_dense() if x.layout != torch.strided else x)
            for x in (back, tensor)
        )
        assert torch.equal(one.to(torch.complex64), other.to(torch.complex64))
    tagged = dense.as_subclass(Tagged)
    tagged.note = "mine"  # pyright: ignore
    back = sent(tagged)
    assert (type(back), back.note) == (Tagged, "mine")
    assert torch.equal(back.as_subclass(torch.Tensor), dense)
    assert sizes(tagged) == [dense.nbytes]
    noted = torch.zeros(3)
    noted.note = "mine"  # pyright: ignore
    assert sent(noted).note == "mine"
    assert sent(torch.empty(3, device="meta")).device.type == "meta"
    nested = sent(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    assert [part.shape for part in nested.unbind()] == [(2,), (3,)]


def test_tensor_of_graph_arrives_as_leaf() -> None:
    weight = torch.ones(LARGE, requires_grad=True)
    back = sent(weight * 2)
    assert back.requires_grad
    assert back.is_leaf


def test_modes_of_receiver_do_not_matter() -> None:
    body, buffers = dumps([torch.ones(LARGE), torch.ones(3)])
    with torch.device("meta"), torch.inference_mode():
        back = loads(body, buffers)
        again = dumps(back)
    assert [tensor.device.type for tensor in back] == ["cpu", "cpu"]
    assert loads(*again)[1].tolist() == [1, 1, 1]


def test_small_tensors_can_be_resized() -> None:
    assert sent(torch.ones(3)).resize_(5).shape == (5,)
    assert sent(torch.empty(0)).resize_(5).shape == (5,)


def test_tensors_on_read_only_buffers() -> None:
    body, buffers = dumps(torch.ones(LARGE))
    tensor = loads(body, [bytes(buffer) for buffer in buffers])
    tensor += 1
    assert tensor[0] == 2


@pytest.mark.parametrize("constant", [torch.channels_last, torch.preserve_format, torch.per_tensor_affine])
def test_constants_of_torch_are_those_of_torch(constant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # They do not know their module, and plain pickle takes the first one that has them, such as the program's.
    monkeypatch.setattr(sys, "torch", torch, raising=False)
    monkeypatch.setattr(sys, "per_tensor_affine", torch.per_tensor_affine, raising=False)
    monkeypatch.setattr(pickle, "torch", torch, raising=False)
    batch: list[Any] = [(encoding.NEW, 1, encoding.Template("aten", (), ([constant],), {"memory_format": constant}))]
    bodies = dumps([constant])[0], encoding.pack(batch)
    monkeypatch.undo()
    assert loads(bodies[0])[0] is constant
    entry = encoding.unpack(bodies[1])[0]
    assert isinstance(entry, tuple)
    template = entry[2]
    assert template.args[0][0] is constant and template.kwargs["memory_format"] is constant


def test_storages_round_trip() -> None:
    storage = torch.arange(LARGE).untyped_storage()
    back = sent([storage, torch.tensor([], dtype=torch.int64).set_(storage)])
    assert back[1].untyped_storage() is back[0]
    assert torch.equal(back[1], torch.arange(LARGE))


def test_pickling_keeps_no_references() -> None:
    gc.collect()
    gc.disable()
    try:
        array = np.zeros(LARGE)
        owner = weakref.ref(array)
        _, buffers = dumps(Box([array, torch.zeros(LARGE), lambda: 3]))
        del array, buffers
        assert owner() is None
        data = np.zeros(LARGE * 4, np.uint8)
        owner = weakref.ref(data)
        tensor = loads(dumps(torch.ones(LARGE))[0], [data.data])
        del data
        part = tensor[5:].detach()
        del tensor
        assert owner() is not None
        del part
        assert owner() is None
    finally:
        gc.enable()


# Errors


def test_code_keeps_the_name_of_its_file() -> None:
    """By it frames, breakpoints and errors find their cell: also in methods and in functions inside of others."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    source = "class A:\n  def f(self):\n    return lambda: [x for x in 'a']\ndef g(): 1 / 0\n"
    exec(compile(source, "a file of this test", "exec"), scope)
    back, function = sent((scope["A"], scope["g"]))
    inner = back().f()
    assert inner() == ["a"]
    for code in (back.f.__code__, inner.__code__, function.__code__, *inner.__code__.co_consts):
        if isinstance(code, types.CodeType):
            assert code.co_filename == "a file of this test"
    assert function.__code__.co_firstlineno == 4
    assert dumps(scope["g"])[0] == dumps(scope["g"])[0]
