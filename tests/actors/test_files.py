"""Names of files that ranks are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monarch._session.commands.files import find_files


def names(pattern: str) -> list[str]:
    return [each.name for each in find_files(pattern, {"rank": 3})]


@pytest.mark.parametrize("absolute", [True, False])
def test_matches_of_different_folders_have_different_names(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "runs/a/model.pt",
        "runs/b/model.pt",
        "runs/b/deep/model.pt",
        "runs/3.pt",
        "runs/c[1].pt",
        "runs/c1.pt",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    top = f"{tmp_path}/" if absolute else ""
    assert names(f"{top}runs/*/model.pt") == ["a/model.pt", "b/model.pt"]
    assert names(f"{top}ru*/b/*.pt") == ["runs/b/model.pt"]
    assert names(f"{top}runs/b") == names(f"{top}runs/b/") == ["b/model.pt", "b/deep/model.pt"]
    assert names(f"{top}runs/[ab]") == ["a/model.pt", "b/model.pt", "b/deep/model.pt"]
    assert names(f"{top}runs/b/model.pt") == ["model.pt"] and names(f"{top}runs/{{rank}}.pt") == ["3.pt"]
    assert names(f"{top}runs/c[1].pt") == ["c[1].pt"] and names(f"{top}runs/c[12].pt") == ["c1.pt"]
    # Nothing is written outside the folder of its rank.
    assert names(f"{top}runs/*/../../runs/3.pt") == ["3.pt"] * 2 and names(f"{top}runs/b/*/../../../runs/3.pt") == [
        "3.pt"
    ]
    assert names(f"{top}nothing") == names(f"{top}nothing*") == []
