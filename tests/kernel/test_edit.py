"""Actors from cells, and edit and continue: a class cell that runs again, an edited file."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from kernels import Notebook

TRAINER = """
from monarch.actor import Actor, endpoint
class Trainer(Actor):
    '''Counts.'''
    rate = 1
    def __init__(self, start=0):
        self.total = start
    @endpoint
    def step(self, by):
        self.total += by * self.rate
        return self.total
"""


@pytest.fixture
def trainers(notebook: Notebook) -> str:
    """Spawn a mesh of actors in a cell; return its name."""
    notebook.run(f"%%mesh spawn trainers(start=1) --new\n{TRAINER}", cell_id="trainer").ok()
    return "trainers"


def totals(notebook: Notebook, by: int = 1) -> str:
    return notebook.run(f"list(trainers.step.call({by}).get().values())").ok().shown


def test_spawn_makes_actors_of_the_class(notebook: Notebook, trainers: str) -> None:
    assert totals(notebook) == "[2, 2, 2, 2]"
    assert notebook.mesh("self.total, rank", "trainers[0,2]").ok().shown == "[rank 0] (2, 0)\n[rank 2] (2, 2)"
    notebook.mesh("self.total = 10 * rank", "trainers").ok()
    assert totals(notebook) == "[1, 11, 21, 31]"
    assert "actors 'trainers': Trainer on 4 ranks" in notebook.run("%mesh").ok().text


def test_class_cell_run_again_updates_live_actors(notebook: Notebook, trainers: str) -> None:
    totals(notebook)
    new = TRAINER.replace("rate = 1", "rate = 100") + "    @endpoint\n    def reset(self): self.total = 0\n"
    said = notebook.run(f"%%mesh spawn trainers(start=1)\n{new}", cell_id="trainer").ok().stream()
    assert re.search(r"updated 4 actors of trainers to the new Trainer: rate changed, reset added \(\d+ ms\)", said)
    assert totals(notebook) == "[102, 102, 102, 102]"
    notebook.run("trainers.reset.call().get()").ok()
    # In a plain cell too, and back: removed members stay removed.
    said = notebook.run(TRAINER, cell_id="trainer").ok().stream()
    assert "rate changed, reset removed" in said
    assert totals(notebook) == "[1, 1, 1, 1]"
    assert "has no endpoint 'reset'" in notebook.run("trainers.reset.call().get()").text
    assert "nothing changed" in notebook.run(TRAINER, cell_id="trainer").ok().stream()


def test_views_check_new_endpoint_arguments(notebook: Notebook, trainers: str) -> None:
    notebook.run("view = trainers.slice(procs=1); view.step.call_one(1).get()").ok()
    notebook.run(TRAINER.replace("step(self, by)", "step(self, by, times)"), cell_id="trainer").ok()
    assert "missing a required argument: 'times'" in notebook.run("view.step.call_one(1).get()").text
    notebook.run("view.step.call_one(1, times=2).get()").ok()


def test_class_of_another_cell_is_not_offered(notebook: Notebook, trainers: str) -> None:
    other = TRAINER.replace("rate = 1", "rate = 1000")
    said = notebook.run(other, cell_id="other").ok().stream()
    assert "keep class Trainer of their own cell; %mesh update trainers switches them to this one" in said
    assert totals(notebook) == "[2, 2, 2, 2]"
    assert "rate changed" in notebook.run("%mesh update trainers").ok().stream()
    assert totals(notebook) == "[1002, 1002, 1002, 1002]"


def test_class_update_applies_to_all_ranks_or_none(notebook: Notebook, trainers: str) -> None:
    bad = TRAINER + "    def __reduce__(self): pass\nclass Fails(type(Trainer)):\n    pass\n"
    # The base class refuses the new version on rank 2.
    bad = bad.replace("class Trainer(Actor)", "class Refuses:\n"
        "    def __init_subclass__(cls):\n"
        "        import monarch.actor\n"
        "        if globals().get('rank') == 2 or __import__('sys').modules['__main__'].__dict__.get('rank') == 2:\n"
        "            raise ValueError('rank 2 refuses')\n"
        "class Trainer(Refuses, Actor)").replace("rate = 1", "rate = 5")  # fmt: skip
    said = notebook.run(bad, cell_id="trainer").ok().stream("stderr")
    assert "all actors of trainers keep their version of Trainer" in said
    assert "rank 2" in said and "rank 2 refuses" in said
    assert totals(notebook) == "[2, 2, 2, 2]"


def test_class_update_refuses_unfitting_state(notebook: Notebook, trainers: str) -> None:
    said = notebook.run(TRAINER.replace("(Actor)", "(Actor, dict)"), cell_id="trainer").ok().stream("stderr")
    assert "does not fit the new class" in said and "ranks 0-3" in said
    assert totals(notebook) == "[2, 2, 2, 2]"


def test_busy_actors_update_after_their_message(notebook: Notebook, trainers: str, tmp_path: Path) -> None:
    waits = TRAINER + (
        "    @endpoint\n    def wait(self, path):\n        import os, time\n"
        "        while not os.path.exists(path): time.sleep(0.01)\n        return self.rate\n"
    )
    notebook.run(waits, cell_id="trainer").ok()
    notebook.run(f"before = trainers.wait.call('{tmp_path}/go')").ok()
    said = notebook.run(waits.replace("rate = 1", "rate = 7"), cell_id="trainer").ok().stream()
    assert "busy actors switch after their current message" in said
    notebook.run(f"after = trainers.wait.call('{tmp_path}/go')").ok()
    (tmp_path / "go").touch()
    assert (
        notebook.run("[*before.get().values()], [*after.get().values()]").ok().shown == "([1, 1, 1, 1], [7, 7, 7, 7])"
    )


def test_sync_actor_becomes_async(notebook: Notebook, trainers: str) -> None:
    new = TRAINER + "    @endpoint\n    async def later(self):\n        import asyncio\n" \
        "        await asyncio.sleep(0)\n        return self.total\n"  # fmt: skip
    notebook.run(new, cell_id="trainer").ok()
    assert totals(notebook) == "[2, 2, 2, 2]"
    assert notebook.run("list(trainers.later.call().get().values())").ok().shown == "[2, 2, 2, 2]"
    inside = "import asyncio\nawait asyncio.sleep(0)\nself.total"
    assert notebook.mesh(inside, "trainers").ok().shown == "[ranks 0-3] 2"


def test_spawn_works_on_a_slice(notebook: Notebook) -> None:
    few = TRAINER.replace("Trainer", "Few")
    assert (
        "2 actors of Few, on ranks 0,2" in notebook.run(f"%%mesh spawn few --on mesh[::2] --new\n{few}").ok().stream()
    )
    assert notebook.mesh("rank", "few").ok().shown == "[rank 0] 0\n[rank 2] 2"
    assert "evenly spaced ranks" in notebook.run(f"%%mesh spawn odd --on mesh[0,1,3]\n{few}").text


@pytest.mark.parametrize(
    ("line", "body", "words"),
    [
        ("spawn", TRAINER, "no mesh named 'spawn'"),
        ("spawn 3x", TRAINER, "invalid name '3x' for actors"),
        ("spawn x(", TRAINER, "cannot parse 'spawn x('"),
        ("spawn x(1, 2)", TRAINER, "too many positional arguments"),
        ("spawn x(nix)", TRAINER, "name 'nix' is not defined"),
        ("spawn x --on nix", TRAINER, "no mesh named 'nix'"),
        ("spawn x", "y = 1", "the cell defines no actor class"),
        ("spawn x", "1 / 0", "division by zero"),
        ("spawn x", TRAINER.replace("self.total = start", "1 / 0"), "x.__init__() failed on all 4 ranks"),
    ],
)
def test_spawn_error_names_the_problem(notebook: Notebook, line: str, body: str, words: str) -> None:
    assert words in notebook.run(f"%%mesh {line}\n{body}").text
    assert notebook.run("'x' in globals()").ok().shown == "False"


def test_spawn_refuses_a_name_of_another_class(notebook: Notebook, trainers: str) -> None:
    other = TRAINER.replace("Trainer", "Other")
    assert "of another class (Trainer)" in notebook.run(f"%%mesh spawn trainers\n{other}").text
    assert totals(notebook) == "[2, 2, 2, 2]"


MODULE = """
from monarch.actor import Actor, endpoint
LIMIT = 1
def helper():
    return 'first'
