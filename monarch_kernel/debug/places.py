"""Positions of ranks as a notebook shows them: files of cells by the numbers of these, with their lines."""

from __future__ import annotations

import linecache

from monarch._kernel_api import Position, advice


def placed(position: Position) -> Position:
    """Return a position with the numbers of cells in place of their files, which only the notebook can read."""
    frames = position.frames
    for at, each in enumerate(frames):
        cell = advice().placed(each.file)
        if cell != each.file:
            text = each.text or " ".join(linecache.getline(each.file, each.line).split())
            frames = [*frames[:at], each._replace(file=cell, text=text), *frames[at + 1 :]]
    return position._replace(frames=frames)


def innermost(position: Position) -> str:
    """Describe the innermost line of a position."""
    return str(placed(position._replace(frames=position.frames[:1])))
