"""Stacks of paused ranks, and the variables and expressions in their frames. Control thread only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from monarch._kernel_api import (
    Position,
    assign_in_frame,
    children_in_frame,
    collective_in,
    complete_in_frame,
    current_node,
    error_here,
    evaluate_in_frame,
    request,
    rich_in_frame,
    set_in_frame,
    share_in_frame,
    source_here,
    split_proc,
    where_here,
)
from monarch_kernel.dap.ids import FrameRef, Ids, ValueRef
from monarch_kernel.dap.protocol import Message, RequestError
from monarch_kernel.dap.rank_requests import ask, look
from monarch_kernel.dap.sources import Sources, source_of
from monarch_kernel.debug.spawned import title

_GONE = "the rank has resumed, so the requested value is no longer available"
_HERE = "locals", "globals"
_COLLECTIVE = "{} would wait for other ranks, which are running other code"


class FrameRequests:
    """Answers the requests of a front end about frames of ranks.

    Args:
        ids: the numbers of the session.
        sources: the names of cells.
        is_shown: tells whether a front end wants to see a variable of this name.
    """

    def __init__(self, ids: Ids, sources: Sources, is_shown: Callable[[str], bool]) -> None:
        self._ids = ids
        self._sources = sources
        self._is_shown = is_shown
        self.names_ranks = False
        """Whether frames name their rank, in a front end that shows one thread and does not say which."""

    async def stack(self, proc: str, arguments: Message) -> Message:
        """Answer ``stackTrace`` for a paused rank; one that runs has no frames."""
        position = Position.unpacked(await ask(proc, request(where_here)))
        frames = position.frames if position.state == "paused" else []
        first, most = arguments.get("startFrame") or 0, arguments.get("levels") or len(frames)
        shown: list[Message] = []
        for level, frame in list(enumerate(frames))[first : first + most]:
            path, line, name = self._sources.located(frame.file, frame.line)
            number = 0 if os.path.exists(path) else self._ids.add_source(proc, frame.file)
            at = self._ids.add_frame(FrameRef(proc, level))
            source = source_of(path, name, number)
            function = f"rank {split_proc(proc)[1]}: {frame.function}" if self.names_ranks else frame.function
            shown.append({"id": at, "name": function, "line": line, "column": 1, "source": source})
        return {"stackFrames": shown, "totalFrames": len(frames)}

    def scopes(self, arguments: Message) -> Message:
        """Answer ``scopes``."""
        frame = self.frame(arguments.get("frameId"))
        scopes: list[Message] = []
        for root in _HERE:
            number = self._ids.add_value(ValueRef(frame, root, 0, (), ""))
            hint = {"presentationHint": "locals"} if root == "locals" else {}
            scopes.append({"name": root.capitalize(), "variablesReference": number, "expensive": False, **hint})
        return {"scopes": scopes}

    async def variables(self, arguments: Message) -> Message:
        """Answer ``variables``: the variables of a frame, or the parts of a value."""
        value = self._ids.value(arguments.get("variablesReference"))
        if value is None:
            raise RequestError(_GONE)
        return {"variables": await self.children(value, arguments)}

    async def children(self, value: ValueRef, arguments: Message) -> list[Message]:
        """Return the variables of a frame, or the parts of a value, as a front end takes them."""
        start, most = arguments.get("start") or 0, arguments.get("count") or 0
        frame, root, key, path, _ = value
        kind = str(arguments.get("filter") or "")
        asked = request(children_in_frame, frame.level, root, key, list(path), start, most, kind)
        rows: list[Any] = await look(frame.proc, asked)
        return [self._variable(value, row) for row in rows if path or root == "kept" or self._is_shown(row[0])]

    async def evaluate(self, arguments: Message) -> Message:
        """Answer ``evaluate``."""
        frame = self.frame(arguments.get("frameId"))
        source, context = str(arguments["expression"]), str(arguments.get("context") or "repl")
        _check(source)
        shape: Message = arguments.get("format") or {}
        asked = request(evaluate_in_frame, frame.level, source, context, bool(shape.get("rawString")))
        row, key = await look(frame.proc, asked)
        return {"result": row[1], **self._described(frame, row, key, source)}

    async def set_variable(self, arguments: Message) -> Message:
        """Answer ``setVariable``."""
        whole = self._ids.value(arguments.get("variablesReference"))
        if whole is None:
            raise RequestError(_GONE)
        source, name = str(arguments["value"]), str(arguments["name"])
        _check(source)
        asked = request(set_in_frame, whole.frame.level, whole.root, whole.key, list(whole.path), name, source)
        row, key = await look(whole.frame.proc, asked)
        return {"value": row[1], **self._described(whole.frame, row, key, "")}

    async def set_expression(self, arguments: Message) -> Message:
        """Answer ``setExpression``."""
        frame = self.frame(arguments.get("frameId"))
        target, source = str(arguments["expression"]), str(arguments["value"])
        _check(source)
        row, key = await look(frame.proc, request(assign_in_frame, frame.level, target, source))
        return {"value": row[1], **self._described(frame, row, key, target)}

    async def completions(self, arguments: Message) -> Message:
        """Answer ``completions`` for the console of a front end."""
        frame = self.frame(arguments.get("frameId"))
        text = str(arguments.get("text") or "").split("\n")[(arguments.get("line") or 1) - 1]
        typed = text[: max(0, int(arguments.get("column") or 1) - 1)]
        found: list[str] = await look(frame.proc, request(complete_in_frame, frame.level, typed))
        return {"targets": [{"label": each.rpartition(".")[2], "text": each.rpartition(".")[2]} for each in found]}

    async def rich(self, frame: FrameRef, name: str) -> Message:
        """Answer ``richInspectVariables``: a variable as a cell would show it."""
        if not name.isidentifier():
            return {"data": {}, "metadata": {}}
        return {"data": await look(frame.proc, request(rich_in_frame, frame.level, name)), "metadata": {}}

    async def share(self, arguments: Message) -> None:
        """Answer ``copyToGlobals``: a local variable becomes one of the cells of the rank."""
        frame = self.frame(arguments.get("srcFrameId"))
        names = str(arguments["srcVariableName"]), str(arguments["dstVariableName"])
        if not all(name.isidentifier() for name in names):
            raise RequestError("srcVariableName and dstVariableName must be valid identifiers")
        await look(frame.proc, request(share_in_frame, frame.level, *names))

    async def error(self, proc: str) -> Message:
        """Answer ``exceptionInfo``."""
        found = await ask(proc, request(error_here))
        if found is None:
            raise RequestError("the rank is not stopped at an exception")
        kind, text, trace = found
        details = {"typeName": kind, "message": text, "stackTrace": trace}
        return {"exceptionId": kind, "description": text, "breakMode": "always", "details": details}

    async def source(self, number: object) -> Message:
        """Answer ``source`` for a file that only a rank can read."""
        known = self._ids.source(number)
        if known is None:
            raise RequestError("the source of this file is no longer available; pause the rank again")
        if current_node().peers.get(known[0]).dead is not None:
            raise RequestError(f"cannot show the source of this file: {title(known[0])} is dead")
        text: str = await ask(known[0], request(source_here, known[1]))
        if not text:
            raise RequestError(f"{title(known[0])} cannot read the source of {known[1]}")
        return {"content": text}

    def frame(self, number: object) -> FrameRef:
        """Return the frame of a number.

        Raises:
            Refused: the rank has continued since.
        """
        frame = self._ids.frame(number)
        if frame is None:
            raise RequestError(_GONE)
        return frame

    def _variable(self, whole: ValueRef, row: Any) -> Message:
        name, text, kind, _, _, step, suffix = row
        frame, root, key, path, above = whole
        expression = ""
        if suffix:
            expression = f"{above}{suffix}" if above or (not path and root != "kept") else ""
        number = 0
        if (row[3] or row[4]) and step is not None:
            number = self._ids.add_value(ValueRef(frame, root, key, (*path, tuple(step)), expression))
        counts = {"indexedVariables": row[3], "namedVariables": row[4]} if number else {}
        evaluated = {"evaluateName": expression} if expression else {}
        return {"name": name, "value": text, "type": kind, "variablesReference": number, **counts, **evaluated}

    def _described(self, frame: FrameRef, row: Any, key: int, expression: str) -> Message:
        whole = ValueRef(frame, "kept", key, (), f"({expression})" if expression else "")
        number = self._ids.add_value(whole) if key else 0
        counts = {"indexedVariables": row[3], "namedVariables": row[4]} if number else {}
        return {"type": row[2], "variablesReference": number, **counts}


def _check(source: str) -> None:
    """Refuse code that would wait for other ranks."""
    try:
        waiting = collective_in(source, "exec")
    except (SyntaxError, ValueError):
        # The rank says what is wrong with it.
        return
    if waiting:
        raise RequestError(_COLLECTIVE.format(waiting))
