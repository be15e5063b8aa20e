"""The prompt of a plain cell that waits for an endpoint, in which a rank has stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from monarch._kernel_api import frame_of, in_thread, open_node, split_proc, state_of
from monarch_kernel.compat import can_ask
from monarch_kernel.debug.prompt import ELSEWHERE, Prompt
from monarch_kernel.kernel_like import kernel_of, own_kernel
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.output.late import id_of
from monarch_kernel.output.streams import Streams

_ADVICE = "inspect it with %mesh where or print, run a line with %mesh next or step, resume with %mesh continue"
_DEPTH = 12
"""Frames from a wait of the notebook to the code that receives."""


class EndpointPrompt:
    """Asks in a thread of its own, since that of the notebook waits in code of the user.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
        prompt: asks.
        streams: returns the streams of the notebook.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes, prompt: Prompt, streams: Callable[[], Streams]) -> None:
        self._shell = shell
        self._meshes = meshes
        self._prompt = prompt
        self._streams = streams

    def ask(self, uid: str) -> str:
        """Ask what stopped ranks should do if the running cell waits for their mesh; return a message otherwise."""
        kernel = own_kernel(kernel_of(self._shell))
        parent = kernel.running if kernel is not None else None
        found = [each for each in list(self._meshes.by_name.values()) if state_of(each.procs).procs.uid == uid]
        if kernel is None or parent is None:
            return _ADVICE
        if not found or not can_ask(kernel, parent) or not _waits():
            return ELSEWHERE
        calls = self._streams().waits.calls_of(id_of(parent))
        if not any(split_proc(peer.proc)[0] == uid for call in calls for peer in call.waits_for()):
            return ELSEWHERE
        context = kernel.context.copy()
        beside = partial(self._prompt.beside, found[0], lambda: kernel.running is not parent)
        in_thread(open_node(), "prompt", lambda: context.run(beside))
        return ""


def _waits() -> bool:
    """Return whether the thread of the notebook waits for messages, or for a thread that does: it reads no answers."""
    frame = frame_of(threading.main_thread().ident or 0)
    for depth in range(_DEPTH):
        if frame is None:
            return False
        name = frame.f_globals.get("__name__", "")
        # An event loop in which the cell awaits the call.
        if name.startswith("monarch._wire.receiving") or (not depth and name in ("selectors", "asyncio.base_events")):
            return True
        frame = frame.f_back
    return False
