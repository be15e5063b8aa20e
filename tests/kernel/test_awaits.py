"""Cells that await: the tasks and the event loop of a rank live as long as the rank, as in a notebook."""

from __future__ import annotations

import re

import pytest

from kernels import ALL, Notebook

WAITER = "import asyncio\nevent = asyncio.Event()\nasync def waiter():\n    await event.wait()\n    return rank + 7\n"


@pytest.mark.parametrize("end", ["await asyncio.sleep(0)", "None"])
def test_task_of_a_cell_goes_on_in_a_later_one(notebook: Notebook, end: str) -> None:
    cell = notebook.mesh(f"{WAITER}task = asyncio.create_task(waiter())\n{end}").ok()
    assert cell.said() == {
        "note: an asyncio task is pending (waiter); on a rank, tasks run only while a cell awaits": ALL
    }
    cell = notebook.mesh("event.set()\nawait task").ok()
    assert "[rank 3] 10" in cell.shown and not cell.said()


@pytest.mark.parametrize(
    "body",
    [
        "asyncio.run(asyncio.sleep(0, 5))",
        "asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 5))",
        "x = asyncio.run(asyncio.sleep(0, 5))\nawait asyncio.sleep(0, x)",
        "await asyncio.ensure_future(asyncio.sleep(0, 5))",
        "%time task = asyncio.create_task(asyncio.sleep(0, 5))\nawait task",
        "%time x = await asyncio.sleep(0, 5)\nawait asyncio.sleep(0, x)",
        "await asyncio.to_thread(asyncio.run, asyncio.sleep(0, 5))",
    ],
)
def test_loops_of_scripts_and_of_cells_both_run(notebook: Notebook, body: str) -> None:
    assert "[ranks 0-3] 5" in notebook.mesh(f"import asyncio\n{body}").ok().shown


def test_traceback_of_an_await_has_no_frames_of_the_loop(notebook: Notebook) -> None:
    cell = notebook.mesh("async def fails():\n    raise ValueError('lost')\nawait fails()")
    assert re.search(r"ValueError: lost\n      cell \[\d+\] line", cell.text) and "asyncio" not in cell.text


def test_timeout_of_an_await_names_its_line(notebook: Notebook) -> None:
    cell = notebook.mesh(
        "import asyncio\ntry:\n    await asyncio.sleep(60)\nfinally:\n    print('left')", "--timeout 0.3"
    )
    assert cell.said()["left"] == ALL
    assert "line 4: await asyncio.sleep(60)" in cell.text


def test_tasks_that_are_left_end_with_their_rank(notebook: Notebook) -> None:
    notebook.run("%mesh up extra --procs 2").ok()
    body = "    try:\n        await asyncio.sleep(60)\n    finally:\n        print('ended')\n"
    left = f"import asyncio\nasync def left():\n{body}"
    notebook.run(f"%%mesh extra\n{left}task = asyncio.create_task(left())\nawait asyncio.sleep(0)").ok()
    text = notebook.run("%mesh down extra").ok().text
    assert "[ranks 0-1] ended" in text and "destroyed" not in text
