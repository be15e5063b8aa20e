"""A host agent that outlives its controller: while none is connected, it runs until its lease ends.

While a controller is connected it works as any agent. When the connection breaks the lease begins: until it ends the
ranks keep running, their output is kept, and any program with the mesh's key may become the controller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from monarch._core.causes import Detached
from monarch._procs.agent import services
from monarch._procs.agent.agent import Agent
from monarch._procs.agent.output_backlog import OutputBacklog
from monarch._procs.agent.request import AgentConfig
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.rank.output import cost_of
from monarch._procs.session_folder import sweep
from monarch._wire import messages as m
from monarch.exceptions import DetachedMeshInUseError, MonarchError

_LOOK = 30.0
"""Seconds between looks at the clock, which runs while the machine sleeps, unlike timers."""
_TIDY = (0.5, 5.0)
"""Seconds after the loss of a program in which it has ended, if it was killed: other sessions clean up its folder."""


class LeasedAgent(Agent):
    """The state of the agent, and how it differs from others. Its first lease begins when the first controller goes."""

    def __init__(self, config: AgentConfig, zygote: Zygote | None = None) -> None:
        super().__init__(config, zygote)
        assert config.keys is not None
        self.user = 0
        """Pid of the controller; 0 if none."""
        self.former: set[str] = set()
        """Proc ids of former controllers."""
        self.listens = False
        """Whether the controller takes output: it has reported that it is ready for earlier output."""
        self.backlog = OutputBacklog()
        self.orders: dict[str, m.Spawn] = {}
        """By uid of each mesh of procs of the controller: how its last procs were requested."""
        self.descriptions: dict[str, bytes] = {}
        """The controller's description of it, for the next one."""
        self.notes = b""
        """Bytes that the controller has left here for the next one."""
        self._ends = 0.0
        self._leases = 0
        self._address = m.Hosts({})
        """Send to the controller."""
        self._others: list[str] = []
        """Ids of the other hosts of the mesh."""
        self.services.update(
            {
                services.CLAIM: self._claim,
                services.LISTEN: self._listen_again,
                services.NOTE: self._note,
                services.DESCRIBE: self._tell_of,
            }
        )

    # The lease

    def _lease(self, seconds: float) -> None:
        self._ends = boot_time() + seconds
        self._leases += 1
        self.user = 0
        self._look(self._leases)

    def _look(self, lease: int) -> None:
        left = self._ends - boot_time()
        if self.owner or lease != self._leases:
            return
        if left <= 0:
            self.closing = True
        else:
            self._later(min(left, _LOOK), lambda: self._look(lease))

    def _owner_died(self) -> None:
        owner, self.owner = self.owner, ""
        if not owner:
            # A process that was not the controller has left.
            return
        self.former.add(owner)
        self.listens = False
        self.reports.held = True
        self.uplink.reset()
        self.router.forget(self._others)
        self._part_from(owner)
        # Callers that wait for its answer must not wait until the next controller comes.
        self._tell_of_former(list(self.children.by_proc))
        self._lease(self.config.seconds)
        for seconds in _TIDY:
            self._later(seconds, self._tidy)

    def _tell_of_former(self, procs: Sequence[str]) -> None:
        for owner in self.former:
            frame = m.encode(m.Dead(owner, Detached(self.config.name), False, []))
            for proc in procs:
                self.router.send(proc, [frame])

    def _part_from(self, owner: str) -> None:
        """If it is alive, for example after a long suspension, it must learn that nobody listens to it here."""
        reason = f"lost the connection to detached mesh {self.config.name!r}; attach it again"
        self.router.learn(self._address)
        self.router.send(owner, [m.encode(m.Refused(m.VERSION, self.proc, reason))])

        def part() -> None:
            if self.owner != owner:
                self.router.forget_address(owner)

        self._later(3 * self.config.lease, part)

    def _tidy(self) -> None:
        """Remove the leftovers of killed programs, which no other process is sure to see."""
        with suppress(FileNotFoundError):
            # One of them removes its own just now.
            sweep(Path(self.folder).parent)

    def close(self) -> None:
        """End everything, without leftovers."""
        self._tidy()
        super().close()

    # Controllers

    def _on_hello(self, hello: m.Hello, _: list[Any]) -> None:
        if hello.version != m.VERSION:
            super()._on_hello(hello, _)

    def _on_hosts(self, hosts: m.Hosts, _: list[Any]) -> None:
        """Identify itself to any process with the key; a claim is needed to become the controller."""
        if hosts.token and self.refusing.is_other(hosts):
            self.refusing.answer(hosts, "")
            return
        self.router.learn(hosts)
        if hosts.token and self.listening is not None:
            for proc in hosts.hosts:
                self._tell(proc, msgspec.structs.replace(self.listening, token=hosts.token))

    def _on_uplink(self, uplink: m.Uplink, _: list[Any]) -> None:
        """Keep the connection to the controller: its end begins the lease."""
        super()._on_uplink(msgspec.structs.replace(uplink, relayed=False), [])

    def _claim(self, ask: m.Ask, what: tuple[int, list[str]]) -> dict[str, Any]:
        """Make another program the controller, and tell it what runs here."""
        # The end of the last controller may not be processed yet.
        self._follow_owner()
        name = self.config.name
        if self.owner and self.owner != ask.src:
            raise DetachedMeshInUseError(
                f"detached mesh {name!r} is in use by process {self.user}; attach it once that process has "
                f"ended or lost its connection"
            )
        if self.router.owner_monitor is not None and not self.router.own():
            raise MonarchError(f"{ask.src} is no longer connected to detached mesh {name!r}; attach it again")
        self.owner = ask.src
        self._address = self.router.address_of(ask.src)
        self.former.discard(ask.src)
        for former in self.former:
            for child in self.children.owned_by(former):
                child.owner = ask.src
                self.children.add(child)
        self.user, self._others = what
        if self.config.one_port:
            # Its connection to the shared port is not told from those of others: watch the one back to it.
            self.router.connect(ask.src)
        return {
            "former": sorted(self.former),
            "procs": [[child.proc, child.owner, child.pid] for child in self.children.by_proc.values()],
            "orders": [[m.encode(order), self.descriptions.get(uid, b"")] for uid, order in self.orders.items()],
            "passed": [[*where, offset] for where, offset in self.backlog.passed.items()],
            "dropped": self.backlog.dropped,
            "notes": self.notes,
        }

    def _follow_owner(self) -> None:
        if self.router.owner_lost():
            self._owner_died()
        for monitor in self.router.monitors():
            if monitor.poll(0):
                self._link_lost(monitor)

    def _listen_again(self, ask: m.Ask, _: Any) -> None:
        """Send the controller the output kept so far."""
        self._check(ask)
        self.listens = True
        for message in self.backlog.take():
            known = m.decode(message)
            if isinstance(known, m.Output):
                self.backlog.passes(known)
            if not self.uplink.add(self.owner, message):
                self.router.send(self.owner, [message])
        self.reports.resume(self.owner)

    def _note(self, ask: m.Ask, notes: bytes) -> None:
        self._check(ask)
        self.notes = notes

    def _tell_of(self, ask: m.Ask, what: list[Any]) -> None:
        self._check(ask)
        uid, description = what
        if uid in self.orders:
            self.descriptions[uid] = description

    def _check(self, ask: m.Ask) -> None:
        if ask.src != self.owner:
            raise MonarchError(f"{ask.src} is not the controller of detached mesh {self.config.name!r}")

    # Messages that pass through

    def _on_route(self, route: m.Route, frames: list[Any]) -> None:
        if route.dst == self.owner or route.dst in self.former:
            message = m.decode(frames[0])
            if isinstance(message, (m.Output, m.Fault)):
                if isinstance(message, m.Output) and not (self.owner and self.listens):
                    # Let the sender continue, since nobody else grants it credit.
                    super()._tell(
                        message.src, m.OutputCredit(self.proc, sum(cost_of(data) for _, _, data in message.pieces))
                    )
                self._tell(self.owner, message)
                return
            if route.dst in self.former:
                # An answer for a process that has left.
                return
        super()._on_route(route, frames)

    def _tell(self, proc: str, message: m.AnyMessage) -> None:
        to_owner = proc == self.owner
        if to_owner and isinstance(message, m.Output):
            if not self.listens:
                self.backlog.keep(message)
                return
            self.backlog.passes(message)
        elif to_owner and isinstance(message, m.Fault) and not self.listens:
            self.backlog.put(m.encode(message), 0)
            return
        super()._tell(proc, message)

    def _on_spawn(self, spawn: m.Spawn, _: list[Any]) -> None:
        if spawn.src in self.former:
            return
        if spawn.src == self.owner:
            for proc in spawn.procs:
                self.orders[_uid(proc)] = spawn
        super()._on_spawn(spawn, _)
        if not self.owner:
            # A rank that has begun after the end of its program may not have heard of it.
            self._tell_of_former(spawn.procs)

    def _on_cast(self, cast: m.Cast, frames: list[Any]) -> None:
        # A late message from a lost controller was an error there.
        if cast.src not in self.former:
            super()._on_cast(cast, frames)

    def _died(self, dead: m.Dead) -> None:
        super()._died(dead)
        last = m.Output(dead.proc, "", "", "", 0, dead.tails)
        if self.owner:
            # It goes with the death notice.
            self.backlog.passes(last)
        else:
            self._tell(self.owner, last)
        uid = _uid(dead.proc)
        if dead.expected and not any(_uid(proc) == uid for proc in self.children.by_proc):
            # It was stopped as a whole, so nobody will ask for it.
            self.orders.pop(uid, None)
            self.descriptions.pop(uid, None)
            self.backlog.forget([where for where in self.backlog.passed if _uid(where[0]) == uid])


def _uid(proc: str) -> str:
    """Return the mesh of a proc."""
    return proc.partition("/")[2].rpartition(".")[0]


def boot_time() -> float:
    """Return a monotonic time in seconds that also advances while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
