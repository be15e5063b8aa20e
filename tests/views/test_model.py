"""A view is a function of the state of the mesh: patches lead to what a new snapshot shows."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, given, settings

from monarch._core.telemetry import events as ev
from monarch_kernel.views import model as views
from monarch_kernel.views.model import patch, snapshot
from monarch_kernel.views.parts import narrowed
from monarch_kernel.views.protocol import MOST_SPANS, FromKernel
from pages import RANKS, Log, Page, histories

_decode = msgspec.json.Decoder(FromKernel).decode


def _page_of(log: Log) -> Page:
    page = Page()
    page.take(_decode(msgspec.json.encode(snapshot(log.model, "uid", [], log.now)[0])))
    return page


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_patches_lead_to_what_a_snapshot_shows(history: list[tuple[ev.Event, float, bool]]) -> None:
    log, page = Log().begin(), Page()
    message, seen = snapshot(log.model, "uid", [], log.now)
    page.take(message)
    for event, after, looks in history:
        log.add(event, after)
        if not looks:
            continue
        if seen.fits(log.model):
            message, seen = patch(log.model, seen, log.now)
        else:
            message, seen = snapshot(log.model, "uid", [], log.now)
        page.take(_decode(msgspec.json.encode(message)))
        assert page.shown() == _page_of(log).shown()


def _log(*events: ev.Event) -> Log:
    log = Log().begin()
    for event in events:
        log.add(event, 1.0)
    return log


def test_a_patch_has_only_the_rows_that_changed() -> None:
    log = _log(ev.CallStarted(1, "cell [1]", 1, (0, 1, 2, 3)))
    _, seen = snapshot(log.model, "uid", [], log.now)
    log.add(ev.CallAnswered(1, (2,), ""))
    changes, _ = patch(log.model, seen, log.now)
    assert [row.rank for row in changes.ranks] == [2]
    assert [row.left for row in changes.calls] == [[0, 1, 3]]
    assert changes.mesh is None and changes.points == [] and changes.bars == []


def test_a_running_call_has_the_cause_of_its_wait() -> None:
    reason = "stuck: rank 0 waits for rank 1, which finished without calling all_reduce()"
    log = _log(ev.CallStarted(1, "cell [1]", 1, (0, 1)), ev.CallWaits(1, reason), ev.CallWaits(7, "of no call"))
    assert snapshot(log.model, "uid", [], log.now)[0].calls[0].waits == reason
    log.add(ev.CallAnswered(1, (0, 1), "", True))
    assert snapshot(log.model, "uid", [], log.now)[0].calls[0].waits == ""


def test_ranks_that_were_only_stopped_have_no_error() -> None:
    log = _log(
        ev.CallStarted(1, "cell [1]", 1, (0, 1, 2, 3)),
        ev.CallAnswered(1, (1,), "ValueError: bad batch"),
        ev.CallAnswered(1, (0, 2), "KeyboardInterrupt: ", True),
    )
    log.add(ev.MeshEnded("stopped by its owner"))
    (call,) = snapshot(log.model, "uid", [], log.now)[0].calls
    assert call.ended and call.errors == {"1": "ValueError: bad batch"} and call.stopped == [0, 2, 3]


def test_a_rank_shows_the_oldest_call_that_it_owes() -> None:
    log = _log(ev.CallStarted(1, "cell [1]", 1, (0, 1)), ev.CallStarted(2, "cell [2]", 2, (1, 2)))
    shown, _ = snapshot(log.model, "uid", [], log.now)
    assert [row.call for row in shown.ranks] == ["cell [1]", "cell [1]", "cell [2]", ""]


def test_new_points_are_sent_once_and_thinned_series_again() -> None:
    log = _log(ev.Metrics(0, "loss", tuple(range(10)), (1.0,) * 10))
    _, seen = snapshot(log.model, "uid", [], log.now)
    log.add(ev.Metrics(0, "loss", (10,), (2.0,)))
    changes, seen = patch(log.model, seen, log.now)
    assert [(each.at, each.steps) for each in changes.points] == [(10, [10])]
    assert patch(log.model, seen, log.now)[0].points == []
    log.add(ev.Metrics(0, "loss", tuple(range(11, 3000)), (0.0,) * 2989))
    changes, _ = patch(log.model, seen, log.now)
    assert changes.points[0].at == 0 and len(changes.points[0].steps) < 2100


def test_very_many_points_are_thinned_in_a_message(monkeypatch) -> None:
    monkeypatch.setattr(views, "MOST_POINTS", 100)
    log = _log(*(ev.Metrics(rank, "loss", tuple(range(500)), (1.0,) * 500) for rank in range(RANKS)))
    shown, seen = snapshot(log.model, "uid", [], log.now)
    assert sum(len(each.steps) for each in shown.points) <= 100 + 2 * RANKS
    log.add(ev.Metrics(1, "loss", (500, 501), (3.0, 4.0)))
    changes, _ = patch(log.model, seen, log.now)
    assert [each.steps for each in changes.points] == [[500, 501]]
    assert changes.points[0].at == len(shown.points[1].steps)


def test_a_view_has_a_bounded_number_of_spans() -> None:
    log = Log().begin()
    for number in range(MOST_SPANS):
        log.add(ev.CallStarted(number + 1, f"call {number}", 0, (0, 1)), 0.001)
        log.add(ev.CallAnswered(number + 1, (0, 1), ""), 0.001)
    log.add(ev.CallStarted(999_999, "last", 0, (3,)))
    shown, _ = snapshot(log.model, "uid", [], log.now)
    assert len(shown.spans) == MOST_SPANS + 1
    assert shown.spans[-1].title == "last"


def test_figures_of_a_rank_become_its_load() -> None:
    from monarch_kernel.views.rows import load_of

    assert (load_of(-1.0, 0.5), load_of(-1.0, 7.0), load_of(0.25, 7.0)) == (0.5, 1.0, 0.25)


def test_bar_has_how_far_each_of_its_ranks_is() -> None:
    log = _log(*(ev.Progress(rank, "epoch", 10.0 - rank, 20.0, "step", rank == 2) for rank in range(3)))
    (row,) = snapshot(log.model, "uid", [], log.now)[0].bars
    assert (row.ranks, row.done, row.total, row.left) == ([0, 1, 2], [10.0, 9.0, 8.0], [20.0], [0, 1])
    assert row.ended == 0.0 and not row.together


def test_view_of_a_slice_has_the_bars_of_its_ranks() -> None:
    log = _log(
        *(ev.Progress(rank, "epoch", 10.0 - rank, 20.0 + rank, "step", rank == 1) for rank in range(3)),
        ev.Progress(2, "other", 1.0, 2.0, "step", False),
        ev.Progress(-1, "start", 1.0, 3.0, "ranks", False),
        ev.Progress(-1, "heal", 1.0, 2.0, "ranks", False, (0, 1)),
        ev.Progress(-1, "copy", 1.0, 2.0, "ranks", False, (0, 2)),
    )
    shown = snapshot(log.model, "uid", [], log.now)[0]
    epoch, *others = narrowed(shown, [1], {"procs": 1}).bars
    assert (epoch.ranks, epoch.done, epoch.total, epoch.left) == ([1], [9.0], [21.0], [])
    assert epoch.ended == shown.now, "rank 0 goes on, but this one has ended"
    assert [bar.bar for bar in others] == ["start", "heal"]
