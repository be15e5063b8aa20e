"""``clear_output`` on ranks: each clears what it has shown in its cell, printed lines included."""

from __future__ import annotations

import re

import pytest

from kernels import ALL, Notebook
from monarch._core.shapes.ranks import parse_ranks

CLEAR = "from IPython.display import clear_output\nimport time\n"


def ranks_of_lines(screen: str) -> dict[str, set[int]]:
    """Each line of a screen with its ranks, in the order of their first ones; a late rank has a line of its own."""
    found: dict[str, set[int]] = {}
    for line in screen.splitlines():
        match = re.fullmatch(r"\[ranks? ([\d,-]+)\] (.*)", line)
        assert match, screen
        ranks, known = set(parse_ranks(match[1])), found.setdefault(match[2], set())
        assert known.isdisjoint(ranks), screen
        known |= ranks
    return found


@pytest.mark.parametrize(("where", "ranks"), [("[1]", {1}), ("[0:2]", {0, 1}), ("", ALL)])
@pytest.mark.parametrize("wait", [True, False])
def test_cleared_lines_are_replaced(notebook: Notebook, where: str, ranks: set[int], wait: bool) -> None:
    loop = f"for step in range(30):\n    clear_output(wait={wait}); print('step', step); print('loss', 30 - step)"
    cell = notebook.mesh(f"{CLEAR}print('before')\n{loop}", where).ok()
    assert list(ranks_of_lines(cell.screen).items()) == [("step 29", ranks), ("loss 1", ranks)]


def test_page_stays_one_block_while_ranks_clear_it(notebook: Notebook) -> None:
    loop = (
        "for step in range(12):\n    clear_output(wait=True); print(f'{rank}: {step}'); time.sleep(0.03 * (rank + 1))"
    )
    cell = notebook.send(f"%%mesh\n{CLEAR}{loop}")
    screens: list[str] = []
    while not (cell.idle and cell.reply):
        notebook.take(lambda: True, "")
        size = len(cell.messages)
        notebook.take(lambda size=size: len(cell.messages) > size or (cell.idle and cell.reply), "more of the loop")
        screens.append(cell.screen)
    assert cell.screen == "".join(f"[rank {rank}] {rank}: 11\n" for rank in range(4))
    for screen in screens:
        # At most one line of each rank, in their order, whichever is ahead.
        ranks = re.findall(r"^\[rank (\d)\]", screen, re.M)
        assert ranks == sorted(set(ranks)) and len(ranks) == screen.count("\n"), screens


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_clears_only_its_own_lines(notebook: Notebook, wait: bool) -> None:
    body = f"print('kept', rank)\nif rank == 1: clear_output(wait={wait}); print('new'); time.sleep(0.3)\nprint('end')"
    cell = notebook.mesh(CLEAR + body).ok()
    lines = cell.screen.splitlines()
    assert sorted(line for line in lines if "end" not in line) == [
        "[rank 0] kept 0", "[rank 1] new", "[rank 2] kept 2", "[rank 3] kept 3",
    ]  # fmt: skip


def test_lines_without_an_end_are_cleared_too(notebook: Notebook) -> None:
    loop = "for step in range(5):\n    print(f'step {step}', end='', flush=True); time.sleep(0.3)\n    "
    cell = notebook.mesh(f"{CLEAR}{loop}clear_output(wait=True)\nprint('done')").ok()
    assert cell.screen == "[ranks 0-3] done\n"


@pytest.mark.parametrize("where", ["[0]", ""])
def test_progress_bars_are_cleared_with_lines(notebook: Notebook, where: str) -> None:
    # As tqdm does.
    loop = """
import sys
for epoch in range(3):
    clear_output(wait=True)
    print('epoch', epoch)
    for i in range(5):
        print(f'\\repoch {epoch}: {25 * i}%', end='', file=sys.stderr, flush=True); time.sleep(0.12)
    print(file=sys.stderr)
"""
    screen = notebook.mesh(CLEAR + loop, where).ok().screen
    assert screen.count("epoch 2") == 2 and "100%" in screen
    assert "epoch 0" not in screen and "epoch 1" not in screen


def test_lines_and_displays_are_cleared_together(notebook: Notebook) -> None:
    loop = "for i in range(4):\n    clear_output(wait=True); display(f'value {i}'); print('line', i); time.sleep(0.15)"
    cell = notebook.mesh(CLEAR + loop).ok()
    assert ranks_of_lines(cell.screen) == {"'value 3'": ALL, "line 3": ALL}
    loop = "for i in range(4):\n    clear_output(wait=True); print('line', i); display(f'value {i}'); time.sleep(0.15)"
    cell = notebook.mesh(CLEAR + loop).ok()
    assert list(ranks_of_lines(cell.screen).items()) == [("line 3", ALL), ("'value 3'", ALL)]


def test_waiting_clear_without_output_clears_nothing(notebook: Notebook) -> None:
    assert notebook.mesh(f"{CLEAR}print('kept')\nclear_output(wait=True)").ok().screen == "[ranks 0-3] kept\n"
    assert notebook.mesh(f"{CLEAR}print('gone')\nclear_output()").ok().screen == ""
    cell = notebook.mesh(f"{CLEAR}print('gone')\nclear_output(wait=True)\nrank * 0").ok()
    assert cell.screen == "[ranks 0-3] 0\n"


def test_output_is_shown_after_a_clear_of_very_many_lines(notebook: Notebook) -> None:
    body = "for i in range(6000): print('line', i)\nclear_output(wait=True)\nfor i in range(3): print('new', i)"
    cell = notebook.mesh(CLEAR + body, "[0]").ok()
    assert cell.screen == "[rank 0] new 0\n[rank 0] new 1\n[rank 0] new 2\n"


def test_displays_of_a_long_cell_are_not_all_kept(notebook: Notebook) -> None:
    count = "import gc; print(sum(type(each).__name__ == '_Item' for each in gc.get_objects()))"
    loop = "import time\nfor i in range(300): display(f'value {i}')"
    cell = notebook.send(f"%%mesh [0]\n{loop}\ntime.sleep(60)")
    cell.until(lambda: "value 299" in cell.shown)
    kept = notebook.send(count, subshell=notebook.control("create_subshell_request")["subshell_id"])
    kept.until(lambda: kept.stream())
    assert 0 < int(kept.stream()) <= 160
    notebook.interrupt()
    cell.wait()
