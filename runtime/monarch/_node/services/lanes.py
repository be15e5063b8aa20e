"""Threads for work that must not run in the receiving thread: user code and slow work."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic

from monarch._python.frames import frame_of
from monarch._python.threads import spawn_thread
from monarch._wire.receiving.leadership import Gate

Action = Callable[[], None]
_LINGER_S = 0.5
"""Seconds that the thread of a lane waits for more work, unless told otherwise."""
STUCK_S = 1.0
"""Seconds of one action after which a later one may get another thread."""


class Lanes:
    """Lanes by name: the actions of a lane run one by one in the order posted; lanes do not wait for each other. A
    lane has a thread while it has work, or a few if these may overtake. Any thread may use this.
    """

    def __init__(self) -> None:
        # Guards the dict only.
        self._lock = threading.RLock()
        self._lanes: dict[str, _Lane] = {}

    def post(self, name: str, action: Action, threads: int = 1, linger_s: float = _LINGER_S) -> None:
        """Queue an action on a lane.

        Args:
            name: the name of the lane.
            action: what to run.
            threads: how many threads the lane may have. With more than one, an action that takes longer than
                ``STUCK_S`` no longer delays later ones.
            linger_s: seconds that its thread then waits for more work. To start one for an action that comes time and
                again takes longer than to wake it.

        Raises:
            StuckError: all of several threads take longer than that.
            RuntimeError: the system cannot start a thread for the lane.
        """
        lane = self._lanes.get(name)
        if lane is None:
            with self._lock:
                lane = self._lanes.setdefault(name, _Lane(name, linger_s))
        lane.post(action, threads)

    def is_idle(self, name: str) -> bool:
        """Return whether all actions of a lane have run."""
        lane = self._lanes.get(name)
        return lane is None or not lane.pending


class StuckError(RuntimeError):
    """All threads that a lane may have are busy with actions that take long."""


class _Worker:
    """A thread of a lane. ``since`` and ``ident`` are written by that thread and read under the lane's lock."""

    def __init__(self) -> None:
        self.since = monotonic()
        """When its action began."""
        self.busy = True
        """Whether it runs an action or is about to; guarded by the lane's lock."""
        self.ident = 0

    def seconds(self) -> float:
        """Return how long its action has run; 0 without one."""
        return monotonic() - self.since if self.busy else 0.0

    def place(self) -> str:
        """Return the line that it runs, without running code of the user."""
        frame = frame_of(self.ident)
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "an unknown line"


class _Lane:
    def __init__(self, name: str, linger_s: float) -> None:
        self._name = name
        self._linger_s = linger_s
        # Guards all below; held briefly, and reentrantly by a __del__ that runs meanwhile.
        self._lock = threading.RLock()
        self._actions: deque[Action] = deque()
        self.pending = 0
        """The number of actions that have not ended."""
        self._more = Gate()
        """Opened for the newest worker; no other one waits for it."""
        self._workers: list[_Worker] = []
        """The threads, oldest first. A later one exists only if all before it were stuck."""

    def post(self, action: Action, threads: int) -> None:
        with self._lock:
            # Without workers too.
            stuck = all(each.seconds() > STUCK_S for each in self._workers)
            full = len(self._workers) >= threads
            if stuck and full and threads > 1:
                raise StuckError(self._complaint())
            self.pending += 1
            self._actions.append(action)
            worker = _Worker() if stuck and not full else None
            if worker is not None:
                self._workers.append(worker)
        if worker is None:
            self._more.open()
        else:
            self._start(worker, action)

    def _complaint(self) -> str:
        oldest = self._workers[0]
        return (
            f"{self._name} is stuck: its {len(self._workers)} threads have not returned, the oldest for "
            f"{oldest.seconds():.0f} s at {oldest.place()}; restart the mesh to end them"
        )

    def _start(self, worker: _Worker, action: Action) -> None:
        target = partial(self._run, worker)
        try:
            spawn_thread(f"monarch-{self._name}", target)
        except RuntimeError:
            with self._lock:
                self._workers.remove(worker)
                # A stuck worker may have returned and taken it.
                if action not in self._actions:
                    return
                self._actions.remove(action)
                self.pending -= 1
            raise

    def _run(self, worker: _Worker) -> None:
        worker.ident = threading.get_ident()
        while True:
            with self._lock:
                action = self._actions.popleft() if self._actions else None
                worker.since, worker.busy = monotonic(), action is not None
                if action is None and worker is not self._workers[-1]:
                    # Its successor takes later actions.
                    self._workers.remove(worker)
                    return
            if action is not None:
                try:
                    action()
                except BaseException:
                    # Actions handle their own errors; this is a bug and must not stop later ones.
                    traceback.print_exc()
                del action
                with self._lock:
                    self.pending -= 1
            elif not self._more.wait(self._linger_s):
                with self._lock:
                    if not self._actions:
                        self._workers.remove(worker)
                        return
