"""The last error of a rank, with the frames that it has left, until the next call."""

from __future__ import annotations

import traceback
from types import FrameType, TracebackType

from monarch._actors.letting_go import letting_go
from monarch._actors.pausing.gate import gate
from monarch._actors.pausing.tracing import describe


class FailedFrames:
    """Keeps the frames of the last error, and lets them go at the beginning of the next call."""

    def __init__(self) -> None:
        # Written by threads of actors, and set to None by any; read as a whole.
        self._error: tuple[BaseException, TracebackType] | None = None
        gate.at_entry.append(self.forget)

    def keep(self, error: BaseException) -> None:
        """Keep an error of a call; interrupts are not kept."""
        frames = error.__traceback__
        if isinstance(error, Exception) and frames is not None:
            self._error = error, frames
            gate.wanted = True

    def explain(self, error: BaseException, known: BaseException) -> None:
        """Show another error in place of a kept one, with the same frames."""
        kept = self._error
        if kept is not None and kept[0] is error:
            self._error = known, kept[1]

    def stop(self, error: BaseException) -> None:
        """Pause this thread at an error that is kept, if the program wants to look at errors."""
        if self._error is not None and self._error[0] is error:
            gate.stop_at_error(error, [frame for frame, _ in self.frames()])

    def forget(self) -> bool:
        """Release the frames and all that they hold; return whether there were any."""
        with letting_go():
            had, self._error = self._error is not None, None
        return had

    def text(self) -> str:
        """Return the error as one line; empty if there is none."""
        kept = self._error
        return describe(kept[0]) if kept is not None else ""

    def frames(self) -> list[tuple[FrameType, int]]:
        """Return the frames with their lines, innermost first."""
        kept = self._error
        return [] if kept is None else list(traceback.walk_tb(kept[1]))[::-1]

    def frame(self) -> FrameType | None:
        """Return the innermost frame; None without an error."""
        frames = self.frames()
        return frames[0][0] if frames else None


failed = FailedFrames()
"""Of this process; used in ranks."""
