"""What ``%%mesh --nowait`` gives: a cell that runs on ranks while the notebook goes on."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Generator
from threading import Lock
from typing import Any

from monarch._kernel_api import ValueMesh, current_node, describe_ranks, in_thread
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.cells.running import Run
from monarch_kernel.cells.stop import Stopped
from monarch_kernel.output.render import MeshCellError
from monarch_kernel.output.streams import Place


class Handle:
    """A cell that runs: ``done``, ``result()``, ``cancel()``; and it can be awaited.

    Args:
        run: the cell.
        finish: makes of the ended run its values; raises what the cell has raised.
        stop: climbs the ladder of stopping.
        name: what the person calls this handle.
        place: the output of the cell.
    """

    def __init__(
        self, run: Run, finish: Callable[[], ValueMesh[Any]], stop: Callable[[], Stopped], name: str, place: Place
    ) -> None:
        self._run = run
        self._finish = finish
        self._stop = stop
        self._name = name
        self._place = place
        self._id = secrets.token_hex(16)
        """Of what shows this handle, which is updated at the end."""
        self.recorded = False
        """Whether what the cell defines is known; guarded by the lock of who makes this."""
        self._lock = Lock()
        # Guarded by it, with which messages are put in order, and no code of the person runs.
        self._outcome = ""
        """What came of it, in words, once it has ended."""

    @property
    def done(self) -> bool:
        """Whether it has ended on all ranks."""
        return self._run.done

    def watch(self) -> None:
        """Has the end of the cell shown in its output."""
        for future in self._run.futures:
            future._when_done(lambda _: self._ended())

    def _ended(self) -> None:
        """One of its calls has ended; in the thread that receives."""
        if self._run.done:
            in_thread(current_node(), "nowait", self._show_end)

    def _show_end(self) -> None:
        """Show how the cell ended, once."""
        failure: BaseException | None = None
        try:
            self._finish()
        except (MeshCellError, MonarchError) as error:
            failure = error
        with self._lock:
            if self._outcome:
                return
            self._outcome = _outcome(failure)
            self._place.update(self._id, repr(self))
        if failure is not None and not _was_stopped(failure):
            self._place.write("\n".join(failure.lines) if isinstance(failure, MeshCellError) else str(failure))
        self._place.finish()

    def result(self, timeout: float | None = None) -> ValueMesh[Any]:
        """Waits for its end, and returns the value that it has on each rank.

        Raises:
            MeshCellError: it failed on some ranks.
            CallTimeoutError: it has not ended in time; it goes on.
            KeyboardInterrupt: the wait was interrupted; it goes on.
        """
        try:
            ended = self._run.wait(None if timeout is None else time.monotonic() + timeout)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._goes_on()) from None
        if not ended:
            raise CallTimeoutError(f"{self._run.name} has not ended within {timeout:g} s: {self._where()}; it goes on")
        return self._finish()

    def interrupt(self) -> str:
        """Stops it where it still runs, as the stop button does; says what that took."""
        return self._stop().text()

    cancel = interrupt

    def __await__(self) -> Generator[Any, None, ValueMesh[Any]]:
        async def wait() -> ValueMesh[Any]:
            try:
                for future in self._run.futures:
                    waiting = future.as_asyncio()
                    await asyncio.wait([waiting])
                    # What it raises is raised below, with that of the others.
                    waiting.exception()
            except asyncio.CancelledError:
                print(self._goes_on(), file=sys.stderr)
                raise
            return self._finish()

        return wait().__await__()

    def _goes_on(self) -> str:
        return f"stopped waiting for {self._run.name}, which {self._where()} and goes on; {self._name}.cancel() ends it"

    def _where(self) -> str:
        return f"runs on {describe_ranks(self._run.missing())}"

    def _ipython_display_(self) -> None:
        """Shows it so that its end can be shown in the same place."""
        from IPython.display import publish_display_data

        with self._lock:
            publish_display_data({"text/plain": repr(self)}, transient={"display_id": self._id})

    def __repr__(self) -> str:
        return f"<{self._run.name}: {self._outcome or (_outcome(None) if self.done else self._where())}>"


def _was_stopped(failure: BaseException) -> bool:
    return isinstance(failure, MeshCellError) and all(error.interrupted for error in failure.errors.values())


def _outcome(failure: BaseException | None) -> str:
    """How a cell ended, in words."""
    if failure is None:
        return "has ended; result() has its values"
    return "was stopped" if _was_stopped(failure) else "has failed"