class Gen(Actor):
    def __init__(self):
        self.n = 0
    @endpoint
    def step(self):
        self.n += LIMIT
        return self.n, helper()
"""


@pytest.fixture
def module(notebook: Notebook, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A module imported by the notebook and the ranks, with actors of its class."""
    name = f"edited_{abs(hash(request.node.name)) % 10**8}"
    file = tmp_path / f"{name}.py"
    file.write_text(MODULE)
    notebook.run(
        f"import sys; sys.path.insert(0, '{tmp_path}')\nimport {name} as edited\nfrom {name} import helper"
    ).ok()
    notebook.mesh(f"import sys; sys.path.insert(0, '{tmp_path}')\nfrom {name} import helper").ok()
    notebook.run(
        "gens = get_ipython().magics_manager.registry['MeshMagics'].meshes.get(None).procs.spawn('gens', edited.Gen)"
    ).ok()
    return file


def test_reload_updates_notebook_ranks_and_actors(notebook: Notebook, module: Path) -> None:
    assert notebook.run("list(gens.step.call().get().values())[:1]").ok().shown == "[(1, 'first')]"
    module.write_text(MODULE.replace("LIMIT = 1", "LIMIT = 10").replace("first", "second"))
    said = notebook.run(f"%mesh reload {module.stem}").ok().stream()
    assert f"{module.stem} was reloaded in the notebook and" in said
    assert "updated 4 actors of gens to the new Gen" in said
    assert notebook.run("list(gens.step.call().get().values())[:1]").ok().shown == "[(11, 'second')]"
    assert notebook.run("helper()").ok().shown == "'second'"
    assert notebook.mesh("helper()").ok().shown == "[ranks 0-3] 'second'"


@pytest.mark.parametrize("bad", ["x x", "1 / 0", "import __main__\nif __main__.__dict__.get('rank') == 2: 1 / 0"])
def test_reload_everywhere_or_nowhere(notebook: Notebook, module: Path, bad: str) -> None:
    module.write_text(MODULE.replace("first", "second") + bad)
    text = notebook.run(f"%mesh reload {module.stem}").text
    assert "SyntaxError" in text or "invalid syntax" in text or "division by zero" in text
    assert notebook.run("list(gens.step.call().get().values())[:1]").ok().shown == "[(1, 'first')]"
    assert notebook.run("helper(), edited.helper()").ok().shown == "('first', 'first')"
    assert notebook.mesh("helper()").ok().shown == "[ranks 0-3] 'first'"


@pytest.mark.parametrize("name", ["no_such_module", "sys", ""])
def test_reload_error_names_the_problem(notebook: Notebook, name: str) -> None:
    assert "%mesh reload" in notebook.run(f"%mesh reload {name}").text


def test_cells_do_not_inherit_future_imports(notebook: Notebook) -> None:
    body = textwrap.dedent("""
        def f(x: int): pass
        f.__annotations__["x"]
    """)
    assert notebook.mesh(body).ok().shown == "[ranks 0-3] <class 'int'>"
