"""What is known of ranks that answer at different times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import monarch._debug.why.inquiry as inquiries
from monarch._core.diagnosis.facts import Doing, Entered, Kind, RankFacts
from monarch._node.node import Node

INSIDE = Doing(Kind.COLLECTIVE, entered=Entered("barrier", "0", (0, 1), True, 7))


def known(monkeypatch: pytest.MonkeyPatch, *answers: tuple[float, Doing | None], at_once: bool) -> list[int]:
    """Return the ranks of which something is known, from the times and contents of their answers."""
    now = 0.0
    monkeypatch.setattr(inquiries, "time", SimpleNamespace(monotonic=lambda: now))
    peers = SimpleNamespace(get=lambda proc: SimpleNamespace(dead=None))
    node = SimpleNamespace(peers=peers, ports=SimpleNamespace(gathers={}))
    inquiry = inquiries.Inquiry(cast(Node, node))
    for rank, (now, doing) in enumerate(answers):  # noqa: B007  (read by the clock above)
        inquiry._take(set(), f"m/{rank}", RankFacts(rank, () if doing is None else (doing,)))
    return [each.rank for each in inquiry.facts([f"m/{rank}" for rank in range(len(answers))], at_once)]


def test_rank_that_came_after_the_answer_of_another_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    came: Any = (10.0, INSIDE._replace(seconds=4.0)), (12.0, INSIDE._replace(seconds=1.5))
    assert known(monkeypatch, *came, at_once=True) == [0]
    assert known(monkeypatch, *came, at_once=False) == [0, 1]


def test_ranks_that_were_there_at_once_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    came: Any = (10.0, INSIDE._replace(seconds=4.0)), (12.0, INSIDE._replace(seconds=2.5)), (12.0, Doing(Kind.PYTHON))
    assert known(monkeypatch, *came, at_once=True) == [0, 1, 2]


def test_collective_that_a_death_has_broken_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "is_gather", lambda sink: True)
    left = SimpleNamespace(done=True, actor="cells", waits_for=lambda: [SimpleNamespace(proc="h/m.1")])
    peers = SimpleNamespace(get=lambda proc: SimpleNamespace(dead=None))
    node = SimpleNamespace(peers=peers, ports=SimpleNamespace(gathers={1: left}))
    inquiry = inquiries.Inquiry(cast(Node, node))
    for rank, actor in ((0, "cells"), (1, "other"), (1, "cells")):
        inquiry._take(set(), f"h/m.{rank}", RankFacts(rank, (INSIDE._replace(actor=actor),)))
        (facts,) = inquiry.facts([f"h/m.{rank}"])
        assert facts.doings[0].kind is (Kind.BROKEN if (rank, actor) == (1, "cells") else Kind.COLLECTIVE)
    assert facts.doings[0].entered is None
