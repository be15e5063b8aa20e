"""The kernel is a Python kernel: Jupyter's own tests, start and end, and magics in a plain kernel."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jupyter_kernel_test
import pytest

from kernels import Notebook
from leaks import Kit, pids_named, processes, wait_until

pytestmark = pytest.mark.slow


class TestConformance(jupyter_kernel_test.KernelTests):
    """Jupyter's tests of kernels, configured for Python."""

    kernel_name = "monarch"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [
        {"text": "zi", "matches": {"zip"}},
    ]
    complete_code_samples = [
        *("1", "print('hello')", "def f(x):\n  return x * 2\n\n", "%mesh", "%%mesh\nx = 1\n\n"),
        *("%%mesh\nfor i in x:\n  i\n\n", "%%mesh\n!ls\n\n", "%%mesh\n%%bash\nif true; then (\n\n"),
        *("%%time\nx = 1\n\n", "%%time\n%%mesh\nx = 1\n\n"),
    ]
    incomplete_code_samples = [
        *("print('''hello", "def f(x):\n  x * 2", "for i in x:", "%%time\nx = 1", "%%time\n%%mesh\nx = 1"),
        *("%%mesh", "%%mesh [0]\n", "%%mesh\nx = 1", "%%mesh\n!ls", "%%mesh\nfor i in x:\n\n"),
        *("%%mesh\nx = (1,\n\n", "%%mesh spawn a\nclass A(Actor):"),
    ]
    invalid_code_samples = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('x')"
    code_execute_result = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('x^2'))", "mime": "text/latex"},
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"

    @classmethod
    def setUpClass(cls) -> None:
        before = set(processes())
        super().setUpClass()
        # The kernel warms up in the background; its processes are not leaks, nor are those of other kernels its own.
        for name in ("monarch-agent", "monarch-spare"):
            assert wait_until(lambda name=name: pids_named(name, before=before), 60)


def test_kernel_runs_plain_python(notebook: Notebook) -> None:
    assert notebook.run("import asyncio\nawait asyncio.sleep(0, result=5)").ok().shown == "5"
    assert notebook.run("!echo shell").ok().stream().strip() == "shell"
    assert notebook.run("%timeit -n1 -r1 1").ok().stream()
    assert notebook.run("get_ipython().kernel.implementation").ok().shown == "'monarch'"
    assert notebook.run("import ipywidgets; ipywidgets.IntSlider()").ok().bundles
    cell = notebook.run("def f(): 1 / 0\nf()")
    assert cell.status == "error" and cell.reply["ename"] == "ZeroDivisionError"


def of(marker: str) -> dict[int, str]:
    """Return the processes with a marker in their environment."""
    found: dict[int, str] = {}
    for pid, name in processes().items():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marker.encode() in file.read():
                    found[pid] = name
        except OSError:
            continue
    return found


@pytest.fixture
def alone(own: Callable[..., Notebook]) -> Iterator[Callable[[str], Notebook]]:
    """Start a notebook with its own runtime folder, so that no other fork server serves it."""
    with tempfile.TemporaryDirectory(prefix="mk-", dir="/tmp") as folder:
        yield lambda marker: own(MONARCH_TEST_KERNEL=marker, XDG_RUNTIME_DIR=folder)


def test_kernel_restart_ends_all_ranks(alone: Callable[[str], Notebook]) -> None:
    book = alone("restart")
    book.run("%mesh up --procs 3").ok()
    before = of("MONARCH_TEST_KERNEL=restart")
    assert len(before) >= 5
    book.manager.restart_kernel(now=False)
    book.client.wait_for_ready(timeout=30)
    # Only processes of the new kernel are left.
    assert wait_until(lambda: not set(of("MONARCH_TEST_KERNEL=restart")) & set(before))
    assert "no mesh" in book.run("%mesh").ok().text
    book.run("%mesh up --procs 2").ok()
    assert book.mesh("world_size").ok().shown == "[ranks 0-1] 2"


BUSY = {
    "flood": "%%mesh\nwhile True: print('begun' * 20)",
    "cleanup": "import time\nprint('begun')\ntry: time.sleep(60)\nfinally: time.sleep(0.5)",
    "long cleanup": "import time\nprint('begun')\ntry: time.sleep(60)\nfinally: time.sleep(2)",
    "%mesh up": "print('begun')\n%mesh up second --procs 2",
}


@pytest.mark.parametrize("what", BUSY)
def test_restart_of_a_busy_kernel_logs_no_traceback(own: Callable[..., Notebook], tmp_path: Path, what: str) -> None:
    with (tmp_path / "log").open("wb") as log:
        book = own(log=log)
        book.run("%mesh up --procs 2").ok()
        cell = book.send(BUSY[what])
        cell.until(lambda: "begun" in cell.stream())
        book.manager.restart_kernel(now=False, env=dict(os.environ), stdout=log, stderr=log)
        book.client.wait_for_ready(timeout=30)
        assert book.run("1 + 1").ok().shown == "2"
    assert "Traceback" not in (tmp_path / "log").read_text()


HOWS = [
    "shutdown",
    *(pytest.param(how, marks=pytest.mark.slow) for how in ("shutdown while a cell runs", "kill", "quit")),
]


@pytest.mark.parametrize("how", HOWS)
def test_kernel_leaves_no_process_after_its_end(alone: Callable[[str], Notebook], how: str) -> None:
    marker = f"MONARCH_TEST_KERNEL={how}"
    book = alone(how)
    book.run("%mesh up --procs 3").ok()
    assert len(of(marker)) >= 5
    if how == "shutdown while a cell runs":
        cell = book.send("%%mesh\nprint('runs')\nwhile True: pass")
        cell.until(lambda: "runs" in cell.stream())
    if how == "quit":
        book.send("exit")
        assert wait_until(lambda: not book.manager.is_alive(), 30)
    else:
        book.manager.shutdown_kernel(now=how == "kill")
    assert wait_until(lambda: not of(marker)), of(marker)


def test_magics_work_in_a_plain_kernel(own: Callable[..., Notebook]) -> None:
    book = own("python3")
    said = book.run("%load_ext monarch_kernel").ok().stream()
    assert "are ready" in said and "The Monarch kernel adds" in said
    assert "is up" in book.run("%mesh up --procs 2").ok().text
    cell = book.mesh("print('said')\nrank + 5").ok()
    assert "[rank 1] 6" in cell.shown and cell.said() == {"said": {0, 1}}
    assert book.mesh("1 / 0").reply["ename"] == "MeshCellError"
    # Loading again is harmless: the meshes stay.
    assert book.run("%load_ext monarch_kernel\n%reload_ext monarch_kernel").ok().stream().count("are ready") == 0
    assert book.mesh("world_size").ok().shown == "[ranks 0-1] 2"


def test_kernel_starts_in_time(leaks: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    times: dict[str, list[float]] = {"python3": [], "monarch": []}
    # The first client of a process makes a lasting event loop.
    Notebook("python3").close(now=True)
    leaks.rebase()
    for _ in range(3):
        for kernel, taken in times.items():
            begun = time.perf_counter()
            book = Notebook(kernel)
            book.run("1").ok()
            taken.append(time.perf_counter() - begun)
            book.close(now=True)
    with capsys.disabled():
        shown = ", ".join(f"{kernel} {min(taken):.2f} s" for kernel, taken in times.items())
        print(f"\nto the first answer, on {os.cpu_count()} cores: {shown}")
