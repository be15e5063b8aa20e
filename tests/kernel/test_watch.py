"""``%mesh watch``: the first step, tensor and rank that differ among ranks, or get NaN."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kernels import ALL, Notebook
from leaks import wait_until

TRAINS = """import time
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
opt = torch.optim.{optimizer}(model.parameters(), lr=0.01)
def train(steps, bad=None, nan=None, pause=0.0):
    for i in range(1, steps + 1):
        opt.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            if i == bad and rank == 2:
                model[2].weight.grad[1, 3] += 1e-3
            if i == nan and rank == 1:
                model[0].bias.grad[0] = float('nan')
        opt.step()
        time.sleep(pause)"""


@pytest.fixture(autouse=True)
def nothing_is_left(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%mesh resume").ok()
    notebook.run("%mesh watch --off")
    notebook.run("%mesh interrupt")


def trains(notebook: Notebook, optimizer: str = "SGD") -> None:
    notebook.mesh(TRAINS.format(optimizer=optimizer)).ok()


def listed(notebook: Notebook) -> str:
    return notebook.run("%mesh watch").ok().stream("stdout")


def test_first_step_tensor_and_rank_that_differ_are_named_once(notebook: Notebook) -> None:
    trains(notebook)
    text = notebook.run("%mesh watch model --every 5").ok().stream("stdout")
    assert text == "watching model on ranks 0-3 of mesh 'mesh', every 5 steps: Sequential with 212 parameters\n"
    assert "diverged" not in notebook.run("mesh.events().kinds()").ok().shown
    cell = notebook.mesh("train(40, bad=25)\ntime.sleep(0.5)").ok()
    finding = (
        "the parameter 2.weight on rank 2 differs from ranks 0-1,3 after step 25 (step 20 was fine); "
        "1 parameter and 1 gradient differ"
    )
    assert cell.stream("stderr") == f"model: {finding}\n"
    assert wait_until(lambda: "compared 8 steps, the last was step 40" in listed(notebook))
    assert finding in listed(notebook)
    event = notebook.run("e = mesh.events().of_kind('diverged')[-1].event; (e.name, e.ranks, e.step, e.reason)").ok()
    assert event.shown == repr(("model", (2,), 25, finding)) or finding in event.shown.replace("\n", "")
    notebook.run("%mesh watch model --off").ok()
    assert notebook.mesh("train(10)\ntime.sleep(0.2)").ok().stream("stderr") == ""
    assert "nothing is being watched" in listed(notebook)


def test_equal_ranks_raise_no_alarm(notebook: Notebook) -> None:
    notebook.mesh("import random").ok()
    trains(notebook, "Adam")
    # Seeds that differ from the beginning are on purpose.
    notebook.mesh("random.seed(rank)").ok()
    notebook.run("%mesh watch model --every 2").ok()
    cell = notebook.mesh("train(60)\nrandom.random()\ntime.sleep(0.3)").ok()
    assert cell.stream() == ""
    assert wait_until(lambda: "compared 30 steps, the last was step 60" in listed(notebook))


def test_nan_is_named(notebook: Notebook) -> None:
    trains(notebook)
    notebook.run("%mesh watch opt --every 1").ok()
    cell = notebook.mesh("train(20, nan=7)\ntime.sleep(0.5)").ok()
    assert re.fullmatch(
        r"opt: the parameter param_groups\[0\]\['params'\]\[1\] has NaN on rank 1 after step 7 "
        r"\(and 1 other tensor\) \(step 6 was fine\)\n",
        cell.stream("stderr"),
    )


@pytest.mark.slow
def test_nan_is_named_though_the_other_ranks_stop(notebook: Notebook) -> None:
    trains(notebook)
    notebook.run("%mesh watch model --every 1").ok()
    cell = notebook.mesh("if rank == 1:\n    train(3, nan=2)\ntime.sleep(4)").ok()
    assert "has NaN on rank 1 after step 2" in cell.stream("stderr")


def test_running_ranks_are_watched_where_optimizers_count_steps(notebook: Notebook) -> None:
    trains(notebook, "Adam")
    handle = notebook.mesh("print('runs')\ntrain(100000, pause=0.01)", "--nowait --out h").ok()
    handle.until(lambda: handle.said().get("runs") == ALL)
    assert "watching model on ranks 0-3" in notebook.run("%mesh watch model --every 3").ok().stream()
    assert wait_until(lambda: re.search(r"compared [1-9]\d* steps, the last was step [1-9]", listed(notebook)))
    assert "differs" not in listed(notebook)
    notebook.run("h.cancel()")


def test_running_ranks_whose_optimizer_counts_not_are_explained(notebook: Notebook) -> None:
    trains(notebook)
    handle = notebook.mesh("print('runs')\ntrain(100000, pause=0.01)", "--nowait --out h").ok()
    handle.until(lambda: handle.said().get("runs") == ALL)
    cell = notebook.run("%mesh watch model --every 3\nimport time; time.sleep(1)").ok()
    assert "the watch of model has ended: SGD does not count its steps" in cell.text
    notebook.run("h.cancel()")


def test_wrong_arguments_are_explained(notebook: Notebook) -> None:
    trains(notebook)
    assert "ranks 0-3: NameError: name 'nothing'" in notebook.run("%mesh watch nothing").text
    assert "expected a torch module or optimizer, got function" in notebook.run("%mesh watch train").text
    assert "expected at least 1 step, got 0" in notebook.run("%mesh watch model --every 0").text
    assert "model is not watched on mesh 'mesh'" in notebook.run("%mesh watch model --off").text


def test_code_on_ranks_begins_a_watch(notebook: Notebook) -> None:
    trains(notebook)
    body = "from monarch.debug import watch\nwatch(model, every=2, name='net')\ntrain(10, bad={})\ntime.sleep(0.5)"
    assert "net: the parameter 2.weight on rank 2 differs" in notebook.mesh(body.format(6)).ok().stream("stderr")
    notebook.mesh("for p in model.parameters(): p.data.fill_(0.1)").ok()
    assert "after step 8 (step 6 was fine)" in notebook.mesh(body.format(8)).ok().stream("stderr")


def test_watch_does_not_keep_a_model_in_memory(notebook: Notebook) -> None:
    trains(notebook)
    notebook.run("%mesh watch model").ok()
    body = "import gc, weakref\nalive = weakref.ref(model)\ndel model, opt\ngc.collect()\nalive() is None"
    assert notebook.mesh(body).ok().shown == "[ranks 0-3] True"
