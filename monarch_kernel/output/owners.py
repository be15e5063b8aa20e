"""The cells that calls belong to: their output goes there, also some that comes after the call has ended."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from monarch_kernel.output.late import id_of

_ENDED = 1_000
"""Ended calls whose cells are known."""


class Owners:
    """The requests of cells by the ports of their calls, without their code. Single operations, by any thread."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}
        self._ended: OrderedDict[int, Any] = OrderedDict()
        self._newest: Any = None
        """The newest request; calls of one cell share it."""

    def opened(self, port: int, request: Any) -> None:
        """Record the cell of a new call."""
        newest = self._newest
        if newest is None or id_of(newest) != id_of(request):
            newest = self._newest = without_code(request)
        self._open[port] = newest

    def closed(self, port: int) -> None:
        """Record the end of a call."""
        request = self._open.pop(port, None)
        if request is not None:
            self._ended[port] = request
            if len(self._ended) > _ENDED:
                self._ended.popitem(last=False)

    def get(self, port: int) -> Any:
        """Return the request of the cell of a call; None if unknown."""
        return self._open.get(port) or self._ended.get(port)

    def open_ports(self, cell: str) -> list[int]:
        """Return the calls of a cell that have not ended, by its message id."""
        return [port for port, request in list(self._open.items()) if id_of(request) == cell]


def without_code(request: Any) -> Any:
    """Return a request for as much as messages to its cell need: a cell may have any size."""
    if not request:
        return request
    content = {key: value for key, value in request.get("content", {}).items() if key == "allow_stdin"}
    return {"header": request["header"], "metadata": request.get("metadata", {}), "content": content}
