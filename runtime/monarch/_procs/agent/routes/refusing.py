"""The refusals of an agent: programs that it does not serve learn why."""

from __future__ import annotations

import time
from collections.abc import Callable

from monarch._procs.agent.routes.router import Router
from monarch._wire.messages import VERSION, Hello, Hosts, Refused, encode

_MOST_VERSIONS = 1000
"""Programs of other versions that are remembered."""
_MOST_REFUSED = 64
"""Refused programs to which there is a connection."""
_TURN_S = 1.0
"""Seconds without a question after which a refused program gives way to another one."""
_PACE_S = 0.05
"""Seconds between answers to a program, which may ask again as soon as it has one."""
_MOST_TOKENS = 8
"""Questions of a program that are answered together: several of its threads may ask."""
_MOST_GREETED = 300
"""Answers to Hello in a second."""


class Refusing:
    """The refusals of one agent. They may cost its owner little, however many programs ask. Used by its one thread.

    Args:
        router: the sockets of the agent.
        later: runs a function after some seconds.
    """

    def __init__(self, router: Router, later: Callable[[float, Callable[[], None]], object]) -> None:
        self.pid = 0
        """Pid of the controller, if it has identified itself."""
        self._router = router
        self._later = later
        self._keep_s = 3 * router.lease
        """Seconds after its last message for which a program is remembered: a refusal is sent within a lease."""
        self._versions: dict[str, tuple[int, float]] = {}
        """By proc id, the protocol versions of programs that speak another one, and when they were last heard, in
        monotonic seconds. The oldest first."""
        self._refused: dict[str, float] = {}
        """By proc id of the programs to which there may be a connection, when they were last answered. The oldest
        first."""
        self._sweeps = False
        """Whether there is a timer for those that are silent."""
        self._owner = ""
        """The controller when somebody asked last."""
        self._asked: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {}
        """By proc id, where a program listens and the tokens of its newest questions; their timer runs."""
        self._second = 0.0
        """When the present second of answers to Hello began."""
        self._answers = 0
        """Their number in it."""

    def greeted(self, hello: Hello) -> None:
        """Refuse a process of another version: now if its address is known, or else once it asks."""
        self._note_version(hello.proc, hello.version)
        if self._router.listens(hello.proc) and self._has_room():
            reason = _of_version(hello.version)
            self._router.send(hello.proc, [encode(Refused(VERSION, self._router.proc, reason))])

    def is_other(self, hosts: Hosts) -> bool:
        """Return whether the sender speaks another version."""
        return any(proc in self._versions for proc in hosts.hosts)

    def answer(self, hosts: Hosts, owner: str) -> None:
        """Refuse a program that asks who this is, unless too many do: it asks again.

        Args:
            hosts: its question, with its address.
            owner: proc id of the controller; empty if there is none.
        """
        self._owner = owner
        for proc, where in hosts.hosts.items():
            if not self._admits(proc):
                continue
            if not self._asked:
                self._later(_PACE_S, self._say_all)
            _, tokens = self._asked.get(proc, (where, ()))
            self._asked[proc] = where, (*tokens, hosts.token)[-_MOST_TOKENS:]

    def _say_all(self) -> None:
        """Answer the questions since the last time."""
        asked, self._asked = self._asked, {}
        for proc, ((address, public), tokens) in asked.items():
            if proc not in self._refused:
                # It has given way to another one.
                continue
            version, _ = self._versions.get(proc, (VERSION, 0.0))
            if version != VERSION:
                self._note_version(proc, version)
            reason = self._in_use_by(self._owner) if version == VERSION else _of_version(version)
            self._router.note(proc, address, public)
            for token in tokens:
                self._router.send(proc, [encode(Refused(VERSION, self._router.proc, reason, token))])

    def told(self, proc: str) -> bool:
        """Return whether a process was refused a moment ago, so that the end of its connection is no loss."""
        return proc in self._refused

    def _note_version(self, proc: str, version: int) -> None:
        self._versions.pop(proc, None)
        if len(self._versions) >= _MOST_VERSIONS:
            del self._versions[next(iter(self._versions))]
        self._versions[proc] = version, time.monotonic()
        self._sweep_later()

    def _has_room(self) -> bool:
        """Return whether there may be one more answer in this second, and count it."""
        now = time.monotonic()
        if now >= self._second + 1:
            self._second, self._answers = now, 0
        self._answers += 1
        return self._answers <= _MOST_GREETED

    def _admits(self, proc: str) -> bool:
        """Return whether a program is answered now, and note that."""
        now = time.monotonic()
        if proc not in self._refused:
            if self._router.address_of(proc).hosts:
                # The owner has announced it, and nobody else tells where it listens.
                return False
            if len(self._refused) >= _MOST_REFUSED:
                oldest = next(iter(self._refused))
                if now < self._refused[oldest] + _TURN_S:
                    return False
                self._part(oldest)
        self._refused.pop(proc, None)
        self._refused[proc] = now
        self._sweep_later()
        return True

    def _sweep_later(self) -> None:
        if not self._sweeps:
            self._sweeps = True
            self._later(self._router.lease, self._sweep)

    def _sweep(self) -> None:
        """Forget the programs that have not asked for a while, and close the connections to them."""
        self._sweeps = False
        before = time.monotonic() - self._keep_s
        for proc in [proc for proc, at in self._refused.items() if at <= before]:
            self._part(proc)
        self._versions = {proc: (version, at) for proc, (version, at) in self._versions.items() if at > before}
        if self._refused or self._versions:
            self._sweep_later()

    def _part(self, proc: str) -> None:
        del self._refused[proc]
        self._router.forget_address(proc)

    def _in_use_by(self, owner: str) -> str:
        machine = next((at for at, _ in self._router.address_of(owner).hosts.values()), "")
        where = f" at {machine.removeprefix('tcp://').rpartition(':')[0]}" if machine else ""
        user = f"process {self.pid}{where}" if self.pid else f"another program{where}"
        return f"it is in use by {user}; end the mesh or the program there, or use another worker"


def _of_version(version: int) -> str:
    return (
        f"it speaks protocol version {VERSION}, and this program speaks {version}; install the same version of "
        f"monarch-kernel-runtime on both sides"
    )
