"""Looks after each test whether the shared session is in order: credit, calls, ports, verdicts, errors of handlers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

KNOWN_THREADS = (
    "MainThread",
    "monarch-receive",
    "monarch-agent-watch",
    "monarch-hosts",
    "monarch-controllers",
    "monarch-judge",
    "monarch-tells",
    "monarch-telemetry",
    "monarch-shown",
    "monarch-copy",
    "monarch-helper",
    "monarch-stream",
    "monarch-checkpoint",
    "asyncio_",
    "ThreadPoolExecutor-",
    "pytest_timeout",
    "Thread-",
    "execnet",
    "Dummy-",
)
"""How the names of the threads begin that a process of the tests may have between two tests."""


def _node() -> Any:
    from monarch._node.current import current_node, has_node

    return current_node() if has_node() else None


def _account(proc: str) -> tuple[int, int] | None:
    """Return how many messages of this process another one has finished and holds; None while that changes."""
    from monarch._node.services.asking import ask_proc
    from monarch._session.statistics import account_of

    return ask_proc(proc, account_of, _node().proc).get(timeout=2)


def credit_lost(seconds: float) -> list[str]:
    """Living processes that do not give back the credit for what they finished, once they had time to."""
    from monarch._session.statistics import statistics_of

    node = _node()
    if node is None:
        return []
    found: dict[str, str] = {}

    def in_order() -> bool:
        windows = statistics_of(node).windows
        found.clear()
        found.update({proc: _wrong(node, proc) for proc, now in windows.items() if now.sent != now.finished})
        return not any(found.values())

    deadline = time.monotonic() + seconds
    while not in_order() and time.monotonic() < deadline:
        time.sleep(0.02)
    return [what for what in found.values() if what and what != _BUSY]


_BUSY = "counts while it finishes more"


def _wrong(node: Any, proc: str) -> str:
    """Return how the counts of this process and another one differ; empty if they agree."""
    from monarch.exceptions import MonarchError

    peer = node.peers.known[proc]
    sent = peer.sent
    try:
        account = _account(proc)
    except MonarchError:
        # It has died; or it is stopped by a signal or keeps the GIL, and nothing is known of it.
        return ""
    if account is None or peer.sent != sent:
        return _BUSY
    if sum(account) == sent:
        return ""
    return f"{sent - sum(account)} lost credit of {proc} (sent {sent}, finished {account[0]}, held {account[1]})"


def unsettled() -> list[str]:
    """Return the unfinished work in the session of this process, in words."""
    from monarch._session.statistics import statistics_of

    node = _node()
    if node is None:
        return []
    now = statistics_of(node)
    found = [f"call {label} (port {port})" for port, label in now.pending.items()]
    # Liveness opens one port when it first asks ranks, and keeps it.
    open_ports = {port: kind for port, kind in now.ports.items() if port not in now.pending and kind != "Liveness"}
    found += [f"open port {port} of a {kind}" for port, kind in open_ports.items()]
    found += [f"an open verdict about {uid}: {'; '.join(holders)}" for uid, holders in now.verdicts.items()]
    found += [f"{count} x {kind}" for kind, count in now.mishaps.items()]
    return found


def idle_threads() -> set[int]:
    """Threads of the lanes of this process that wait for more work, for as long as a lane does.

    That they end is a test of the lanes, and looked at after the last test.
    """
    node = _node()
    lanes = list(node.lanes._lanes.values()) if node is not None else []
    return {worker.ident for lane in lanes for worker in list(lane._workers) if not worker.busy}


def strange_threads(before: Iterable[int]) -> list[str]:
    """Threads that have come and whose names are not known."""
    known = {*before, *idle_threads()}
    return [
        f"thread {each.name}"
        for each in threading.enumerate()
        if each.ident not in known and not each.name.startswith(KNOWN_THREADS)
    ]
