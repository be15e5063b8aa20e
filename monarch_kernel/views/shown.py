"""Meshes as results of cells: a live widget, and below it a snapshot that a saved notebook keeps."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

from monarch._kernel_api import ProcMesh, open_node
from monarch.exceptions import MonarchError
from monarch_kernel.compat import display, publish
from monarch_kernel.kernel_like import kernel_of
from monarch_kernel.output.frontend import has_cells
from monarch_kernel.views.current import set_views
from monarch_kernel.views.feed import StateSource
from monarch_kernel.views.model import snapshot
from monarch_kernel.views.parts import narrowed, part_of
from monarch_kernel.views.picture import bundle_of, text_of
from monarch_kernel.views.protocol import Snapshot
from monarch_kernel.views.summary import title_text
from monarch_kernel.views.views import Views

EVERY_S = 5.0
"""Least seconds between two updates of a snapshot."""
MOST = 16
"""Snapshots that are updated, the newest; of one cell, the last."""
MOST_CLIENTS = 4
"""Clients that have a widget of a mesh, the newest: each page that opens the notebook is another one."""
_VIEW = "application/vnd.jupyter.widget-view+json"


def state_of_source(source: StateSource) -> Snapshot:
    """Return the state of a mesh as views show it."""
    return source.read(lambda model: snapshot(model, source.uid, [], time.time())[0])


class ShownPart(NamedTuple):
    """The part of a mesh that a view shows."""

    source: StateSource
    ranks: tuple[int, ...]
    """None for all."""
    sizes: dict[str, int]

    def state(self) -> Snapshot:
        """Return its state."""
        return narrowed(state_of_source(self.source), self.ranks, self.sizes)


class Picture:
    """A snapshot of a mesh in the output of a cell. Guarded by the lock of ``ShownMeshes``."""

    def __init__(self, part: ShownPart, name: str, parent: Any) -> None:
        self.part = part
        self.name = name
        """Display id."""
        self.parent = parent
        self.hint = ""
        """A line below it."""
        self.live = ""
        """Its CSS class, by which the widget hides it."""
        self.bundle: dict[str, str] = {}
        self.due = 0.0
        """When it may be updated, on the monotonic clock."""
        self.waits = False
        """Whether an update is scheduled."""
        self.unsubscribe: Callable[[], None] = lambda: None


class ShownMeshes:
    """The meshes that cells have shown.

    Args:
        shell: the shell of the notebook.
        views: the views of the notebook.
    """

    def __init__(self, shell: Any, views: Views) -> None:
        self._shell = shell
        self.views = views
        self._kernel = kernel_of(shell)
        self._widgets: dict[tuple[str, tuple[int, ...], str], Any] = {}
        """By mesh, ranks and client, the widget, which all cells that show it share. Notebook's thread only.

        VS Code knows no widgets from before it was opened, so each client has its own.
        """
        self._lock = Lock()
        self._pictures: OrderedDict[str, Picture] = OrderedDict()
        """By cell. Guarded by ``_lock``."""

    def show(self, procs: ProcMesh) -> None:
        """Show a mesh in the running cell: live, and as a snapshot."""
        try:
            part = ShownPart(self.views.show(procs), tuple(part_of(procs)), dict(procs.sizes))
        except MonarchError as error:
            display({"text/plain": f"{procs!r}\n{error}"})
            return
        state = part.state()
        if self._kernel is None:
            print(text_of(state))
            return
        parent = self._kernel.get_parent("shell")
        view, hint, live = self._view(procs, part, parent)
        if not has_cells(parent):
            # A program or a terminal takes one of the forms.
            display({**view, **bundle_of(state, hint)})
            return
        if view:
            display({**view, "text/plain": f"live view of {title_text(state.mesh)}"})
        picture = Picture(part, secrets.token_hex(8), parent)
        picture.hint, picture.live = hint, live
        picture.bundle = bundle_of(state, hint, picture.name, live)
        display(picture.bundle, picture.name)
        self._follow(parent["metadata"]["cellId"], picture)

    def _view(self, procs: ProcMesh, part: ShownPart, parent: Any) -> tuple[dict[str, Any], str, str]:
        """Return the part of a bundle that shows the widget, what is missing for it, and the class that it hides."""
        from monarch_kernel.views.widget import HINT, MeshView, is_built

        if not is_built():
            return {}, HINT, ""
        key = part.source.uid, part.ranks, str(parent["header"]["session"])
        widget = self._widgets.get(key)
        if widget is None or widget.comm is None:
            widget = self._widgets[key] = MeshView(procs, self.views)
            same = [each for each in self._widgets if each[:2] == key[:2]]
            for each in same[:-MOST_CLIENTS]:
                self._widgets.pop(each).close()
        bundle = {_VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}
        return bundle, "", str(widget.picture)

    # Pictures

    def _follow(self, cell: str, picture: Picture) -> None:
        picture.due = time.monotonic() + EVERY_S
        picture.unsubscribe = picture.part.source.subscribe(lambda: self._changed(picture))
        with self._lock:
            old = [self._pictures.pop(cell, None)]
            self._pictures[cell] = picture
            if len(self._pictures) > MOST:
                old.append(self._pictures.popitem(last=False)[1])
        for each in old:
            if each is not None:
                each.unsubscribe()

    def _changed(self, picture: Picture) -> None:
        """Update a snapshot when it is time; called in a thread of the mesh's events."""
        with self._lock:
            wait = max(0.0, picture.due - time.monotonic())
            if picture.waits:
                return
            picture.waits = True
        # Not from the receiving thread: making a picture takes a while.
        node = open_node()
        node.receive_loop.call_later(wait, lambda: node.lanes.post("pictures", lambda: self._update(picture)))

    def cell_ended(self) -> None:
        """Bring all snapshots up to date."""
        with self._lock:
            pictures = list(self._pictures.values())
        for each in pictures:
            self._update(each)

    def _update(self, picture: Picture) -> None:
        with self._lock:
            picture.waits, picture.due = False, time.monotonic() + EVERY_S
        bundle = bundle_of(picture.part.state(), picture.hint, picture.name, picture.live)
        with self._lock:
            if bundle == picture.bundle:
                return
            picture.bundle = bundle
        if self._kernel is not None:
            content = {"data": bundle, "metadata": {}, "transient": {"display_id": picture.name}}
            publish(self._kernel, "update_display_data", content, picture.parent)

    def close(self) -> None:
        """Follow nothing more."""
        with self._lock:
            pictures = list(self._pictures.values())
            self._pictures.clear()
        for each in pictures:
            each.unsubscribe()
        for widget in self._widgets.values():
            widget.close()
        self._widgets.clear()


def install(shell: Any, shown: ShownMeshes) -> None:
    """Show a mesh that is the last expression of a cell, or that is displayed."""
    shell.display_formatter.ipython_display_formatter.for_type(ProcMesh, shown.show)
    set_views(shell, shown.views)


def uninstall(shell: Any) -> None:
    """Undo ``install``."""
    shell.display_formatter.ipython_display_formatter.pop(ProcMesh, None)
    set_views(shell, None)
