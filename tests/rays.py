"""A real Ray cluster for tests: two nodes on this machine, in a folder of their own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from leaks import MARKER, wait_until
from workers import free_port

_ROOT = Path(__file__).resolve().parents[1]
# As .ci/install-ray makes it: Ray has dependencies that this project does not want in its own environment.
_OWN = _ROOT / ".ray" / "bin" / "python"
_ADDRESS = re.compile(r"ray start --address='([^']+)'")
_SLOW = "timed out during startup"
_STARTED = "Ray runtime started"
_START_S = 90
_MARK = "MONARCH_TEST_RAY"
"""An environment variable that tells the processes of a cluster."""
_PORTS = ("--min-worker-port=20000", "--max-worker-port=29999")


def python() -> str:
    """Return a Python that has Ray, and this project's packages; empty if there is none."""
    found = find_spec("ray")
    # Any folder of this name is found too, but has no file.
    if found is not None and found.origin:
        return sys.executable
    return str(_OWN) if _OWN.exists() else ""


def why_none() -> str:
    """Return why there can be no cluster here; empty if there can."""
    return "" if python() else "Ray is not installed; run .ci/install-ray"


def start() -> RayCluster:
    """Start a cluster. Ray gives a node 30 s to start, which is little on a busy machine, so it is tried again.

    Raises:
        TimeoutError: it did not start in this time three times.
    """
    for _ in range(3):
        try:
            return RayCluster()
        except AssertionError as error:
            if _SLOW not in str(error):
                raise
    raise TimeoutError("Ray cannot start a node within its limit of 30 s on this machine now")


class RayCluster:
    """A cluster of two nodes with one CPU each, and a server for its client."""

    def __init__(self) -> None:
        # Paths of its sockets must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        port, client = free_port(), free_port()
        self.nodes: list[subprocess.Popen[bytes]] = []
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        # A token of its own, rather than the one that Ray may keep in the home folder.
        self.auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.folder}",
                f"--ray-client-server-port={client}")  # fmt: skip
        try:
            self._start(*head)
            assert wait_until(lambda: _ADDRESS.search(self.logs()) or self.nodes[-1].poll() is not None, _START_S)
            found = _ADDRESS.search(self.logs())
            assert found is not None, self.logs()
            # Ray chooses the address of this machine itself.
            self.address = found[1]
            self.client = f"ray://{self.address.rpartition(':')[0]}:{client}"
            self.add_node()
        except BaseException:
            self.close()
            raise

    def add_node(self) -> None:
        """Start one more node, and wait until it is part of the cluster."""
        count = self.logs().count(_STARTED) + 1
        self._start(f"--address={self.address}")
        wait_until(lambda: self.logs().count(_STARTED) == count or self.nodes[-1].poll() is not None, _START_S)
        assert self.logs().count(_STARTED) == count, self.logs()

    def _start(self, *args: str) -> None:
        options = ["--block", "--disable-usage-stats", "--num-cpus=1", "--num-gpus=0"]
        # Not of this run, so that tests see only what a program leaves behind.
        kept = {name: value for name, value in os.environ.items() if name != MARKER}
        env = kept | self.auth | {_MARK: str(self.folder)}
        command = [python(), "-m", "ray.scripts.scripts", "start", *options, *_PORTS, *args]
        with open(self.folder / f"start{len(self.nodes)}.log", "wb") as log:
            node = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        self.nodes.append(node)

    def logs(self) -> str:
        """Return what the nodes have printed."""
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("start*.log"))

    def processes(self) -> list[int]:
        """Return the processes of the cluster, those of its actors among them."""
        mark = f"{_MARK}={self.folder}".encode()
        found: list[int] = []
        for entry in os.listdir("/proc"):
            with suppress(OSError):
                if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found

    def agents(self) -> list[int]:
        """Return the processes on the nodes that belong to this project."""
        return [pid for pid in self.processes() if _name(pid).startswith("monarch")]

    def close(self) -> None:
        """End the nodes."""
        # Asked to end, a node waits for others, which end too.
        while running := self.processes():
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for node in self.nodes:
                node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""
