"""``%mesh checkpoint`` and ``%mesh restore``: save variables of ranks to disk, and load them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from monarch._kernel_api import (
    STATEFUL,
    TENSOR,
    VALUE,
    Save,
    describe_ranks,
    find,
    folder_of,
    load_variables,
    name_of,
    send,
    take_variables,
    values_here,
)
from monarch.exceptions import ActorError, DeviceMeshError
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.deaths import death_error
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.variable_errors import explain, lacking, one_line, reason, variables

_KEEP = 2
"""Versions that stay in a folder."""
_PATIENCE = 24 * 3600.0
"""Seconds; a rank makes its copy after the cells that it runs."""


class Saving:
    """The commands for checkpoints.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._newest: dict[str, Save] = {}
        """The newest checkpoint of this notebook, by folder."""

    def commands(self) -> dict[str, Callable[[list[str]], Any]]:
        """Return the action of each command."""
        return {"checkpoint": self.checkpoint, "restore": self.restore}

    def checkpoint(self, words: list[str]) -> None:
        """``%mesh checkpoint``: write variables of all ranks to a new version in a folder."""
        path, names, wait = _parse(words, "checkpoint")
        mesh = self._meshes.get(None)
        begun = time.perf_counter()
        try:
            save = Save(
                mesh.cells, folder_of(path), name_of(take_variables), (names,), _KEEP, _PATIENCE, by_content=True
            )
        except DeviceMeshError as error:
            raise death_error(error, mesh) from None

        self._newest[folder_of(path)] = save

        def tell(_: object) -> None:
            error = save.future.exception()
            if error is None:
                print(_written(mesh, save, time.perf_counter() - begun))
                if not names:
                    _say_left_out(mesh, save)
            else:
                why = reason(error, len(mesh.cells))
                print(f"the checkpoint of mesh {mesh.name!r} to {path} failed: {why}", file=sys.stderr)

        if wait:
            try:
                save.future.get()
            except KeyboardInterrupt:
                print("the checkpoint continues; its result is printed here", file=sys.stderr)
                save.future.add_done_callback(tell)
                raise
            except DeviceMeshError as error:
                raise death_error(error, mesh) from None
            except ActorError as error:
                raise HeaderError(f"%mesh checkpoint: {explain(mesh, error)}") from error
            tell(None)
        else:
            print(f"writing mesh {mesh.name!r} to {path}; the result is printed here")
            save.future.add_done_callback(tell)

    def restore(self, words: list[str]) -> None:
        """``%mesh restore``: read variables from the latest version in a folder."""
        path, names, _ = _parse(words, "restore")
        mesh = self._meshes.get(None)
        newest = self._newest.get(folder_of(path))
        if newest is not None and not newest.future.done:
            print(f"waiting for the checkpoint to {path}, which is still being written")
            # Its failure is told where it was begun; older versions may be there.
            newest.future.exception()
        try:
            folder = find(mesh.cells, folder_of(path), None, _PATIENCE)
            with one_line(mesh, "%mesh restore"):
                answers = send(mesh.cells, "restore", load_variables, folder, names).get()
        except DeviceMeshError as error:
            raise death_error(error, mesh) from None
        ranks = list(answers.values())
        is_some = any(restored or partly for restored, _, partly in ranks)
        print(f"restored mesh {mesh.name!r} from {folder}" if is_some else
              f"no variables of mesh {mesh.name!r} were restored from {folder}")  # fmt: skip
        for kind in (STATEFUL, TENSOR, VALUE):
            groups = _by_ranks([{name: "" for name, how in restored.items() if how == kind} for restored, *_ in ranks])
            if groups:
                print(f"  {kind}: {', '.join(name + where for (name, _), where in groups.items())}")
        titles = (
            "not restored (unchanged):",
            "partly restored (only some tensors have the values of the checkpoint):",
        )
        for title, failed in zip(titles, (_by_ranks([each[at] for each in ranks]) for at in (1, 2)), strict=True):
            if failed:
                print(title)
            for (name, why), where in failed.items():
                print(f"  {name}{where}: {why}")
        # A variable that came back nowhere is named above; it is missing on all ranks or on none.
        some = {name for restored, *_ in ranks for name in restored}
        lack = lacking(mesh, {rank: some & left.keys() for rank, (_, left, _) in enumerate(ranks)})
        if lack:
            print(lack)


def _parse(words: list[str], command: str) -> tuple[str, list[str], bool]:
    arguments = parse(command, words)
    for name in arguments.names:
        if not name.isidentifier():
            raise HeaderError(f"%mesh {command}: expected variable names, got {name!r}")
    return arguments.path, arguments.names, getattr(arguments, "wait", False)


def _written(mesh: Mesh, save: Save, seconds: float) -> str:
    names = _by_ranks([dict.fromkeys(each, "") for each in save.names])
    what = ", ".join(name + where for (name, _), where in names.items()) or "no variables"
    return f"wrote mesh {mesh.name!r} to {save.future.get()}: {what} ({seconds:.2f} s)"


def _say_left_out(mesh: Mesh, save: Save) -> None:
    """Name the variables of the cells that a checkpoint of all variables does not have."""
    written = {name for each in save.names for name in each}
    left = [name for name in variables(mesh, values_here) if name not in written]
    if left:
        print(f"not written: {', '.join(left)}; only tensors, objects with a state_dict and plain values are written "
              f"unless you name the variables in %mesh checkpoint")  # fmt: skip


def _by_ranks(ranks: list[Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """Return the names and texts of all ranks, with the ranks that have each; empty if all have it."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(ranks):
        for pair in each.items():
            ranks_of.setdefault(pair, []).append(rank)
    return {pair: "" if len(who) == len(ranks) else f" ({describe_ranks(who)})" for pair, who in ranks_of.items()}
