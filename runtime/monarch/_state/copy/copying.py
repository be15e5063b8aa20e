"""Copies of a state between actors of any number and layout."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarch._core.kinds import is_mapping
from monarch._core.reshard import SOURCE, BoxHolder, Fetch, FetchPlan, Planner
from monarch._core.shapes.boxes import elements
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.adverbs import Endpoint
from monarch._meshes.actors.ask import ask, endpoint_of
from monarch._meshes.actors.undecorated import Undecorated
from monarch._meshes.inside import member_at
from monarch._meshes.procs.events import progress
from monarch._node.current import current_node
from monarch._node.future import Future, in_thread, when_done
from monarch._state.copy.endpoints import CopyEndpoint, Shared, end, fetch, share, share_state
from monarch.exceptions import ArgumentError, CallTimeoutError, MonarchError


@dataclass(frozen=True)
class CopyReport:
    """The statistics of a copy."""

    tensors: int
    bytes: int
    """Bytes written by targets."""
    bytes_between_hosts: dict[str, int]
    """Bytes received from other hosts, by host."""
    seconds: float


def copy_state(source: Any, target: Any, *, timeout: float = 60.0) -> Future[CopyReport]:
    """Copy tensors directly between actors, not through the program: from a trainer to generators, or from one to all.

    ``copy_state(trainers.weights, generators.weights)``, where ``weights`` is a method of either class that returns the
    tensors themselves, such as ``self.model.state_dict()``. Each target gets what its own tensors hold: tensors are
    matched by name, DTensors and ``Part`` by their place in the whole, so meshes and layouts may differ. Each byte goes
    to a host once; targets pass on what they have. Neither side should change the tensors meanwhile.

    Args:
        source: a method of a mesh of actors, or a state dict of the program.
        target: a method of a mesh of actors.
        timeout: seconds for each of at most three phases.

    Returns:
        A CopyReport. Its errors say what is partly written: TransferError, ActorError or SupervisionError.

    Raises:
        ArgumentError: ``source`` or ``target`` is not a method of a mesh of actors.
    """
    _check(source, target, timeout)
    return in_thread(current_node(), "copy_state", lambda: _Copy(source, target, timeout).run())


def _check(source: Any, target: Any, timeout: float) -> None:
    for what, side in (("source", source), ("target", target)):
        if isinstance(side, (Endpoint, Undecorated)) or (what == "source" and isinstance(side, Mapping)):
            continue
        raise ArgumentError(f"{what}: expected a method of a mesh of actors, such as trainers.weights, got {side!r}")
    if not timeout > 0:
        raise ArgumentError(f"timeout: expected seconds above 0, got {timeout!r}")


class _Copy:
    """One copy, coordinated by the program."""

    def __init__(self, source: Any, target: Any, timeout: float) -> None:
        self._source = source
        self._target = target
        self._seconds = timeout
        # Two, since a process may be on both sides.
        self._sharing: list[tuple[ActorMesh, str, Future[Any]]] = []
        self._done = self._total = 0
        """Actors that have fetched their part, once for each phase."""
        self._there, self._here = secrets.token_hex(8), secrets.token_hex(8)

    def run(self) -> CopyReport:
        begun = time.perf_counter()
        try:
            sources, targets = self._share()
            plan = self._plan(sources, targets)
            self._total = sum(map(len, plan.phases))
            for phase in plan.phases:
                self._phase(phase, sources, targets)
        finally:
            self._advance(True)
            self._end()
        names = {name for side in targets for name in side.tensors}
        written, received = _count(plan, sources, targets)
        return CopyReport(len(names), written, received, time.perf_counter() - begun)

    def _share(self) -> tuple[list[CopyEndpoint], list[CopyEndpoint]]:
        answer = self._call(self._target, self._here)
        if is_mapping(self._source):
            sources = [share_state(self._source, self._there)]
        else:
            sources = [
                CopyEndpoint(*side) for side in self._call(self._source, self._there).get(self._seconds).values()
            ]
        return sources, [CopyEndpoint(*side) for side in answer.get(self._seconds).values()]

    def _call(self, method: Any, token: str) -> Future[Any]:
        answer = endpoint_of(method.mesh, share).call(method.name, token)
        self._sharing.append((method.mesh, token, answer))
        return answer

    def _plan(self, sources: list[CopyEndpoint], targets: list[CopyEndpoint]) -> FetchPlan:
        known = {name: shared for side in sources for name, shared in side.tensors.items()}
        widths: dict[str, int] = {}
        for side in targets:
            for name, shared in side.tensors.items():
                widths[name] = shared.width
                if name in known and known[name].dtype != shared.dtype:
                    raise ArgumentError(
                        f"{name!r} has dtype {known[name].dtype} in the source but {shared.dtype} in the target"
                    )
        return Planner(_holders(sources), _holders(targets), widths).plan()

    def _phase(self, phase: dict[int, list[Fetch]], sources: list[CopyEndpoint], targets: list[CopyEndpoint]) -> None:
        mesh: ActorMesh = self._target.mesh
        answers: list[Future[Any]] = []
        for index, fetches in phase.items():
            orders = [(each, *_place(each, sources, targets)) for each in fetches]
            answers.append(endpoint_of(member_at(mesh, index), fetch).call_one(self._here, orders, self._seconds))
        failures: list[BaseException] = []
        for answer in answers:
            # Wait for each answer, so that nobody fetches after this ends.
            error = answer.exception(self._seconds + 5.0)
            self._done += 1
            self._advance(False)
            if error is not None:
                failures.append(error)
        if failures:
            raise failures[0]

    def _advance(self, ended: bool) -> None:
        if self._total:
            progress(self._target.mesh, "copy_state", self._done, self._total, "actors", ended)

    def _end(self) -> None:
        if isinstance(self._source, Mapping):
            end(self._there)
        for mesh, token, answer in self._sharing:
            # After the exports, however long they take; those after a death, which ends this wait, end themselves.
            with contextlib.suppress(CallTimeoutError):
                answer.exception(self._seconds)
            when_done(answer, partial(_tell_end, mesh, token))


def _tell_end(mesh: ActorMesh, token: str, _: object) -> None:
    # A stop or death meanwhile has ended it too.
    with contextlib.suppress(MonarchError):
        ask(mesh, end, token)


def _holders(sides: list[CopyEndpoint]) -> list[BoxHolder]:
    return [BoxHolder(side.host, {name: shared.box for name, shared in side.tensors.items()}) for side in sides]


def _place(fetch: Fetch, sources: list[CopyEndpoint], targets: list[CopyEndpoint]) -> tuple[Any, Any]:
    shared: Shared = (sources if fetch.kind == SOURCE else targets)[fetch.holder].tensors[fetch.name]
    return shared.remote, shared.box


def _count(plan: FetchPlan, sources: list[CopyEndpoint], targets: list[CopyEndpoint]) -> tuple[int, dict[str, int]]:
    written = 0
    received: dict[str, int] = {}
    for phase in plan.phases:
        for index, fetches in phase.items():
            host = targets[index].host
            for each in fetches:
                size = elements(each.box) * targets[index].tensors[each.name].width
                written += size
                if (sources if each.kind == SOURCE else targets)[each.holder].host != host:
                    received[host] = received.get(host, 0) + size
    return written, received
