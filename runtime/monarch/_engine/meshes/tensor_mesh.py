"""The program's side of one mesh of tensors: its axes, what it knows of layouts and ops, and its stream."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch

from monarch._core.shapes.extent import axes_text
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import mesh_without_groups
from monarch._engine.issuing.encoding import Template
from monarch._engine.issuing.failures import Unreported, describe_unreported
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.stream import OpStream, ProgramOrder, Ref
from monarch._engine.layouts.layout import Layout, Layouts
from monarch._engine.meshes.recovery import Recovery, recovering
from monarch._engine.rank.executing.executor import TensorExecutor
from monarch._engine.tensors.tensor import Tensor
from monarch._meshes.inside import node_of, region_of, state_of, view_at
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._node.node import Node
from monarch.exceptions import CallTimeoutError, MonarchError

_WAIT_S = 600.0
"""Seconds to wait for the ranks, which import torch and make process groups."""


_HEALING_S = 5.0
"""Seconds that a replacement of ranks waits for its tensors; later looks at a tensor wait for the rest."""


class TensorMesh:
    """One mesh or slice of processes that holds tensors.

    Args:
        procs: the processes.
        actors: the executors of the whole mesh of processes.
        kind: type of the device on which the ranks compute.
        order: the order of the ops of all slices of the mesh of processes.
        heal: see Recovery.
    """

    def __init__(self, procs: ProcMesh, actors: Any, kind: str, order: ProgramOrder, heal: Callable[..., bool]) -> None:
        region = region_of(procs)
        self.public: Any = procs
        """The mesh as the program has it."""
        self.procs = procs
        self.region = region
        self.axes: tuple[str, ...] = tuple(region.extent.labels) or ("ranks",)
        self.sizes: tuple[int, ...] = tuple(region.extent.sizes) or (1,)
        self.ranks: list[int] = list(region.base_ranks())
        self.actors = view_at(actors, region)
        self.first = view_at(self.actors, region.slice(**dict.fromkeys(region.extent.labels, 0)))
        """The executor of the first rank."""
        self.kind = kind
        self.device = torch.device("cpu")
        """Of all tensors as the program has them, also without a GPU of its own: see docs/decisions/0097."""
        # Without process groups: it only tells how tensors are sharded.
        self.device_mesh = mesh_without_groups("cpu", self.ranks, self.sizes, self.axes)
        self.layouts = Layouts(self)
        self.stream = OpStream(self.actors, order)
        self.recovery = Recovery(self.stream, procs.name, actors, state_of(procs).procs.uid, heal)
        self.stream.on_done = self.recovery.note
        self.stream.on_looked = self.recovery.recover_aside
        self.plans: dict[Any, Any] = {}
        """Plans of ops, by signature: see dispatching/metadata.py. Single operations of a dict, from any thread."""
        self.rank_layouts: dict[Any, Any] = {}
        """Layouts of rank-local tensors: see layouts/rank_layout.py. Single operations of a dict, from any thread."""
        self._templates: dict[Any, int] = {}
        """Templates of operations. Single operations of a dict, from any thread."""

    def __repr__(self) -> str:
        return f"<mesh {self.procs.name}: {axes_text(self.region.extent)}>"

    def coordinates(self, rank: int) -> list[int]:
        """Return the place of a base rank on each axis."""
        position = self.region.position_of(rank)
        assert position is not None
        point = self.region.extent.point(position)
        return [point[label] for label in self.region.extent.labels] or [0]

    def make(self, layout: Layout) -> Tensor:
        """Return a new tensor, whose value an op issued next must give."""
        return Tensor(Ref(self.stream, layout), layout)

    def issue(
        self,
        kind: str,
        args: tuple[Any, ...],
        inputs: tuple[Tensor, ...] = (),
        values: tuple[Any, ...] = (),
        outputs: tuple[Tensor, ...] = (),
        writes: tuple[int, ...] = (),
    ) -> None:
        """Issue an operation of the engine; see rank/operations/table.py."""
        number = self.operation(kind, args, writes)
        numbers = tuple(each.monarch_ref.number for each in inputs)
        made = tuple(each.monarch_ref.number for each in outputs)
        self.stream.issue(number, numbers, values, made, lines.here())

    def operation(self, kind: str, args: tuple[Any, ...], writes: tuple[int, ...] = ()) -> int:
        """Return the number of the template of an operation."""
        key = (kind, repr(args), writes)
        number = self._templates.get(key)
        if number is None:
            number = self._templates[key] = self.stream.template(Template(kind, (), args, {}, writes))
        return number


class TensorMeshes:
    """The meshes of this process that hold tensors; a part of its node."""

    heal: ClassVar[Callable[..., bool]]
    """See healing.py, which is above this file; ``wiring.py`` sets it."""

    def __init__(self, node: Node) -> None:
        self._lock = threading.RLock()
        self._actors: dict[str, tuple[Any, str, ProgramOrder]] = {}
        """Executors, device and order of ops by uid of the mesh of processes. Lock: ``_lock``."""
        self._starting: dict[str, threading.Event] = {}
        """By uid, set when the start of its executors has ended. Lock: ``_lock``."""
        self.known: dict[tuple[str, Region], TensorMesh] = {}
        """Lock for writing: ``_lock``."""
        self._node = node
        node.events.healed.subscribe(self._healed)
        node.events.replaced.subscribe(self._replaced)
        node.events.closing.subscribe(self._tell_last)

    def of(self, procs: ProcMesh) -> TensorMesh:
        """Return the tensor mesh of some processes; the first use starts executors on all of their mesh."""
        shared, region = state_of(procs).procs, region_of(procs)
        found = self.known.get((shared.uid, region))
        if found is not None:
            return found
        actors, device, order = self._executors(procs)
        with self._lock:
            found = self.known.get((shared.uid, region))
            if found is None:
                heal = partial(self._heal, shared.uid)
                found = TensorMesh(procs, actors, device, order, heal)
                for other in self.of_uid(shared.uid)[:1]:
                    found.recovery.link(other.recovery)
                self.known[shared.uid, region] = found
            return found

    def _executors(self, procs: ProcMesh) -> tuple[Any, str, ProgramOrder]:
        """Return those of a mesh of processes; one thread starts them, and others wait for it without a lock."""
        shared = state_of(procs).procs
        while True:
            with self._lock:
                found = self._actors.get(shared.uid)
                if found is not None:
                    return found
                begun = self._starting.get(shared.uid)
            if begun is not None:
                if not begun.wait(_WAIT_S):
                    raise CallTimeoutError(f"the executors of {shared.name} did not start within {_WAIT_S:g} s; retry")
                continue
            mine = threading.Event()
            try:
                with self._lock:
                    is_first = self._starting.setdefault(shared.uid, mine) is mine
                if is_first:
                    return self._start(procs)
            finally:
                with self._lock:
                    if self._starting.get(shared.uid) is mine:
                        del self._starting[shared.uid]
                mine.set()

    def _start(self, procs: ProcMesh) -> tuple[Any, str, ProgramOrder]:
        shared = state_of(procs).procs
        # Errors name the mesh of the program, and calls by their titles.
        actors: Any = view_at(procs, shared.region()).spawn(shared.name, TensorExecutor)
        try:
            devices = set(actors.prepare.call().get(_WAIT_S).values())
        except BaseException:
            # The next use starts others.
            actors.stop()
            raise
        started = actors, "cuda" if devices == {"cuda"} else "cpu", ProgramOrder()
        with self._lock:
            self._actors[shared.uid] = started
        return started

    def _healed(self, uid: str, replaced: list[int]) -> None:
        meshes = self.of_uid(uid)
        if meshes:
            shape = state_of(meshes[0].procs).procs.region()
            with recovering:
                self._heal(uid, [at for at, rank in enumerate(shape.base_ranks()) if rank in replaced], {})
            meshes[0].stream.order.ask_kept()
            self._node.events.tensors_failed.tell()

    def _replaced(self, uid: str, replaced: list[int], may_wait: bool) -> None:
        if not replaced or not self.of_uid(uid):
            return
        done = threading.Event()

        def heal() -> None:
            try:
                self._healed(uid, replaced)
            except MonarchError as error:
                # The next look at a tensor tries again, and raises what is wrong.
                del error
            finally:
                done.set()

        self._node.lanes.post("tensors", heal)
        if may_wait:
            done.wait(_HEALING_S)

    def take_unreported(self) -> list[Unreported]:
        """Return what has failed and no look has raised; each only once."""
        found: list[Unreported] = []
        for mesh in list(self.known.values()):
            with suppress(IndexError):
                while True:
                    found.append(mesh.recovery.unreported.popleft())
        return found

    def _tell_last(self) -> None:
        """Write what nobody has looked at, as the session ends."""
        for each in self.take_unreported():
            print(f"monarch: {describe_unreported(each, {})}", file=sys.stderr, flush=True)

    def _heal(self, uid: str, new: list[int], found: dict[int, Any]) -> bool:
        """Let new processes, by position, take their place; return whether all ranks continue."""
        meshes = self.of_uid(uid)
        shape = state_of(meshes[0].procs).procs.region()
        return self.heal(meshes, self._actors[uid][0], shape, [shape.base_rank(at) for at in new], found)

    def of_uid(self, uid: str) -> list[TensorMesh]:
        """Return the tensor meshes on the processes of a mesh."""
        return [mesh for (each, _), mesh in list(self.known.items()) if each == uid]


def tensor_mesh_of(mesh: Any) -> TensorMesh:
    """Return the tensor mesh of what the program calls a mesh: a Mesh, or a mesh of processes or a slice of one."""
    procs = getattr(mesh, "procs", mesh)
    if isinstance(mesh, TensorMesh):
        return mesh
    simulated = getattr(procs, "tensor_mesh", None)
    if isinstance(simulated, TensorMesh):
        simulated.public = mesh
        return simulated
    if not isinstance(procs, ProcMesh):
        from monarch.exceptions import ArgumentError

        raise ArgumentError(
            f"mesh: expected a Mesh, or a mesh of processes such as this_host().spawn_procs(...), got {mesh!r}"
        )
    found = node_of(procs).part(TensorMeshes).of(procs)
    if procs is not mesh:
        found.public = mesh
    return found
