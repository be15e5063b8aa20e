"""A notebook for the tests: a real kernel that runs cells, and keeps what each has shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import zmq
from jupyter_client.manager import KernelManager

import warm_python
from leaks import wait_until
from monarch._core.shapes.ranks import parse_ranks
from monarch_kernel.output.waiting import MARK

ALL = {0, 1, 2, 3}
"""Ranks of the mesh that tests share."""
GUARD = 60.0
"""Seconds after which something is taken to hang; a test of very many ranks sets more for its notebook."""

_LOOK_MS = 10
"""Milliseconds after which a condition is looked at again that no message makes true."""


class Cell:
    """Messages that one request has shown so far, in the order in which they came."""

    def __init__(self, notebook: Notebook, code: str) -> None:
        self.notebook = notebook
        self.code = code
        self.messages: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {}
        self.idle = False

    def contents(self, *kinds: str) -> list[dict[str, Any]]:
        """Contents of its messages of some kinds."""
        return [message["content"] for message in self.messages if message["msg_type"] in kinds]

    def stream(self, name: str | None = None) -> str:
        """Return the text of its streams, or of one of them."""
        return "".join(each["text"] for each in self.contents("stream") if name in (None, each["name"]))

    def said(self, stream: str | None = None) -> dict[str, set[int]]:
        """Each line that ranks have printed, in the order in which it first came, with the ranks.

        Those that were unfinished for a while, and so are in a display, come last, if no stream is named.

        A rank that is late is not folded with the others, so how many lines there were says how busy the machine is.
        """
        found: dict[str, set[int]] = {}
        live = [each["text/plain"] for each in self.bundles if stream is None and each.keys() == {"text/plain"}]
        lines = "\n".join([self.stream(stream), *live])
        for ranks, text in re.findall(r"^\[ranks? ([^\]]+)\] (.*)$", lines, re.M):
            found.setdefault(text, set()).update(parse_ranks(ranks))
        return found

    @property
    def bundles(self) -> list[dict[str, Any]]:
        """Return the values that it has displayed and returned, updated, without the line that says who still runs."""
        found: list[dict[str, Any]] = []
        places: dict[str, list[int]] = {}
        for message in self.messages:
            kind, each = message["msg_type"], message["content"]
            if MARK in (each.get("metadata") or {}):
                continue
            name = each.get("transient", {}).get("display_id", "")
            if kind == "clear_output":
                found, places = [], {}
            elif kind == "update_display_data":
                for place in places.get(name, ()):
                    found[place] = each["data"]
            elif kind in ("display_data", "execute_result"):
                places.setdefault(name, []).append(len(found))
                found.append(each["data"])
        return found

    @property
    def screen(self) -> str:
        """The text on screen now, as a front end shows it that carries out ``clear_output``."""
        pieces: list[tuple[str, str]] = []
        clears = False
        for message in self.messages:
            kind, each = message["msg_type"], message["content"]
            if kind == "clear_output":
                clears = each["wait"]
                pieces = pieces if clears else []
            elif MARK in (each.get("metadata") or {}):
                continue
            elif kind in ("stream", "display_data", "execute_result"):
                pieces, clears = [] if clears else pieces, False
                text = each["text"] if kind == "stream" else each["data"].get("text/plain", "") + "\n"
                pieces.append((each.get("transient", {}).get("display_id", ""), text))
            elif kind == "update_display_data":
                name = each["transient"]["display_id"]
                text = each["data"].get("text/plain", "") + "\n"
                pieces = [(known, text if known == name else old) for known, old in pieces]
        return "".join(text for _, text in pieces)

    @property
    def shown(self) -> str:
        """The text of what it has displayed and returned."""
        return "\n".join(bundle.get("text/plain", "") for bundle in self.bundles)

    @property
    def text(self) -> str:
        """All of its text that a person sees."""
        errors = ["\n".join(each["traceback"]) for each in self.contents("error")]
        return "\n".join([self.stream(), self.shown, *errors])

    @property
    def status(self) -> str:
        """Of its reply."""
        return self.reply["status"]

    def ok(self) -> Cell:
        """It ended well."""
        assert self.status == "ok", self.text
        return self

    def until(self, condition: Callable[[], Any], what: str = "") -> Cell:
        """Takes messages until something is so."""
        self.notebook.take(condition, what or f"waiting on {self.code!r}")
        return self

    def wait(self) -> Cell:
        """Waits for its end."""
        return self.until(lambda: self.idle and self.reply)


def tells_in(function: str) -> str:
    """Return code of a cell that prints ``waits`` once its main thread is in a function."""
    return f"""import sys, threading, time, traceback
def tell(main=threading.get_ident()):
    while all(each.name != '{function}' for each in traceback.extract_stack(sys._current_frames()[main])):
        time.sleep(0.01)
    print('waits', flush=True)
