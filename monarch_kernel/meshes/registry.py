"""The meshes of a notebook, by name."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

from monarch._kernel_api import (
    ActorMesh,
    CellResult,
    CellVariables,
    Channel,
    Future,
    Liveness,
    Namespace,
    ProcMesh,
    Promise,
    StateTransfer,
    ask_soon,
    called,
    current_node,
    give_copies,
    groups,
    heal_mesh,
    in_step,
    in_thread,
    is_a,
    member_at,
    meshes_of,
    region_of,
    replace_procs,
    request,
    resize_procs,
    spoil_groups,
    state_of,
    take_copies,
    targets_of,
    to_its_end,
)
from monarch.config import CHECK_COLLECTIVES
from monarch.exceptions import MonarchError
from monarch_kernel.calls.running import STOPPED, Run
from monarch_kernel.grammar.header import Header, HeaderError, check_axes, ranks_of
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.code import Code, Synced
from monarch_kernel.meshes.hosts import Hosts
from monarch_kernel.meshes.recipe import Recipe, Step
from monarch_kernel.meshes.replaced import Replaced
from monarch_kernel.source.definitions import Definitions

Stage = Callable[[str, Any], None]
"""Called with the name of each stage and the future that ends it."""


_KILLING = 20.0
"""Seconds for new processes to be ready."""
_LOOK = 0.5
"""Seconds for ranks to answer before a table shows them as unresponsive."""


class NoMesh(MonarchError):
    """No mesh is running, or none of that name."""


class Mesh:
    """A mesh from ``%mesh up``: its processes, and the namespace on each."""

    def __init__(self, recipe: Recipe, procs: ProcMesh, cells: ActorMesh, release: Callable[[], object]) -> None:
        self.recipe = recipe
        self.name = recipe.name
        self.procs = procs
        self.cells = cells
        self.hosts = Hosts(recipe, procs, release)
        self.definitions = Definitions()
        self._code = Code(cells)
        self.asked = False
        """Whether a verb of the user replaces ranks; written by the main thread, read by threads that replace ranks."""
        self.on_replaced: Callable[[Mesh, int], object] = lambda mesh, rank: None
        """Called with each rank that gets a new process; set by the notebook before ranks can die."""
        self.silent: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Hides the output of calls made inside; set by the notebook before ranks can die."""
        self.frame = 0
        """The selected frame of its code: 0 for the innermost one of the user, 1 for its caller. Written by the threads
        of verbs and view actions, as a whole."""
        self.checked = recipe.env.get(CHECK_COLLECTIVES.variable) == "1"
        """Whether collectives are compared, as far as this notebook knows. Written by the threads of verbs."""
        self.replaced = Replaced(state_of(procs).procs.uid, len(procs), lambda rank: self.on_replaced(self, rank))
        self.restarted: str | None = None
        """The last cell of the mesh that a restart has replaced, empty if it had none; None without a restart."""
        self._bare: set[int] = set()
        """New ranks, or ranks about to be made, that lack the definitions. Any thread, in single set operations."""
        self.unfinished: list[Run] = []
        """Stopped cells with ranks still inside C calls, or cleaning up; they end when that is done."""
        self.unrecorded: list[Callable[[], bool]] = []
        """For cells that the notebook does not wait for: each records the definitions of one once it has ended, and
        returns whether it has. Threads that run cells; an entry that two lose is harmless, as a cell records too."""
        self._unchecked = False
        """Whether a stop has left the check of the groups for later."""

    @property
    def elsewhere(self) -> bool:
        """Whether its hosts may have other files than this machine."""
        return bool(self.recipe.on) or "://" in self.recipe.hosts

    def sync_code(self, again: bool = False) -> Synced:
        """Copy Python files of the working directory to the hosts that lack them; see ``Code.sync``."""
        return self._code.sync(dict(self.replaced.counts), again)

    def finishing(self) -> list[int]:
        """Return the ranks that have not ended a stopped cell: they are inside a C call or clean up."""
        self.unfinished = [run for run in self.unfinished if not run.done]
        return sorted({rank for run in self.unfinished for rank in run.missing()})

    def check_groups_later(self) -> None:
        """Check the groups once the stopped ranks have cleaned up, for which they may need them."""
        self._unchecked = True

    def check_groups_left(self) -> None:
        """Check the groups if that was left for later, and stopped cells have ended."""
        if self._unchecked and not self.finishing():
            self._unchecked = False
            self.check_groups(False)

    def check_groups(self, cut: bool, known: int = 0) -> None:
        """After a stop, break the process groups if some ranks left a collective that others are in.

        Args:
            cut: whether a rank was freed from a collective, which settles it.
            known: the newest generation of groups that a rank has reported; 0 if none has.
        """
        if cut and known:
            self._spoil(known)
            return
        peers = [peer.proc for peer in targets_of(self.cells).peers if peer.dead is None]
        positions = _positions(peers)
        # A rank that does not answer is inside a C call, and may be in a collective.
        if cut or len(positions) < len(peers) or not in_step({n: at for n, (_, at) in enumerate(positions)}):
            self._spoil(max((number for number, _ in positions), default=0))

    def _spoil(self, number: int) -> None:
        """Break one generation: a rank that hears of it late may have newer groups by then."""
        spoil_groups(current_node(), [state_of(self.procs).procs], STOPPED, number)

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
        procs, node = state_of(self.procs).procs, current_node()
        return [rank for rank in range(len(self.procs)) if node.peers.get(procs.proc(rank)).dead is not None]

    def heal(self, define: bool) -> list[tuple[int, int]]:
        """Replace the processes of dead ranks.

        Args:
            define: whether the new ranks run the definitions of earlier cells.

        Returns:
            The new ranks, each with the number of cells whose definitions it ran.

        Raises:
            HeaderError: there are not enough hosts for the ranks of lost ones.
        """
        self._bare.update(self.dead())
        hosts = self.hosts.to_heal()
        with self.changing():
            heal_mesh(self.procs, hosts=hosts)
        return self._fill(define)

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        """Replace ranks inside for a user who is told by the verb."""
        self.asked = True
        try:
            yield
        finally:
            self.asked = False

    def kill(self, ranks: list[int]) -> list[tuple[int, int]]:
        """Kill the processes of ranks and start new ones; return what ``heal`` returns."""
        self._bare.update(ranks)
        procs = state_of(self.procs).procs
        with self.changing():
            replace_procs(current_node(), [procs.proc(rank) for rank in ranks], _KILLING)
        return self._fill(True)

    def copy(self, ranks: list[int], source: int | None, names: list[str]) -> tuple[list[str], dict[str, str]]:
        """Copy variables to some ranks from a live one.

        Args:
            ranks: the ranks to copy to.
            source: the rank to copy from; None for any other.
            names: of the variables; empty for all that can be copied.

        Returns:
            The names that were copied, and those that were not, with the reason.
        """
        return StateTransfer(self.cells, ranks, source).run(60.0, give_copies, take_copies, names)

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
        self.unrecorded = [record for record in self.unrecorded if not _has_recorded(record)]

    def lack(self, ranks: list[int]) -> None:
        """Note that new ranks lack the definitions; from any thread."""
        self._bare.update(ranks)

    def define(self) -> None:
        """Run the definitions on ranks that lack them."""
        if self._bare:
            self._fill(True)

    def _fill(self, define: bool) -> list[tuple[int, int]]:
        """Run the definitions on ranks that lack them, also after an interrupted heal or resize."""
        filled: list[tuple[int, int]] = []
        self.record_ended()
        for rank in sorted(tuple(self._bare)):
            try:
                if rank < len(self.procs):
                    filled.append((rank, self._define(rank) if define else 0))
            except Exception:
                # It would fail in the same way the next time.
                self._bare.discard(rank)
                raise
            self._bare.discard(rank)
        return filled

    def _define(self, rank: int) -> int:
        cells: Any = member_at(self.cells, rank)
        if self.elsewhere:
            # Without the files, what needs them fails and says so.
            with contextlib.suppress(MonarchError):
                self._code.join(rank)
        port, receiver = Channel[Any].open()
        try:
            defined = self.definitions.of(rank)
            for each in defined:
                # The cell showed its output when it ran.
                with self.silent(), called(each.name):
                    run = cells.run.call_one(each.text, each.name, port, each.shown)
                result: CellResult = run.get()
                if result.error is not None:
                    raise MonarchError(
                        f"rank {rank} was replaced, but the definitions of {each.name} failed there: "
                        f"{result.error.kind}: {result.error.text}; run the cell again"
                    )
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


