"""Debug mode check: the receiving thread never waits, and never runs user code.

A profile function sees the calls while a message is handled: functions outside this package and the libraries below it,
and functions that unpickle, print or wait. A ``__del__`` is exempt: it may run anywhere.
"""

from __future__ import annotations

import builtins
import logging
import os
import pickle
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections import deque
from types import CodeType, FrameType
from typing import Any

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STDLIB = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep)
_LIBRARIES = ("zmq", "msgspec", "cloudpickle", "torch", "numpy", "psutil")
_SITE = ("site-packages", "dist-packages")
_C_CALLS = {
    id(function): what
    for function, what in (
        (pickle.loads, "unpickles"),
        (pickle.load, "unpickles"),
        (builtins.print, "prints"),
        (warnings.warn, "warns"),
        (time.sleep, "waits"),
    )
}
_CALLS: dict[CodeType, str] = {
    threading.Condition.wait.__code__: "waits",
    threading.Thread.join.__code__: "waits",
    logging.Logger.handle.__code__: "logs",
}
_START = threading.Thread.start.__code__
_WRITES = frozenset({"write", "writelines", "flush"})
_DEPTH = 200


class Check:
    """Records violations in the thread that runs ``watch``; ``found`` has their texts, each kind once."""

    def __init__(self) -> None:
        self.found: deque[str] = deque()
        """Appended by the receiving thread, taken by another."""
        # Leader only.
        self._known: set[tuple[str, int]] = set()
        self._files: dict[str, bool] = {}

    def watch(self, frame: FrameType, event: str, arg: Any) -> None:
        """The profile function, for ``sys.setprofile``."""
        if event == "call":
            code = frame.f_code
            what = _CALLS.get(code, "")
            if what and not _starts_thread(frame):
                self._note(frame, what)
            elif not self._is_ours(code.co_filename):
                name = getattr(code, "co_qualname", code.co_name)
                self._note(frame, f"runs user code ({name} of {code.co_filename})")
        elif event == "c_call":
            what = _C_CALLS.get(id(arg), "")
            if not what and arg.__name__ in _WRITES and type(arg.__self__).__module__ == "_io":
                what = "prints"
            if what:
                self._note(frame, what)

    def _is_ours(self, file: str) -> bool:
        internal = self._files.get(file)
        if internal is None:
            internal = self._files[file] = _is_ours(file)
        return internal

    def _note(self, frame: FrameType, what: str) -> None:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place in self._known or _is_in_del(frame):
            return
        self._known.add(place)
        stack = "".join(traceback.format_stack(frame))
        self.found.append(f"the receiving thread of process {os.getpid()} {what} here, which it must not do:\n{stack}")


def _is_ours(file: str) -> bool:
    if file.startswith(("<frozen", "<string>", _OURS)) or f"{os.sep}monarch_kernel{os.sep}" in file:
        return True
    for site in _SITE:
        _, found, rest = file.partition(os.sep + site + os.sep)
        if found:
            return rest.partition(os.sep)[0].partition(".")[0] in _LIBRARIES
    return file.startswith(_STDLIB)


def _starts_thread(frame: FrameType | None) -> bool:
    """Return whether it waits for a thread to begin, which is allowed."""
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code is _START:
            return True
        frame = frame.f_back
    return False


def _is_in_del(frame: FrameType | None) -> bool:
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def watched(check: Check, step: Any, what: Any) -> None:
    """Run a step with the check, unless this thread already has a profile function."""
    if sys.getprofile() is not None:
        step(what)
        return
    sys.setprofile(check.watch)
    try:
        step(what)
    finally:
        sys.setprofile(None)
