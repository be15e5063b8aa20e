"""What a controller says when it wants a host agent, to the fork server or to a process of the agent's own.

A program that has a fork server imports this and nothing of the agent itself.
"""

from __future__ import annotations

import os
import resource

import msgspec

from monarch._procs.os import posix
from monarch._wire.links import LEASE_S

READY = "ready"
"""A file in the server's folder, from when on requests are answered at once."""
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class AgentConfig(msgspec.Struct):
    """What an agent is started with."""

    host: str
    """Id of its host; empty for one of its own making."""
    folder: str
    """Session folder; empty for one of its own making."""
    owner: str
    """Proc id of the controller; empty if that says so when it connects."""
    owner_pid: int
    """Pid of the process that the agent is to end with: the controller, or who has started it for one."""
    owner_start: int
    preload: list[str]
    listen: str = ""
    """Address for tcp, as in ``tcp://127.0.0.1``; empty for none."""
    owner_public: str = ""
    """Public key of the controller."""
    keys: tuple[str, str] | None = None
    """Its own key pair, public and secret; a new one if there is none."""
    lease: float = LEASE_S
    """Seconds of silence after which another host counts as lost."""
    later: list[str] = []
    """Modules that ranks need, but not at once: they have them if they start a while after the agent has."""


class Launch(msgspec.Struct):
    """What a controller asks the fork server for: an agent that is as if it had started it itself."""

    config: AgentConfig
    ticket: str
    """A file in the session folder, which the agent renames to say that it is there: only one can."""
    env: dict[str, str]
    cwd: str
    cores: list[int]
    umask: int
    limits: list[tuple[int, int]]
    """Soft limits of resources, by their numbers."""


def launch(config: AgentConfig, ticket: str) -> Launch:
    """What this process asks for."""
    limits = [(number, resource.getrlimit(number)[0]) for number in _LIMITS]
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = "/"
    return Launch(config, ticket, dict(os.environ), cwd, sorted(os.sched_getaffinity(0)), posix.umask(), limits)


class Setting(msgspec.Struct):
    """What a fork server is started with."""

    preload: list[str]
    later: list[str]


class Launched(msgspec.Struct, tag=True):
    """The agent is there."""

    pid: int


class Refused(msgspec.Struct, tag=True):
    """There will be no agent from here."""

    reason: str


class Ended(msgspec.Struct, tag=True):
    """The agent has ended."""

    status: int
    """As ``waitpid`` gives it."""


Report = Launched | Refused | Ended
