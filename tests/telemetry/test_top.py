"""The view of a mesh in a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

from monarch._core.telemetry import events as e
from monarch._core.telemetry.events import Entry, RankState
from monarch._core.telemetry.fold import fold
from monarch._core.telemetry.model import MeshModel
from monarch._telemetry.top import SHOWN, picture
from monarch.telemetry import top


def model_of(*events: e.Event, ranks: int = 2) -> MeshModel:
    model = MeshModel()
    started = [e.RankStarted(rank, rank + 1, 0) for rank in range(ranks)]
    for number, event in enumerate([e.MeshStarted("mesh", ("gpus",), (ranks,), ("h",) * ranks), *started, *events]):
        fold(model, Entry(number + 1, 100.0, event))
    return model


def shown(model: MeshModel) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(picture(model, 112.0))
    text = console.file.getvalue()  # pyright: ignore
    assert isinstance(text, str)
    return text


def test_view_names_state_call_line_and_value() -> None:
    report = e.RankReport(
        1, RankState.RUNNING, "cell [3] line 5", 100.0, 0, "cuda:0", e.ResourceUsage(1.5, 3 << 30, 8 << 30, 0.9)
    )
    text = shown(model_of(e.CallStarted(1, "cell [3]", 3, (1,)), report, e.Metrics(1, "loss", (0,), (0.25,))))
    assert "mesh (gpus=2): 1 idle, 1 running" in text
    row = next(line for line in text.splitlines() if line.lstrip().startswith("1 "))
    for part in ("running", "12", "cell [3]", "cell [3] line 5", "150%", "3.0 GiB", "8.0 GiB 90%", "loss 0.25"):
        assert part in row


def test_view_of_many_ranks_shows_those_that_need_attention() -> None:
    text = shown(model_of(e.RankDied(900, False, "was killed by signal 9 (SIGKILL)"), ranks=1000))
    assert "999 idle, 1 failed" in text and "was killed by signal 9 (SIGKILL)" in text
    assert f"… {1000 - SHOWN} more ranks" in text


def test_view_of_a_bar_names_the_slowest_and_fastest_rank() -> None:
    bars = [e.Progress(rank, "epoch", done, 100, "it", False) for rank, done in enumerate([30, 70])]
    assert "epoch: 30 of 100 it (rank 0), fastest 70 (rank 1)" in shown(model_of(*bars))


def test_live_view_ends_after_its_time(procs: Callable[..., Any], capsys: Any) -> None:
    mesh = procs(1, name="mesh")
    mesh.initialized.get(30)
    top(mesh, 0.3)
    assert "mesh (gpus=1): 1 idle" in capsys.readouterr().out
