"""Functions that run once on each rank, in order with the ops of the mesh."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.stream import OpStream, new_number
from monarch._engine.rank.functions.calling import name_of
from monarch._engine.rank.reports import BatchReport
from monarch._meshes.inside import region_of
from monarch.exceptions import MonarchError


class Execution:
    """A function on its way to some ranks. One that has halted keeps it, and is asked once it has run it.

    Args:
        stream: the stream of the mesh; what it has not sent is sent before.
        view: the executors of the ranks.
        function: or its name.
        args: with a ShardRef for each tensor.
        kwargs: likewise.
    """

    def __init__(self, stream: OpStream, view: Any, function: Any, args: Any, kwargs: Any) -> None:
        self._stream = stream
        self._view = view
        self.number = -new_number()
        """Under which a halted rank keeps it; negative, as it is not a tensor."""
        self.title = f"the function {name_of(function)}"
        """For errors."""
        self.line = lines.here()
        self.ranks = list(region_of(view).base_ranks())
        self._reports: list[BatchReport] = []
        """Of the ranks, since they have answered first. Used by the thread that has the future."""
        self._may_be_held = False
        """Whether ranks may have its result. Likewise."""
        stream.order.next(stream)
        with stream.order.together():
            self.future: Any = view.execute.call(function, args, kwargs, self.number, self.line)
        """Of the message whose answer comes next; None once it has come."""
        self._may_be_held = True

    @property
    def done(self) -> bool:
        """Whether the ranks have answered the last message."""
        return self.future is None or self.future.done

    @property
    def is_kept(self) -> bool:
        """Whether some ranks have kept it."""
        return any(report.halted for report in self._reports)

    def ask_again(self) -> None:
        """Ask the ranks that have kept it; the others do not know it."""
        with self._stream.order.together():
            self.future = self._view.executed.call(self.number)
        self.future.rename("the result of a function")

    def answers(self) -> dict[int, BatchReport]:
        """Return the report of each rank, in their order.

        Raises:
            ActorError: the function raised.
            DeviceMeshError: a rank has died.
        """
        if self.future is None:
            self.ask_again()
        future: Any = self.future
        self.future = None
        found: list[BatchReport] = list(future.get().values())
        if self._reports:
            found = [new if old.halted else old for old, new in zip(self._reports, found, strict=True)]
        else:
            self._may_be_held = any(report.halted for report in found)
        self._reports = found
        return dict(enumerate(found))

    def exception(self) -> None:
        """Wait for the ranks."""
        if self.future is not None:
            with suppress(MonarchError):
                self.future.exception()

    def __del__(self) -> None:
        # Runs in any thread, so it only appends.
        if getattr(self, "_may_be_held", False):
            self._stream.pending.append(self.number)
