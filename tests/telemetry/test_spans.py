"""Named spans of user code in the traces of torch's profiler."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import Actor, endpoint, span, traced
from monarch.exceptions import ArgumentError


def names_in(run: Callable[[], object]) -> dict[str, int]:
    """How often each name of a trace occurs while a function runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    return {str(each.key): int(each.count) for each in trace.key_averages()}


@traced
def plain(x: int, *, more: int = 1) -> int:
    """Add."""
    return x + more


@traced(name="renamed")
async def later(x: int) -> int:
    await asyncio.sleep(0)
    return x


@traced
def broken() -> None:
    raise LookupError("nothing")


class Spans(Actor):
    @endpoint
    def names(self) -> dict[str, int]:
        def run() -> None:
            with span("block"):
                plain(1)

        return names_in(run)


def test_spans_are_ranges_of_the_profiler() -> None:
    def run() -> None:
        with span("block"):
            assert plain(1, more=2) == 3 and plain(1) == 2
        assert asyncio.run(later(4)) == 4
        with pytest.raises(LookupError):
            broken()

    names = names_in(run)
    assert (names["block"], names["plain"], names["renamed"], names["broken"]) == (1, 2, 1, 1)
    assert plain.__name__ == "plain" and plain.__doc__ == "Add." and asyncio.iscoroutinefunction(later)
    wrong: Any = 3
    with pytest.raises(ArgumentError, match="span: expected a name"):
        span(wrong)


def test_spans_work_in_actors(procs: Any) -> None:
    names = procs(1).spawn("spans", Spans).names.call_one().get(timeout=60)
    assert names["block"] == names["plain"] == 1


def test_spans_do_not_import_torch() -> None:
    code = (
        "import sys; from monarch.actor import span, traced\n"
        "with span('a'): traced(print)('done')\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr
