"""The pickler of objects that plain pickle does not suffice for, such as functions and large tensors."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import cloudpickle

from monarch._wire.codes import DISPATCH_TABLE
from monarch._wire.pickle_sink import THRESHOLD, PickleSink
from monarch._wire.rebuilding import itself, make_gpu_tensor, make_storage, make_tensor, make_tied, make_typed_storage
from monarch._wire.tensor_compat import has_hooks, storage_key, untyped

Receivers = Callable[[], Sequence[str]]
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class Exporter(Protocol):
    """Exports GPU memory; implemented on a higher floor."""

    def export(self, tensor: Any, receivers: Sequence[str]) -> Reduced | None:
        """Return how each of some processes makes its copy of a tensor; None if they cannot copy it themselves."""
        ...

    def cancel(self, reduced: Reduced) -> None:
        """Withdraw an export that was not sent."""
        ...


exporter: Exporter | None = None
"""Of this process; none until it is part of a session."""


def dump_any(
    obj: Any, receivers: Receivers | None = None, here: bool = False, threshold: int = THRESHOLD
) -> tuple[bytes, list[memoryview]]:
    """Return the body and the out-of-band buffers of an object by cloudpickle's rules; see ``pickling.dumps``."""
    exported: dict[int, Reduced] = {}
    try:
        sink = PickleSink(threshold)
        pickler = _Pickler(sink, frozenset(), receivers, exported, here)
        pickler.dump(obj)
        shared = pickler.wrongly_cloned()
        if shared:
            # Only now is it known which storages are used by several tensors.
            sink = PickleSink(threshold)
            # Exported tensors may have been temporary, such as the data of a parameter.
            _cancel(exported)
            _Pickler(sink, shared, receivers, exported, here).dump(obj)
    except BaseException:
        _cancel(exported)
        raise
    return b"".join(sink.chunks), sink.buffers


def _cancel(exported: dict[int, Reduced]) -> None:
    while exported:
        _, reduced = exported.popitem()
        if exporter is not None:
            exporter.cancel(reduced)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = DISPATCH_TABLE

    def __init__(
        self,
        sink: PickleSink,
        shared: frozenset[int],
        receivers: Receivers | None,
        exported: dict[int, Reduced],
        here: bool = False,
    ) -> None:
        super().__init__(sink, protocol=5, buffer_callback=sink.keep)
        self._here = here
        self._shared = shared
        """Storages whose tensors must not be cloned."""
        self._receivers = receivers
        self._exported = exported
        """Exports, by the id of the tensor."""
        self._on_gpus: dict[Any, Any] = {}
        """The first tensor of a GPU at each place, by address, dtype, shape and strides."""
        self._sent: set[int] = set()
        self._clones: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        """By storage, its size, and first byte, end and number of used bytes of each cloned tensor."""

    def reducer_override(self, obj: Any) -> Any:
        reduce = _TORCH.get(type(obj).__name__)
        # By name first: torch may not be loaded, and then nothing has its types.
        if reduce is not None and type(obj) is getattr(sys.modules.get("torch"), type(obj).__name__, None):
            return reduce(self, obj)
        if type(obj).__name__ == "RankTensor" and hasattr(obj, "monarch_argument"):
            # Each receiver gets the tensor of its rank.
            return obj.monarch_argument()
        if type(obj).__name__ == "AsyncCollectiveTensor" and hasattr(obj, "trigger_wait"):
            # A pending result of a collective: its values are there once it has been waited for.
            return itself, (obj.trigger_wait(),)
        if (
            self._here
            and isinstance(obj, (type, types.FunctionType))
            and getattr(sys.modules["__main__"], obj.__qualname__, None) is obj
        ):
            return obj.__qualname__
        return super().reducer_override(obj)

    def tensor(self, tensor: Any) -> Any:
        """Reduce an ordinary tensor: its storage, or a clone of a small part of a large one, and its place there."""
        if (
            tensor.device.type not in ("cpu", "cuda")
            or str(tensor.layout) != "torch.strided"
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or has_hooks(tensor)
            or tensor.__dict__
        ):
            return NotImplemented
        if tensor.device.type == "cuda":
            return self._of_gpu(tensor)
        storage = tensor.untyped_storage()
        total, offset, strides = storage.nbytes(), tensor.storage_offset(), tensor.stride()
        if total >= THRESHOLD and storage_key(storage) not in self._shared:
            width, used = tensor.element_size(), tensor.numel() * tensor.element_size()
            reach = _reach(tensor.size(), strides) if used * 2 < total else None
            if reach is not None:
                part = (offset * width, (offset + reach) * width, used)
                self._clones.setdefault(storage_key(storage), (total, []))[1].append(part)
                clone = tensor.detach().clone()
                storage, offset, strides = clone.untyped_storage(), clone.storage_offset(), clone.stride()
        size = tuple(tensor.size())
        return make_tensor, (storage, tensor.dtype, offset, size, strides, tensor.requires_grad)

    def _of_gpu(self, tensor: Any) -> Any:
        place = tensor.data_ptr(), tensor.dtype, tuple(tensor.size()), tensor.stride()
        first = self._on_gpus.setdefault(place, tensor) if tensor.numel() else tensor
        if first is not tensor:
            # As tied weights do, it shares its memory with one that is sent already.
            return make_tied, (first, tensor.requires_grad)
        reduced = self._exported.get(id(tensor))
        if reduced is None and exporter is not None and self._receivers is not None:
            reduced = exporter.export(tensor, self._receivers())
            if reduced is not None:
                self._exported[id(tensor)] = reduced
        return reduced or (make_gpu_tensor, (tensor.detach().cpu(), tensor.requires_grad))

    def untyped(self, storage: Any) -> Any:
        if storage.device.type != "cpu":
            return NotImplemented
        self._sent.add(storage_key(storage))
        if not storage.nbytes():
            return make_storage, (b"",)
        import numpy

        return make_storage, (pickle.PickleBuffer(numpy.asarray(_Memory(storage)).data),)

    def typed(self, storage: Any) -> Any:
        # A new object for each tensor, so the shared part is below it.
        below = untyped(storage)
        if below.device.type != "cpu":
            return NotImplemented
        return make_typed_storage, (below, storage.dtype)

    def wrongly_cloned(self) -> frozenset[int]:
        """Return the storages that should be sent whole rather than as cloned tensors."""
        return frozenset(
            key
            for key, (total, parts) in self._clones.items()
            if key in self._sent
            or sum(used for _, _, used in parts) * 2 >= total
            or any(after[0] < before[1] for before, after in pairwise(sorted(parts)))
        )


_TORCH = {"Tensor": _Pickler.tensor, "UntypedStorage": _Pickler.untyped, "TypedStorage": _Pickler.typed}


class _Memory:
    """Return a storage as a numpy array. Not through a tensor: that depends on the numpy torch was built with."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.__array_interface__ = {
            "version": 3,
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
        }


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the number of elements from the first of a tensor to its last; None if some may overlap."""
    if not all(sizes):
        return 0
    reach = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < reach:
                return None
            reach += stride * (size - 1)
    return reach
