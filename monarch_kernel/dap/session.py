"""A debug session of a front end: its requests go to ipykernel's debugger for the notebook, and to ranks for ranks.

Ranks have the debugger of ``%mesh break`` (decision 0071). The numbers in a request tell where it belongs: those of
ranks, their frames and values are in a range of their own. All of this runs in the thread of the control channel, which
does not wait: ranks are asked, and other messages are handled until they have answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Any

from monarch._kernel_api import (
    current_node,
    forget_values_here,
    has_node,
    meshes_of,
    request,
    resume_here,
    state_of,
    stops,
)
from monarch_kernel.compat import spare_threads
from monarch_kernel.dap.breakpoints import Breakpoints
from monarch_kernel.dap.frames import FrameRequests
from monarch_kernel.dap.ids import FrameRef, Ids, ValueRef
from monarch_kernel.dap.protocol import EXTRA, FIRST, SHOW, Message, RequestError, arguments_of, failure, response
from monarch_kernel.dap.rank_requests import tell
from monarch_kernel.dap.running import STEPS, RankControl
from monarch_kernel.dap.sources import Sources
from monarch_kernel.dap.standing import StoppedRanks
from monarch_kernel.debug.front_end import FrontEnd
from monarch_kernel.debug.spawned import all_procs, extra, procs_of, title
from monarch_kernel.meshes.mesh import Mesh

Forward = Callable[[Message], Awaitable[Any]]
_NAMES = ("threadId", "frameId", "variablesReference", "srcFrameId")
_USERS = ("monarch-callbacks", "monarch-service", "monarch-expression")
"""Threads of this package that run code of the user."""


class DebugSession:
    """The debugger of the front end, beside ipykernel's.

    Args:
        magics: returns the magics of the notebook.
        debugger: ipykernel's debugger of the notebook.
        publish: sends an event to front ends.
    """

    def __init__(self, magics: Callable[[], Any], debugger: Any, publish: Callable[[Message], object]) -> None:
        self._magics = magics
        self._debugger = debugger
        self._publish = publish
        # Control thread only, but for what says otherwise.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seq = 1
        self._followed: Any = None
        """The node whose ranks this hears of."""
        self._sends = False
        """Whether breakpoints are about to be sent to new ranks; set by any thread, cleared by the control thread."""
        self._ids = Ids()
        self._none = FrontEnd()
        """For the time without magics, after they were unloaded."""
        self._sources = Sources(lambda: self._front_end)
        self._breakpoints = Breakpoints(self._sources)
        self._frames = FrameRequests(self._ids, self._sources, debugger.accept_variable)
        self._standing = StoppedRanks(self._ids, self._emit, self._went_on)
        self._running = RankControl(self._ids, self._standing, self._waited_for)
        self._handlers: dict[str, Callable[[Message, Forward], Awaitable[Any]]] = {
            "initialize": self._initialize,
            "attach": self._attach,
            "disconnect": self._end,
            "terminate": self._end,
            "dumpCell": self._dump_cell,
            "setBreakpoints": self._set_breakpoints,
            "setFunctionBreakpoints": self._set_functions,
            "setExceptionBreakpoints": self._set_exceptions,
            "debugInfo": self._debug_info,
            "threads": self._list_threads,
            "inspectVariables": self._inspect,
            "richInspectVariables": self._inspect_rich,
            "source": self._source,
            "continue": self._continue,
            "pause": self._pause,
            SHOW: self._show,
        }

    async def handle(self, message: Message, forward: Forward) -> Any:
        """Answer a request of the front end.

        Args:
            message: the request.
            forward: has ipykernel answer one.
        """
        self._loop = asyncio.get_running_loop()
        # The ranks hear of the notebook, and it of them, while its own code is paused.
        spare_threads("monarch-", _USERS)
        handler = self._handlers.get(message.get("command", ""))
        try:
            if handler is not None:
                return await handler(message, forward)
            body = await self._of_rank(message)
        except RequestError as refused:
            return failure(message, str(refused))
        return await forward(message) if body is None else response(message, body)

    def notebook_event(self, event: Message) -> None:
        """Pass on an event of ipykernel's debugger, which knows nothing of ranks."""
        body: Message = event.get("body") or {}
        if self._front_end.active and event["event"] in ("stopped", "continued"):
            if event["event"] == "stopped":
                self._standing.show_notebook()
            # The ranks do not stop and continue with the notebook.
            both = ("allThreadsStopped", "allThreadsContinued")
            body = {**body, **{name: False for name in both if name in body and self._threads()}}
        self._publish({**event, "body": body})

    @property
    def _front_end(self) -> FrontEnd:
        magics = self._magics()
        return magics.front_end if magics is not None else self._none

    # The beginning and the end

    async def _initialize(self, message: Message, forward: Forward) -> Any:
        client = f"{arguments_of(message).get('clientID', '')} {arguments_of(message).get('clientName', '')}"
        self._standing.one_at_a_time = "jupyterlab" in client.lower()
        return await forward(message)

    async def _attach(self, message: Message, forward: Forward) -> Any:
        reply = await forward(message)
        if reply and reply.get("success"):
            front_end = self._front_end
            front_end.points, front_end.on_cell = self._breakpoints.packed, self._cell_begins
            front_end.show = self._selected
            front_end.active = True
            self._follow()
            self._send()
        return reply

    def _follow(self) -> None:
        """Hear of stops, pauses and new ranks from now on, and look where ranks stand."""
        if has_node():
            node = current_node()
            if self._followed is not node:
                self._followed = node
                stops().on_change.append(self._on_change)
                stops().on_pause.append(lambda proc: self._on_change())
                meshes_of(node).joined.subscribe(lambda uid, rank, proc: self._on_joined())
            self._standing.refresh()

    async def _end(self, message: Message, forward: Forward) -> Any:
        self.end()
        # ipykernel leaves a second one, as of a front end that has heard that its session ended, without an answer.
        return await forward(message) if self._debugger.is_started else response(message)

    def end(self) -> None:
        """Let all ranks continue, and take the breakpoints of the session away."""
        front_end = self._front_end
        active, front_end.active = front_end.active, False
        front_end.points, front_end.on_cell, front_end.show = tuple, lambda: None, _forget
        self._breakpoints.clear()
        self._standing.forget()
        self._ids.clear()
        if active and has_node():
            self._send()
            tell(all_procs(), request(forget_values_here))
            tell(all_procs(), request(resume_here))

    # From other threads

    def _on_change(self) -> None:
        self._post(self._standing.refresh)

    def _on_joined(self) -> None:
        if not self._sends:
            self._sends = True
            self._post(self._send_soon)

    def _send_soon(self) -> None:
        self._sends = False
        self._send()

    def _cell_begins(self) -> None:
        """Give the cell that is about to run the breakpoints that its text has; in its thread."""
        self._post(self._follow)
        if self._breakpoints.any():
            self._send()

    def _selected(self, proc: str) -> None:
        """Show a rank that a person has selected in a view, if it is paused."""
        self._post(lambda: self._standing.select(proc))

    def _post(self, function: Callable[[], object]) -> None:
        """Run something in the thread of the control channel while a session is active; from any thread."""
        loop = self._loop
        if loop is not None and self._front_end.active:
            with contextlib.suppress(RuntimeError):
                # The loop has been closed: the kernel ends.
                loop.call_soon_threadsafe(lambda: function() if self._front_end.active else None)

    def _send(self) -> None:
        """Tell all ranks their breakpoints; from any thread."""
        if has_node():
            self._magics().breaks.send_all()

    # Breakpoints

    async def _dump_cell(self, message: Message, forward: Forward) -> Any:
        reply = await forward(message)
        if reply and reply.get("success"):
            self._sources.dumped(reply["body"]["sourcePath"], arguments_of(message)["code"])
        return reply

    async def _set_breakpoints(self, message: Message, forward: Forward) -> Any:
        arguments = arguments_of(message)
        answers = self._breakpoints.set_lines(arguments)
        self._send()
        if self._sources.runs_on_ranks(str(arguments["source"].get("path", ""))):
            return response(message, {"breakpoints": answers})
        return await forward(message)

    async def _set_functions(self, message: Message, forward: Forward) -> Any:
        self._breakpoints.set_functions(arguments_of(message))
        self._send()
        return await forward(message)

    async def _set_exceptions(self, message: Message, forward: Forward) -> Any:
        self._breakpoints.set_filters(arguments_of(message))
        self._send()
        return await forward(message)

    async def _debug_info(self, message: Message, forward: Forward) -> Any:
        reply = await forward(message)
        if reply and reply.get("success"):
            body = reply["body"]
            own = [{"source": path, "breakpoints": some} for path, some in self._breakpoints.listed().items()]
            body["breakpoints"] = [*body["breakpoints"], *own]
            threads = self._standing.threads()
            # Where one thread is shown, it is the first of these.
            shows_ranks = self._standing.focus is not None
            body["stoppedThreads"] = [*threads, *body["stoppedThreads"]][: None if not shows_ranks else len(threads)]
        return reply

    # Threads

    async def _list_threads(self, message: Message, forward: Forward) -> Any:
        reply = await forward(message)
        if reply and reply.get("success"):
            reply["body"]["threads"] = [*reply["body"]["threads"], *self._threads()]
        return reply

    def _threads(self) -> list[Message]:
        if not has_node():
            return []
        found: list[Message] = []
        for proc in all_procs():
            stand = self._standing.now.get(proc)
            note = " (paused meanwhile)" if stand is not None and stand.parked else ""
            found.append({"id": self._ids.thread(proc), "name": f"{title(proc)}{note}", EXTRA: extra(proc)})
        return found

    async def _of_rank(self, message: Message) -> Message | None:
        """Answer a request about a rank; None if it is not about one."""
        arguments, command = arguments_of(message), message.get("command", "")
        if not any(Ids.is_of_ranks(arguments.get(name)) for name in _NAMES):
            proc = self._standing.focus
            if command not in STEPS or proc is None or not self._standing.one_at_a_time:
                return None
        else:
            proc = self._ids.proc(arguments.get("threadId"))
        frames = self._frames
        frames.names_ranks = self._standing.one_at_a_time
        match command:
            case "stackTrace" if proc is not None:
                return await frames.stack(proc, arguments)
            case "exceptionInfo" if proc is not None:
                return await frames.error(proc)
            case "scopes":
                return frames.scopes(arguments)
            case "variables":
                return await frames.variables(arguments)
            case "evaluate":
                return await frames.evaluate(arguments)
            case "setVariable":
                return await frames.set_variable(arguments)
            case "setExpression":
                return await frames.set_expression(arguments)
            case "completions":
                return await frames.completions(arguments)
            case "copyToGlobals":
                await frames.share(arguments)
                return {}
            case "next" | "stepIn" | "stepOut" if proc is not None:
                return await self._running.step(proc, STEPS[command])
            case _:
                raise RequestError(f"{command or 'the request'} is not supported on ranks")

    async def _continue(self, message: Message, forward: Forward) -> Any:
        body = self._running.go_on(arguments_of(message))
        return await forward(message) if body is None else response(message, body)

    async def _pause(self, message: Message, forward: Forward) -> Any:
        body = await self._running.pause(arguments_of(message))
        return await forward(message) if body is None else response(message, body)

    def _waited_for(self) -> list[str]:
        return [proc for uid in self._magics().waits_for() for proc in procs_of(uid)]

    async def _show(self, message: Message, _: Forward) -> Any:
        return response(message, self._running.show(arguments_of(message).get("threadId")))

    # Variables

    async def _inspect(self, message: Message, forward: Forward) -> Any:
        proc = self._inspected()
        if proc is None:
            return await forward(message)
        value = ValueRef(FrameRef(proc, 0), "locals", 0, (), "")
        rows = await self._frames.children(value, {})
        return response(message, {"variables": rows, EXTRA: extra(proc)})

    async def _inspect_rich(self, message: Message, forward: Forward) -> Any:
        arguments = arguments_of(message)
        number, proc = arguments.get("frameId"), self._inspected()
        if Ids.is_of_ranks(number):
            frame = self._frames.frame(number)
        elif number is None and proc is not None:
            frame = FrameRef(proc, 0)
        else:
            return await forward(message)
        return response(message, await self._frames.rich(frame, str(arguments["variableName"])))

    def _inspected(self) -> str | None:
        """Return the rank whose variables are those of plain cells, or that the front end shows; None for neither."""
        if self._standing.focus in self._standing.now:
            return self._standing.focus
        found: tuple[Mesh, list[int]] | None = self._magics().auto_ranks()
        if found is None:
            return None
        mesh, ranks = found
        return state_of(mesh.procs).procs.proc(ranks[0]) if ranks else None

    async def _source(self, message: Message, forward: Forward) -> Any:
        arguments = arguments_of(message)
        source: Message = arguments.get("source") or {}
        number = arguments.get("sourceReference") or source.get("sourceReference")
        path = str(source.get("path") or "")
        if not Ids.is_of_ranks(number) or os.path.exists(path):
            return await forward(message)
        return response(message, await self._frames.source(number))

    # Events

    def _emit(self, name: str, body: Message) -> None:
        self._seq += 1
        self._publish({"seq": FIRST + self._seq, "type": "event", "event": name, "body": body})

    def _went_on(self, proc: str) -> None:
        """Forget what the front end has seen of a rank that continues, here and there."""
        if self._ids.forget(proc) and current_node().peers.get(proc).dead is None:
            tell([proc], request(forget_values_here))


def _forget(_: str) -> None:
    pass
