"""Pickling of messages: a body of bytes, plus the large buffers, in frames or through shared memory.

A buffer of ``THRESHOLD`` bytes or more leaves the body: array and table data, tensor storages, ``bytes`` and
``bytearray``. It is not copied here: ``dumps`` returns the object's own memory, which must be copied before the object
changes. ``loads`` makes arrays and tensors on the buffers it is given, so these should be writable and private;
``bytes`` and ``bytearray`` own their memory and cost one copy there. Text always stays in the body.

CPU tensors are sent by storage, so tensors of one message that share a storage still share one on arrival. A tensor
that uses less than half of a large storage is cloned rather than sent with all of it (so its strides may become dense,
like a numpy view's), unless that would be visible: unless its elements overlap, or other tensors of the message overlap
it, or together they use half of the storage. A storage on a received buffer cannot be resized; a small one can. Other
layouts and subclasses of Tensor are pickled as torch does it.

A GPU tensor is exported to its receivers if these are known to be ranks, and each copies it from GPU to GPU; otherwise
it goes through CPU memory, and stays there if the receiver uses no GPU.
"""

from __future__ import annotations

import pickle
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Protocol, TypeGuard

import cloudpickle

from monarch._core.kinds import is_dict, is_tuple
from monarch._wire.codes import DISPATCH_TABLE
from monarch._wire.small import LARGE, PLAIN, SMALL, dump_large, dump_small, size_of
from monarch._wire.tensor_compat import has_hooks, storage_key, untyped
from monarch.exceptions import SerializationError

THRESHOLD = 120 * 1024
"""Size from which a buffer is sent beside the body: below, one more copy costs less than a frame of its own. Copies of
128 KiB and more cost far more, since the allocator maps each again. At least pickle's frame size: see ``_Sink``."""
SHARED = 384 * 1024
"""Total size of buffers from which a message puts them in shared memory; below, a socket costs less."""

LARGEST_BODY = 1 << 20
"""Bytes of the largest body in a message; a larger one, as of a long text or list, goes beside it like a buffer, so the
receiver maps it when it needs it. To receive it at once may need more memory than there is, and it would be lost."""
_PLAIN_NODES = 50
_kind_of: Callable[[Any], type[Any]] = type
"""For type checkers, to which the type of an Any is unknown."""
ATOMS: set[type] = {int, float, complex, bool, str, type(None)}
"""Types without parts, which plain pickle suffices for. Classes of this package whose reduced form has only such ones
are added as they are defined."""

_BLAME_SECONDS = 1.0
_BLAME_DEPTH = 20
_BLAME_PARTS = 1000


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
plain_classes: set[type] = set()
"""Classes of this package, without code for pickling, which the receiver has too. Added to as they are defined."""
in_rank = False
"""Whether GPU tensors go to GPU memory on arrival, even if this process has not used the GPU yet."""


def dumps(
    obj: Any, what: str = "", receivers: Receivers | None = None, here: bool = False
) -> tuple[bytes, list[memoryview]]:
    """Return the body and the out-of-band buffers of an object; each buffer is contiguous, of at least THRESHOLD bytes.

    Args:
        obj: anything that can be pickled; classes and functions of ``__main__`` travel by value.
        what: its name in errors. Without one, a pair of a tuple and a dict is named ``args`` and ``kwargs``.
        receivers: returns the proc ids of the receivers, without duplicates; called only if needed.
        here: whether classes and functions of this ``__main__`` go by name, because the receiver has them too.

    Raises:
        SerializationError: a part cannot be pickled; the text begins with the path to it.
    """
    body, buffers = _dumps(obj, what, receivers, here)
    return (body, buffers) if len(body) <= LARGEST_BODY else beside(body, buffers)


