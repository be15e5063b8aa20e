"""An expression compared across ranks: by hashes first, then by the small parts of two ranks that differ."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from monarch._core.digests.comparison import ComparedPart, Comparison, Difference, first_difference
from monarch._core.digests.elements import Elements, differing
from monarch._core.kinds import is_list, is_tuple
from monarch._core.roster import Procs
from monarch._debug.pausing import ask_ranks
from monarch._meshes.inside import region_of, state_of
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._node.services.registry import ServiceRequest, request, service
from monarch._notebook.looking.comparing import begin, data_here, end, figures_here, hashes_here, parts_here
from monarch._notebook.looking.evaluate import check_expression
from monarch.exceptions import MonarchError

_FIRST = 30.0
"""Seconds for ranks to evaluate an expression and read all of its value."""
_LATER = 10.0
_MOST = 3
"""Groups of ranks that are compared with the first one."""


class _Changed(Exception):
    """A rank does not answer any more, or its value has changed meanwhile."""


@service("differences.diff", "local")
def diff(mesh: ProcMeshLike, expression: str, up: int, force: bool) -> Comparison:
    """Compare the value of an expression on the ranks of a mesh; see ``ProcMesh.diff``."""
    return compared(state_of(mesh).procs, region_of(mesh).base_ranks(), expression, up, force)


def compared(procs: Procs, ranks: Iterable[int], expression: str, up: int = 0, force: bool = False) -> Comparison:
    """Compare the value of an expression on ranks, paused, running or idle.

    Args:
        procs: the processes of the ranks.
        ranks: the ranks of the mesh.
        expression: in Python.
        up: callers to go outward from the innermost frame of the user's code.
        force: whether to call functions that wait for other ranks.

    Raises:
        ArgumentError: it is not an expression, or would wait for other ranks.
    """
    check_expression(expression, up, force)
    asking = _Asking(procs, uuid.uuid4().hex)
    asked = sorted(ranks)
    try:
        answers = ask_ranks(procs, asked, request(begin, asking.name, expression, up), _FIRST)
        begun = {rank: each[1] for rank, each in answers.items() if is_tuple(each) and each[0]}
        failed = {rank: str(each[1] if is_tuple(each) else each) for rank, each in answers.items() if rank not in begun}
        groups: dict[bytes, list[int]] = {}
        for rank, (mark, *_) in begun.items():
            groups.setdefault(mark, []).append(rank)
        ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
        differences = [asking.difference(ordered[0], group) for group in ordered[1 : _MOST + 1]]
        differences += [Difference(group, "", 0, 0, "", "") for group in ordered[_MOST + 1 :]]
        first = begun[ordered[0][0]] if ordered else (b"", 0, 0, "")
        text = asking.text(ordered[0][0], first[3]) if len(ordered) == 1 else first[3]
        return Comparison(expression, text, ordered, differences, first[2], failed)
    finally:
        ask_ranks(procs, asked, request(end, asking.name), 0.0)


class _Asking:
    """Asks two ranks for parts of their values.

    Args:
        procs: the processes of the ranks.
        name: the name of the comparison.
    """

    def __init__(self, procs: Procs, name: str) -> None:
        self._procs = procs
        self.name = name

    def difference(self, first: list[int], other: list[int]) -> Difference:
        """Return how two groups of ranks differ; the ranks of each group agree."""
        pair = first[0], other[0]
        try:
            answers = self._both(pair, request(parts_here, self.name))
            ours, theirs = ([ComparedPart(*each) for each in some] for some in answers)
            here, there, count = first_difference(ours, theirs)
            path = here.path if here is not None else there.path if there is not None else ""
            ours_text, theirs_text = (part.text if part is not None else "" for part in (here, there))
            total = len({part.path for part in (*ours, *theirs)})
            found = Difference(other, path, count, total, ours_text, theirs_text)
            if here is None or there is None or here.form != there.form or not here.mark or "[" not in here.form:
                return found
            return self._elements(pair, found)
        except (_Changed, MonarchError) as error:
            return Difference(other, "", 0, 0, "", f"could not be compared in detail: {error}")

    def text(self, rank: int, text: str) -> str:
        """Return the value of a rank in a few words, with figures if it is an array."""
        answer = ask_ranks(self._procs, [rank], request(figures_here, self.name, ""), _LATER)[rank]
        return answer[0] if is_tuple(answer) else text

    def _elements(self, pair: tuple[int, int], found: Difference) -> Difference:
        name, path = self.name, found.path
        (here, kind, shape, count), (there, *_) = self._both(pair, request(figures_here, name, path))
        elements: Elements = differing(
            count,
            kind,
            lambda start, stop, step: self._both(pair, request(hashes_here, name, path, start, stop, step)),
            lambda start, stop: self._both(pair, request(data_here, name, path, start, stop)),
        )
        return found._replace(here=here, there=there, shape=tuple(shape), elements=elements)

    def _both(self, pair: tuple[int, int], asked: ServiceRequest) -> tuple[Any, Any]:
        answers = ask_ranks(self._procs, pair, asked, _LATER)
        for rank, each in answers.items():
            if not (is_tuple(each) or is_list(each) or type(each) is bytes):
                raise _Changed(f"rank {rank}: {each}")
        return answers[pair[0]], answers[pair[1]]
