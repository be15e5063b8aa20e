"""The log of a mesh is bounded: older entries are in a file, and the oldest only in their effect."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from monarch._core.telemetry.events import Entry, MeshStarted, Metrics, RankStarted
from monarch._core.telemetry.fold import copy_of, fold
from monarch._core.telemetry.model import MeshModel
from monarch._telemetry import mesh_telemetry
from monarch._telemetry.mesh_telemetry import MeshTelemetry
from monarch._telemetry.ring import Ring


def filled(ring: Ring, count: int) -> MeshModel:
    """A ring with some entries, and the state that follows from all of them."""
    model = MeshModel()
    for number in range(1, count + 1):
        event = MeshStarted("m", (), (), ("h",)) if number == 1 else Metrics(0, "loss", (number,), (number / 2,))
        entry = Entry(number, float(number), event)
        ring.append(entry)
        fold(model, entry)
    return model


def replayed(ring: Ring) -> MeshModel:
    model = copy_of(ring.base)
    for entry in ring.since(0):
        fold(model, entry)
    return model


@pytest.mark.parametrize("count", [1, 99, 100, 101, 5000])
def test_base_and_entries_make_the_state(count: int) -> None:
    ring = Ring(memory=100, total=16_000)
    model = filled(ring, count)
    assert replayed(ring) == model
    numbers = [entry.number for entry in ring.since(0)]
    assert numbers == list(range(ring.first, count + 1))
    assert ring.last == count and (ring.first > 1) == (count == 5000)


@pytest.mark.parametrize("after", [0, 1, 350, 900, 949, 950, 999, 1000, 2000])
def test_entries_after_a_number(after: int) -> None:
    ring = Ring(memory=100)
    filled(ring, 1000)
    assert [entry.number for entry in ring.since(after)] == list(range(after + 1, 1001))


def test_files_are_bounded() -> None:
    ring = Ring(memory=100, total=100_000)
    filled(ring, 20_000)
    assert sum(os.fstat(segment.file.fileno()).st_size for segment in ring._segments) < 200_000
    assert len(ring._recent) <= 100


def test_entries_with_many_values_leave_memory_earlier() -> None:
    ring = Ring(memory=100)
    for number in range(1, 20):
        ring.append(Entry(number, 0.0, Metrics(0, "loss", (0,) * 1600, (0.0,) * 1600)))
    assert len(ring._recent) <= 1
    assert [entry.number for entry in ring.since(0)] == list(range(1, 20))


def test_full_disk_keeps_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(memory=100)
    filled(ring, 500)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    model = filled(again := Ring(memory=100), 500)
    assert replayed(again) == model and again.first > 400


def test_reading_goes_on_while_entries_are_dropped() -> None:
    ring = Ring(memory=100, total=16_000)
    filled(ring, 400)
    reader = ring.since(0)
    first = next(reader)
    for number in range(401, 5000):
        ring.append(Entry(number, 0.0, RankStarted(0, number, 0)))
    assert first.number == 1 and len(list(reader)) == 399


AT_EXIT = """
import atexit
from monarch._telemetry.ring import _Segment

segments = []
atexit.register(lambda: print("written", segments[0].write([])))
segments.append(_Segment(1))
"""


def test_files_are_written_until_the_exit_of_the_program(program: Any) -> None:
    """The session ends in a function of atexit, and writes what it has not written yet."""
    assert program(AT_EXIT).ok() == "written None\n"


def test_interrupt_of_a_reader_loses_no_other_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MeshTelemetry("uid", "m", lambda: None, lambda: None)
    log.add(MeshStarted("m", (), (), ("h", "h", "h")), 1.0)
    for rank in range(3):
        log.add(RankStarted(rank, 100 + rank, 0), 2.0)

    def interrupted(model: MeshModel, entry: Entry) -> None:
        if entry.number == 3:
            raise KeyboardInterrupt
        fold(model, entry)

    monkeypatch.setattr(mesh_telemetry, "fold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.model()
    assert [rank.pid for rank in log.model().ranks] == [100, 0, 102]


@pytest.mark.parametrize("each", [1, 7, 99, 100, 101, 1000])
def test_state_of_a_mesh_has_all_entries_whenever_it_is_read(each: int) -> None:
    log, model = MeshTelemetry("uid", "m", lambda: None, lambda: None), MeshModel()
    log.add(MeshStarted("m", (), (), ("h",)), 1.0)
    for number in range(2, 500):
        log.add(Metrics(0, "loss", (number,), (number / 2,)), float(number))
        if number % each == 0:
            assert log.read(lambda model: model.number) == number == log.number
    for entry in log.since(0):
        fold(model, entry)
    assert log.model() == model
