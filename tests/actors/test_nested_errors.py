"""An error that passes through several actors keeps all their tracebacks."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, current_rank, endpoint


class Fails(Actor):
    @endpoint
    def on(self, rank: int) -> None:
        if current_rank().rank == rank:
            raise ValueError("bad weights")


def test_errors_in_nested_calls_keep_all_tracebacks(procs: Any) -> None:
    class Middle(Actor):
        @endpoint
        def ask(self, other: Any) -> Any:
            return other.on.call(1).get()

        @endpoint
        async def ask_async(self, other: Any) -> Any:
            return await other.on.call(1)

    fails = procs(2).spawn("fails", Fails)
    middle = procs(1).spawn("middle", Middle)
    text = str(middle.ask.call_one(fails).exception(timeout=20))
    assert "middle.ask()" in text and "fails.on() failed on rank 1 (gpus=1)" in text and "bad weights" in text
    assert "runtime/monarch" not in text
