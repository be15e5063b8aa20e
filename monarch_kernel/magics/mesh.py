"""The ``%mesh`` and ``%%mesh`` magics."""

from __future__ import annotations

import shlex
from typing import Any

# IPython does not type the decorator.
from IPython.core.magic import Magics, magics_class  # pyright: ignore[reportUnknownVariableType]

from monarch._kernel_api import (
    ActorMesh,
    calling,
    describe_ranks,
    is_actor_mesh,
    is_fork,
    need_session,
    on_opened,
    open_node,
)
from monarch.exceptions import MonarchError
from monarch_kernel.calls.waits import unended_lines
from monarch_kernel.cells.dry_run import dry_run
from monarch_kernel.cells.failed_tensors import FailedTensors
from monarch_kernel.cells.hints import Hints
from monarch_kernel.cells.outcomes import Outcomes
from monarch_kernel.cells.runner import CellRunner, Hooks, named
from monarch_kernel.cells.stopping import Stopping
from monarch_kernel.commands.checkpoints import Saving
from monarch_kernel.commands.config import Config, header_defaults
from monarch_kernel.commands.detaching import Detaching
from monarch_kernel.commands.dispatch import CommandTable
from monarch_kernel.commands.elastic import Elastic
from monarch_kernel.commands.files import Files
from monarch_kernel.commands.interrupt import Interrupting
from monarch_kernel.commands.kill import Killing
from monarch_kernel.commands.log import Log
from monarch_kernel.commands.programs import hand_out, parse_run
from monarch_kernel.commands.spawning import Spawning
from monarch_kernel.commands.starting import StartCommands
from monarch_kernel.commands.transfers import Transfers
from monarch_kernel.commands.who import Who
from monarch_kernel.compat import cell_magic, keep_subscripts_python, line_magic, no_var_expand, set_debugger
from monarch_kernel.debug.announcing import Announcing
from monarch_kernel.debug.breaks import Breaks
from monarch_kernel.debug.cells import source_of
from monarch_kernel.debug.checking import Checking
from monarch_kernel.debug.diffing import Diffing
from monarch_kernel.debug.endpoint_prompt import EndpointPrompt
from monarch_kernel.debug.failing import Failing, take_debug
from monarch_kernel.debug.frames import FrameCommand
from monarch_kernel.debug.front_end import FrontEnd
from monarch_kernel.debug.in_frame import InFrame
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.debug.printing import Printing
from monarch_kernel.debug.prompt import Prompt
from monarch_kernel.debug.reasons import Reasons
from monarch_kernel.debug.stepping import Stepping
from monarch_kernel.debug.variables import VariablesCommand
from monarch_kernel.debug.watching import Watches
from monarch_kernel.editing.edit import Editor
from monarch_kernel.grammar.header import Header, HeaderError, parse
from monarch_kernel.grammar.help import OTHERS
from monarch_kernel.grammar.line_words import without_comment
from monarch_kernel.grammar.one_line import is_code
from monarch_kernel.grammar.short_forms import asks_for_help
from monarch_kernel.grammar.spawn import parse_spawn
from monarch_kernel.grammar.typed_lines import VALUE, Assigned, explain
from monarch_kernel.kernel_like import kernel_of, own_kernel
from monarch_kernel.magics.auto import Auto
from monarch_kernel.meshes.choosing import choose, ranks_in
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.preempting import Preempting
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.restarts import Restarts
from monarch_kernel.meshes.variable_errors import variables
from monarch_kernel.meshes.variables import provide_variables
from monarch_kernel.output.imports import Importing, SlowImports
from monarch_kernel.output.streams import Streams
from monarch_kernel.views.commands import Watching
from monarch_kernel.views.shown import ShownMeshes
from monarch_kernel.views.views import Views

_CALLER = 2
"""Frames between a line magic and the code that runs it, whose variables a line may name."""


