"""Variables of ranks by name in the notebook: mesh["x"], scatter and gather."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernels import Notebook

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def defined(notebook: Notebook) -> None:
    notebook.mesh("x = rank * 10\nif rank == 2: only = 'here'").ok()


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("list(mesh['x'].values())", "[0, 10, 20, 30]"),
        ("mesh['y'] = 'all'; list(mesh['y'].values())", "['all', 'all', 'all', 'all']"),
        ("mesh['z'] = mesh['x']; list(mesh['z'].values())", "[0, 10, 20, 30]"),
        ("list(mesh.slice(procs=slice(1, 3))['x'].values())", "[10, 20]"),
        (
            "mesh.slice(procs=2)['x'] = 5; list(mesh['x'].values()), mesh.gather('x')",
            "([0, 10, 5, 30], [0, 10, 5, 30])",
        ),
        (
            "mesh.scatter('part', list(range(10))); list(mesh['part'].values()), mesh.gather('part')",
            "([[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])",
        ),
        (
            "mesh.scatter('part', (1, 2)); mesh.gather('part'), list(mesh['part'].values())",
            "((1, 2), [(1,), (2,), (), ()])",
        ),
        (
            "import numpy as np\na = np.arange(40.0).reshape(10, 4)\nmesh.scatter('part', a)\n"
            "[p.shape for p in mesh['part'].values()], bool((mesh.gather('part') == a).all())",
            "([(3, 4), (3, 4), (2, 4), (2, 4)], True)",
        ),
        (
            "import torch\nt = torch.arange(12.0).reshape(6, 2)\nmesh.scatter('part', t)\n"
            "torch.equal(mesh.gather('part'), t), [p.untyped_storage().nbytes() for p in mesh['part'].values()]",
            "(True, [16, 16, 8, 8])",
        ),
        pytest.param(
            "import pandas as pd\nf = pd.DataFrame({'a': range(5)})\nmesh.scatter('part', f)\n"
            "mesh.gather('part').equals(f), [len(p) for p in mesh['part'].values()]",
            "(True, [2, 1, 1, 1])",
            marks=pytest.mark.skipif(find_spec("pandas") is None, reason="needs pandas"),
        ),
    ],
)  # fmt: skip
def test_variables_are_read_and_set(notebook: Notebook, code: str, shown: str) -> None:
    assert notebook.run(code).ok().shown == shown


@pytest.mark.parametrize(
    ("body", "code", "shown"),
    [
        ("v = np.ma.masked_array([1, 2], mask=[0, rank == 1])", "mesh.gather('v').mask[2:4].tolist()", "[False, True]"),
        ("v = torch.tensor([2**53 + 1] if rank else [0.5])", "{}, v[1].item() == 2**53 + 1", "(list, True)"),
        ("v = np.array([2**53 + 1] if rank else [0.5])", "{}, int(v[1][0]) == 2**53 + 1", "(list, True)"),
        ("v = np.array(['a' * (rank + 1)])", "{}, v[3]", "(numpy.ndarray, np.str_('aaaa'))"),
        ("v = torch.Size([1, 2])", "{}, v[0]", "(list, torch.Size([1, 2]))"),
        ("from time import gmtime\nv = gmtime(0)", "{}, len(v)", "(list, 4)"),
        ("v = torch.ones(2, rank + 1)", "{}, v[3].shape", "(list, torch.Size([2, 4]))"),
        ("v = np.ones((2, rank + 1))", "{}, v[3].shape", "(list, (2, 4))"),
        ("v = torch.eye(2).to_sparse()", "{}, len(v)", "(list, 4)"),
        ("v = torch.ones(rank, 2)", "{}, v.shape", "(torch.Tensor, torch.Size([6, 2]))"),
        (
            "from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh\n"
            "v = distribute_tensor(torch.arange(8.0), init_device_mesh('cpu', (4,)), [Shard(0)])",
            "{}, [type(each).__name__ for each in v][0]",
            "(list, 'DTensor')",
        ),
    ],
)  # fmt: skip
def test_gather_joins_only_what_loses_nothing(notebook: Notebook, body: str, code: str, shown: str) -> None:
    notebook.mesh(f"import numpy as np\n{body}").ok()
    cell = notebook.run("import torch\nv = mesh.gather('v')\n" + code.format("type(v)")).ok()
    assert cell.shown.splitlines()[-1] == shown


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (
            "import torch; mesh.scatter('s', torch.eye(4).to_sparse())",
            "TypeError",
            "dense tensor, array or DataFrame, got Tensor (sparse_coo)",
        ),
        ("import torch; mesh.scatter('s', torch.tensor(5))", "TypeError", "got Tensor"),
        ("mesh['class'] = 3", "TypeError", "expected the name of a variable"),
        ("mesh['nosuch']", "KeyError", "no rank has a variable 'nosuch'"),
        ("mesh['only']", "KeyError", "ranks 0-1,3 have no variable 'only'; rank 2 does"),
        ("mesh[0]", "TypeError", "mesh[0]: expected the name of a variable; mesh.slice(...) selects ranks"),
        ("mesh['a b'] = 1", "TypeError", "expected the name of a variable"),
        ("list(mesh)", "TypeError", "not iterable"),
        ("mesh.scatter('s', {1, 2})", "TypeError", "scatter: expected a list"),
        ("mesh.scatter('s', 7)", "TypeError", "got int"),
        ("import threading; mesh['l'] = threading.Lock()", "Usage", "mesh['l']: "),
        ("mesh['w'] = mesh.slice(procs=slice(0, 2))['x']", "ValueError", "expected a ValueMesh of 4 values, got 2"),
        (
            "from monarch.actor import this_host\np = this_host().spawn_procs({'a': 1}, name='plain')\ntry: p['x']\n"
            "finally: p.stop().get()",
            "MonarchError",
            "plain['x']: the ranks of plain run no cells",
        ),
    ],
)
def test_mistakes_are_explained(notebook: Notebook, code: str, error: str, text: str) -> None:
    cell = notebook.run(code)
    assert cell.reply["ename"] == error and text in cell.reply["evalue"]


def test_read_of_a_variable_on_a_rank_is_explained(notebook: Notebook) -> None:
    notebook.mesh("here = rank").ok()
    text = "works only in the notebook, and this code runs on a rank: use here directly, or run it in a cell"
    for code in ("%mesh mesh['here']", "%%mesh\nmesh.gather('here')", "%%mesh\nmesh['here'] = 1"):
        assert text in notebook.run(code).text
    assert notebook.run("mesh['here']").ok().shown.splitlines()[1:] == [f"rank {rank}: {rank}" for rank in range(4)]


def test_values_that_cannot_be_pickled_are_named_in_one_line(notebook: Notebook) -> None:
    notebook.mesh("made = (x for x in range(3))\nheld = {'it': [made]}").ok()
    for code, where in {
        "%mesh pull made": "%mesh pull: made",
        "mesh['made']": "mesh['made']",
        "%mesh pull made held": "%mesh pull: made",
        "%mesh pull held": "%mesh pull: held['it'][0]",
        "mesh['held']": "mesh['held']['it'][0]",
    }.items():
        (error,) = notebook.run(code).contents("error")
        assert error["evalue"] == f"{where}: cannot pickle 'generator' object"


def test_tensors_pulled_together_share_their_memory(notebook: Notebook) -> None:
    notebook.mesh("whole = torch.arange(4.) + rank; view = whole[1:]").ok()
    notebook.run("%mesh pull whole view --rank 1").ok()
    assert notebook.run("view[0] = 9; whole.tolist()").ok().shown == "[1.0, 9.0, 3.0, 4.0]"
    notebook.run("%mesh pull whole view").ok()
    assert notebook.run("view[2][0] = 9; whole[2].tolist(), whole[3].tolist()").ok().shown == (
        "([2.0, 9.0, 4.0, 5.0], [3.0, 4.0, 5.0, 6.0])"
    )
    assert "no rank has a variable 'nosuch'" in notebook.run("%mesh pull whole nosuch").text


def test_name_of_the_mesh_set_by_the_user_is_not_reported(notebook: Notebook) -> None:
    notebook.run("mesh['point'] = 7").ok()
    assert notebook.mesh("point").ok().text.strip() == "[ranks 0-3] 7"
    notebook.mesh("del point").ok()


def test_interrupt_while_a_value_is_pickled_is_named(notebook: Notebook) -> None:
    notebook.mesh("class R:\n    def __reduce__(self): raise KeyboardInterrupt\nbad = R()").ok()
    cell = notebook.run("mesh['bad']")
    assert "mesh['bad']: KeyboardInterrupt" in cell.text and "KeyError" not in cell.text


def test_variable_of_an_ended_mesh_says_so(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    book.run("old, part = mesh, mesh.slice(procs=1)").ok()
    book.run("%mesh restart").ok()
    for code in ("old['rank']", "part['rank']", "old.scatter('a', [1, 2])"):
        cell = book.run(code)
        assert cell.reply["ename"] == "StoppedError" and "this mesh has ended; %mesh lists the" in cell.text
    assert book.run("mesh.gather('rank')").ok().shown == "[0, 1]"


def test_calls_of_one_kind_are_named_once(own: Callable[..., Notebook], tmp_path: Path) -> None:
    book, gate = own(), tmp_path / "gate"
    book.run("%mesh up --procs 2").ok()
    body = "class W(Actor):\n    @endpoint\n    def f(self, gate):\n        import os\n"
    book.run(f"%%mesh spawn w\n{body}        while not os.path.exists(gate): pass").ok()
    book.run(f"calls = [w.f.call({str(gate)!r}) for _ in range(3)]").ok()
    cell = book.send("len([each.get() for each in [w.f.call('/')]])")
    cell.until(lambda: "waiting for" in cell.stream())
    gate.touch()
    assert cell.wait().ok().stream().count("waiting for w.f(), called in cell") == 1
