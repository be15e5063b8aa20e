"""Where the ranks of a running cell are, once some wait in a collective: the function and the line of each."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from monarch._kernel_api import (
    SYMMETRIC,
    CollectiveWait,
    Gather,
    Node,
    ServiceAnswers,
    Whereabouts,
    advice,
    describe_ranks,
    is_a,
    is_gather,
    request,
    split_proc,
    whereabouts,
)

_SHARE = 0.1
"""Fraction of the time of a call between two questions."""
_SHOWN = 6
"""Most places shown."""
_MISMATCH = "these collectives differ, so none can complete; call the same one, with one shape and dtype, on all ranks"
_LEFT_BEHIND = "its tensors may differ in shape or dtype between ranks; %mesh check on compares them"


class Positions:
    """The positions of the ranks of calls that a cell waits for. Leader only.

    Args:
        node: the node of the notebook.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._looks: dict[int, _Look] = {}
        """By port of the call."""

    def text(self, call: Gather[Any], seconds: float, title: str) -> str:
        """Describe where the ranks are that have not answered; empty if none waits in a collective.

        Args:
            call: the call.
            seconds: how long ago it was made.
            title: the title of the call; for a cell, its name.
        """
        self._forget()
        look = self._looks.setdefault(call.port, _Look())
        if time.monotonic() >= look.due:
            look.due = time.monotonic() + _SHARE * seconds
            look.ask(self._node, call)
        left = {peer.proc for peer in call.waits_for()}
        text = look.text({proc: each for proc, each in look.answers.items() if proc in left})
        # The cell that waits need not be named.
        return text.replace(f" at {title} line ", " at line ")

    def _forget(self) -> None:
        gathers = self._node.ports.gathers
        for port in [port for port in self._looks if not is_gather(gathers.get(port))]:
            self._looks.pop(port).close()


class _Look:
    """The answers of the ranks of one call. Leader only."""

    def __init__(self) -> None:
        self.due = 0.0
        self.answers: dict[str, Whereabouts] = {}
        """By proc, the latest."""
        self._still: set[str] = set()
        """Procs that were in the same collective in their last two answers."""
        self._asking: ServiceAnswers | None = None

    def ask(self, node: Node, call: Gather[Any]) -> None:
        self.close()
        procs = [peer.proc for peer in call.waits_for() if peer.dead is None]
        self._asking = ServiceAnswers(node, procs, request(whereabouts, call.actor, node.proc, call.port), self._heard)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.close()

    def _heard(self, proc: str, answer: Any) -> None:
        before = self.answers.pop(proc, None)
        self._still.discard(proc)
        if not is_a(answer, Whereabouts):
            return
        self.answers[proc] = answer
        if answer.waits is not None and before is not None and before.waits == answer.waits:
            self._still.add(proc)

    def text(self, answers: Mapping[str, Whereabouts]) -> str:
        if not self._still.intersection(answers):
            return ""
        found = {split_proc(proc)[1]: each for proc, each in answers.items()}
        return describe(found, {split_proc(proc)[1] for proc in self._still})


def describe(found: Mapping[int, Whereabouts], still: Collection[int]) -> str:
    """Describe the positions of ranks, equal ones once, and whether their collectives can end.

    Args:
        found: by rank.
        still: ranks that have waited in the same collective for a while.
    """
    ranks_of: dict[str, list[int]] = {}
    differs = mismatch({rank: each for rank, each in found.items() if each.waits is not None})
    for rank, each in sorted(found.items()):
        ranks_of.setdefault(_place(each, differs), []).append(rank)
    parts = [f"{describe_ranks(ranks)} {place}" for place, ranks in list(ranks_of.items())[:_SHOWN]]
    if len(ranks_of) > _SHOWN:
        parts.append(f"{sum(map(len, list(ranks_of.values())[_SHOWN:]))} ranks elsewhere")
    return "; ".join([", ".join(parts), *([_MISMATCH] if differs else left_behind(found, still))])


def left_behind(found: Mapping[int, Whereabouts], still: Collection[int]) -> list[str]:
    """Return a line about ranks that still wait in a collective that others have left.

    No rank leaves such a collective before all have joined, so it ends everywhere at about the same time.
    """
    for rank in sorted(still):
        waits = found[rank].waits if rank in found else None
        if waits is None or waits.operation not in SYMMETRIC:
            continue
        later = [other for other, each in found.items() if _is_past(each, waits)]
        if later:
            done = f"{describe_ranks(later)} finished the {waits.operation} that rank {rank} still waits in"
            return [f"{done}: {_LEFT_BEHIND}"]
    return []


def _is_past(each: Whereabouts, waits: CollectiveWait) -> bool:
    return each.waits is not None and each.waits.group == waits.group and each.waits.number > waits.number


def mismatch(waiting: Mapping[int, Whereabouts]) -> bool:
    """Return whether ranks wait in the same collective of a group by number, but with other operations or tensors."""
    kinds: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for each in waiting.values():
        waits = each.waits
        # Of a wait for a Work, the operation is unknown; point-to-point operations have no counterpart.
        if waits is not None and waits.operation and not waits.peers and waits.number:
            kinds.setdefault((waits.group, waits.number), set()).add((waits.operation, each.tensors))
    return any(len(each) > 1 for each in kinds.values())


def _place(each: Whereabouts, with_tensors: bool) -> str:
    what = f"in {each.call}" if each.call else "running"
    if each.waits is not None:
        what = f"in {each.waits.operation or 'a collective'}"
        what += f" of {each.tensors}" if with_tensors and each.tensors else ""
    return f"{what} at {advice().placed(each.place)}" if each.place else what
