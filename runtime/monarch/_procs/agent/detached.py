"""The agent of a kept mesh: a host agent that outlives its controller, until a lease with a written end is over.

It runs as ``python -m monarch._procs.agent.detached``, and belongs to no other process. While a controller is
connected it does what every agent does. When the connection breaks the lease begins: until its end the ranks go on,
what they print is kept, and any program that holds the key of the record may become the controller.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from monarch._core.causes import Detached
from monarch._procs.agent import services
from monarch._procs.agent.detached_records import Record, publish, write
from monarch._procs.agent.main import Agent, run_agent
from monarch._procs.agent.output_backlog import OutputBacklog
from monarch._procs.agent.request import AgentConfig
from monarch._procs.os.orphans import unmark
from monarch._procs.rank.output import cost_of
from monarch._procs.session_folder import sweep
from monarch._wire import messages as m
from monarch.exceptions import DetachedMeshInUseError, MonarchError

_CLAIM = 10.0
"""Seconds in which whoever has started it is to connect."""
_LOOK = 30.0
"""Seconds between looks at the clock, which goes on while the machine sleeps as timers do not."""


_TIDY = (0.5, 5.0)
"""Seconds after the loss of a program in which it has ended, if it was killed: its folder is left for others."""


class DetachedConfig(AgentConfig):
    """What such an agent is started with."""

    name: str = ""
    seconds: float = 0.0
    """How long it lives without a controller."""


class DetachedAgent(Agent):
    """State of the agent, and what it does otherwise than others."""

    def __init__(self, config: DetachedConfig) -> None:
        super().__init__(config)
        assert config.keys is not None
        self.record = Record(
            config.name,
            self.host,
            "",
            *config.keys,
            os.getpid(),
            int(self.folder.rpartition("-")[2]),
            time.time(),
            config.seconds,
        )
        self.former: set[str] = set()
        """Proc ids of controllers that were."""
        self.listens = False
        """Whether the controller takes output: it has said that it is ready for what was printed before."""
        self.backlog = OutputBacklog()
        self.orders: dict[str, m.Spawn] = {}
        """Of each mesh of procs of the controller, by uid, how its last procs were asked for."""
        self.told: dict[str, bytes] = {}
        """And what else the controller has said of it, for the next one."""
        self.book = b""
        """What the controller has left here for the next one."""
        self._ends = 0.0
        self._leases = 0
        self._way = m.Hosts({})
        """To the controller."""
        self.services.update(
            {
                services.CLAIM: self._claim,
                services.LISTEN: self._listen_again,
                services.NOTE: self._note,
                services.DESCRIBE: self._tell_of,
            }
        )

    def begin(self) -> m.Listening:
        """Listens, and writes the record; TakenError if there is a mesh of that name."""
        listening = self.listen(self.config.listen, self.config.owner_public.encode(), [])
        self.record.address = listening.owner_address
        self._lease(min(self.record.seconds, _CLAIM))
        publish(self.folder, self.record)
        return listening

    # The lease

    def _lease(self, seconds: float) -> None:
        self._ends = _now() + seconds
        self._leases += 1
        self.record.user, self.record.until = 0, time.time() + seconds
        self._look(self._leases)

    def _look(self, lease: int) -> None:
        left = self._ends - _now()
        if self.owner or lease != self._leases:
            return
        if left <= 0:
            self.closing = True
        else:
            self._later(min(left, _LOOK), lambda: self._look(lease))

    def _write(self) -> None:
        try:
            write(self.folder, self.record)
        except OSError as error:
            # Where there is no room, the record as it was has the key all the same.
            print(f"the record of {self.record.name!r} is not up to date: {error}", file=sys.stderr, flush=True)

    def _owner_died(self) -> None:
        owner, self.owner = self.owner, ""
        if not owner:
            # Somebody who was not the controller has gone.
            return
        self.former.add(owner)
        self.listens = False
        self.router.forget()
        self._part_from(owner)
        frame = m.encode(m.Dead(owner, Detached(self.record.name), False, []))
        for proc in list(self.children.by_proc):
            # Who waits for an answer of it need not wait until the next one comes.
            self.router.send(proc, [frame])
        self._lease(self.record.seconds)
        self._write()
        for seconds in _TIDY:
            self._later(seconds, self._tidy)

    def _part_from(self, owner: str) -> None:
        """If it lives, as one that was stopped for long may, it is to know that nobody listens to it here."""
        reason = f"the connection to the kept mesh {self.record.name!r} has broken; it may be attached again"
        self.router.learn(self._way)
        self.router.send(owner, [m.encode(m.Refused(m.VERSION, self.proc, reason))])

        def part() -> None:
            if self.owner != owner:
                self.router.forget_way(owner)

        self._later(3 * self.config.lease, part)

    def _tidy(self) -> None:
        """Removes what programs have left that were killed, and that nobody else is sure to see."""
        with suppress(FileNotFoundError):
            # One of them goes by itself just now.
            sweep(Path(self.folder).parent)

    def close(self) -> None:
        """Ends all, and leaves nothing."""
        self._tidy()
        super().close()

    # Controllers

    def _on_hello(self, hello: m.Hello, more: list[Any]) -> None:
        if hello.version != m.VERSION:
            super()._on_hello(hello, more)

    def _on_hosts(self, hosts: m.Hosts, _: list[Any]) -> None:
        """Says whom it is to anybody with the key; to be the controller takes a claim."""
        self.router.learn(hosts)
        if hosts.token and self.listening is not None:
            for proc in hosts.hosts:
                self._tell(proc, msgspec.structs.replace(self.listening, token=hosts.token))

    def _claim(self, ask: m.Ask, pid: int) -> dict[str, Any]:
        """Another program becomes the controller, and learns what there is."""
        if self.router.owner_lost():
            # Its end was not looked at yet.
            self._owner_died()
        name = self.record.name
        if self.owner and self.owner != ask.src:
            raise DetachedMeshInUseError(
                f"the kept mesh {name!r} is in use by process {self.record.user}; it can be attached when that has "
                f"ended, or has lost its connection"
            )
        self.owner = ask.src
        self.router.own()
        self._way = self.router.way_to(ask.src)
        self.former.discard(ask.src)
        for former in self.former:
            for child in self.children.owned_by(former):
                child.owner = ask.src
                self.children.add(child)
        self.record.user, self.record.until = pid, 0.0
        self._write()
        return {
            "former": sorted(self.former),
            "procs": [[child.proc, child.owner] for child in self.children.by_proc.values()],
            "orders": [[m.encode(order), self.told.get(uid, b"")] for uid, order in self.orders.items()],
            "passed": [[*where, offset] for where, offset in self.backlog.passed.items()],
            "dropped": self.backlog.dropped,
            "book": self.book,
        }

    def _listen_again(self, ask: m.Ask, _: Any) -> None:
        """The controller is ready for what was printed meanwhile."""
        self._check(ask)
        self.listens = True
        for message in self.backlog.take():
            known = m.decode(message)
            if isinstance(known, m.Output):
                self.backlog.passes(known)
            self.router.send(self.owner, [message])

    def _note(self, ask: m.Ask, book: bytes) -> None:
        self._check(ask)
        self.book = book

    def _tell_of(self, ask: m.Ask, what: list[Any]) -> None:
        self._check(ask)
        uid, told = what
        if uid in self.orders:
            self.told[uid] = told

    def _check(self, ask: m.Ask) -> None:
        if ask.src != self.owner:
            raise MonarchError(f"{ask.src} is not the controller of the kept mesh {self.record.name!r}")

    # Messages that pass through

    def _on_route(self, route: m.Route, frames: list[Any]) -> None:
        if route.dst == self.owner or route.dst in self.former:
            message = m.decode(frames[0])
            if isinstance(message, (m.Output, m.Fault)):
                if isinstance(message, m.Output) and not (self.owner and self.listens):
                    # Its sender may send more, since nobody else says so.
                    super()._tell(
                        message.src, m.OutputCredit(self.proc, sum(cost_of(data) for _, _, data in message.pieces))
                    )
                self._tell(self.owner, message)
                return
            if route.dst in self.former:
                # An answer for who is not there any more.
                return
        super()._on_route(route, frames)

    def _tell(self, proc: str, message: m.AnyMessage) -> None:
        mine = proc == self.owner
        if mine and isinstance(message, m.Output):
            if not self.listens:
                self.backlog.keep(message)
                return
            self.backlog.passes(message)
        elif mine and isinstance(message, m.Fault) and not self.listens:
            self.backlog.put(m.encode(message), 0)
            return
        super()._tell(proc, message)

    def _on_spawn(self, spawn: m.Spawn, more: list[Any]) -> None:
        if spawn.src in self.former:
            return
        if spawn.src == self.owner:
            for proc in spawn.procs:
                self.orders[_uid(proc)] = spawn
        super()._on_spawn(spawn, more)

    def _on_cast(self, cast: m.Cast, frames: list[Any]) -> None:
        # What a controller that was lost has sent late was an error there.
        if cast.src not in self.former:
            super()._on_cast(cast, frames)

    def _died(self, dead: m.Dead) -> None:
        super()._died(dead)
        last = m.Output(dead.proc, "", "", "", 0, dead.tails)
        if self.owner:
            # It goes with the news of the death.
            self.backlog.passes(last)
        else:
            self._tell(self.owner, last)
        uid = _uid(dead.proc)
        if dead.expected and not any(_uid(proc) == uid for proc in self.children.by_proc):
            # It was stopped as a whole, so nobody will ask for it.
            self.orders.pop(uid, None)
            self.told.pop(uid, None)
            self.backlog.forget([where for where in self.backlog.passed if _uid(where[0]) == uid])


def _uid(proc: str) -> str:
    """Of the mesh that a proc is of."""
    return proc.partition("/")[2].rpartition(".")[0]


def _now() -> float:
    # Of a clock that nobody sets, and that goes on while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    """Entry point of the agent's process: it goes on in a child that is nobody's, so that nobody has to reap it."""
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=DetachedConfig)
    if os.fork():
        os._exit(0)
    os.chdir("/")
    # A program that was started by a rank may keep a mesh, too.
    unmark()
    run_agent(lambda: DetachedAgent(config), _greet)


def _greet(agent: Any) -> None:
    try:
        listening = agent.begin()
    except DetachedMeshInUseError as error:
        sys.stdout.buffer.write(msgspec.json.encode(str(error)) + b"\n")
        sys.stdout.flush()
        agent.closing = True
        return
    sys.stdout.buffer.write(msgspec.json.encode(listening) + b"\n")
    sys.stdout.flush()
    # Who reads this ends some day, and nothing here is to fail for it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nowhere, fd)
    os.close(nowhere)


if __name__ == "__main__":
    main()