def _dumps(obj: Any, what: str, receivers: Receivers | None, here: bool) -> tuple[bytes, list[memoryview]]:
    """Return the same, with a body of any size."""
    try:
        if type(obj) in ATOMS:
            return pickle.dumps(obj, 5), []
        plain = _plainness(obj)
        if plain is PLAIN:
            return pickle.dumps(obj, 5), []
        if plain is SMALL:
            return dump_small(obj), []
        if plain is LARGE:
            sink = _Sink()
            dump_large(obj, sink)
            return b"".join(sink.chunks), sink.buffers
        return _dump(obj, receivers, here)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # A SystemExit of the object's own code must not end what sends or receives it.
        try:
            text = _blame(obj, what, error)
        except KeyboardInterrupt:
            raise
        except BaseException:  # by a repr, say, that raises
            text = f"{what or 'value'}: {_text(error)}"
        raise SerializationError(text) from error


def dumps_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], receivers: Receivers | None = None
) -> tuple[bytes, list[memoryview]]:
    """Return the same as ``dumps`` of the pair; quicker for positional arguments without parts."""
    if not kwargs and ATOMS.issuperset(map(type, args)):
        body = pickle.dumps((args, kwargs), 5)
        return (body, []) if len(body) <= LARGEST_BODY else beside(body)
    return dumps((args, kwargs), "", receivers)


def beside(body: bytes, buffers: Sequence[memoryview] = ()) -> tuple[bytes, list[memoryview]]:
    """Return a large body as the first buffer of a small one."""
    # The function, a MARK, a NEXT_BUFFER for each, TUPLE, REDUCE, STOP.
    small = b"\x80\x05" + _WITHIN + b"(" + b"\x97" * (1 + len(buffers)) + b"tR."
    return small, [memoryview(body), *buffers]


def within(body: memoryview, *buffers: Any) -> Any:
    """Return the object of a large body, which is the first buffer of a small one."""
    return pickle.loads(body, buffers=buffers)


_WITHIN = b"c" + f"{__name__}\n{within.__name__}\n".encode()
"""The opcode GLOBAL of the function."""


def dumps_whole(obj: Any, what: str = "") -> bytes:
    """Return an object as one body, its large buffers in it, for messages that carry nothing else."""
    body, buffers = dumps(obj, what)
    return _dump(obj, threshold=sys.maxsize)[0] if buffers else body


def are_large(buffers: Sequence[memoryview]) -> bool:
    """Return whether these buffers of one message go through shared memory if the receiver is on the same host."""
    return sum(buffer.nbytes for buffer in buffers) >= SHARED


def loads(body: bytes, buffers: Sequence[memoryview | bytes] = ()) -> Any:
    """Return the object of a body and its buffers. Objects made on a buffer keep it alive; nothing else here does.

    Raises:
        SerializationError: it cannot be unpickled here.
    """
    try:
        return pickle.loads(body, buffers=buffers) if buffers else pickle.loads(body)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # A SystemExit of the object's own code must not end what sends or receives it.
        raise unreadable(error) from error


def unreadable(error: BaseException) -> SerializationError:
    """Return the error of a value that cannot be unpickled, for one that was raised meanwhile."""
    kind = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
    text = f"cannot be unpickled here: {kind}{_text(error)}"
    if isinstance(error, ImportError):
        text += "; install the module in that environment too, or define its functions and classes in the notebook"
    return SerializationError(text)


