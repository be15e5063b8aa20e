"""Threads for work that must not run in the receiving thread: user code and slow work."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable

from monarch._wire.receiving.leadership import Gate

Action = Callable[[], None]
_LINGER = 0.5
"""Seconds that the thread of a lane waits for more work."""


class Lanes:
    """Lanes by name: the actions of a lane run one by one in the order posted; lanes do not wait for each other. A
    lane has a thread while it has work. Any thread may use this.
    """

    def __init__(self) -> None:
        # Guards the dict only.
        self._lock = threading.RLock()
        self._lanes: dict[str, _Lane] = {}

    def post(self, name: str, action: Action) -> None:
        """Queue an action on a lane.

        Raises:
            RuntimeError: the system cannot start a thread for the lane.
        """
        lane = self._lanes.get(name)
        if lane is None:
            with self._lock:
                lane = self._lanes.setdefault(name, _Lane(name))
        lane.post(action)

    def is_idle(self, name: str) -> bool:
        """Return whether all actions of a lane have run."""
        lane = self._lanes.get(name)
        return lane is None or not lane.pending


class _Lane:
    def __init__(self, name: str) -> None:
        self._name = name
        # Guards all below; held briefly, and reentrantly by a __del__ that runs meanwhile.
        self._lock = threading.RLock()
        self._actions: deque[Action] = deque()
        self.pending = 0
        """The number of actions that have not ended."""
        self._more = Gate()
        self._running = False

    def post(self, action: Action) -> None:
        with self._lock:
            self.pending += 1
            self._actions.append(action)
            starts, self._running = not self._running, True
        if not starts:
            self._more.open()
            return
        try:
            threading.Thread(target=self._run, name=f"monarch-{self._name}", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._running = False
                self._actions.remove(action)
                self.pending -= 1
            raise

    def _run(self) -> None:
        while True:
            with self._lock:
                action = self._actions.popleft() if self._actions else None
            if action is not None:
                try:
                    action()
                except BaseException:
                    # Actions handle their own errors; this is a bug and must not stop later ones.
                    traceback.print_exc()
                del action
                with self._lock:
                    self.pending -= 1
            elif not self._more.wait(_LINGER):
                with self._lock:
                    if not self._actions:
                        self._running = False
                        return
