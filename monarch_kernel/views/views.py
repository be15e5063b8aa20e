"""The live views of a notebook: what conversations of widgets and of the Meshes panel use of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from monarch._kernel_api import ActorMesh, ProcMesh, describe_ranks, is_actor_mesh, state_of, telemetry_of
from monarch.exceptions import MonarchError
from monarch_kernel.commands.config import header_defaults
from monarch_kernel.commands.interrupt import Interrupting
from monarch_kernel.commands.kill import Killing
from monarch_kernel.compat import pass_cells, publish, watch_output
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.header import parse as parse_header
from monarch_kernel.grammar.line_words import without_comment
from monarch_kernel.grammar.short_forms import asks_for_help
from monarch_kernel.grammar.spawn import parse_spawn
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.kernel_like import Kernel
from monarch_kernel.meshes.choosing import choose, ranks_in
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.output.log import OutputLog
from monarch_kernel.output.streams import Streams
from monarch_kernel.views.actions import OFFERED, Actions
from monarch_kernel.views.conversation import Conversation
from monarch_kernel.views.details import Pins
from monarch_kernel.views.feed import Feeds, StateSource
from monarch_kernel.views.lane import Handler, Lane
from monarch_kernel.views.listing import MeshListing
from monarch_kernel.views.others import Others
from monarch_kernel.views.outlet import Outlet, Speaker
from monarch_kernel.views.outputs import CellRecords
from monarch_kernel.views.protocol import TARGET, Action, CellOutputs, CellTarget, PromptOver

WIDGETS = "jupyter.widget.control"
"""The target of comms by which a page asks for the widgets of a kernel when it opens."""


def _open_widgets(comm: Any, message: Any) -> None:
    """Answer a page before the notebook has shown a widget; otherwise a running cell would show that nobody does."""
    # The import takes this function's place.
    import_module("ipywidgets.widgets.widget").Widget.handle_control_comm_opened(comm, message)


class Views:
    """The views of a notebook.

    Args:
        meshes: the meshes of the notebook.
        streams: returns the streams that show the output of ranks.
        killing: the command that kills ranks.
        interrupting: the command that interrupts them.
    """

    def __init__(
        self, meshes: NotebookMeshes, streams: Callable[[], Streams], killing: Killing, interrupting: Interrupting
    ) -> None:
        self._meshes = meshes
        self._streams = streams
        self.feeds = Feeds()
        self.pins = Pins(self.log, self.feeds.heard)
        self.actions = Actions(killing, interrupting, lambda text: streams().place().write(text))
        self._others = Others()
        self._listing = MeshListing(meshes, self._others)
        self._records = CellRecords()
        self.kernel: Kernel | None = None
        """ipykernel's kernel; None in a terminal. Set once, by the kernel's start, like the next."""
        self.lane: Lane | None = None
        self._shown: dict[str, StateSource] = {}
        """By uid, the meshes that a widget shows, besides those of the notebook. Single operations."""

    # The kernel

    def install(self, kernel: Kernel, lane: Lane | None) -> None:
        """Take messages of panels, and record the output of cells.

        Args:
            kernel: ipykernel's kernel.
            lane: the way around the running cell; None in kernels that have none.
        """
        self.kernel, self.lane = kernel, lane
        watch_output(kernel, self._records.take)
        if lane is not None:
            lane.targets[TARGET] = lambda comm: self._opened(kernel, lane, comm)

        def opened(comm: Any, _: Any) -> None:
            self._opened_by(kernel, comm)

        kernel.comm_manager.register_target(TARGET, opened)
        if WIDGETS not in kernel.comm_manager.targets:
            kernel.comm_manager.register_target(WIDGETS, _open_widgets)

    def _opened(self, kernel: Kernel, lane: Lane, comm: str) -> Handler:
        conversation = Conversation(self, Outlet(kernel, comm))

        def take(request: Any) -> None:
            if request["header"]["msg_type"] == "comm_msg":
                conversation.take(request["content"]["data"])
            else:
                lane.comms.pop(comm, None)
                conversation.close()

        return take

    def _opened_by(self, kernel: Kernel, comm: Any) -> None:
        """Take a comm that came on the usual way, in kernels of others."""
        conversation = Conversation(self, Outlet(kernel, comm.comm_id))

        def take(message: Any) -> None:
            conversation.take(message["content"]["data"])

        pass_cells(comm)
        comm.on_msg(take)
        # The comm package has no types.
        comm.on_close(lambda _: conversation.close())  # pyright: ignore[reportUnknownLambdaType]

    def cell_ended(self, emptied: str = "") -> None:
        """Read what the cell has changed.

        Args:
            emptied: id of a display of the cell that is empty; if the cell has shown nothing else, it is cleared.
        """
        self._listing.changed()
        if emptied and self.kernel is not None:
            # Printed text is sent later.
            sys.stdout.flush()
            sys.stderr.flush()
            request = self.kernel.get_parent("shell")
            if self._records.is_only(request["header"]["msg_id"], emptied):
                publish(self.kernel, "clear_output", {"wait": False}, request)

    def close_prompt(self, request: str, question: str) -> bool:
        """Let pages remove the input box of a question that is over; return whether there are any that do.

        Args:
            request: id of the message that runs the cell.
            question: id of the message that asked.
        """
        return self._listing.tell(PromptOver(request, question))

    # For conversations

    def hears_at_once(self) -> bool:
        """Return whether messages of pages pass the running cell; called by the thread that handles one."""
        beside = threading.current_thread() is not threading.main_thread()
        return self.lane is not None or (self.kernel is not None and beside)

    def show(self, procs: ProcMesh) -> StateSource:
        """Return the events of a mesh, which can be opened by its uid from now on."""
        source = telemetry_of(procs)
        self._shown[source.uid] = source
        return source

    def forget(self, uid: str) -> None:
        """Undo ``show``: no widget shows the mesh."""
        self._shown.pop(uid, None)

    def source_of(self, uid: str) -> StateSource | None:
        """Return the events of a mesh of this kernel, or the copy of one of another kernel."""
        mesh = self.mesh_of(uid)
        if mesh is None:
            return self._shown.get(uid) or self._others.copy_of(uid)
        try:
            return telemetry_of(mesh.procs)
        except MonarchError:
            return None

    def mesh_of(self, uid: str) -> Mesh | None:
        """Return a mesh of the notebook that runs."""
        meshes = list(self._meshes.by_name.values())
        return next((mesh for mesh in meshes if state_of(mesh.procs).procs.uid == uid), None)

    def offered(self, uid: str) -> list[Action]:
        """Return the actions for a mesh: a program's own mesh has none."""
        return list(OFFERED) if self.mesh_of(uid) is not None else []

    def log(self) -> OutputLog:
        """Return the output of ranks."""
        return self._streams().log

    def target_of(self, cell: str, line: str) -> CellTarget:
        """Return the ranks that a cell with this first line addresses."""
        words = without_comment(line.strip().removeprefix("%%mesh"))
        running = dict(self._meshes.by_name)
        if not running:
            return CellTarget(cell, "", "")
        if asks_for_help(words.split()):
            return CellTarget(cell, "", "")
        try:
            order = parse_spawn(words)
            header = parse_header(order.place) if order else parse_header(words, header_defaults(self._meshes.settings))
            name = header.name or self._meshes.used or ""
            actors = running[name].cells if name in running else self._actors(name)
            if actors is None:
                guess = did_you_mean(name, running)
                return CellTarget(cell, "", "", f"no mesh named {name!r}; running: {', '.join(running)}{guess}")
            ranks = ranks_in(choose(actors, header))
        except (HeaderError, MonarchError) as error:
            return CellTarget(cell, "", "", str(error))
        every = len(ranks) == len(actors)
        text = describe_ranks(sorted(ranks)).removeprefix("ranks ").removeprefix("rank ")
        return CellTarget(cell, name, "all" if every else text)

    def _actors(self, name: str) -> ActorMesh | None:
        """Return the actors in the notebook's variable of a name, in which a cell may run too."""
        found: Any = self.kernel.shell.user_ns.get(name) if self.kernel is not None else None
        return found if is_actor_mesh(found) else None

    def outputs(self, request: str) -> list[CellOutputs]:
        """Return the output of the last cells, or of the one that a message runs."""
        return self._records.read(request)

    def list_to(self, speaker: Speaker) -> None:
        """Tell a panel which meshes there are, now and at each change."""
        self._listing.open(speaker)

    def leave(self, speaker: Speaker) -> None:
        """Tell a panel nothing more."""
        self._listing.close(speaker)