def choose(actors: ActorMesh, header: Header) -> list[ActorMesh]:
    """Return the actors that a cell is for: one view, or one of each if they make no regular view."""
    if header.role:
        shared = meshes_of(current_node()).own_procs.get(state_of(actors).procs.uid)
        roles = shared.roles if shared is not None else {}
        if header.role not in roles:
            raise HeaderError(
                f"[{header.role}]: expected ranks such as [0,3] or [0:4], or a role; this "
                f"mesh has {'the roles ' + ', '.join(roles) if roles else 'no roles'}"
                f"{did_you_mean(header.role, roles)}"
            )
        ranks = roles[header.role]
        return [actors.slice(**{actors.extent.labels[-1]: slice(ranks.start, ranks.stop)})]
    if header.axes is not None:
        check_axes(header.axes, dict(actors.extent))
        return [actors.slice(**header.axes)]
    if header.ranks is None:
        return [actors]
    chosen = ranks_of(header.ranks, len(actors))
    if chosen == list(range(len(actors))):
        return [actors]
    return [member_at(actors, rank) for rank in chosen]


def ranks_in(views: Sequence[ActorMesh]) -> list[int]:
    """Return the ranks of views, in their order."""
    return [region_of(view).base_rank(position) for view in views for position in range(len(view))]


