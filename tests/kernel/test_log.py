"""The log of rank output: bounded, exact about what it dropped, and gone with its process."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from monarch_kernel.output.log import OutputLog, ending


def test_log_returns_all_from_memory_and_file() -> None:
    log = OutputLog(memory=1000, total=1 << 20)
    texts = [f"line {number} ä🙂\n" for number in range(1000)]
    for text in texts:
        log.add(text)
    assert "".join(log.read()) == "".join(texts)
    assert log.characters_lost == 0


def test_log_drops_and_counts_the_oldest_beyond_its_bound() -> None:
    log = OutputLog(memory=1000, total=20_000)
    texts = [f"line {number}\n" for number in range(20_000)]
    for text in texts:
        log.add(text)
    note, *pieces = log.read()
    kept = "".join(pieces)
    assert len(kept) <= 20_000 + 2_000 and "".join(texts).endswith(kept)
    lines, characters = (int(each.replace(",", "")) for each in re.findall(r"[\d,]+", note)[:2])
    assert lines + kept.count("\n") == 20_000
    assert characters + len(kept) == sum(map(len, texts))


def test_log_tail_counts_what_is_before_it() -> None:
    log = OutputLog()
    for number in range(1000):
        log.add(f"line {number}\n")
    note, *pieces = ending(log.read(), 100)
    assert pieces[-1] == "line 999\n"
    assert f"{1000 - len(pieces):,} lines" in note


def test_lines_of_a_mesh_are_chosen_also_without_a_cell() -> None:
    log = OutputLog(memory=50, total=1 << 20)
    log.add("[rank 0] of a\n[rank 1] of a\n", 1, mesh="a")
    log.add("[rank 0] of b\n", None, mesh="b")
    log.add("[rank 0] of a again\n", 2, mesh="a")
    assert [*log.lines(mesh="b")] == ["[rank 0] of b\n"]
    assert [*log.lines([0], mesh="a")] == ["[rank 0] of a\n", "[rank 0] of a again\n"]
    assert [*log.lines(cell=1)] == ["[rank 0] of a\n", "[rank 1] of a\n"]


def test_log_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = OutputLog(memory=10, total=1 << 20)
    log.add("x" * 100 + "\n")
    assert log._segments and os.listdir(tmp_path) == []


def test_log_works_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    log = OutputLog(memory=100, total=1 << 20)
    for number in range(100):
        log.add(f"line {number}\n")
    note, *pieces = log.read()
    assert pieces[-1] == "line 99\n" and log.lines_lost == 100 - len(pieces) and f"{log.lines_lost} lines" in note
