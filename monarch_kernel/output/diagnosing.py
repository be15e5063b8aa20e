"""Why the ranks of a running cell wait: asked from its second second on, and said once they have waited for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from monarch._kernel_api import (
    Gather,
    Inquiry,
    Node,
    advice,
    describe_finding,
    describe_ranks,
    diagnose,
    is_gather,
    names_of,
    procs_beyond,
    split_proc,
)
from monarch.config import STUCK_WAIT
from monarch.debug import Cause, Finding, Kind, Level, Standing

_Key = frozenset[tuple[str, int]]
"""The ranks of a finding."""
_SHARE = 0.1
"""Fraction of the time of a call between two looks."""
_RANKS = 128
"""Ranks beyond which looks are rarer."""
_SOONER = 0.5
"""Fraction of the usual time after which waits are said that cannot end."""
_SLACK = 0.3
"""Seconds that a wait is longer than it is known to be."""
_SURE = 1.0
"""Seconds of an endless wait from which a Stop names its cause."""
_LABEL = "when stopped"
"""Heading of the waits that a Stop ends."""
_RESUMES = "'continue' at the prompt resumes it, or %mesh resume if no prompt is open"
"""Advice about paused ranks that others wait for in a running cell."""
_SHOWN = 3
"""Most findings shown below a running cell."""


class Diagnosing:
    """The diagnoses of the meshes that running cells wait for. Leader only, but for ``stuck``.

    Args:
        node: the node of the notebook.
        show: shows the waits of running cells again.
        is_cell: returns whether a call is a cell.
    """

    def __init__(
        self, node: Node, show: Callable[[], object], is_cell: Callable[[Gather[Any]], bool] = lambda call: False
    ) -> None:
        self._node = node
        self._is_cell = is_cell
        self._show = show
        self._looks: dict[int, _Look] = {}
        """By port of the call. Single operations by the leader; read by any thread."""

    def text(self, calls: Sequence[Gather[Any]], seconds: Callable[[Gather[Any]], float], title: str) -> str:
        """Describe why the ranks of calls wait; empty if they do not, or not for long.

        Args:
            calls: the unanswered calls of a cell.
            seconds: returns how long ago a call was made.
            title: the title of the cell.
        """
        self._forget()
        found: dict[str, Finding] = {}
        for call in calls:
            look = self._looks.setdefault(call.port, _Look(self._node, call, self._show, self._is_cell(call)))
            look.ask(seconds(call))
            found.update(look.findings())
        return _placed(list(found), title)

    def stuck(self, calls: Iterable[Gather[Any]], title: str) -> str:
        """Describe the long or endless waits of calls for a Stop, as last known; empty if there were none. Any thread.

        Args:
            calls: the calls of a cell.
            title: the title of the cell.
        """
        looks = [self._looks.get(call.port) for call in calls]
        return _placed(list(dict.fromkeys(text for look in looks if look is not None for text in look.stuck)), title)

    def _forget(self) -> None:
        gathers = self._node.ports.gathers
        for port in [port for port in self._looks if not is_gather(gathers.get(port))]:
            self._looks.pop(port).close()


class _Look:
    """The diagnosis of one call. Leader only."""

    def __init__(self, node: Node, call: Gather[Any], show: Callable[[], object], is_cell: bool) -> None:
        self._node, self._call = node, call
        self._title = "this cell" if is_cell else call.label
        self._show = show
        self._inquiry = Inquiry(node, self._heard)
        self._due = 0.0
        self._text = ""
        self._idle: frozenset[_Key] = frozenset()
        """The waits for idle ranks, by the last answers."""
        self._sure: frozenset[_Key] = frozenset()
        """Those by the answers before, too: ranks of a busy machine answer at different times, and the idle one may
        have ended the waits of the others since."""
        self.stuck: tuple[str, ...] = ()
        """The waits that a Stop names, as texts. Replaced by the leader, read by any thread."""
        self.close = self._inquiry.close

    def ask(self, seconds: float) -> None:
        """Ask all ranks of the mesh, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        procs = self._procs()
        pause = min(_SHARE * seconds, STUCK_WAIT()) * max(1.0, len(procs) / _RANKS)
        self._due = now + pause
        found = self._inquiry.facts(procs)
        self._inquiry.ask([*procs, *procs_beyond(found, procs, self._node)])

    def _procs(self) -> list[str]:
        view = self._call.view
        if view is None:
            return [peer.proc for peer in self._call.targets]
        procs = view._state.procs
        return [procs.proc(rank) for rank in range(procs.size)]

    def _heard(self) -> None:
        found, names = self._findings()
        idle = frozenset(_key(each) for each in found if each.cause is Cause.IDLE)
        self._sure, self._idle = idle & self._idle, idle
        lasting = [each for each in found if _is_endless(each) or (_is_due(each) and each.level is not Level.SLOW)]
        self.stuck = tuple(describe_finding(each, names, _LABEL) for each in lasting)
        before, self._text = self._text, "\n".join(self._texts(found, names))
        if self._text != before:
            self._show()
            self._node.events.call_waits.tell(self._call.port, advice().placed(self._text.partition("\n")[0]))

    def findings(self) -> dict[str, Finding]:
        """Return the findings to show, by their texts."""
        return self._texts(*self._findings())

    def _texts(self, findings: Iterable[Finding], names: dict[str, str]) -> dict[str, Finding]:
        """Return the findings to show, by their texts."""
        sure = [each for each in findings if each.cause is not Cause.IDLE or _key(each) in self._sure]
        return {describe_finding(each, names): each for each in sure if _is_due(each)}

    def _findings(self) -> tuple[list[Finding], dict[str, str]]:
        """Return the findings that concern the call, and the names of meshes."""
        procs = self._procs()
        found = self._inquiry.facts(procs, True)
        beyond = procs_beyond(found, procs, self._node)
        left = {split_proc(peer.proc) for peer in self._call.waits_for()}
        diagnosis = diagnose([*found, *self._inquiry.facts(beyond, True)])
        names = names_of(self._node, [*procs, *beyond])
        told = [each for each in diagnosis.findings if _concerns(each, left) and not _only_pauses(each)]
        if self._call.method == "__init__":
            # A rank that starts is busy with imports.
            told = [each for each in told if each.cause is not Cause.BLOCKED]
        return [each._replace(missing=tuple(map(self._named, each.missing))) for each in told], names

    def _named(self, missing: Standing) -> Standing:
        """Tell idle ranks on which the call does not run from those that have ended it; advise about paused ones."""
        if missing.kind is Kind.PAUSED and self._title == "this cell":
            return missing._replace(advice=_RESUMES)
        targets = {split_proc(peer.proc) for peer in self._call.targets}
        outside = not any((missing.uid, rank) in targets for rank in missing.ranks)
        if missing.kind is not Kind.IDLE or not outside:
            return missing
        advice = f"run it on {describe_ranks(missing.ranks)} too, or use a process group of its ranks only"
        return missing._replace(what=f"idle: {self._title} does not run there", advice=advice)


def _is_due(finding: Finding) -> bool:
    bound = STUCK_WAIT() - _SLACK
    if finding.level is Level.STUCK and finding.cause is not Cause.IDLE:
        bound *= _SOONER
    return finding.seconds >= bound


def _key(finding: Finding) -> _Key:
    """Return the ranks that a finding is about."""
    return frozenset((each.uid, rank) for each in (*finding.waiting, *finding.missing) for rank in each.ranks)


def _is_endless(finding: Finding) -> bool:
    return finding.level is Level.STUCK and finding.seconds >= _SURE


def _placed(texts: list[str], title: str) -> str:
    # The cell that waits need not be named.
    return advice().placed("\n".join(texts[:_SHOWN])).replace(f" at {title} line ", " at line ")


def _concerns(finding: Finding, left: Iterable[tuple[str, int]]) -> bool:
    waiting = {(each.uid, rank) for each in finding.waiting for rank in each.ranks}
    return not waiting.isdisjoint(left)


def _only_pauses(finding: Finding) -> bool:
    """Return whether ranks are paused, and no other one waits for them: the prompt of the cell has said so."""
    return not finding.missing and all(each.kind is Kind.PAUSED for each in finding.waiting)
