"""What a blocked thread is calling or waits in, from its frame."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist

from leaks import wait_until
from monarch._tensors.collectives.waiting import called_method, waits_in


class Gate:
    """Something to wait for whose methods are C functions, as those of a Work."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.wait = self.acquire = lock.acquire
        self.release = lock.release
        self.itself = self

    def again(self, *_: object) -> Gate:
        return self


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("gate.wait()", "wait"),
        ("gate.again(1).wait()", "wait"),
        ("gate.itself.wait(gate.again() is not None)", "wait"),
        ("gate.again(\n    gate,\n).wait(\n    True,\n)", "wait"),
        ("done = threading.Event(); done.set(); done.wait(); gate.acquire()", "acquire"),
        ("gate.acquire()\ngate.wait", "acquire"),
        ("take = gate.wait; take()", "wait" if sys.version_info < (3, 11) else ""),
    ],
)
def test_method_of_a_blocked_thread_is_known(code: str, name: str) -> None:
    gate = Gate()
    compiled = compile(code, "<program>", "exec")
    thread = threading.Thread(target=exec, args=(compiled, {"gate": gate, "threading": threading}))
    thread.start()

    def frame() -> Any:
        return sys._current_frames().get(thread.ident or 0)

    try:
        assert wait_until(lambda: getattr(getattr(frame(), "f_code", None), "co_filename", "") == "<program>")
        assert wait_until(lambda: called_method(frame()) == name)
    finally:
        gate.release()
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [KeyError, ValueError, RuntimeError])
def test_group_that_is_being_destroyed_is_waited_in_by_nobody(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    gate = Gate()
    thread = threading.Thread(target=exec, args=(compile("gate.wait()", "<program>", "exec"), {"gate": gate}))
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    thread.start()

    def waits() -> Any:
        return waits_in(sys._current_frames().get(thread.ident or 0), 0, (), True)

    def destroyed(group: object) -> list[int]:
        raise error(group)

    try:
        assert wait_until(waits)
        # As torch does for a moment in destroy_process_group.
        monkeypatch.setattr(dist, "get_process_group_ranks", destroyed)
        assert waits() is None
    finally:
        gate.release()
        thread.join(20)
        dist.destroy_process_group()
