"""The messages of one view: of the comm of a widget, which shows one mesh, or of the comm of the Meshes panel."""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.output.log import OutputLog
from monarch_kernel.views.actions import Actions
from monarch_kernel.views.details import Pinned, Pins, log_line
from monarch_kernel.views.feed import SILENT_S, Feeds, StateSource
from monarch_kernel.views.outlet import Speaker
from monarch_kernel.views.protocol import (
    VERSION,
    Act,
    Action,
    Alive,
    CellOutputs,
    CellTarget,
    Close,
    Done,
    FromView,
    Gone,
    Heard,
    ListMeshes,
    Logs,
    Open,
    Outputs,
    Pin,
    ReadLogs,
    ReadOutputs,
    ReadTargets,
    Taken,
    Targets,
)

MOST_LINES = 10_000
"""Lines of output in one answer."""


class NotebookParts(Protocol):
    """The parts of a notebook that conversations use."""

    feeds: Feeds
    pins: Pins

    @property
    def actions(self) -> Actions:
        """Runs the actions of views."""
        ...

    def hears_at_once(self) -> bool:
        """Return whether messages of pages, such as this one, pass the running cell."""
        ...

    def source_of(self, uid: str) -> StateSource | None:
        """Return the events of a mesh of this kernel, or the copy of one of another kernel."""
        ...

    def mesh_of(self, uid: str) -> Mesh | None:
        """Return a mesh of the notebook that runs."""
        ...

    def offered(self, uid: str) -> list[Action]:
        """Return the actions for a mesh."""
        ...

    def log(self) -> OutputLog:
        """Return the output of ranks."""
        ...

    def target_of(self, cell: str, line: str) -> CellTarget:
        """Return the ranks that a cell with this first line addresses."""
        ...

    def outputs(self, request: str, /) -> list[CellOutputs]:
        """Return the output of the cells that run."""
        ...

    def list_to(self, speaker: Speaker) -> None:
        """Tell a panel which meshes there are, now and at each change."""
        ...

    def leave(self, speaker: Speaker) -> None:
        """Tell a panel nothing more."""
        ...


class Conversation:
    """One view.

    Args:
        place: the notebook.
        speaker: answers go there.
        uid: the mesh of a widget; empty for a panel, whose messages name their mesh.
    """

    def __init__(self, place: NotebookParts, speaker: Speaker, uid: str = "") -> None:
        self._place = place
        self._speaker = speaker
        self._uid = uid
        self._heard: dict[tuple[str, str], float] = {}
        """By mesh and view, when it was last heard, on the monotonic clock. Single operations."""

    def take(self, data: Any) -> None:
        """Handle a message, as JSON; one that cannot be understood is answered too. Does not wait."""
        try:
            message = msgspec.convert(data, FromView)
        except msgspec.ValidationError as error:
            self._speaker.tell(Gone(self._uid, f"the kernel cannot read a message; reload this page: {error}"))
            return
        self.handle(message)

    def handle(self, message: FromView) -> None:
        """Handle a message."""
        match message:
            case Open(version=version, view=view):
                self._note(self._of(message.uid), view)
                self._open(self._of(message.uid), version)
            case Alive(view=view):
                self._alive(self._of(message.uid), view)
            case Close(view=view):
                self._close(self._of(message.uid), view)
            case Pin():
                self._pin(message)
            case Act():
                self._act(message)
            case ReadLogs():
                self._read_logs(message)
            case ReadTargets(cells=cells, lines=lines):
                pairs = zip(cells, lines, strict=False)
                self._speaker.tell(Targets([self._place.target_of(cell, line) for cell, line in pairs]))
            case ListMeshes():
                self._place.list_to(self._speaker)
            case ReadOutputs(request=request):
                self._speaker.tell(Outputs(self._place.outputs(request)))

    def close(self) -> None:
        """End it: the comm is closed."""
        self._place.feeds.close_all(self._speaker)
        self._place.pins.unpin_all(self._speaker.comm)
        self._place.leave(self._speaker)

    def _of(self, uid: str) -> str:
        return uid or self._uid

    def _open(self, uid: str, version: int = VERSION) -> None:
        source = self._place.source_of(uid)
        if version != VERSION:
            text = f"this page uses version {version} of the protocol, the kernel version {VERSION}; reload the page"
            self._speaker.tell(Gone(uid, text))
        elif source is None:
            self._speaker.tell(Gone(uid, "this kernel does not have the mesh; it may have been stopped"))
        else:
            self._place.feeds.open(source, self._speaker, self._place.offered(uid))
            self._say_heard(uid)

    def _say_heard(self, uid: str) -> None:
        """Let a view know that it is heard, if the next answer comes as soon, also while a cell runs."""
        if self._place.hears_at_once():
            self._speaker.tell(Heard(uid))

    def _note(self, uid: str, view: str) -> None:
        self._heard[uid, view] = time.monotonic()

    def _close(self, uid: str, view: str) -> None:
        """End a view, and the patches of its mesh with the last one."""
        self._place.pins.unpin(self._speaker.comm, view)
        since = time.monotonic() - SILENT_S
        ended = [key for key, at in list(self._heard.items()) if key == (uid, view) or at < since]
        for key in ended:
            self._heard.pop(key, None)
        if not any(mesh == uid for mesh, _ in list(self._heard)):
            self._place.feeds.close(uid, self._speaker)

    def _alive(self, uid: str, view: str) -> None:
        self._note(uid, view)
        if not self._place.feeds.heard(uid, self._speaker):
            self._open(uid)
        else:
            self._say_heard(uid)

    def _pin(self, message: Pin) -> None:
        uid = self._of(message.uid)
        mesh = self._place.mesh_of(uid)
        if mesh is not None and 0 <= message.rank < len(mesh.procs):
            self._alive(uid, message.view)
            self._place.pins.pin(Pinned(mesh, message.rank, message.norms, self._speaker, message.view))
        else:
            self._place.pins.unpin(self._speaker.comm, message.view)

    def _act(self, message: Act) -> None:
        self._speaker.tell(Taken(message.id))
        mesh = self._place.mesh_of(self._of(message.uid))
        if mesh is None:
            text = "the mesh is not running in this notebook; it may have been stopped"
            self._speaker.tell(Done(message.id, False, text))
        else:
            self._place.actions.run(mesh, message, self._speaker.tell)

    def _read_logs(self, message: ReadLogs) -> None:
        uid, ranks, text = self._of(message.uid), set(message.ranks), message.text.casefold()
        lines, more = self._place.log().newest(
            lambda line: (
                line.mesh in (uid, "")
                and (not ranks or not ranks.isdisjoint(line.ranks))
                and message.stream in ("", line.stream)
                and text in line.text.casefold()
            ),
            max(0, min(message.most, MOST_LINES)),
        )
        self._speaker.tell(Logs(uid, [log_line(line) for line in lines], more))
