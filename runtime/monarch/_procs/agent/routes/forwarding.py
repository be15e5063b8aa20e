"""Messages that pass through a host agent: from other hosts to its ranks, and from its ranks to other hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from monarch._core.causes import HostLost, NotInSession
from monarch._procs.agent.children import Children
from monarch._procs.agent.reply_batches import ReplyBatches
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.spreading import Spreading
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.bulk.segments import Segments

_GATHER = 0.05
"""Seconds for which replies wait for those of other ranks, to go as one message."""


class Forwarding:
    """Passes messages on, and gathers the replies to one call into one message. Used by the agent's one thread.

    Args:
        router: sends them.
        children: the processes of this host.
        spreading: takes the gathered replies.
        uplink: takes output and news of starts for the program.
        later: calls a function after so many seconds.
        tell: sends a message to a process.
        handle: handles the frames of a message to this agent.
    """

    def __init__(
        self,
        router: Router,
        children: Children,
        spreading: Spreading,
        uplink: AgentUplink,
        later: Callable[[float, Callable[[], None]], None],
        tell: Callable[[str, m.AnyMessage], None],
        handle: Callable[[list[Any]], None],
    ) -> None:
        self._router = router
        self._children = children
        self._spreading = spreading
        self._uplink = uplink
        self._later = later
        self._tell = tell
        self._handle = handle
        self._replies = ReplyBatches(router.proc)
        self._segments = Segments()
        self._lost_hosts: set[str] = set()

    def route(self, dst: str, frames: list[Any]) -> None:
        """Pass a message on to one process."""
        if not self._router.is_here(dst) and len(frames) >= 1:
            message = m.decode(frames[0])
            if isinstance(message, m.Reply) and self._gather(dst, message, frames):
                return
            if isinstance(message, (m.Output, m.Ready)) and self._uplink.add(dst, bytes(frames[0])):
                return
        if self._children.death_of(dst) is None and not self._router.send(dst, frames):
            self._undelivered(dst, frames)

    def _gather(self, dst: str, reply: m.Reply, frames: list[Any]) -> bool:
        """Keep a reply until those of the other ranks have come; return False if its call gathers none."""
        batch = self._replies.add(dst, reply.port, reply.src, frames)
        if batch is None:
            return False
        if batch:
            self._spreading.answer(dst, reply.port, batch, True)
        elif self._replies.waiting(dst, reply.port) == 1:
            self._later(_GATHER, lambda: self._send_gathered(dst, reply.port))
        return True

    def _send_gathered(self, dst: str, port: int) -> None:
        """Stop gathering, so that replies do not wait for those of slow ranks."""
        self._spreading.answer(dst, port, self._replies.take(dst, port), False)

    def _undelivered(self, dst: str, frames: list[Any]) -> None:
        """Tell the sender of a message that its target is unreachable."""
        source = getattr(m.decode(frames[0]), "src", "")
        if source and source != dst:
            host = host_of(dst)
            cause = HostLost(host) if host in self._lost_hosts else NotInSession()
            self._tell(source, m.Dead(dst, cause, False, []))

    def expect(self, cast: m.Cast) -> None:
        """Gather the replies of procs that a message starts."""
        if cast.port and not self._replies.begin(cast.src, cast.port, cast.procs):
            self._spreading.answer(cast.src, cast.port, [], True)

    def cast(self, cast: m.Cast, frames: list[Any]) -> None:
        """Pass a message on to many processes of this host."""
        # A proc not started yet gets it then: the sender may have overtaken the Spawn.
        procs = [proc for proc in cast.procs if self._children.death_of(proc) is None]
        if cast.port and not self._replies.begin(cast.src, cast.port, procs):
            self._spreading.answer(cast.src, cast.port, [], True)
        if len(frames) > 1:
            frames = self._into_shared_memory(frames, procs)
        for proc in procs:
            if proc == self._router.proc:
                self._handle(frames)
            elif not self._router.send(proc, frames):
                self._undelivered(proc, frames)

    def _into_shared_memory(self, frames: list[Any], procs: list[str]) -> list[Any]:
        """Write the large buffers of a call once for all ranks of this host."""
        call = m.decode(frames[0])
        if not isinstance(call, m.Call) or not procs:
            return frames
        try:
            ref = self._segments.put([memoryview(frame) for frame in frames[1:]], procs)
        except MemoryError:
            # No memory or no file descriptor: each gets the frames themselves.
            return frames
        bulk = (self._router.proc, ref.pid, ref.fd, ref.segment, list(ref.spans))
        return [m.encode(msgspec.structs.replace(call, bulk=bulk, frames=0))]

    def released(self, release: m.Release, _: list[Any]) -> None:
        """Note that a process uses these segments no longer."""
        for segment in release.segments:
            self._segments.release(segment, release.src)

    def died(self, proc: str) -> None:
        """Send the replies that waited for a process that has died."""
        for dst, port, batch in self._replies.died(proc):
            self._spreading.answer(dst, port, batch, True)

    def forget(self, proc: str) -> None:
        """Free the segments that a dead process of this host has not released."""
        self._segments.forget(proc)

    def lost(self, host: str) -> None:
        """Note that the connection to a host broke."""
        self._lost_hosts.add(host)

    def found(self, hosts: dict[str, Any]) -> None:
        """Note that hosts can be reached, also those that were lost before."""
        self._lost_hosts.difference_update(hosts)
