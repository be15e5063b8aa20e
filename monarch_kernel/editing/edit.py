"""Edit and continue: when the cell of a class runs again, live actors take the new class."""

from __future__ import annotations

import re
import sys
import time
from typing import Any
from weakref import WeakKeyDictionary

from monarch._kernel_api import (
    Actor,
    ActorMesh,
    changes,
    current_node,
    has_node,
    is_actor_mesh,
    meshes_of,
    node_of,
    state_of,
    update_class,
    view_at,
)
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.editing.reload import reload_module
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.registry import NotebookMeshes

_MOMENT = 0.5
"""Seconds to wait for busy actors; they change after their current message."""
_RANKS_ONLY = re.compile(r"\s*%%mesh\b(?!\s+spawn\b)")
"""The beginning of a cell that runs no code in the notebook."""


class Editor:
    """Offers new classes of cells to live actors.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._cells: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()
        """The cell of each known class, if the front end reports it."""

    def watch(self) -> None:
        """Check after each cell whether it has redefined classes."""
        self._shell.events.register("post_run_cell", self._after_cell)

    def close(self) -> None:
        """Stop checking."""
        self._shell.events.unregister("post_run_cell", self._after_cell)

    def _after_cell(self, result: Any) -> None:
        if _RANKS_ONLY.match(getattr(result.info, "raw_cell", None) or ""):
            # Its classes are those of the ranks, and the notebook may have thousands of names to look at.
            return
        for cls in actor_classes(self._shell):
            if cls in self._cells:
                continue
            self._cells[cls] = getattr(result.info, "cell_id", None)
            for mesh in _living():
                if state_of(mesh).cls is not cls and _same_name(state_of(mesh).cls, cls):
                    self._offer(mesh, cls)

    def _offer(self, mesh: ActorMesh, cls: type) -> None:
        """Update a mesh, unless the class is from another cell and so may be unrelated."""
        before = self._cells.get(state_of(mesh).cls)
        if before is not None and self._cells[cls] is not None and before != self._cells[cls]:
            print(
                f"{state_of(mesh).name}: its {len(_whole(mesh))} actors keep class {cls.__name__} of their own cell; "
                f"%mesh update {state_of(mesh).name} switches them to this one"
            )
            return
        try:
            print(self.give(mesh, cls))
        except MonarchError as error:
            print(error, file=sys.stderr)

    def renew(self, mesh: ActorMesh, cls: type) -> bool:
        """Give a mesh a class if it is a new version of its own; return whether it is."""
        if not _same_name(state_of(mesh).cls, cls):
            return False
        print(self.give(mesh, cls))
        return True

    def give(self, mesh: ActorMesh, cls: type) -> str:
        """Give a mesh a new version of its class; describe the changes.

        Raises:
            EditError: the class does not fit; all actors keep the old one.
        """
        begun = time.perf_counter()
        different = changes(state_of(mesh).cls, cls).text()
        done = update_class(mesh, cls)
        whole = _whole(mesh)
        try:
            done.get(_MOMENT)
            when = f"{(time.perf_counter() - begun) * 1e3:.0f} ms"
        except CallTimeoutError:
            when = "busy actors switch after their current message"
        count = f"{len(whole)} actor{'' if len(whole) == 1 else 's'} of {state_of(mesh).name}"
        return f"updated {count} to the new {cls.__name__}: {different or 'nothing changed'} ({when})"

    def update(self, words: list[str]) -> None:
        """``%mesh update NAME``: give actors the notebook's current class of that name."""
        name = parse("update", words).name
        mesh = self._shell.user_ns.get(name)
        if not is_actor_mesh(mesh):
            names = [each for each, value in self._shell.user_ns.items() if is_actor_mesh(value)]
            names = sorted(each for each in names if not each.startswith("_"))
            raise HeaderError(f"no actors {name!r}; actors: {', '.join(names) or 'none'}{did_you_mean(name, names)}")
        cls = self._shell.user_ns.get(state_of(mesh).cls.__name__)
        if not (isinstance(cls, type) and issubclass(cls, Actor)):
            raise HeaderError(f"the notebook does not define {state_of(mesh).cls.__name__}, the class of {name}")
        print(self.give(mesh, cls))

    def reload(self, words: list[str]) -> None:
        """``%mesh reload MODULE``: run an edited file again, in the notebook and on all ranks."""
        module = parse("reload", words).name
        everywhere = [mesh.cells for mesh in self._meshes.by_name.values()]
        print(reload_module(module, self._shell.user_ns, [*everywhere, *_living()], self.give))


def actor_classes(shell: Any) -> list[type[Any]]:
    """Return the named actor classes that notebook cells have defined."""
    return [
        value
        for value in list(shell.user_ns.values())
        if isinstance(value, type) and issubclass(value, Actor) and value.__module__ == "__main__"
    ]


def _living() -> list[ActorMesh]:
    """Return the live meshes of actors."""
    if not has_node():
        return []
    return [
        mesh
        for mesh in list(meshes_of(current_node()).actor_meshes.values())
        if state_of(mesh).stopped is None and not node_of(mesh).closed
    ]


def _whole(mesh: ActorMesh) -> ActorMesh:
    return view_at(mesh, state_of(mesh).region)


def _same_name(one: type, other: type) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
