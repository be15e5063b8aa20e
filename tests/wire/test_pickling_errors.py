"""Errors of pickling: the part that they name, and what is raised as it is."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest

from monarch._wire.pickling import dumps, loads
from monarch.exceptions import SerializationError


class Guarded:
    def __init__(self) -> None:
        self.name = "x"
        self.lock = threading.Lock()


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


@dataclasses.dataclass
class Config:
    items: list[Any]


class Careful(Guarded):
    """Has a lock, which is not the part that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.other = (x for x in ())

    def __getstate__(self) -> dict[str, Any]:
        return {"other": self.other}


LOCK = threading.Lock()


def closure() -> Any:
    lock = LOCK
    return lambda: lock.acquire()


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (((Guarded(),), {}), "args[0].lock: cannot pickle '_thread.lock' object"),
        (((1, [2, Slotted()]), {}), "args[1][1].lock: "),
        (((), {"model": Guarded()}), "kwargs['model'].lock: "),
        (Config([1, {"a": LOCK}]), "value.items[1]['a']: "),
        (closure(), "value (uses 'lock'): "),
        (Careful(), "value.other: cannot pickle 'generator' object"),
        ([np.zeros(3), {"x": sys._getframe()}], "value[1]['x']: "),
        ({Careful}, None),
    ],
    ids=["argument", "slot", "keyword", "field", "closure", "careful", "frame", "set"],
)
def test_error_names_the_part(obj: Any, path: str | None) -> None:
    if path is None:
        assert loads(*dumps(obj)) == obj
        return
    with pytest.raises(SerializationError) as caught:
        dumps(obj)
    assert str(caught.value).startswith(path)
    assert type(caught.value.__cause__) is TypeError


def test_caller_may_name_the_value() -> None:
    with pytest.raises(SerializationError, match=r"^the result\[0\].lock: "):
        dumps([Guarded()], "the result")


def test_error_survives_repr_that_raises() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(SerializationError, match="cannot pickle"):
        dumps({Bad(): LOCK})


def test_too_deep_nesting_is_an_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match=r"^args: nested too deeply"):
        dumps(((deep,), {}))


@pytest.mark.parametrize("body", [b"cnosuchmodule\nname\n.", b"cos\nnosuch\n.", b"", b"\x80\x05\x97."])
def test_failed_unpickling_is_an_error(body: bytes) -> None:
    with pytest.raises(SerializationError, match="cannot be unpickled here") as caught:
        loads(body)
    assert caught.value.__cause__ is not None
    if b"module" in body:
        assert "install the module" in str(caught.value)


def test_stop_is_not_error_of_pickling() -> None:
    class Stopped:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dumps(Stopped())


class _Rings:
    """Lets a signal arrive while it is pickled, or unpickled."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return _ring, ()


def _ring() -> int:
    signal.raise_signal(signal.SIGUSR1)
    return 0


class _Limit(BaseException):
    pass


@pytest.mark.parametrize("kind", [_Limit, TimeoutError])
def test_error_of_a_signal_handler_is_raised_as_it_is(kind: type[BaseException]) -> None:
    def handler(*_: Any) -> None:
        raise kind("time limit of the program")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind, match="time limit of the program"):
            dumps([_Rings()], "value")
        with pytest.raises(kind, match="time limit of the program"):
            loads(b"c" + f"{__name__}\n_ring\n".encode() + b"(tR.")
    finally:
        signal.signal(signal.SIGUSR1, before)
