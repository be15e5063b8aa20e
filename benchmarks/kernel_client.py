"""A real kernel, and a client that measures: what a front end sees of it, over the Jupyter protocol."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
from harness import LaneError
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

GUARD = 120.0
"""Seconds after which a kernel counts as hanging."""
_LATE = 10.0
"""Seconds after the end of a cell, within which all its output must arrive."""
_MARK = "MONARCH_BENCH_MARK"
_now = time.perf_counter


class Cell:
    """The messages of one request so far."""

    def __init__(self) -> None:
        self.text = ""
        """All its output, as plain text."""
        self.reply: dict[str, Any] = {}
        self.idle = False
        self.seconds = 0.0
        """From the request to its end."""

    @property
    def ended(self) -> bool:
        """Whether the reply and the idle status have both arrived."""
        return self.idle and bool(self.reply)

    def take(self, message: dict[str, Any]) -> None:
        """Add a message that belongs to it."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.text += content["text"]
        elif kind in ("execute_result", "display_data", "update_display_data"):
            self.text += content["data"].get("text/plain", "") + "\n"
        elif kind == "error":
            self.text += f"{content['ename']}: {content['evalue']}\n"
        elif kind == "status":
            self.idle |= content["execution_state"] == "idle"
        elif kind.endswith("_reply"):
            self.reply = content


class _Manager(KernelManager):
    """Starts a kernel by its command, and not by an installed name."""

    command: list[str] = []

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=self.command, display_name="", language="python", interrupt_mode="signal")


class Kernel:
    """A kernel process. Everything that it starts carries a marker, by which it is found and ended.

    Args:
        command: starts it, without its connection file.
        env: environment.
        folder: for its files, and as working folder.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.mark = secrets.token_hex(8)
        self._cells: dict[str, Cell] = {}
        self._context = zmq.Context()
        self._manager = _Manager(connection_file=str(folder / f"kernel-{self.mark}.json"))
        self._manager.command = [*command, "-f", "{connection_file}"]
        shown = None if os.environ.get("MONARCH_BENCH_STDERR") else subprocess.DEVNULL
        self._begun = _now()
        try:
            env = {**env, _MARK: self.mark}
            self._manager.start_kernel(env=env, cwd=str(folder), stdout=shown, stderr=shown)
            self._where: dict[str, Any] = {**self._manager.get_connection_info(session=True)}
            self._session = self._where["session"]
            self._shell = self._connect(zmq.DEALER, "shell_port")
            self._iopub = self._connect(zmq.SUB, "iopub_port")
            self._poller = zmq.Poller()
            for channel in (self._shell, self._iopub):
                self._poller.register(channel, zmq.POLLIN)
        except BaseException:
            self.end()
            raise

    @property
    def age(self) -> float:
        """Seconds since its process was started."""
        return _now() - self._begun

    def _connect(self, kind: int, port: str) -> zmq.Socket[bytes]:
        channel = self._context.socket(kind)
        channel.linger = 0
        # The kernel does not listen yet; the usual retry every 100 ms would distort the measurement.
        channel.reconnect_ivl = 5
        if kind == zmq.SUB:
            channel.subscribe(b"")
        channel.connect(f"{self._where['transport']}://{self._where['ip']}:{self._where[port]}")
        return channel

    def send(self, kind: str, **content: Any) -> Cell:
        """Send a request."""
        message = self._session.msg(kind, content)
        cell = self._cells[message["header"]["msg_id"]] = Cell()
        self._session.send(self._shell, message)
        return cell

    def execute(self, code: str) -> Cell:
        """Send a cell, as a notebook does."""
        return self.send(
            "execute_request", code=code, silent=False, store_history=True, user_expressions={}, allow_stdin=False,
            stop_on_error=False,
        )  # fmt: skip

    def run(self, code: str, bound: float = GUARD, whole: Callable[[str], bool] | None = None) -> Cell:
        """Run a cell until it has ended and all its output has arrived.

        Args:
            code: the cell.
            bound: seconds after which it is an error.
            whole: returns whether the output is complete.
        """
        begin = _now()
        cell = self.execute(code)
        if not self.wait(lambda: cell.ended, bound):
            raise LaneError(f"no end of {code!r} within {bound:g} s; shown: {cell.text[-300:]!r}")
        if whole is not None and not self.wait(lambda: whole(cell.text), _LATE):
            raise LaneError(f"{code!r} has shown only {cell.text[-300:]!r}")
        cell.seconds = _now() - begin
        return cell

    def ok(self, code: str, bound: float = GUARD) -> Cell:
        """Run a cell that must succeed."""
        cell = self.run(code, bound)
        if cell.reply["status"] != "ok":
            raise LaneError(f"{code!r} failed: {cell.text[-300:]!r}")
        return cell

    def wait(self, done: Callable[[], bool], bound: float = GUARD) -> bool:
        """Receive messages until a condition holds; return whether it did in time."""
        until = _now() + bound
        while not done():
            left = until - _now()
            if left <= 0:
                return False
            if not self._poller.poll(math.ceil(min(left, 1.0) * 1e3)) and not self._manager.is_alive():
                raise LaneError("the kernel has ended")
            for channel in (self._shell, self._iopub):
                while (message := self._session.recv(channel)[1]) is not None:
                    cell = self._cells.get(message["parent_header"].get("msg_id", ""))
                    if cell is not None:
                        cell.take(message)
        return True

    def interrupt(self) -> None:
        """The stop button."""
        self._manager.interrupt_kernel()

    def end(self, politely: bool = True) -> None:
        """End the kernel and all that it has started; if asked politely, it gets a moment to end itself."""
        try:
            if self._manager.has_kernel:
                self._manager.shutdown_kernel(now=not politely)
            until = _now() + 3
            while politely and self._left() and _now() < until:
                time.sleep(0.05)
        finally:
            while left := self._left():
                for pid in left:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                time.sleep(0.05)
            self._context.destroy(linger=0)

    def _left(self) -> list[int]:
        """Return the live processes with the marker."""
        mark = f"{_MARK}={self.mark}".encode()
        found: list[int] = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
        return found
