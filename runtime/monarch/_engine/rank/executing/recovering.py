"""The answers of a rank during a recovery: it halts, tells what has failed, and runs ops again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from monarch._actors.endpoint import endpoint
from monarch._core.shapes.region import Region
from monarch._engine.issuing.failures import OpFailure
from monarch._engine.rank.executing.entries import RunsEntries
from monarch._engine.rank.operations.moving import exports
from monarch._engine.rank.operations.rank_local import plain
from monarch._engine.rank.recovery.progress import give_up_here, places, progress, ranks_behind, tell_there
from monarch._engine.rank.recovery.renewing import AGAIN, attempts, give_up_attempt
from monarch._engine.rank.recovery.restoring import Account, Restored, account, called, fetched, is_op, wrapped
from monarch._engine.rank.reports import BatchReport, HaltReport
from monarch._groups.failures import broke
from monarch._node.current import current_node
from monarch.exceptions import GroupError


class Recovers(RunsEntries):
    """A rank that takes part in recoveries."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, int] = {}
        """How many ops waited from each one on at the last halt, by id of its entry."""
        self.restored: dict[int, tuple[Restored, torch.Tensor]] = {}
        """Shards that other ranks have given to this one, which is new."""

    @endpoint
    def halt(self) -> HaltReport:
        """Stop running ops, and return what has failed since the last halt, with all that depends on it."""
        self.halted = True
        waiting = {**dict.fromkeys(self.meshes.regions(), 0), **self._waiting()}
        self._places = places(self.kept)
        self.spread_failures()
        found, self.new_failures = self.new_failures, {}
        return HaltReport(found, self.is_new, self.rank, waiting)

    @endpoint
    def spread(self, failed: dict[int, OpFailure]) -> dict[int, OpFailure]:
        """Learn what has failed elsewhere, and return what else fails by it among the ops that wait here."""
        for number, failure in failed.items():
            self.fail(number, failure)
        self.spread_failures()
        found, self.new_failures = self.new_failures, {}
        return {number: failure for number, failure in found.items() if number not in failed}

    def _waiting(self) -> Counter[Region]:
        return Counter(region for region, entry in self.kept if is_op(entry))

    @endpoint
    def account(self) -> Account:
        """Return the state of this rank, which is halted, for the healing of others."""
        return account(self)

    @endpoint
    def drop_ops(self, lost_before: int, calls: set[int]) -> None:
        """Forget ops and functions that wait, since a rank has died before all have run them.

        Args:
            lost_before: a new reference: what these ops, or the dead rank, would have sent has an older one.
            calls: functions that new ranks have got too, which stay.
        """
        exports.lose_before(lost_before)
        config = current_node().config
        assert config is not None
        exports.unsend(config.procs.uid, lost_before)
        self.kept = [
            (region, entry) for region, entry in self.kept if not is_op(entry) and called([(region, entry)]) <= calls
        ]

    @endpoint
    def give(self, numbers: list[int]) -> list[torch.Tensor]:
        """Return shards for a new rank."""
        return [plain(self.values[number]) for number in numbers]

    @endpoint
    def restore(self, sources: Any) -> None:
        """Get in this rank, which is new, what others have; ``resume`` completes it.

        Args:
            sources: ranks that have tensors, and which.
        """
        self.restored = fetched(sources)

    @endpoint
    def resume(
        self,
        failed: dict[int, OpFailure],
        renew: bool,
        regions: list[Region] | None,
        attempt: int,
        lost: frozenset[str] = frozenset(),
        waiting: dict[Region, dict[int, int]] | None = None,
    ) -> BatchReport:
        """Run ops again.

        Args:
            failed: what has failed on any rank.
            renew: whether to make new process groups.
            regions: meshes and slices that need them, if new ranks do not know them yet.
            attempt: number of the attempt to make them; later ones have higher numbers.
            lost: meshes with dead ranks, whose tensors do not come.
            waiting: how many ops wait on each rank, by mesh or slice.
        """
        self.behind = ranks_behind(self.kept, self._places, waiting or {})
        if renew:
            give_up_here(self.meshes.generation)
        exports.lost_sources = lost
        exports.lose_member(False)
        exports.drop(list(failed))
        for number, failure in failed.items():
            self.fail(number, failure)
        self.spread_failures()
        self.new_failures.clear()
        if renew and not self._renewed(regions, attempt):
            progress.abandon(attempt)
            tell_there()
            return BatchReport(True, AGAIN)
        for number, (restored, shard) in self.restored.items():
            self.values[number] = wrapped(restored, shard, self.meshes.of(restored.region))
        self.restored = {}
        # First it runs ops again, then the epoch begins, so that it does not tell that it has stopped in this one.
        self.is_new = self.halted = False
        progress.begin(attempt, self._waiting())
        kept, self.kept = self.kept, []
        # An op may have failed elsewhere in these groups already; without further ones, this rank would not tell.
        tell_there()
        self.run_entries(iter(kept))
        self.behind = {}
        return BatchReport(self.halted)

    def _renewed(self, regions: list[Region] | None, attempt: int) -> bool:
        """Make new process groups; return False if they broke meanwhile, so that all ranks must do it again."""
        attempts.running = attempt
        try:
            attempts.check()
            self.meshes.renew(self.values, regions)
            attempts.made = attempt, self.meshes.generation
        except Exception as error:
            if not (isinstance(error, GroupError) or broke(error)):
                raise
            # Others may have made theirs, or wait for this rank.
            give_up_attempt(attempt, f"rank {self.rank} could not create its process groups: {error}")
            return False
        finally:
            attempts.running = 0
        return True
