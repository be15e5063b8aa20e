"""What ``%%mesh --nowait`` gives: a cell that runs on ranks while the notebook goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any

from monarch._core.ranks import describe_ranks
from monarch._core.valuemesh import ValueMesh
from monarch.exceptions import CallTimeoutError
from monarch_kernel.running import Run
from monarch_kernel.stop import Stopped


class Handle:
    """A cell that runs: ``done``, ``result()``, ``interrupt()``; and it can be awaited.

    Args:
        run: the cell.
        finish: makes of the ended run its values; raises what the cell has raised.
        stop: climbs the ladder of stopping.
    """

    def __init__(self, run: Run, finish: Callable[[], ValueMesh[Any]], stop: Callable[[], Stopped]) -> None:
        self._run = run
        self._finish = finish
        self._stop = stop

    @property
    def done(self) -> bool:
        """Whether it has ended on all ranks."""
        return self._run.done

    def result(self, timeout: float | None = None) -> ValueMesh[Any]:
        """Waits for its end, and returns the value that it has on each rank.

        Raises:
            MeshCellError: it failed on some ranks.
            CallTimeoutError: it has not ended in time; it goes on.
        """
        if not self._run.wait(None if timeout is None else time.monotonic() + timeout):
            raise CallTimeoutError(f"{self._run.name} has not ended within {timeout:g} s: {self._where()}; it goes on")
        return self._finish()

    def interrupt(self) -> str:
        """Stops it where it still runs, as the stop button does; says what that took."""
        return self._stop().text()

    cancel = interrupt

    def __await__(self) -> Generator[Any, None, ValueMesh[Any]]:
        async def wait() -> ValueMesh[Any]:
            for future in self._run.futures:
                waiting = future.as_asyncio()
                await asyncio.wait([waiting])
                # What it raises is raised below, with that of the others.
                waiting.exception()
            return self._finish()

        return wait().__await__()

    def _where(self) -> str:
        return f"runs on {describe_ranks(self._run.missing())}"

    def __repr__(self) -> str:
        return f"<{self._run.name}: {'has ended; result() has what came of it' if self.done else self._where()}>"