class Meshes:
    """All meshes of the notebook, and the one in use.

    Args:
        variables: of the notebook; each mesh gets one of its name, unless the user has one already.
    """

    def __init__(self, variables: dict[str, Any] | None = None) -> None:
        self.by_name: dict[str, Mesh] = {}
        self.on_replaced: Callable[[Mesh, int], object] = lambda mesh, rank: None
        """Called with each rank that gets a new process, in the thread that starts it."""
        self.silent: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Hides the output of calls made inside, for meshes added later."""
        self.on_added: Callable[[Mesh], object] = lambda mesh: None
        """Called with each new mesh, in the thread that starts it."""
        self.used: str | None = None
        self.settings: dict[str, str] = {}
        """Defaults of the notebook, by key of ``%mesh config``; thread that runs cells only."""
        self._variables = variables if variables is not None else {}
        self._changing: dict[str, Future[Mesh]] = {}
        """Restarts in progress, by name; added by the main thread, removed by the thread of the restart."""

    def add(self, mesh: Mesh) -> bool:
        """Add a mesh, and make it the one in use; return whether its name was free for a variable."""
        self.by_name[mesh.name] = mesh
        mesh.on_replaced, mesh.silent = self.on_replaced, self.silent
        self.on_added(mesh)
        self.used = mesh.name
        known = self._variables.get(mesh.name)
        free = mesh.name not in self._variables or (isinstance(known, ProcMesh) and known.name == mesh.name)
        if free:
            self._variables[mesh.name] = mesh.procs
        return free

    def up(self, recipe: Recipe, names: Mapping[str, Any], stage: Stage, step: Step | None = None) -> Mesh:
        """Start a mesh, wait until it is up, and make it the one in use.

        Args:
            recipe: of the mesh.
            names: the variables of the notebook.
            stage: called at each stage.
            step: shows the wait for hosts of a launcher.
        """
        name = recipe.name
        self.check_free(name)
        try:
            hosts, release = recipe.find_hosts(names, step)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(str(error) or f"mesh {name!r} was not started") from None
        mesh: Mesh | None = None
        try:
            procs = recipe.spawn(hosts)
            cells: Any = procs.spawn(name, Namespace, name, recipe.device)
            mesh = Mesh(recipe, procs, cells, release)
            stage("starting ranks", procs.initialized)
            stage("initializing ranks", cells.initialized)
        except BaseException as error:
            # Clean up what was started; a second interrupt ends only the wait for that.
            with contextlib.suppress(MonarchError, KeyboardInterrupt):
                to_its_end(current_node(), f"end of {name}", mesh.end if mesh is not None else release)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"mesh {name!r} was not started; its processes have been ended") from None
            raise
        self.add(mesh)
        return mesh

    def check_free(self, name: str) -> None:
        """Check that no mesh of this name is running.

        Raises:
            HeaderError: one is.
        """
        if name in self.by_name:
            raise HeaderError(f"mesh {name!r} is already running; end it with %mesh down {name}, or use another name")

    def restart(self, name: str | None, names: Mapping[str, Any], told: Callable[[str], None]) -> Mesh:
        """End a mesh and start it again, empty; an interrupt ends only the wait for it.

        Args:
            name: of the mesh; None for the one in use.
            names: the variables of the notebook.
            told: called with the outcome, if the wait was interrupted.

        Raises:
            KeyboardInterrupt: the wait was interrupted; the restart goes on, if it had begun.
        """
        mesh = self.get(name)
        used, node = self.used, current_node()
        # An interrupt may come at any point: known before it begins, the restart can be waited for in any case.
        change: Promise[Mesh] = Promise(node, f"the restart of mesh {mesh.name!r}")
        begun = threading.Lock()

        def work() -> Mesh:
            if not begun.acquire(blocking=False):
                raise MonarchError(f"the restart of mesh {mesh.name!r} was interrupted before it began")
            return self._restart(mesh, used, names)

        try:
            self._changing[mesh.name] = change
            return in_thread(node, f"restart of {mesh.name}", work, change).get()
        except KeyboardInterrupt:
            if begun.acquire(blocking=False):
                self._changing.pop(mesh.name, None)
                raise KeyboardInterrupt(f"mesh {mesh.name!r} was not restarted; its variables are unchanged") from None
            change.add_done_callback(lambda _: told(_outcome(mesh.name, change)))
            raise KeyboardInterrupt(
                f"the restart of mesh {mesh.name!r} continues; its variables are lost, and cells wait until it is up"
            ) from None

    def _restart(self, mesh: Mesh, used: str | None, names: Mapping[str, Any]) -> Mesh:
        try:
            self.down(mesh.name)
            new = self.up(mesh.recipe, names, lambda _, future: (future.get(), None)[1])
            # The mesh in use stays the same.
            self.used = used if used in self.by_name else new.name
            new.restarted = mesh.replaced.last_cell
            return new
        finally:
            self._changing.pop(mesh.name, None)

    def coming(self) -> list[str]:
        """Return the meshes that are still being restarted."""
        return [name for name, change in list(self._changing.items()) if not change.done and name not in self.by_name]

    def get(self, name: str | None, actors: Callable[[], Sequence[str]] = tuple) -> Mesh:
        """Return a mesh by its name, or the one in use; wait for one that is being restarted.

        Args:
            name: of the mesh; None for the one in use.
            actors: returns names that would have done as well, for the error.
        """
        wanted = name or self.used or next(iter(self._changing), None)
        change = self._changing.get(wanted or "")
        if change is not None and not change.done and wanted not in self.by_name:
            print(f"waiting for mesh {wanted!r}, which is being restarted", file=sys.stderr)
            return change.get()
        if wanted is None:
            raise NoMesh("no mesh is running; start one with %mesh up --procs 4")
        if wanted not in self.by_name:
            known = actors()
            others = f"; actors: {', '.join(known)}" if known else ""
            guess = did_you_mean(wanted, [*self.by_name, *known])
            raise NoMesh(f"no mesh {wanted!r}; running: {', '.join(self.by_name) or 'none'}{others}{guess}")
        return self.by_name[wanted]

    def in_order(self) -> list[Mesh]:
        """Return the meshes, the one in use first."""
        return sorted(self.by_name.values(), key=lambda mesh: mesh.name != self.used)

    def use(self, name: str) -> Mesh:
        """Make a mesh the one in use."""
        mesh = self.get(name)
        self.used = name
        # It may have been deleted.
        self._variables.setdefault(mesh.name, mesh.procs)
        return mesh

    def down(self, name: str | None) -> Mesh:
        """End a mesh."""
        mesh = self.get(name)
        del self.by_name[mesh.name]
        if self.used == mesh.name:
            self.used = next(iter(self.by_name), None)
        if self._variables.get(mesh.name) is mesh.procs:
            del self._variables[mesh.name]
        current_node().part(CellVariables).by_uid.pop(state_of(mesh.procs).procs.uid, None)
        mesh.end()
        return mesh


def _has_recorded(record: Callable[[], bool]) -> bool:
    try:
        return record()
    except MonarchError:
        # The handle of the cell raises it.
        return True


def _outcome(name: str, change: Future[Mesh]) -> str:
    """Describe the outcome of a restart."""
    error = change.exception()
    return (
        f"mesh {name!r} restarted (variables cleared)"
        if error is None
        else f"the restart of mesh {name!r} failed: {error}"
    )


def _positions(procs: list[str]) -> list[tuple[int, dict[str, int] | None]]:
    """Return the positions of ranks in their process groups, from those that answer soon."""
    answers = ask_soon(procs, request(groups.position))
    return [answer if is_a(answer, tuple) else (0, None) for answer in answers.values()]
