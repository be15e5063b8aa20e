"""Starting the processes of one mesh: all at first, later replacements and additions."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import TypeAlias

from monarch._core.causes import NotReady, NotStarted
from monarch._core.roster import Procs
from monarch._meshes.procs.agents import agents_of
from monarch._meshes.procs.slow_start import watch_start
from monarch._node.node import Node
from monarch._node.rank_config import RankConfig
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_whole
from monarch._wire.receiving.loop import Turn
from monarch.exceptions import StoppedError

_Extra: TypeAlias = tuple[tuple[str, str | None], ...]
"""Variables of some ranks besides those of all."""
RANK_ENTRY = "monarch._session.rank.rank_process:main"
SPARE = -1
"""Base rank of a process without a rank yet."""

READY_SECONDS = float(os.environ.get("MONARCH_READY_SECONDS") or 300.0)
"""Seconds for a new process to report that it listens, including the imports of a cold zygote."""


_ENDED_S = 5.0
"""The most seconds that a failed start waits until its processes count as dead."""


class _Ended:
    """Waits until the receiving thread has noted that processes have not started."""

    label = "the end of a failed start"

    def __init__(self) -> None:
        self.done = False
        self.thread: Turn | None = None


@dataclass
class ProcStarter:
    """How the processes of a mesh are started.

    Attributes:
        bootstrap: a pickled function that each process runs first.
        owner_actor: key of the actor that owns the mesh; empty for a program.
        variables: environment of all processes.
        of_ranks: additional environment of some ranks.
        binds: cores of each process of a host.
        path: ``sys.path`` of the processes.
        cwd: their working folder.
        want_spares: the number of spare processes of each host.
    """

    node: Node
    procs: Procs
    bootstrap: bytes | None
    owner_actor: str
    variables: dict[str, str | None]
    of_ranks: Mapping[int, dict[str, str | None]]
    binds: list[list[int] | None]
    path: list[str]
    cwd: str
    want_spares: int = 0
    spares: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The names of spare processes, by host; under the lock."""
    _lock: RLock = field(default_factory=RLock)
    """Held while the table of spare processes changes; taken with that of the mesh held, never the other way round."""
    _ended: bool = False
    """Whether the mesh was stopped, so that spare processes are added no more; under the lock."""

    def start(self, ranks: Sequence[int], port: int, again: bool = False) -> None:
        """Start the processes of some ranks, which reply to the port when they are set up.

        If this raises, those that no agent was asked for count as dead, so that nobody waits for them.

        Args:
            ranks: the ranks.
            port: where they reply.
            again: whether the mesh has had processes, so that the caller may start others after an error.

        Raises:
            OSError: the host agent could not be started.
        """
        unasked = {self.procs.proc(rank): self.procs.host(rank) for rank in ranks}
        try:
            self._start(ranks, port, unasked)
        except BaseException as error:
            ended = self._give_up(unasked, str(error) or type(error).__name__, again)
            if again and not (self.node.closed or self.node.receive_loop.receives_here()):
                # A heal right after the error must find them dead, or it would not replace them.
                self.node.receive_loop.wait(ended, _ENDED_S)
            raise

    def _give_up(self, unasked: Mapping[str, str], why: str, again: bool) -> _Ended:
        peers = self.node.peers
        for name, host in unasked.items():
            # An interrupt may have come just after the request.
            with suppress(Exception):
                peers.to_agent(host, m.Stop(self.node.proc, [name], 0.0))

        ended, receive_loop = _Ended(), self.node.receive_loop

        def end() -> None:
            try:
                for name in unasked:
                    # The failure of a new mesh is the error of who spawns it, and of nobody else.
                    peers.end(m.Dead(name, NotStarted(why), not again, []))
            finally:
                ended.done = True
                receive_loop.notify(ended)

        receive_loop.post(end)
        return ended

    def _start(self, ranks: Sequence[int], port: int, unasked: dict[str, str]) -> None:
        alike: dict[_Extra, dict[str, list[int]]] = {}
        for rank in ranks:
            extra = tuple(sorted(self.of_ranks.get(rank, {}).items()))
            alike.setdefault(extra, {}).setdefault(self.procs.host(rank), []).append(rank)
        configs: dict[frozenset[str], bytes] = {}
        for extra, places in alike.items():
            variables = {**self.variables, **dict(extra)}
            config = configs.get(frozenset(variables))
            if config is None:
                config = configs[frozenset(variables)] = self._config(port, variables)
            names = {host: [self.procs.proc(rank) for rank in each] for host, each in places.items()}
            # They reply once to a port, so the answers of many hosts can be folded for one request only.
            if len(alike) == 1 and self._spawn_on_many(names, port, config, variables):
                unasked.clear()
                continue
            for host, each in places.items():
                self._spawn(host, names[host], each, config, variables)
                for name in names[host]:
                    del unasked[name]

    def fill(self) -> None:
        """Start the missing spare processes.

        Raises:
            StoppedError: the mesh was stopped.
        """
        for host in dict.fromkeys(self.procs.hosts) if self.want_spares else ():
            names = self._add_spares(host)
            if not names:
                continue
            self._spawn(host, names, [SPARE] * len(names), self._config(0, self.variables), self.variables)
            if self._ended:
                # The stop may have told the agent before these processes were started.
                self.node.peers.to_agent(host, m.Stop(self.node.proc, names, 0.0))

    def _add_spares(self, host: str) -> list[str]:
        """Add the missing spare processes of a host to the table, and return their proc ids."""
        peers = self.node.peers
        with self._lock:
            if self._ended:
                raise StoppedError(
                    f"{self.procs.name} was stopped, so it gets no more spare processes", mesh=self.procs.name
                )
            waiting = self.spares.setdefault(host, [])
            waiting[:] = [name for name in waiting if peers.get(f"{host}/{name}").dead is None]
            new = [f"{self.procs.uid}.s{secrets.token_hex(3)}" for _ in range(self.want_spares - len(waiting))]
            names = [f"{host}/{name}" for name in new]
            for name in names:
                peers.get(name, starting=True)
            waiting.extend(new)
        return names

    def take_spare(self, rank: int) -> str:
        """Return the name of a spare process on the host of a rank, or an empty string."""
        if self.of_ranks.get(rank):
            # Spares have a different environment.
            return ""
        host = self.procs.host(rank)
        with self._lock:
            waiting = self.spares.get(host, [])
            while waiting:
                name = waiting.pop(0)
                if self.node.peers.get(f"{host}/{name}").dead is None:
                    return name
        return ""

    def repeat(self, ranks: Sequence[int]) -> None:
        """Give the ranks of new hosts the environments of the first host's ranks."""
        local = self.procs.per_host
        alike = {rank: self.of_ranks[rank % local] for rank in ranks if rank % local in self.of_ranks}
        self.of_ranks = {**self.of_ranks, **alike}

    def leave(self, host: str) -> None:
        """End the spares of a host that the mesh has left."""
        with self._lock:
            waiting = self.spares.pop(host, [])
        if waiting and self.node.peers.get(f"{host}/{waiting[0]}").dead is None:
            names = [f"{host}/{name}" for name in waiting]
            self.node.peers.to_agent(host, m.Stop(self.node.proc, names, 0.0))

    def end(self) -> list[str]:
        """Add no more spare processes, and return the proc ids of all that there are."""
        with self._lock:
            self._ended = True
            return self.waiting()

    def waiting(self) -> list[str]:
        """Return the proc ids of all spare processes."""
        with self._lock:
            return [f"{host}/{name}" for host, names in self.spares.items() for name in names]

    def _config(self, port: int, variables: dict[str, str | None]) -> bytes:
        """Return the packed configuration of all processes that have these variables."""
        node, hosts = self.node, self.procs.hosts
        addresses = tuple(node.hosts.address_of(each) for each in hosts) if set(hosts) != {node.host} else ()
        return dumps_whole(
            RankConfig(
                node.proc,
                node.root,
                self.procs,
                port,
                self.bootstrap,
                self.owner_actor,
                addresses,
                bool(self.binds),
                frozenset(variables),
                node.hosts.secret,
            )
        )

    def _spawn(
        self, host: str, names: list[str], places: list[int], config: bytes, variables: dict[str, str | None]
    ) -> None:
        node = self.node
        if host == node.host:
            # The previous agent may have died, with all of its ranks.
            agents_of(node).need_agent()
        node.peers.to_agent(host, self._request(host, names, places, config, variables))
        self._watch(host, names, SPARE not in places)

    def _spawn_on_many(
        self, names: dict[str, list[str]], port: int, config: bytes, variables: dict[str, str | None]
    ) -> bool:
        """Start processes of many hosts by one request, which goes from host to host; False with few hosts."""
        hosts = self.node.hosts
        if not port or not hosts.spreads.least or len(names) < 2 or hosts.host in names:
            return False
        spawn = m.encode(self._request("", [], [], config, variables))
        far = [(hosts.gateway(host), each) for host, each in names.items() if hosts.out_of_reach(host) is None]
        hosts.cast(self.node.proc, far, port, [spawn])
        for host, each in names.items():
            self._watch(host, each, True)
        return True

    def _request(
        self, host: str, names: list[str], places: list[int], config: bytes, variables: dict[str, str | None]
    ) -> m.Spawn:
        return m.Spawn(
            self.node.proc,
            names,
            RANK_ENTRY,
            config,
            places,
            variables,
            agents_of(self.node).base_env(host),
            self.binds,
            self.procs.per_host,
            self.procs.name,
            self.path,
            self.cwd,
        )

    def _watch(self, host: str, names: list[str], watched: bool) -> None:
        """Give up on processes that do not start, and tell why they are slow."""
        self.node.receive_loop.call_later(READY_SECONDS, partial(self._late, host, names))
        if watched:
            watch_start(self.node, host, self.procs.name, names, READY_SECONDS)

    def _late(self, host: str, names: list[str]) -> None:
        """Give up on processes that have not reported that they listen."""
        node = self.node
        late = [name for name in names if (peer := node.peers.known.get(name)) is not None and peer.starting]
        if not late or node.closed:
            return
        node.peers.to_agent(host, m.Stop(node.proc, late, 0.0))
        for name in late:
            node.peers.end(m.Dead(name, NotReady(READY_SECONDS), False, []))
