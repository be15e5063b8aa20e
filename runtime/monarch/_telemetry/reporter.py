"""The reports of a rank: sent by the tick of its receive loop, when something has changed.

Nothing runs for them while the rank is idle. Looks and messages are made in the receiving thread, and take about
0.1 ms; what may take longer, in a thread of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import Any

from monarch._actors.mailbox import Mailbox
from monarch._actors.table import actors_of
from monarch._core.telemetry.events import RankReport, RankState, ResourceUsage
from monarch._node.node import Node
from monarch._node.services.registry import service
from monarch._procs.session_folder import host_of
from monarch._telemetry.logged import Logged
from monarch._telemetry.sampler import Sampler
from monarch._telemetry.tensors import bytes_by_owner
from monarch._telemetry.usage import CPU, Gpu, UsageReader, device_of, differ
from monarch._wire import messages as m

EVERY, EVERY_OF_MANY = 0.1, 0.25
"""Least seconds between two reports, and those of a mesh with many ranks."""
MANY = 128
"""Ranks beyond which a mesh has many."""
_PLACES = 0.25
"""Least seconds between two reports in which only the line of the code differs."""
_USAGE_S = 1.0
"""Least seconds between two readings of usage."""
_TENSORS, _TENSORS_BUSY = 5.0, 30.0
"""Least seconds between two looks at tensors: after a call has ended, and during one or if nothing changes."""
_SOON = 0.1
"""Seconds until they are looked at after the first call in a while."""
_EARLY = 0.2
"""Share of the time until such a look by which it may come early, with a call, instead of waking the rank."""
_LINGER_S = 2 * _TENSORS_BUSY
"""Seconds after a look until its thread ends."""
_URGENT = 0.05
"""Least seconds between two reports that the agent passes on at once, before an answer."""
_NEAR = 64
"""Ranks of a host up to which logged values go to an owner there directly, in order with the answers."""


class Reporter:
    """Sends the reports of this rank.

    Args:
        node: the node of this rank.
        running: returns the actor that runs a call; None if none does.
    """

    def __init__(self, node: Node, running: Callable[[], Mailbox | None]) -> None:
        self._node = node
        self._running = running
        self._logged = node.part(Logged)
        self.values, self.bars = self._logged.values, self._logged.bars
        """Logged values and bars that are not reported yet; both stay the same objects."""
        self._logged.wake, self._logged.flush = self._wake, self._send_logged
        # Receiving thread only, down to _woken.
        self._sampler = Sampler()
        config = node.config
        self._is_near = config is not None and host_of(config.owner) == node.host and config.procs.per_host <= _NEAR
        self._ranks = config.procs.size if config is not None else 1
        self._reader = UsageReader()
        self._usage = ResourceUsage()
        self._sent: RankReport | None = None
        self._next = self._next_usage = self._next_place = 0.0
        self._was_busy = self._woken = False
        # Written by any thread, both.
        self._next_measure = 0.0
        """When the next look at tensors may be."""
        self.measuring = False
        """Whether the next look at tensors is arranged."""
        # Held while logged values are taken and sent, so that they stay in order; no user code runs under it.
        self._sending = RLock()
        self._next_urgent = 0.0
        """When the agent may be hurried again. Lock: ``_sending``."""
        # Written by the lane that measures, as a whole; read by the receiving thread.
        self._gpu = Gpu()
        self._gpu_now = 0, -1.0
        self._tensors: dict[str, int] = {}
        self._pause = _TENSORS
        """Seconds until the next look; longer if nothing changes."""
        self._news = False
        """Whether it has measured something new."""

    def tick(self) -> bool:
        """Report what has changed, in the receiving thread; return whether to look again soon."""
        mailbox = self._running()
        busy, now = mailbox is not None, time.monotonic()
        if not (busy or self._was_busy or self._news or self._sent is None or self._logged.pending):
            return False
        if now >= self._next and self._node.rank >= 0:
            self._next = now + (EVERY if self._ranks <= MANY else EVERY_OF_MANY)
            report = self._report(mailbox, now)
            self._send(report if self._is_new(report, now) else None)
            if busy and now >= self._next_measure + _TENSORS_BUSY - _TENSORS:
                self._measure()
            self._was_busy, self._woken = busy, False
        return True

    def _report(self, mailbox: Mailbox | None, now: float) -> RankReport:
        rank, variables = self._node.rank, _variables()
        look = self._sampler.look(mailbox, rank)
        if now >= self._next_usage or mailbox is None:
            self._next_usage = now + _USAGE_S
            self._usage = self._reader.read(self._gpu_now)
            if mailbox is None or (look.state is RankState.PAUSED and self._usage.cpu < CPU):
                # Nothing will say later that it uses none.
                self._usage = ResourceUsage(0.0, self._usage.rss, self._usage.gpu_memory, self._usage.gpu_load)
        self._news = False
        queue = sum(len(each.queue) for each in list(actors_of(self._node).here.values()))
        return RankReport(
            rank,
            look.state,
            look.place,
            look.since,
            queue,
            device_of(variables),
            self._usage,
            look.collective,
            self._tensors,
        )

    def _is_new(self, report: RankReport, now: float) -> bool:
        sent = self._sent
        same = sent is not None and _key(report) == _key(sent) and not differ(report.usage, sent.usage)
        if sent is not None and same and (report.place == sent.place or now < self._next_place):
            return False
        self._next_place = now + _PLACES
        self._sent = report
        return True

    def _send(self, report: RankReport | None) -> None:
        with self._sending:
            more = [m.encode(each) for each in self._logged.take(self._node.rank)]
            if more and self._is_near:
                self._to_owner(more)
                more = []
            if report is not None or more:
                state = m.encode(report) if report is not None else b""
                self._node.peers.to_agent(self._node.host, m.Report(self._node.proc, state, more))

    def _to_owner(self, more: list[bytes]) -> None:
        assert self._node.config is not None
        report = m.Report(self._node.proc, b"", more)
        self._node.peers.get(self._node.config.owner).send(m.encode(report))

    # Metrics and progress

    def flush(self) -> None:
        """Send what was logged before the answer of a call, in its thread, and look at tensors soon."""
        if not self.measuring:
            self._measure()
        if self.values or self.bars:
            self._logged.settle()
            self._send_logged()

    def _send_logged(self) -> None:
        node = self._node
        with self._sending:
            more = [m.encode(each) for each in self._logged.take(node.rank)]
            if more and self._is_near:
                self._to_owner(more)
            elif more:
                # On another host, the agent passes the answer on after this.
                now = time.monotonic()
                urgent = now >= self._next_urgent
                self._next_urgent = now + _URGENT if urgent else self._next_urgent
                node.peers.to_agent(node.host, m.Report(node.proc, b"", more, urgent))

    def _wake(self) -> None:
        if not self._was_busy and not self._woken:
            # The tick may be slow, because no call has run for long.
            self._woken = True
            self._node.output.watch()

    # Measured in a lane

    def _measure(self) -> None:
        """Look at tensors and the GPU soon, but not often."""
        if not self.measuring:
            self.measuring = True
            wait = max(_SOON, self._next_measure - time.monotonic())
            self._node.receive_loop.call_later(wait, self._post_measure, wait * _EARLY)

    def _post_measure(self) -> None:
        self._next_measure = time.monotonic() + self._pause
        self.measuring = False
        with suppress(RuntimeError):
            # Without a thread, they are measured after the next call.
            self._node.lanes.post("usage", self._measure_now, linger_s=_LINGER_S)

    def _measure_now(self) -> None:
        variables = dict(_variables())
        for mailbox in list(actors_of(self._node).here.values()):
            variables.update(_attributes(mailbox.instance))
        tensors, gpu = bytes_by_owner(variables), self._gpu.read()
        same = (tensors, gpu) == (self._tensors, self._gpu_now)
        self._pause = min(_TENSORS_BUSY, self._pause * 2) if same else _TENSORS
        if not same:
            self._tensors, self._gpu_now, self._news = tensors, gpu, True
            self._node.output.watch()


def _key(report: RankReport) -> tuple[Any, ...]:
    return report.rank, report.state, report.queue, report.device, report.collective, report.tensors, report.since


def _variables() -> dict[str, Any]:
    # A program may take its main module away, as some loaders of configurations do.
    return getattr(sys.modules.get("__main__"), "__dict__", {})


def _attributes(instance: Any) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(instance, "__dict__"))
    except AttributeError:
        return {}


@service("reporter.begin", "local")
def begin(node: Node, running: Callable[[], Mailbox | None]) -> Reporter:
    """Service: return the reporter of a rank."""
    return Reporter(node, running)
