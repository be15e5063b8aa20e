"""The story of a notebook: its steps, by its headings, and the results of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

RAISES = "raises-exception"
"""The tag of a cell that should fail."""


@dataclass
class Step:
    """The cells under one heading."""

    title: str
    cells: list[int] = field(default_factory=list)
    """Positions of its code cells in the notebook."""
    seconds: float = 0.0


def steps_of(notebook: Any) -> list[Step]:
    """Return the steps of a notebook that have code, in order."""
    steps = [Step("")]
    for position, cell in enumerate(notebook.cells):
        heading = re.match(r"#+ +(.+)", cell.source) if cell.cell_type == "markdown" else None
        if heading is not None:
            steps.append(Step(heading[1].strip()))
        elif cell.cell_type == "code":
            steps[-1].cells.append(position)
    return [step for step in steps if step.cells]


def step_at(steps: list[Step], position: int) -> Step:
    """Return the step that a code cell belongs to."""
    return next(step for step in steps if position in step.cells)


def line_of(source: str) -> str:
    """Return the code of a cell in one line: its magic, its first line that is no import, and ``…`` for others."""
    lines = [line.strip() for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    head = lines[:1] if lines and lines[0].startswith("%%") else []
    body = lines[len(head) :]
    telling = next((line for line in body if not re.match(r"(import|from)\s", line)), "".join(body[:1]))
    return " ⏎ ".join([*head, *filter(None, [telling])]) + (" …" if len(body) > 1 else "")


def text_of(cell: Any) -> str:
    """Return the output of a cell as plain text, with the last state of overwritten lines."""
    parts: list[str] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback) + "\n")
        else:
            parts.append(output.data.get("text/plain", "") + "\n")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(parts))
    # Not splitlines, which also splits at \r.
    return "\n".join(line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))


def result_of(notebook: Any) -> str:
    """Return the output of the cell tagged as the result; empty if there is none."""
    found = [cell for cell in notebook.cells if "result" in cell.metadata.get("tags", ())]
    return text_of(found[-1]).strip() if found else ""
