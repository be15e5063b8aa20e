"""The entries of a rank in order: ops, values from the program and functions. A halted rank keeps them for later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch._core.shapes.region import Region
from monarch._engine.issuing.encoding import CALL, NEW, filler, find_op
from monarch._engine.issuing.failures import failure_of
from monarch._engine.rank.executing.ops import RunsOps
from monarch._engine.rank.executing.quiet import quiet
from monarch._engine.rank.executing.state import CachedTemplate
from monarch._engine.rank.functions.calling import name_of, with_shards
from monarch._engine.rank.functions.shield import of_user, shield
from monarch._engine.rank.operations.table import OPERATIONS
from monarch._engine.rank.recovery.progress import progress, stop_all, tell_there
from monarch._groups.breaking import give_up_everywhere
from monarch._groups.failures import broke
from monarch._groups.rendezvous import local_rendezvous
from monarch.exceptions import GroupError


class RunsEntries(RunsOps):
    """A rank that runs entries, or keeps them."""

    def run_entries(self, entries: Iterable[tuple[Region, Any]]) -> None:
        """Run entries up to the first that must wait, and keep the rest."""
        if self.halted:
            for region, entry in entries:
                self._keep(region, entry)
            self.free_others()
            return
        rest = iter(entries)
        with shield(), quiet():
            for region, entry in rest:
                if isinstance(entry, int):
                    self.values.pop(entry, None)
                    self.failed.pop(entry, None)
                elif entry[0] == NEW:
                    self._learn(region, entry)
                elif self._runs(region, entry):
                    if self.halted:
                        break
                else:
                    self.halted = True
                    self.kept.append((region, entry))
                    break
        for region, entry in rest:
            self._keep(region, entry)

    def _runs(self, region: Region, entry: Any) -> bool:
        """Keep a value or run an op; return False if it must run again, or later."""
        if entry[0] == "put":
            return self.put(region, *entry[1:])
        if progress.is_over():
            return False
        if entry[0] == CALL:
            return self._call(region, entry)
        if not self.run_one(region, entry):
            return False
        progress.count(region)
        # It may wait next for a rank on which an op has failed.
        tell_there()
        return True

    def put(self, region: Region, number: int, value: torch.Tensor, *layout: Any) -> bool:
        """Keep a value; return False if the groups of its mesh were cut while they were made."""
        try:
            mesh = self.meshes.of(region)
            # A copy, since the memory of the message is shared with other ranks until it is written to.
            shard = value.to(mesh.device_type, copy=True)
            if not layout:
                self.values[number] = shard
                return True
            shape, stride, placements = layout
            self.values[number] = DTensor.from_local(
                shard, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
            )
        except Exception as error:
            stop_all(self.meshes.generation, region)
            if isinstance(error, GroupError) or broke(error):
                return False
            self.fail(number, failure_of(error, "distribute", 0, self.rank))
            self.halted = True
        return True

    def _call(self, region: Region, entry: Any) -> bool:
        """Call a function that has waited; return False if it must run again."""
        _, number, function, args, kwargs, line = entry
        if number in self.failed:
            return True
        try:
            with of_user():
                self.values[number] = with_shards(self, function, args, kwargs)
        except (Exception, KeyboardInterrupt) as error:
            is_cut = self.was_cut(error)
            if not is_cut:
                self.fail(number, failure_of(error, f"the function {name_of(function)}", line, self.rank))
                self.values[number] = error
                self.halted = True
            # Others may wait for this rank in the function.
            stop_all(self.meshes.generation, region)
            return not is_cut
        return True

    def was_cut(self, error: BaseException) -> bool:
        """Return whether a function has failed since another rank has stopped, so that it must run again."""
        return (isinstance(error, GroupError) or broke(error)) and progress.is_over()

    def _keep(self, region: Region, entry: Any) -> None:
        if not isinstance(entry, int) and entry[0] == NEW:
            self._learn(region, entry)
        else:
            self.kept.append((region, entry))

    def _learn(self, region: Region, entry: Any) -> None:
        _, number, template = entry
        op = find_op(template.op) if template.op else OPERATIONS[template.kind]
        self.templates[region, number] = CachedTemplate(template, filler(template), op, "cpu")

    def free_others(self) -> None:
        """Free ranks that wait for this one, which is new, in a collective or for groups."""
        if self.is_new:
            give_up_everywhere(local_rendezvous().generation)
