"""Requests that may arrive twice, by different ways and late, and are carried out once."""

from __future__ import annotations

import secrets
from collections import OrderedDict

_REMEMBERED = 10_000
"""Requests that a process remembers."""
_begun: OrderedDict[str, None] = OrderedDict()
"""Keys of requests, oldest first. Single operations only."""


def new_key() -> str:
    """Return a key for one request."""
    return secrets.token_hex(8)


def is_first(key: str) -> bool:
    """Return whether a request arrives for the first time; later ones count as arrived."""
    if key in _begun:
        return False
    _begun[key] = None
    while len(_begun) > _REMEMBERED:
        _begun.popitem(last=False)
    return True
