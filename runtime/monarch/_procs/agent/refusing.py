"""What an agent tells programs that it does not serve, so that they need not wait and guess."""

from __future__ import annotations

from collections.abc import Callable

from monarch._procs.agent.router import Router
from monarch._wire import messages as m

_MOST = 1000
"""Programs of other versions that are remembered."""


class Refusing:
    """The refusals of one agent.

    Args:
        proc: id of the agent.
        router: its sockets.
        later: runs a function after some seconds.
        lease: seconds in which a refusal is sent.
    """

    def __init__(
        self, proc: str, router: Router, later: Callable[[float, Callable[[], None]], object], lease: float
    ) -> None:
        self.pid = 0
        """Pid of the controller, if it has identified itself."""
        self._proc = proc
        self._router = router
        self._later = later
        self._lease = lease
        self._others: dict[str, int] = {}
        """By proc id, the protocol versions of processes that speak another one."""
        self._told: dict[str, int] = {}
        """By proc id of strangers, how many refusals each was sent in the last seconds."""

    def greeted(self, hello: m.Hello) -> None:
        """Refuse a process of another version: now if its address is known, or else once it asks."""
        if len(self._others) < _MOST:
            self._others[hello.proc] = hello.version
        if self._router.knows(hello.proc):
            self._router.send(hello.proc, [m.encode(m.Refused(m.VERSION, self._proc, self._version_of(hello.proc)))])

    def is_other(self, hosts: m.Hosts) -> bool:
        """Return whether the sender speaks another version."""
        return any(proc in self._others for proc in hosts.hosts)

    def answer(self, hosts: m.Hosts, owner: str) -> None:
        """Refuse a program that asks who this is.

        Args:
            hosts: its question, with its address.
            owner: proc id of the controller; empty if there is none.
        """
        for proc in hosts.hosts:
            reason = self._version_of(proc) if proc in self._others else self._in_use_by(owner)
            self._router.learn(hosts)
            self._router.send(proc, [m.encode(m.Refused(m.VERSION, self._proc, reason, hosts.token))])
            self._told[proc] = self._told.get(proc, 0) + 1
            self._later(3 * self._lease, lambda proc=proc: self._part(proc))

    def told(self, proc: str) -> bool:
        """Return whether a process was refused a moment ago, so that the end of its connection is no loss."""
        return proc in self._told

    def _part(self, proc: str) -> None:
        """Close the connection to a program that has not asked again."""
        self._told[proc] -= 1
        if not self._told[proc]:
            del self._told[proc]
            self._others.pop(proc, None)
            self._router.forget_address(proc)

    def _version_of(self, proc: str) -> str:
        return (
            f"it speaks version {m.VERSION} of the protocol, and this program version {self._others[proc]}; install "
            f"the same version of monarch-kernel-runtime in both places"
        )

    def _in_use_by(self, owner: str) -> str:
        machine = next((at for at, _ in self._router.address_of(owner).hosts.values()), "")
        where = f" at {machine.removeprefix('tcp://').rpartition(':')[0]}" if machine else ""
        user = f"process {self.pid}{where}" if self.pid else f"another program{where}"
        return f"it is in use by {user}; end the mesh or the program there, or use another worker"
