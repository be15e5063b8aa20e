"""The words that a ``%mesh`` line offers for each kind of argument, soon and without waiting for a busy rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from monarch._kernel_api import records
from monarch.exceptions import MonarchError
from monarch_kernel.grammar.line_words import Typed
from monarch_kernel.grammar.offers import Offer
from monarch_kernel.grammar.parsers import PARSERS
from monarch_kernel.grammar.suggest import own_names
from monarch_kernel.magics.mesh import MeshMagics
from monarch_kernel.magics.paths import paths
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.variable_errors import variables


class Candidates:
    """The words that fit a kind of argument.

    Args:
        magics: the magics of the notebook.
    """

    def __init__(self, magics: MeshMagics) -> None:
        self._magics = magics
        self._of: dict[Offer, Callable[[Typed], Iterable[str]]] = {
            Offer.MESH: lambda typed: magics.meshes.by_name,
            Offer.DETACHED: lambda typed: _detached(),
            Offer.ACTORS: lambda typed: magics.actor_names(),
            Offer.REMOTE: lambda typed: [name for mesh in self._mesh(typed) for name in self.remote(mesh)],
            Offer.LOCAL: lambda typed: _local(magics.shell, typed.word),
            Offer.MODULE: lambda typed: _modules(),
            Offer.RANK: lambda typed: [str(rank) for mesh in self._mesh(typed) for rank in range(len(mesh.procs))],
            Offer.SIZE: lambda typed: [f"{label}=" for mesh in self._mesh(typed) for label in mesh.procs.sizes],
            Offer.COMMAND: lambda typed: PARSERS,
            Offer.PATH: lambda typed: paths(typed.raw, typed.word),
            Offer.FOLDER: lambda typed: paths(typed.raw, typed.word, lambda name: False),
            Offer.SCRIPT: lambda typed: paths(typed.raw, typed.word, lambda name: name.endswith(".py")),
        }

    def words(self, offer: Offer | str, typed: Typed) -> list[str]:
        """Return the words of a kind that may follow what is typed."""
        if isinstance(offer, str):
            return [offer]
        return [each for each in self._of[offer](typed) if each not in typed.before]

    @staticmethod
    def remote(mesh: Mesh) -> list[str]:
        """Return the variables of cells on the ranks of a mesh that answer soon."""
        try:
            return list(variables(mesh))
        except MonarchError:
            return []

    def in_use(self) -> list[Mesh]:
        """Return the mesh in use, if any, without waiting for one that is being restarted."""
        known = self._magics.meshes.by_name
        return [known[name] for name in (self._magics.meshes.used,) if name in known]

    def _mesh(self, typed: Typed) -> list[Mesh]:
        """Return the mesh that the line names, or else the one in use."""
        known = self._magics.meshes.by_name
        return [known[each] for each in typed.before if each in known][:1] or self.in_use()


def _local(shell: Any, word: str) -> list[str]:
    """Return the variables that cells of the notebook have defined."""
    return sorted(name for name in own_names(shell) if word.startswith("_") or not name.startswith("_"))


def _detached() -> list[str]:
    return sorted(record.name for record, _ in records() if record is not None and record.alive())


def _modules() -> list[str]:
    """Return the modules that a user is likely to edit."""
    installed = tuple({sys.prefix, sys.base_prefix})
    files = [(name, getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())]
    return sorted(name for name, path in files if path.endswith(".py") and not path.startswith(installed))
