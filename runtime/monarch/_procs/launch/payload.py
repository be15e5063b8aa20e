"""The input of a process on another host: its first program, its order, and the runtime."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import platform
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch import far_side
from monarch._procs.launch.lock_files import packages_of

_ROOT = Path(__file__).resolve().parents[3]
_SOURCE = Path(far_side.__file__)
BOOT = "import sys;f=sys.stdin.buffer;exec(f.read(int(f.readline())))"
"""The argument of ``-c`` for the interpreter of another host. It has no quotes and no secret."""
SAFE_PATH = re.compile(r"[A-Za-z0-9_./~+-]+")
"""Paths of an interpreter that no shell takes for anything else."""
GRACE_S = 30.0
"""Seconds that a host has after SIGTERM, as Slurm and Kubernetes have it by default."""
CONNECTED = "monarch: connected"
"""Printed by the shell of the other host before its Python starts."""


@functools.cache
def _runtime() -> tuple[bytes, str]:
    """Return the runtime as a zip file, and its digest."""
    data, digest = io.BytesIO(), hashlib.sha256()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted((_ROOT / "monarch").rglob("*.py")):
            name, content = str(path.relative_to(_ROOT)), path.read_bytes()
            archive.writestr(name, content)
            digest.update(f"{name}:{len(content)}\n".encode() + content)
    return data.getvalue(), digest.hexdigest()[:16]


class HostOptions(Protocol):
    """The options of a launcher that are part of the order."""

    @property
    def port(self) -> int: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def grace(self) -> float: ...
    @property
    def notice(self) -> str: ...
    @property
    def packages(self) -> str: ...


@dataclass(frozen=True)
class LaunchOrder:
    """The order to one or more hosts.

    Attributes:
        agent: the configuration of the agent.
        listen: how a host finds its address on the way to the program; see ``far_side``.
        port: the port to listen on; 0 for a free one.
        env: environment variables of the agent and its ranks.
        grace: seconds that the host still has after SIGTERM.
        notice: a command of the shell that succeeds when the host is about to be taken back; empty for none.
        packages: a lock file to install on each host, or a packed environment there; empty for none.
    """

    agent: AgentConfig
    listen: str
    port: int
    env: Mapping[str, str]
    grace: float = GRACE_S
    notice: str = ""
    packages: str = ""

    def encode(self) -> bytes:
        """Return all that is sent on standard input."""
        return b"".join(self.halves())

    def halves(self) -> tuple[bytes, bytes]:
        """Return the first program with the configuration, and the runtime."""
        archive, digest = _runtime()
        order = {
            "agent": msgspec.to_builtins(self.agent),
            "listen": self.listen,
            "port": self.port,
            "env": dict(self.env),
            "grace": self.grace,
            "notice": self.notice,
            "packages": packages_of(self.packages),
            "root": str(_ROOT),
            "stamp": far_side.stamp(str(_ROOT)),
            "digest": digest,
            "python": platform.python_version(),
            "size": len(archive),
        }
        source = _SOURCE.read_bytes()
        return b"%d\n%s%s\n" % (len(source), source, json.dumps(order).encode()), archive


def order_of(agent: AgentConfig, listen: str, options: HostOptions) -> LaunchOrder:
    """Return the order of a launcher with these options; see ``LaunchOrder``."""
    return LaunchOrder(agent, listen, options.port, options.env, options.grace, options.notice, options.packages)
