"""The formation of a generation of process groups on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from monarch._groups.rendezvous import Rendezvous


def test_generation_that_ends_early_is_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to cut yet; the rank that serves the store would wait in it for the others."""
    own, formed, unformed = Rendezvous(), [], []
    monkeypatch.setattr(own, "_leave_formed", lambda: own.spoil("of a test", 1))
    monkeypatch.setattr(own, "place", lambda *where: formed.append(where))
    own.on_unformed = lambda *what: unformed.append(what)
    own.generation, own._joining = 1, True
    store: Any = object()
    own._form(1, "localhost", 0, store, frozenset())
    assert own.broken == "of a test" and not own.is_forming
    assert formed == [] and unformed == []
