"""The Monarch kernel: ipykernel with meshes built in."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ipykernel.ipkernel import IPythonKernel

import monarch_kernel
from monarch._kernel_api import leave_if_forked, watch_forks
from monarch_kernel.cells.breakpoints import Breakpoints
from monarch_kernel.compat import cancels_awaits, runs_cell
from monarch_kernel.magics.typing_help import TypingHelp

_AGAIN = 0.02
"""Seconds before a Ctrl-C that came too early for the code of a cell is sent again."""


_BREATH = 0.1
"""Seconds in which a second Ctrl-C does not cut off the handling of the first."""


@cancels_awaits
class MonarchKernel(IPythonKernel):
    """A Python kernel whose notebook is the controller of meshes of ranks."""

    implementation = "monarch"
    stopped_await = False
    """Whether a Ctrl-C stopped the last cell at an await."""
    serves_terminal = False
    """Whether a front end asked when input is complete, as those with a prompt do; set by the thread of the shell."""

    @property
    def banner(self) -> str:
        """The greeting in a terminal."""
        return "Monarch: a Python kernel that controls a mesh of ranks. %mesh help lists the verbs."

    def __init__(self, **kwargs: Any) -> None:
        # ipykernel types few of its methods.
        super().__init__(**kwargs)  # pyright: ignore[reportUnknownMemberType]
        self._breakpoints = Breakpoints()
        monarch_kernel.load_ipython_extension(self.shell)
        # As %load_ext does, for %unload_ext.
        _shell(self).extension_manager.loaded.add(monarch_kernel.__name__)
        watch_forks()
        # A child forked by a cell is no kernel: it ends where the cell does.
        self.shell.events.register("post_execute", leave_if_forked)  # pyright: ignore[reportOptionalMemberAccess]
        if threading.current_thread() is threading.main_thread():
            # For the time between messages; ipykernel sets its own handler for each message, and restores this one.
            signal.signal(signal.SIGINT, self._on_idle_interrupt)
        # The zygote imports torch while the user reads.
        threading.Thread(target=_warm_up, name="monarch-warm-up", daemon=True).start()

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell. A Ctrl-C interrupts only its code: an interrupted kernel would not answer."""
        if threading.current_thread() is not threading.main_thread():
            await super().execute_request(stream, ident, parent)  # pyright: ignore[reportUnknownMemberType]
            return
        over = threading.Event()
        last = 0.0

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal last
            if runs_cell(frame) and time.monotonic() - last > _BREATH:
                last = time.monotonic()
                raise KeyboardInterrupt
            # Just before or after the code of the cell, where nobody catches it, or right after another Ctrl-C.
            again = threading.Timer(_AGAIN, lambda: over.is_set() or os.kill(os.getpid(), number))
            again.name, again.daemon = "monarch-interrupt-again", True
            again.start()

        signal.signal(signal.SIGINT, stop)
        try:
            await super().execute_request(stream, ident, parent)  # pyright: ignore[reportUnknownMemberType]
        finally:
            over.set()
            # Until the end of the message, when the handler of the idle kernel is restored.
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_idle_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=self._say_what_runs, name="monarch-idle-stop", daemon=True).start()

    def _say_what_runs(self) -> None:
        """Stop what an earlier Stop has left, or say what still runs; in a thread of its own."""
        magics = _shell(self).magics_manager.registry.get("MeshMagics")
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
            answer: Any = super().do_complete(code, cursor_pos)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            return answer
        return {
            "status": "ok",
            "matches": completion.texts,
            "cursor_start": completion.start,
            "cursor_end": completion.end,
            "metadata": {},
        }

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Inspect a name, in a ``%%mesh`` cell on the rank; or show the help for ``%mesh`` and its verbs."""
        bundle = self._typing_help().inspect(code, cursor_pos)
        if bundle is None:
            return super().do_inspect(  # pyright: ignore[reportUnknownMemberType]
                code, cursor_pos, detail_level, omit_sections
            )
        return {"status": "ok", "found": True, "data": bundle, "metadata": {}}

    def _typing_help(self) -> TypingHelp:
        return _shell(self).monarch_help

    def do_is_complete(self, code: str) -> Any:
        """Return whether a cell is complete; a ``%%mesh`` cell is when it ends in an empty line, and its body is."""
        self.serves_terminal = True
        answer: dict[str, Any] = super().do_is_complete(code)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        first, _, body = code.partition("\n")
        if answer["status"] != "complete" or not first.startswith("%%mesh") or body.lstrip().startswith("%%"):
            return answer
        status, indent = _shell(self).input_transformer_manager.check_complete(body)
        return {"status": status, "indent": " " * (indent or 0)} if status == "incomplete" else answer

    async def do_debug_request(self, msg: dict[str, Any]) -> Any:
        """Answer a request of a debugger; breakpoints in cells that run on ranks are refused."""
        refused = self._breakpoints.refused(msg)
        if refused is not None:
            return refused
        reply: Any = await super().do_debug_request(msg)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self._breakpoints.dumped(msg, reply)
        return reply

    def do_shutdown(self, restart: bool) -> Any:
        """End the meshes with the kernel."""
        from monarch._kernel_api import shutdown_context

        shutdown_context(2).get()
        return super().do_shutdown(restart)  # pyright: ignore[reportUnknownMemberType]


def _shell(kernel: MonarchKernel) -> Any:
    return kernel.shell


def _warm_up() -> None:
    from monarch.actor import this_host

    this_host()
