"""Attributes of any value without code of classes that cells define, which may block; that of libraries runs."""

from __future__ import annotations

import functools
import types
from typing import Any

from monarch._core.kinds import class_of
from monarch._notebook.who.kinds import NOTHING, has, is_of, is_users, member_of, part_of, vars_of
from monarch._notebook.who.sizes import attributes_of


def names_of(value: Any) -> list[str]:
    """Return the names of a value's attributes, as ``dir`` does."""
    try:
        listed = None if is_evasive(value) else _library_method(value, "__dir__")
        return list(listed(value)) if listed is not None else _stored_names(value)
    except Exception:
        return []


def attribute(value: Any, name: str) -> Any:
    """Return an attribute of a value, or NOTHING if a property or a cell's code would compute it."""
    kind = class_of(value)
    member, own = member_of(kind, name), _own(value, name)
    computed = (
        _has_users_get(own) if is_of(value, type) else own is NOTHING and is_of(member, functools.cached_property)
    )
    # A property may do anything and take any time.
    if _defines(kind, "__getattribute__") or is_of(member, property) or _has_users_get(member) or computed:
        return NOTHING
    if _defines(kind, "__getattr__") and member is NOTHING and own is NOTHING:
        # Such as that of torch.nn.Module, below the user's.
        fallback = _library_method(value, "__getattr__")
        return _call(fallback, value, name) if fallback is not None else NOTHING
    return _call(getattr, value, name)


def is_evasive(value: Any) -> bool:
    """Return whether a look at a value runs a cell's code."""
    kind = class_of(value)
    slots = not part_of(kind, "__dictoffset__") and _defines(kind, "__getattr__")
    inner = _defines(kind, "__getattribute__", "__class__") or _defines(class_of(kind), "__getattribute__")
    return slots or inner or (_defines(kind, "__dict__") and not _is_getset(member_of(kind, "__dict__")))


def _call(function: Any, value: Any, name: str) -> Any:
    try:
        return function(value, name)
    except Exception:
        return NOTHING


def _own(value: Any, name: str) -> Any:
    """Return what a value, or a class among its bases, holds under a name."""
    return member_of(value, name) if is_of(value, type) else attributes_of(value).get(name, NOTHING)


def _has_users_get(stored: Any) -> bool:
    return is_users(class_of(stored)) and has(class_of(stored), "__get__")


def _defines(kind: type[Any], *names: str) -> bool:
    """Return whether a cell's class among the bases has one of some methods."""
    users = [base for base in part_of(kind, "__mro__") if is_users(base)]
    return any(name in vars_of(base) and not _is_getset(vars_of(base)[name]) for base in users for name in names)


def _is_getset(member: Any) -> bool:
    return is_of(member, types.GetSetDescriptorType)


def _library_method(value: Any, name: str) -> Any:
    """Return the first method of a name that no cell has defined."""
    bases = [base for base in part_of(class_of(value), "__mro__") if not is_users(base)]
    return next((vars_of(base)[name] for base in bases if name in vars_of(base)), None)


def _stored_names(value: Any) -> list[str]:
    bases = part_of(value, "__mro__") if is_of(value, type) else ()
    bases = (*bases, *part_of(class_of(value), "__mro__"))
    return [*attributes_of(value), *(name for base in bases for name in vars_of(base))]
