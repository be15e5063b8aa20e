"""Kinds of words that an argument of ``%mesh`` takes, for completion; the parsers of the commands name them."""

from __future__ import annotations

from enum import Enum


class Offer(Enum):
    """A kind of word."""

    MESH = "a running mesh"
    DETACHED = "a detached mesh that can be attached"
    ACTORS = "a notebook variable that holds actors"
    REMOTE = "a variable that cells have defined on ranks"
    LOCAL = "a variable of the notebook"
    MODULE = "an imported module with a source file that is not installed"
    RANK = "the number of a rank"
    SIZE = "an axis of a mesh with an equals sign"
    COMMAND = "a command of %mesh"
    PATH = "a file or folder"
    FOLDER = "a folder"
    SCRIPT = "a Python file, or a folder on the way to one"


Offers = tuple[Offer | str, ...]
"""The words that an argument offers: kinds of words, and words themselves."""
