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
    assert len(cells) >= 6 and cells[0].startswith("%mesh up")
    shown = [book.run(cell.rstrip("\n")).ok().text for cell in cells]
    assert "[ranks 0-3] Tensor" in shown[1] and "RUN_NAME=first" in shown[2] and "4 actors of Trainer" in shown[4]
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in shown[3]
    # Without the import of the cell, in a notebook that has not run it either.
    book.run("del Actor, endpoint").ok()
    spawn = cells[4].replace("from monarch.actor import Actor, endpoint\n", "").replace("trainers", "others")
    assert "4 actors of Trainer" in book.run(spawn.rstrip("\n")).ok().stream()
    programs = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    said = [book.run(program).ok().text for program in programs]
    assert "105" in said[0] and len(said) == 3
    losses = [float(line) for line in said[2].splitlines() if line]
    assert len(losses) == 3 and losses[0] > losses[2]
