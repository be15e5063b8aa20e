"""Events: all subscribers are told, in their order, whatever one of them does."""

from __future__ import annotations

import pytest

from monarch._core.changes import Changes
from monarch._core.events import Event


def test_subscribers_are_told_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    event: Event[int] = Event()
    told: list[tuple[str, int]] = []

    def fail(number: int) -> None:
        told.append(("fail", number))
        raise ValueError("broken subscriber")

    event.subscribe(lambda number: told.append(("first", number)))
    event.subscribe(fail)
    event.subscribe(lambda number: told.append(("last", number)))
    event.tell(3)
    assert told == [("first", 3), ("fail", 3), ("last", 3)]
    assert "broken subscriber" in capsys.readouterr().err


def test_subscriber_that_joins_meanwhile_is_told_next_time() -> None:
    event: Event[int] = Event()
    told: list[int] = []
    event.subscribe(lambda _: event.subscribe(told.append))
    event.tell(1)
    assert told == []
    event.tell(2)
    assert told == [2]


def test_changes_are_one_at_a_time() -> None:
    changes: Changes[object] = Changes(object)
    assert changes.now is None and changes.begin("healed", 1.0) is None
    busy = changes.begin("resized", 2.0)
    assert busy is not None and (busy.what, busy.since) == ("healed", 1.0) and busy is changes.now
    assert changes.end() is busy.end and changes.now is None
    assert changes.begin("resized", 3.0) is None
