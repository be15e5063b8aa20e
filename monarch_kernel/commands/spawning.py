"""``%%mesh spawn``: the class in the cell becomes a mesh of actors, or the new class of a live one."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable
from typing import Any

import monarch.actor
from monarch._kernel_api import (
    ActorMesh,
    Ending,
    Future,
    ProcMesh,
    current_node,
    describe_ranks,
    is_actor_mesh,
    meshes_of,
    node_of,
    region_of,
    state_of,
    targets_of,
)
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.calls.running import RunningCalls
from monarch_kernel.calls.stop_report import StopReport
from monarch_kernel.calls.stop_run import stop_ranks, uninterrupted
from monarch_kernel.editing.edit import Editor, actor_classes
from monarch_kernel.grammar.header import HERE, HeaderError, parse, ranks_of
from monarch_kernel.grammar.spawn import SpawnLine
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.source.gutter import lines_above, typed


class Spawning:
    """The ``%%mesh spawn`` cells of a notebook.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
        editor: gives live actors the new version of their class.
        calls: returns the calls of the notebook.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes, editor: Editor, calls: Callable[[], CallRecord]) -> None:
        self._shell = shell
        self._meshes = meshes
        self._editor = editor
        self._calls = calls
        self._arguments_of: dict[str, str] = {}
        """The spawn arguments of meshes of actors, by key."""

    def run(self, order: SpawnLine, cell: str) -> None:
        """Run the cell in the notebook, and spawn actors of the last class that it defines."""
        # IPython hides frames that have this.
        __tracebackhide__ = True
        cls = self._class_of(order, cell)
        living = self._shell.user_ns.get(order.name)
        if is_actor_mesh(living) and _is_alive(living):
            if not order.new:
                self._update(order, living, cls)
                return
            living.stop().get(15)
        actors = self._spawn(order, cls)
        self._shell.user_ns[order.name] = actors
        self._arguments_of[state_of(actors).key] = order.arguments
        ranks = describe_ranks([region_of(actors).base_rank(at) for at in range(len(actors))])
        count = f"{len(actors)} actor{'s' if len(actors) > 1 else ''}"
        print(f"{order.name}: {count} of {cls.__name__}, on {ranks} of {self._where(order)}")

    def _class_of(self, order: SpawnLine, cell: str) -> type[Any]:
        """Run the cell in the notebook, and return the last class of actors that it defines."""
        __tracebackhide__ = True
        shell = self._shell
        before = actor_classes(shell)
        # In automatic mode too, the class is defined in the notebook.
        above = lines_above(shell, cell)
        source: str = "\n" * above + shell.transform_cell(f"{HERE}\n{cell}")
        flags: int = shell.compile.flags
        _lend(source, shell.user_ns)
        name: str = shell.compile.cache(
            source, shell.displayhook.prompt_count, raw_code=typed(shell) if above else cell
        )
        exec(compile(source, name, "exec", flags, dont_inherit=True), shell.user_ns)
        new = [cls for cls in actor_classes(shell) if cls not in before]
        if not new:
            raise HeaderError(
                f"%%mesh spawn {order.name}: the cell defines no actor class; add one, as in class Trainer(Actor): ..."
            )
        return new[-1]

    def _update(self, order: SpawnLine, living: ActorMesh, cls: type[Any]) -> None:
        """Give live actors the new version of their class.

        Raises:
            HeaderError: they are of another class.
        """
        __tracebackhide__ = True
        if not self._editor.renew(living, cls):
            raise HeaderError(
                f"%%mesh spawn {order.name}: {order.name!r} already names actors of another class "
                f"({state_of(living).cls.__name__}); stop them with {order.name}.stop().get(), or add --new"
            )
        if order.arguments != self._arguments_of.get(state_of(living).key, order.arguments):
            print(
                f"{order.name}: the arguments ({order.arguments}) are ignored, because the actors keep their state; "
                f"--new replaces the actors",
                file=sys.stderr,
            )

    def _spawn(self, order: SpawnLine, cls: type[Any]) -> ActorMesh:
        """Spawn the actors, and wait for their constructors."""
        __tracebackhide__ = True
        args, kwargs = self._arguments(order)
        place = self._place(order)
        before = set(meshes_of(current_node()).actor_meshes)
        try:
            actors: ActorMesh = place.spawn(order.name, cls, *args, **kwargs)
            actors.initialized.get()
        except KeyboardInterrupt:
            self._stop_constructors(order.name, before)
            _give_up(order.name, before, "its spawn was stopped")
            print(f"{order.name}: the spawn was stopped; no actors were created", file=sys.stderr)
            raise
        except BaseException:
            _give_up(order.name, before, "some actors could not be created")
            raise
        return actors

    def _stop_constructors(self, name: str, before: set[str]) -> None:
        """Stop the constructors of a spawn, so that the next cell meets none of them in a collective."""
        with uninterrupted():
            for actors in _spawned(name, before):
                stopped = _stop_creation(actors, self._calls())
                left = bool(stopped.ranks(Ending.LEFT))
                for mesh in self._meshes.by_name.values():
                    if state_of(mesh.procs).procs == state_of(actors).procs:
                        mesh.check_groups(stopped.cut or left, stopped.generation)
                if left:
                    print(f"{name}: some constructors are still running; {stopped.text()}", file=sys.stderr)

    def _arguments(self, order: SpawnLine) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return eval(f"(lambda *args, **kwargs: (args, kwargs))({order.arguments})", self._shell.user_ns)
        except SyntaxError as error:
            raise HeaderError(f"%%mesh spawn {order.name}({order.arguments}): {error.msg}") from None

    def _where(self, order: SpawnLine) -> str:
        return f"mesh {order.place or self._meshes.get(None).name}"

    def _place(self, order: SpawnLine) -> ProcMesh:
        """Return the processes for the actors."""
        header = parse(order.place)
        variable = self._shell.user_ns.get(header.name) if header.name else None
        procs = variable if isinstance(variable, ProcMesh) else self._meshes.get(header.name).procs
        if header.role:
            return procs.role(header.role)
        if header.axes is not None:
            return procs.slice(**header.axes)
        if header.ranks is None:
            return procs
        chosen = ranks_of(header.ranks, len(procs))
        if chosen == list(range(len(procs))):
            return procs
        step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
        if procs.ndim != 1 or step < 1 or chosen != list(range(chosen[0], chosen[-1] + 1, step)):
            raise HeaderError(
                f"%%mesh spawn {order.name} --on {order.place}: expected evenly spaced ranks; "
                f"select them by axis, as in [{procs.extent.labels[0]}=0:4:2]"
            )
        return procs.slice(**{procs.extent.labels[0]: slice(chosen[0], chosen[-1] + 1, step)})


