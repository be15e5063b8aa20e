"""The state of a mesh as a function of its events: for any events in any order."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._core.telemetry import events as e
from monarch._core.telemetry.events import Entry, Event, RankState
from monarch._core.telemetry.fold import MOST_ENDED, copy_of, fold
from monarch._core.telemetry.model import MeshModel, RankModel
from monarch._core.telemetry.series import MOST_POINTS
from monarch._core.telemetry.spans import KEPT_S

STATES = st.sampled_from(list(RankState))
NUMBERS = st.integers(-2, 5)
TEXTS = st.sampled_from(["", "a", "cell [3]"])
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
RANKS = st.lists(NUMBERS, max_size=6).map(tuple)
ANY_EVENT = st.one_of(
    st.builds(
        e.MeshStarted,
        TEXTS,
        st.just(("gpus",)),
        st.just((4,)),
        st.integers(0, 5).map(lambda count: ("host",) * count),
    ),
    st.builds(e.MeshEnded, TEXTS),
    st.builds(e.RankStarted, NUMBERS, NUMBERS, NUMBERS),
    st.builds(e.RankDied, NUMBERS, st.booleans(), TEXTS),
    st.builds(e.RankSilent, NUMBERS, TEXTS),
    st.builds(e.Diverged, TEXTS, RANKS, NUMBERS, TEXTS),
    st.builds(e.CallStarted, NUMBERS, TEXTS, NUMBERS, RANKS),
    st.builds(e.CallAnswered, NUMBERS, RANKS, TEXTS),
    st.builds(e.CallWaits, NUMBERS, TEXTS),
    st.builds(e.CallsSkipped, NUMBERS),
    st.builds(e.RankReport, NUMBERS, STATES, TEXTS, FLOATS, NUMBERS, TEXTS, st.builds(e.ResourceUsage)),
    st.builds(e.Metrics, NUMBERS, TEXTS, st.lists(NUMBERS).map(tuple), st.lists(FLOATS).map(tuple)),
    st.builds(e.Progress, NUMBERS, TEXTS, FLOATS, FLOATS, TEXTS, st.booleans()),
)
ENTRIES = st.lists(st.builds(Entry, st.integers(0, 40), FLOATS, ANY_EVENT), max_size=40)


def folded(*events: Event, start: float = 100.0) -> MeshModel:
    """The state after some events, one a second."""
    model = MeshModel()
    for at, event in enumerate([e.MeshStarted("mesh", ("gpus",), (4,), ("h",) * 4), *events]):
        fold(model, Entry(at + 1, start + at, event))
    return model


def ready(*ranks: int) -> list[Event]:
    return [e.RankStarted(rank, 1000 + rank, 0) for rank in ranks]


def report(rank: int, state: RankState, since: float = 0.0, **more: Any) -> e.RankReport:
    return e.RankReport(rank, state, more.pop("place", ""), since, 0, "cpu", e.ResourceUsage(), **more)


def states(model: MeshModel) -> list[str]:
    return [rank.state.value for rank in model.ranks]


@settings(max_examples=400)
@given(ENTRIES, st.integers(0, 40))
def test_fold_takes_any_entries_and_any_split(entries: list[Entry], at: int) -> None:
    whole, first = MeshModel(), MeshModel()
    for entry in entries:
        fold(whole, entry)
    for entry in entries[:at]:
        fold(first, entry)
    second, kept = copy_of(first), repr(first)
    for entry in entries[at:]:
        fold(second, entry)
    # By their texts, since NaN does not equal itself.
    assert repr(second) == repr(whole)
    assert repr(first) == kept
    assert all(whole.open_spans[span.rank] is span for span in whole.spans if not span.end)
    for rank in whole.ranks:
        assert all(rank.rank in whole.calls[call].left for call in rank.calls)


def test_rank_with_a_call_runs_until_it_answers() -> None:
    events = [*ready(0, 1), e.CallStarted(1, "cell [3]", 3, (0, 1))]
    assert states(folded(*events)) == ["running", "running", "starting", "starting"]
    assert states(folded(*events, e.CallAnswered(1, (0,), "")))[:2] == ["idle", "running"]
    model = folded(*events, e.CallAnswered(1, (0,), ""), e.CallAnswered(1, (1,), "ValueError: x"))
    assert (model.calls[1].ended, model.calls[1].errors) == (105.0, {1: "ValueError: x"})


def test_starting_rank_starts_although_a_call_waits() -> None:
    assert states(folded(e.CallStarted(1, "t.step", 0, (0,)), *ready(0)))[0] == "running"
    assert states(folded(e.CallStarted(1, "t.step", 0, (0,))))[0] == "starting"


@pytest.mark.parametrize("state", [RankState.COLLECTIVE, RankState.BLOCKED, RankState.PAUSED])
def test_report_says_more_about_a_running_rank(state: RankState) -> None:
    model = folded(*ready(0), e.CallStarted(1, "t.step", 0, (0,)), report(0, state, 101.5, place="cell [3] line 5"))
    assert (model.ranks[0].state, model.ranks[0].place) == (state, "cell [3] line 5")
    # Not before the call, of which the report cannot tell.
    assert model.ranks[0].since == 103.0


def test_pause_after_a_step_is_as_old_as_the_last_stop() -> None:
    events = [*ready(0), e.CallStarted(1, "t.step", 0, (0,)), *[report(0, RankState.RUNNING)] * 3]
    paused = [report(0, RankState.PAUSED, at) for at in (105.5, 105.5, 107.25)]
    assert folded(*events, *paused[:2]).ranks[0].since == 105.5
    assert folded(*events, *paused).ranks[0].since == 107.25


def test_death_outweighs_reports() -> None:
    died = e.RankDied(0, False, "exited with code 3")
    model = folded(*ready(0), e.CallStarted(1, "t.step", 0, (0, 1)), died, report(0, RankState.RUNNING))
    rank = model.ranks[0]
    assert (rank.state, rank.reason, rank.calls) == (RankState.FAILED, "exited with code 3", [])
    assert model.calls[1].errors == {0: "exited with code 3"} and model.calls[1].left == {1}


def test_silence_outweighs_reports_until_it_ends() -> None:
    events = [*ready(0), e.CallStarted(1, "t.step", 0, (0,)), e.RankSilent(0, "has not answered for 5.0 s")]
    model = folded(*events, report(0, RankState.COLLECTIVE))
    assert (model.ranks[0].state, model.ranks[0].reason) == (RankState.UNRESPONSIVE, "has not answered for 5.0 s")
    model = folded(*events, report(0, RankState.COLLECTIVE), e.RankSilent(0, ""))
    assert (model.ranks[0].state, model.ranks[0].reason) == (RankState.COLLECTIVE, "")


def test_replaced_rank_is_restarted_until_its_next_call() -> None:
    events = [*ready(0), e.RankDied(0, False, "x"), e.RankStarted(0, 7, 1)]
    model = folded(*events, report(0, RankState.IDLE))
    assert (model.ranks[0].state, model.ranks[0].restarts, model.ranks[0].reason) == (RankState.RESTARTED, 1, "")
    assert states(folded(*events, e.CallStarted(1, "t", 0, (0,)), e.CallAnswered(1, (0,), "")))[0] == "idle"


def test_expected_death_and_end_of_the_mesh_are_stops() -> None:
    assert states(folded(*ready(0), e.RankDied(0, True, "was stopped")))[0] == "stopped"
    model = folded(*ready(0, 1), e.RankDied(1, False, "x"), e.MeshEnded("stopped by its owner"))
    assert states(model) == ["stopped", "failed", "stopped", "stopped"]
    assert (model.ended, model.reason) == (104.0, "stopped by its owner")


def test_resize_adds_and_removes_ranks() -> None:
    model = folded(*ready(0, 3), e.CallStarted(1, "t", 0, (0, 3)), e.MeshStarted("mesh", ("gpus",), (2,), ("h", "h")))
    assert states(model) == ["running", "starting"] and model.calls[1].left == {0}
    assert 3 not in model.open_spans


def test_spans_follow_states_and_calls() -> None:
    model = folded(
        *ready(0),
        e.CallStarted(1, "cell [3]", 3, (0,)),
        report(0, RankState.COLLECTIVE, 102.5),
        e.CallAnswered(1, (0,), ""),
    )
    found = [(span.state.value, span.begin, span.end, span.title) for span in model.spans]
    assert found == [("running", 102.0, 102.5, "cell [3]"), ("collective", 102.5, 104.0, "cell [3]")]


def test_spans_of_the_last_minute_are_kept() -> None:
    model = MeshModel()
    fold(model, Entry(1, 0.0, e.MeshStarted("mesh", (), (), ("h",))))
    fold(model, Entry(2, 0.0, e.RankStarted(0, 1, 0)))
    for at in range(2000):
        state = RankState.RUNNING if at % 2 else RankState.COLLECTIVE
        fold(model, Entry(at + 3, at / 2, report(0, state, at / 2)))
    assert 2 * KEPT_S - 2 <= len(model.spans) <= 2 * KEPT_S + 12
    assert model.spans[-1].end == 0


def test_last_ended_calls_are_kept() -> None:
    events: list[Event] = [e.CallStarted(0, "pending", 0, (0,))]
    for call in range(1, 200):
        events += [e.CallStarted(call, "t", 0, (1,)), e.CallAnswered(call, (1,), "")]
    model = folded(*events)
    assert list(model.calls) == [0, *range(200 - MOST_ENDED, 200)]


def test_series_is_thinned_out_evenly() -> None:
    model = folded()
    for at in range(0, 100_000, 1000):
        steps = tuple(range(at, at + 1000))
        fold(model, Entry(at, 0.0, e.Metrics(1, "loss", steps, tuple(map(float, steps)))))
    series = model.series["loss", 1]
    assert series.steps == [int(value) for value in series.values]
    assert MOST_POINTS // 2 <= len(series.steps) <= MOST_POINTS
    gaps = {after - before for before, after in zip(series.steps, series.steps[1:-1], strict=False)}
    assert gaps == {series.stride} and series.steps[-1] == 99_999


def test_series_keeps_values_that_are_not_finite() -> None:
    values = [math.nan if at == 501 else math.inf if at == 30_001 else 1.0 for at in range(50_000)]
    model = folded(e.Metrics(0, "loss", tuple(range(50_000)), tuple(values)))
    series = model.series["loss", 0]
    assert [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)] == [
        501,
        30_001,
    ]


def test_many_series_share_a_bound() -> None:
    model = MeshModel(ranks=[RankModel(rank) for rank in range(1024)])
    steps, values = tuple(range(600)), (1.0,) * 600
    for rank in range(1024):
        fold(model, Entry(rank, 0.0, e.Metrics(rank, "loss", steps, values)))
    for rank in range(1024):
        fold(model, Entry(rank, 0.0, e.Metrics(rank, "loss", steps, values)))
    assert sum(len(series.values) for series in model.series.values()) <= 500_000


def test_bar_begins_again_after_its_end() -> None:
    done = [e.Progress(0, "epoch", 1, 2, "it", False), e.Progress(0, "epoch", 2, 2, "it", True)]
    bar = folded(*done).bars["epoch"]
    assert (bar.done, bar.ended) == ({0: 2}, {0}) and bar.over > bar.started
    again = folded(*done, e.Progress(0, "epoch", 1, 2, "it", False)).bars["epoch"]
    assert (again.done, again.ended, again.started) == ({0: 1}, set(), 103.0)
