"""``%mesh watch``: reports when a module or optimizer diverges among ranks, or gets NaN or Inf."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import NamedTuple

from monarch._kernel_api import (
    Sentries,
    ask_ranks,
    describe_ranks,
    end_watch_here,
    is_tuple,
    open_node,
    request,
    state_of,
    watch_here,
)
from monarch_kernel.debug.grouped import grouped, grouped_lines
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.mesh import Mesh

_PATIENCE = 6.0
"""Seconds for ranks to evaluate the name."""


class _Watch(NamedTuple):
    key: str
    mesh: Mesh
    ranks: list[int]
    every: int


class Watches:
    """The command that begins, lists and ends watches.

    Args:
        pausing: the commands beside it, which find the ranks that are meant.
        tell: returns a function that shows a line in the current cell, even after its end.
    """

    def __init__(self, pausing: Pausing, tell: Callable[[], Callable[[str], object]]) -> None:
        self._pausing = pausing
        self._tell = tell
        self._watches: dict[tuple[str, str], _Watch] = {}
        """By names of mesh and value; threads that run cells, in single operations."""

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the command by name."""
        return {"watch": self.watch}

    def watch(self, words: list[str]) -> None:
        """Begin a watch, end one, or list them."""
        parsed = parse("watch", words)
        mesh, ranks = self._pausing.named("watch", [parsed.on] if parsed.on else [])
        if parsed.off:
            print("\n".join(self._end(mesh, parsed.name)))
        elif parsed.name is None:
            print("\n".join(self._lines(mesh)) or "nothing is being watched; watch a variable with %mesh watch NAME")
        elif parsed.every < 1:
            raise Usage(f"%mesh watch: --every: expected at least 1 step, got {parsed.every}")
        else:
            self._begin(mesh, ranks, parsed.name, parsed.every)

    def _begin(self, mesh: Mesh, ranks: list[int], name: str, every: int) -> None:
        # The sentries report to this notebook from now on.
        open_node().part(Sentries).tell = lambda text: self._tell()(text)
        self._end(mesh, name, False)
        watch = _Watch(uuid.uuid4().hex, mesh, ranks, every)
        procs = state_of(mesh.procs).procs
        answers = ask_ranks(
            procs, ranks, request(watch_here, watch.key, name, mesh.frame, every, len(ranks)), _PATIENCE
        )
        failed = {rank: str(each[1] if is_tuple(each) else each) for rank, each in answers.items()
                  if not (is_tuple(each) and each[0])}  # fmt: skip
        if failed:
            # The sentry would wait for them.
            ask_ranks(procs, ranks, request(end_watch_here, watch.key))
            raise Usage(f"%mesh watch: cannot watch {name}\n{grouped_lines(sorted(failed.items()))}")
        self._watches[mesh.name, name] = watch
        kinds = ", ".join(text for text, _ in grouped((rank, each[1]) for rank, each in sorted(answers.items())))
        steps = "each step" if every == 1 else f"every {every} steps"
        print(f"watching {name} on {describe_ranks(ranks)} of mesh {mesh.name!r}, {steps}: {kinds}")

    def _end(self, mesh: Mesh, name: str | None, needed: bool = True) -> list[str]:
        names = [each for of, each in list(self._watches) if of == mesh.name and name in (None, each)]
        if not names and needed:
            raise Usage(f"%mesh watch: {name or 'nothing'} is {'not ' if name else ''}watched on mesh {mesh.name!r}")
        for each in names:
            watch = self._watches.pop((mesh.name, each))
            ask_ranks(state_of(watch.mesh.procs).procs, watch.ranks, request(end_watch_here, watch.key))
            open_node().part(Sentries).end(state_of(watch.mesh.procs).procs.uid, watch.key)
        return [f"no longer watching {each}" for each in names]

    def _lines(self, mesh: Mesh) -> list[str]:
        lines: list[str] = []
        for (of, name), watch in list(self._watches.items()):
            if of != mesh.name:
                continue
            state = open_node().part(Sentries).watched(state_of(watch.mesh.procs).procs.uid, watch.key)
            so_far = f"compared {state.compared:,} steps, the last was step {state.last:,}" if state else "no steps yet"
            lines.append(f"{name} on {describe_ranks(watch.ranks)}, every {watch.every}: {so_far}")
            lines += [f"  {each.text}" for each in (state.found if state else [])]
        return lines