def _is_alive(actors: ActorMesh) -> bool:
    """Return whether actors may still be used: nobody has ended them, nor all of their processes."""
    if state_of(actors).stopped is not None or node_of(actors).closed:
        return False
    return any(peer.dead is None for peer in targets_of(actors).peers)


def _lend(source: str, variables: dict[str, Any]) -> None:
    """Give a cell the names of ``monarch.actor`` that it reads and the notebook lacks, such as ``Actor``."""
    try:
        names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    except SyntaxError:
        # Shown when the cell is compiled.
        return
    for name in names.intersection(monarch.actor.__all__) - variables.keys() - vars(builtins).keys():
        variables[name] = getattr(monarch.actor, name)


def _spawned(name: str, before: set[str]) -> list[ActorMesh]:
    """Return the actors of a name that were spawned since, and that nobody has stopped."""
    meshes = list(meshes_of(current_node()).actor_meshes.items())
    return [
        mesh
        for key, mesh in meshes
        if key not in before and state_of(mesh).name == name and state_of(mesh).stopped is None
    ]


def _stop_creation(actors: ActorMesh, calls: CallRecord) -> StopReport:
    """Carry out the stop ladder for constructors; it restarts no rank."""
    creation: Any = state_of(actors).creation
    # The person who stops them needs no report of the interrupts as failures.
    creation.add_done_callback(_read)
    spared = frozenset(peer.proc for peer in creation.targets)
    return stop_ranks(RunningCalls("", [creation]), calls, spared=spared)


def _read(_: Future[Any]) -> None:
    pass


def _give_up(name: str, before: set[str], reason: str) -> None:
    """Stop actors that nobody can use, so that no heal and no later spawn counts them as alive."""
    for mesh in _spawned(name, before):
        mesh.stop(reason)
