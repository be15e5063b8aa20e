"""The quickstart notebook, cut to its training: what runs a whole one is tested with the notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat

from stored import cleared

PATH = Path(__file__).parents[1] / "notebooks" / "00_quickstart.ipynb"
KEPT = {"up", "folded", "data", "push", "model", "train", "test", "result", "error", "down"}
"""The code cells that are left."""


def short_quickstart() -> Any:
    """Return the notebook without outputs; its network trains, and one of its cells fails as it is meant to."""
    book = cleared(nbformat.read(PATH, as_version=4))
    book.cells = [cell for cell in book.cells if cell.cell_type != "code" or cell.id in KEPT]
    assert sum(cell.cell_type == "code" for cell in book.cells) == len(KEPT)
    # Its import is in a cell that is not kept.
    (train,) = [cell for cell in book.cells if cell.id == "train"]
    train.source = train.source.replace("%%mesh\n", "%%mesh\nimport matplotlib.pyplot as plt\n", 1)
    return book
