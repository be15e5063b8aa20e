"""One op on a rank: it runs, fails, or must run again since its collective was cut."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from monarch._core.shapes.region import Region
from monarch._engine.issuing.encoding import filler
from monarch._engine.issuing.failures import failure_of
from monarch._engine.rank.devices.meshes import is_unregistered
from monarch._engine.rank.devices.on_device import on_device
from monarch._engine.rank.executing.spreading import SpreadsFailures
from monarch._engine.rank.executing.state import CachedTemplate
from monarch._engine.rank.functions.calling import title_of
from monarch._engine.rank.operations.checkpoints import LOAD
from monarch._engine.rank.operations.moving import SourceFailedError
from monarch._engine.rank.programs.program import ReplayError
from monarch._engine.rank.programs.replaying import REPLAY, run_op
from monarch._engine.rank.recovery.progress import BehindMode, CompletedElsewhereError, stop_all
from monarch._groups.failures import broke
from monarch.exceptions import GroupError


class RunsOps(SpreadsFailures):
    """A rank that runs ops."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: dict[int, frozenset[int]] = {}
        """Ranks that have not completed an op, by id of its entry, for ops that others have completed."""

    def run_one(self, region: Region, entry: Any) -> bool:
        """Run an op; return False if its collective was cut, so that it must run again."""
        number, inputs, values, outputs, _ = entry
        known = self.templates[region, number]
        failed = self.failed
        if failed and (failure := self.failure_before(region, entry)) is not None:
            # As on all other ranks, which have run the same ops since they agreed on what had failed.
            self.fail_op(region, entry, failure, True)
            return True
        if known.template.kind == REPLAY and not self.meshes.works():
            # A recorded step that has changed tensors before its first collective could not run again.
            stop_all(self.meshes.generation, region)
            return False
        held = self.values
        pending = self.behind.get(id(entry))
        try:
            if known.template.kind == LOAD:
                for each in outputs:
                    failed.pop(each, None)
                tensors = [held.get(each) for each in outputs]
            else:
                tensors = [held[each] for each in inputs]
            with BehindMode(pending) if pending is not None else nullcontext():
                result = self._result(region, number, tensors, values)
        except (Exception, KeyboardInterrupt) as error:
            # A Stop interrupts functions of the user only. A variable with the error would keep its frames.
            return self._broken_off(region, entry, known, error)
        if len(outputs) == 1:
            if outputs[0]:
                held[outputs[0]] = result[0] if isinstance(result, list | tuple) else result
        else:
            for each, value in zip(outputs, result if outputs else (), strict=True):
                if each:
                    held[each] = value
        return True

    def _broken_off(self, region: Region, entry: Any, known: CachedTemplate, error: BaseException) -> bool:
        """Halt after an error in an op; return False if its collective was cut, so that it must run again."""
        cause = error.cause if isinstance(error, ReplayError) else error
        is_cut = isinstance(cause, GroupError) or broke(cause) or is_unregistered(cause)
        if is_cut and not isinstance(cause, CompletedElsewhereError):
            stop_all(self.meshes.generation, region)
            return False
        name, line = (error.op, error.line) if isinstance(error, ReplayError) else (title_of(known.template), entry[4])
        there = cause.failure if isinstance(cause, SourceFailedError) else None
        self.fail_op(region, entry, there or failure_of(cause, name, line, self.rank))
        self.halted = True
        stop_all(self.meshes.generation, region)
        return True

    def _result(self, region: Region, number: int, tensors: list[Any], values: Any) -> Any:
        mesh, known = self.meshes.of(region), self.templates[region, number]
        if known.kind != mesh.device_type:
            template = on_device(known.template, mesh.device_type)
            known = self.templates[region, number] = CachedTemplate(
                template, filler(template), known.op, mesh.device_type
            )
        return run_op(mesh, known.template, known.fill, known.op, tensors, values)
