"""The values that a step uses besides its arguments: found in its cells, globals and objects before it is recorded.

Tensors are looked up in each call. Anything else must be as it was, or the step is recorded again.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from monarch._core.kinds import is_mapping
from monarch._engine.recording.generators import Drawn, state_of_generator
from monarch._engine.recording.libraries import is_library_class, is_library_file, is_library_module, names_in
from monarch._engine.recording.places import ABSENT, ValuePlace
from monarch._engine.tensors.tensor import Tensor

_MOST = 20_000
"""Values to look at."""
_MOST_BYTES = 1 << 20
"""Of an array whose values are compared."""
_PLAIN = (
    int,
    float,
    bool,
    str,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    set,
    frozenset,
    bytearray,
)
"""Values that are compared."""
_NOT_CALLED = {"__init__", "__repr__", "__str__", "__del__", "__init_subclass__", "__reduce__"}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_step_count", "_opt_called"}
"""Attributes that each module and each optimizer has; what matters of them is looked at by name."""


def is_plain(value: Any) -> bool:
    """Return whether a value is compared as a whole, such as a number or a string."""
    is_number = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return isinstance(value, _PLAIN) or (is_number and type(value).__name__ != "ndarray")


class CapturedValues:
    """The values that a function uses.

    Args:
        function: a step.
        given: its arguments that are neither tensors nor plain values.

    Attributes:
        plain: places of numbers, strings and the like, with their values.
        objects: places of modules, functions, containers and other objects.
        tensors: places of tensors, of the mesh and of the program; the first one for each.
        grads: places of the gradients of leaves.
        sizes: containers and their lengths.
        rates: places of learning rates, which may change from call to call.
        arrays: arrays of numpy and their values, if they are small.
        iterators: names of iterators that the function uses.
        generators: random generators with their states.
        large: names of arrays of numpy that the function uses, and whose values are too many to compare.
        is_whole: False if there is more than what was looked at.
    """

    def __init__(self, function: Any, given: Iterable[Any] = ()) -> None:
        self.plain: list[tuple[ValuePlace, Any]] = []
        self.objects: list[tuple[ValuePlace, Any]] = []
        self.tensors: list[tuple[ValuePlace, Any]] = []
        self.grads: list[tuple[ValuePlace, Any]] = []
        self.sizes: list[tuple[Any, int, str]] = []
        self.rates: list[tuple[ValuePlace, float]] = []
        self.arrays: list[tuple[Any, bytes, str]] = []
        self.iterators: list[str] = []
        self.generators: list[Drawn] = []
        self.large: list[str] = []
        self._possible: list[tuple[list[str], str, str]] = []
        """Iterators and large arrays that are attributes: where to note them if the code has their name, and texts."""
        self.is_whole = True
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        """All values that were looked at, so that no id is used twice."""
        self._names = {"forward", "backward", "setup_context", "step"}
        """Names in the code of all functions, and those that torch calls."""
        self._namespaces: list[tuple[Any, str, set[str]]] = []
        """Classes and modules of the user, with the names in them that were looked at."""
        self._value(function, None, getattr(function, "__name__", "step"))
        for each in given:
            name = getattr(each, "__name__", type(each).__name__)
            self._refuse_later(each, name, None)
            self._value(each, None, name)
        self._follow_names()
        for found, name, text in self._possible:
            if name in self._names:
                found.append(text)

    def _value(self, value: Any, place: ValuePlace | None, text: str) -> None:
        if is_plain(value):
            if place is not None:
                # A set or a bytearray of anything.
                self.plain.append((place, value.copy() if isinstance(value, set | bytearray) else value))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value, place, text)
            return
        if place is not None:
            self.objects.append((place, value))
        if id(value) in self._seen:
            return
        if len(self._seen) >= _MOST:
            self.is_whole = False
            return
        self._seen.add(id(value))
        self._kept.append(value)
        self._look_into(value, text)

    def codes(self) -> list[types.CodeType]:
        """Return the code of the program's functions that may run."""
        found = [value for place, value in self.objects if place.key == "__code__"]
        return [each for each in found if not is_library_file(each.co_filename)]

    def _look_into(self, value: Any, text: str) -> None:
        kind = cast("Any", type(value))
        state = state_of_generator(value)
        if state is not None:
            self.generators.append(Drawn(value, state, text))
            return
        wrapped = _attribute(value, "__wrapped__")
        if isinstance(wrapped, types.FunctionType):
            self._value(wrapped, None, text)
        if isinstance(value, nn.Module):
            self._module(value, text)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, text)
        elif isinstance(value, types.FunctionType):
            self._function(value, text)
        elif isinstance(value, types.MethodType):
            self._value(value.__func__, None, text)
            self._value(value.__self__, None, "self")
        elif kind is types.BuiltinMethodType and not isinstance(value.__self__, types.ModuleType):
            self._value(value.__self__, None, text)
        elif isinstance(value, functools.partial):
            self._value(value.func, None, text)
            self._items(value.args, text)
            self._items(value.keywords, text)
        elif isinstance(value, dict | list | tuple | deque):
            self._items(value, text)
        elif isinstance(value, types.ModuleType):
            if not is_library_module(value):
                self._namespaces.append((value, text, set()))
        elif isinstance(value, type):
            self._class(value)
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.nbytes <= _MOST_BYTES:
                self.arrays.append((value, value.tobytes(), text))
        elif not kind.__module__.startswith("monarch."):
            self._object(value, text)

    def _tensor(self, value: torch.Tensor, place: ValuePlace | None, text: str) -> None:
        if place is not None:
            self.tensors.append((place, value))
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            self.grads.append((ValuePlace(value, "grad", f"{text}.grad"), value.grad))
            for name in _TENSOR_HOOKS:
                self._hooks(value, name, text)

    def _hooks(self, value: Any, name: str, text: str) -> None:
        hooks = getattr(value, name, None)
        place = ValuePlace(value, name, f"{text}.{name}")
        if hooks is None:
            self.plain.append((place, None))
        else:
            self._value(hooks, place, place.text)

    def _items(self, value: Any, text: str) -> None:
        self.sizes.append((value, len(value), text))
        mapped: Any = value.items() if is_mapping(value) else enumerate(value)
        pairs: list[Any] = list(mapped)
        for key, each in pairs:
            named = f"{text}[{key!r}]" if isinstance(key, _PLAIN) else f"{text}[...]"
            self._refuse_later(each, named, None)
            self._value(each, ValuePlace(value, key, named), named)

    def _refuse_later(self, value: Any, text: str, key: str | None) -> None:
        """Note what cannot be compared: iterators and large arrays. An attribute counts if the code has its name."""
        found = None
        if isinstance(value, Iterator):
            found = self.iterators
        elif type(value).__module__ == "numpy" and getattr(value, "nbytes", 0) > _MOST_BYTES:
            found = self.large
        if found is None:
            return
        if key is None:
            found.append(text)
        else:
            self._possible.append((found, key, text))

    def _attributes(self, held: dict[str, Any], text: str, skipped: frozenset[str] = frozenset()) -> None:
        self.sizes.append((held, len(held), text))
        for key, each in list(held.items()):
            if key not in skipped:
                self._refuse_later(each, f"{text}.{key}", key)
                self._value(each, ValuePlace(held, key, f"{text}.{key}"), f"{text}.{key}")

    def _object(self, value: Any, text: str) -> None:
        kind = cast("Any", type(value))
        if isinstance(getattr(value, "__dict__", None), dict):
            self._attributes(value.__dict__, text)
        for name in () if is_library_class(kind) else _slots(kind):
            if hasattr(value, name):
                self._refuse_later(getattr(value, name), f"{text}.{name}", name)
                self._value(getattr(value, name), ValuePlace(value, name, f"{text}.{name}"), f"{text}.{name}")
        self._class(kind)

    def _class(self, kind: Any) -> None:
        for each in kind.__mro__:
            if not is_library_class(each) and not any(space is each for space, _, _ in self._namespaces):
                self._namespaces.append((each, each.__name__, set()))

    def _module(self, value: nn.Module, text: str) -> None:
        for name in ("_parameters", "_buffers", "_modules"):
            held: dict[str, Any] = getattr(value, name)
            self.sizes.append((held, len(held), text))
            for key, each in list(held.items()):
                self._value(each, ValuePlace(held, key, f"{text}.{key}"), f"{text}.{key}")
        for name in _HOOKS:
            self._hooks(value, name, text)
        self._attributes(value.__dict__, text, _OF_MODULES)
        self.objects.append((ValuePlace(value, "__class__", f"type({text})"), type(value)))
        if not is_library_class(type(value)):
            self._class(type(value))

    def _optimizer(self, value: torch.optim.Optimizer, text: str) -> None:
        self.sizes.append((value.param_groups, len(value.param_groups), f"{text}.param_groups"))
        for at, group in enumerate(value.param_groups):
            self.sizes.append((group, len(group), f"{text}.param_groups[{at}]"))
            self.objects.append((ValuePlace(value.param_groups, at, f"{text}.param_groups[{at}]"), group))
            for key, each in list(group.items()):
                named = f"{text}.param_groups[{at}][{key!r}]"
                if key == "lr" and type(each) is float:
                    self.rates.append((ValuePlace(group, key, named), each))
                else:
                    self._value(each, ValuePlace(group, key, named), named)
        state: Any = value.state
        self.objects.append((ValuePlace(value, "state", f"{text}.state"), state))
        self.sizes.append((state, len(state), f"{text}.state"))
        for key, held in list(state.items()):
            if isinstance(held, dict):
                self._items(held, f"{text}.state[...]")
            else:
                self._value(held, ValuePlace(state, key, f"{text}.state[...]"), f"{text}.state[...]")
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._hooks(value, name, text)
        if not type(value).__module__.startswith("torch."):
            self._attributes(value.__dict__, text, _OF_OPTIMIZERS)
        if not is_library_class(type(value)):
            self._class(type(value))

    def _function(self, value: types.FunctionType, text: str) -> None:
        self.objects.append((ValuePlace(value, "__code__", f"{text}.__code__"), value.__code__))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            self._named(held, ValuePlace(cell, "cell_contents", name))
        self._value(value.__defaults__ or (), None, text)
        self._value(value.__kwdefaults__ or {}, None, text)
        if is_library_file(value.__code__.co_filename):
            return
        names = names_in(value.__code__)
        self._names |= names
        for name in sorted(names):
            place = ValuePlace(value.__globals__, name, name)
            if name in value.__globals__:
                self._named(value.__globals__[name], place)
            elif hasattr(builtins, name):
                # A global of this name would hide what is built in.
                self.objects.append((place, ABSENT))

    def _named(self, value: Any, place: ValuePlace) -> None:
        self._refuse_later(value, place.text, None)
        self._value(value, place, place.text)

    def _follow_names(self) -> None:
        """Look at attributes of classes and modules whose names are in the code, until there are no more."""
        before = -1
        while before != len(self._seen) + len(self._names) + len(self._namespaces):
            before = len(self._seen) + len(self._names) + len(self._namespaces)
            for space, text, known in list(self._namespaces):
                held = cast("dict[str, Any]", dict(space.__dict__))
                for key, each in held.items():
                    if key in known or not self._is_used(key, space):
                        continue
                    known.add(key)
                    place = ValuePlace(space, key, f"{text}.{key}")
                    inner = _attribute(each, "__func__") or _attribute(each, "fget") or each
                    is_plain = inner is each and getattr(space, key, None) is each
                    self._refuse_later(inner, place.text, key)
                    self._value(inner, place if is_plain else None, place.text)

    def _is_used(self, key: str, space: Any) -> bool:
        is_special = key.startswith("__") and key.endswith("__")
        if is_special:
            return (
                isinstance(space, type) and key not in _NOT_CALLED and isinstance(vars(space)[key], types.FunctionType)
            )
        return key in self._names


def _slots(kind: type) -> list[str]:
    """Return the attributes in the slots of a class and its bases."""
    found: list[str] = []
    for each in kind.__mro__:
        slots: Any = vars(each).get("__slots__", ())
        names: Iterable[str] = (slots,) if isinstance(slots, str) else slots
        for name in names:
            is_mangled = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if is_mangled else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute; None if it has none, or an object of the program raises another error when it is asked."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None
