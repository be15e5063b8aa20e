"""``%mesh reload``: run an edited file again in the notebook and on all ranks, or nowhere."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import time
from collections.abc import Callable, Iterable, MutableMapping
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec

from monarch._kernel_api import ActorMesh, ask, forget, reload_here, renamed, restore, state_of, view_at
from monarch.exceptions import ActorError, CallTimeoutError, DeviceMeshError, EditError
from monarch_kernel.grammar.header import HeaderError

_PATIENCE = 30.0
"""Seconds for a module to run on all ranks."""
_numbers = count(1)


def reload_module(
    name: str, names: MutableMapping[str, Any], meshes: Iterable[ActorMesh], give: Callable[[ActorMesh, type], str]
) -> str:
    """Reload a module everywhere, and give live actors of its classes the new version.

    Args:
        name: the name of the module.
        names: the variables of the notebook; those from the module are replaced by the new version.
        meshes: actors in all processes that may have imported it.
        give: gives a mesh a new version of its class, and describes the changes.

    Raises:
        HeaderError: the module does not exist, or has no file.
        EditError: the reload fails on a rank, or an actor cannot take the new class; all keep the old one.
    """
    begun = time.perf_counter()
    path = _file_of(name)
    source = Path(path).read_text(encoding="utf-8")
    try:
        compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise EditError(
            f"{name} was not reloaded: {path} line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from None
    linecache.checkcache(path)
    number = next(_numbers)
    candidates = list(meshes)
    # One mesh for each mesh of processes is enough.
    places = list({(state_of(mesh).procs, state_of(mesh).region): mesh for mesh in candidates}.values())
    loaded = name in sys.modules
    changes: list[str] = []
    updated: list[tuple[ActorMesh, type]] = []
    try:
        if loaded:
            reload_here(number, name, path, source)
        for mesh in places:
            _ask(mesh, name, reload_here, number, name, path, source)
        for mesh in candidates:
            old = state_of(mesh).cls
            new = renamed(number, old) if loaded else old
            if new is not old and isinstance(new, type):
                changes.append(give(mesh, new))
                updated.append((mesh, old))
    except BaseException:
        for mesh in places:
            try:
                _ask(mesh, name, restore, number)
            except DeviceMeshError:
                # It is gone, so there is nothing to restore.
                continue
        restore(number)
        for mesh, old in updated:
            give(mesh, old)
        raise
    for variable, value in list(names.items()):
        new = renamed(number, value)
        if new is not value:
            names[variable] = new
    for mesh in places:
        _ask(mesh, name, forget, number)
    forget(number)
    ranks = sum(len(mesh) for mesh in places)
    where = (
        " and ".join(["the notebook"] * loaded + [f"{ranks} ranks"] * bool(ranks))
        or "no process, because none has imported it"
    )
    return "\n".join([f"{name} was reloaded in {where} ({(time.perf_counter() - begun) * 1e3:.0f} ms)", *changes])


P = ParamSpec("P")


def _ask(mesh: ActorMesh, name: str, service: Callable[P, Any], *args: P.args, **named: P.kwargs) -> None:
    state = state_of(mesh)
    whole = view_at(mesh, state.region)
    try:
        ask(whole, service, *args, **named).get(_PATIENCE)
    except CallTimeoutError:
        raise EditError(
            f"{name} was not reloaded: not all ranks of {state.name} answered within {_PATIENCE:.0f} s", mesh=state.name
        ) from None
    except ActorError as error:
        raise EditError(f"{name} was not reloaded; all ranks keep the old version: {error}", mesh=state.name) from error


def _file_of(name: str) -> str:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if path is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        path = spec.origin if spec is not None and spec.has_location else None
    if path is None or not path.endswith(".py"):
        raise HeaderError(f"%mesh reload {name}: found no Python file for module {name!r}")
    return path
