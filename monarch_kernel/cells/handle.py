"""The handle of a ``%%mesh --nowait`` cell, which runs on ranks while the notebook continues."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from threading import Lock
from typing import Any

from monarch._kernel_api import ValueMesh, current_node, describe_ranks, duration_text, in_thread, when_done
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.calls.caused_errors import ended_from_outside
from monarch_kernel.calls.cell_run import Run
from monarch_kernel.calls.running import RunningCalls
from monarch_kernel.calls.stop_report import StopReport
from monarch_kernel.compat import display
from monarch_kernel.meshes.rank_vitals import places_of
from monarch_kernel.output.cell_errors import MeshCellError
from monarch_kernel.output.streams import CellOutput


class CellHandle:
    """The handle of a running cell: ``done``, ``result()``, ``cancel()``, and ``await``.

    Args:
        run: the cell.
        finish: returns the values of the finished run, or raises its error.
        stop: stops the run.
        name: the user's name for this handle.
        place: the output of the cell.
    """

    def __init__(
        self,
        run: Run,
        finish: Callable[[], ValueMesh[Any]],
        stop: Callable[[], StopReport],
        name: str,
        place: CellOutput,
    ) -> None:
        # Replaced by what is small when the cell has ended: IPython keeps a thousand results. Any thread reads them.
        self._run: RunningCalls = run
        self._finish = finish
        self._stop = stop
        self._name = name
        self._place = place
        self._id = secrets.token_hex(16)
        """Display id of this handle, which is updated at the end."""
        self.recorded = False
        """Whether the definitions of the cell are recorded; guarded by the lock of the creator."""
        self._begun = time.monotonic()
        self._lock = Lock()
        # Guarded by the lock, which also orders messages; no user code runs under it.
        self._outcome = ""
        """How the cell ended; empty until then."""

    @property
    def done(self) -> bool:
        """Whether it has ended on all ranks."""
        return self._run.done

    def watch(self) -> None:
        """Show the end of the cell in its output."""
        for future in self._run.futures:
            when_done(future, lambda _: self._ended())

    def _ended(self) -> None:
        """Handle the end of one call, in the receiving thread."""
        if self._run.done:
            in_thread(current_node(), "nowait", self._show_end)

    def _show_end(self) -> None:
        """Show how the cell ended, once."""
        failure: BaseException | None = None
        values: Any = None
        try:
            values = self._finish()
        except (MeshCellError, MonarchError) as error:
            failure = error.with_traceback(None)
        self._finish = partial(_outcome_of, values, failure)
        self._run, self._stop = RunningCalls(self._run.name, []), partial(StopReport, {}, {}, [])
        # Jupyter keeps a socket for each thread that has sent something, for ten seconds; this is the thread of all.
        current_node().lanes.post("handles", lambda: self._tell(failure))

    def _tell(self, failure: BaseException | None) -> None:
        with self._lock:
            if self._outcome:
                return
            self._outcome = _outcome(failure, time.monotonic() - self._begun)
            self._place.update(self._id, repr(self))
        if failure is not None and not _was_stopped(failure):
            self._place.write("\n".join(failure.lines) if isinstance(failure, MeshCellError) else str(failure))
        self._place.finish()

    def result(self, timeout: float | None = None) -> ValueMesh[Any]:
        """Wait for the end of the cell, and return the value of each rank.

        Raises:
            MeshCellError: the cell failed on some ranks.
            CallTimeoutError: the timeout has passed; the cell continues.
            KeyboardInterrupt: the wait was interrupted; the cell continues.
        """
        # Once before the wait, since this cell shows the rest, and once for what came in between.
        self._place.ask_late()
        try:
            ended = self._run.wait(None if timeout is None else time.monotonic() + timeout)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._goes_on()) from None
        if not ended:
            head = f"{self._run.name} did not finish within {timeout:g} s: it is still {self._where()}"
            raise CallTimeoutError("\n".join([head, *self._places()]))
        self._place.ask_late()
        return self._finish()

    get = result
    """The same, by the name that futures of calls have."""

    def interrupt(self) -> str:
        """Stop the cell where it still runs, like the stop button; describe how each rank stopped."""
        return self._stop().text()

    cancel = interrupt

    def __await__(self) -> Generator[Any, None, ValueMesh[Any]]:
        async def wait() -> ValueMesh[Any]:
            self._place.ask_late()
            try:
                for future in self._run.futures:
                    waiting = future.as_asyncio()
                    await asyncio.wait([waiting])
                    # Retrieved here; _finish raises it with those of the other ranks.
                    waiting.exception()
            except asyncio.CancelledError:
                print(self._goes_on(), file=sys.stderr)
                raise
            return self._finish()

        return wait().__await__()

    def _goes_on(self) -> str:
        return f"stopped waiting for {self._run.name}, which is still {self._where()}; {self._name}.cancel() ends it"

    def _places(self) -> list[str]:
        """Return lines that say where the ranks are that answer soon."""
        tasks = self._run.tasks().values()
        ranks_of: dict[str, list[int]] = {}
        found = places_of([task.proc for task in tasks])
        for task in tasks:
            if found.get(task.proc):
                ranks_of.setdefault(found[task.proc], []).append(task.rank)
        return [f"  {describe_ranks(sorted(ranks))}: at {place}" for place, ranks in ranks_of.items()]

    def _where(self) -> str:
        return f"running on {describe_ranks(self._run.missing())}"

    def _progress(self) -> str:
        seconds = time.monotonic() - self._begun
        return self._where() + (f" for {duration_text(int(seconds))}" if seconds >= 1 else "")

    def _ipython_display_(self) -> None:
        """Show the handle, in a display that its end updates."""
        with self._lock:
            display({"text/plain": repr(self)}, display_id=self._id)

    def __repr__(self) -> str:
        return f"<{self._run.name}: {self._outcome or (_outcome(None) if self.done else self._progress())}>"


def _outcome_of(values: ValueMesh[Any], failure: BaseException | None) -> ValueMesh[Any]:
    """Return the values of an ended cell, or raise its error."""
    if failure is not None:
        raise failure.with_traceback(None)
    return values


def _was_stopped(failure: BaseException) -> bool:
    """Return whether ranks were interrupted, and the others only waited for them in a collective."""
    if not isinstance(failure, MeshCellError):
        return False
    errors = failure.errors.values()
    return any(error.interrupted for error in errors) and all(ended_from_outside(error) for error in errors)


def _outcome(failure: BaseException | None, seconds: float = 0.0) -> str:
    """Describe how a cell ended, and after how long if that was a while."""
    after = f" after {duration_text(seconds)}" if seconds >= 1 else ""
    if failure is None:
        return f"finished{after}; result() returns its values"
    return ("stopped" if _was_stopped(failure) else "failed") + after
