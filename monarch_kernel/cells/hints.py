"""Hints for errors: where an undefined name is defined and how to copy it; a lost GPU; a port that is in use."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from monarch._kernel_api import (
    CellError,
    ask_soon,
    defines,
    describe_ranks,
    is_list,
    request,
    split_proc,
    targets_of,
    values_here,
)
from monarch.exceptions import ActorError
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.replaced import in_order
from monarch_kernel.meshes.variable_errors import missing_name

_LOST_GPU = re.compile(
    r"CUDA error: (device-side assert|an illegal|misaligned address|unspecified launch|invalid program counter|"
    r"hardware stack|uncorrectable ECC)"
)
"""Errors after which a process cannot use its GPU again."""
_TAKEN_PORT = re.compile(r"EADDRINUSE|\[Errno 98\]|\baddress already in use", re.IGNORECASE)
_PORT = re.compile(r"\bport: (\d+)")
"""As torch names it; Python does not."""
_MP_SPAWN = "torch/multiprocessing/spawn.py"
_INSTANCE = "context().actor_instance"
_FOR_ACTORS = {
    "rank": "monarch.actor.current_rank().rank is the rank of an actor",
    "world_size": "monarch.actor.current_rank().extent.nelements is the number of actors",
    "point": "monarch.actor.current_rank() has the coordinates of an actor",
    "mesh": f"{_INSTANCE}.proc_mesh is the mesh of an actor",
    "device": "torch.device('cuda' if torch.cuda.is_available() else 'cpu') is the device of an actor",
    "dist": "add 'import torch.distributed as dist' to the cell of the class",
    "torch": "add 'import torch' to the cell of the class",
}
"""By name that only ``%%mesh`` cells have, its counterpart in a class of actors."""

_HISTORY = re.compile(r"In|Out|_(ih|oh|dh|i{1,3}|i?\d+)|_{1,3}")
"""Names of IPython's own."""
_OF_HISTORY = "{!r} refers to the history of the notebook; a rank keeps only the value of its last cell, as _"

_HERE = {
    "torch": "run 'import torch' in the notebook",
    "dist": "run 'import torch.distributed as dist' in the notebook",
    "display": "run 'from IPython.display import display' in the notebook",
}
"""By name that ``%%mesh`` cells have without an import, how the notebook gets it."""


