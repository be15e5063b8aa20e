"""The Monarch kernel: ipykernel's, with the meshes built in."""

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
from monarch_kernel.compat import cancels_awaits, runs_cell

_AGAIN = 0.02
"""Seconds after which a Ctrl-C that came too early for the code of a cell comes again."""


_BREATH = 0.1
"""Seconds for what handles a Ctrl-C, in which the next one does not cut it off."""


@cancels_awaits
class MonarchKernel(IPythonKernel):
    """A Python kernel whose notebook is the controller of meshes of ranks."""

    implementation = "monarch"
    stopped_await = False
    """Whether a Ctrl-C has stopped the last cell where it awaited something."""

    @property
    def banner(self) -> str:
        """What a terminal shows at the start."""
        return "Monarch: a Python kernel that is the controller of a mesh of ranks. %mesh help says more."

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        monarch_kernel.load_ipython_extension(self.shell)
        watch_forks()
        # A child that a cell has forked is no kernel: it ends where the cell does.
        self.shell.events.register("post_execute", leave_if_forked)  # pyright: ignore[reportOptionalMemberAccess]
        if threading.current_thread() is threading.main_thread():
            # Between two messages; ipykernel has another one while it handles a message, and then this again.
            signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=self._say_what_runs, daemon=True).start())
        # While the person reads, the process that ranks are forked from imports torch.
        threading.Thread(target=_warm_up, name="monarch-warm-up", daemon=True).start()

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Runs a cell. A Ctrl-C is for its code: cut off in the middle of its work, the kernel would not answer."""
        if threading.current_thread() is not threading.main_thread():
            await super().execute_request(stream, ident, parent)
            return
        over = threading.Event()
        last = 0.0

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal last
            if runs_cell(frame) and time.monotonic() - last > _BREATH:
                last = time.monotonic()
                raise KeyboardInterrupt
            # Just before the code of the cell, or after it, when nobody takes it; or right after another one.
            again = threading.Timer(_AGAIN, lambda: over.is_set() or os.kill(os.getpid(), number))
            again.daemon = True
            again.start()

        signal.signal(signal.SIGINT, stop)
        try:
            await super().execute_request(stream, ident, parent)
        finally:
            over.set()
            # Until the end of the message, when that of the idle kernel is there again.
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _say_what_runs(self) -> None:
        """Says what a Stop that comes while no cell runs leaves as it is; in a thread of its own."""
        magics = _shell(self).magics_manager.registry.get("MeshMagics")
        if magics is None:
            return
        for text in magics.unended():
            magics.streams().place().write(f"no cell of the notebook runs, so nothing was stopped; {text}")

    @contextmanager
    def cancel_on_sigint(self, future: asyncio.Future[Any]) -> Generator[None]:
        """While a cell with a top-level ``await`` runs, a Ctrl-C stops it: at once, also where nothing else happens."""
        loop = asyncio.get_running_loop()
        self.stopped_await = False

        def stop(_number: int, frame: FrameType | None) -> None:
            if runs_cell(frame):
                # And awaits nothing.
                raise KeyboardInterrupt
            self.stopped_await = True
            # A loop that waits for input hears only of what comes from other threads.
            loop.call_soon_threadsafe(future.cancel)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """What a name means; in a ``%%mesh`` cell on the rank."""
        text = _shell(self).monarch_help.inspect(code, cursor_pos)
        if text is None:
            return super().do_inspect(code, cursor_pos, detail_level, omit_sections)
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

    def do_is_complete(self, code: str) -> Any:
        """Whether a cell can be run; of a ``%%mesh`` cell its body, as Python."""
        first, newline, body = code.partition("\n")
        if first.startswith("%%mesh") and newline:
            status, indent = _shell(self).input_transformer_manager.check_complete(body)
            return {"status": status, "indent": " " * (indent or 0)} if status == "incomplete" else {"status": status}
        return super().do_is_complete(code)

    def do_shutdown(self, restart: bool) -> Any:
        """Ends the meshes with the kernel."""
        from monarch._kernel_api import shutdown_context

        shutdown_context(2).get()
        return super().do_shutdown(restart)


def _shell(kernel: MonarchKernel) -> Any:
    return kernel.shell


def _warm_up() -> None:
    from monarch.actor import this_host

    this_host()
