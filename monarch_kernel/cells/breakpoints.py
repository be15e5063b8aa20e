"""Breakpoints in cells that run on ranks, where the notebook's debugger does not see them."""

from __future__ import annotations

import re
from typing import Any

_ON_RANKS = re.compile(r"\s*(?:%%\w.*\n\s*)*%%mesh\b")
"""The beginning of a cell that runs on ranks, perhaps below other magics."""
_REASON = "this cell runs on ranks, where the debugger cannot pause; print values, or copy them with %mesh pull NAME"


class Breakpoints:
    """The cells on ranks that a front end has announced to the debugger."""

    def __init__(self) -> None:
        # Leader only: the thread of the control channel.
        self._paths: set[str] = set()

    def dumped(self, request: dict[str, Any], reply: Any) -> None:
        """Record the file of a cell that runs on ranks, after the reply to ``dumpCell``."""
        if request.get("command") == "dumpCell" and _ON_RANKS.match(request["arguments"]["code"]):
            self._paths.add(reply["body"]["sourcePath"])

    def refused(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply to ``setBreakpoints`` in such a cell, with the reason; None for other requests."""
        if request.get("command") != "setBreakpoints":
            return None
        arguments: dict[str, Any] = request["arguments"]
        if arguments["source"].get("path") not in self._paths:
            return None
        wanted: list[dict[str, Any]] = arguments.get("breakpoints") or []
        points = [{"verified": False, "line": each["line"], "message": _REASON} for each in wanted]
        return {
            "seq": request.get("seq", 0),
            "type": "response",
            "request_seq": request.get("seq", 0),
            "success": True,
            "command": "setBreakpoints",
            "body": {"breakpoints": points},
        }
