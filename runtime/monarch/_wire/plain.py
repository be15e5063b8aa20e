"""Unpickling without user code: what processes of a session tell each other about themselves."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

from monarch.exceptions import ProtocolError

_BUILTINS = frozenset({"set", "frozenset", "complex", "bytearray", "range", "slice"})

receives_here: Callable[[], bool] = bool
"""Returns whether this thread is receiving. Set once, by the node of this process."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if module.startswith("monarch.") or (module == "builtins" and name in _BUILTINS):
            # Not imported here: that could wait for a thread that imports.
            value: Any = sys.modules.get(module)
            for part in name.split(".") if value is not None else ():
                value = getattr(value, part, None)
            if value is not None:
                return value
        raise ProtocolError(
            f"{module}.{name} is in a message for the receiving thread, which accepts only plain values and "
            f"objects of this package; declare the service as threaded"
        )


def loads_plain(body: bytes) -> Any:
    """Unpickle a body of plain values and objects of this package; safe in the receiving thread.

    Raises:
        ProtocolError: it has other objects, or is broken.
    """
    try:
        return _Plain(io.BytesIO(body)).load()
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"cannot unpickle a message: {type(error).__name__}: {error}") from error
