"""The Monarch kernel: ipykernel with meshes built in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from types import FrameType
from typing import TYPE_CHECKING, Any

from traitlets import default
from zmq import ZMQError

import monarch_kernel
from monarch._kernel_api import is_ours, leave_if_forked, spawn_thread, watch_forks
from monarch.exceptions import MonarchError
from monarch_kernel.compat import cancels_awaits, group_skipped_files, publish_status, runs_cell
from monarch_kernel.late_magics import LateMagics
from monarch_kernel.views.lane import Lane

if TYPE_CHECKING:
    from monarch_kernel.dap.session import DebugSession
    from monarch_kernel.magics.typing_help import TypingHelp

    class IPythonKernel:
        """ipykernel's kernel, with the types that it lacks: what this file uses of it."""

        shell: Any
        session: Any
        iopub_socket: Any
        stdin_socket: Any
        shell_stream: Any
        comm_manager: Any

        def __init__(self, **kwargs: Any) -> None: ...
        def get_parent(self, channel: str) -> dict[str, Any]: ...
        def set_parent(self, ident: Any, parent: Any, channel: str = "shell") -> None: ...

        saved_sigint_handler: Any

        def pre_handler_hook(self) -> None: ...
        async def shell_channel_thread_main(self, msg: Any) -> None: ...
        async def kernel_info_request(self, stream: Any, ident: Any, parent: Any) -> None: ...
        async def dispatch_control(self, msg: Any) -> None: ...
        async def process_control(self, msg: Any) -> None: ...
        async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None: ...
        def do_complete(self, code: str, cursor_pos: int) -> Any: ...
        def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any: ...
        def do_is_complete(self, code: str) -> Any: ...
        async def do_debug_request(self, msg: dict[str, Any]) -> Any: ...
        def do_shutdown(self, restart: bool) -> Any: ...
else:
    from ipykernel.ipkernel import IPythonKernel

_AGAIN = 0.02
"""Seconds before a Ctrl-C that came too early for the code of a cell is sent again."""
_BEGINS_S = 1.0
"""The most seconds between the request for a cell and its code."""
_BREATH = 0.1
"""Seconds in which a second Ctrl-C does not cut off the handling of the first."""

_CELL_S = 1.0
"""Seconds that the end of the kernel waits for the running cell before it ends the meshes."""
_WARM_S = 1.5
"""The most seconds that it waits for the start of its session, which cannot be cut off. Jupyter kills it after 5 s."""
_LOST_S = 0.5
"""Seconds that it waits for a cell that still runs then, whose calls have failed."""


