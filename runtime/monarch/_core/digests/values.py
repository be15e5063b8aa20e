"""Digests of any values: scalars, containers, arrays, modules by their state, other objects as they would be copied."""

from __future__ import annotations

import marshal
import struct
import sys
from collections.abc import Iterable
from hashlib import sha256
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

from monarch._core.digests.arrays import UnknownContentsError, digest_array, is_array, is_plain_array, size_of
from monarch._core.digests.digest import Digest
from monarch._core.kinds import class_of

BYTES = 4 << 30
"""Maximum bytes of arrays in one value, to bound the time that a digest takes."""
ITEMS = 1 << 18
"""Maximum number of items of a value that are read one by one."""
_FLAT = {int, bool, str, bytes, float, type(None)}
_SMALL = 256
"""Maximum number of items of a container that counts as plain data of a module."""
_LONG = 64
"""Items from which a list of scalars is read as a whole."""


def digest_of(value: object) -> Digest | None:
    """Return the digest of a value, which is only read; None if its contents cannot be read completely.

    It may run ``__reduce_ex__`` of user classes, as a copy does. An interrupt ends it between two parts of an array.
    """
    try:
        if is_array(value) and not (_is_frame(value) or _has_objects(value)):
            return digest_array(value) if size_of(value) <= BYTES else None
        reader = _Reader()
        reader.add(value)
    except Exception:
        # Any object may have contents that cannot be read, or code of its own that raises.
        return None
    return Digest(reader.hash.hexdigest())


def _is_frame(value: object) -> bool:
    pandas = sys.modules.get("pandas")
    return isinstance(value, _types(pandas, "DataFrame", "Series"))


def _has_objects(value: Any) -> bool:
    return type(value) is getattr(sys.modules.get("numpy"), "ndarray", None) and value.dtype.kind == "O"


def _types(module: object, *names: str) -> tuple[type, ...]:
    return tuple(each for name in names if isinstance(each := getattr(module, name, None), type))


