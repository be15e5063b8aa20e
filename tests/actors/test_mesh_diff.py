"""``mesh.diff()`` in programs."""

from __future__ import annotations

from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, endpoint
from monarch.debug import Comparison
from monarch.exceptions import ArgumentError

SOON = 20.0


class Holder(Actor):
    @endpoint
    def hold(self, values: list[float], until: float) -> int:
        import time

        state = {"weights": values, "step": 3}
        state["weights"] = [*values, float(self.rank())]
        end = time.monotonic() + until
        while time.monotonic() < end:
            time.sleep(0.001)
        return len(state)

    @staticmethod
    def rank() -> int:
        from monarch.actor import current_rank

        return current_rank().rank


def test_values_of_running_calls_are_compared(procs: Any) -> None:
    mesh = procs(3)
    call = mesh.spawn("holder", Holder).hold.call([1.0, 2.0], 3.0)
    assert wait_until(lambda: all(each.frames for each in mesh.where().values()))
    assert wait_until(lambda: not mesh.diff("len(state['weights'])").failed)
    found = mesh.diff("state")
    assert isinstance(found, Comparison) and not found.equal
    assert found.groups == [[0], [1], [2]]
    assert [(each.path, each.here, each.there) for each in found.differences] == [
        ("['weights'][2]", "0.0", "1.0"), ("['weights'][2]", "0.0", "2.0"),
    ]  # fmt: skip
    assert mesh.diff("values").equal
    assert mesh.slice(gpus=1).diff("state").groups == [[1]]
    assert str(mesh.diff("nothing")) == "ranks 0-2: NameError: name 'nothing' is not defined"
    with pytest.raises(ArgumentError, match="would wait for other ranks"):
        mesh.diff("dist.all_reduce(x)")
    assert call.get(timeout=SOON).values() == [2, 2, 2]
