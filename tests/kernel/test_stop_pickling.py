"""Stop while a value is pickled or unpickled on the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import Notebook

CLASSES = (
    "class Slow:\n"
    "    def __init__(self, path): self.path = path\n"
    "    def __{method}__(self, *state):\n"
    "        self.__dict__.update(*state[:1]) if '{method}' == 'setstate' else None\n"
    "        import time\n"
    "        open(self.path, 'w').close()\n"
    "        while True: time.sleep(1000)\n"
)


@pytest.mark.parametrize("method", ["setstate", "reduce"])
def test_stop_ends_pickling_that_blocks(notebook: Notebook, tmp_path: Path, method: str) -> None:
    book, path = notebook, tmp_path / "begun"
    code = CLASSES.format(method=method)
    if method == "setstate":
        book.run(code).ok()
        cell = book.send(f"mesh['slow'] = Slow({str(path)!r})")
    else:
        book.mesh(f"{code}slow = Slow({str(path)!r})").ok()
        cell = book.send("mesh['slow']")
    book.take(path.exists, "a rank that pickles")
    book.interrupt()
    cell.wait()
    assert cell.status == "error" and "KeyboardInterrupt" in cell.text, cell.text
    assert "not stopped yet" not in cell.text and "keeps running" not in cell.text, cell.text
    assert "restarted" not in cell.text, cell.text
    assert "4" in book.run("mesh['x'] = 4; mesh['x']").ok().shown
