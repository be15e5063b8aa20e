"""The C part of ``signal``, which takes and returns plain numbers and handlers instead of enums."""

from collections.abc import Callable
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]

def getsignal(signalnum: int, /) -> _Handler | int | None: ...
def signal(signalnum: int, handler: _Handler | int | None, /) -> _Handler | int | None: ...
