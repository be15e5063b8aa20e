"""Views get what changes, at a bounded rate, and nobody else pays for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from monarch._core.telemetry import events as ev
from monarch._telemetry.mesh_telemetry import MeshTelemetry
from monarch_kernel.views import feed as feeds
from monarch_kernel.views.feed import Feeds
from monarch_kernel.views.protocol import FromKernel, Patch, Snapshot
from pages import Page, started

_decode = msgspec.json.Decoder(FromKernel).decode
MOST = 1_000_000
"""Bytes a second that a page may get."""


@pytest.fixture(autouse=True, scope="module")
def _quick_end() -> Iterator[None]:
    """The thread of the feeds of each test ends soon, which is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeds, "_LINGER_S", 0.05)
        yield


class Tab:
    """A page that shows a mesh."""

    def __init__(self) -> None:
        self.page = Page()
        self.messages: list[Any] = []
        self.bytes = 0
        self.came = threading.Condition()

    def send(self, message: bytes) -> None:
        """Take a message, in the thread of the feeds."""
        decoded = _decode(message)
        with self.came:
            self.messages.append(decoded)
            self.bytes += len(message)
            self.page.take(decoded)
            self.came.notify_all()

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for messages until something is so."""
        with self.came:
            assert self.came.wait_for(condition, 20), self.messages[-3:]


def _mesh(ranks: int = 4) -> MeshTelemetry:
    mesh = MeshTelemetry("uid", "mesh", lambda: None, lambda: None)
    mesh.add(started() if ranks == 4 else ev.MeshStarted("mesh", ("gpus",), (ranks,), ("host",) * ranks))
    for rank in range(ranks):
        mesh.add(ev.RankStarted(rank, 100 + rank, 0))
    return mesh


def _tell(mesh: MeshTelemetry, *events: ev.Event) -> None:
    """Add events, and call the subscribers as the collector's thread does."""
    for event in events:
        mesh.add(event)
    for subscriber in mesh.subscribers:
        subscriber()


def _report(rank: int, number: int) -> ev.RankReport:
    states = (ev.RankState.RUNNING, ev.RankState.COLLECTIVE)
    usage = ev.ResourceUsage(0.5 + number % 2 / 10, 300_000_000 + number, 1 << 33, 0.7)
    place = f"cell [3] line {number % 9}"
    tensors = {"model": 1 << 30, "optimizer": 1 << 31}
    return ev.RankReport(rank, states[number % 2], place, 0.0, 1, "cuda:0", usage, None, tensors)


def test_a_view_gets_a_snapshot_and_then_changes() -> None:
    mesh, tab, served = _mesh(), Tab(), Feeds()
    served.open(mesh, tab, ["heal"])
    tab.until(lambda: tab.messages)
    assert isinstance(tab.messages[0], Snapshot) and tab.messages[0].mesh.actions == ["heal"]
    _tell(mesh, ev.CallStarted(1, "cell [1]", 1, (0, 1)))
    tab.until(lambda: tab.page.ranks[1].call == "cell [1]")
    assert [type(each) for each in tab.messages] == [Snapshot, Patch]
    served.close("uid", tab)
    assert served.open_meshes() == [] and mesh.subscribers == ()


def test_a_second_view_gets_all_and_both_go_on() -> None:
    mesh, first, second, served = _mesh(), Tab(), Tab(), Feeds()
    served.open(mesh, first, [])
    first.until(lambda: first.messages)
    _tell(mesh, ev.CallStarted(1, "cell [1]", 1, (0, 1)))
    served.open(mesh, second, [])
    second.until(lambda: second.messages)
    _tell(mesh, ev.CallAnswered(1, (0,), ""))
    for tab in (first, second):
        tab.until(lambda tab=tab: tab.page.number == mesh.number)
    assert first.page.shown() == second.page.shown()
    assert sum(isinstance(each, Snapshot) for each in first.messages) == 1
    served.close_all(first)
    served.close_all(second)


def test_a_mesh_of_another_shape_is_sent_whole() -> None:
    mesh, tab, served = _mesh(), Tab(), Feeds()
    served.open(mesh, tab, [])
    tab.until(lambda: tab.messages)
    _tell(mesh, started(2))
    tab.until(lambda: len(tab.page.ranks) == 2)
    assert isinstance(tab.messages[-1], Snapshot)
    served.close_all(tab)


def test_many_changes_are_at_most_ten_messages_a_second() -> None:
    mesh, tab, served = _mesh(), Tab(), Feeds()
    served.open(mesh, tab, [])
    tab.until(lambda: tab.messages)
    begun = time.monotonic()
    while time.monotonic() < begun + 1.0:
        _tell(mesh, *(_report(rank, mesh.number) for rank in range(4)))
        time.sleep(0.005)
    tab.until(lambda: tab.page.number == mesh.number)
    assert len(tab.messages) <= 2 + 10 * (time.monotonic() - begun)
    served.close_all(tab)


def test_1024_busy_ranks_stay_below_a_megabyte_a_second() -> None:
    mesh, tab, served = _mesh(1024), Tab(), Feeds()
    served.open(mesh, tab, [])
    tab.until(lambda: tab.messages)
    whole, begun = tab.bytes, time.monotonic()
    for number in range(40):
        _tell(mesh, *(_report(rank, number) for rank in range(1024)))
        time.sleep(0.02)
    tab.until(lambda: tab.page.number == mesh.number)
    # The last patch is paid for by the pause after it.
    assert tab.bytes - whole <= MOST * (time.monotonic() - begun) + 500_000
    assert whole < 500_000
    served.close_all(tab)


def test_the_thread_ends_when_nobody_looks() -> None:
    mesh, tab, served = _mesh(), Tab(), Feeds()
    served.open(mesh, tab, [])
    tab.until(lambda: tab.messages)
    thread = next(each for each in threading.enumerate() if each.name == "monarch-views")
    served.close_all(tab)
    thread.join(20)
    assert not thread.is_alive()
    served.open(mesh, tab, [])
    tab.until(lambda: len(tab.messages) == 2)
    served.close_all(tab)


def test_a_view_that_says_nothing_gets_nothing_more(monkeypatch) -> None:
    monkeypatch.setattr(feeds, "SILENT_S", 0.2)
    mesh, tab, served = _mesh(), Tab(), Feeds()
    served.open(mesh, tab, [])
    tab.until(lambda: tab.messages)
    until = time.monotonic() + 20
    while served.open_meshes():
        assert time.monotonic() < until
        _tell(mesh, _report(0, 1))
        time.sleep(0.02)
    assert not served.heard("uid", tab) and mesh.subscribers == ()


def test_a_thousand_views_leave_nothing_behind() -> None:
    mesh, served = _mesh(), Feeds()
    for _ in range(1000):
        tab = Tab()
        served.open(mesh, tab, [])
        served.close_all(tab)
    assert served.open_meshes() == [] and mesh.subscribers == ()
    assert sum(each.name == "monarch-views" for each in threading.enumerate()) <= 1
