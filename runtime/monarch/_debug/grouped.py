"""Answers of ranks as text: equal ones are shown once, with all their ranks."""

from __future__ import annotations

from collections.abc import Iterable

from monarch._core.shapes.ranks import describe_ranks


def grouped(texts: Iterable[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """Return each text once, with its ranks, in the order of the first ones."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def grouped_lines(texts: Iterable[tuple[int, str]]) -> str:
    """Return a line for each different text, or a block if it has several lines."""
    lines = [
        f"{describe_ranks(ranks)}:\n{_indented(text)}" if "\n" in text else f"{describe_ranks(ranks)}: {text}"
        for text, ranks in grouped(texts)
    ]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
