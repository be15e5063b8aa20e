"""A Stop that waits until the cell that it ends can be stopped."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from monarch._kernel_api import current_node


class HeldStop:
    """Holds a Ctrl-C from the first message of a cell until somebody waits for the cell.

    Raised in between, it would end the cell in the notebook while the ranks run it, with nobody to stop them. A wait in
    between, as for room at a rank that is far behind, still ends by it. One that is still held at the end of the block
    is raised there, also in place of an error. Used by the thread that runs cells.
    """

    def __init__(self) -> None:
        self.pressed = False
        """Whether a Ctrl-C is held."""
        self._before: Any = None
        """The handler that is replaced; None while none is."""
        self._wait = type(current_node().receive_loop).wait.__code__

    def __enter__(self) -> HeldStop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()
        if self.pressed and (error is None or isinstance(error, Exception)):
            self.pressed = False
            raise KeyboardInterrupt from error

    def begin(self) -> None:
        """Hold a Ctrl-C from now on; do nothing in a thread that gets none, or where it has no handler in Python."""
        here = threading.current_thread() is threading.main_thread()
        if here and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """Stop holding.

        Raises:
            KeyboardInterrupt: there was a Ctrl-C.
        """
        self._restore()
        if self.pressed:
            self.pressed = False
            raise KeyboardInterrupt

    def _restore(self) -> None:
        if self._before is not None:
            before, self._before = self._before, None
            signal.signal(signal.SIGINT, before)

    def _note(self, _number: int, frame: FrameType | None) -> None:
        self.pressed = True
        while frame is not None:
            if frame.f_code is self._wait:
                # The message that the wait is for was not sent.
                self.release()
            frame = frame.f_back
