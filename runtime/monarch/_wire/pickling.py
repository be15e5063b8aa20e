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
from collections.abc import Sequence
from typing import Any

from monarch._core.kinds import kind_of
from monarch._wire.blame import blame, error_text
from monarch._wire.deferred_signals import from_handler
from monarch._wire.pickle_sink import THRESHOLD, PickleSink
from monarch._wire.pickler import Receivers, dump_any
from monarch._wire.small_arrays import LARGE, PLAIN, SMALL, dump_large, dump_small, size_of
from monarch.exceptions import SerializationError

SHARED = 384 * 1024
"""Total size of buffers from which a message puts them in shared memory; below, a socket costs less."""

LARGEST_BODY = 1 << 20
"""Bytes of the largest body in a message; a larger one, as of a long text or list, goes beside it like a buffer, so the
receiver maps it when it needs it. To receive it at once may need more memory than there is, and it would be lost."""
_PLAIN_NODES = 50
ATOMS: set[type] = {int, float, complex, bool, str, type(None)}
"""Types without parts, which plain pickle suffices for. Classes of this package whose reduced form has only such ones
are added as they are defined."""

plain_classes: set[type] = set()
"""Classes of this package which the receiver has too: named tuples, and those whose pickled form is their attributes,
or made of them. Added to as they are defined."""


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
            sink = PickleSink()
            dump_large(obj, sink)
            return b"".join(sink.chunks), sink.buffers
        return dump_any(obj, receivers, here)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if from_handler(error):
            raise
        # A SystemExit of the object's own code must not end what sends or receives it.
        try:
            text = blame(obj, what, error)
        except KeyboardInterrupt:
            raise
        except BaseException:  # by a repr, say, that raises
            text = f"{what or 'value'}: {error_text(error)}"
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
    return dump_any(obj, threshold=sys.maxsize)[0] if buffers else body


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
        if from_handler(error):
            raise
        # A SystemExit of the object's own code must not end what sends or receives it.
        raise unreadable(error) from error


def unreadable(error: BaseException) -> SerializationError:
    """Return the error of a value that cannot be unpickled, for one that was raised meanwhile."""
    kind = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
    text = f"cannot be unpickled here: {kind}{error_text(error)}"
    if isinstance(error, ImportError):
        text += "; install the module in that environment too, or define its functions and classes in the notebook"
    return SerializationError(text)


def _plainness(obj: Any) -> object:
    """Return whether plain pickle suffices: for a few objects of builtin types or ``plain_classes`` (PLAIN), with
    arrays and small tensors (SMALL), or with some that go beside the body (LARGE).
    """
    nodes: list[Any] = [obj]
    plainness: object = PLAIN
    storages: dict[int, Any] = {}
    for node in nodes:  # grows while it is walked
        kind = kind_of(node)
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
            nodes += node if issubclass(kind, tuple) else node.__dict__.values()
        else:
            size = size_of(node, kind, THRESHOLD, storages)
            if size is None:
                return None
            if plainness is not LARGE:
                plainness = size
        if len(nodes) > _PLAIN_NODES:
            return None
    return plainness
