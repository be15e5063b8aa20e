"""The rank's side: it holds the shards of tensors by reference, and runs ops in the order of the program.

Ranks must agree which ops run, since most contain collectives. So a rank that fails in an op stops there (it *halts*),
breaks the process groups so that no other rank waits for it, and keeps later ops for later. The program then asks all
ranks what has failed and tells all of them: see ``meshes/recovery.py``. An op whose collective was cut is run again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from monarch._actors.endpoint import endpoint
from monarch._core.shapes.region import Region
from monarch._engine.issuing.encoding import CALL, unpack
from monarch._engine.issuing.failures import failure_of
from monarch._engine.rank.devices.meshes import region_of_view
from monarch._engine.rank.executing.recovering import Recovers
from monarch._engine.rank.functions.calling import LOOKS, cancelled, with_shards
from monarch._engine.rank.operations.checkpoints import contents_of, values_of
from monarch._engine.rank.operations.rank_local import plain
from monarch._engine.rank.operations.table import made
from monarch._engine.rank.recovery.progress import progress
from monarch._engine.rank.recovery.restoring import called
from monarch._engine.rank.reports import TITLES, BatchReport
from monarch.exceptions import ArgumentError


class TensorExecutor(Recovers):
    """Holds this rank's shards of all distributed tensors of its mesh. Used by the thread of the actor only."""

    monarch_unstopped = frozenset(
        {"run", "put_shard", "put_rank", "halt", "spread", "resume", "account", "drop_ops", "give", "restore"}
    )
    """Calls that a Stop of the notebook leaves alone: all ranks must run the same ops. See stopping.py."""
    monarch_titles = TITLES
    """Names of its calls, for errors and for users who wait for them."""

    @endpoint
    def prepare(self) -> str:
        """Return the type of the device of this rank; makes the process groups. Called once, on all ranks together."""
        device = self.meshes.device()
        self.is_new = self.halted = False
        progress.begin(0, Counter())
        return device

    @endpoint
    def run(self, batch: bytes) -> BatchReport:
        """Run a batch; see issuing/encoding.py."""
        region = region_of_view()
        self.run_entries((region, entry) for entry in unpack(batch))
        return BatchReport(self.halted)

    @endpoint
    def look(self, number: int, what: str, *args: Any) -> BatchReport:
        """Return something of the shard that this rank has of a tensor: see LOOKS."""
        if self.halted:
            return BatchReport(True)
        failure = self.failed.get(number)
        if failure is not None:
            return BatchReport(False, None, failure)
        try:
            return BatchReport(False, LOOKS[what](self.values[number], *args))
        except Exception as error:
            return BatchReport(False, None, failure_of(error, what, 0, self.rank))

    @endpoint
    def fetch(self, numbers: list[int], rank: int) -> BatchReport:
        """Return the tensors that a rank has; the other ranks report whether they have failed."""
        if self.halted:
            return BatchReport(True)
        failure = self.failure_for(numbers)
        if failure is not None:
            return BatchReport(False, None, failure)
        if rank != self.rank:
            return BatchReport(False)
        return BatchReport(False, [plain(self.values[number]) for number in numbers])

    @endpoint
    def execute(self, function: Any, args: Any, kwargs: Any, number: int = 0, line: int = 0) -> BatchReport:
        """Call a function of the program with this rank's shards.

        A halted rank keeps it for later under its number, see ``executed``; one without a number is sent again.
        """
        # Ranks that have stopped at an op do not join it in a collective.
        self.halted = self.halted or progress.is_over()
        if not self.halted:
            try:
                return with_shards(self, function, args, kwargs)
            except Exception as error:
                if not number or not self.was_cut(error):
                    raise
                self.halted = True
        if number:
            self.kept.append((region_of_view(), (CALL, number, function, args, kwargs, line)))
            self.free_others()
        return BatchReport(True)

    @endpoint
    def executed(self, number: int) -> BatchReport:
        """Return what a function has returned that this rank has kept; raise what it has raised."""
        if number in called(self.kept):
            return BatchReport(True)
        found = self.values.pop(number, None)
        if isinstance(found, BaseException):
            raise found
        return found or BatchReport(False, None, self.failed.get(number) or cancelled(self.rank))

    @endpoint
    def make_shard(self, number: int, function: Any, args: Any) -> BatchReport:
        """Let a function of the program make this rank's shard of a tensor; return its shape and dtype."""
        self.halted = self.halted or progress.is_over()
        if self.halted:
            return BatchReport(True)
        value = function(*args)
        if not isinstance(value, torch.Tensor):
            if not hasattr(value, "__array__"):
                raise ArgumentError(f"from_local: expected a tensor from the function, got {type(value).__name__}")
            value = torch.as_tensor(value)
        made[number] = value.detach().to(self.meshes.device_type).contiguous()
        return BatchReport(False, (tuple(value.shape), value.dtype))

    @endpoint
    def put_shard(
        self, number: int, value: torch.Tensor, shape: Any, stride: Any, placements: Any, region: Region
    ) -> BatchReport:
        """Keep a value from the program as this rank's shard of a tensor."""
        return self._put_or_keep(region, ("put", number, value, shape, stride, placements))

    @endpoint
    def put_rank(self, number: int, value: torch.Tensor, region: Region) -> BatchReport:
        """Keep a value from the program as a tensor of this rank."""
        return self._put_or_keep(region, ("put", number, value))

    def _put_or_keep(self, region: Region, entry: Any) -> BatchReport:
        if self.halted:
            self.kept.append((region, entry))
            self.free_others()
        elif not self.put(region, *entry[1:]):
            self.kept.append((region, entry))
            self.halted = True
        return BatchReport(self.halted)

    @endpoint
    def ready(self, numbers: list[int]) -> BatchReport:
        """Return a failure of some tensors, once all earlier ops have run."""
        return BatchReport(self.halted, None, None if self.halted else self.failure_for(numbers))

    @endpoint
    def contents(self, path: str, version: str | int | None) -> BatchReport:
        """Return what a checkpoint has, or the text of the error."""
        try:
            return BatchReport(False, contents_of(path, version))
        except (ArgumentError, OSError) as error:
            return BatchReport(False, str(error))

    @endpoint
    def read_values(self, folder: str, keys: list[str]) -> BatchReport:
        """Return values of a checkpoint for the program."""
        return BatchReport(False, values_of(folder, keys))
