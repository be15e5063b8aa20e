"""The kernel is ready before its magics are, and nothing that a front end or a configuration does shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernels import GUARD, Notebook
from leaks import Kit, wait_until
from monarch_kernel.views.protocol import TARGET

GATE = """
import os, sys, time

class Gate:
    def find_spec(self, name, path=None, target=None):
        if name == "monarch_kernel.magics.mesh":
            gate = os.environ["GATE"]
            open(gate + ".reached", "w").close()
            while not os.path.exists(gate):
                time.sleep(0.01)
            if os.path.getsize(gate):
                raise ImportError(open(gate).read())

sys.meta_path.insert(0, Gate())
"""
"""Keeps a kernel from importing its magics until a file exists, whose text is the reason why it cannot."""


class EarlyNotebook(Notebook):
    """A notebook that waits for the first answer of its kernel only: while the magics load, there is no second one."""

    def _await_ready(self) -> None:
        asked = self.client.kernel_info()
        assert self.client.get_shell_msg(timeout=GUARD)["parent_header"]["msg_id"] == asked


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(GATE)
    return tmp_path / "gate"


@pytest.fixture
def early(leaks: Kit, spec: str, gate: Path) -> Iterator[EarlyNotebook]:
    with open(gate.parent / "log", "w") as log:
        book = EarlyNotebook(log=log, GATE=str(gate), PYTHONPATH=str(gate.parent))
    yield book
    book.close(now=True)


def test_kernel_is_ready_before_its_magics(early: EarlyNotebook, gate: Path) -> None:
    ended: list[int] = []
    cells = [early.send(code) for code in ("%mesh help", "1 + 1", "%mesh")]
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    gate.touch()

    def note() -> bool:
        ended.extend(number for number, cell in enumerate(cells) if cell.reply and number not in ended)
        return len(ended) == len(cells)

    early.take(note, "the magics to load")
    assert ended == [0, 1, 2] and [cell.status for cell in cells] == ["ok"] * 3
    assert early.run("%mesh config timeout").ok().shown


def test_kernel_without_its_magics_ends_with_the_reason(early: EarlyNotebook, gate: Path) -> None:
    early.send("1 + 1")
    gate.write_text("no such magics")
    assert wait_until(lambda: not early.manager.is_alive()), "no cell would be answered"
    assert "ImportError: no such magics" in (gate.parent / "log").read_text()


def test_first_message_of_a_panel_finds_its_target(early: EarlyNotebook, gate: Path) -> None:
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    content = {"comm_id": "one", "target_name": TARGET, "data": {}}
    early.client.shell_channel.send(early.client.session.msg("comm_open", content))
    cell = early.send("1 + 1")
    gate.touch()
    cell.wait().ok()
    assert early.run("'one' in get_ipython().kernel.lane.comms").ok().shown == "True"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("startup/first.py", "get_ipython().run_line_magic('mesh', 'config timeout=7')"),
        ("startup/first.ipy", "%mesh config timeout=7"),
        ("ipython_kernel_config.py", "c.IPKernelApp.exec_lines = ['%mesh config timeout=7']"),
        (
            "ipython_kernel_config.py",
            "c.IPKernelApp.exec_lines = ['%load_ext monarch_kernel', '%mesh config timeout=7']",
        ),
        (
            "ipython_kernel_config.py",
            "c.IPKernelApp.extensions = ['monarch_kernel']; c.IPKernelApp.exec_lines = ['%mesh config timeout=7']",
        ),
    ],
)
def test_code_of_a_configuration_finds_the_magics(
    own: Callable[..., Notebook], tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / "profile_default" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    book = own(IPYTHONDIR=str(tmp_path))
    assert "7" in book.run("%mesh config timeout").ok().shown
