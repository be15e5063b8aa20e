"""The notebooks run in the real kernel, show what they are stored with, and leave nothing behind."""

from __future__ import annotations

import asyncio
import copy
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import sshd
from stored import METADATA, VARIES, cleared, differences, normalized

# Not by an import, which would take a second of each process that only collects tests.
_MISSING = [name for name in ("sklearn", "matplotlib") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
BADGE = re.compile(r"^\*\*Needs:\*\* .+ · \*\*Takes:\*\* about .+ · \*\*Ranks:\*\* \d+$", re.M)


def execute(book: Any) -> list[dict[str, Any]]:
    """Run a notebook; return the messages that update displays."""
    updates: list[dict[str, Any]] = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                updates.append(msg["content"])
            return super().process_message(msg, cell, cell_index)

    client = Client(book, kernel_name=book.metadata.kernelspec.name, timeout=60)
    # In a thread, so that nbclient's event loop ends with it.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, client.async_execute()).result()
    return updates


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_of(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    """Return all text of a cell's outputs."""
    parts: list[str] = []
    for output in cell.outputs:
        if output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "".join(parts)


def pictures(cell: Any) -> int:
    """Return how many pictures a cell shows, of this process or of ranks."""
    data = [output.get("data", {}) for output in cell.outputs]
    return sum("image/png" in each or each.get("text/html", "").count("src='data:image/png") for each in data)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_outputs(path: Path) -> None:
    book = read(path)
    nbformat.validate(book)
    assert book.metadata == METADATA
    cells = code_of(book)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_a_lesson(path: Path) -> None:
    book = read(path)
    assert re.match(r"# \w.*\n\n\w", book.cells[0].source) and BADGE.search(book.cells[0].source)
    cells = code_of(book)
    assert len(cells) <= 25 and all(len(cell.source.splitlines()) <= 45 for cell in cells)
    # A picture early, and one at the end, before the mesh goes down.
    assert any(map(pictures, cells[:8])) and pictures(cells[-2]) and cells[-1].source == "%mesh down"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_names_no_folder_of_a_machine(path: Path) -> None:
    assert not re.search(r"[\"' ;](/(home|root|work|usr|tmp|opt|Users)/)", path.read_text())


def example() -> Any:
    """Return a notebook as stored, with one output of each kind."""
    v4 = nbformat.v4
    outputs = [
        v4.new_output("stream", name="stdout", text="[ranks 0-1] hello\n[rank 0] step 1 of 2 took 0.25 s\n"),
        v4.new_output("display_data", {"text/plain": "[ranks 0,2-3] loss 0.5", "text/html": "<b>0.5</b>"}),
        v4.new_output("error", ename="ValueError", evalue="no", traceback=["\x1b[31mValueError\x1b[0m: no"]),
    ]
    return v4.new_notebook(cells=[v4.new_code_cell("%%mesh\nf()", id="cell", outputs=outputs)])


def test_numbers_and_merged_ranks_are_no_differences() -> None:
    executed = example()
    hello, value, error = executed.cells[0].outputs
    hello.text = "[rank 0] step 1 of 2 took 125 ms\n[rank 1] hello\n[rank 0] hello\n"
    value.data["text/plain"] = "[rank 0] loss 0.25\n[rank 2] loss 1.5e-05\n[rank 3] loss 12.0"
    error.traceback = ["ValueError: no"]
    assert differences(example(), executed) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda outputs: outputs.pop(),
        lambda outputs: outputs.append(outputs[0]),
        lambda outputs: outputs[0].update(name="stderr"),
        lambda outputs: outputs[0].update(text="[ranks 0-2] hello\n[rank 0] step 1 of 2 took 0.25 s\n"),
        lambda outputs: outputs[0].update(text="[ranks 0-1] hello\n[rank 0] step 2 of 2 took 0.25 s\n"),
        lambda outputs: outputs[1].data.update({"image/png": ""}),
        lambda outputs: outputs[1].data.update({"text/plain": "[ranks 0,2-3] gain 0.5"}),
        lambda outputs: outputs[2].update(ename="TypeError"),
        lambda outputs: outputs[2].update(traceback=["ValueError: yes"]),
    ],
)
def test_changed_outputs_are_differences(change: Any) -> None:
    executed = copy.deepcopy(example())
    change(executed.cells[0].outputs)
    assert len(differences(example(), executed)) == 1


def test_varying_text_is_no_difference_but_its_kind_is() -> None:
    stored, executed = example(), example()
    for book in (stored, executed):
        book.cells[0].metadata["tags"] = [VARIES]
    executed.cells[0].outputs[0].text = "[rank 0] once upon a time\n"
    assert differences(stored, executed) == []
    executed.cells[0].outputs.pop()
    assert len(differences(stored, executed)) == 1