@cancels_awaits
class MonarchKernel(IPythonKernel):
    """A Python kernel whose notebook is the controller of meshes of ranks."""

    implementation = "monarch"
    stopped_await = False
    """Whether a Ctrl-C stopped the last cell at an await."""
    is_ready_first = False
    """Whether its magics may load after its first answer. Set by a program that does not use them before its start."""
    serves_terminal = False
    """Whether a front end asked when input is complete, as those with a prompt do; set by the thread of the shell."""

    @default("_execute_sleep")
    def _no_pause(self) -> float:
        # ipykernel pauses before each reply so that output arrives first: its flush does not wait for that, ours does.
        return 0.0

    @property
    def banner(self) -> str:
        """The greeting in a terminal."""
        return "Monarch: a Python kernel that controls a mesh of ranks. %mesh help lists the commands."

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        kernel: Any = self
        _skip_unwritten(kernel.log)
        self._session: DebugSession | None = None
        """The debugger of the front end. Control thread only."""
        self.lane = Lane(self)
        """The way of messages of views around the running cell."""
        self.running: Any = None
        """The request that the notebook's thread runs; None if it is idle. Written by that thread under ``_busy``."""
        self.context = copy_context()
        """Of the running cell: what a thread prints or asks in it belongs to that cell."""
        self._busy = threading.Lock()
        """Held while front ends are told that the cell continues, so that its end comes after that."""
        self._replied = threading.Event()
        """Set while the notebook's thread owes no reply to a cell."""
        self._replied.set()
        # Written by the main thread, where all handlers of signals run.
        self._begun = 0.0
        """When the kernel said that it is busy with the last cell; 0 once that runs."""
        self._stops_early = False
        """Whether a Ctrl-C has come since. Also reset by the thread that takes it as one at idle."""
        self.ending = threading.Event()
        """Set by the control thread once front ends end the kernel."""
        self._warm = threading.Event()
        """Cleared by the notebook's thread while the session of the kernel begins."""
        self._warm.set()
        self._late_magics = LateMagics(self, self._load_magics)
        watch_forks()
        # A child forked by a cell is no kernel: it ends where the cell does.
        self.shell.events.register("post_execute", leave_if_forked)
        if threading.current_thread() is threading.main_thread():
            # For the time between messages; ipykernel sets its own handler for each message, and restores this one.
            signal.signal(signal.SIGINT, self._on_idle_interrupt)

    def _load_magics(self) -> None:
        # As %load_ext does, for %unload_ext. A configuration may have loaded them.
        _shell(self).extension_manager.load_extension(monarch_kernel.__name__)
        # The zygote imports torch while the user reads.
        self._warm.clear()
        spawn_thread("monarch-warm-up", self._warm_up)

    def _warm_up(self) -> None:
        try:
            # Looked at after ``_warm`` was cleared: the end of the kernel waits for that, or is seen here.
            if not self.ending.is_set():
                from monarch.actor import this_host

                this_host()
        finally:
            self._warm.set()

    async def kernel_info_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer a front end that waits for the kernel."""
        await super().kernel_info_request(stream, ident, parent)
        self._late_magics.load_soon()

    async def shell_channel_thread_main(self, msg: Any) -> None:
        """Take a message of the shell channel: those of views do not wait for the running cell."""
        await self._late_magics.shell.admit(self, msg)
        if not await self.lane.takes(msg):
            await super().shell_channel_thread_main(msg)

    async def dispatch_control(self, msg: Any) -> None:
        """Take a message of the control channel, on which ipykernel takes all kinds of messages."""
        # Before the lock that ipykernel holds meanwhile, so that an interrupt or a shutdown need not wait.
        await self._late_magics.control.admit(self, msg)
        await super().dispatch_control(msg)

    async def process_control(self, msg: Any) -> None:
        """Handle a message of the control channel, such as the first one of the server for a page that opens."""
        await super().process_control(msg)
        self.say_busy()

    def say_busy(self) -> None:
        """Tell front ends that the running cell continues: the end of another message shows the kernel as idle."""
        with self._busy:
            if self.running is not None:
                publish_status(self, "busy", self.running)

    def set_parent(self, ident: Any, parent: Any, channel: str = "shell") -> None:
        """Note the request that is handled now: the first thing done for it, before front ends hear of it."""
        # ipykernel also calls this for the running cell, after messages that it has handled during an await.
        is_first = channel == "shell" and self.running is None and threading.current_thread() is threading.main_thread()
        if is_first and parent.get("header", {}).get("msg_type") == "execute_request":
            if self._stops_early:
                # The cell before was aborted.
                spawn_thread("monarch-idle-stop", self._say_what_runs)
            self._stops_early, self._begun = self._late_magics.is_stopped(parent), time.monotonic()
        super().set_parent(ident, parent, channel)

    def pre_handler_hook(self) -> None:
        """Let a Ctrl-C interrupt the handling of a message, except for that of a cell until its code runs."""
        if self._begins() and threading.current_thread() is threading.main_thread():
            # Not ipykernel's handler first: a Ctrl-C between the two would end the message without a reply.
            self.saved_sigint_handler = signal.signal(signal.SIGINT, self._on_idle_interrupt)
            return
        super().pre_handler_hook()

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell; an ending kernel drops the reply if it has closed the socket for it."""
        try:
            await self._run_cell(stream, ident, parent)
        except ZMQError:
            if not self.ending.is_set():
                raise

    async def _run_cell(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell. A Ctrl-C interrupts only its code: an interrupted kernel would not answer."""
        if threading.current_thread() is not threading.main_thread():
            await super().execute_request(stream, ident, parent)
            return
        over, sending = False, threading.Lock()
        last = 0.0

        def stop(_number: int, frame: FrameType | None) -> None:
            nonlocal last
            if runs_cell(frame) and not _finalizes(frame) and time.monotonic() - last > _BREATH:
                last = time.monotonic()
                self._late_magics.stop_was_heard()
                raise KeyboardInterrupt
            # Just before or after the code of the cell, where nobody catches it, right after another Ctrl-C, or in a
            # finalizer of this package, where Python would print and drop it.
            stop_again()

        def send_again() -> None:
            # Not after the cell: at idle, a Ctrl-C ends what an earlier one has left.
            with sending:
                if not over:
                    os.kill(os.getpid(), signal.SIGINT)

        def stop_again() -> None:
            again = threading.Timer(_AGAIN, send_again)
            again.name, again.daemon = "monarch-interrupt-again", True
            again.start()

        signal.signal(signal.SIGINT, stop)
        self.running, self.context = parent, copy_context()
        self._begun = 0.0
        if self._stops_early:
            self._stops_early = False
            stop_again()
        self._replied.clear()
        try:
            await super().execute_request(stream, ident, parent)
        finally:
            with self._busy:
                self.running = None
            self._replied.set()
            with sending:
                over = True
            # Until the end of the message, when the handler of the idle kernel is restored.
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_idle_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._begins():
            # For the person, the cell runs. If it is aborted before its code, as after an error of one before it, this
            # is a Ctrl-C at idle after all.
            self._stops_early = True
            spawn_thread("monarch-idle-stop", self._say_unless_it_runs)
            return
        if self._late_magics.stop_waiting():
            return
        spawn_thread("monarch-idle-stop", self._say_what_runs)

    def _begins(self) -> bool:
        """Return whether front ends see a cell run whose code has not begun."""
        return bool(self._begun) and time.monotonic() - self._begun < _BEGINS_S

    def _say_unless_it_runs(self) -> None:
        """Take an early Ctrl-C as one at idle, unless its cell begins."""
        time.sleep(_BEGINS_S)
        if self._stops_early:
            self._stops_early = False
            self._say_what_runs()

    def _say_what_runs(self) -> None:
        """Stop what an earlier Stop has left, or say what still runs; in a thread of its own."""
        magics = _magics(self)
        if magics is None:
            return
        if magics.stopping.stop_left():
            return
        for text in magics.unended():
            magics.streams().place().write(f"no notebook cell is running, so nothing was stopped; {text}")

    @contextmanager
    def cancel_on_sigint(self, future: asyncio.Future[Any]) -> Generator[None]:
        """Let a Ctrl-C stop a cell at a top-level ``await``, at once and even if nothing else happens."""
        loop = asyncio.get_running_loop()
        self.stopped_await = False

        def stop(_number: int, frame: FrameType | None) -> None:
            self._late_magics.stop_was_heard()
            if runs_cell(frame):
                # The cell runs and awaits nothing.
                raise KeyboardInterrupt
            self.stopped_await = True
            # A loop that waits for input wakes only for calls from other threads.
            loop.call_soon_threadsafe(future.cancel)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def do_complete(self, code: str, cursor_pos: int) -> Any:
        """Complete a name; in ``%mesh`` lines and ``%%mesh`` cells never by names of the notebook's Python."""
        completion = self._typing_help().complete(code, cursor_pos)
        if completion is None:
            return super().do_complete(code, cursor_pos)
        return {
            "status": "ok",
            "matches": completion.texts,
            "cursor_start": completion.start,
            "cursor_end": completion.end,
            "metadata": {},
        }

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Inspect a name, in a ``%%mesh`` cell on the rank; or show the help for ``%mesh`` and its commands."""
        bundle = self._typing_help().inspect(code, cursor_pos)
        if bundle is None:
            return super().do_inspect(code, cursor_pos, detail_level, omit_sections)
        return {"status": "ok", "found": True, "data": bundle, "metadata": {}}

    def _typing_help(self) -> TypingHelp:
        return _shell(self).monarch_help

    def do_is_complete(self, code: str) -> Any:
        """Return whether a cell is complete; a ``%%mesh`` cell is when it ends in an empty line, and its body is."""
        self.serves_terminal = True
        answer: dict[str, Any] = super().do_is_complete(code)
        first, _, body = code.partition("\n")
        if answer["status"] != "complete" or not first.startswith("%%mesh") or body.lstrip().startswith("%%"):
            return answer
        status, indent = _shell(self).input_transformer_manager.check_complete(body)
        return {"status": status, "indent": " " * (indent or 0)} if status == "incomplete" else answer

    async def do_debug_request(self, msg: dict[str, Any]) -> Any:
        """Answer a request of a debugger, about the notebook or about ranks."""
        session = self._debugging()
        if session is None:
            return await super().do_debug_request(msg)
        return await session.handle(msg, super().do_debug_request)

    def _debugging(self) -> DebugSession | None:
        """Return the debugger of the front end, from its first request on; None without debugpy or the magics."""
        debugger: Any = getattr(self, "debugger", None)
        if _magics(self) is None:
            return None
        if self._session is None and debugger is not None:
            from monarch_kernel.dap.filters import patterns_of
            from monarch_kernel.dap.session import DebugSession

            group_skipped_files(debugger, lambda files: patterns_of(files, sys.path))
            self._session = DebugSession(lambda: _magics(self), debugger, debugger.event_callback)
            debugger.event_callback = self._session.notebook_event
        return self._session

    def do_shutdown(self, restart: bool) -> Any:
        """End the running cell, and the meshes with the kernel."""
        from monarch._kernel_api import shutdown_context

        self.ending.set()
        # Jupyter has sent a Ctrl-C. The Stop of the cell needs the ranks, and its reply a socket that is closed next.
        self._replied.wait(_CELL_S)
        # A session that starts after the next call would be left behind.
        self._warm.wait(_WARM_S)
        with suppress(MonarchError):
            # Another thread may have ended the session, or does so; the kernel ends in any case.
            shutdown_context(2).get()
        self._replied.wait(_LOST_S)
        return super().do_shutdown(restart)


def _shell(kernel: MonarchKernel) -> Any:
    return kernel.shell


def _magics(kernel: MonarchKernel) -> Any:
    """Return the magics; None while they are not loaded."""
    return _shell(kernel).magics_manager.registry.get("MeshMagics")


def _skip_unwritten(log: Any) -> None:
    """Raise the level of a logger to the lowest one that a handler writes: ipykernel logs each message for debugging.

    A handler added later must set the level of the logger again.
    """
    if getattr(log, "handlers", ()) and not log.propagate:
        log.setLevel(max(log.getEffectiveLevel(), min(handler.level for handler in log.handlers)))


def _finalizes(frame: FrameType | None) -> bool:
    """Return whether the thread with this innermost frame runs a ``__del__`` of this package, which takes no time."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" and is_ours(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
