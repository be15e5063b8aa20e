"""Mistakes in a user's program that type checkers must find: a comment that hides no error is an error itself."""

from __future__ import annotations

from monarch.actor import Actor, Port, ProcMesh, endpoint


class Counter(Actor):
    @endpoint
    def add(self, n: int) -> int:
        return n

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], text: str) -> None:
        port.send(len(text))  # type: ignore[arg-type]


def mistakes(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", Counter)
    counters.add.call("one")  # type: ignore[arg-type]
    counters.add.call_one()  # type: ignore[call-arg]
    counters.add.choose(n=1, m=2)  # type: ignore[call-arg]
    counters.later.call_one(7)  # type: ignore[arg-type]
    counters.subtract.call(1)  # type: ignore[attr-defined]
    result: str = counters.add.call_one(1).get()  # type: ignore[assignment]
    table: int = counters.add.call(1).get()  # type: ignore[assignment]
    counters.slice(0)  # type: ignore[call-arg]
    procs.spawn("words", str)  # type: ignore[type-var]
    print(result, table)