def test_stored_view_has_no_widget_and_no_host_name() -> None:
    view = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
        "text/html": "<table><caption>node-7</caption><td>○</td></table>",
        "text/plain": "mesh 'mesh': procs=1\n  node-7  ○\n1 rank: 1 idle",
    }
    cell = nbformat.v4.new_code_cell("mesh", id="cell", outputs=[nbformat.v4.new_output("display_data", view)])
    stored = normalized(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs[0].data
    assert stored == {
        "text/html": "<table><caption>localhost</caption><td>○</td></table>",
        "text/plain": "mesh 'mesh': procs=1\n  localhost  ○\n1 rank: 1 idle",
    }


def test_parts_of_a_stream_are_stored_as_one() -> None:
    book = example()
    hello, *others = book.cells[0].outputs
    parts = [copy.deepcopy(hello) for _ in range(2)]
    parts[0].text, parts[1].text = hello.text[:9], hello.text[9:]
    book.cells[0].outputs = [*parts, *others]
    assert normalized(book).cells[0].outputs == normalized(example()).cells[0].outputs


def test_changed_cells_are_differences() -> None:
    executed = example()
    executed.cells[0].source = "%%mesh\ng()"
    assert differences(example(), executed) == ["the stored cells are not those that ran"]
    executed.cells.clear()
    assert differences(example(), executed) == ["the stored cells are not those that ran"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_what_it_is_stored_with(path: Path) -> None:
    book = cleared(read(path))
    for cell in code_of(book):
        for usual, less in LESS.get(path.stem, {}).items():
            cell.source = cell.source.replace(usual, less)
    updates = execute(book)
    for cell, stored in zip(book.cells, read(path).cells, strict=True):
        cell.source = stored.source
    assert differences(read(path), normalized(book)) == []
    # Numbers are not compared.
    cells = {cell.id: cell for cell in book.cells}
    CHECKS[path.stem](cells, updates)


LESS = {"04_watch_it_train": {"time.sleep(0.4)": "time.sleep(0.2)", "train(120)": "train(40)"}}
"""What runs for less long here than in the notebook."""


def check_accuracy(cell: Any) -> None:
    accuracy = re.search(r"test accuracy (\d+\.\d)% on 360 digits", shown(cell))
    assert accuracy is not None and float(accuracy[1]) > 93


def check_quickstart(cells: dict[str, Any], updates: list[dict[str, Any]]) -> None:
    estimates = [float(each) for each in re.findall(r"\] (\d\.\d+)", shown(cells["darts"]))]
    together = [float(each) for each in re.findall(r"\] (\d\.\d+)", shown(cells["reduce"]))]
    assert len(together) == 1 and abs(together[0] - sum(estimates) / len(estimates)) < 0.1
    # Pictures of ranks: all in one output, updated in place.
    assert [pictures(cells[name]) for name in ("live", "train", "last")] == [4, 1, 4]
    final = cells["train"].outputs[0].data["text/html"]
    ids = {each["transient"]["display_id"] for each in updates if each["data"].get("text/html") == final}
    assert len(ids) == 1 and sum(each["transient"]["display_id"] in ids for each in updates) > 5
    check_accuracy(cells["result"])


def check_ddp(cells: dict[str, Any], _: Any) -> None:
    # Each rank has its own loss; the copies of the network are equal.
    losses = re.findall(r"\[rank \d\] (\S+)", shown(cells["train"]))
    assert len(losses) == 4 == len(set(losses))
    assert shown(cells["equal"]).startswith("[ranks 0-3] Tensor float32[9610]")
    check_accuracy(cells["result"])


def check_parameter_server(cells: dict[str, Any], _: Any) -> None:
    # The reader does not wait for the owner, which sleeps for 2 s.
    assert re.search(r"wall time: \d+(\.\d+)? [µm]s", shown(cells["busy-read"]))
    check_accuracy(cells["result"])


def check_kill_a_rank(cells: dict[str, Any], _: Any) -> None:
    before, after = (re.findall(r"\] (\S+)", shown(cells[name])) for name in ("first", "on"))
    assert len(after) == 4 and max(map(float, after)) < min(map(float, before))
    # Repeated steps give the same result.
    assert shown(cells["result"]) == "100 steps, the losses are the same\n"


def check_watch_it_train(cells: dict[str, Any], _: Any) -> None:
    # Rank 1 sleeps in line 10 of the cell with next_batch.
    assert shown(cells["slowest"]) == "rank 1 is the slow one, most often at cell [4] line 10\n"
    # The mesh is below both cells, with charts of both metrics in the second.
    views = [cells[name].outputs[-1].data["text/html"] for name in ("up", "view")]
    assert ["monarch-static" in view for view in views] == [True, True]
    assert [label in views[1] for label in ("loss", "tokens/s")] == [True, True]
    assert shown(cells["result"]).startswith("[rank 0] The function ")


def check_stuck_and_why(cells: dict[str, Any], _: Any) -> None:
    # Each hang names the ranks, what is missing, and the line.
    told = shown(cells["if"])
    assert "stuck: rank 0 waits for ranks 1-3, which finished without calling all_reduce()" in told
    assert "at line 4: dist.all_reduce(seen)" in told and "CallTimeoutError" in told
    told = shown(cells["slow"])
    assert "waiting: ranks 0-1,3 wait for rank 2, which is asleep" in told and "at line 7 in fetch" in told
    assert told.endswith("'all ranks have their shard'")
    told = shown(cells["why"])
    assert "stuck: rank 0 waits for ranks 1-3" in told and "at cell [7] line 13 in train: loss.backward()" in told
    assert "CollectiveMismatchError" in shown(cells["shape"])
    assert "trainer[procs=0].step() waits for server.push()" in shown(cells["deadlock"])
    assert shown(cells["join"]) == "[rank 0] 15\n[ranks 1-3] 14"
    accuracy = re.search(r"accuracy (\d+\.\d) % on 1797 digits", shown(cells["result"]))
    assert accuracy is not None and float(accuracy[1]) > 93


def check_pause_and_inspect(cells: dict[str, Any], _: Any) -> None:
    # The ranks were paused in train, and rank 2 has other data.
    assert "in train: " in shown(cells["pause"])
    assert re.search(r"min 0, max 0\.06275, mean \S+ +\S+ KiB +2 ", shown(cells["vars"]))
    assert shown(cells["diff"]).startswith("network differs: no two of ranks 0-3 agree")
    assert "breakpoint 1 if len(losses) % 50 == 0" in shown(cells["stopped"])
    assert "[4] line 8 in train" in shown(cells["stopped"])
    accuracy = re.search(r"accuracy (\d+\.\d) % on 1797 digits", shown(cells["score"]))
    assert accuracy is not None and float(accuracy[1]) > 93


def check_one_tensor(cells: dict[str, Any], _: Any) -> None:
    assert shown(cells["product"]) == "['dp', None] True\n" and shown(cells["moved"]) == "True\n"
    first, last = map(float, re.findall(r"\d+\.\d", shown(cells["loop"])))
    assert last < first and float(shown(cells["recorded"])) < 3
    assert "fits: True" in shown(cells["forecast"]) and "optimizer" in shown(cells["forecast"])


def check_cluster(cells: dict[str, Any], _: Any) -> None:
    assert re.findall(r"number (\d) on its host", shown(cells["who"])) == ["0", "1", "0", "1"]
    check_accuracy(cells["result"])


CHECKS = {
    "00_quickstart": check_quickstart,
    "01_ddp": check_ddp,
    "02_parameter_server": check_parameter_server,
    "03_kill_a_rank": check_kill_a_rank,
    "04_watch_it_train": check_watch_it_train,
    "05_stuck_and_why": check_stuck_and_why,
    "06_pause_and_inspect": check_pause_and_inspect,
    "07_one_tensor_many_ranks": check_one_tensor,
    "08_same_notebook_on_a_cluster": check_cluster,
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(sshd.why_none()), reason=sshd.why_none() or "none")
def test_only_the_first_cell_changes_on_hosts_reached_by_ssh(tmp_path: Path) -> None:
    path = next(each for each in NOTEBOOKS if each.stem == "08_same_notebook_on_a_cluster")
    hosts = sshd.SSHHosts(tmp_path)
    try:
        book = cleared(read(path))
        up = code_of(book)[0]
        up.source = up.source.replace("process:2", f"ssh:node[1-2] --opt config={hosts.config}")
        where = nbformat.v4.new_code_cell("%mesh import os; os.path.basename(os.environ['HOME'])", id="where")
        book.cells.insert(book.cells.index(up) + 1, where)
        execute(book)
    finally:
        hosts.close()
    # Each host has a home of its own.
    assert shown(where) == "[ranks 0-1] 'home1'\n[ranks 2-3] 'home2'"
    book.cells.remove(where)
    stored = read(path)
    for each in (book, stored):
        each.cells.remove(code_of(each)[0])
    for number, cell in enumerate(code_of(book), 1):
        cell.execution_count = number
    assert differences(stored, normalized(book)) == []
    check_cluster({cell.id: cell for cell in book.cells}, [])


def test_notebook_stops_at_an_error_of_ranks() -> None:
    cells = ["%mesh up --procs 2", "%%mesh\n1 / rank", "print('never')"]
    spec = {"name": "monarch", "display_name": "Monarch", "language": "python"}
    made = [nbformat.v4.new_code_cell(text) for text in cells]
    book = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": spec})
    with pytest.raises(CellExecutionError, match="rank 0: ZeroDivisionError: division by zero"):
        execute(book)
    assert not book.cells[2].outputs
