"""``%mesh checkpoint`` and ``%mesh restore``: the variables of cells, on disk and back on ranks."""

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
)
from monarch.exceptions import DeviceMeshError
from monarch_kernel.magics.header import HeaderError
from monarch_kernel.meshes.registry import Mesh, Meshes, with_hint

_KEEP = 2
"""Versions that stay in a folder."""
_PATIENCE = 24 * 3600.0
"""Seconds; a rank takes its copy when the cells that it runs have ended."""


class Saving:
    """What these verbs do.

    Args:
        shell: of the notebook.
        meshes: of the notebook.
    """

    def __init__(self, shell: Any, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes

    def verbs(self) -> dict[str, Callable[[list[str]], Any]]:
        """The verbs by name."""
        return {"checkpoint": self.checkpoint, "restore": self.restore}

    def checkpoint(self, words: list[str]) -> None:
        """``%mesh checkpoint PATH [NAMES...] [--wait]``: writes variables of all ranks to a new version in a folder."""
        path, names = _parse([word for word in words if word != "--wait"], "checkpoint")
        mesh = self._meshes.get(None)
        begun = time.perf_counter()
        try:
            save = Save(
                mesh.cells, folder_of(path), name_of(take_variables), (names,), _KEEP, _PATIENCE, by_content=True
            )
        except DeviceMeshError as error:
            raise with_hint(error, mesh.name) from None

        def tell(_: object) -> None:
            error = save.future.exception()
            if error is None:
                print(_written(mesh, save, time.perf_counter() - begun))
            else:
                print(f"the checkpoint of mesh {mesh.name!r} to {path} failed: {error}", file=sys.stderr)

        if "--wait" in words:
            try:
                save.future.get()
            except KeyboardInterrupt:
                print("the checkpoint goes on; a line says when it is complete", file=sys.stderr)
                save.future.add_done_callback(tell)
                raise
            except DeviceMeshError as error:
                raise with_hint(error, mesh.name) from None
            tell(None)
        else:
            print(f"mesh {mesh.name!r} is being written to {path}; a line says when that is complete")
            save.future.add_done_callback(tell)

    def restore(self, words: list[str]) -> None:
        """``%mesh restore PATH [NAMES...]``: brings variables back from the latest version in a folder."""
        path, names = _parse(words, "restore")
        mesh = self._meshes.get(None)
        try:
            folder = find(mesh.cells, folder_of(path), None, _PATIENCE)
            answers = send(mesh.cells, "restore", load_variables, folder, names).get()
        except DeviceMeshError as error:
            raise with_hint(error, mesh.name) from None
        ranks = list(answers.values())
        print(f"mesh {mesh.name!r} has been restored from {folder}")
        for kind in (STATEFUL, TENSOR, VALUE):
            found = _by_ranks([{name: "" for name, how in restored.items() if how == kind} for restored, _ in ranks])
            if found:
                print(f"  {kind}: {', '.join(name + where for (name, _), where in found.items())}")
        failed = _by_ranks([failed for _, failed in ranks])
        if failed:
            print("not restored, and as before:")
            for (name, why), where in failed.items():
                print(f"  {name}{where}: {why}")


def _parse(words: list[str], verb: str) -> tuple[str, list[str]]:
    options = [word for word in words if word.startswith("--")]
    if not words or options:
        wrong = f"there is no option {options[0]!r}" if options else "the path of a folder is missing"
        waits = " [--wait]" if verb == "checkpoint" else ""
        raise HeaderError(f"%mesh {verb}: {wrong}; write %mesh {verb} PATH [NAMES...]{waits}")
    path, *names = words
    for name in names:
        if not name.isidentifier():
            raise HeaderError(f"%mesh {verb}: {name!r} is not the name of a variable")
    return path, names


def _written(mesh: Mesh, save: Save, seconds: float) -> str:
    names = _by_ranks([dict.fromkeys(each, "") for each in save.names])
    what = ", ".join(name + where for (name, _), where in names.items()) or "no variables"
    return f"mesh {mesh.name!r} is written to {save.future.get()}: {what} ({seconds:.2f} s)"


def _by_ranks(ranks: list[Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """What ranks have said of names, each with the ranks that did, in words; nothing where all did."""
    said: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(ranks):
        for pair in each.items():
            said.setdefault(pair, []).append(rank)
    return {pair: "" if len(who) == len(ranks) else f" ({describe_ranks(who)})" for pair, who in said.items()}