threading.Thread(target=tell).start()"""


class Manager(KernelManager):
    """Forks kernels from a process with imports done, where that makes no difference to them."""

    async def _async_launch_kernel(self, kernel_cmd: list[str], **kw: Any) -> None:
        server, provisioner = warm_python.kernels, cast("Any", self.provisioner)
        if server is None or not server.can(kernel_cmd, kw["env"]):
            await super()._async_launch_kernel(kernel_cmd, **kw)
            return
        with open(os.devnull, "wb") as nothing:
            out, errors = (nothing if kw[each] == subprocess.DEVNULL else kw[each] for each in ("stdout", "stderr"))
            forked = server.start(kernel_cmd, kw["env"], out.fileno(), errors.fileno())
        provisioner.process, provisioner.pid, provisioner.pgid = forked, forked.pid, forked.pid
        self._reconcile_connection_info(provisioner.connection_info)


class Notebook:
    """A kernel and its client."""

    def __init__(self, kernel: str = "monarch", log: Any = subprocess.DEVNULL, **env: str) -> None:
        self.manager = Manager(kernel_name=kernel)
        self.manager.start_kernel(env={**os.environ, **env}, stdout=log, stderr=log)
        self.client = self.manager.client()
        self.client.start_channels()
        self._poller = zmq.Poller()
        for channel in (self.client.iopub_channel, self.client.shell_channel):
            self._poller.register(channel.socket, zmq.POLLIN)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise
        self.cells: dict[str, Cell] = {}
        self.events: list[dict[str, Any]] = []
        """The events of its debugger."""
        self.guard = GUARD
        self.hung = False
        """Whether a test has given up waiting for a cell."""

    def _await_ready(self) -> None:
        """Wait until the kernel answers and its messages come.

        As ``wait_for_ready`` of the client, which then waits 0.2 s more for messages that are late.
        """
        until = time.monotonic() + GUARD
        asked, answered, idle = "", False, False
        again = 0.0
        while not (answered and idle):
            if time.monotonic() > again:
                if not self.manager.is_alive() or time.monotonic() > until:
                    raise RuntimeError("the kernel has not started")
                # What it publishes before this client is connected is lost.
                asked, answered, idle = self.client.kernel_info(), False, False
                again = time.monotonic() + 0.5
            zmq.select([self.client.iopub_channel.socket, self.client.shell_channel.socket], [], [], 0.02)
            while self.client.shell_channel.msg_ready():
                answered |= self.client.shell_channel.get_msg(timeout=0)["parent_header"].get("msg_id") == asked
            while self.client.iopub_channel.msg_ready():
                message = self.client.iopub_channel.get_msg(timeout=0)
                state = message["content"].get("execution_state")
                idle |= message["parent_header"].get("msg_id") == asked and state == "idle"

    def send(self, code: str, subshell: str | None = None, cell_id: str | None = None, **options: Any) -> Cell:
        """Sends a cell, which runs when those before it have ended."""
        if self.hung:
            self._recover()
        content = {
            "code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False,
            "stop_on_error": False, **options,
        }  # fmt: skip
        message = self.client.session.msg("execute_request", content)
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        # As front ends do that have cells; an empty one is that of a program that executes a notebook.
        message["metadata"]["cellId"] = message["header"]["msg_id"] if cell_id is None else cell_id
        cell = self.cells[message["header"]["msg_id"]] = Cell(self, code)
        self.client.shell_channel.send(message)
        return cell

    def _recover(self) -> None:
        """Replace the ranks that a test which hung has left busy: later tests would wait for them too."""
        self.hung = False
        with suppress(AssertionError):
            self.run("%mesh kill")
        self.hung = False

    def run(self, code: str, **options: Any) -> Cell:
        """Runs a cell to its end."""
        return self.send(code, **options).wait()

    def hidden(self, code: str) -> Cell:
        """Runs code of an editor itself, as VS Code's: it wants the output, and has no cell and no place in history."""
        return self.run(code, cell_id="", store_history=False, allow_stdin=True)

    def mesh(self, body: str, line: str = "") -> Cell:
        """Runs a cell on ranks."""
        return self.run(f"%%mesh {line}\n{body}")

    def control(self, kind: str, **content: Any) -> dict[str, Any]:
        """Asks on the control channel, and returns the content of the answer."""
        message = self.client.session.msg(kind, content)
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=GUARD)
            if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
                return reply["content"]

    def take(self, condition: Callable[[], Any], what: str) -> None:
        """Takes messages until something is so."""
        until = time.monotonic() + self.guard
        while not condition():
            if time.monotonic() > until:
                self.interrupt()
                self.hung = True
                raise AssertionError(f"hangs: {what}; shown: {[cell.text for cell in self.cells.values()][-3:]}")
            self._poller.poll(_LOOK_MS)
            for channel, keep in ((self.client.iopub_channel, self._shown), (self.client.shell_channel, self._replied)):
                # Not by ``get_msg``, which runs an event loop for each message and for each look that finds none.
                while (message := self.client.session.recv(channel.socket)[1]) is not None:
                    keep(message)

    def _shown(self, message: dict[str, Any]) -> None:
        if message["msg_type"] == "debug_event":
            self.events.append(message["content"])
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None:
            cell.messages.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                cell.idle = True

    def _replied(self, message: dict[str, Any]) -> None:
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None:
            cell.reply = message["content"]

    def interrupt(self) -> None:
        """The stop button."""
        self.manager.interrupt_kernel()

    def close(self, now: bool = False) -> None:
        """Shuts the kernel down."""
        pid = getattr(self.manager.provisioner, "pid", None)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now)
        self.manager.cleanup_resources()
        if now and pid is not None:
            _remove_unopened(pid)


def _remove_unopened(pid: int) -> None:
    """Remove the session folder of a kernel that was killed before its agent was there, as the next session does."""

    def unopened() -> list[Path]:
        folders = Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"*/s*-{pid}-*")
        return [folder for folder in folders if not (folder / "agent").exists()]

    # An agent that is just starting removes it itself.
    if unopened() and not wait_until(lambda: not unopened(), 1.0):
        for folder in unopened():
            shutil.rmtree(folder, ignore_errors=True)
