"""The notebooks run in the real kernel, show what they promise, and leave nothing behind."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


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


def shown(cell: Any) -> str:
    """Return all text of a cell's outputs."""
    parts: list[str] = []
    for output in cell.outputs:
        if output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "".join(parts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert book.metadata.kernelspec.name == "monarch"
    for cell in book.cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    updates = execute(book)
    cells = {cell.id: cell for cell in book.cells}
    if path.stem == "00_quickstart":
        check_quickstart(cells, updates)
    elif path.stem == "01_ddp":
        check_ddp(cells)
    elif path.stem == "02_parameter_server":
        check_parameter_server(cells)
    elif path.stem == "03_kill_a_rank":
        check_kill_a_rank(cells)


def check_quickstart(cells: dict[str, Any], updates: list[dict[str, Any]]) -> None:
    assert "mesh 'mesh' is up: procs=4" in shown(cells["up"])
    # Equal results once, others side by side, tensors by shape and dtype.
    assert "[ranks 0-3] hello from all of us" in shown(cells["folded"]) and "[ranks 0-3] 4" in shown(cells["folded"])
    assert shown(cells["values"]) == "".join(f"[rank {rank}] {rank * 10}\n" for rank in range(4)).rstrip()
    assert "Tensor float32[2, 3], mean 2" in shown(cells["tensors"])
    assert shown(cells["reduce"]) == "[ranks 0-3] 6.0"
    # Actors, inside and edited while they live.
    assert "[rank 3] 301" in shown(cells["inside"]) and "rank 0: 1001" in shown(cells["call-again"])
    assert re.search(r"4 actors have the new Counter: add changed, reset added", shown(cells["edit"]))
    assert "rank 0: 1003" in shown(cells["edited"])
    # One grouped error; a stopped loop, with all variables kept.
    assert "failed on ranks 2-3" in shown(cells["error"]) and "words[rank]" in shown(cells["error"])
    assert "stopped after 1 s: rank 0: stopped by an interrupt" in shown(cells["stop"])
    counted = re.search(r"\[rank 0\] \(100\.0, (\d+)\)", shown(cells["kept"]))
    assert counted is not None and int(counted[1]) > 1000
    # One figure, updated in place.
    figures = [output for output in cells["plot"].outputs if "image/png" in output.get("data", {})]
    # %mesh up updates its display, too.
    pictures = [each["data"]["image/png"] for each in updates if "image/png" in each["data"]]
    assert len(figures) == 1 and len(pictures) == 25
    assert pictures[-1] == figures[0].data["image/png"] != pictures[0]
    accuracy = re.search(r"test accuracy (\d+\.\d)% on 360 digits", shown(cells["result"]))
    assert accuracy is not None and float(accuracy[1]) > 95


def check_ddp(cells: dict[str, Any]) -> None:
    assert "4 actors of DDPActor, on ranks 0-3" in shown(cells["actor"])
    assert "4 ranks share 1437 pictures" in shown(cells["info"])
    rows = re.findall(r"^ *\d+   (.{30})   (.{30})", shown(cells["step"]) + shown(cells["train"]), re.M)
    losses = [[float(each) for each in row[0].split()] for row in rows]
    norms = [row[1].split() for row in rows]
    # Each rank has its own loss, which falls; the gradients are averaged.
    assert len(rows) == 8 and all(len(set(row)) > 1 for row in losses) and max(losses[-1]) < min(losses[0]) / 3
    assert all(len(set(row)) == 1 for row in norms)
    assert len([output for output in cells["plot"].outputs if "image/png" in output.get("data", {})]) == 1
    assert re.search(r"\[rank 2\] 0\.weight +\(128, 64\) +gradient norm \d", shown(cells["inside"]))
    assert re.fullmatch(r"\[ranks 0-3\] '[0-9a-f]{16}'", shown(cells["equal"]))
    # Training in cells gives the same losses.
    assert shown(cells["compare"]).count("differs from the actor's by 0\n") == 4
    accuracy = re.search(r"test accuracy (\d+\.\d)% on 360 digits", shown(cells["result"]))
    assert accuracy is not None and float(accuracy[1]) > 95


def check_parameter_server(cells: dict[str, Any]) -> None:
    assert "server: 1 actor of ParameterServer, on rank 0" in shown(cells["server"])
    assert "workers: 3 actors of Worker, on ranks 1-3" in shown(cells["workers"])
    assert "ranks 0-2: 38440" in shown(cells["connect"])
    # The best transport within a host, and the reason why no better one.
    assert "local: the owner is another process" in shown(cells["ways"]) and "attach: used" in shown(cells["ways"])
    means = re.findall(r"worker \d: mean loss (\S+) in its first ten steps, (\S+) in its last", shown(cells["train"]))
    assert len(means) == 3 and all(float(last) < float(first) / 5 for first, last in means)
    assert "600 updates" in shown(cells["train"])
    assert len([output for output in cells["plot"].outputs if "image/png" in output.get("data", {})]) == 1
    assert re.search(r"read \d.* GB/s, copy \d.* GB/s.*\n.*counted to \d", shown(cells["busy"]))
    said = shown(cells["wrong"])
    assert "too small: the destination has 1000 bytes" in said and "dropped: the buffer of rank 0 of mesh was" in said
    assert "4 tensors, 115,320 bytes written" in shown(cells["result"])
    accuracy = re.search(r"test accuracy (\d+\.\d)% on 360 digits", shown(cells["result"]))
    assert accuracy is not None and float(accuracy[1]) > 95


def check_kill_a_rank(cells: dict[str, Any]) -> None:
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss (\S+)", shown(cells["peace"]))]
    assert len(losses) == 6 and losses[-1] < losses[0] / 10
    killed = "+0.000 s  rank {} is killed with signal 9, in the middle of step {}"
    in_the_loop = [
        killed.format(2, 50),
        "the call fails: trainers.step() failed: the process of rank 2 of trainers was killed by signal 9 (SIGKILL)",
        "healed: rank 2 is a new process, with the state of another rank",
        "step 50 is done on all ranks",
    ]
    check_order(shown(cells["train"]), in_the_loop)
    assert shown(cells["train"]).endswith("100 steps are done\n")
    whose = ["the same", "the same", "another", "the same"]
    assert shown(cells["pids"]) == "".join(f"rank {rank}: {which} process\n" for rank, which in enumerate(whose))
    assert len([output for output in cells["plot"].outputs if "image/png" in output.get("data", {})]) == 1
    # A repeated step gives the same result.
    assert "differ from those without a kill by 0\n" in shown(cells["compare"])
    for rank, number in ((0, 30), (3, 70)):
        begin = shown(cells["supervise"]).index(killed.format(rank, number))
        died = f"rank {rank} was killed by signal 9 (SIGKILL), in trainers.step()"
        check_order(shown(cells["supervise"])[begin:], [killed.format(rank, number), died, "healed, outside the loop"])
    assert "2 deaths; the losses differ from those without a kill by 0\n" in shown(cells["supervise"])
    accuracy = re.search(r"test accuracy (\d+\.\d)% on 360 digits", shown(cells["result"]))
    assert accuracy is not None and float(accuracy[1]) > 95
    # In cells the error names the rank, and its replacement continues with the others.
    assert re.search(r"rank 1: SupervisionError: .* signal 9 \(SIGKILL\) at cell \[\d+\] line 5", shown(cells["death"]))
    assert "rank 1 of mesh 'mesh': a new process" in shown(cells["heal"])
    assert "copied from rank 0: losses, model, optimizer, x_train, y_train\n" in shown(cells["heal"])
    first = re.fullmatch(r"\[ranks 0-3\] \(5, (\S+)\)", shown(cells["cells"]))
    last = re.fullmatch(r"\[ranks 0-3\] \(10, (\S+)\)", shown(cells["goes-on"]))
    assert first is not None and last is not None and float(last[1]) < float(first[1])


def check_order(text: str, stages: list[str]) -> None:
    """Check that a text reports all stages, in order."""
    places = [text.index(stage) for stage in stages]
    assert places == sorted(places)
    times = [float(when) for when in re.findall(r"^\+(\S+) s  ", text, re.M)[: len(stages)]]
    assert times == sorted(times) and len(times) == len(stages)


def test_notebook_stops_at_an_error_of_ranks() -> None:
    cells = ["%mesh up --procs 2", "%%mesh\n1 / rank", "print('never')"]
    spec = {"name": "monarch", "display_name": "Monarch", "language": "python"}
    made = [nbformat.v4.new_code_cell(text) for text in cells]
    book = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": spec})
    with pytest.raises(CellExecutionError, match="rank 0: ZeroDivisionError: division by zero"):
        execute(book)
    assert not book.cells[2].outputs
