"""Code that an editor such as VS Code runs for itself: for its list of variables, for completions, before it debugs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kernels import Notebook

TYPES = """def _EDITOR_types(names):
    import builtins as _EDITOR_builtins, json as _EDITOR_json
    found = {name: type(globals()[name]).__name__ for name in names if name in globals()}
    return _EDITOR_builtins.print(_EDITOR_json.dumps(found))

_EDITOR_names = %who_ls
_EDITOR_types(_EDITOR_names)

try:
    del _EDITOR_types, _EDITOR_names
except:
    pass
"""
KIND = "application/vnd.editor"
BACKGROUND = f"""def __editor_background__():
    from IPython.display import display
    from threading import Thread

    output = display({{"{KIND}": ""}}, raw=True, display_id=True)

    def main():
        output.update({{"{KIND}.result": EXPRESSION}}, raw=True)

    Thread(target=main, daemon=True).start()


__editor_background__()
del __editor_background__
"""
"""An answer in the place of a display, from a thread that works beside the cells."""


@pytest.fixture(params=["off", "on"])
def book(notebook: Notebook, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """The notebook, with automatic mode off or on."""
    notebook.run(f"%mesh auto {request.param}").ok()
    yield notebook
    notebook.run("%mesh auto off").ok()


def background(book: Notebook, expression: str) -> Any:
    """Evaluate an expression in a thread, and return its value once it is displayed."""
    cell = book.hidden(BACKGROUND.replace("EXPRESSION", expression)).ok()
    result = f"{KIND}.result"
    cell.until(lambda: any(result in bundle for bundle in cell.bundles))
    assert [bundle.keys() for bundle in cell.bundles] == [{result}]
    return cell.bundles[0][result]


def test_list_of_variables_is_that_of_the_notebook(book: Notebook) -> None:
    book.run("%%here\nkept = [1, 2]").ok()
    book.run("%%mesh\nonly_on_ranks = 3").ok()
    cell = book.hidden(TYPES).ok()
    assert cell.shown == "" and cell.stream("stderr") == ""
    types = json.loads(cell.stream())
    assert (types["kept"], types["mesh"]) == ("list", "ProcMesh") and "only_on_ranks" not in types
    values = background(book, "{name: repr(value) for name, value in list(get_ipython().user_ns.items())}")
    assert values["kept"] == "[1, 2]" and values["mesh"] == "<ProcMesh 'mesh' (procs=4)>"


def test_completions_and_help_come_from_a_thread(book: Notebook) -> None:
    book.run("%%mesh\ntopic_of_ranks = 3").ok()
    found = background(book, "get_ipython().kernel.do_complete('%%mesh\\ntopic_of', 15)")
    assert found["matches"] == ["topic_of_ranks"]
    found = background(book, "get_ipython().kernel.do_inspect('%%mesh\\ntopic_of_ranks', 21)")
    assert found["found"] and "int" in found["data"]["text/plain"]


def test_output_of_a_running_call_stays_out_of_hidden_code(notebook: Notebook) -> None:
    code = "import time\nwhile True:\n    print('beside', flush=True)\n    time.sleep(0.01)"
    cell = notebook.run(f"%%mesh --nowait\n{code}").ok()
    cell.until(lambda: "beside" in cell.text)
    before = len(cell.messages)
    assert notebook.hidden("import time\ntime.sleep(0.1)\nprint('own')").ok().text.strip() == "own"
    cell.until(lambda: len(cell.messages) > before)
    notebook.run("%mesh interrupt").ok()
