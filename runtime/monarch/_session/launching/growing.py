"""Hosts that join after the program has begun with fewer: they are attached as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from monarch._node.future import Future, in_thread
from monarch._node.node import Node
from monarch._procs.launch.interface import Environment, Failed, Joined, Launch
from monarch.exceptions import MonarchError

_STEP_S = 0.5
"""The longest wait for news, in seconds, and so the delay of the end."""
_END_S = 10.0
"""Seconds for a host that is being attached when the hosts end."""


class Growth:
    """The hosts of a launch that are still missing.

    Args:
        launch: that of the hosts.
        attach: attaches a host and returns its id.
        tell: shows a line.
        advice: follows the line about a host that has joined; may be empty.
    """

    def __init__(
        self, launch: Launch, attach: Callable[[Joined], str], tell: Callable[[str, bool], None], advice: str
    ) -> None:
        self._launch = launch
        self._attach = attach
        self._tell = tell
        self._advice = advice
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._late: dict[str, str] = {}
        """Names of the hosts that nobody has taken yet, by id, in the order in which they came. Under ``_lock``."""
        self._ids: list[str] = []
        """All hosts that have joined late. Under ``_lock``."""
        self._thread: Future[None] | None = None
        """Set once, by the thread that starts it."""

    def begin(self, node: Node, joined: int, failed: Mapping[str, Failed]) -> None:
        """Watch for the hosts that are missing, in a thread.

        Args:
            node: the node of this program.
            joined: the number of hosts that have joined.
            failed: the hosts that have failed, by name.
        """
        retries = self._launch.keep_trying()
        missing = self._launch.expected - joined - (0 if retries else len(failed))
        if missing > 0:
            self._thread = in_thread(node, "more-hosts", lambda: self._watch(joined, missing, retries, {*failed}))

    def _watch(self, joined: int, missing: int, retries: bool, told: set[str]) -> None:
        while missing and not self._over.is_set():
            try:
                news = self._launch.watch(_STEP_S)
            except MonarchError as error:
                self._say(f"no more hosts will join: {error}")
                return
            for each in news:
                if isinstance(each, Joined) and not self._over.is_set():
                    missing -= 1
                    joined += self._join(each, joined + 1)
                elif isinstance(each, Failed):
                    missing -= not retries
                    if each.host not in told:
                        again = "; retrying every few seconds" if retries else ""
                        self._say(f"failed: {each.host}: {each.reason}{again}")
                    told.add(each.host)
                elif isinstance(each, Environment):
                    for remark in each.remarks:
                        self._say(f"warning: {each.host}: {remark}")

    def _join(self, host: Joined, number: int) -> bool:
        """Attach a host; return whether that has succeeded."""
        try:
            known = self._attach(host)
        except MonarchError as error:
            self._say(f"failed: {host.host}: {error}")
            return False
        with self._lock:
            self._late[known] = host.host
            self._ids.append(known)
        advice = f"; {self._advice}" if self._advice else ""
        self._say(f"joined {number} of {self._launch.expected}: {host.host}{advice}")
        return True

    def _say(self, line: str) -> None:
        if not self._over.is_set():
            self._tell(line, True)

    def take(self) -> dict[str, str]:
        """Return the names of the hosts that have joined since the last call, by id; from any thread."""
        with self._lock:
            late, self._late = self._late, {}
        return late

    def end(self) -> tuple[str, ...]:
        """Wait for no more hosts; return the ids of those that have joined late."""
        self._over.set()
        if self._thread is not None:
            with suppress(MonarchError):
                self._thread.get(_END_S)
        with self._lock:
            return tuple(self._ids)