@magics_class
class MeshMagics(Magics):
    """The magics, and the meshes of the notebook."""

    # IPython allows None.
    shell: Any  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, shell: Any, meshes: NotebookMeshes | None = None, front_end: FrontEnd | None = None) -> None:
        super().__init__(shell)
        self.front_end = front_end or FrontEnd()
        """The debugger of the front end."""
        self.meshes = meshes or NotebookMeshes(shell.user_ns)
        self._streams: Streams | None = None
        self._imports = SlowImports(self._importing)
        self._is_assigned = False
        """Whether the value of the running line is assigned, and so not shown. Main thread only."""
        self.meshes.silent = lambda: self._attach_streams().hiding(False)
        self.hints = Hints(self.meshes, shell.user_ns)
        self.stopping = Stopping(self.meshes, self._attach_streams, self._kernel_ends)
        self._outcomes = Outcomes(shell, self.hints, self.stopping, self._attach_streams)
        self._commands = CommandTable()
        self._starting = StartCommands(shell, self.meshes, self._attach_streams)
        self._transfers = Transfers(shell, self.meshes)
        self._commands.actions.update(self._starting.commands() | self._transfers.commands())
        self._commands.actions.update(log=Log(self.meshes, self._attach_streams).log)
        self.editor = Editor(shell, self.meshes)
        self._spawning = Spawning(shell, self.meshes, self.editor, lambda: self._attach_streams().calls)
        self._commands.actions.update(update=self.editor.update, reload=self.editor.reload, run=self.run_program)
        self._commands.actions.update(Files(self.meshes).commands(), pip=self.run_pip)
        self.auto = Auto(shell, self._ranks_of)
        self._commands.actions.update(auto=self.auto.command, config=Config(self.meshes).command)
        self._commands.actions.update(Elastic(self.meshes, shell.user_ns).commands())
        killing = Killing(self.meshes, lambda: self._attach_streams().calls)
        interrupting = Interrupting(self.meshes, self.stopping)
        self._commands.actions.update(kill=killing.kill, interrupt=interrupting.interrupt)
        self.views = Views(self.meshes, self._attach_streams, killing, interrupting)
        self.views.pins.on_pin = lambda proc: self.front_end.show(proc)
        pausing = Pausing(self.meshes)
        self._commands.actions.update(pausing.commands())
        self._commands.actions.update({**Checking(pausing).commands(), "why": Reasons(pausing).why})
        self._commands.raw.update(Printing(pausing).commands() | Diffing(pausing).commands())
        self._commands.actions.update(
            FrameCommand(pausing).commands() | VariablesCommand(self.meshes, pausing).commands()
        )
        self._commands.actions.update(Watches(pausing, lambda: self._attach_streams().place().write).commands())
        self._prompt = Prompt(shell, self._commands.run, self.front_end, self.views.close_prompt)
        endpoint_prompt = EndpointPrompt(shell, self.meshes, self._prompt, self._attach_streams)
        self._announcing = Announcing(self._attach_streams, self._prompt.shows, endpoint_prompt.ask)
        self.breaks = Breaks(self.meshes, pausing, lambda number: source_of(shell, number), self.front_end)
        self._commands.raw.update(self.breaks.raw())
        self._commands.actions.update({**self.breaks.commands(), **Stepping(pausing).commands()})
        failing = Failing(pausing, self._prompt)
        self._commands.actions.update(failing.commands())
        take_debug(shell, lambda: failing.debug([]), self.meshes)
        self.shown = ShownMeshes(shell, self.views)
        self._commands.actions.update(Watching(shell, self.meshes, self.shown).commands())
        self._commands.actions.update(who=Who(self.meshes, lambda: self._attach_streams().calls).who)
        self._preempting = Preempting(self.meshes, shell.user_ns, lambda: self._attach_streams().place().write)
        self.meshes.on_added = self._added
        restarts = Restarts(self.meshes, lambda: self._attach_streams().place().write)
        hooks = Hooks(
            breakpoints=self.breaks.bind,
            files=self._starting.sync_code,
            begins=lambda name: self.front_end.begin(shell, name),
            wait=self._prompt.wait,
        )
        self._runner = CellRunner(shell, self._attach_streams, self.stopping, self._outcomes, restarts, hooks)
        self._commands.actions.update(Saving(shell, self.meshes).commands())
        self.keeping = Detaching(shell, self.meshes, self._starting.down, lambda: self._attach_streams().place().write)
        self._commands.actions.update(self.keeping.commands())
        self._failed = FailedTensors(shell, self._attach_streams)
        shell.events.register("pre_run_cell", self._cell_begins)
        shell.events.register("post_run_cell", self._cell_ended)
        # A program may make meshes without a magic; its cells are stopped and shown like others.
        on_opened.append(self._session_opened)
        self._assigned = Assigned(shell.ast_transformers)
        shell.input_transformers_post.append(self._assigned.look)
        self._subscripts_end = keep_subscripts_python(shell, "mesh")

    @no_var_expand
    @line_magic("mesh")
    def line(self, line: str) -> Any:
        """Control meshes: ``%mesh help`` lists the commands. Other code runs on the ranks, as in ``%mesh x + 1``."""
        __tracebackhide__ = True
        _check_process()
        self._attach_streams()
        is_assigned = line.startswith(VALUE)
        line = line.removeprefix(VALUE)
        if is_code(line, self._commands.names()) or self._is_variable(line):
            self._is_assigned = is_assigned
            try:
                self.cell("", line)
            finally:
                self._is_assigned = False
            return self.shell.user_ns["_mesh"] if is_assigned else None
        if line.split(maxsplit=1)[:1] and line.split(maxsplit=1)[0] in self._commands.raw:
            return self._commands.run(line)
        # Braces of code are its own; those of commands name variables of the notebook, as in other magics.
        return self._commands.run(self.shell.var_expand(line, depth=_CALLER))

    def _is_variable(self, line: str) -> bool:
        """Return whether all that follows ``%mesh`` is a variable of ranks, which may be spelled like a command."""
        text, used = line.strip(), self.meshes.used
        if not text.isidentifier() or text in self._commands.names() or text in OTHERS or used is None:
            return False
        return text in variables(self.meshes.get(used))

    @line_magic("%mesh")
    def misplaced(self, line: str) -> None:
        """Refuse a ``%%mesh`` below code, which IPython takes for a line magic of this name."""
        raise HeaderError(
            "%%mesh runs a whole cell, so it must be the first line (only comments may precede it); "
            "put the code above it into a cell of its own, or run one line with %mesh CODE"
        )

    def _added(self, mesh: Mesh) -> None:
        provide_variables(mesh)
        self._preempting.watch(mesh)

    def waits_for(self) -> set[str]:
        """Return the uids of the meshes that the running cell waits for; from any thread."""
        return set(self._prompt.speaks_for)

    def auto_ranks(self) -> tuple[Mesh, list[int]] | None:
        """Return where plain cells run in automatic mode; None while it is off, or if these ranks do not exist."""
        line = self.auto.header
        if line is None:
            return None
        try:
            header = self.header(line)
            mesh, actors = self.addressed(header.name)
        except (HeaderError, MonarchError):
            return None
        return (mesh, sorted(ranks_in(choose(actors, header)))) if mesh is not None else None

    # The cell magic

    @cell_magic("mesh")
    def cell(self, line: str, cell: str) -> Any:
        """Run the cell on ranks: ``%%mesh [MESH][SLICE] [options]``; ``%%mesh spawn NAME`` makes actors of it."""
        # Errors here come from the user's code, so tracebacks hide this frame.
        __tracebackhide__ = True
        _check_process()
        line = without_comment(line)
        order = parse_spawn(line)
        if order is not None:
            self._attach_streams()
            self.front_end.begin_spawn(self.shell, cell)
            return self._spawning.run(order, cell)
        if asks_for_help(line.split()):
            return self._commands.help([])
        self.auto.mark()
        header = self.header(line)
        if header.dry_run:
            return self._run_dry(header, cell)
        if header.world is not None:
            raise HeaderError("--world applies only to cells with --dry-run")
        mesh, actors = self.addressed(header.name)
        self._attach_streams()
        if header.in_frame:
            return self._run_in_frame(mesh, actors, header, cell)
        if header.force:
            raise HeaderError("--force applies only to cells with --in-frame")
        return self._runner.run(mesh, actors, header, cell, not self._is_assigned)

    def _run_in_frame(self, mesh: Mesh | None, actors: ActorMesh, header: Header, cell: str) -> None:
        """Run a cell in the selected frame of paused ranks."""
        __tracebackhide__ = True
        if mesh is None:
            raise HeaderError(f"--in-frame: expected a mesh of ranks, got a mesh of actors: {header.name}")
        ranks = sorted(ranks_in(choose(actors, header)))
        running = InFrame(self.shell, self._attach_streams, lambda failure: self._outcomes.show_errors(failure, True))
        running.run(mesh, ranks, header, *named(self.shell, cell))

    def _run_dry(self, header: Header, cell: str) -> None:
        """Simulate a cell, with the variables of the ranks if there is a mesh."""
        __tracebackhide__ = True
        views: list[Any] = []
        if header.name is not None or self.meshes.by_name:
            mesh, actors = self.addressed(header.name)
            if mesh is None:
                raise HeaderError(f"--dry-run: expected a mesh of ranks, got a mesh of actors: {header.name}")
            views = choose(actors, header)
        self._attach_streams()
        dry_run(self.shell, views, header, *named(self.shell, cell))

    def run_program(self, words: list[str]) -> Any:
        """``%mesh run``: run a torchrun script on the ranks of a mesh."""
        __tracebackhide__ = True
        program = parse_run(words)
        header = self.header(program.place)
        mesh, actors = self.addressed(header.name)
        if mesh is None:
            raise HeaderError(f"%mesh run --on {header.name}: expected a mesh of ranks, got a mesh of actors")
        views = choose(actors, header)
        self.stopping.await_finishing(mesh, set(ranks_in(views)))
        return self.cell(program.place, hand_out(program, actors, views))

    def run_pip(self, words: list[str]) -> Any:
        """``%mesh pip``: run pip once per host, in the environment of its ranks."""
        __tracebackhide__ = True
        if not words:
            raise HeaderError("%mesh pip needs a command, such as %mesh pip install einops")
        return self.cell("", f"%pip {shlex.join(words)}")

    def header(self, line: str) -> Header:
        """Parse the first line of a cell, with the defaults of the notebook."""
        return parse(line, header_defaults(self.meshes.settings))

    def _ranks_of(self, line: str) -> str:
        """Describe the ranks of a header, as in ``ranks 0-1 of trainers``."""
        header = self.header(line)
        mesh, actors = self.addressed(header.name)
        name = mesh.name if mesh is not None else header.name
        return f"{describe_ranks(ranks_in(choose(actors, header)), len(actors))} of {name}"

    def addressed(self, name: str | None) -> tuple[Mesh | None, ActorMesh]:
        """Return the mesh of a name and its namespaces; or None and the actors in the variable of that name."""
        actors = self.shell.user_ns.get(name) if name is not None else None
        if is_actor_mesh(actors) and name not in self.meshes.by_name:
            return None, actors
        mesh = self.meshes.get(name, self.actor_names)
        return mesh, mesh.cells

    def commands(self) -> list[str]:
        """Return the commands of ``%mesh``."""
        return self._commands.names()

    def actor_names(self) -> list[str]:
        """Return the notebook variables that hold actors."""
        names = [name for name, value in list(self.shell.user_ns.items()) if is_actor_mesh(value)]
        return sorted(name for name in names if not name.startswith("_"))

    def calls_of(self, cell: str) -> list[Any]:
        """Return the unanswered calls of actors' endpoints that a notebook cell made."""
        if self._streams is None:
            return []
        return self._streams.calls.of_cell(self._streams.waits.calls_of(cell))

    def ops_of(self, cell: str) -> list[Any]:
        """Return the unanswered calls with ops on tensors that a notebook cell made."""
        made = self._streams.waits.calls_of(cell) if self._streams is not None else []
        return [call for call in made if self._streams is not None and self._streams.calls.runs_ops(call)]

    def unended(self) -> list[str]:
        """Describe the calls that still run though no notebook cell waits for them."""
        return unended_lines(self._streams.calls) if self._streams is not None else []

    def streams(self) -> Streams:
        """Return the streams that show the output of ranks."""
        return self._attach_streams()

    def wipe(self) -> None:
        """Erase an unfinished line of the running cell."""
        if self._streams is not None:
            self._streams.wipe()

    def close(self) -> None:
        """Stop watching the cells of the notebook."""
        set_debugger(self.shell, None)
        self.editor.close()
        self._transfers.pushed.close()
        self.auto.close()
        self.keeping.close()
        self.shown.close()
        self.shell.events.unregister("pre_run_cell", self._cell_begins)
        self.shell.events.unregister("post_run_cell", self._cell_ended)
        on_opened.remove(self._session_opened)
        self.shell.input_transformers_post.remove(self._assigned.look)
        self._subscripts_end()
        self._assigned.close()
        self._imports.close()

    def _importing(self, module: Importing) -> None:
        if self._streams is not None:
            self._streams.waits.importing(module)

    def _cell_begins(self, _: Any) -> None:
        # Calls that the code of the cell makes have its number in the events of their meshes.
        calling.set(("", self.shell.displayhook.prompt_count))
        self._failed.cell_begins()
        if self._streams is not None:
            self._streams.waits.begin()

    def _cell_ended(self, _: Any) -> None:
        """Show the end of a cell's output, if it was too long to show in full."""
        emptied = ""
        if self._streams is not None:
            self._failed.cell_ended()
            emptied = self._streams.waits.end()
            self._streams.finish()
        self.shown.cell_ended()
        self.views.cell_ended(emptied)

    def _session_opened(self, _: object) -> None:
        self._attach_streams()

    def _kernel_ends(self, seconds: float) -> bool:
        """Wait for the end of the kernel, and return whether front ends end it."""
        kernel = own_kernel(kernel_of(self.shell))
        return kernel is not None and kernel.ending.wait(seconds)

    def _attach_streams(self) -> Streams:
        node = open_node()
        if self._streams is None or need_session(node).output.on_blocks != self._streams.take:
            self._streams = Streams(node, kernel_of(self.shell))
            self._streams.waits.begin()
            self._streams.attach(need_session(node).output)
            node.events.tensors_failed.subscribe(self._failed.failed)
            self._announcing.attach()
        return self._streams


def _check_process() -> None:
    if is_fork():
        raise HeaderError("%mesh and %%mesh work in the process of the kernel only, and this one is a fork of it")


explain(MeshMagics.line, MeshMagics.cell)
