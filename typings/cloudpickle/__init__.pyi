"""What this project and its tests use of cloudpickle."""

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

class _Writable(Protocol):
    def write(self, data: Any, /) -> object: ...

class Pickler(pickle.Pickler):
    def __init__(
        self,
        file: _Writable,
        protocol: int | None = None,
        buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None,
    ) -> None: ...

def dumps(obj: object) -> bytes: ...
def register_pickle_by_value(module: ModuleType) -> None: ...
