"""The outputs that notebooks are stored with: how they are written, and how an execution differs from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

METADATA = {
    "kernelspec": {"display_name": "Monarch", "language": "python", "name": "monarch"},
    "language_info": {"name": "python"},
}
VARIES = "varies"
"""The tag of a cell whose text differs from run to run; only the kinds of its outputs are compared."""
_VIEW = "application/vnd.jupyter.widget-view+json"
_HOST = re.compile(r"<caption>([^<]+)</caption>")
_FOLDER = re.compile(r"(/[\w.+@-]+)+/(?=site-packages/)")
_LABELLED = re.compile(r"^\[ranks? ([\d,-]+)\] (.*)$")
_MASKS = [
    # Colors, and the marks under a line of a traceback, which depend on the version of Python.
    (r"\x1b\[[0-9;]*m", ""),
    (r"(?m)^ *[~^]+ *\n", ""),
    # Frames of torch, which depend on its version.
    (r'(?m)^  File "[^"]*site-packages/.*\n(?:    .*\n)*', ""),
    # Losses and other measured numbers, clock times, process ids.
    (r"\d+\.\d+(e[-+]?\d+)?", "#"),
    (r"\d+:\d\d:\d\d", "#"),
    (r"\b\d{4,}\b", "#"),
    (r"(#|\b\d+) ?(ns|µs|ms|s)\b", "# s"),
]


def cleared(book: Any) -> Any:
    """Remove the outputs of a notebook, and return it."""
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return book


def normalized(book: Any) -> Any:
    """Remove what says where and with which Python a notebook ran, and return it."""
    book.metadata.clear()
    book.metadata.update(METADATA)
    for cell in book.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
        if cell.cell_type == "code":
            cell.outputs = list(_joined(cell.outputs))
        for output in cell.get("outputs", ()):
            _without_folder(output)
            _without_kernel(output.get("data", {}))
    return book


def _joined(outputs: list[Any]) -> Iterator[Any]:
    """Join neighboring outputs of the same stream, as JupyterLab does; how a text is divided depends on time."""
    last = None
    for output in outputs:
        if (
            last is not None
            and output.output_type == "stream"
            and (last.output_type, last.get("name")) == ("stream", output.name)
        ):
            last.text += output.text
            continue
        last = output
        yield output


def _without_kernel(data: Any) -> None:
    """Remove a live view, which needs its kernel, and the name of the host from the picture of a mesh beside it."""
    if data.pop(_VIEW, None) is None:
        return
    for host in _HOST.findall(data["text/html"]):
        data["text/html"] = data["text/html"].replace(f">{host}<", ">localhost<")
        data["text/plain"] = data["text/plain"].replace(f"  {host}  ", "  localhost  ")


def _without_folder(output: Any) -> None:
    """Remove the folder of the installed packages from tracebacks."""
    for mime in ("text/plain", "text/html"):
        if mime in output.get("data", ()):
            output.data[mime] = _FOLDER.sub("", output.data[mime])
    if output.output_type == "error":
        output.traceback = [_FOLDER.sub("", line) for line in output.traceback]


def differences(stored: Any, executed: Any) -> list[str]:
    """Describe how the outputs of two executions differ, without pictures, HTML, and numbers that vary."""
    if [cell.source for cell in stored.cells] != [cell.source for cell in executed.cells]:
        return ["the stored cells are not those that ran"]
    found: list[str] = []
    for one, two in zip(stored.cells, executed.cells, strict=True):
        before, after = list(forms(one)), list(forms(two))
        if before != after:
            found.append(f"cell {one.id!r} is stored with {before}, and shows {after}")
    return found


def forms(cell: Any) -> Iterator[tuple[str, list[str]]]:
    """Return the kind and the masked lines of each output of a cell; no lines if they vary."""
    varies = VARIES in cell.metadata.get("tags", ())
    for kind, text in _texts(cell):
        yield kind, [] if varies else masked(text)


def _texts(cell: Any) -> Iterator[tuple[str, str]]:
    """Return the kind and the text of each output of a cell."""
    for output in cell.get("outputs", ()):
        kind = output.output_type
        if kind == "stream":
            yield f"{kind} {output.name}", output.text
        elif kind == "error":
            yield f"{kind} {output.ename}", "\n".join(output.traceback)
        else:
            yield f"{kind} {' '.join(sorted(output.data))}", output.data.get("text/plain", "")


def masked(text: str) -> list[str]:
    """Return the lines of a text without numbers that vary; a line of several ranks becomes one of each."""
    for pattern, instead in _MASKS:
        text = re.sub(pattern, instead, text)
    lines = [each for line in text.splitlines() for each in _of_ranks(line)]
    # Ranks print in any order.
    return sorted(lines) if any(map(_LABELLED.match, lines)) else lines


def _of_ranks(line: str) -> list[str]:
    labelled = _LABELLED.match(line)
    if labelled is None:
        return [line]
    ends = [[int(end) for end in part.split("-")] for part in labelled[1].split(",")]
    return [f"[rank {rank}] {labelled[2]}" for part in ends for rank in range(part[0], part[-1] + 1)]
