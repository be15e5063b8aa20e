"""``MeshView``: the live view of a mesh as a widget, in every front end that shows widgets."""

from __future__ import annotations

import functools
import json
import secrets
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from monarch._kernel_api import ProcMesh, is_gather, meshes_of, open_node, split_proc, state_of
from monarch_kernel.calls.running import RunningCalls
from monarch_kernel.cells.stopping import Stopping
from monarch_kernel.commands.interrupt import Interrupting
from monarch_kernel.commands.kill import Killing
from monarch_kernel.compat import pass_cells
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.output.streams import Streams
from monarch_kernel.views.ahead import Ahead, state_text
from monarch_kernel.views.conversation import Conversation
from monarch_kernel.views.current import views_of
from monarch_kernel.views.lane import Lane
from monarch_kernel.views.outlet import Outlet, Speaker, WidgetOutlet
from monarch_kernel.views.parts import part_of
from monarch_kernel.views.views import Views

BUNDLE = Path(__file__).parent / "static" / "meshview.js"
"""Built from ``labextension/``."""
HINT = "live views are not built in this installation: run `python labextension/builder.py` in the source tree"


def is_built() -> bool:
    """Return whether the front end of live views is there."""
    return BUNDLE.is_file()


def _module() -> str:
    """Return the front end, or one that says what is missing."""
    if is_built():
        return BUNDLE.read_text(encoding="utf-8")
    return f"export default {{ render({{ el }}) {{ el.textContent = {json.dumps(HINT)}; }} }};"


class MeshView(anywidget.AnyWidget):
    """The ranks of a mesh, live: state, load, metrics, timeline; buttons act on them.

    Args:
        mesh: the processes of a mesh, such as the variable of ``%mesh up``, or a slice of it.
        views: the views of the notebook; if omitted, those of the running IPython shell, or of this program in a
            notebook without IPython, such as marimo.
    """

    _esm = ""
    uid: Any = traitlets.Unicode("").tag(sync=True)
    """Of the mesh."""
    ranks: Any = traitlets.List(traitlets.Int()).tag(sync=True)
    """The ranks that it shows; none for all."""
    picture: Any = traitlets.Unicode("").tag(sync=True)
    """CSS class of its static pictures, which its live view hides."""
    state: Any = traitlets.Unicode("").tag(sync=True)
    """The state of the mesh as JSON, until a page is heard; only where messages of pages wait for the running cell."""

    def __init__(self, mesh: ProcMesh, views: Views | None = None) -> None:
        self._views = views or _views_here()
        source = self._views.show(mesh)
        # Each instance sends the module, which may be built after this file was imported.
        self._esm = _module()
        waits = self._views.kernel is None
        state = state_text(source) if waits else ""
        super().__init__(
            uid=source.uid, ranks=part_of(mesh), picture=f"monarch-live-{secrets.token_hex(6)}", state=state
        )
        self._lane: Lane | None = self._views.lane
        self._speaker: Speaker = self._outlet()
        self._conversation = Conversation(self._views, self._speaker, source.uid)
        if self._lane is not None:
            self._lane.widgets[self._speaker.comm] = self._take
        elif self._views.kernel is not None:
            pass_cells(self.comm)
        if waits and (note := _note_of_others(mesh)):
            print(note)
        self._ahead = Ahead(self, self._views.feeds, source) if waits else None
        # ipywidgets has no types.
        self.on_msg(self._on_custom)  # pyright: ignore[reportUnknownMemberType]

    def _on_custom(self, _widget: Any, content: Any, _buffers: Any) -> None:
        self._end_ahead()
        self._conversation.take(content)

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.end()
            self._ahead = None

    def _outlet(self) -> Speaker:
        kernel = self._views.kernel
        return Outlet(kernel, str(self.model_id), True) if kernel is not None else WidgetOutlet(self)

    def _take(self, request: Any) -> None:
        """Take a message around the running cell."""
        self._conversation.take(request["content"]["data"]["content"])

    def close(self) -> None:
        """End the view: its displays become empty."""
        if self.comm is not None:
            if self._lane is not None:
                self._lane.widgets.pop(self._speaker.comm, None)
            self._conversation.close()
            self._end_ahead()
        super().close()


def _views_here() -> Views:
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is None:
        return _views_of_program()
    views = views_of(shell)
    if views is None:
        raise RuntimeError("MeshView needs the Monarch kernel, or %load_ext monarch_kernel")
    return views


@functools.cache
def _views_of_program() -> Views:
    """Return the views of a program without IPython."""
    meshes = NotebookMeshes({})
    streams = functools.cache(lambda: Streams(open_node(), None))
    stopping = Stopping(meshes, streams)
    interrupting = Interrupting(meshes, stopping)
    open_node().events.interrupted.subscribe(lambda future: _stop(future, stopping))
    return Views(meshes, streams, Killing(meshes, lambda: streams().calls), interrupting)


def _note_of_others(mesh: ProcMesh) -> str:
    """Return a line about live meshes of the same name: a cell that starts a mesh again does not stop the old one."""
    node, mine = open_node(), state_of(mesh).procs
    live = {
        uid: sum(peer.dead is None for proc, peer in list(node.peers.known.items()) if split_proc(proc)[0] == uid)
        for uid in list(meshes_of(node).own_procs)
        if uid != mine.uid and node.names.get(uid) == node.names.get(mine.uid)
    }
    ranks = [count for count in live.values() if count]
    if not ranks:
        return ""
    others = "1 other mesh" if len(ranks) == 1 else f"{len(ranks)} other meshes"
    are = "is" if len(ranks) == 1 else "are"
    return (
        f"note: {others} named {node.names[mine.uid]!r} {are} still running ({sum(ranks)} ranks), perhaps because "
        f"its cell ran twice; stop a mesh with .stop().get() before you start it again, or all of them with "
        f"shutdown_context().get()"
    )


def _stop(future: Any, stopping: Stopping) -> None:
    """Stop a call whose wait was interrupted: nobody is left who could stop it."""
    if is_gather(future) and future.actor:
        print(stopping.stop_calls(RunningCalls("", [future]), False, print).text())
