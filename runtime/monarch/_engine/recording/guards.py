"""A Python function that runs before each later call, and checks that all is as when the step was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch._engine.recording.captured import CapturedValues
from monarch._engine.recording.places import ABSENT, ValuePlace
from monarch._engine.tensors.tensor import Tensor

Check = Callable[[], tuple[int, ...] | None]
"""Returns the references of tensors, or None if something has changed."""


class Writer:
    """Collects the lines of a check."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"ABSENT": ABSENT, "Tensor": Tensor, "type_of": type}
        self._known: dict[int, str] = {}
        self.results: list[str] = []
        self.numbers: list[int] = []

    def bind(self, value: Any) -> str:
        """Return a name for an object."""
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"c{len(self._known)}"
            self.names[name] = value
        return name

    def value(self, place: ValuePlace) -> str:
        """Return an expression for what is at a place."""
        holder, key = self.bind(place.holder), place.key
        if place.kind == "dict":
            return f"{holder}.get({repr(key) if isinstance(key, str) else self.bind(key)}, ABSENT)"
        return f"{holder}[{key}]" if place.kind == "sequence" else f"{holder}.{key}"

    def plain(self, place: ValuePlace, value: Any) -> None:
        """Check a number, a string or the like."""
        if value is None or value is True or value is False:
            self.lines.append(f"if {self.value(place)} is not {value!r}: return None")
            return
        known, kind = self.bind(value), self.bind(type(value))
        self.lines.append(f"v = {self.value(place)}")
        self.lines.append(f"if v is not {known} and (v.__class__ is not {kind} or v != {known}): return None")

    def object(self, place: ValuePlace, value: Any) -> None:
        """Check that a module, a function or the like is the same one."""
        self.lines.append(f"if {self.value(place)} is not {self.bind(value)}: return None")

    def tensor(self, place: ValuePlace, value: Any, wanted: bool) -> None:
        """Check a tensor; return its reference if it is wanted."""
        self.lines.append(f"v = {self.value(place)}")
        if value.requires_grad or not isinstance(value, Tensor):
            self.lines.append(f"if v is not {self.bind(value)}: return None")
        if not isinstance(value, Tensor):
            self.lines.append(f"if v.requires_grad is not {value.requires_grad}: return None")
            return
        layout, kind = self.bind(value.monarch_layout), self.bind(type(value))
        self.lines.append(f"if v.__class__ is not {kind} or v.monarch_layout is not {layout}: return None")
        self.lines.append(f"if v.requires_grad is not {value.requires_grad}: return None")
        if wanted:
            self.results.append(f"r{len(self.results)}")
            self.numbers.append(value.monarch_ref.number)
            self.lines.append(f"{self.results[-1]} = v.monarch_ref.number")

    def function(self) -> Check:
        """Return the check."""
        body = [*self.lines, f"return ({''.join(result + ', ' for result in self.results)})"]
        exec(compile("def check():\n" + "\n".join(f"    {line}" for line in body), "<guards>", "exec"), self.names)
        return self.names["check"]


def check_of(
    captured: CapturedValues, wanted: set[int], constants: list[tuple[torch.Tensor, int]]
) -> tuple[Check, tuple[int, ...]]:
    """Return the check for what a step uses.

    Args:
        captured: as it was before the step was recorded.
        wanted: references of tensors that the step takes.
        constants: plain tensors that must not change, with their versions.

    Returns:
        The check, and the references that it would return now.
    """
    writer = Writer()
    for container, size, _ in captured.sizes:
        writer.lines.append(f"if len({writer.bind(container)}) != {size}: return None")
    for place, value in captured.plain:
        writer.plain(place, value)
    for place, value in captured.objects:
        writer.object(place, value)
    for array, known, _ in captured.arrays:
        writer.lines.append(f"if {writer.bind(array)}.tobytes() != {writer.bind(known)}: return None")
    for place, _ in captured.rates:
        writer.lines.append(f"if {writer.value(place)}.__class__ is not float: return None")
    for tensor, version in constants:
        writer.lines.append(f"if {writer.bind(tensor)}._version != {version}: return None")
    for place, value in (*captured.tensors, *captured.grads):
        if value is None:
            writer.lines.append(f"if {writer.value(place)} is not None: return None")
            continue
        reference = value.monarch_ref.number if isinstance(value, Tensor) else None
        writer.tensor(place, value, reference in wanted)
    return writer.function(), tuple(writer.numbers)


def differences(captured: CapturedValues) -> list[str]:
    """Return what of a step's surroundings has another value now, as a person would write it."""
    found = [place.text for place, value in captured.plain if not _same(place.get(), value)]
    found += [place.text for place, value in captured.objects if place.get() is not value]
    found += [text for array, known, text in captured.arrays if array.tobytes() != known]
    found += [text for container, size, text in captured.sizes if len(container) != size]
    for place, value in captured.tensors:
        now = place.get()
        if isinstance(value, Tensor) and isinstance(now, Tensor):
            is_other = value.requires_grad and now is not value
            if is_other or (now.monarch_layout, now.requires_grad) != (value.monarch_layout, value.requires_grad):
                found.append(place.text)
        elif now is not value:
            found.append(place.text)
    found += [place.text for place, value in captured.grads if (place.get() is None) != (value is None)]
    return found


def _same(first: Any, second: Any) -> bool:
    return first is second or (type(first) is type(second) and first == second)
