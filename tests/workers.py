"""Workers of this machine, for tests: hosts that were started by hand and wait for programs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from leaks import pids_named, processes
from monarch.actor import new_key_file

USUAL = ("-m", "monarch.worker")


class Workers:
    """Workers of this machine, each a process as it would be on a machine of its own."""

    def __init__(self, folder: Path, python: str = sys.executable, program: Sequence[str] = USUAL) -> None:
        self.command = [python, *program]
        self.key = str(folder / "key")
        new_key_file(self.key)
        self.started: list[subprocess.Popen[str]] = []
        self._before = processes()

    def start(self, address: str = "", *options: str) -> tuple[subprocess.Popen[str], str]:
        """One of them, and its address."""
        address = address or f"tcp://127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [*self.command, address, "--key", self.key, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process, address

    def agents(self) -> list[int]:
        """Pids of their host agents; not children of theirs if a fork server has forked them."""
        return pids_named("monarch-agent", before=self._before)

    def wait(self, process: subprocess.Popen[str]) -> str:
        """Return the next line that it prints."""
        assert process.stdout is not None
        return process.stdout.readline()

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
