"""Threads for what must not run in the thread that receives: code of the user, and what may take long."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable

from monarch._wire.receiving.leadership import Gate

Action = Callable[[], None]
_LINGER = 0.5
"""Seconds for which the thread of a lane waits for more."""


class Lanes:
    """Lanes by name: the actions of one lane run one after the other, in the order posted; lanes do not wait for
    each other. A lane has a thread while it has something to do. Any thread may use this.
    """

    def __init__(self) -> None:
        # Guards the dict only.
        self._lock = threading.RLock()
        self._lanes: dict[str, _Lane] = {}

    def post(self, name: str, action: Action) -> None:
        """Have an action run on a lane.

        Raises:
            RuntimeError: the lane has no thread, and the system lets this process start none.
        """
        lane = self._lanes.get(name)
        if lane is None:
            with self._lock:
                lane = self._lanes.setdefault(name, _Lane(name))
        lane.post(action)

    def is_idle(self, name: str) -> bool:
        """Return whether all that was posted to a lane has run."""
        lane = self._lanes.get(name)
        return lane is None or not lane.pending


class _Lane:
    def __init__(self, name: str) -> None:
        self._name = name
        # Guards all below; held for a few steps, and by a __del__ that runs in the middle of them once more.
        self._lock = threading.RLock()
        self._actions: deque[Action] = deque()
        self.pending = 0
        """How many actions have not ended."""
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
                    # It answers for itself; this is a bug, and must not stop those behind it.
                    traceback.print_exc()
                del action
                with self._lock:
                    self.pending -= 1
            elif not self._more.wait(_LINGER):
                with self._lock:
                    if not self._actions:
                        self._running = False
                        return
