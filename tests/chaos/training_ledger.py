"""The outcome of each call: it is answered or fails, once, and stays so."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from monarch.exceptions import ActorError, CallTimeoutError, DeviceMeshError

HANG = 30.0
"""Seconds after which a call counts as lost. This is not a limit on its duration."""
Trouble = (DeviceMeshError, ActorError)
"""Errors that a call may raise while ranks die."""


class Lost(Exception):
    """A call was neither answered nor failed."""


class Call:
    """One pending call."""

    def __init__(self, ledger: Ledger, what: str, future: Any) -> None:
        self.ledger, self.what = ledger, what
        self.future: Any = future
        self.ends = 0
        future.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        with self.ledger.lock:
            self.ends += 1

    def get(self) -> Any:
        """Its outcome, which is entered."""
        try:
            error = self.future.exception(HANG)
        except CallTimeoutError as silence:
            self.ledger.enter("lost", f"{self.what} was not answered within {HANG:g} s: {silence}")
            raise Lost(self.what) from silence
        self.ledger.enter(type(error).__name__ if error is not None else "answered")
        if error is not None and not isinstance(error, Trouble):
            self.ledger.complain(f"{self.what}: {error!r}")
        if isinstance(error, ActorError):
            mistaken = any("AssertionError" in text for text in error.failures.values())
            if mistaken or not isinstance(error.exception, (RuntimeError, *Trouble)):
                self.ledger.complain(f"{self.what}: {error}")
        # The same again, and no other.
        future, self.future = self.future, None
        if not future.done or future.exception(0) is not error:
            self.ledger.complain(f"{self.what} has had another outcome")
        if error is not None:
            raise error
        value = future.get(0)
        if future.get(0) is not value:
            self.ledger.complain(f"{self.what} was answered twice")
        return value


class Ledger:
    """All calls of a program."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[Call] = []
        self.sent = 0
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.told: deque[str] = deque(maxlen=200)
        """Recent events, for whoever looks for the cause of an error."""
        self._begun = time.monotonic()

    def tell(self, text: str) -> None:
        self.told.append(f"{time.monotonic() - self._begun:.3f} {text}")

    def send(self, what: str, begin: Callable[[], Any]) -> Call:
        """Make a call. One that cannot even be sent is rejected, which is an outcome as well."""
        with self.lock:
            self.sent += 1
        try:
            call = Call(self, what, begin())
        except DeviceMeshError:
            self.enter("refused")
            raise
        with self.lock:
            self.calls.append(call)
        return call

    def ask(self, what: str, begin: Callable[[], Any]) -> Any:
        """Makes a call and waits for it."""
        return self.send(what, begin).get()

    def enter(self, kind: str, wrong: str = "") -> None:
        with self.lock:
            self.kinds[kind] += 1
        if wrong:
            self.complain(wrong)

    def complain(self, text: str) -> None:
        self.tell(f"wrong: {text}")
        with self.lock:
            self.wrong.append(text)

    def close(self) -> None:
        """Check that each call has one outcome, reported once."""
        odd = Counter(call.ends for call in self.calls if call.ends != 1)
        if odd:
            self.complain(f"calls by how often they have ended, where that is not once: {dict(odd)}")
        if self.kinds.total() != self.sent:
            self.complain(f"{self.sent} calls have {self.kinds.total()} outcomes")
