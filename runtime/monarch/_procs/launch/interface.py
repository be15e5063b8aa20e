"""The interface of launchers: ask for hosts, watch them come, connect to them, and end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from monarch._procs.agent.request import AgentConfig
from monarch._wire.messages import Listening
from monarch.exceptions import ArgumentError


@dataclass(frozen=True)
class HostRequest:
    """A request for hosts.

    Attributes:
        count: the number of hosts; 0 for all that the launcher names.
        agent: the configuration of each host agent; the launcher adds where it listens and what it ends with.
        name: a short name for queues and messages.
        at_least: how many hosts the program begins with, if the others take longer; 0 for all.
    """

    count: int
    agent: AgentConfig
    name: str = "monarch"
    at_least: int = 0


def count_of(launcher: str, asked: int, named: int) -> int:
    """Return the number of hosts of a request, or else the one that the launcher has.

    Raises:
        ArgumentError: neither says how many.
    """
    count = asked or named
    if count < 1:
        raise ArgumentError(f"{launcher}: expected a number of hosts, at least 1, got {count}; for example --hosts 2")
    return count


@dataclass(frozen=True)
class Queued:
    """The scheduler has not granted the hosts yet.

    Attributes:
        what: as in ``job 7``.
        reason: in the words of the scheduler.
        ahead: the number of pending jobs before it; None if unknown.
        start: expected start, in seconds since the epoch; 0 if unknown.
    """

    what: str
    reason: str = ""
    ahead: int | None = None
    start: float = 0.0


@dataclass(frozen=True)
class Starting:
    """A host is reached, and its Python starts."""

    host: str


@dataclass(frozen=True)
class Installing:
    """A host installs packages.

    Attributes:
        host: name of the host.
        what: name of the lock file.
        by: ``uv``, ``pip`` or ``unpacking``.
    """

    host: str
    what: str
    by: str


@dataclass(frozen=True)
class Environment:
    """The Python of a host has answered.

    Attributes:
        host: name of the host.
        python: its version, such as ``3.11.7``.
        torch: the version of its torch.
        executable: the path of its interpreter.
        remarks: sentences on what differs from this program.
    """

    host: str
    python: str
    torch: str
    executable: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Joined:
    """A host agent listens.

    Attributes:
        host: name of the host.
        index: its place among the hosts that were asked for.
        listening: where its agent listens, with addresses that other hosts can connect to.
    """

    host: str
    index: int
    listening: Listening


@dataclass(frozen=True)
class Failed:
    """A host will not come.

    Attributes:
        host: its name, or what was asked for if it has none yet.
        reason: what happened.
        advice: what to do next; may be empty.
        is_reached: whether it was connected to before.
    """

    host: str
    reason: str
    advice: str = ""
    is_reached: bool = True


News: TypeAlias = Queued | Starting | Installing | Environment | Joined | Failed


@dataclass(frozen=True)
class HostRoute:
    """How this program and a host reach each other.

    Attributes:
        address: the address of the host's agent, as this program connects to it.
        here: addresses of this program's host as that host connects to them, by the address that others use.
    """

    address: str
    here: Mapping[str, str] = field(default_factory=dict[str, str])


class Launch(Protocol):
    """Hosts that were asked for. Used by one thread at a time; ``end`` may be called by any thread, more than once."""

    @property
    def expected(self) -> int:
        """The number of hosts that were asked for."""
        ...

    @property
    def forwarded(self) -> bool:
        """Whether the hosts and this program reach each other by forwarded ports of 127.0.0.1."""
        ...

    @property
    def agent_here(self) -> bool:
        """Whether the agent of this program's host starts with the hosts, not when something runs here."""
        ...

    def watch(self, timeout: float) -> Sequence[News]:
        """Return what happened since the last call; wait up to ``timeout`` seconds for it."""
        ...

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return how this program and a host reach each other.

        Args:
            joined: the host.
            here: the addresses of this program and of its agent.

        Raises:
            SpawnError: there is no way.
        """
        ...

    def settle(self) -> None:
        """Wait no longer: end what has not joined."""
        ...

    def keep_trying(self) -> bool:
        """From now on, ask again for hosts that have failed; return whether the launcher can do that."""
        ...

    def left(self) -> float | None:
        """Return the seconds until the scheduler takes the hosts back; None if it does not, or not known."""
        ...

    def end(self) -> None:
        """End the hosts that have come and cancel the others. Waits a few seconds at most."""
        ...


class Launcher(Protocol):
    """A source of hosts."""

    def ask(self, request: HostRequest) -> Launch:
        """Ask for hosts and return at once.

        Raises:
            SpawnError: the scheduler is not available here, or refuses the request.
            ArgumentError: the request does not fit this launcher.
        """
        ...
