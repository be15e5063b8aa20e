"""A value in a few words: shape, length, value, attributes."""

from __future__ import annotations

from collections import deque
from math import prod
from types import FunctionType, ModuleType
from typing import Any, cast

from monarch._core.kinds import class_of
from monarch._core.text.tables import one_line, plain_text, value_text
from monarch._notebook.who.contents import is_plain
from monarch._notebook.who.kinds import has, is_array, is_module, is_of, is_tensor, look_at, text_of
from monarch._notebook.who.sizes import attributes_of, tensors_of

WIDTH = 44
"""Maximum characters of a description."""
_LENGTHS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque, str, bytes, bytearray)
_FEW = 6
"""Elements of an array that are shown."""


def kind_of(value: object) -> str:
    """Return the name of a type; ``class`` for a class."""
    return "class" if is_of(value, type) else one_line(text_of(type(value), "__name__"), WIDTH)


def describe(value: object) -> str:
    """Describe a value in at most ``WIDTH`` characters, without its repr."""
    return one_line(_text(value), WIDTH)


def _text(value: Any) -> str:
    if is_of(value, type):
        return f"{text_of(value, '__module__')}.{text_of(value, '__qualname__')}"
    if is_of(value, ModuleType):
        version: Any = attributes_of(value).get("__version__")
        return f"{value.__name__} {version}" if class_of(version) is str else value.__name__
    if is_of(value, FunctionType):
        code = value.__code__
        return f"{value.__name__}({', '.join(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])})"
    if is_array(value):
        return _array_text(value)
    if is_module(value):
        return _module_text(value)
    return _other_text(value)


def _array_text(value: Any) -> str:
    shape = tuple(look_at(value, "shape"))
    if len(shape) == 2 and has(class_of(value), "columns"):
        names = ", ".join(map(str, value.columns[:_FEW]))
        return f"{shape[0]:,} rows, {shape[1]:,} columns: {names}"
    text = f"{str(look_at(value, 'dtype')).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    if is_tensor(value):
        text += f" on {look_at(value, 'device')}"
    if len(shape) <= 1 and prod(shape) <= _FEW and is_plain(value):
        text += f" = {one_line(plain_text(value.tolist()), WIDTH)}"
    return text


def _module_text(module: Any) -> str:
    tensors = tensors_of(module)
    devices = ", ".join(sorted({str(look_at(each, "device")) for each in tensors}))
    count = sum(prod(look_at(each, "shape")) for each in tensors if text_of(class_of(each), "__name__") == "Parameter")
    return f"{count:,} parameters" + (f" on {devices}" if devices else "")


def _other_text(value: Any) -> str:
    plain = is_plain(value)
    kind = next((each for each in _LENGTHS if is_of(value, each)), None)
    if kind is None:
        names = ", ".join(each for each in map(str, attributes_of(value)) if not each.startswith("_"))
        return value_text(value, WIDTH) if plain else f"attributes {names}" if names else ""
    count = cast("int", kind.__len__(value))
    if kind in (str, bytes, bytearray):
        return value_text(value, WIDTH) if class_of(value) is kind else f"{count:,} items"
    items = f"{count:,} item{'s' if count != 1 else ''}"
    return f"{items}: {value_text(value, WIDTH)}" if plain and count else items