class Hints:
    """Hints for the errors of a notebook.

    Args:
        meshes: the meshes of the notebook.
        variables: the variables of the notebook.
    """

    def __init__(self, meshes: NotebookMeshes, variables: Mapping[str, Any]) -> None:
        self._meshes = meshes
        self._variables = variables

    def teach(self, mesh: Mesh | None, errors: Mapping[int, CellError]) -> None:
        """Add hints to the errors of a cell.

        Args:
            mesh: the mesh of the cell; None for a cell inside actors.
            errors: by rank.
        """
        ranks_of: dict[str, list[int]] = {}
        for rank, error in errors.items():
            if error.missing and not error.hint:
                ranks_of.setdefault(error.missing, []).append(rank)
        for name, ranks in ranks_of.items():
            for rank, hint in self._of_ranks(mesh, name, sorted(ranks)).items():
                errors[rank].hint = hint
        lost = sorted(rank for rank, error in errors.items() if _LOST_GPU.search(error.text))
        for rank in lost:
            errors[rank].hint = self._of_gpus(mesh, lost)
        if mesh is None or len(mesh.cells) > 1:
            for error in errors.values():
                if not error.hint and _TAKEN_PORT.search(error.trace):
                    error.hint = _of_port(error)

    def _of_gpus(self, mesh: Mesh | None, ranks: list[int]) -> str:
        """Return how ranks get their GPUs back, and how to find the line that has failed."""
        who, alone = describe_ranks(ranks), len(ranks) == 1
        kill = "%mesh kill" if mesh is None else f"{magic('kill', mesh, self._meshes)} {','.join(map(str, ranks))}"
        return (
            f"{'the process' if alone else 'the processes'} of {who} can no longer use the GPU; {kill} replaces "
            f"{'it (its' if alone else 'them (their'} variables are lost). GPUs run asynchronously, so an earlier line "
            f"may have failed: %mesh up --env CUDA_LAUNCH_BLOCKING=1 finds it"
        )

    def _of_ranks(self, mesh: Mesh | None, name: str, ranks: list[int]) -> dict[int, str]:
        """Return a hint for each rank that lacks a name; ranks without one are left out."""
        holders = holders_of(mesh, name) if mesh is not None else []
        replaced = mesh.replaced.after if mesh is not None else {}
        lost = [rank for rank in ranks if rank in replaced]
        hint = ""
        if name in self._variables:
            pushed = f"{name!r} is defined in the notebook, not on the ranks; {self._push(mesh, name)}"
            hint = _OF_HISTORY.format(name) if _HISTORY.fullmatch(name) else pushed
        elif holders and set(ranks) <= set(holders):
            # Such as one of the mesh's own names, which come back when a cell that deletes them has ended.
            hint = f"{name!r} is defined again now; run the failed lines in a new cell"
        elif holders:
            hint = f"only {describe_ranks(holders)} define{'s' if len(holders) == 1 else ''} {name!r}"
            if mesh is not None and set(ranks) <= mesh.replaced.uncopied:
                copy = f"{magic('heal', mesh, self._meshes)} --copy-from {holders[0]}"
                hint += f"; {copy} copies the variables of rank {holders[0]}"
        elif mesh is not None and mesh.restarted is not None and not lost:
            after = f" after {mesh.restarted}" if mesh.restarted else ""
            hint = (
                f"mesh {mesh.name!r} was restarted{after}, which cleared its variables; if an earlier cell defines "
                f"{name!r}, run it again"
            )
        hints = dict.fromkeys(ranks, hint) if hint else {}
        if lost and (holders or (lost == ranks and not hint)):
            who = f"{describe_ranks(lost)} {'was' if len(lost) == 1 else 'were'} replaced{_after(replaced, lost)}"
            if holders:
                copy = f"{magic('heal', mesh, self._meshes)} --copy-from {holders[0]}"
                lack = f"{who} and lost {name!r}; {copy} copies the variables of rank {holders[0]}"
            else:
                # It may never have been there.
                lack = f"{who} and lost all variables; if an earlier cell defines {name!r}, run it again"
            hints.update(dict.fromkeys(lost, lack))
        return hints

    def _push(self, mesh: Mesh | None, name: str) -> str:
        copies = f"%mesh push {name} copies it"
        if mesh is not None and mesh.name != self._meshes.used:
            return f"copy it with %mesh use {mesh.name}, then %mesh push {name}"
        return f"{copies} to their ranks" if mesh is None else copies

    def has_mesh(self) -> bool:
        """Return whether a mesh is running."""
        return bool(self._meshes.by_name)

    def of_endpoint(self, error: ActorError) -> str:
        """Return a hint for an endpoint that used an undefined name; empty for other errors."""
        if type(error.exception) is not NameError:
            return ""
        name = missing_name(error.exception)
        if name in _FOR_ACTORS:
            return f"{name!r} is defined only for the code of %%mesh cells, not for actors; {_FOR_ACTORS[name]}"
        if name in self._variables:
            return (
                f"the notebook defined {name!r} after the class was sent; run the class cell again, or pass {name!r} "
                f"as an argument"
            )
        for mesh in self._meshes.in_order():
            if holders_of(mesh, name):
                return f"{name!r} is a variable of %%mesh cells, which actor classes cannot see; pass it as an argument"
        guess = did_you_mean(name, [each for each in self._variables if not each.startswith("_")])
        return f"the notebook has no {name!r} either{guess}" if guess else ""

    def of_notebook(self, name: str) -> str:
        """Return a hint for a name that the notebook lacks; empty if no rank has it either."""
        if name in self._meshes.by_name:
            return f"mesh {name!r} is running, but its variable was deleted; %mesh use {name} sets it again"
        for mesh in self._meshes.in_order():
            holders = holders_of(mesh, name)
            if not holders:
                continue
            if name in _FOR_ACTORS and len(holders) == len(mesh.cells):
                here = _HERE.get(name, f"{mesh.name}[{name!r}] has the value of each rank")
                if name == "mesh":
                    here = f"the meshes of the notebook are {', '.join(self._meshes.by_name)}"
                return f"{name!r} exists only in %%mesh cells; {here}"
            where = f"{describe_ranks(holders, len(mesh.cells))} of mesh {mesh.name!r}"
            verb = "defines" if len(holders) == 1 else "define"
            use = f"%mesh use {mesh.name}, then " if mesh.name != self._meshes.used else ""
            one = f" --rank {holders[0]}" if len(holders) < len(mesh.cells) else ""
            module = f"; if it is the module {name}, import it here" if name in sys.modules else ""
            if not module and not _is_value(mesh, holders[0], name):
                return f"{where} {verb} {name!r}, which is code: use it in a %%mesh cell, or run its cell here too"
            return (
                f"{where} {verb} {name!r}: copy it with {use}%mesh pull {name}{one}, or use it in a %%mesh cell{module}"
            )
        # Ranks that are dead or busy do not say what they define.
        missing = name == "mesh" and not self._meshes.by_name
        return "no mesh is running; %mesh up starts one" if missing else ""

    def of_attribute(self, owner: object, name: str) -> str:
        """Return a hint for an attribute that a mesh lacks; empty if no rank has a variable of that name."""
        for mesh in self._meshes.in_order():
            holders = holders_of(mesh, name) if mesh.procs is owner else []
            if holders and len(holders) < len(mesh.cells):
                use = f"%mesh use {mesh.name}, then " if mesh.name != self._meshes.used else ""
                pull = f"{use}%mesh pull {name} --rank {holders[0]}"
                return f"{name!r} is a variable of {describe_ranks(holders)}; copy it with {pull}"
            if holders:
                where = describe_ranks(holders, len(mesh.cells))
                return f"{name!r} is a variable of {where}; {mesh.name}[{name!r}] has the value of each rank"
        return ""