def _text(error: BaseException) -> str:
    """Return the text of an error, whose own code may raise too, or else its class."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = ""
    kind = type(error).__name__
    return text if text and isinstance(error, Exception) else f"{kind}: {text}" if text else kind


def _plainness(obj: Any) -> object:
    """Return whether plain pickle suffices: for a few objects of builtin types or ``plain_classes`` (PLAIN), with
    arrays and small tensors (SMALL), or with some that go beside the body (LARGE).
    """
    nodes: list[Any] = [obj]
    plainness: object = PLAIN
    storages: dict[int, Any] = {}
    for node in nodes:  # grows while it is walked
        kind = _kind_of(node)
        if kind in ATOMS:
            continue
        if kind is tuple or kind is list:
            nodes += node
        elif kind is dict:
            nodes += node
            nodes += node.values()
        elif kind is bytes:
            if len(node) >= THRESHOLD:
                plainness = LARGE
        elif kind in plain_classes:
            nodes += node.__dict__.values()
        else:
            size = size_of(node, kind, THRESHOLD, storages)
            if size is None:
                return None
            if plainness is not LARGE:
                plainness = size
        if len(nodes) > _PLAIN_NODES:
            return None
    return plainness


def _dump(
    obj: Any, receivers: Receivers | None = None, here: bool = False, threshold: int = THRESHOLD
) -> tuple[bytes, list[memoryview]]:
    exported: dict[int, Reduced] = {}
    try:
        sink = _Sink(threshold)
        pickler = _Pickler(sink, frozenset(), receivers, exported, here)
        pickler.dump(obj)
        shared = pickler.wrongly_cloned()
        if shared:
            # Only now is it known which storages are used by several tensors.
            sink = _Sink(threshold)
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


class _Sink:
    """The file that a pickler writes to. It turns large bytes and bytearrays in the stream into out-of-band buffers.

    CPython's pickler writes these in two calls: the first ends in opcode and length, the second is the object itself,
    not a copy. Opcode and length are replaced by a call of the type with the next buffer. Written otherwise, they would
    stay in the body, which works too, with more copies.
    """

    __slots__ = ("buffers", "chunks", "threshold")

    def __init__(self, threshold: int = THRESHOLD) -> None:
        self.threshold = threshold
        self.chunks: list[bytes | bytearray | memoryview] = []
        self.buffers: list[memoryview] = []

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether this buffer stays in the body, for the pickler."""
        raw = buffer.raw()
        if raw.nbytes < self.threshold:
            return True
        self.buffers.append(raw)
        return False

    def write(self, data: bytes | bytearray | pickle.PickleBuffer) -> None:
        if type(data) is pickle.PickleBuffer:
            # A buffer that stays in the body, written separately as it is larger than a frame.
            self.chunks.append(data.raw())
            return
        size = len(data)
        # A chunk of opcodes can be as large, but it is the first, or begins with a frame that fits into it.
        opcodes = not self.chunks or (data[:1] == pickle.FRAME and int.from_bytes(data[1:9], "little") <= size)
        if size >= self.threshold and not opcodes:
            before = bytes(self.chunks[-1])
            for header, call in _headers(data, size):
                if before.endswith(header):
                    self.chunks[-1] = before[: -len(header)] + call
                    self.buffers.append(memoryview(data))
                    return
        self.chunks.append(data)


