"""The launcher of workers that somebody has started already: ``python -m monarch.worker tcp://...`` on each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarch._procs.launch.interface import HostRequest, HostRoute, Joined, News
from monarch._wire.messages import Listening


@dataclass(frozen=True)
class WorkerLauncher:
    """Workers at known addresses. They hold the key of the request already, so nothing is sent to them here.

    Attributes:
        addresses: such as ``tcp://node1:22222``.
        public: the public key that all of them have.
    """

    addresses: Sequence[str]
    public: str

    def ask(self, request: HostRequest) -> WorkerLaunch:
        """Return the workers."""
        return WorkerLaunch(self)


class WorkerLaunch:
    """Workers that wait for a program.

    Args:
        launcher: its settings.
    """

    forwarded = False
    agent_here = True

    def __init__(self, launcher: WorkerLauncher) -> None:
        self.expected = len(launcher.addresses)
        self._news = [
            # The worker says which host it is when it is greeted.
            Joined(address, index, Listening("", address, "", launcher.public))
            for index, address in enumerate(launcher.addresses)
        ]

    def watch(self, timeout: float) -> Sequence[News]:
        """Return all workers, once."""
        news, self._news = self._news, []
        return news

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return the address of a worker."""
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
        """Do nothing: a worker serves the next program when this one says goodbye."""
