"""Completion and inspection of names on a rank."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import keyword
import re
import sys
from typing import Any

from monarch._actors.table import actors_of
from monarch._core.kinds import class_of
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._notebook.who.attributes import attribute, is_evasive, names_of
from monarch._notebook.who.kinds import NOTHING, text_of

_NAME = re.compile(r"([A-Za-z_][A-Za-z_0-9.]*)?$")
_LIMIT = 500


@service("complete.complete_here", "probe")
def complete_here(text: str, key: str) -> list[str]:
    """Return completions, in this rank, of the name at the end of a piece of code.

    Args:
        text: the code up to the cursor.
        key: the key of the actors that the cell runs in; empty for the namespace.
    """
    return complete(text, _variables(key))


@service("complete.inspect_here", "probe")
def inspect_here(name: str, key: str) -> str | None:
    """Inspect a name in this rank: see ``inspect_name``."""
    return inspect_name(name, _variables(key))


def _variables(key: str) -> dict[str, Any]:
    variables = sys.modules["__main__"].__dict__
    mailbox = actors_of(current_node()).here.get(key) if key else None
    return variables if mailbox is None else {**variables, "self": mailbox.instance}


def complete(text: str, variables: dict[str, Any]) -> list[str]:
    """Return completions of the name at the end of a piece of code, attributes with their prefix."""
    found = _NAME.search(text)
    name = (found[1] or "") if found else ""
    before, dot, last = name.rpartition(".")
    if not dot:
        names = {*variables, *dir(builtins), *keyword.kwlist}
        return sorted(each for each in names if each.startswith(last) and (last or not each.startswith("_")))[:_LIMIT]
    value = _value(before, variables)
    if value is NOTHING:
        return []
    names = [each for each in names_of(value) if each.startswith(last) and (last or not each.startswith("_"))]
    return [f"{before}.{each}" for each in sorted(names)][:_LIMIT]


def inspect_name(name: str, variables: dict[str, Any]) -> str | None:
    """Return the signature, type and docstring of a name's value; None if it is undefined."""
    value = _value(name, variables)
    if value is NOTHING:
        return None
    head = f"{name}: {text_of(class_of(value), '__name__')}"
    if is_evasive(value):
        return head
    with contextlib.suppress(TypeError, ValueError):
        head = f"{name}{inspect.signature(value)}" if callable(value) else head
    document = inspect.getdoc(value) or ""
    return f"{head}\n\n{document}".rstrip()


def value_of(name: str, variables: dict[str, Any]) -> tuple[Any, bool]:
    """Return the value of a dotted name, and whether there is one."""
    value = _value(name, variables)
    return (None, False) if value is NOTHING else (value, True)


def _value(name: str, variables: dict[str, Any]) -> Any:
    """Return the value of a dotted name, without running properties."""
    first, *rest = name.split(".")
    value = variables.get(first, getattr(builtins, first, NOTHING))
    for part in rest:
        if value is NOTHING:
            break
        value = attribute(value, part)
    return value
