"""Excerpts: the beginning and the end of a text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch._core.text.excerpt import Excerpt

PIECES = st.lists(st.lists(st.text("ab", max_size=5), min_size=1, max_size=4).map(lambda each: "\n".join(each) + "\n"))


@given(PIECES, st.integers(0, 30), st.integers(0, 30))
def test_excerpt_keeps_both_ends_and_counts_rest(pieces: list[str], head: int, tail: int) -> None:
    excerpt = Excerpt(head, tail)
    for piece in pieces:
        excerpt.add(piece)
    text, kept = "".join(pieces), excerpt.pieces()
    if not excerpt.characters:
        assert "".join(kept) == text
        return
    (note,) = [index for index, piece in enumerate(kept) if piece.startswith("…")]
    first, last = "".join(kept[:note]), "".join(kept[note + 1 :])
    assert len(first) <= head and len(last) <= tail
    assert text.startswith(first) and text.endswith(last)
    missing = text[len(first) : len(text) - len(last)]
    assert (len(missing), missing.count("\n")) == (excerpt.characters, excerpt.lines)
