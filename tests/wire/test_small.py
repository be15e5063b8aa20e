"""Small arrays and tensors beside plain values: they arrive as otherwise, without cloudpickle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch._wire import pickling
from monarch._wire.pickle_sink import THRESHOLD
from monarch._wire.pickler import dump_any
from monarch._wire.pickling import dumps, loads
from monarch._wire.small_arrays import MOST

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool]
DTYPES += [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@pytest.fixture
def at_length(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Values pickled through cloudpickle."""
    seen: list[Any] = []

    def dump(obj: Any, *args: Any) -> Any:
        seen.append(obj)
        return dump_any(obj, *args)

    monkeypatch.setattr(pickling, "dump_any", dump)
    return seen


def both(obj: Any) -> tuple[Any, Any]:
    """Return an object as it arrives in short form, and as it arrives through cloudpickle."""
    body, buffers = dump_any(obj)
    return loads(*dumps(obj)), loads(body, [memoryview(bytearray(buffer)) for buffer in buffers])


@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**31))
def test_tensor_arrives_as_by_cloudpickle(shape: tuple[int, ...], dtype: torch.dtype, grad: bool, seed: int) -> None:
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)
    tensor.requires_grad_(grad and (dtype.is_floating_point or dtype.is_complex))
    for back in both(tensor):
        assert type(back) is torch.Tensor and back.dtype == dtype and back.shape == tensor.shape
        assert back.stride() == tensor.stride() and back.storage_offset() == 0
        assert back.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        assert back.requires_grad == tensor.requires_grad and back.is_leaf
        assert torch.equal(back, tensor)
        assert back.detach().resize_(9999).shape == (9999,)


@given(SHAPES, st.sampled_from("?bhilBHILefdgFD"), st.integers(0, 2**31))
def test_array_arrives_as_by_cloudpickle(shape: tuple[int, ...], kind: str, seed: int) -> None:
    array = (np.random.default_rng(seed).random(shape) * 9).astype(kind)
    for back in both(np.asarray(array)):
        assert type(back) is np.ndarray and back.dtype == array.dtype and back.shape == array.shape
        assert back.flags.c_contiguous and back.flags.writeable and back.flags.aligned
        assert np.array_equal(back, array)
        back[...] = 0
    scalar = array.dtype.type(3)
    for back in both({"loss": scalar}):
        assert type(back["loss"]) is type(scalar) and back["loss"] == scalar


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: ((torch.ones(3), 1), {"lr": 0.1, "batch": [torch.zeros(2, 3), np.arange(4)]}),
        lambda: np.float32(2.5),
        lambda: np.zeros((3, 4)),
        lambda: torch.ones((), dtype=torch.bfloat16),
    ],
)
def test_small_values_need_no_cloudpickle(make: Any, at_length: list[Any]) -> None:
    assert dumps(make())[1] == []
    assert not at_length


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(10)[2:5],
        lambda: torch.ones(2, 3).t(),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.empty(0),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(MOST // 4),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.qint8),
        lambda: np.asfortranarray(np.ones((3, 4))),
        lambda: np.ones(4)[::2],
        lambda: np.array(["a"], object),
        lambda: np.ones(3, ">f8"),
        lambda: np.array("2026-01-01", "M8[D]"),
        lambda: np.ma.masked_array([1, 2], [False, True]),
        lambda: lambda: 3,
        lambda: [torch.ones(3)] * 60,
    ],
)
def test_other_values_use_full_pickling(make: Any, at_length: list[Any]) -> None:
    value = make()
    dumps(value)
    assert len(at_length) == 1 and at_length[0] is value


def test_tensors_sharing_memory_share_it_on_arrival(at_length: list[Any]) -> None:
    base = torch.zeros(6)
    one, two, same = base[:], base.view(2, 3), base
    back = loads(*dumps([one, two, same]))
    back[0][4] = 7
    assert (back[1][1, 1], back[2][4]) == (7, 7) and len(at_length) == 1
    again = loads(*dumps([same, same]))
    assert again[0] is again[1] and len(at_length) == 1


def test_read_only_array_stays_read_only() -> None:
    fixed = np.arange(4)
    fixed.flags.writeable = False
    assert not loads(*dumps([fixed]))[0].flags.writeable


def test_marked_tensor_keeps_its_marks() -> None:
    noted = torch.zeros(3)
    noted.note = "mine"  # pyright: ignore
    assert loads(*dumps([noted]))[0].note == "mine"


@pytest.mark.parametrize("size", [65_535, 65_536, 100_000, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1])
def test_array_of_any_size_arrives_beside_anything(size: int) -> None:
    """Also one that stays in the body and is larger than a frame of pickle."""
    for around in ([], [lambda: 3]):
        array = np.arange(size, dtype=np.uint8)
        fixed = array.copy()
        fixed.flags.writeable = False
        body, buffers = dumps([array, fixed, bytearray(array), *around])
        back = loads(body, [memoryview(bytearray(buffer)) for buffer in buffers])
        assert len(buffers) == (3 if size >= THRESHOLD else 0)
        assert all(np.array_equal(np.frombuffer(each, np.uint8), array) for each in back[:3])


def test_modes_of_receiver_do_not_matter() -> None:
    body, _ = dumps([torch.ones(3), np.ones(3)])
    with torch.device("meta"), torch.inference_mode():
        tensor = loads(body)[0]
    assert tensor.device.type == "cpu" and tensor.tolist() == [1, 1, 1]


def test_torch_is_not_imported_for_arrays() -> None:
    code = "import sys, numpy; from monarch._wire.pickling import dumps, loads; loads(*dumps([numpy.ones(3)])); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
