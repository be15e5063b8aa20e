"""Functions and classes that were copied to ranks: the notebook says when it has a newer version."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from monarch._kernel_api import is_alike
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes


class Pushed:
    """Remembers the definitions that ``%mesh push`` has copied.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._copied: WeakKeyDictionary[Mesh, dict[str, Any]] = WeakKeyDictionary()
        """By mesh, the newest definition of each name that was copied or told of."""
        shell.events.register("post_run_cell", self._after_cell)

    def close(self) -> None:
        """Stop checking."""
        self._shell.events.unregister("post_run_cell", self._after_cell)

    def note(self, mesh: Mesh, names: Iterable[str]) -> None:
        """Note variables that were copied to the ranks of a mesh."""
        for name in names:
            value = self._shell.user_ns[name]
            if _is_definition(value):
                self._copied.setdefault(mesh, {})[name] = value

    def _after_cell(self, _: Any) -> None:
        for mesh in self._meshes.in_order():
            copied = self._copied.get(mesh, {})
            for name, old in list(copied.items()):
                new = self._shell.user_ns.get(name)
                if new is old or not _is_definition(new):
                    continue
                copied[name] = new
                if not is_alike(old, new):
                    print(f"note: the ranks of {mesh.name} keep the old {name}; %mesh push {name} copies the new one")


def _is_definition(value: Any) -> bool:
    return isinstance(value, (FunctionType, type)) and value.__module__ == "__main__"
