"""Variables of ranks by name in the notebook: mesh["x"], scatter and gather."""

from __future__ import annotations

from importlib.util import find_spec

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
        ("mesh.slice(procs=2)['x'] = 5; list(mesh['x'].values())", "[0, 10, 5, 30]"),
        ("mesh.gather('x')", "[0, 10, 5, 30]"),
        (
            "mesh.scatter('part', list(range(10))); list(mesh['part'].values())",
            "[[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]",
        ),
        ("mesh.gather('part') == list(range(10))", "True"),
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
    ("code", "error", "text"),
    [
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
