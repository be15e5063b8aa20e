"""Which process is which rank, for the log of a mesh, without processes."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import msgpack

from monarch._core.causes import Signaled
from monarch._core.roster import Procs, Roster
from monarch._core.telemetry.events import RankReport, RankState, ResourceUsage
from monarch._telemetry.lives import Lives
from monarch._telemetry.mesh_telemetry import MeshTelemetry
from monarch._wire import messages as m

PROCS = Procs("abc124", "trainers", ("gpus",), 0, "h/p", Roster(0, ("h",), 2, (2,)))


def lives_of(name_of: Callable[[str], str] = str) -> Lives:
    lives = Lives(MeshTelemetry("abc124", "trainers", lambda: None, lambda: None), PROCS, name_of)
    lives.resized(1.0)
    return lives


def report(lives: Lives, rank: int, rss: int) -> None:
    state = RankReport(rank, RankState.IDLE, "", 1.0, 0, "cpu", ResourceUsage(0.0, rss))
    lives.report(f"h/abc124.{rank}", msgpack.encode(state), [], 2.0, 0.0)


def test_report_before_its_rank_is_known_is_not_lost() -> None:
    lives = lives_of()
    for rank in range(2):
        report(lives, 1, 5_000 + rank)
        lives.joined(rank, f"h/abc124.{rank}", 2.0)
        lives.started(f"h/abc124.{rank}", 100 + rank, 2.0)
        report(lives, 0, 4_000 + rank)
    assert [(rank.pid, rank.usage.rss) for rank in lives.log.model().ranks] == [(100, 4_001), (101, 5_001)]


def test_report_of_a_former_rank_does_not_count() -> None:
    lives = lives_of()
    lives.joined(0, "h/abc124.0", 2.0)
    lives.started("h/abc124.0", 100, 2.0)
    report(lives, 0, 4_000)
    lives.died(m.Dead("h/abc124.0", Signaled(9), False, []), 3.0)
    lives.joined(0, "h/abc124.9", 3.0)
    report(lives, 0, 4_444)
    lives.started("h/abc124.9", 109, 3.0)
    rank = lives.log.model().ranks[0]
    assert (rank.pid, rank.usage.rss, rank.restarts) == (109, 0, 1)


def test_the_mesh_is_described_once_for_all_processes_that_join() -> None:
    asked: list[str] = []
    lives = lives_of(lambda host: asked.append(host) or "here")
    for _ in range(100):
        lives.resized(2.0)
    assert len(asked) == 1


def test_progress_of_a_start_counts_ranks_that_have_not_joined() -> None:
    lives = lives_of()
    for rank in range(2):
        lives.joined(rank, f"h/abc124.{rank}", 2.0 + rank)
        lives.started(f"h/abc124.{rank}", 100 + rank, 2.5 + rank)
    (bar,) = lives.log.model().bars.values()
    assert (bar.done, bar.total, bar.over) == ({-1: 2}, {-1: 2}, 3.5)
