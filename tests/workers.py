"""Workers of this machine, for tests: hosts that were started by hand and wait for programs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from monarch.actor import new_key_file


class Workers:
    """Workers of this machine, each a process as it would be on a machine of its own."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.python = python
        self.key = str(folder / "key")
        new_key_file(self.key)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, address: str = "") -> tuple[subprocess.Popen[str], str]:
        """One of them, and its address."""
        address = address or f"tcp://127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [self.python, "-m", "monarch.worker", address, "--key", self.key],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process, address

    def wait(self, process: subprocess.Popen[str]) -> str:
        """What it says next."""
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
