"""One mesh of a notebook: its ranks, their namespaces, and what new ranks have to be given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast

from monarch._kernel_api import (
    BOTH,
    ActorMesh,
    CellResult,
    Channel,
    Copied,
    Liveness,
    ProcMesh,
    StateTransfer,
    Steps,
    ask_soon,
    begin_afresh,
    called,
    copied_by,
    current_node,
    give_copies,
    groups,
    heal_mesh,
    in_step,
    is_a,
    is_list,
    is_tuple,
    member_at,
    meshes_of,
    replace_procs,
    request,
    resample,
    resize_procs,
    spoil_groups,
    state_of,
    steps_here,
    take_copies,
    targets_of,
)
from monarch.config import CHECK_COLLECTIVES
from monarch.exceptions import MonarchError
from monarch_kernel.calls.cell_run import Run
from monarch_kernel.calls.running import STOPPED
from monarch_kernel.grammar.header import Header
from monarch_kernel.meshes.choosing import choose
from monarch_kernel.meshes.hosts import MeshHosts
from monarch_kernel.meshes.moves import Moves
from monarch_kernel.meshes.python_files import Code, Synced
from monarch_kernel.meshes.recipe import Recipe
from monarch_kernel.meshes.replaced import Replaced
from monarch_kernel.source.definitions import Defined, Definitions

Position: TypeAlias = tuple[int, dict[str, int] | None]
"""Of a rank in its process groups: their generation, and how many collectives of each group it has begun."""
_KILLING = 20.0
"""Seconds for new processes to be ready."""
AFTER_STOP_S = 0.5
"""Seconds for ranks to tell how far they are, which a stop takes longer."""
_LOOK = 0.5
"""Seconds for ranks to answer before a table shows them as unresponsive."""


class Undefined(NamedTuple):
    """Definitions of a cell that failed on a new rank."""

    rank: int
    defined: Defined
    why: str
    """For the error."""
    missing: str
    """The variable that they lacked; empty for another error."""


class Mesh:
    """A mesh from ``%mesh up``: its processes, and the namespace on each."""

    def __init__(self, recipe: Recipe, procs: ProcMesh, cells: ActorMesh, release: Callable[[], object]) -> None:
        self.recipe = recipe
        self.name = recipe.name
        self.procs = procs
        self.cells = cells
        self.hosts = MeshHosts(recipe, procs, release)
        self.definitions = Definitions()
        self._code = Code(cells)
        self._asking: list[None] = []
        """One entry for each command or move that replaces ranks and tells the user. Any thread, single operations."""
        self.moves = Moves(self.name)
        """Its ranks that move to other hosts."""
        self.on_replaced: Callable[[Mesh, int], object] = lambda mesh, rank: None
        """Called with each rank that gets a new process; set by the notebook before ranks can die."""
        self.silent: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Hides the output of calls made inside; set by the notebook before ranks can die."""
        self.frame = 0
        """The selected frame of its code: 0 for the innermost one of the user, 1 for its caller. Written by the threads
        of commands and view actions, as a whole."""
        self.checked = recipe.env.get(CHECK_COLLECTIVES.variable) == "1"
        """Whether collectives are compared, as far as this notebook knows. Written by the threads of commands."""
        self.replaced = Replaced(state_of(procs).procs.uid, len(procs), self._replaced)
        self.restarted: str | None = None
        """The last cell of the mesh that a restart has replaced, empty if it had none; None without a restart."""
        self._bare: set[int] = set()
        """New ranks, or ranks about to be made, that lack the definitions. Any thread, in single set operations."""
        self.unfinished: list[Run] = []
        """Cells with ranks that a Stop, or the interrupt after a death, has not ended: they are inside C calls or clean
        up, and end when that is done. Any thread, single operations."""
        self.unrecorded: list[Callable[[], bool]] = []
        """For cells that the notebook does not wait for: each records the definitions of one once it has ended, and
        returns whether it has. Threads that run cells, in single operations."""
        self._unchecked = False
        """Whether a stop has left the check of the groups for later."""

    @property
    def elsewhere(self) -> bool:
        """Whether its hosts may have other files than this machine."""
        return bool(self.recipe.on) or "://" in self.recipe.hosts

    def sync_code(self, again: bool = False) -> Synced:
        """Copy Python files of the working directory to the hosts that lack them; see ``Code.sync``."""
        return self._code.sync(dict(self.replaced.counts), self.dead(), again)

    def finishing(self) -> list[int]:
        """Return the ranks that have not ended a cell that has: they are inside a C call or clean up."""
        # In place: another thread may add one meanwhile, or remove the same.
        for run in [run for run in self.unfinished if not run.count()]:
            with contextlib.suppress(ValueError):
                self.unfinished.remove(run)
        return sorted({rank for run in list(self.unfinished) for rank in run.missing()})

    def check_groups_later(self) -> None:
        """Check the groups once the stopped ranks have cleaned up, for which they may need them."""
        self._unchecked = True

    def check_groups_left(self) -> None:
        """Check the groups if that was left for later, and stopped cells have ended."""
        if self._unchecked and not self.finishing():
            self._unchecked = False
            self.check_groups(False)

    def check_groups(
        self, cut: bool, known: int = 0, told: Mapping[int, Position] | None = None
    ) -> dict[int, Steps] | None:
        """After a stop, break the process groups if some ranks left a collective that others are in.

        Args:
            cut: whether a rank was freed from a collective, which settles it.
            known: the newest generation of groups that a rank has reported; 0 if none has.
            told: the positions of ranks that have told them as they stopped; the others are asked.

        Returns:
            How far the ranks are in their training, if they were asked.
        """
        if cut and known:
            self._spoil(known)
            return None
        told = told or {}
        peers = self._living()
        ranks = {proc: state_of(self.procs).procs.rank_of(proc) for proc in peers}
        positions = [told[rank] for rank in ranks.values() if rank in told]
        positions += _positions([proc for proc, rank in ranks.items() if rank not in told])
        # A rank that does not answer is inside a C call, and may be in a collective.
        if cut or len(positions) < len(peers) or not in_step({n: at for n, (_, at) in enumerate(positions)}):
            self._spoil(max((number for number, _ in positions), default=0))
        elif any(at for _, at in positions):
            steps = self.steps(ranks.values(), AFTER_STOP_S, False)
            if any(each.unfinished for each in steps.values()):
                self._begin_afresh(None, True)
            return steps
        return None

    def _spoil(self, number: int) -> None:
        """Break one generation: a rank that hears of it late may have newer groups by then."""
        spoil_groups(current_node(), [state_of(self.procs).procs], STOPPED, number)

    @property
    def asked(self) -> bool:
        """Whether somebody replaces ranks who tells the user about them."""
        return bool(self._asking)

    def actors(self) -> list[ActorMesh]:
        """Return the live meshes of actors in its processes, without the namespaces."""
        procs = state_of(self.procs).procs
        states = [(mesh, state_of(mesh)) for mesh in list(meshes_of(current_node()).actor_meshes.values())]
        return [mesh for mesh, state in states if state.procs == procs and state.stopped is None and mesh != self.cells]

    def users_actors(self) -> list[ActorMesh]:
        """Return those of them whose class is not of this package."""
        return [each for each in self.actors() if not state_of(each).cls.__module__.startswith("monarch._")]

    def dead(self) -> list[int]:
        """Return the dead ranks."""
        return [rank for rank in range(len(self.procs)) if self._is_dead(rank)]

    def _is_dead(self, rank: int) -> bool:
        return current_node().peers.get(state_of(self.procs).procs.proc(rank)).dead is not None

    def heal(self, define: bool, failed: list[Undefined] | None = None) -> list[tuple[int, int]]:
        """Replace the processes of dead ranks.

        Args:
            define: whether the new ranks run the definitions of earlier cells.
            failed: gets the definitions that failed; None to raise instead.

        Returns:
            The new ranks, each with the number of cells whose definitions it ran.

        Raises:
            HeaderError: there are not enough hosts for the ranks of lost ones.
        """
        hosts = self.hosts.to_heal()
        with self.changing():
            heal_mesh(self.procs, hosts=hosts)
        return self._fill(define, failed)

    def define_again(self, failed: list[Undefined]) -> list[Undefined]:
        """Run definitions again that have failed on new ranks, which have more variables now; return the rest."""
        left: list[Undefined] = []
        for each in failed:
            if each.rank < len(self.procs):
                self._define(each.rank, left, [each.defined])
        return left

    def _replaced(self, rank: int) -> None:
        """Note a new process, whoever has replaced the old one: a rank may also die while a heal has begun."""
        self._bare.add(rank)
        self.on_replaced(self, rank)

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        """Replace ranks inside for a user who is told by the command."""
        self._asking.append(None)
        try:
            yield
        finally:
            self._asking.pop()

    def kill(self, ranks: list[int]) -> list[tuple[int, int]]:
        """Kill the processes of ranks and start new ones; return what ``heal`` returns."""
        procs = state_of(self.procs).procs
        with self.changing():
            replace_procs(current_node(), [procs.proc(rank) for rank in ranks], _KILLING)
        return self._fill(True)

    def copy(
        self,
        ranks: list[int],
        source: int | None,
        names: list[str],
        to_living: bool = False,
        alike: Collection[str] = (),
    ) -> Copied:
        """Copy variables to some ranks from a live one.

        Args:
            ranks: the ranks to copy to.
            source: the rank to copy from; None for any other.
            names: the names of the variables; empty for all that can be copied.
            to_living: whether the ranks have variables of their own.
            alike: the generators of random numbers to copy, which are in the same state on all other ranks.
        """
        try:
            transfer = StateTransfer(self.cells, ranks, source)
            copied: Copied = transfer.run(60.0, give_copies, take_copies, names, to_living, list(alike))
        except BaseException:
            # Some ranks may have taken what others have refused.
            self._begin_afresh(names or None, False)
            raise
        if copied.in_step:
            self._begin_afresh(copied.taken, False)
        return copied

    def _begin_afresh(self, names: list[str] | None, resets: bool) -> None:
        """Let all ranks begin their modules in DistributedDataParallel afresh, each before its next cell."""
        living = self._living()
        answers = ask_soon(living, request(begin_afresh, names, resets))
        if len([each for each in answers.values() if each is None]) < len(living):
            # One that does not hear it would call other collectives. With new connections all begin afresh.
            self._spoil(max((number for number, _ in _positions(living)), default=0))

    def _living(self) -> list[str]:
        return [peer.proc for peer in targets_of(self.cells).peers if peer.dead is None]

    def steps(self, ranks: Collection[int], seconds: float, has_values: bool = True) -> dict[int, Steps]:
        """Return how far ranks are in their training, by rank; without those that do not answer soon.

        Args:
            ranks: the ranks to ask.
            seconds: for their answers.
            has_values: whether to look at other variables than models too.
        """
        procs = state_of(self.procs).procs
        answers = ask_soon([procs.proc(rank) for rank in ranks], request(steps_here, has_values), seconds)
        return {procs.rank_of(proc): cast("Steps", each) for proc, each in answers.items() if is_tuple(each)}

    def resample(self, before: int) -> list[str]:
        """Let the samplers that cells have made for all ranks divide the data among those of now.

        Args:
            before: how many ranks there were.

        Returns:
            The variables that have them.
        """
        size = len(self.procs)
        procs = [state_of(self.procs).procs.proc(rank) for rank in range(min(before, size))]
        answers = ask_soon(procs, request(resample, before, size), AFTER_STOP_S) if before != size else {}
        return sorted({name for names in answers.values() if is_list(names) for name in names})

    def copy_actors(self, ranks: list[int], source: int | None) -> dict[str, str]:
        """Copy the state of the user's actors to some ranks from a live one.

        Args:
            ranks: the ranks to copy to.
            source: the rank to copy from; None for any other.

        Returns:
            The names of the actor meshes there, each with the reason why its state was not copied; empty if it was.
        """
        found: dict[str, str] = {}
        for each in self.users_actors_on(ranks):
            name, cls = state_of(each).name, state_of(each).cls
            why = "" if copied_by(cls) is not None else f"{cls.__name__} lacks {BOTH}"
            if not why:
                try:
                    StateTransfer(each, ranks, source).run(60.0)
                except MonarchError as error:
                    why = str(error).partition("\n")[0]
            # Of several with one name, the loss of one is told.
            found[name] = found.get(name) or why
        return found

    def users_actors_on(self, ranks: Collection[int]) -> list[ActorMesh]:
        """Return the meshes of the user's actors that have some of the ranks."""
        users = self.users_actors()
        return [each for each in users if not set(ranks).isdisjoint(state_of(each).region.base_ranks())]

    def resize(self, sizes: dict[str, int]) -> int:
        """Resize the mesh; return the number of cells whose definitions new ranks ran."""
        procs = state_of(self.procs).procs
        now = dict(self.procs.sizes)
        of_hosts = procs.labels[: procs.host_axes]
        missing = prod(sizes.get(label, now[label]) for label in of_hosts) - len(procs.hosts) if of_hosts else 0
        wanted = prod({**now, **{label: size for label, size in sizes.items() if size > 0}}.values())
        self._bare.update(range(len(self.procs), wanted))
        # Without a limit: the cell that is waited for is shown, and Stop ends the wait.
        try:
            resize_procs(self.procs, self.hosts.free(missing) if missing > 0 else None, sizes, None)
        finally:
            # A restart keeps the new size, also of a resize that was stopped as it ended.
            if not self.recipe.roles:
                self.recipe.axes = {label: size for label, size in self.procs.sizes.items() if label not in of_hosts}
            if self.recipe.hosts.isdecimal():
                self.recipe.hosts = str(len(procs.hosts))
        return max((count for _, count in self._fill(True)), default=0)

    def record_ended(self) -> None:
        """Record the definitions of cells that have ended and were not waited for."""
        # In place: another thread may add one meanwhile, or remove the same.
        for record in list(self.unrecorded):
            if _has_recorded(record):
                with contextlib.suppress(ValueError):
                    self.unrecorded.remove(record)

    def lack(self, ranks: list[int]) -> None:
        """Note that new ranks lack the definitions; from any thread."""
        self._bare.update(ranks)

    def undefined(self, ranks: list[int]) -> dict[int, int]:
        """Return those of some ranks that lack definitions, each with the number of cells that have some for it."""
        bare = sorted(self._bare.intersection(ranks).difference(self.dead()))
        return {rank: count for rank in bare if (count := len(self.definitions.of(rank)))}

    def define(self) -> None:
        """Run the definitions on ranks that lack them."""
        for rank in self._bare.intersection(self.dead()) if self._bare else ():
            # A dead rank lacks them again once it is replaced, which may have happened before it was discarded.
            self._bare.discard(rank)
            if not self._is_dead(rank):
                self._bare.add(rank)
        if self._bare:
            self._fill(True)

    def _fill(self, define: bool, failed: list[Undefined] | None = None) -> list[tuple[int, int]]:
        """Run the definitions on ranks that lack them, also after an interrupted heal or resize.

        Raises:
            MonarchError: some have failed, or a rank has died; the others are complete.
        """
        filled: list[tuple[int, int]] = []
        raises, failed = failed is None, [] if failed is None else failed
        self.record_ended()
        for rank in sorted(tuple(self._bare)):
            # First, since the rank may be replaced again meanwhile.
            self._bare.discard(rank)
            try:
                if rank < len(self.procs):
                    filled.append((rank, self._define(rank, failed) if define else 0))
            except BaseException:
                self._bare.add(rank)
                raise
        if failed and raises:
            raise MonarchError("\n".join(each.why for each in failed))
        return filled

    def _define(self, rank: int, failed: list[Undefined], only: list[Defined] | None = None) -> int:
        """Run all or only some definitions on one rank; those that fail would fail again, and are added to a list."""
        cells: Any = member_at(self.cells, rank)
        if self.elsewhere:
            # Without the files, what needs them fails and says so.
            with contextlib.suppress(MonarchError):
                self._code.join(rank)
        port, receiver = Channel[Any].open()
        try:
            defined = self.definitions.of(rank) if only is None else only
            for each in defined:
                # The cell showed its output when it ran.
                with self.silent(), called(each.name):
                    run = cells.define.call_one(each.text, each.name, port, each.shown)
                result: CellResult = run.get()
                if result.error is None:
                    continue
                if result.stopped:
                    raise MonarchError(f"rank {rank} was replaced, but a stop cut off the definitions of {each.name}")
                text = ": ".join(filter(None, [result.error.kind, result.error.text]))
                why = f"rank {rank} was replaced, but the definitions of {each.name} failed there: {text}"
                failed.append(Undefined(rank, each, f"{why}; run the cell again", result.error.missing))
            return len(defined)
        finally:
            receiver.close()

    def look(self) -> None:
        """Update which ranks answer, for the table."""
        node, procs = current_node(), state_of(self.procs).procs
        if (silence := node.find_part(Liveness)) is not None:
            peers = [node.peers.get(procs.proc(rank)) for rank in range(len(self.procs))]
            silence.look([peer.proc for peer in peers if peer.dead is None], _LOOK)

    def end(self) -> None:
        """End its processes, and give the hosts back."""
        try:
            self.procs.stop().get(15)
        finally:
            self.hosts.release()

    def choose(self, header: Header) -> list[ActorMesh]:
        """Return the ranks of a cell, as views of the namespaces."""
        return choose(self.cells, header)


def _has_recorded(record: Callable[[], bool]) -> bool:
    try:
        return record()
    except MonarchError:
        # The handle of the cell raises it.
        return True


def _positions(procs: list[str]) -> list[Position]:
    """Return the positions of ranks in their process groups, from those that answer soon."""
    if not procs:
        return []
    answers = ask_soon(procs, request(groups.position))
    return [answer if is_a(answer, tuple) else (0, None) for answer in answers.values()]
