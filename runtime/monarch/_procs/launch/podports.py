"""Ports between this program and a pod, where the network of the cluster cannot be reached."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from monarch._procs.launch import relay
from monarch._procs.launch.payload import BOOT
from monarch._procs.os.posix import memfd
from monarch._procs.rank.output import read_tail
from monarch.exceptions import SpawnError

_PATIENCE_S = 30.0
_END_S = 5.0
_LOOK_S = 0.02
_TAIL = 4096
_GUARD = """
exec 3<&0
"$@" 3<&- &
command=$!
{ read -r line <&3; kill $command; } 2> /dev/null &
exec 3<&-
wait $command
code=$?
kill $! 2> /dev/null
exit $code
"""
"""Runs its arguments until they end, or a line or the end comes on standard input, even if this program is killed."""
_FORWARDED = re.compile(r"127\.0\.0\.1:(\d+) ->")


class PodPorts:
    """The forwarded ports of one pod.

    Args:
        kubectl: the command and its options.
        pod: the name of the pod.
        container: its container with the host agent.
        python: the Python in the container.
    """

    def __init__(self, kubectl: Sequence[str], pod: str, container: str, python: str) -> None:
        self._kubectl = list(kubectl)
        self._pod = pod
        self._container = container
        self._python = python
        self._commands: list[_Command] = []

    def to_host(self, address: str) -> str:
        """Return the local address of a port of the pod.

        Raises:
            SpawnError: the API server does not forward it.
        """
        port = address.rpartition(":")[2]
        command = [*self._kubectl, "port-forward", f"pod/{self._pod}", f":{port}", "--address=127.0.0.1"]
        line = self._start(["/bin/sh", "-c", _GUARD, "sh", *command])
        found = _FORWARDED.search(line)
        if found is None:
            raise SpawnError(f"pod {self._pod}: kubectl cannot forward port {port}: {line or self._why()}")
        return f"tcp://127.0.0.1:{found[1]}"

    def to_here(self, addresses: Sequence[str]) -> dict[str, str]:
        """Return addresses in the pod of ports of this machine, by the addresses here.

        Raises:
            SpawnError: no command can be run in the pod.
        """
        inside = [*self._kubectl, "exec", "-i", self._pod, "-c", self._container, "--"]
        inside += [self._python, "-u", "-c", BOOT, str(len(addresses))]
        order = {"targets": [each.removeprefix("tcp://") for each in addresses], "command": inside}
        line = self._start([sys.executable, relay.__file__, json.dumps(order)])
        try:
            ports: list[int] = json.loads(line)
        except ValueError:
            raise SpawnError(f"pod {self._pod}: kubectl cannot run a command in it: {line or self._why()}") from None
        return {here: f"tcp://127.0.0.1:{port}" for here, port in zip(addresses, ports, strict=True)}

    def _start(self, command: Sequence[str]) -> str:
        """Start a command that stays, and return the first line that it prints; empty if it prints none."""
        self._commands.append(_Command(command))
        return self._commands[-1].first_line(_PATIENCE_S)

    def _why(self) -> str:
        command = self._commands[-1]
        command.kill()
        return command.error_text() or f"no answer in {_PATIENCE_S:g} s"

    def end(self) -> None:
        """End the forwards."""
        for command in self._commands:
            command.hang_up()
        deadline = time.monotonic() + _END_S
        while self._commands:
            self._commands.pop().end(deadline)


class _Command:
    """A command that ends with this program, or with a line on its standard input. It may print as much as it likes.

    Args:
        command: its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._output, self._errors = memfd("forward-stdout"), memfd("forward-stderr")
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._output, stderr=self._errors, start_new_session=True
            )
        except BaseException:
            self._close()
            raise

    def first_line(self, patience: float) -> str:
        """Return the first line that it prints; empty if it ends before, or prints none in so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            ended = self._process.poll() is not None
            line, newline, _ = os.pread(self._output, _TAIL, 0).decode(errors="replace").partition("\n")
            if newline or ended or time.monotonic() > deadline:
                return line.strip() if newline else ""
            time.sleep(_LOOK_S)

    def error_text(self) -> str:
        """Return the last lines that kubectl has printed on standard error."""
        return read_tail(self._errors, _TAIL).data.decode(errors="replace").strip()

    def hang_up(self) -> None:
        """Ask it to end."""
        assert self._process.stdin is not None
        # It may have ended.
        with suppress(OSError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it and its children."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def end(self, deadline: float) -> None:
        """Wait until it has ended, and kill it after the deadline."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.05, deadline - time.monotonic()))
        self.kill()
        self._close()

    def _close(self) -> None:
        os.close(self._output)
        os.close(self._errors)
