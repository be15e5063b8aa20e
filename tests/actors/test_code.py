"""The Python files of a working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch._session import code
from monarch.exceptions import ArgumentError


def test_walk_for_python_files_ends_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a home folder with a data set."""
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "data").mkdir()
    for number in range(20):
        (tmp_path / "data" / f"{number}.bin").touch()
    folder = str(tmp_path)
    assert code.code_files(folder).keys() == {"a.py"}
    monkeypatch.setattr(code, "MOST_ENTRIES", 20)
    with pytest.raises(ArgumentError, match=r"has more than 20 files and folders, .* run %mesh sync") as first:
        code.code_files(folder)
    # Remembered until it is asked for, although it would pass now.
    for number in range(20):
        (tmp_path / "data" / f"{number}.bin").unlink()
    with pytest.raises(ArgumentError) as second:
        code.code_files(folder)
    assert str(second.value) == str(first.value)
    assert code.code_files(folder, again=True).keys() == {"a.py"}
    assert code.code_files(folder).keys() == {"a.py"}
    monkeypatch.setattr(code, "MOST", 0)
    with pytest.raises(ArgumentError, match="has more than 0 Python files"):
        code.code_files(folder)
    assert not code.code_files(str(tmp_path / "data"))
