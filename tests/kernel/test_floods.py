"""Ranks that print endlessly: Stop, memory, the next cell, and counts of the rest."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from kernels import ALL, Notebook
from leaks import wait_until

pytestmark = pytest.mark.slow

STOP = 2.0
"""Seconds that Stop may take, as promised."""
FLOODS = {
    "short lines": "while True: print('flood')",
    "long lines": "while True: print('flood' * 20_000)",
    "no newline": "while True: print('flood' * 20_000, end='')",
    "stderr": "import sys\nwhile True: print('flood' * 200, file=sys.stderr)",
    "descriptor": "import os\nwhile True: os.write(1, b'flood' * 10_000 + b'\\n')",
    "C": "import ctypes\nlibc = ctypes.CDLL(None)\nwhile True: libc.printf(b'flood\\n')",
    "subprocess": (
        "import subprocess\np = subprocess.Popen(['yes', 'flood'])\n"
        "try:\n    p.wait()\nfinally:\n    p.kill()\n    p.wait()"
    ),
}
HELD = "import os\nsum(os.fstat(fd).st_blocks * 512 for fd in (1, 2)) < 1 << 20"


QUICK = ("short lines", "descriptor")


@pytest.mark.parametrize(
    "flood", [flood if flood in QUICK else pytest.param(flood, marks=pytest.mark.slow) for flood in FLOODS]
)
def test_flood_is_stopped_and_frees_memory(notebook: Notebook, flood: str) -> None:
    cell = notebook.send(f"%%mesh\n{FLOODS[flood]}")
    cell.until(lambda: "flood" in cell.stream())
    took: list[float] = []
    # A machine that is busy with other tests gets a second try.
    for _ in range(2):
        begin = time.monotonic()
        notebook.interrupt()
        cell.wait()
        took.append(time.monotonic() - begin)
        assert cell.status == "error"
        if took[-1] <= STOP:
            break
        cell = notebook.send(f"%%mesh\n{FLOODS[flood]}")
        cell.until(lambda cell=cell: "flood" in cell.stream())
    assert min(took) <= STOP
    after = notebook.mesh("print('next cell')").ok()
    after.until(lambda: after.said() == {"next cell": ALL})
    assert "flood" not in after.stream()
    # The memory of the output is freed.
    assert notebook.mesh(HELD).ok().shown == "[ranks 0-3] True"


@pytest.mark.parametrize(("flood", "count"), [("display(HTML('x'))", 1000), ("print('x'); clear_output()", 100)])
def test_flood_of_displays_is_stopped_and_delays_no_cell(notebook: Notebook, flood: str, count: int) -> None:
    code = f"%%mesh\nfrom IPython.display import HTML, clear_output\nfor number in range(10**9): {flood}"
    took: list[float] = []
    # A machine that is busy with other tests gets a second try.
    while len(took) < 2 and (not took or took[-1] > STOP):
        cell = notebook.send(code)
        # More than the notebook shows in the patience of a Stop.
        cell.until(lambda cell=cell: len(cell.messages) > count)
        begin = time.monotonic()
        notebook.interrupt()
        assert cell.wait().status == "error"
        notebook.mesh("'next cell'").ok()
        took.append(time.monotonic() - begin)
    assert min(took) <= STOP


def test_every_display_of_a_fast_rank_is_shown(notebook: Notebook) -> None:
    count = 500
    body = f"from IPython.display import HTML\nfor number in range({count}): display(HTML(f'<b>{{number}}</b>'))"
    cell = notebook.mesh(body, "[1]").ok()
    shown = [each["data"].get("text/html", "") for each in cell.contents("display_data")]
    assert [int(n) for text in shown for n in re.findall(r"<b>(\d+)</b>", text)] == list(range(count))


OMITTED = """import os, time
from pathlib import Path
folder = Path('{folder}')
(folder / f'begun-{{rank}}').touch()
while not (folder / 'go').exists(): time.sleep(0.01)
for _ in range(200): os.write(1, b'y' * (1 << 20) + b'\\n')
while os.fstat(1).st_blocks * 512 > 32 << 20: time.sleep(0.01)
(folder / f'written-{{rank}}').touch()
print('the end')"""


def test_flood_left_out_bytes_are_counted(notebook: Notebook, tmp_path: Path) -> None:
    pid = int(notebook.run("import os; os.getpid()").shown)
    cell = notebook.send("%%mesh\n" + OMITTED.format(folder=tmp_path))

    def have(what: str) -> bool:
        return all((tmp_path / f"{what}-{rank}").exists() for rank in range(4))

    assert wait_until(lambda: have("begun"))
    # Nobody takes the output, so ranks must leave some out.
    os.kill(pid, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        assert wait_until(lambda: have("written"))
    finally:
        os.kill(pid, signal.SIGCONT)
    cell.wait().ok()
    left_out = r"\[ranks? [^\]]*: [\d,]+ bytes of output \([\d.]+ MiB\) omitted"
    # The end of the output is always shown, on a busy machine some time after the cell's end.
    cell.until(lambda: re.search(left_out, cell.stream()) and "the end" in cell.said())


def test_progress_bar_is_shown_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    body = f"import os, time\nprint('\\r5/30', end='')\nwhile not os.path.exists('{go}'): time.sleep(0.01)"
    cell = notebook.send(f"%%mesh\n{body}\nprint('\\r30/30')")
    cell.until(lambda: cell.shown == "[ranks 0-3] 5/30")
    (tmp_path / "go").touch()
    assert cell.wait().ok().shown == "[ranks 0-3] 30/30" and not cell.stream()


def test_many_lines_arrive_in_few_messages(notebook: Notebook) -> None:
    cell = notebook.mesh("for i in range(1000): print('line', i)").ok()
    assert cell.said() == {f"line {number}": ALL for number in range(1000)}
    assert len(cell.contents("stream")) <= 50


def test_log_has_lines_that_the_cell_omits(notebook: Notebook, tmp_path: Path) -> None:
    notebook.mesh("for i in range(6000): print('logged', i, rank)").ok()
    notebook.run(f"%mesh log --save {tmp_path}/log").ok()
    found = re.findall(r"^\[rank \d\] logged (\d+) (\d)$", (tmp_path / "log").read_text(), re.M)
    assert sorted((int(rank), int(number)) for number, rank in found) == [(r, n) for r in range(4) for n in range(6000)]
