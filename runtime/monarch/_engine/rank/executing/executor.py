"""The rank's side: it holds the parts of tensors by reference, and runs ops in the order of the program.

Ranks must agree which ops run, since most contain collectives. So a rank that fails in an op stops there (it *halts*),
breaks the process groups so that no other rank waits for it, and keeps later ops for later. The program then asks all
ranks what has failed and tells all of them: see ``recovery.py``. An op whose collective was cut is run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import memory_id, returns_view
from monarch._engine.encoding import CALL, NEW, Entry, Fill, Template, filler, find_op, unpack
from monarch._engine.failures import OpFailure, failure_of
from monarch._engine.ops.attention import register_attention
from monarch._engine.rank.devices.meshes import RankMeshes, is_unregistered, region_of_view
from monarch._engine.rank.devices.on_device import on_device
from monarch._engine.rank.executing.quiet import hide_advice, quiet
from monarch._engine.rank.functions.calling import LOOKS, cancelled, name_of, title_of, with_parts
from monarch._engine.rank.functions.shield import of_user, shield
from monarch._engine.rank.operations.checkpoints import LOAD, contents_of, values_of
from monarch._engine.rank.operations.lending import lent
from monarch._engine.rank.operations.moving import SEND, SourceFailedError, exports, on_death, takers_of
from monarch._engine.rank.operations.rank_local import plain
from monarch._engine.rank.operations.table import OPERATIONS, made
from monarch._engine.rank.programs.program import ReplayError
from monarch._engine.rank.programs.replaying import REPLAY, run_op
from monarch._engine.rank.recovery.progress import (
    BehindMode,
    CompletedElsewhereError,
    give_up_here,
    places,
    progress,
    ranks_behind,
    stop_all,
    tell_there,
)
from monarch._engine.rank.recovery.renewing import AGAIN, attempts, give_up_attempt
from monarch._engine.rank.recovery.restoring import Account, Restored, account, called, fetched, is_op, wrapped
from monarch._engine.rank.reports import TITLES, Halt, Report
from monarch._groups.breaking import give_up_everywhere
from monarch._groups.failures import broke
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node
from monarch.exceptions import ArgumentError, GroupError


class _Known(NamedTuple):
    """A template, ready to run."""

    template: Template
    fill: Fill
    op: Any
    kind: str
    """Type of the device on which its op makes tensors."""


class Executor(Actor):
    """Holds this rank's parts of all tensors of its mesh. Used by the thread of the actor only."""

    monarch_unstopped = frozenset(
        {"run", "put_part", "put_rank", "halt", "spread", "resume", "account", "drop_ops", "give", "restore"}
    )
    """Calls that a Stop of the notebook leaves alone: all ranks must run the same ops. See stopping.py."""
    monarch_titles = TITLES
    """Names of its calls, for errors and for users who wait for them."""

    def monarch_of_program(self) -> int:
        """Return how many tensors only the program can name; from any thread. See reattach.py."""
        return len(self.values)

    def __init__(self) -> None:
        register_attention()
        hide_advice()
        self.rank = current_node().rank
        self.values: dict[int, Any] = {}
        """DTensors and plain tensors by reference. Any thread may read how many there are."""
        self.failed: dict[int, OpFailure] = {}
        """Failures by reference of the tensor that has no value."""
        self.new_failures: dict[int, OpFailure] = {}
        """Those since the last recovery."""
        self.templates: dict[tuple[Region, int], _Known] = {}
        exports.failed = lent.failed = self.failed
        self.meshes = RankMeshes()
        self.is_new = True
        """Whether it has begun after the others, in the place of one that has ended, and lacks their tensors."""
        self._halted = True
        self._places: dict[int, int] = {}
        """How many ops waited from each one on at the last halt, by id of its entry."""
        self._behind: dict[int, frozenset[int]] = {}
        """Ranks that have not completed an op, by id of its entry, for ops that others have completed."""
        self._views: dict[int, int] = {}
        """While failures spread: views that kept ops will make, and of what."""
        self.kept: list[tuple[Region, Entry]] = []
        """Entries that wait for the end of the halt."""
        self.restored: dict[int, tuple[Restored, torch.Tensor]] = {}
        """Parts that other ranks have given to this one, which is new."""
        current_node().events.died.subscribe(on_death)

    @property
    def halted(self) -> bool:
        """Whether ops wait until the program has told what has failed."""
        return self._halted

    @halted.setter
    def halted(self, halted: bool) -> None:
        if halted != self._halted:
            self._halted = progress.halted = halted
            if halted:
                tell_there()
            exports.halt(halted)
            lent.halt(halted)

    @endpoint
    def prepare(self) -> str:
        """Return the type of the device of this rank; makes the process groups. Called once, on all ranks together."""
        device = self.meshes.device()
        self.is_new = self.halted = False
        progress.begin(0, Counter())
        return device

    @endpoint
    def run(self, batch: bytes) -> Report:
        """Run a batch; see encoding.py."""
        region = region_of_view()
        self._run((region, entry) for entry in unpack(batch))
        return Report(self.halted)

    @endpoint
    def look(self, number: int, what: str, *args: Any) -> Report:
        """Return something of the part that this rank has of a tensor: see LOOKS."""
        if self.halted:
            return Report(True)
        failure = self.failed.get(number)
        if failure is not None:
            return Report(False, None, failure)
        try:
            return Report(False, LOOKS[what](self.values[number], *args))
        except Exception as error:
            return Report(False, None, failure_of(error, what, 0, self.rank))

    @endpoint
    def fetch(self, numbers: list[int], rank: int) -> Report:
        """Return the tensors that a rank has; the other ranks report whether they have failed."""
        if self.halted:
            return Report(True)
        failure = self._failure_for(numbers)
        if failure is not None:
            return Report(False, None, failure)
        if rank != self.rank:
            return Report(False)
        return Report(False, [plain(self.values[number]) for number in numbers])

    @endpoint
    def execute(self, function: Any, args: Any, kwargs: Any, number: int = 0, line: int = 0) -> Report:
        """Call a function of the program with this rank's parts.

        A halted rank keeps it for later under its number, see ``executed``; one without a number is sent again.
        """
        # Ranks that have stopped at an op do not join it in a collective.
        self.halted = self.halted or progress.is_over()
        if not self.halted:
            try:
                return with_parts(self, function, args, kwargs)
            except Exception as error:
                if not number or not self._was_cut(error):
                    raise
                self.halted = True
        if number:
            self.kept.append((region_of_view(), (CALL, number, function, args, kwargs, line)))
            self._free_others()
        return Report(True)

    @endpoint
    def executed(self, number: int) -> Report:
        """Return what a function has returned that this rank has kept; raise what it has raised."""
        if number in called(self.kept):
            return Report(True)
        found = self.values.pop(number, None)
        if isinstance(found, BaseException):
            raise found
        return found or Report(False, None, self.failed.get(number) or cancelled(self.rank))

    def _was_cut(self, error: BaseException) -> bool:
        """Return whether a function has failed since another rank has stopped, so that it must run again."""
        return (isinstance(error, GroupError) or broke(error)) and progress.is_over()

    def _call(self, region: Region, entry: Any) -> bool:
        """Call a function that has waited; return False if it must run again."""
        _, number, function, args, kwargs, line = entry
        if number in self.failed:
            return True
        try:
            with of_user():
                self.values[number] = with_parts(self, function, args, kwargs)
        except (Exception, KeyboardInterrupt) as error:
            is_cut = self._was_cut(error)
            if not is_cut:
                self._fail(number, failure_of(error, f"the function {name_of(function)}", line, self.rank))
                self.values[number] = error
                self.halted = True
            # Others may wait for this rank in the function.
            stop_all(self.meshes.generation, region)
            return not is_cut
        return True

    @endpoint
    def make_part(self, number: int, function: Any, args: Any) -> Report:
        """Let a function of the program make this rank's part of a tensor; return its shape and dtype."""
        self.halted = self.halted or progress.is_over()
        if self.halted:
            return Report(True)
        value = function(*args)
        if not isinstance(value, torch.Tensor):
            if not hasattr(value, "__array__"):
                raise ArgumentError(f"from_local: expected a tensor from the function, got {type(value).__name__}")
            value = torch.as_tensor(value)
        made[number] = value.detach().to(self.meshes.device_type).contiguous()
        return Report(False, (tuple(value.shape), value.dtype))

    @endpoint
    def put_part(
        self, number: int, value: torch.Tensor, shape: Any, stride: Any, placements: Any, region: Region
    ) -> Report:
        """Keep a value from the program as this rank's part of a tensor."""
        return self._put_or_keep(region, ("put", number, value, shape, stride, placements))

    @endpoint
    def put_rank(self, number: int, value: torch.Tensor, region: Region) -> Report:
        """Keep a value from the program as a tensor of this rank."""
        return self._put_or_keep(region, ("put", number, value))

    def _put_or_keep(self, region: Region, entry: Any) -> Report:
        if self.halted:
            self.kept.append((region, entry))
            self._free_others()
        elif not self._put(region, *entry[1:]):
            self.kept.append((region, entry))
            self.halted = True
        return Report(self.halted)

    def _put(self, region: Region, number: int, value: torch.Tensor, *layout: Any) -> bool:
        """Keep a value; return False if the groups of its mesh were cut while they were made."""
        try:
            mesh = self.meshes.of(region)
            # A copy, since the memory of the message is shared with other ranks until it is written to.
            part = value.to(mesh.device_type, copy=True)
            if not layout:
                self.values[number] = part
                return True
            shape, stride, placements = layout
            self.values[number] = DTensor.from_local(
                part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
            )
        except Exception as error:
            stop_all(self.meshes.generation, region)
            if isinstance(error, GroupError) or broke(error):
                return False
            self._fail(number, failure_of(error, "distribute", 0, self.rank))
            self.halted = True
        return True

    @endpoint
    def ready(self, numbers: list[int]) -> Report:
        """Return a failure of some tensors, once all earlier ops have run."""
        return Report(self.halted, None, None if self.halted else self._failure_for(numbers))

    @endpoint
    def contents(self, path: str, version: str | int | None) -> Report:
        """Return what a checkpoint has, or the text of the error."""
        try:
            return Report(False, contents_of(path, version))
        except (ArgumentError, OSError) as error:
            return Report(False, str(error))

    @endpoint
    def read_values(self, folder: str, keys: list[str]) -> Report:
        """Return values of a checkpoint for the program."""
        return Report(False, values_of(folder, keys))

    @endpoint
    def halt(self) -> Halt:
        """Stop running ops, and return what has failed since the last halt, with all that depends on it."""
        self.halted = True
        waiting = {**dict.fromkeys(self.meshes.regions(), 0), **self._waiting()}
        self._places = places(self.kept)
        self._spread()
        found, self.new_failures = self.new_failures, {}
        return Halt(found, self.is_new, self.rank, waiting)

    @endpoint
    def spread(self, failed: dict[int, OpFailure]) -> dict[int, OpFailure]:
        """Learn what has failed elsewhere, and return what else fails by it among the ops that wait here."""
        for number, failure in failed.items():
            self._fail(number, failure)
        self._spread()
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
        exports.lost_before = lost_before
        config = current_node().config
        assert config is not None
        exports.unsend(config.procs.uid, lost_before)
        self.kept = [
            (region, entry) for region, entry in self.kept if not is_op(entry) and called([(region, entry)]) <= calls
        ]

    @endpoint
    def give(self, numbers: list[int]) -> list[torch.Tensor]:
        """Return parts for a new rank."""
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
    ) -> Report:
        """Run ops again.

        Args:
            failed: what has failed on any rank.
            renew: whether to make new process groups.
            regions: meshes and slices that need them, if new ranks do not know them yet.
            attempt: number of the attempt to make them; later ones have higher numbers.
            lost: meshes with dead ranks, whose tensors do not come.
            waiting: how many ops wait on each rank, by mesh or slice.
        """
        self._behind = ranks_behind(self.kept, self._places, waiting or {})
        if renew:
            give_up_here(self.meshes.generation)
        exports.lost_sources = lost
        exports.lose_member(False)
        exports.drop(list(failed))
        for number, failure in failed.items():
            self._fail(number, failure)
        self._spread()
        self.new_failures.clear()
        if renew and not self._renewed(regions, attempt):
            progress.abandon(attempt)
            tell_there()
            return Report(True, AGAIN)
        for number, (restored, part) in self.restored.items():
            self.values[number] = wrapped(restored, part, self.meshes.of(restored.region))
        self.restored = {}
        # First it runs ops again, then the epoch begins, so that it does not tell that it has stopped in this one.
        self.is_new = self.halted = False
        progress.begin(attempt, self._waiting())
        kept, self.kept = self.kept, []
        # An op may have failed elsewhere in these groups already; without further ones, this rank would not tell.
        tell_there()
        self._run(iter(kept))
        self._behind = {}
        return Report(self.halted)

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

    def _fail(self, number: int, failure: OpFailure, is_known: bool = False) -> None:
        """Note that a tensor has no value.

        Args:
            number: its reference.
            failure: why.
            is_known: whether all ranks find that by themselves.
        """
        if number and number not in self.failed:
            self.failed[number] = failure
            if not is_known:
                self.new_failures[number] = failure
            exports.fail(number, failure)
            self.values.pop(number, None)

    def _spread(self) -> None:
        """Fail what kept ops would make or change from failed tensors, and keep the others."""
        left: list[tuple[Region, Entry]] = []
        self._views = {}
        for region, entry in self.kept:
            if isinstance(entry, int) or entry[0] in (NEW, "put", CALL):
                left.append((region, entry))
                continue
            failure = self._failure_before(region, entry)
            if failure is None:
                left.append((region, entry))
                known = self.templates[region, entry[0]]
                if entry[1] and (known.template.kind == "same" or returns_view(known.op)):
                    self._views.update({each: entry[1][0] for each in entry[3] if each})
            else:
                self._fail_op(region, entry, failure)
        self.kept, self._views = left, {}

    def _failure_for(self, numbers: Iterable[int]) -> OpFailure | None:
        if not self.failed:
            return None
        return next((self.failed[number] for number in numbers if number in self.failed), None)

    def _failure_before(self, region: Region, entry: Any) -> OpFailure | None:
        """Return why an op cannot run: a tensor that it needs has failed."""
        number, inputs, _, outputs, _ = entry
        if not self.failed:
            return None
        known = self.templates.get((region, number))
        if known is not None and known.template.kind == LOAD:
            return None
        return self._failure_for(inputs) or self._failure_for(outputs)

    def _fail_op(self, region: Region, entry: Any, failure: OpFailure, is_known: bool = False) -> None:
        number, inputs, _, outputs, _ = entry
        known = self.templates.get((region, number))
        if known is not None and known.template.kind == SEND:
            # The program may drop it before others ask for it.
            exports.refuse(outputs[0], failure, takers_of(known.template))
        for each in outputs:
            self._fail(each, failure, is_known)
        for index in known.template.writes if known is not None else range(len(inputs)):
            for each in self._sharing(inputs[index]):
                self._fail(each, failure, is_known)

    def _sharing(self, number: int) -> list[int]:
        """Return the references of plain tensors that share memory with one, and its own."""
        root = self._base_of(number)
        value = self.values.get(root)
        if value is None or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
            return [number]
        memory = memory_id(value)
        found = {
            at
            for at, each in self.values.items()
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor) and memory_id(each) == memory
        }
        return [number, *found, *(each for each in self._views if self._base_of(each) in found)]

    def _base_of(self, number: int) -> int:
        while number in self._views:
            number = self._views[number]
        return number

    def _run(self, entries: Iterable[tuple[Region, Any]]) -> None:
        if self.halted:
            for region, entry in entries:
                self._keep(region, entry)
            self._free_others()
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
            return self._put(region, *entry[1:])
        if progress.is_over():
            return False
        if entry[0] == CALL:
            return self._call(region, entry)
        if not self._op(region, entry):
            return False
        progress.count(region)
        # It may wait next for a rank on which an op has failed.
        tell_there()
        return True

    def _free_others(self) -> None:
        """Free ranks that wait for this one, which is new, in a collective or for groups."""
        if self.is_new:
            give_up_everywhere(local_rendezvous().generation)

    def _keep(self, region: Region, entry: Any) -> None:
        if not isinstance(entry, int) and entry[0] == NEW:
            self._learn(region, entry)
        else:
            self.kept.append((region, entry))

    def _learn(self, region: Region, entry: Any) -> None:
        _, number, template = entry
        op = find_op(template.op) if template.op else OPERATIONS[template.kind]
        self.templates[region, number] = _Known(template, filler(template), op, "cpu")

    def _op(self, region: Region, entry: Any) -> bool:
        """Run an op; return False if its collective was cut, so that it must run again."""
        number, inputs, values, outputs, _ = entry
        known = self.templates[region, number]
        failed = self.failed
        if failed and (failure := self._failure_before(region, entry)) is not None:
            # As on all other ranks, which have run the same ops since they agreed on what had failed.
            self._fail_op(region, entry, failure, True)
            return True
        if known.template.kind == REPLAY and not self.meshes.works():
            # A recorded step that has changed tensors before its first collective could not run again.
            stop_all(self.meshes.generation, region)
            return False
        held = self.values
        pending = self._behind.get(id(entry))
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

    def _broken_off(self, region: Region, entry: Any, known: _Known, error: BaseException) -> bool:
        """Halt after an error in an op; return False if its collective was cut, so that it must run again."""
        cause = error.cause if isinstance(error, ReplayError) else error
        is_cut = isinstance(cause, GroupError) or broke(cause) or is_unregistered(cause)
        if is_cut and not isinstance(cause, CompletedElsewhereError):
            stop_all(self.meshes.generation, region)
            return False
        name, line = (error.op, error.line) if isinstance(error, ReplayError) else (title_of(known.template), entry[4])
        there = cause.failure if isinstance(cause, SourceFailedError) else None
        self._fail_op(region, entry, there or failure_of(cause, name, line, self.rank))
        self.halted = True
        stop_all(self.meshes.generation, region)
        return True

    def _result(self, region: Region, number: int, tensors: list[Any], values: Any) -> Any:
        mesh, known = self.meshes.of(region), self.templates[region, number]
        if known.kind != mesh.device_type:
            template = on_device(known.template, mesh.device_type)
            known = self.templates[region, number] = _Known(template, filler(template), known.op, mesh.device_type)
        return run_op(mesh, known.template, known.fill, known.op, tensors, values)
