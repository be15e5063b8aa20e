"""``%mesh push`` and ``%mesh pull``: variables go to ranks and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monarch._kernel_api import Deferred, ValueMesh, member_at
from monarch.actor import Future
from monarch.exceptions import SerializationError
from monarch_kernel.editing.pushed import Pushed
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.suggest import did_you_mean, own_names
from monarch_kernel.meshes.deaths import naming_deaths
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.variable_errors import one_line


class Transfers:
    """The commands that copy variables.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self.pushed = Pushed(shell, meshes)

    def commands(self) -> dict[str, Callable[[list[str]], Any]]:
        """Return the action of each command."""
        return {"push": self.push, "pull": self.pull}

    def push(self, words: list[str]) -> None:
        """Copy variables of the notebook to all ranks."""
        names = parse("push", words).names
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            guess = did_you_mean(missing[0], [name for name in own_names(self._shell) if not name.startswith("_")])
            raise Usage(f"%mesh push: the notebook has no variable {missing[0]!r}{guess}")
        mesh = self._meshes.get(None)
        with naming_deaths(mesh), one_line(mesh, "%mesh push"):
            mesh.cells.push.call({name: self._shell.user_ns[name] for name in names}).get()
        self.pushed.note(mesh, names)

    def pull(self, words: list[str]) -> None:
        """Copy variables of the ranks to the notebook."""
        arguments = parse("pull", words)
        if arguments.target and len(arguments.names) > 1:
            raise Usage(
                f"%mesh pull: --as: expected one variable, got {len(arguments.names)}; pull each one separately"
            )
        mesh = self._meshes.get(None)
        if arguments.rank is not None and not 0 <= arguments.rank < len(mesh.cells):
            raise Usage(f"%mesh pull: --rank: expected a rank from 0 to {len(mesh.cells) - 1}, got {arguments.rank}")
        with naming_deaths(mesh):
            together = _together(mesh, arguments.names, arguments.rank)
            values: list[Any] = together or []
            if together is None:
                for name in arguments.names:
                    with one_line(mesh, "%mesh pull", name):
                        values.append(_pull(mesh, name, arguments.rank).get())
        targets = [arguments.target] if arguments.target else arguments.names
        self._shell.user_ns.update(zip(targets, values, strict=True))


def _pull(mesh: Mesh, code: str, rank: int | None) -> Future[Any]:
    if rank is not None:
        return member_at(mesh.cells, rank).pull.call_one(code)
    return mesh.cells.pull.call(code)


def _together(mesh: Mesh, names: Sequence[str], rank: int | None) -> list[Any] | None:
    """Return values that come in one message, so that tensors which share memory still do; None if one cannot be sent.

    Pulled one by one, that one is named.
    """
    if len(names) == 1:
        return None
    with one_line(mesh, "%mesh pull"):
        try:
            whole = _pull(mesh, f"({', '.join(names)})", rank).get()
        except SerializationError:
            return None
    if rank is not None:
        return list(whole)
    every = range(len(whole))
    return [ValueMesh.of(whole.extent, [_part(whole, each, at) for each in every]) for at in range(len(names))]


def _part(whole: ValueMesh[Any], rank: int, at: int) -> Deferred[Any]:
    return Deferred(lambda: whole.get(rank)[at])
