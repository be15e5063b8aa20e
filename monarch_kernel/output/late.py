"""Output of background cells after the end of their cells, for front ends that drop it there, such as nbclient."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from monarch._kernel_api import Excerpt
from monarch_kernel.kernel_like import Kernel
from monarch_kernel.output.frontend import shows_late_output

_KEPT = 1 << 20
"""Characters kept of the beginning and of the end of one stream of a cell."""
_CELLS = 256
"""Most cells with such output."""


class LateOutput:
    """Keeps the late output of cells until another cell asks for their results.

    Args:
        kernel: the kernel of the notebook.
        running: the running cells, by message id; read only.
    """

    def __init__(self, kernel: Kernel | None, running: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._running = running
        # Guarded by _lock: the output of each cell by stream, and the cell that asked for it last.
        self._lock = Lock()
        self._kept: OrderedDict[str, dict[str, Excerpt]] = OrderedDict()
        self._asking: dict[str, Any] = {}

    def owner(self, parent: Any, text: str = "", stream: str = "") -> Any:
        """Return the request of the cell that shows output of a cell now; None if the text is kept instead."""
        cell = id_of(parent)
        if cell in self._running or shows_late_output(self._kernel, parent):
            return parent
        with self._lock:
            asking = self._asking.get(cell)
            if asking is not None and id_of(asking) in self._running:
                return asking
            if text:
                self._keep(cell, text, stream)
        return None

    def _keep(self, cell: str, text: str, stream: str) -> None:
        """Keep a text; the caller holds the lock."""
        kept = self._kept.setdefault(cell, {})
        kept.setdefault(stream, Excerpt(_KEPT, _KEPT)).add(text)
        if len(self._kept) > _CELLS:
            oldest, _ = self._kept.popitem(last=False)
            self._asking.pop(oldest, None)

    def ask(self, parent: Any, here: Any) -> list[tuple[str, str]]:
        """Return the kept output of a cell, each stream once; what comes next is shown where this is asked."""
        with self._lock:
            self._asking[id_of(parent)] = here
            kept = self._kept.pop(id_of(parent), {})
        return [(stream, "".join(each.pieces())) for stream, each in kept.items()]


def id_of(parent: Any) -> str:
    """Return the id of a request; empty for none."""
    request: dict[str, Any] = parent or {}
    return request.get("header", {}).get("msg_id", "")
