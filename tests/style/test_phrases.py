"""The script that counts phrases to avoid finds them, and no file has more of them than counts.txt allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from style import phrases


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> list[tuple[int, str]]:
    monkeypatch.setattr(phrases, "ROOT", tmp_path)
    path = tmp_path / name
    path.write_text(text)
    return [(place.line, place.instead) for place in phrases.places(path, phrases.phrases())]


def test_no_file_has_more_phrases_than_are_allowed() -> None:
    assert phrases.check(phrases.phrases()) == 0


def test_phrases_are_found_in_strings_and_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"""What it is."""\n# It is begun\n# anew here.\nraise E(f"there is no such mesh as {name}")\nanew = 1\n'
    assert sorted(line for line, _ in found(tmp_path, monkeypatch, "a.py", text)) == [1, 2, 4]


def test_phrases_are_found_in_paragraphs_but_not_in_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "    anew = 1\n\n```\nanew\n```\n"
    text = f"Read it. Who waits\nmust wait.\n\n{code}\n- `anew` is a name.\n- It begins\n  anew.\n"
    assert [line for line, _ in found(tmp_path, monkeypatch, "a.md", text)] == [1, 11]


def test_questions_may_start_with_any_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found(tmp_path, monkeypatch, "a.md", "What happens to a call? It ends.\n")


def test_a_count_that_has_risen_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.md").write_text("Begin anew.\n")
    (tmp_path / "counts.txt").write_text("")
    monkeypatch.setattr(phrases, "ROOT", tmp_path)
    monkeypatch.setattr(phrases, "COUNTS", tmp_path / "counts.txt")
    assert phrases.check(phrases.phrases()) == 1
    assert "a.md:1: 'anew.': write again" in capsys.readouterr().out
    phrases.update(phrases.counts(phrases.phrases()))
    assert phrases.check(phrases.phrases()) == 0


def test_the_smaller_count_holds_after_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counts.txt").write_text("<<<<<<< a\na.md 3\n=======\na.md 2\n>>>>>>> b\n")
    monkeypatch.setattr(phrases, "COUNTS", tmp_path / "counts.txt")
    assert phrases.allowed() == {"a.md": 2}
