"""Whether the calling thread holds a lock."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

_KIND: Any = type(RLock())
is_owned: Callable[[Any], bool] = _KIND._is_owned
"""Return whether the calling thread holds a ``threading.RLock``: a private method of it, as ``Condition`` uses."""
