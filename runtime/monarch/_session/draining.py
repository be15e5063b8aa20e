"""Notices that hosts are taken back: by a scheduler, a cloud, or whoever ends their agents."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from monarch._node.current import current_node
from monarch._node.future import in_thread
from monarch._node.node import Node
from monarch._node.services.registry import service
from monarch._wire import messages as m

_GATHER_S = 0.3
"""Seconds for the notices of the other hosts of an allocation."""


@dataclass(frozen=True)
class HostNotice:
    """The notice that a host is being taken back.

    Attributes:
        host: its id.
        name: its name.
        reason: ``SIGTERM``, or ``notice`` from the command of the option ``notice``.
        seconds: from the notice until the host may be gone.
    """

    host: str
    name: str
    reason: str
    seconds: float
    _since: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        """Seconds until the host may be gone."""
        return max(0.0, self._since + self.seconds - time.monotonic())

    def __str__(self) -> str:
        return f"host {self.name} is being taken back ({self.reason}); it may be gone in {self.seconds:.0f} s"


class Notices:
    """The notices of all hosts of a program."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._of: dict[str, Preemption] = {}
        """By host id. Under ``_lock``."""

    def subscribe(self, hosts: Sequence[str], preemption: Preemption) -> None:
        """Tell the notices of hosts to their launch."""
        with self._lock:
            self._of.update(dict.fromkeys(hosts, preemption))

    def release(self, hosts: Sequence[str]) -> None:
        """Tell no more notices of hosts, which end."""
        with self._lock:
            for host in hosts:
                self._of.pop(host, None)

    def arrived(self, host: str, reason: str, seconds: float) -> None:
        """Take a notice, in the receiving thread."""
        with self._lock:
            preemption = self._of.get(host)
        if preemption is not None:
            preemption.arrived(host, reason, seconds)


class Preemption:
    """The notices of the hosts of one launch, with what to do about them.

    Args:
        node: the node of this program.
        names: the names of the hosts, by id; more are added when hosts join later.
        tell: shows a line, and is told that it still matters later.
    """

    def __init__(self, node: Node, names: Mapping[str, str], tell: Callable[[str, bool], None]) -> None:
        self._node = node
        self._names = names
        self.tell = tell
        """Shows a line. Set by the program before it needs it."""
        self._lock = threading.Lock()
        self._new: list[HostNotice] = []
        """Notices that wait for those of other hosts. Under ``_lock``."""
        self._known: dict[str, HostNotice] = {}
        """The last notice of each host. Under ``_lock``."""
        self.handler: Callable[[Sequence[HostNotice]], object] | None = None
        """Called with the notices that came together, in a thread. Set by the program before it needs it."""
        self.holds = False
        """Whether hosts stay until the handler's owner lets them go; otherwise, until the handler has returned. Set
        with ``handler``."""

    def name(self, host: str) -> str:
        """Return the name of a host."""
        return self._names.get(host, host)

    def notice_of(self, host: str) -> HostNotice | None:
        """Return the notice of a host; None if it is not taken back."""
        with self._lock:
            return self._known.get(host)

    def forget(self, hosts: Sequence[str]) -> None:
        """Forget the notices of hosts, which have stayed."""
        with self._lock:
            for host in hosts:
                self._known.pop(host, None)

    def arrived(self, host: str, reason: str, seconds: float) -> None:
        """Take a notice, in the receiving thread."""
        notice = HostNotice(host, self.name(host), reason, seconds)
        with self._lock:
            self._new.append(notice)
            self._known[host] = notice
            first = len(self._new) == 1
        if first:
            self._node.receive_loop.call_later(_GATHER_S, self._begin)

    def _begin(self) -> None:
        in_thread(self._node, "preempted", self._handle)

    def _handle(self) -> None:
        with self._lock:
            notices, self._new = self._new, []
        for each in notices:
            self.tell(str(each), True)
        try:
            if self.handler is not None and notices:
                self.handler(notices)
        finally:
            if not self.holds:
                # So that the agents end in order, before they are killed.
                for each in notices:
                    self._node.peers.to_agent(each.host, m.Bye(self._node.proc))


@service("draining.notice", "quick")
def notice(host: str, reason: str, seconds: float) -> None:
    """On the program: an agent says that its host is taken back."""
    current_node().part(Notices).arrived(host, reason, seconds)
