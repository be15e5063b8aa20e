"""A plain terminal shows readable text: jupyter console with the kernel."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")
pytest.importorskip("jupyter_console")
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>78]|\x1b\][^\x07]*\x07|\r")


@pytest.mark.slow
def test_console_shows_readable_text(tmp_path: Path) -> None:
    command = ["-m", "jupyter_console", "--kernel", "monarch", "--simple-prompt"]
    console = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=40, dimensions=(50, 160))
    try:
        console.expect(r"In \[1\]: ")
        said: list[str] = []
        # The simple prompt takes one line per cell.
        cell = "get_ipython().run_cell_magic('mesh', '', {!r})"
        lines = [
            "%mesh up --procs 4",
            cell.format("print('hello'); rank > 1"),
            cell.format("[0, 1][rank]"),
            "%mesh down",
        ]
        for number, line in enumerate(lines, 2):
            console.sendline(line)
            console.expect(rf"In \[{number}\]: ")
            said.append(_CODES.sub("", console.before))
        assert "mesh 'mesh' is up: procs=4" in said[0]
        assert "[ranks 0-3] hello" in said[1] and "[ranks 0-1] False" in said[1] and "[ranks 2-3] True" in said[1]
        assert "failed on ranks 2-3" in said[2] and "IndexError: list index out of range" in said[2]
        assert "<details" not in "".join(said)
        console.sendline("exit")
        console.expect(pexpect.EOF)
    finally:
        console.close(force=True)
