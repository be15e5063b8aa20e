"""Edit and continue: when the cell of a class runs again, living actors of that class take the new version."""

from __future__ import annotations

import sys
import time
from typing import Any
from weakref import WeakKeyDictionary

from monarch._kernel_api import Actor, ActorMesh, changes, current_node, has_node, meshes_of, update_class
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.editing.reload import reload_module
from monarch_kernel.magics.header import HeaderError
from monarch_kernel.meshes.registry import Meshes

_MOMENT = 0.5
"""Seconds to wait for busy actors; they change when they come to it."""


class Editor:
    """Watches which classes cells define.

    Args:
        shell: of the notebook.
        meshes: of the notebook.
    """

    def __init__(self, shell: Any, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._cells: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()
        """Of each class that was seen, the cell that it is from, where the front end tells."""

    def watch(self) -> None:
        """Looks after each cell whether it has defined classes anew."""
        self._shell.events.register("post_run_cell", self._after_cell)

    def close(self) -> None:
        """Watches no more."""
        self._shell.events.unregister("post_run_cell", self._after_cell)

    def _after_cell(self, result: Any) -> None:
        for cls in actor_classes(self._shell):
            if cls in self._cells:
                continue
            self._cells[cls] = getattr(result.info, "cell_id", None)
            for mesh in _living():
                if mesh._state.cls is not cls and _same_name(mesh._state.cls, cls):
                    self._offer(mesh, cls)

    def _offer(self, mesh: ActorMesh, cls: type) -> None:
        """Updates a mesh, unless the class is of another cell, and so may be another class altogether."""
        before = self._cells.get(mesh._state.cls)
        if before is not None and self._cells[cls] is not None and before != self._cells[cls]:
            print(
                f"{mesh._name}: its {len(_whole(mesh))} actors keep the {cls.__name__} of the cell that they are from; "
                f"%mesh update {mesh._name} gives them this one"
            )
            return
        try:
            print(self.give(mesh, cls))
        except MonarchError as error:
            print(error, file=sys.stderr)

    def renew(self, mesh: ActorMesh, cls: type) -> bool:
        """Gives a mesh a class if it is a new version of the one that it has; whether it is."""
        if not _same_name(mesh._state.cls, cls):
            return False
        print(self.give(mesh, cls))
        return True

    def give(self, mesh: ActorMesh, cls: type) -> str:
        """Gives a mesh a new version of its class; says what has changed.

        Raises:
            EditError: it does not fit; all keep what they have.
        """
        begun = time.perf_counter()
        different = changes(mesh._state.cls, cls).text()
        done = update_class(mesh, cls)
        whole = _whole(mesh)
        try:
            done.get(_MOMENT)
            when = f"{(time.perf_counter() - begun) * 1e3:.0f} ms"
        except CallTimeoutError:
            when = "those that are busy take it after the message that they handle"
        return (
            f"{mesh._name}: {len(whole)} actors have the new {cls.__name__}: {different or 'nothing changed'} ({when})"
        )

    def update(self, words: list[str]) -> None:
        """``%mesh update NAME``: gives actors the class that the notebook has now by that name."""
        if len(words) != 1:
            raise HeaderError("%mesh update needs the name of a mesh of actors")
        mesh = self._shell.user_ns.get(words[0])
        if not isinstance(mesh, ActorMesh):
            names = sorted({each._name for each in _living()}) or ["none"]
            raise HeaderError(f"there are no actors {words[0]!r}; there are: {', '.join(names)}")
        cls = self._shell.user_ns.get(mesh._state.cls.__name__)
        if not (isinstance(cls, type) and issubclass(cls, Actor)):
            raise HeaderError(f"the notebook has no class {mesh._state.cls.__name__}, of which {words[0]} is")
        print(self.give(mesh, cls))

    def reload(self, words: list[str]) -> None:
        """``%mesh reload MODULE``: runs an edited file again, in the notebook and on all ranks."""
        if len(words) != 1:
            raise HeaderError("%mesh reload needs the name of a module")
        everywhere = [mesh.cells for mesh in self._meshes.by_name.values()]
        print(reload_module(words[0], self._shell.user_ns, [*everywhere, *_living()], self.give))


def actor_classes(shell: Any) -> list[type]:
    """The classes of actors that cells of the notebook have defined, and that have a name there."""
    return [
        value
        for value in list(shell.user_ns.values())
        if isinstance(value, type) and issubclass(value, Actor) and value.__module__ == "__main__"
    ]


def _living() -> list[ActorMesh]:
    """The meshes of actors of the notebook's own classes that can be used."""
    if not has_node():
        return []
    return [
        mesh
        for mesh in list(meshes_of(current_node()).actor_meshes.values())
        if mesh._stopped is None and not mesh._node.closed
    ]


def _whole(mesh: ActorMesh) -> ActorMesh:
    return mesh._view(mesh._state.region)


def _same_name(one: type, other: type) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
