"""Commands that start host agents on other hosts, and the connections to them: ssh, srun, kubectl exec."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from monarch._core.text.causes import signal_text
from monarch._procs.launch.interface import News
from monarch._procs.launch.payload import LaunchOrder
from monarch._procs.launch.reports import HostReports, HostTask
from monarch._procs.os.posix import memfd
from monarch._procs.os.starting import start_process
from monarch._procs.rank.output import read_tail
from monarch.exceptions import SpawnError

_PACKET = 1 << 16
_LINE = 1 << 20
"""The most bytes of a line that are kept."""
_TAIL = 4096
_EXIT_S = 1.0
"""Seconds for a command to exit after it has closed its output."""
_END_S = 5.0
"""Seconds for agents to end after their connection, before the command is killed."""


class HostStream(HostReports):
    """A command that starts the agents of one or more hosts, with its standard input and output.

    Args:
        command: its arguments; it runs ``payload.BOOT`` on each host.
        order: what is sent to each; None if it has its order.
        tasks: the hosts, in the order of their task numbers.
        limits: the most seconds of each phase.
        env: environment variables of the command.

    Raises:
        SpawnError: the command does not exist.
    """

    def __init__(
        self,
        command: Sequence[str],
        order: LaunchOrder | None,
        tasks: Sequence[HostTask],
        limits: Mapping[str, float],
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(tasks, limits)
        self._errors = memfd("launcher-stderr")
        self._unsent = memoryview(order.encode() if order is not None else b"")
        self._buffer = b""
        try:
            self.process = start_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **(env or {})},
                # Interrupts of a terminal are meant for the program, which ends the command itself.
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._errors)
            raise SpawnError(f"cannot run {command[0]!r}: {error.strerror}") from error
        except BaseException:
            os.close(self._errors)
            raise
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        for fd in (self.input, self.output):
            os.set_blocking(fd, False)

    @property
    def open(self) -> bool:
        """Whether its output is still read."""
        return self.process.stdout is not None and not self.process.stdout.closed

    @property
    def writing(self) -> bool:
        """Whether part of the order is unsent."""
        return bool(self._unsent)

    def write(self) -> None:
        """Send as much of the order as fits."""
        with suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[os.write(self.input, self._unsent[:_PACKET]) :]
            except BrokenPipeError:
                # Its end is reported by its output.
                self._unsent = memoryview(b"")

    def read(self) -> Iterator[News]:
        """Return the news in its output."""
        try:
            data = os.read(self.output, _PACKET)
        except BlockingIOError:
            return
        if not data:
            yield from self._ended()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[-_LINE:]
        for line in lines:
            yield from self.take(line.decode(errors="replace").strip())

    def _ended(self) -> Iterator[News]:
        self._close_output()
        try:
            code = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            how = "closed its output"
        else:
            how = f"exited with code {code}" if code >= 0 else f"was killed by {signal_text(-code)}"
        for task in self.pending:
            text = self.last_words()
            yield self.fail(task, f"{os.path.basename(str(self._program()))} {how}{': ' + text if text else ''}")

    def _program(self) -> object:
        command = self.process.args
        return command[0] if isinstance(command, (list, tuple)) else command

    def last_words(self) -> str:
        """Return the last lines of its error output, or else of its output."""
        lines = read_tail(self._errors, _TAIL).data.decode(errors="replace").strip().splitlines()
        lines = [line.strip() for line in lines if line.strip()] or [word for word in self.words if word]
        return "; ".join(lines[-2:])

    def error_text(self) -> str:
        """Return its error output so far, at most the last 4 KiB."""
        return read_tail(self._errors, _TAIL).data.decode(errors="replace")

    def _close_output(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def hang_up(self) -> None:
        """Close the connection: the agents end."""
        self._unsent = memoryview(b"")
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait until the command has ended, and kill it after the deadline."""
        self.hang_up()
        try:
            self.process.wait(max(0.05, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._close_output()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1


def poll_streams(streams: Sequence[HostStream], timeout: float) -> list[News]:
    """Return what happened at streams; wait up to ``timeout`` seconds for it."""
    poller, by_fd = select.poll(), dict[int, HostStream]()
    for stream in streams:
        if stream.open:
            poller.register(stream.output, select.POLLIN)
            by_fd[stream.output] = stream
            if stream.writing:
                poller.register(stream.input, select.POLLOUT)
                by_fd[stream.input] = stream
    wait = min([timeout, *(stream.next_limit() for stream in streams if stream.pending)])
    news: list[News] = []
    for fd, _ in poller.poll(wait * 1000):
        stream = by_fd[fd]
        if fd == stream.input:
            stream.write()
        elif stream.open:
            news += stream.read()
    for stream in streams:
        news += stream.overdue()
    return news


def end_streams(streams: Sequence[HostStream]) -> None:
    """End all streams at the same time."""
    for stream in streams:
        stream.hang_up()
    deadline = time.monotonic() + _END_S
    for stream in streams:
        stream.end(deadline)
