"""The notebook's namespace on each rank: an actor whose state is the variables of the cells."""

from __future__ import annotations

import builtins
import sys
from typing import Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._actors.pausing.gate import gate
from monarch._core.shapes.extent import Point
from monarch._groups.default_group import hook_torch
from monarch._groups.environment import rank_gpu, restore_mesh_variables
from monarch._meshes.context import context
from monarch._node.current import current_node
from monarch._notebook.adapting.libraries import adapt_libraries
from monarch._notebook.adapting.no_terminal import refuse_input
from monarch._notebook.magics.shell import offer
from monarch._notebook.names.own_names import OwnNames
from monarch._notebook.names.user_names import given, user_names
from monarch._notebook.running.execute import CellResult, run, steps_of
from monarch._notebook.running.marks import prepare
from monarch._notebook.showing.display import Display, display, set_usual
from monarch._notebook.showing.streams import install


class Namespace(Actor):
    """Runs cells in one namespace, which lives as long as the mesh.

    Args:
        name: name of the mesh.
        device: ``cpu`` or ``cuda``; empty for what there is.

    Raises:
        RuntimeError: the device is ``cuda``, and this rank sees no GPU.
    """

    def __init__(self, name: str, device: str = "") -> None:
        instance = context().actor_instance
        self.point: Point = instance.rank
        module = sys.modules["__main__"]
        self.variables: dict[str, Any] = module.__dict__
        self.display = Display()
        size = self.point.extent.nelements
        self.own = OwnNames(self.variables)
        self.own.set(
            rank=self.point.rank,
            world_size=size,
            point=self.point,
            mesh=instance.proc_mesh,
            display=display,
        )
        try:
            # Quick, since a rank is a fork of a process that has imported it.
            import torch
        except ImportError:
            pass
        else:
            import torch.distributed

            hook_torch()
            available = torch.cuda.is_available()
            if device == "cuda" and not available:
                raise RuntimeError(f"rank {self.point.rank} sees no GPU, but the mesh uses device cuda")
            kind = device or ("cuda" if available else "cpu")
            where = torch.device(kind, rank_gpu().number()) if kind == "cuda" else torch.device(kind)
            self.own.set(torch=torch, dist=torch.distributed, device=where)
        prepare()
        install()
        refuse_input()
        set_usual(self.display)
        adapt_libraries()
        offer(self.variables)
        self.given = set(self.variables)
        """The names that were there before any cell."""
        given.update(self.given)
        # As in a notebook, display is there without a name of its own being taken.
        builtins.__dict__.setdefault("display", display)

    def __resized__(self, old: dict[str, int], new: dict[str, int]) -> None:
        """Take the new size of the mesh."""
        instance = context().actor_instance
        self.point = instance.rank
        self.own.set(world_size=self.point.extent.nelements, point=self.point, mesh=instance.proc_mesh)

    @endpoint
    def run(self, source: str, name: str, sink: Any, typed: str = "") -> CellResult:
        """Run a cell.

        Args:
            source: its code.
            name: what its tracebacks call it, such as ``cell [12]``.
            sink: a Port for what it displays while it runs.
            typed: its text as typed, if that has magics.
        """
        return self._run(source, name, sink, typed)

    @endpoint
    def define(self, source: str, name: str, sink: Any, typed: str = "") -> CellResult:
        """Run the definitions of an earlier cell. A pause that somebody has asked for waits for the next call."""
        return self._run(source, name, sink, typed)

    def _run(self, source: str, name: str, sink: Any, typed: str) -> CellResult:
        offer(self.variables, bool(typed))
        current_node().output.watch()
        try:
            change = self.own.change_of(source)
            return run(steps_of(source, name, self.variables, self.display, sink, change, typed))
        finally:
            self.own.settle()
            restore_mesh_variables()

    @endpoint
    def push(self, values: dict[str, Any]) -> None:
        """Set variables."""
        self.variables.update(values)
        # The user has named them, so no cell is said to have replaced them.
        self.own.accept(values)

    @endpoint
    def pull(self, name: str) -> Any:
        """Return the value of an expression, most often a variable."""
        try:
            return eval(name, self.variables)
        except NameError as error:
            known = ", ".join(each for each, _ in self.names_of()) or "no variables"
            raise NameError(f"{error} on rank {self.point.rank}, which has {known}") from None

    @endpoint
    def names(self) -> list[tuple[str, str]]:
        """Return the variables of the cells with the names of their types."""
        return self.names_of()

    def names_of(self) -> list[tuple[str, str]]:
        """Return the same, for use here."""
        return [(name, type(self.variables[name]).__name__) for name in user_names(self.variables)]


gate.at_once.add(Namespace.define.method)
