"""The names that the cells of a rank can use, as services that answer at once."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from monarch._actors.table import actors_of
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._notebook.namespace import Namespace

_CODE = (BuiltinFunctionType, FunctionType, ModuleType, type)


@service("names.defines", "quick")
def defines(name: str) -> bool:
    """Service: return whether a cell of this rank could use a variable."""
    return name in sys.modules["__main__"].__dict__


@service("names.names_here", "threaded")
def names_here() -> list[str]:
    """Service: return the variables that cells have defined in this rank."""
    instances = [each.instance for each in list(actors_of(current_node()).here.values())]
    spaces = [each for each in instances if isinstance(each, Namespace)]
    return [name for name, _ in spaces[0].names_of()] if spaces else []


@service("names.values_here", "threaded")
def values_here() -> list[str]:
    """Service: return those of them that are not modules, functions or classes."""
    variables = sys.modules["__main__"].__dict__
    return [name for name in names_here() if not issubclass(type(variables.get(name)), _CODE)]


def label_of_actors(name: str) -> str:
    """Return how lines about models name a mesh of actors."""
    return f"actors {name}"


def actors_here() -> dict[str, Any]:
    """Return the actors of users' classes in this process, as a list by the label of their meshes."""
    found: dict[str, list[Any]] = {}
    for each in list(actors_of(current_node()).here.values()):
        spec = each.spec
        if spec is not None and not spec.cls.__module__.startswith("monarch._"):
            found.setdefault(label_of_actors(spec.name), []).append(each.instance)
    return dict(found)