def _of_port(error: CellError) -> str:
    """Return how to choose a port that the other ranks of the host do not take."""
    known = _PORT.search(error.trace)
    port = known[1] if known is not None else "29500"
    hint = (
        f"each rank runs this cell, and the ranks of a host cannot share a port: use one for each rank, such as "
        f"{port} + rank, or port 0 for a free one"
    )
    if _MP_SPAWN in error.trace:
        hint += (
            "; or omit mp.spawn, because each rank is already such a process: instead of "
            "mp.spawn(train, args=(world_size,)), write train(rank, world_size)"
        )
    return hint


def _after(after: Mapping[int, str], ranks: list[int]) -> str:
    return f" after {in_order(after[rank] for rank in ranks)}" if any(after.get(rank) for rank in ranks) else ""


def holders_of(mesh: Mesh, name: str) -> list[int]:
    """Return the ranks that define a name, of those that answer soon."""
    procs = [peer.proc for peer in targets_of(mesh.cells).peers if peer.dead is None]
    answers = ask_soon(procs, request(defines, name))
    return sorted(split_proc(proc)[1] for proc, answer in answers.items() if answer is True)


def _is_value(mesh: Mesh, rank: int, name: str) -> bool:
    """Return whether a variable of a rank is no function or class, or the rank does not say."""
    proc = targets_of(mesh.cells).peers[rank].proc
    answer = ask_soon([proc], request(values_here)).get(proc)
    return not is_list(answer) or name in answer


def magic(command: str, mesh: Mesh | None, meshes: NotebookMeshes) -> str:
    """Return ``%mesh COMMAND``, with the name of the mesh unless it is in use."""
    return f"%mesh {command}" if mesh is None or mesh.name == meshes.used else f"%mesh {command} {mesh.name}"