class _Reader:
    """Hashes a value recursively; each part begins with its kind and length, so that no two values read alike."""

    def __init__(self) -> None:
        self.hash = sha256()
        self._bytes = BYTES
        self._items = ITEMS
        self._inside: dict[int, int] = {}
        """Identities of the containers that are being read, with their depth."""

    def add(self, value: Any) -> None:
        """Read a value."""
        self._items -= 1
        if self._items < 0:
            raise UnknownContentsError
        if not self._add_scalar(value):
            self._add_nested(value)

    def _put(self, kind: str, data: Any = b"") -> None:
        self.hash.update(f"{kind}{len(data)}:".encode())
        self.hash.update(data)

    def _add_scalar(self, value: Any) -> bool:
        kind = class_of(value)
        if value is None or value is Ellipsis or value is NotImplemented or kind is bool:
            self._put(f"constant {value!r} ")
        elif kind is int:
            self._put("int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif kind is float:
            self._put("float", b"nan" if value != value else struct.pack("<d", value))
        elif kind is complex:
            self._put("complex")
            self.add(value.real)
            self.add(value.imag)
        elif kind is str:
            self._put("str", value.encode("utf-8", "surrogatepass"))
        elif kind is bytes or kind is bytearray:
            self._put(kind.__name__, value)
        elif isinstance(value, type) or kind is BuiltinFunctionType:
            self._put("name", _name_of(value))
        else:
            return False
        return True

    def _add_nested(self, value: Any) -> None:
        depth = self._inside.get(id(value))
        if depth is not None:
            self._put(f"again {depth} ")
            return
        self._inside[id(value)] = len(self._inside)
        try:
            self._add_contents(value)
        finally:
            del self._inside[id(value)]

    def _add_contents(self, value: Any) -> None:
        kind = class_of(value)
        if kind is list or kind is tuple:
            self._add_all(kind.__name__, value)
        elif kind is dict:
            self._put(f"dict {len(value)} ")
            for key, each in value.items():
                self.add(key)
                self.add(each)
        elif kind is set or kind is frozenset:
            self._add_set(value)
        elif isinstance(value, (FunctionType, ModuleType)):
            raise UnknownContentsError
        else:
            self._add_object(value)

    def _add_all(self, kind: str, values: Any) -> None:
        self._put(f"{kind} {len(values)} ")
        if len(values) > _LONG and _is_flat(values):
            # Version 2 of this format is the same for equal values, and keeps the bits of floats.
            self._put("flat", marshal.dumps(values, 2))
            return
        for each in values:
            self.add(each)

    def _add_set(self, values: Iterable[Any]) -> None:
        found: list[bytes] = []
        outer = self.hash
        for each in values:
            self.hash = sha256()
            self.add(each)
            found.append(self.hash.digest())
        self.hash = outer
        self._put(f"{type(values).__name__} ", b"".join(sorted(found)))

    def _add_object(self, value: Any) -> None:
        torch, numpy, pandas = (sys.modules.get(name) for name in ("torch", "numpy", "pandas"))
        if _is_frame(value):
            self._add_frame(value)
        elif isinstance(value, _types(pandas, "Index")):
            self._add_index(value)
        elif isinstance(value, _types(numpy, "generic")):
            self._put("scalar")
            self._add_array(cast("Any", numpy).asarray(value))
        elif is_array(value):
            self._add_array(value)
        elif isinstance(value, _types(getattr(torch, "nn", None), "Module")):
            self._add_module(value)
        else:
            self._add_copied(value)

    def _add_array(self, value: Any) -> None:
        self._bytes -= size_of(value)
        if self._bytes < 0:
            raise UnknownContentsError
        if _has_objects(value):
            self._put(f"objects {value.shape} ")
            self._add_all("items", value.reshape(-1).tolist())
            return
        self._put("array", digest_array(value).whole.encode())

    def _add_module(self, module: Any) -> None:
        """Read a torch module by parameters, buffers, mode and plain data: its ``state_dict`` may run collectives."""
        self._put("module", _name_of(type(module)))
        for pairs in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
            self._put("tensors")
            for name, each in pairs:
                self.add(name)
                self.add(each)
        for name, each in module.named_modules():
            self.add(name)
            self.add(each.training)
            # The classes of torch show their attributes in their repr, or keep places of this process in them.
            if not type(each).__module__.startswith("torch."):
                attributes = cast("dict[str, Any]", vars(each))
                self.add({key: data for key, data in attributes.items() if not key.startswith("_") and is_data(data)})

    # pandas

    def _add_frame(self, value: Any) -> None:
        self._put("frame", _name_of(type(value)))
        self.add(getattr(value, "name", None) if value.ndim == 1 else None)
        self.add(value.index)
        if value.ndim == 1:
            self._add_column(value)
            return
        self.add(value.columns)
        for number in range(value.shape[1]):
            self._add_column(value.iloc[:, number])

    def _add_column(self, column: Any) -> None:
        numpy = sys.modules.get("numpy")
        self._put("column", str(column.dtype).encode())
        if isinstance(column.dtype, _types(numpy, "dtype")):
            self._add_array(column.to_numpy(copy=False))
        elif hasattr(column.dtype, "categories"):
            self.add(column.dtype.categories)
            self.add(bool(column.dtype.ordered))
            self._add_array(cast("Any", numpy).asarray(column.array.codes))
        else:
            self._add_all("column", column.tolist())

    def _add_index(self, index: Any) -> None:
        self._put("index", f"{_name_of(type(index)).decode()} {index.dtype}".encode())
        self.add(list(index.names))
        if hasattr(index, "levels"):
            self.add(list(index.levels))
            for codes in index.codes:
                self._add_array(sys.modules["numpy"].asarray(codes))
        else:
            self._add_column(index)

    # Others

    def _add_copied(self, value: Any) -> None:
        """Read an object by what its copy would be made from."""
        made = value.__reduce_ex__(4)
        if isinstance(made, str):
            self._put("global", made.encode())
            return
        function, arguments, *rest = cast("tuple[Any, ...]", made)
        state, items, pairs, _ = [*rest, None, None, None, None][:4]
        self._put("object", _name_of(function))
        self.add(tuple(arguments))
        self.add(state)
        self._add_all("items", list(items or ()))
        self._add_all("pairs", list(pairs or ()))


def is_data(value: Any, depth: int = 3) -> bool:
    """Return whether a value is a scalar, an array, or a small container of them: reading it runs no user code."""
    kind = class_of(value)
    if kind in _FLAT or kind is complex:
        return True
    if kind in (list, tuple, set, frozenset) or kind is dict:
        items = [*value.keys(), *value.values()] if kind is dict else value
        return depth > 0 and len(items) <= _SMALL and all(is_data(each, depth - 1) for each in items)
    return is_plain_array(value) and not _has_objects(value)


def _is_flat(values: Any) -> bool:
    kinds = set(map(type, values))
    return kinds <= _FLAT and (float not in kinds or not any(each != each for each in values))


def _name_of(value: Any) -> bytes:
    name = f"{value.__module__}.{value.__qualname__}"
    if "<" in name and not isinstance(value, type):
        raise UnknownContentsError
    return name.encode()
