"""The transfers of state that have ended in this process; anything kept for one of them later would stay forever."""

from __future__ import annotations

import threading

_KEPT = 1000
"""Tokens that are remembered: more than transfers end while one actor is busy."""
_lock = threading.RLock()
_ended: dict[str, None] = {}
"""The last tokens, oldest first. Under _lock, held briefly, as the receiving thread and a ``__del__`` take it too."""


def note_end(token: str) -> None:
    """Remember the token of a transfer that ends; call this before looking for what is kept for it."""
    with _lock:
        _ended[token] = None
        if len(_ended) > _KEPT:
            del _ended[next(iter(_ended))]


def has_ended(token: str) -> bool:
    """Return whether a transfer has ended; call this after keeping something for it, and then release that."""
    with _lock:
        return token in _ended