def _headers(data: bytes | bytearray, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Return how the stream may announce this payload, and its replacement."""
    name = type(data).__name__.encode()
    # The two names, STACK_GLOBAL, NEXT_BUFFER, TUPLE1, REDUCE: nothing is memoized, so memo numbers stay valid.
    call = b"\x8c\x08builtins\x8c" + bytes([len(name)]) + name + b"\x93\x97\x85R"
    if type(data) is bytes:
        if size < 1 << 32:
            yield pickle.BINBYTES + size.to_bytes(4, "little"), call
        yield pickle.BINBYTES8 + size.to_bytes(8, "little"), call
    elif type(data) is bytearray:
        yield pickle.BYTEARRAY8 + size.to_bytes(8, "little"), call


class _Pickler(cloudpickle.Pickler):
    dispatch_table = DISPATCH_TABLE

    def __init__(
        self,
        sink: _Sink,
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
            return _itself, (obj.trigger_wait(),)
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
        return _make_tensor, (storage, tensor.dtype, offset, size, strides, tensor.requires_grad)

    def _of_gpu(self, tensor: Any) -> Any:
        place = tensor.data_ptr(), tensor.dtype, tuple(tensor.size()), tensor.stride()
        first = self._on_gpus.setdefault(place, tensor) if tensor.numel() else tensor
        if first is not tensor:
            # As tied weights do, it shares its memory with one that is sent already.
            return _make_tied, (first, tensor.requires_grad)
        reduced = self._exported.get(id(tensor))
        if reduced is None and exporter is not None and self._receivers is not None:
            reduced = exporter.export(tensor, self._receivers())
            if reduced is not None:
                self._exported[id(tensor)] = reduced
        return reduced or (_make_gpu_tensor, (tensor.detach().cpu(), tensor.requires_grad))

    def untyped(self, storage: Any) -> Any:
        if storage.device.type != "cpu":
            return NotImplemented
        self._sent.add(storage_key(storage))
        if not storage.nbytes():
            return _make_storage, (b"",)
        import numpy

        return _make_storage, (pickle.PickleBuffer(numpy.asarray(_Memory(storage)).data),)

    def typed(self, storage: Any) -> Any:
        # A new object for each tensor, so the shared part is below it.
        below = untyped(storage)
        if below.device.type != "cpu":
            return NotImplemented
        return _make_typed_storage, (below, storage.dtype)

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


def _itself(value: Any) -> Any:
    return value


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


def _make_storage(buffer: Any) -> Any:
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    if isinstance(buffer, bytearray):
        # From the body, so small: a copy in its own memory can be resized.
        return torch.frombuffer(buffer, dtype=torch.uint8).clone().untyped_storage()
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _make_tensor(
    storage: Any, dtype: Any, offset: int, size: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Any:
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, strides)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def goes_to_gpu() -> bool:
    """Return whether GPU tensors are put into GPU memory of this process on arrival."""
    import torch

    return torch.cuda.is_initialized() or (in_rank and torch.cuda.is_available())


def _make_tied(first: Any, requires_grad: bool) -> Any:
    """Return a tensor with the memory of another one of its message."""
    made = first.detach()
    return made.requires_grad_() if requires_grad else made


def _make_gpu_tensor(tensor: Any, requires_grad: bool) -> Any:
    if goes_to_gpu():
        tensor = tensor.cuda()
    return tensor.requires_grad_() if requires_grad else tensor


def _make_typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _blame(obj: Any, what: str, error: BaseException) -> str:
    """Return the path to the part that cannot be pickled, as far as it is found in time, and the reason."""
    if not what and _is_call(obj):
        parts: Iterator[tuple[str, Any]] = iter([("args", obj[0]), ("kwargs", obj[1])])
    else:
        what = what or "value"
        parts = _parts(obj)
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return f"{what or 'args'}: nested too deeply to be pickled"
    until = time.monotonic() + _BLAME_SECONDS
    seen = {id(obj)}
    path, reason = what, error
    for _ in range(_BLAME_DEPTH):
        failed = None
        for step, part in islice(parts, _BLAME_PARTS):
            if id(part) in seen or time.monotonic() > until:
                continue
            try:
                _dump(part)
            except KeyboardInterrupt:
                raise
            except BaseException as cause:
                failed = step, part, cause
                break
        if failed is None:
            break
        step, part, reason = failed
        path += step
        seen.add(id(part))
        parts = _parts(part)
    return f"{path or 'value'}: {_text(reason)}"


def _is_call(obj: object) -> TypeGuard[tuple[Any, Any]]:
    return is_tuple(obj) and _kind_of(obj) is tuple and list(map(_kind_of, obj)) == [tuple, dict]


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object's pickle, each with its path."""
    if is_dict(obj) and _kind_of(obj).__reduce_ex__ is object.__reduce_ex__:
        yield from ((f"[{key!r:.60}]", value) for key, value in obj.items())
    if type(obj) in (list, tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(obj))
    elif type(obj) in (set, frozenset):
        yield from ((f"[{item!r:.60}]", item) for item in obj)
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f" (uses {name!r})", cell.cell_contents
        for name in obj.__code__.co_names:
            if name in obj.__globals__:
                yield f" (uses {name!r})", obj.__globals__[name]
    elif isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif type(obj) is not dict:
        yield from _reduced_parts(obj)


def _reduced_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    # Not the attributes themselves, some of which __getstate__ may omit.
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:
        return
    if not is_tuple(reduced):
        return
    _, arguments, state, items, *_ = (*reduced, None, None)
    states: Iterable[Any] = state if _kind_of(state) is tuple else (state,)
    for values in states:
        if is_dict(values):
            yield from ((f".{name}", value) for name, value in values.items())
        else:
            yield "", values
    yield from (("", argument) for argument in arguments)
    yield from ((f"[{index}]", item) for index, item in enumerate(items or ()))
