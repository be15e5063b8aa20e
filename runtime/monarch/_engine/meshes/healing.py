"""After dead ranks were replaced: new ranks get the tensors that others hold too; the others are named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch.distributed.tensor import Replicate

from monarch._core.shapes.ranks import describe_ranks
from monarch._core.shapes.region import Region
from monarch._engine.issuing.encoding import Template
from monarch._engine.issuing.failures import LOST, OpFailure, Unreported
from monarch._engine.issuing.stream import new_number
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.rank.operations.moving import UNSEND
from monarch._engine.rank.recovery.renewing import AGAIN
from monarch._engine.rank.recovery.restoring import Account, Restored, called, is_op, is_put
from monarch._meshes.inside import view_at

_ROUNDS = 5
"""How often new process groups are made if they break while they are made."""
_WAIT_S = 600.0
"""Seconds to wait for the ranks, which send each other tensors."""


def heal_tensors(
    meshes: Sequence[TensorMesh], whole: Any, shape: Region, replaced: Sequence[int], found: dict[int, OpFailure]
) -> bool:
    """Let the ranks of some meshes continue after some of them were replaced.

    Args:
        meshes: all that hold tensors on these processes.
        whole: the executors of the whole mesh of processes.
        shape: the shape of the whole mesh.
        replaced: base ranks of the new processes.
        found: what is known to have failed.

    Returns:
        Whether all ranks continue.
    """
    with ExitStack() as stack:
        for mesh in meshes:
            stack.enter_context(mesh.stream.held(_WAIT_S))
        return _Healing(meshes, whole, shape, replaced, found).run()


class _Healing:
    def __init__(
        self,
        meshes: Sequence[TensorMesh],
        whole: Any,
        shape: Region,
        replaced: Sequence[int],
        found: dict[int, OpFailure],
    ) -> None:
        self._meshes = {mesh.region: mesh for mesh in meshes}
        self._whole = whole
        self._shape = shape
        self._new = set(replaced)
        self._accounts: dict[int, Account] = {}
        self._failures = dict(found)
        self._lost: set[int] = set()
        """References of tensors with shards that were only on dead ranks."""
        self._cancelled: dict[tuple[str, int], tuple[set[int], set[int]]] = {}
        """By title and line of a cancelled op: references of its results, and of tensors that it would have changed."""

    def run(self) -> bool:
        """Let all ranks continue; return False if an op has failed meanwhile, or if groups break again and again."""
        reports = self._round()
        for _ in range(_ROUNDS - 1):
            # No op is issued meanwhile, so that none is taken for one from before the death.
            if not any(report.value == AGAIN for report in reports):
                break
            reports = self._round()
        halted = any(report.halted for report in reports)
        if halted:
            next(iter(self._meshes.values())).recovery.is_due = True
        self._report()
        return not halted

    def _report(self) -> None:
        """Keep for the end of the cell what has been lost."""
        first = next(iter(self._meshes.values()))
        live = {number for mesh in self._meshes.values() for number, _ in mesh.stream.tensors()}
        ranks = tuple(sorted(self._new))
        who, name = describe_ranks(list(ranks)), first.procs.name
        lost = tuple(sorted(self._lost & live))
        if lost:
            text = f"{who} of {name} died with tensor shards that no other rank had"
            first.recovery.unreported.append(Unreported(name, OpFailure("", 0, ranks, LOST, text, ""), lost))
        for (op, line), (results, changed) in self._cancelled.items():
            numbers = tuple(sorted(results & live))
            kept = tuple(sorted(changed & live - set(self._failures)))
            if numbers or kept:
                text = f"{op} was cancelled: {who} of {name} died before all ranks had run it"
                first.recovery.unreported.append(
                    Unreported(name, OpFailure(op, line, ranks, LOST, text, ""), numbers, kept)
                )

    def _round(self) -> list[Any]:
        recovery = next(iter(self._meshes.values())).recovery
        for mesh in self._meshes.values():
            mesh.stream.forget_ranks()
        failures, new = recovery.agree()
        for number, failure in failures.items():
            self._failures.setdefault(number, failure)
        self._new.update(self._shape.base_rank(position) for position in new)
        found = self._whole.account.call().get(_WAIT_S).values()
        self._accounts = dict(zip(self._shape.base_ranks(), found, strict=True))
        # New ranks learn why tensors had no value before the death.
        for each in self._accounts.values():
            for number, failure in each.failed.items():
                self._failures.setdefault(number, failure)
        self._cancel_ops()
        cancelled = new_number()
        self._whole.drop_ops.call(cancelled, self._new_calls()).get(_WAIT_S)
        self._unsend(cancelled)
        waiting = [self._view(rank).restore.call(self._restored(rank)) for rank in sorted(self._new)]
        for future in waiting:
            future.get(_WAIT_S)
        recovery.stream.order.epoch += 1
        resumed = self._whole.resume.call(self._failures, True, list(self._meshes), new_number())
        return list(resumed.get(_WAIT_S).values())

    def _new_calls(self) -> set[int]:
        """Return the functions that new ranks have got, or for which they were not asked: these run once on all."""
        kept = [pair for account in self._accounts.values() for pair in account.kept]
        return {
            number
            for region, entry in kept
            for number in called([(region, entry)])
            if all(
                number in called(self._accounts[rank].kept)
                for rank in self._new
                if region.position_of(rank) is not None
            )
        }

    def _unsend(self, before: int) -> None:
        """Let other meshes forget what they have sent to this one, which has cancelled the ops that would read it."""
        uid = next(iter(self._meshes.values())).recovery.uid
        linked = {each for mesh in self._meshes.values() for each in list(mesh.recovery.linked) if each.uid != uid}
        for each in linked:
            # With the next ops there, since their threads may hold the lock of their stream.
            number = each.stream.template(Template(UNSEND, (), (), {}))
            each.stream.pending.append((number, (), (uid, before), (), 0))

    def _view(self, rank: int) -> Any:
        point = self._shape.extent.point(self._shape.position_of(rank) or 0)
        return view_at(self._whole, self._shape.slice(**{axis: point[axis] for axis in self._shape.extent.labels}))

    def _living(self, mesh: TensorMesh) -> list[int]:
        return [rank for rank in mesh.ranks if rank not in self._new]

    def _cancel_ops(self) -> None:
        """Cancel the ops that wait, so that the state is that after the last op that all ranks have run.

        An op that only some ranks have run has changed tensors on these, which have no value then.
        """
        for region, mesh in self._meshes.items():
            waiting = [
                [entry for each, entry in self._accounts[rank].kept if each == region and is_op(entry)]
                for rank in self._living(mesh)
            ]
            least = min(map(len, waiting), default=0)
            longest = max(waiting, key=len) if waiting else []
            some = len(longest) - least
            for entry in longest[:some]:
                self._fail_op(mesh, entry, True)
            for entry in (*longest[some:], *mesh.stream.take_ops()):
                self._fail_op(mesh, entry, False)

    def _fail_op(self, mesh: TensorMesh, entry: Any, ran_somewhere: bool) -> None:
        number, inputs, _, outputs, line = entry
        template = mesh.stream.templates.get(number)
        # A recorded step that the program has dropped may have changed any of its inputs.
        written = inputs if template is None else [inputs[at] for at in template.writes]
        changed = written if ran_somewhere else []
        title = "::".join(template.op[:2]) or template.kind if template is not None else "a recorded step"
        results, kept = self._cancelled.setdefault((title, line), (set(), set()))
        results.update((*outputs, *changed))
        kept.update(written)
        ranks = tuple(sorted(self._new))
        text = (
            f"the value is missing: {describe_ranks(list(ranks))} of {mesh.procs.name} died before the op that writes "
            f"it had run on all ranks; compute it again, or load it from a checkpoint"
        )
        for each in (*outputs, *changed):
            if each:
                self._failures.setdefault(each, OpFailure("", line, ranks, LOST, text, ""))

    def _restored(self, rank: int) -> list[Any]:
        """Return what a new rank needs: tensors by the rank that gives them."""
        sources: dict[int, list[Restored]] = {}
        meshes = [mesh for mesh in self._meshes.values() if rank in mesh.ranks]
        # Shards from the program that have waited for this.
        arrived = {entry[1] for _, entry in self._accounts[rank].kept if is_put(entry)}
        for mesh in meshes:
            live: list[tuple[int, Any]] = mesh.stream.tensors()
            for number, layout in live:
                if number in self._failures or number in arrived:
                    continue
                giver = next((each for each in self._replicas(mesh, layout, rank) if self._holds(each, number)), None)
                if giver is None:
                    self._lose(mesh, number, layout)
                    continue
                restored = Restored(number, mesh.region, tuple(layout.shape), layout.stride, layout.placements)
                sources.setdefault(giver, []).append(restored)
        return [(self._view(each), wanted) for each, wanted in sources.items()]

    def _holds(self, rank: int, number: int) -> bool:
        return number in self._accounts[rank].held

    def _replicas(self, mesh: TensorMesh, layout: Any, rank: int) -> list[int]:
        """Return living ranks with the same shard of a tensor."""
        if layout.is_local:
            return []
        sharded = [at for at, each in enumerate(layout.placements) if not isinstance(each, Replicate)]
        own = mesh.coordinates(rank)
        return [other for other in self._living(mesh) if all(mesh.coordinates(other)[at] == own[at] for at in sharded)]

    def _lose(self, mesh: TensorMesh, number: int, layout: Any) -> None:
        self._lost.add(number)
        ranks = tuple(sorted(self._new & set(mesh.ranks)))
        text = (
            f"the value is missing: a shard of this tensor of shape {tuple(layout.shape)} was only on "
            f"{describe_ranks(list(ranks))} of {mesh.procs.name}, which died; compute it again, or load it from a "
            f"checkpoint"
        )
        self._failures[number] = OpFailure("", 0, ranks, LOST, text, "")
