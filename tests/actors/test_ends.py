"""A program leaves no process and no file, however it ends."""

from __future__ import annotations

from typing import Any

import pytest

from monarch._node.current import current_node
from monarch.actor import Actor, endpoint

pytestmark = pytest.mark.slow


class Last(Actor):
    @endpoint
    def at_the_end(self, path: str) -> None:
        """Record whether the closing node is still the node of its process."""
        node = current_node()

        def end() -> None:
            with open(path, "w") as file:
                file.write(f"{node.closed} {current_node() is node}")

        node.events.closing.subscribe(end)


def test_ending_rank_opens_no_session(procs: Any, tmp_path: Any) -> None:
    mesh = procs(1)
    mesh.spawn("last", Last).at_the_end.call(str(tmp_path / "end")).get(timeout=20)
    mesh.stop().get(timeout=20)
    assert (tmp_path / "end").read_text() == "True True"


@pytest.mark.parametrize(
    "end",
    ["", "sys.exit(3)", "raise ValueError('the end')", "os._exit(4)", "os.kill(os.getpid(), 9)", "del procs, a"],
)
def test_program_leaves_nothing_however_it_ends(program: Any, end: str) -> None:
    done = program(
        f"""
import os, sys
from monarch.actor import Actor, endpoint, this_host

class A(Actor):
    @endpoint
    def f(self):
        print("said")
        return 1

procs = this_host().spawn_procs(per_host={{"gpus": 2}})
a = procs.spawn("a", A)
assert list(a.f.call().get(timeout=50).values()) == [1, 1]
{end}
"""
    )
    codes = {"sys.exit(3)": 3, "raise ValueError('the end')": 1, "os._exit(4)": 4, "os.kill(os.getpid(), 9)": -9}
    assert done.code == codes.get(end, 0), done.err
    assert done.left == []
    if end in ("", "del procs, a"):
        # A rank that is late is not folded with the other.
        lines = {"[ranks 0-1] said\n"}, {"[rank 0] said\n", "[rank 1] said\n"}
        assert done.err == "" and set(done.out.splitlines(keepends=True)) in lines
