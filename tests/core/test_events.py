"""Events: all subscribers are called, in order, even if one raises."""

from __future__ import annotations

import pytest

from monarch._core.changes import Change, Changes
from monarch._core.events import Event


def test_subscribers_are_called_in_order(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_subscriber_added_during_event_is_called_next_time() -> None:
    event: Event[int] = Event()
    told: list[int] = []
    event.subscribe(lambda _: event.subscribe(told.append))
    event.tell(1)
    assert told == []
    event.tell(2)
    assert told == [2]


def test_changes_are_one_at_time() -> None:
    changes: Changes[str] = Changes()
    heal, resize = Change("healed", 1.0, "heal"), Change("resized", 2.0, "resize")
    assert changes.now is None and changes.begin(heal) is None
    assert changes.begin(resize) is heal and changes.now is heal
    assert not changes.end(resize) and changes.now is heal
    assert changes.end(heal)
    assert changes.now is None and changes.begin(resize) is None and changes.now is resize
