"""Errors of cells and lines say what to do: where a name is, which one was meant, in one line."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernels import Notebook
from leaks import Kit

pytestmark = pytest.mark.slow

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
KILL = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
ACTORS = """%%mesh spawn trainers
from monarch.actor import Actor, endpoint
class Trainer(Actor):
    @endpoint
    def bad(self):
        return 1 / 0"""


@pytest.fixture
def mortal(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """The notebook, for tests that replace a rank."""
    yield notebook
    notebook.run("%mesh heal").ok()
    leaks.rebase()


def test_newer_version_of_a_pushed_function_is_told_once(notebook: Notebook) -> None:
    notebook.run("def scaled(x):\n    return x * 2\n\nclass Config:\n    size = 1").ok()
    assert notebook.run("%mesh push scaled Config").ok().stream() == ""
    assert notebook.run("# the same, below a comment\ndef scaled(x):\n    return x * 2").ok().stream() == ""
    edited = notebook.run("def scaled(x):\n    return x * 3\n\nclass Config:\n    size = 2").ok().stream()
    kept = "note: the ranks of mesh keep the old {0}; %mesh push {0} copies the new one\n"
    assert edited == kept.format("scaled") + kept.format("Config")
    assert notebook.mesh("(scaled(1), Config.size)").ok().shown == "[ranks 0-3] (2, 1)"
    assert notebook.run("%mesh push scaled Config").ok().stream() == ""
    assert notebook.mesh("(scaled(1), Config.size)").ok().shown == "[ranks 0-3] (3, 2)"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("%%mash\n1", "Cell magic `%%mash` not found; did you mean `%%mesh`?"),
        ("if True:\n    x = %mehs list", "Line magic function `%mehs` not found; did you mean `%mesh`?"),
        ("%mesh['x']", "Line magic function `%mesh['x']` not found; did you mean `mesh['x']`?"),
        ("%mesh[0:2] rank", "Line magic function `%mesh[0:2]` not found; did you mean `%%mesh [0:2]`?"),
        ("%%unlike_any\n1", "Cell magic `%%unlike_any` not found."),
    ],
)
def test_misspelt_magic_names_the_similar_one(notebook: Notebook, code: str, error: str) -> None:
    cell = notebook.run(code)
    assert cell.status == "error" and ESCAPES.sub("", cell.text).strip() == f"UsageError: {error}"


def test_undefined_name_on_ranks_names_push(notebook: Notebook) -> None:
    notebook.run("of_notebook = 5").ok()
    cell = notebook.mesh("of_notebook + 1")
    hint = "'of_notebook' is defined in the notebook, not on the ranks; %mesh push of_notebook copies it"
    assert cell.status == "error" and cell.text.count(hint) == 1
    notebook.run("%mesh push of_notebook").ok()
    assert notebook.mesh("of_notebook + 1").ok().shown == "[ranks 0-3] 6"


@pytest.mark.parametrize("name", ["Out", "__", "_i"])
def test_history_of_the_notebook_is_not_to_be_pushed(notebook: Notebook, name: str) -> None:
    text = notebook.mesh(name).text
    assert f"{name!r} refers to the history of the notebook; a rank keeps only the value of its last cell" in text
    assert "%mesh push" not in text


def test_port_that_all_ranks_take_names_one_for_each(notebook: Notebook, leaks: Kit) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cell = notebook.mesh(f"store = dist.TCPStore('127.0.0.1', {port}, 1, True)")
        assert cell.status == "error" and cell.text.count("each rank runs this cell") == 1
        assert f"such as {port} + rank" in cell.text and "mp.spawn" not in cell.text
        body = "import torch.multiprocessing as mp\nmp.spawn(lambda i: dist.TCPStore('127.0.0.1', {}, 1, True))"
        cell = notebook.mesh(body.format(port), "[0]")
    assert "mp.spawn(train, args=(world_size,)), write train(rank, world_size)" in cell.text
    assert re.search(r"rank 0: ProcessRaisedException: .*:.* torch\S+DistNetworkError: The server socket", cell.text)
    # Its tracker of resources lives as long as the rank.
    leaks.rebase()


def test_undefined_name_in_notebook_names_pull(notebook: Notebook) -> None:
    notebook.mesh("of_ranks = rank", "[0:2]").ok()
    cell = notebook.run("of_ranks + 1")
    assert "ranks 0-1 of mesh 'mesh' define 'of_ranks': copy it with %mesh pull of_ranks --rank 0" in cell.text
    assert "1 of_ranks + 1" in ESCAPES.sub("", cell.text), "the line of the cell"
    assert "mesh" not in notebook.run("of_nobody").text
    notebook.run("%mesh pull of_ranks --rank 1").ok()
    assert notebook.run("of_ranks + 1").ok().shown == "2"


def test_name_lost_with_a_rank_names_heal(mortal: Notebook) -> None:
    mortal.mesh("lost = 7").ok()
    death = mortal.mesh(KILL)
    # The other cell is named, and one advice.
    advice = "%mesh heal replaces rank 1; %%mesh [0,2:4] runs a cell without it"
    assert advice in death.text
    again = mortal.mesh("lost")
    assert advice in again.text and "mesh.run()" not in again.text and "heal_mesh" not in again.text
    mortal.run("%mesh heal --bare").ok()
    cell = mortal.mesh("lost")
    assert "rank 1 was replaced after cell [" in cell.text
    assert "and lost 'lost'; %mesh heal --copy-from 0 copies the variables of rank 0" in cell.text
    assert "copied from rank 0 to rank 1: lost" in mortal.run("%mesh heal --copy-from 0 lost").ok().stream()
    assert mortal.mesh("lost").ok().shown == "[ranks 0-3] 7"
    mortal.run("%mesh restart").ok()
    cleared = re.search(
        r"mesh 'mesh' was restarted after cell \[\d+\], which cleared its variables", mortal.mesh("lost").text
    )
    assert cleared is not None


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("%mesh upp", "unknown command 'upp' after %mesh; did you mean 'up'?"),
        ("%mesh hael", "unknown command 'hael' after %mesh; did you mean 'heal'?"),
        ("%mesh heal 0", "%mesh heal replaces all dead ranks of a mesh: expected its name, got '0'"),
        ("%mesh startt", "unknown command 'startt' after %mesh; %mesh up starts a mesh"),
        ("%mesh up -n 2", "%mesh up: unknown option '-n'; did you mean '--procs'?"),
        ("%mesh up --nnodes=2", "%mesh up: unknown option '--nnodes'; did you mean '--hosts'?"),
        ("%mesh up x --proc 2", "%mesh up: unknown option '--proc'; did you mean '--procs'?"),
        ("%%mesh --nowiat\n1", "unknown option '--nowiat'; did you mean '--nowait'?"),
        ("%%mesh mseh\n1", "no mesh named 'mseh'; running: mesh; actors: trainers; did you mean 'mesh'?"),
        ("%%mesh trainrs[0]\n1", "did you mean 'trainers'?"),
        ("%mesh update trainrs", "no actors 'trainrs'; actors: trainers; did you mean 'trainers'?"),
        ("%mesh pull speling", "no rank has a variable 'speling'; ranks have "),
        ("%mesh pull speling", "did you mean 'spelling'?"),
        ("%mesh push speling_here", "did you mean 'spelling_here'?"),
        ("%%mesh [0:9]\n1", "no ranks 4-8: this mesh has ranks 0 to 3"),
        ("%%mesh [procs=0:9]\n1", "no rank procs=8: this mesh has procs=0 to 3"),
        ("%%mesh [0\n1", "the bracket in '[0' is not closed"),
    ],
)
def test_mistyped_name_is_one_line_with_a_suggestion(notebook: Notebook, code: str, hint: str) -> None:
    notebook.run(ACTORS).ok()
    notebook.mesh("spelling = 1").ok()
    notebook.run("spelling_here = 1").ok()
    cell = notebook.run(code)
    (error,) = cell.contents("error")
    assert hint in error["traceback"][0]
    # One line, and the line as it was typed.
    assert len(error["traceback"]) == 2 and f"line 1: {code.splitlines()[0]}" in error["traceback"][1]
    assert "Error" not in error["traceback"][0] and "Usage" not in error["traceback"][0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dist", "'dist' exists only in %%mesh cells; run 'import torch.distributed as dist' in the notebook"),
        ("world_size", "'world_size' exists only in %%mesh cells; mesh['world_size'] has the value of each rank"),
    ],
)
def test_names_of_cells_are_explained_in_the_notebook(notebook: Notebook, name: str, words: str) -> None:
    assert words in notebook.run(name).text


def test_deleted_variable_of_a_mesh_comes_back(notebook: Notebook) -> None:
    assert "mesh 'mesh' is running" in notebook.run("del mesh\nmesh").text
    assert "its variable was deleted; %mesh use mesh sets it again" in notebook.run("mesh['rank']").text
    notebook.run("%mesh use mesh").ok()
    assert notebook.run("len(mesh)").ok().shown == "4"


def test_variable_on_some_ranks_names_them(notebook: Notebook) -> None:
    notebook.mesh("partly = 1", "[0,2]").ok()
    assert "%mesh pull: ranks 1,3 have no variable 'partly'; ranks 0,2 do" in notebook.run("%mesh pull partly").text


def test_variable_as_an_attribute_says_how_to_read_it(notebook: Notebook) -> None:
    notebook.mesh("everywhere = rank\nif rank == 1: only_here = 3").ok()
    assert (
        "'everywhere' is a variable of all 4 ranks; mesh['everywhere'] has the value"
        in notebook.run("mesh.everywhere").text
    )
    assert (
        "'only_here' is a variable of rank 1; copy it with %mesh pull only_here --rank 1"
        in notebook.run("mesh.only_here").text
    )
    assert "is a variable" not in notebook.run("mesh.nowhere_at_all").text


def test_code_of_ranks_is_not_to_be_pulled(notebook: Notebook) -> None:
    notebook.mesh("def only_code(x): return x\nonly_value = [rank]").ok()
    text = notebook.run("only_code(1)").text
    assert "define 'only_code', which is code: use it in a %%mesh cell, or run its cell here too" in text
    assert "copy it with %mesh pull only_value" in notebook.run("only_value").text


def test_values_of_ranks_say_how_to_compute_with_them(notebook: Notebook) -> None:
    notebook.mesh("each_of_us = float(rank)").ok()
    for code in ("np.mean(values)", "float(values)", "values.mean()", "[np.asarray(each) for each in values]"):
        cell = notebook.run(f"import numpy as np\nvalues = mesh['each_of_us']\n{code}")
        assert cell.status == "error" and ".values()" in cell.text, code
    assert "1.5" in notebook.run("np.mean(values.values())").ok().text


def test_own_name_comes_back_where_it_is_deleted(notebook: Notebook) -> None:
    cell = notebook.mesh("dist = rank = 3\nif True:\n    del dist, rank\ndist.get_rank() == rank\n")
    assert cell.ok().shown == "[ranks 0-3] True"
    # A deletion of something else, or of a local variable, is left alone.
    cell = notebook.mesh("x = [1, 2]\ndef f():\n    dist = 3\n    del dist\n    return x\ndel x[0]\nf()")
    assert cell.ok().shown == "[ranks 0-3] [2]"
    assert "line 3" in notebook.mesh("x = 1\ndel dist, y").text


def test_own_name_deleted_by_a_function_is_back_in_the_next_cell(notebook: Notebook) -> None:
    text = notebook.mesh("def f():\n    global dist\n    del dist\nf()\ndist.get_rank()").text
    assert "'dist' is defined again now; run the failed lines in a new cell" in text
    assert notebook.mesh("dist.is_initialized()").ok()


def test_failed_checkpoint_is_one_line(notebook: Notebook, tmp_path: Path) -> None:
    error = notebook.run(f"%mesh checkpoint --wait {tmp_path}/c nosuch").contents("error")[0]["traceback"]
    assert len(error) == 2 and "%mesh checkpoint: no rank has a variable 'nosuch'" in error[0]


def test_actor_tracebacks_name_cells(notebook: Notebook) -> None:
    number = notebook.run(ACTORS).ok().reply["execution_count"]
    text = notebook.run("trainers.bad.call().get()").text
    assert f"(cell [{number}] line 6, in bad)" in text and f'File "cell [{number}]", line 6, in bad' in text
    assert "ipykernel" not in text


@pytest.mark.parametrize(
    ("body", "line", "source"),
    [
        ("def main():\n    raise ValueError('boom')\nmain()", 2, "raise ValueError('boom')"),
        ("x = 1\ndef main(:", 2, "def main(:"),
    ],
)
def test_failed_script_names_its_own_line(
    notebook: Notebook, tmp_path: Path, body: str, line: int, source: str
) -> None:
    (tmp_path / "prog.py").write_text(body)
    cell = notebook.run(f"%mesh run {tmp_path}/prog.py")
    assert f"\n      prog.py line {line}: {source}" in cell.text
    assert "__import__" not in cell.text and "run_order" not in cell.text


def test_failed_exit_code_names_the_script(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text("import sys\nsys.exit(3)")
    cell = notebook.run(f"%mesh run {tmp_path}/prog.py")
    assert "prog.py exited with code 3" in cell.text and "__import__" not in cell.text


def test_result_timeout_says_where_ranks_are(notebook: Notebook) -> None:
    notebook.mesh("import time\nprint('runs')\ntime.sleep(60)", "[0:2] --nowait --out handle").ok()
    cell = notebook.run("handle.result(1.5)")
    assert cell.reply["ename"] == "CallTimeoutError" and "  ranks 0-1: at cell [" in cell.text
    assert "] line 4" in cell.text
    notebook.run("handle.cancel()").ok()


def test_mesh_that_was_stopped_is_said_to_be_missing(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 1").ok()
    book.run("%mesh down").ok()
    assert "no mesh is running; %mesh up starts one" in book.run("mesh.x").text


def test_unload_ends_meshes_and_load_works_again(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up 2").ok()
    assert "ended mesh mesh" in book.run("%unload_ext monarch_kernel").ok().stream()
    assert "`%mesh` not found" in book.run("%mesh").text
    assert "UsageError" in book.run("%%mesh\n1").text and "mesh 'mesh' define" not in book.run("undefined_name").text
    book.run("%load_ext monarch_kernel").ok()
    assert "mesh 'mesh' is up: procs=1" in book.run("%mesh up 1").ok().text
    assert book.mesh("rank").ok().shown == "[rank 0] 0"


def test_errors_of_slices_name_ranks_of_the_mesh(notebook: Notebook) -> None:
    notebook.run(ACTORS).ok()
    text = notebook.run("trainers.slice(procs=slice(1, 3)).bad.call().get()").text
    assert "trainers[procs=1:3].bad() failed on ranks 1-2" in text and "Remote traceback of rank 1:" in text
    assert "rank 0" not in text


CLASS = """%%mesh spawn teachers
class Teacher(Actor):
    @endpoint
    def use(self, name): return eval(name)
    @endpoint
    def bad(self): return rank
    @endpoint
    def late(self): return defined_later
    @endpoint
    def cells(self): return of_cells
    @endpoint
    def typo(self): return defined_latr"""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "bad",
            "not for actors; monarch.actor.current_rank().rank is the rank of an actor",
        ),
        ("late", "the notebook defined 'defined_later' after the class was sent; run the class cell again"),
        ("cells", "'of_cells' is a variable of %%mesh cells, which actor classes cannot see"),
        ("typo", "the notebook has no 'defined_latr' either; did you mean 'defined_later'?"),
    ],
)
def test_undefined_name_in_an_endpoint_has_a_hint(notebook: Notebook, name: str, hint: str) -> None:
    notebook.run("globals().pop('defined_later', None)").ok()
    notebook.run(CLASS).ok()
    notebook.mesh("of_cells = 1").ok()
    notebook.run("defined_later = 1").ok()
    cell = notebook.run(f"teachers.{name}.call().get()")
    assert cell.status == "error" and cell.text.count(hint) == 1


def test_advice_for_names_of_cells_in_actors_is_right(notebook: Notebook) -> None:
    notebook.run(CLASS).ok()
    for text, expected in (("rank.rank", "[0, 1, 2, 3]"), ("rank.extent.nelements", "[4, 4, 4, 4]")):
        code = f"'__import__(\"monarch.actor\").actor.context().actor_instance.{text}'"
        assert notebook.run(f"teachers.use.call({code}).get().values()").ok().shown == expected


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("teachers[0]", "teachers[0]: a mesh of actors cannot be indexed; teachers.slice(procs=0) selects"),
        ("values['x']", "cannot be indexed by 'x'; give a rank as in [0]"),
        ("mesh['nosuch']", "KeyError: no rank has a variable 'nosuch'"),
    ],
)
def test_wrong_subscript_says_what_to_use_without_our_frames(notebook: Notebook, code: str, text: str) -> None:
    notebook.run(CLASS).ok()
    notebook.run("values = teachers.use.call('1').get()").ok()
    (error,) = notebook.run(code).contents("error")
    assert text in error["traceback"][0] and len(error["traceback"]) == 2
    assert "monarch_kernel" not in "".join(error["traceback"])


def test_missing_variable_is_a_key_error(notebook: Notebook) -> None:
    assert (
        notebook.run("try: mesh['nosuch']\nexcept KeyError as error: print(error)").ok().stream().startswith("no rank")
    )


def test_lost_gpu_names_the_way_to_replace_the_rank(mortal: Notebook) -> None:
    text = "CUDA error: device-side assert triggered\nSearch for cudaErrorAssert"
    cell = mortal.mesh(f"if rank == 1: raise RuntimeError({text!r})")
    assert cell.status == "error"
    hint = "the process of rank 1 can no longer use the GPU; %mesh kill 1 replaces it (its variables are lost)"
    assert cell.text.count(hint) == 1 and "CUDA_LAUNCH_BLOCKING=1" in cell.text
    assert "rank 1" in mortal.run("%mesh kill 1").ok().text
