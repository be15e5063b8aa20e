"""Steps, continues and pauses of ranks, as a front end asks for them. Control thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from monarch._kernel_api import go_here, pause_here, request, resume_here, split_proc
from monarch_kernel.dap.ids import Ids
from monarch_kernel.dap.protocol import Message, RequestError
from monarch_kernel.dap.rank_requests import ask, tell
from monarch_kernel.dap.standing import StoppedRanks
from monarch_kernel.debug.spawned import title

STEPS = {"next": "next", "stepIn": "step", "stepOut": "out"}
"""Requests for steps, and the steps of ranks."""
_NO_THREAD = 1
"""The thread that JupyterLab names if it knows of none: it forgets the thread before it lets that continue."""
_PAUSE_S = 3.0
"""Seconds for a rank to say whether it is paused; one in C code says so after half a second."""


class RankControl:
    """Lets ranks continue, and pauses them.

    Args:
        ids: the numbers of the session.
        standing: the ranks that stand.
        waited_for: returns the processes that the running cell of the notebook waits for.
    """

    def __init__(self, ids: Ids, standing: StoppedRanks, waited_for: Callable[[], list[str]]) -> None:
        self._ids = ids
        self._standing = standing
        self._waited_for = waited_for

    async def step(self, proc: str, how: str) -> Message:
        """Answer ``next``, ``stepIn`` and ``stepOut`` for one rank."""
        stand = self._standing.now.get(proc)
        if stand is None:
            raise RequestError(f"{title(proc)} is not paused; pause it before you step")
        if stand.parked:
            raise RequestError(
                f"{title(proc)} cannot step: it is held while another rank is at a breakpoint; continue that rank first"
            )
        self._standing.step(proc)
        if not await ask(proc, request(go_here, how, 0)):
            raise RequestError(f"{title(proc)} did not step: it is no longer paused")
        return {}

    def go_on(self, arguments: Message) -> Message | None:
        """Answer ``continue``: for a rank, and without ``singleThread`` for all of its mesh that stand.

        Returns:
            None if no rank is meant.
        """
        proc = self._ids.proc(arguments.get("threadId")) or self._shown(arguments)
        if proc is None:
            return None
        uid = split_proc(proc)[0]
        standing = [each for each in self._standing.now if split_proc(each)[0] == uid]
        chosen = [proc] if arguments.get("singleThread") else list(dict.fromkeys([proc, *standing]))
        tell(chosen, request(resume_here))
        return {"allThreadsContinued": False}

    def _shown(self, arguments: Message) -> str | None:
        """Return the rank that a front end means which shows one thread, and has just forgotten its number."""
        if self._standing.one_at_a_time and arguments.get("threadId") in (None, _NO_THREAD):
            return self._standing.focus
        return None

    async def pause(self, arguments: Message) -> Message | None:
        """Answer ``pause``: for a rank, or for those that the notebook waits for, since its own code only waits.

        Returns:
            None if no rank is meant.
        """
        proc = self._ids.proc(arguments.get("threadId"))
        procs = [proc] if proc is not None else self._waited_for()
        if not procs:
            return None
        asked = request(pause_here)
        await asyncio.gather(*(ask(each, asked, _PAUSE_S) for each in procs), return_exceptions=True)
        return {}

    def show(self, thread: object) -> Message:
        """Answer ``monarch/show``: show another rank in a front end that shows one thread."""
        proc = self._ids.proc(thread)
        if proc is None or proc not in self._standing.now:
            raise RequestError("that thread belongs to no paused rank")
        self._standing.show(proc)
        return {}
