"""The launcher of simulated hosts: agents of this machine, which connect as those of others do."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any

import msgspec

from monarch._procs.agent.main import UNABLE
from monarch._procs.launch.interface import Failed, HostRequest, HostRoute, Joined, News, count_of
from monarch._procs.launch.local import HostAgent
from monarch._procs.launch.payload import GRACE_S
from monarch._procs.os.posix import proc_start_time
from monarch._wire.messages import Listening
from monarch.exceptions import ArgumentError

HERE = "127.0.0.1"
_numbers = itertools.count(1)
"""Tell the hosts of a program apart, which all have the name of this machine."""
_END_S = 5.0
_USUAL: Mapping[str, Any] = {"grace": GRACE_S}
"""Options of hosts of ``%mesh up --on process:2``."""


def parent() -> tuple[int, int]:
    """Return the pid and start time of this process, for agents that must end with it."""
    return os.getpid(), proc_start_time(os.getpid()) or 0


@dataclass(frozen=True)
class ProcessLauncher:
    """Simulated hosts.

    Attributes:
        addresses: for each, the address to listen on; all listen at 127.0.0.1 if empty.
        prefixes: for each, a command to start it under, such as one that enters a network namespace.
        env: additional environment variables.
        count: the number of hosts if the request names none.
        grace: seconds that a host still has after SIGTERM to its agent; 0 to end with that.
    """

    addresses: Sequence[str] = ()
    prefixes: Sequence[Sequence[str]] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    count: int = 0
    grace: float = 0.0

    def ask(self, request: HostRequest) -> ProcessLaunch:
        """Start the agents.

        Raises:
            ArgumentError: no number of hosts is given.
        """
        count = count_of("process", request.count, self.count)
        return ProcessLaunch(self, count, request)


class ProcessLaunch:
    """Agents of this machine.

    Args:
        launcher: its settings.
        count: the number of agents.
        request: what was asked for.
    """

    def __init__(self, launcher: ProcessLauncher, count: int, request: HostRequest) -> None:
        self.expected = count
        self.forwarded, self.agent_here = False, True
        self.agents: list[HostAgent] = []
        self._connected = False
        self._addresses = list(launcher.addresses) or [HERE] * count
        self._names = list(launcher.addresses) or [f"{gethostname()} ({next(_numbers)})" for _ in range(count)]
        try:
            for index in range(count):
                config = msgspec.structs.replace(request.agent, listen=f"tcp://{self._addresses[index]}")
                config.owner_pid, config.owner_start = parent()
                config.grace = launcher.grace
                prefix = list(launcher.prefixes[index]) if launcher.prefixes else []
                self.agents.append(HostAgent(config, announces=True, prefix=prefix, env=launcher.env))
        except BaseException:
            self.end()
            raise
        self._waiting = list(range(count))

    def watch(self, timeout: float) -> Sequence[News]:
        """Return the report of the next agent; wait up to ``timeout`` seconds for it."""
        poller = select.poll()
        of: dict[int, int] = {}
        for index in self._waiting:
            self.agents[index].begin()
            of[self.agents[index].fileno()] = index
            poller.register(self.agents[index], select.POLLIN)
        found = [of[file] for file, _ in poller.poll(max(0.0, timeout) * 1000)] if of else []
        if not found:
            return []
        index = min(found)
        self._waiting.remove(index)
        agent, host = self.agents[index], self._names[index]
        line = agent.first_line() or b""
        if not line or line.startswith(UNABLE.encode()):
            if not line:
                agent.wait()
            code = "an unknown code" if agent.code is None else f"code {agent.code}"
            why = line.decode().strip() or f"exited during startup with {code}"
            return [Failed(f"a host agent at {host}", why)]
        return [Joined(host, index, msgspec.json.decode(line, type=Listening))]

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return the address of an agent."""
        self._connected = True
        return HostRoute(joined.listening.owner_address)

    def settle(self) -> None:
        """Do nothing: no agent is waited for longer than it takes."""

    def keep_trying(self) -> bool:
        """Return False: what has failed here fails again."""
        return False

    def left(self) -> float | None:
        """Return None: nobody takes the hosts back."""
        return None

    def end(self) -> None:
        """Wait until the agents have ended, which the session has told those that it connected to; kill the others."""
        for agent in self.agents:
            if not self._connected:
                agent.signal(signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for agent in self.agents:
            if not agent.wait(deadline - time.monotonic()):
                agent.signal(signal.SIGKILL)
                agent.wait()
            agent.release()


def make(where: str, count: int, options: Mapping[str, Any]) -> ProcessLauncher:
    """Return the launcher of ``process:2``, or of ``process`` with a number of hosts."""
    if where and not where.isdecimal():
        raise ArgumentError(f"process: expected a number of hosts, got {where!r}")
    named = int(where or count)
    if count and count != named:
        raise ArgumentError(
            f"process: 'process:{named}' asks for {named} hosts, but {count} are requested; write "
            f"'process:{count}', or leave one of them out"
        )
    return ProcessLauncher(count=named, **{**_USUAL, **options})
