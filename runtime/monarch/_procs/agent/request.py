"""The request of a process for a host agent: to the fork server, or to an agent process of its own.

A program that has a fork server imports this and nothing of the agent itself.
"""

from __future__ import annotations

import glob
import os
import resource
import signal
from collections.abc import Mapping

import msgspec

from monarch._procs.os import posix
from monarch._wire.links import LEASE_S

READY = "ready"
"""A file in the server's folder; once it exists, requests are answered immediately."""
_SIGNALS = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
"""Python ignores the others for itself."""
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class AgentConfig(msgspec.Struct):
    """The configuration of an agent."""

    host: str
    """Id of its host; empty to make one up."""
    folder: str
    """Session folder; empty to create one."""
    owner: str
    """Proc id of the controller; empty if it identifies itself when it connects."""
    owner_pid: int
    """Pid of the process that the agent ends with: the controller, or the process that started it."""
    owner_start: int
    preload: list[str]
    listen: str = ""
    """Address for tcp, as in ``tcp://127.0.0.1``; empty for none."""
    owner_public: str = ""
    """Public key of the controller."""
    keys: tuple[str, str] | None = None
    """Its own key pair, public and secret; empty to create one."""
    lease: float = LEASE_S
    """Seconds of silence after which another host counts as lost."""
    later: list[str] = []
    """Modules that ranks need soon but not at once: they have them if they start a while after the agent."""
    one_port: bool = False
    """Whether the controller and other hosts connect to the same port."""
    lifeline: int = -1
    """A descriptor whose end of file ends the agent; -1 for none."""
    grace: float = 0.0
    """Seconds that it stays after SIGTERM, if the controller does not end it before; 0 to end at once."""
    notice_pid: int = 0
    """A child process whose success says that the host is taken back; 0 for none."""
    unclaimed: float = 0.0
    """Seconds after which it ends if no controller has connected; 0 for no limit."""
    name: str = ""
    """The name of the detached mesh that its ranks belong to; empty for none."""
    seconds: float = 0.0
    """Seconds that it outlives its controller; 0 to end with it."""


class LaunchAgent(msgspec.Struct):
    """A request to the fork server for an agent as if the requesting process had started it."""

    config: msgspec.Raw
    """An AgentConfig, or what the module makes of it."""
    module: str
    """Its ``serve_fork`` runs the agent."""
    folder: str
    """Session folder; empty if the agent creates one."""
    stays: bool
    """Whether the agent outlives the process that requests it."""
    ticket: str
    """A file that the agent renames to claim the request: only one agent can."""
    claim: str
    """Its name after that, up to the pid and start time of the agent."""
    env: dict[str, str]
    cwd: str
    cores: list[int]
    umask: int
    limits: list[tuple[int, int]]
    """Soft limits of resources, by number."""
    ignored: list[int]
    """Signals that the process ignores, as a program does that it starts."""


def launch(
    config: AgentConfig, module: str, ticket: str, claim: str, env: Mapping[str, str], stays: bool = False
) -> LaunchAgent:
    """Return the request of this process.

    Args:
        config: configuration of the agent.
        module: its module.
        ticket: see ``LaunchAgent``.
        claim: see ``LaunchAgent``.
        env: additional environment variables.
        stays: whether the agent outlives this process.
    """
    limits = [(number, resource.getrlimit(number)[0]) for number in _LIMITS]
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = "/"
    return LaunchAgent(
        msgspec.Raw(msgspec.msgpack.encode(config)),
        module,
        config.folder,
        stays,
        ticket,
        claim,
        {**os.environ, **env},
        cwd,
        sorted(os.sched_getaffinity(0)),
        posix.umask(),
        limits,
        [int(number) for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN],
    )


def claims(claim: str) -> list[tuple[str, int]]:
    """Return the files of those that have claimed a request: path, and pid if alive or 0."""
    found: list[tuple[str, int]] = []
    for path in glob.glob(f"{glob.escape(claim)}*-*"):
        pid, _, start = path[len(claim) :].partition("-")
        alive = pid.isdigit() and start.isdigit() and posix.proc_start_time(int(pid)) == int(start)
        found.append((path, int(pid) if alive else 0))
    return found


class Setting(msgspec.Struct):
    """The configuration of a fork server."""

    preload: list[str]
    later: list[str]


class AgentLaunched(msgspec.Struct, tag=True):
    """The agent has started."""

    pid: int


class LaunchRefused(msgspec.Struct, tag=True):
    """The server will not start an agent."""

    reason: str


class AgentHasEnded(msgspec.Struct, tag=True):
    """The agent has ended."""

    status: int
    """As ``waitpid`` returns it."""


Report = AgentLaunched | LaunchRefused | AgentHasEnded
