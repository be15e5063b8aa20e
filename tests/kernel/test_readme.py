"""The notebook cells in the README run as printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import Notebook

README = Path(__file__).resolve().parent.parent.parent / "README.md"


def cells_of_readme() -> list[str]:
    """Return the cells in the section on notebooks: indented blocks, split at empty lines."""
    part = README.read_text(encoding="utf-8").partition("## In a notebook\n")[2].partition("\n## ")[0]
    indented = [line[4:] if line.startswith("    ") else "" for line in part.splitlines()]
    return re.findall(r"(?:.+\n)+", "\n".join(indented) + "\n")


@pytest.mark.slow
def test_readme_cells_run_as_printed(spec: str, own: Callable[..., Notebook]) -> None:
    book = own()
    cells = cells_of_readme()
    assert len(cells) >= 5 and cells[0].startswith("%mesh up")
    shown = [book.run(cell.rstrip("\n")).ok().text for cell in cells]
    assert "[ranks 0-3] Tensor" in shown[1] and "4 actors of Trainer" in shown[2]
