"""What a notebook tells: its steps by the headings in it, and what came of a run of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

RAISES = "raises-exception"
"""The tag of a cell that is meant to fail."""


@dataclass
class Step:
    """The cells under one heading."""

    title: str
    cells: list[int] = field(default_factory=list)
    """Positions of its code cells in the notebook."""
    seconds: float = 0.0


def steps_of(notebook: Any) -> list[Step]:
    """The steps of a notebook that have code, in order."""
    steps = [Step("")]
    for position, cell in enumerate(notebook.cells):
        heading = re.match(r"#+ +(.+)", cell.source) if cell.cell_type == "markdown" else None
        if heading is not None:
            steps.append(Step(heading[1].strip()))
        elif cell.cell_type == "code":
            steps[-1].cells.append(position)
    return [step for step in steps if step.cells]


def step_at(steps: list[Step], position: int) -> Step:
    """The step that a code cell belongs to."""
    return next(step for step in steps if position in step.cells)


def text_of(cell: Any) -> str:
    """What a cell has shown, as plain text: of lines that were written over, the last state."""
    parts: list[str] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback)) + "\n")
        else:
            parts.append(output.data.get("text/plain", "") + "\n")
    # Not splitlines, which takes \r for an end too.
    return "\n".join(line.rsplit("\r", 1)[-1].rstrip() for line in "".join(parts).split("\n"))


def result_of(notebook: Any) -> str:
    """The text of the cell that is tagged as the result; empty if there is none."""
    found = [cell for cell in notebook.cells if "result" in cell.metadata.get("tags", ())]
    return text_of(found[-1]).strip() if found else ""
