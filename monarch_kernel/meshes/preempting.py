"""Hosts of notebook meshes that are taken back: said at once, and handled by the rule of ``%mesh up --on-preempt``."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarch._kernel_api import (
    BusyError,
    HostNotice,
    Save,
    axes_text,
    current_node,
    describe_ranks,
    folder_of,
    in_thread,
    name_of,
    reaches,
    state_of,
    take_variables,
)
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.moving import move
from monarch_kernel.meshes.recipe import HEAL
from monarch_kernel.meshes.registry import NotebookMeshes

SHRINK, CHECKPOINT = "shrink", "checkpoint"
_MOVE_S = 3.0
"""Seconds for new processes and for the variables, before the agents of a host begin to end."""
_END_S, _END_PART = 3.0, 0.3
"""The time in which agents end: so many seconds, or that part of the whole time if it is shorter."""
_LATE_S = 15.0
"""Seconds after which a host that has not gone is taken to stay."""
_LATER_S = 60.0
"""Seconds for calls of the other ranks to end after the loss of a host."""
_LOOK_S = 0.2
_KEEP = 2
"""Versions of a checkpoint that stay."""


@dataclass(frozen=True)
class Preempted:
    """The argument of a function of ``--on-preempt``.

    Attributes:
        mesh: name of the mesh.
        hosts: names of the hosts that go.
        ranks: the ranks on them.
        seconds: until they may be gone.
    """

    mesh: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    seconds: float


def check_rule(rule: str, names: Mapping[str, Any]) -> None:
    """Raise HeaderError if a rule of ``--on-preempt`` is no function of the notebook."""
    kind = rule.partition(":")[0]
    rules = (SHRINK, HEAL, CHECKPOINT)
    if kind not in rules and not callable(names.get(kind)):
        functions = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
        guess = did_you_mean(kind, [*rules, *functions])
        remedy = guess or f"; define it before %mesh up, or use {', '.join(rules)}"
        raise HeaderError(f"%mesh up: --on-preempt {kind}: the notebook has no function with that name{remedy}")
    if kind not in rules and not _takes_one(names[kind]):
        raise HeaderError(
            f"%mesh up: --on-preempt {kind}: expected a function of one argument, which has mesh, hosts, ranks "
            f"and seconds; write def {kind}(preempted):"
        )


def _takes_one(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        # Not known.
        return True
    return True


class Preempting:
    """Follows the rules of meshes.

    Args:
        meshes: the meshes of the notebook.
        names: the variables of the notebook.
        tell: returns a function that shows a line in the current cell, even after its end.
    """

    def __init__(
        self, meshes: NotebookMeshes, names: Mapping[str, Any], tell: Callable[[], Callable[[str], None]]
    ) -> None:
        self._meshes = meshes
        self._names = names
        self._tell = tell

    def watch(self, mesh: Mesh) -> None:
        """Handle the notices of the hosts of a new mesh."""
        if mesh.recipe.preemption is not None:
            mesh.recipe.preemption.handler = partial(self._begin, mesh)
            mesh.recipe.preemption.holds = True
            # In the cell that runs or ran last; that of ``%mesh up`` may be far above.
            mesh.recipe.preemption.tell = partial(self._show, mesh.name)

    def _show(self, name: str, line: str, keep: bool) -> None:
        self._tell()(f"mesh {name!r}: {line}")

    def _begin(self, mesh: Mesh, notices: Sequence[HostNotice]) -> None:
        in_thread(current_node(), "preempted", lambda: self._follow(mesh, notices))

    def _follow(self, mesh: Mesh, notices: Sequence[HostNotice]) -> None:
        """Follow the rule. Errors are lines: nobody waits for this thread but cells and commands."""
        tell = self._tell()
        try:
            with mesh.moves.planned(max(each.seconds for each in notices) + 120.0):
                mesh.hosts.shrinking = True
                _Leave(mesh, notices, tell).follow(mesh.recipe.on_preempt, self._names)
        except Exception as error:
            # Otherwise every later cell of the mesh would raise it.
            tell(f"mesh {mesh.name!r}: the move was not completed: {str(error).splitlines()[0]}")
        finally:
            mesh.hosts.shrinking = False


class _Leave:
    """One answer to notices."""

    def __init__(self, mesh: Mesh, notices: Sequence[HostNotice], tell: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._tell = tell
        self._notices = notices
        procs = state_of(mesh.procs).procs
        self._hosts = [each.host for each in notices if each.host in procs.hosts]
        self._names = ", ".join(each.name for each in notices)
        self._ranks = [rank for rank in range(procs.size) if procs.host(rank) in self._hosts]
        self._whole = len(self._ranks) == procs.size

    @property
    def _left(self) -> float:
        """Seconds for calls to end and for state to move."""
        return max(
            0.5, min(each.seconds_left - min(_END_S, _END_PART * each.seconds) for each in self._notices) - _MOVE_S
        )

    def follow(self, rule: str, names: Mapping[str, Any]) -> None:
        """Follow a rule."""
        mesh = self._mesh
        if not self._ranks:
            return
        kind, _, path = rule.partition(":")
        if kind == CHECKPOINT:
            self._checkpoint(path or f"checkpoints/{mesh.name}")
        elif kind not in (SHRINK, HEAL):
            kind = self._call(kind, names.get(kind))
        if self._whole and not (kind == HEAL and mesh.hosts.free_now(self._hosts)):
            if kind != CHECKPOINT:
                self._tell(
                    f"all hosts of mesh {mesh.name!r} are being taken back; %mesh checkpoint PATH saves its variables"
                )
            return
        self._leave(kind)

    def _call(self, name: str, function: Any) -> str:
        """Ask a function of the notebook for the rule; without an answer, it is the usual one."""
        usual = f"ranks move as with {HEAL!r}"
        if not callable(function):
            self._tell(f"--on-preempt {name}: the notebook has no function with that name; {usual}")
            return HEAL
        hosts = tuple(each.name for each in self._notices)
        try:
            answer = function(Preempted(self._mesh.name, hosts, tuple(self._ranks), self._left))
        except Exception as error:
            self._tell(f"{name}() of --on-preempt raised {type(error).__name__}: {error}; {usual}")
            return HEAL
        if answer is not None and answer not in (SHRINK, HEAL):
            self._tell(f"{name}() of --on-preempt: expected 'heal', 'shrink' or None, got {answer!r}; {usual}")
        return SHRINK if answer == SHRINK else HEAL

    def _checkpoint(self, path: str) -> None:
        mesh, begun = self._mesh, time.monotonic()
        try:
            folder = folder_of(path)
            save = Save(mesh.cells, folder, name_of(take_variables), ([],), _KEEP, self._left, by_content=True)
            written = save.future.get(self._left)
            self._tell(f"wrote mesh {mesh.name!r} to {written} ({time.monotonic() - begun:.1f} s)")
        except (MonarchError, OSError) as error:
            self._tell(f"mesh {mesh.name!r} was not written to {path}: {str(error).splitlines()[0]}")

    def _leave(self, kind: str) -> None:
        """Move the ranks, or shrink the mesh; after the loss of the hosts, if calls still run before it."""
        mesh = self._mesh
        free = mesh.hosts.free_now(self._hosts) if kind == HEAL else []
        try:
            self._move(free, self._left)
            return
        except CallTimeoutError as error:
            busy = error.busy if isinstance(error, BusyError) else self._ranks
            one = len(busy) == 1
            self._tell(
                f"{describe_ranks(busy)} of mesh {mesh.name!r} {'is' if one else 'are'} still running a cell, so "
                f"{'its' if one else 'their'} variables cannot move before {self._names} is gone"
            )
        node, until = current_node(), time.monotonic() + max(each.seconds_left for each in self._notices) + _LATE_S
        while time.monotonic() < until and any(reaches(node, host) for host in self._hosts):
            time.sleep(_LOOK_S)
        if any(reaches(node, host) for host in self._hosts):
            self._tell(f"{self._names} was not taken back; mesh {mesh.name!r} is unchanged")
            if mesh.recipe.preemption is not None:
                mesh.recipe.preemption.forget(self._hosts)
            return
        self._move(mesh.hosts.free_now(self._hosts) if kind == HEAL else [], _LATER_S)

    def _move(self, free: Sequence[str], seconds: float) -> None:
        mesh = self._mesh
        drained = move(mesh, self._hosts, free, seconds, self._tell)
        if drained.gone:
            size = axes_text(mesh.procs.extent)
            were = "was" if len(drained.gone) == 1 else "were"
            self._tell(f"mesh {mesh.name!r} has shrunk to {size}: {describe_ranks(drained.gone)} {were} removed")
