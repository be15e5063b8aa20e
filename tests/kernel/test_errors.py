"""Errors of cells on ranks: grouped, with rank, line and source; and ranks that die."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from kernels import Cell, Notebook
from leaks import Kit


def failed(cell: Cell) -> str:
    """Return the text of a failed cell, after comparing its reply and its output."""
    assert cell.status == "error"
    (error,) = cell.contents("error")
    assert error["ename"] == cell.reply["ename"] and error["evalue"] == cell.reply["evalue"]
    return "\n".join(error["traceback"])


def test_error_of_some_ranks_is_shown_with_results(notebook: Notebook) -> None:
    cell = notebook.mesh("y = 1\nif rank >= 2:\n    raise KeyError('boom')\ny")
    text = failed(cell)
    assert cell.reply["ename"] == "MeshCellError"
    assert "failed on ranks 2-3" in cell.reply["evalue"]
    assert "ranks 2-3: KeyError: 'boom'" in text and "line 4" in text and "raise KeyError('boom')" in text
    # The results of the others are shown and kept.
    assert "[ranks 0-1] 1" in cell.shown
    assert "[ranks 0-3] 1" in notebook.mesh("y").ok().shown


def test_different_errors_are_grouped(notebook: Notebook) -> None:
    text = failed(notebook.mesh("if rank == 0:\n    raise ValueError('zero')\nif rank > 1:\n    1 / 0"))
    assert "rank 0: ValueError: zero" in text and "ranks 2-3: ZeroDivisionError" in text
    assert "line 3" in text and "line 5" in text


def test_traceback_has_only_user_frames(notebook: Notebook) -> None:
    notebook.mesh("def inner(x):\n    return 1 / x").ok()
    cell = notebook.mesh("def outer():\n    inner(0)\nouter()")
    # The error has the line, and the tracebacks are folded above it.
    assert "ZeroDivisionError: division by zero\n      cell [" in failed(cell)
    assert "<details><summary>traceback of ranks 0-3</summary>" in cell.bundles[-1]["text/html"]
    text = cell.text
    for words in ("in inner", "in outer", "return 1 / x", "inner(0)", "ZeroDivisionError"):
        assert words in text
    for words in ("monarch/", "monarch_kernel", "execute.py", "magics"):
        assert words not in text
    # Equal failures share one traceback.
    assert cell.shown.count("return 1 / x") == 1


def test_traceback_names_the_cell_of_a_pushed_function(notebook: Notebook) -> None:
    number = int(notebook.run("def inverse(n):\n    return 1 / n\nlen(In) - 1").ok().shown)
    notebook.run("%mesh push inverse").ok()
    text = notebook.mesh("inverse(0)").text
    assert re.search(rf'File "cell \[{number}\]", line 2, in inverse\n +return 1 / n\n', text)


def test_mistakes_with_mesh_values_show_no_frame_of_the_package(notebook: Notebook) -> None:
    notebook.run("%%mesh --out r\nrank").ok()
    text = failed(notebook.run("sum(r)"))
    assert "use .values() for the values" in text and "pairs.py" not in text
    for code in ("mesh[0]", "mesh[0] = 1", "mesh.scatter('x', 5)"):
        text = failed(notebook.run(code))
        assert "expected" in text and "variables.py" not in text


def test_error_whose_text_raises_leaves_others_as_they_were(notebook: Notebook) -> None:
    cell = notebook.run("class Bad(Exception):\n    def __str__(self): return 1 / 0\nraise Bad()")
    assert cell.status == "error" and "its message cannot be shown" in cell.text
    assert failed(notebook.run("%mesh dwon")).startswith("unknown command 'dwon'")


def test_awaiting_cell_replies_to_an_error_whose_text_raises(notebook: Notebook) -> None:
    """IPython asks for its text once more, where nothing catches what that raises."""
    bad = "class Bad(Exception):\n    def __str__(self): return 1 / 0"
    cell = notebook.run(f"import asyncio\nawait asyncio.sleep(0)\n{bad}\nraise Bad()")
    assert cell.status == "error" and "its message cannot be shown" in cell.text


def test_traceback_shows_causes(notebook: Notebook) -> None:
    cell = notebook.mesh("try:\n    {}['k']\nexcept KeyError as e:\n    raise RuntimeError('above') from e")
    assert "RuntimeError: above" in failed(cell)
    assert "KeyError: 'k'" in cell.shown and "direct cause" in cell.shown


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x = (", ["SyntaxError", "line 2", "x = ("]),
        ("x = 1\nfor", ["SyntaxError", "line 3", "for"]),
        ("return 1", ["SyntaxError"]),
        ("  x = 1\n y = 2", ["Indentation"]),
        ("raise SystemExit(3)", ["SystemExit: 3"]),
        ("raise StopIteration", ["StopIteration"]),
        ("raise BaseException('base')", ["BaseException: base"]),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", ["E", "line 4"]),
        ("class E(Exception):\n    def __str__(self): raise SystemExit(4)\nraise E", ["E", "SystemExit", "line 4"]),
        ("class E(RuntimeError):\n    def __str__(self): raise KeyboardInterrupt\nraise E", ["E", "line 4"]),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", ["E", "line 4"]),
        ("class R:\n    def __reduce__(self): raise KeyboardInterrupt\nR()", ["KeyboardInterrupt", "line 3"]),
        ("def f(): f()\nf()", ["RecursionError"]),
        ("await nothing", ["NameError", "nothing"]),
        ("batches = iter([])\nnext(batches)", ["StopIteration", "next(batches)"]),
        ("import asyncio\nawait asyncio.sleep(0)\nnext(iter([]))", ["StopIteration", "next(iter([]))"]),
        ("async def f(): next(iter([]))\nawait f()", ["RuntimeError: coroutine raised StopIteration"]),
        ("%time next(iter([]))", ["StopIteration", "next(iter([]))"]),
        ("'\\ud800' + 1", ["TypeError"]),
        ("raise ValueError('\\ud800')", ["ValueError"]),
        ("raise ValueError('x' * 10**7)", ["ValueError"]),
    ],
)
def test_error_of_any_kind_ends_only_the_cell(notebook: Notebook, body: str, words: list[str]) -> None:
    text = failed(notebook.mesh(body))
    for word in words:
        assert word in text
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"


def test_exit_in_pickling_code_ends_no_namespace(notebook: Notebook) -> None:
    notebook.mesh("class R:\n    def __reduce__(self): raise SystemExit(4)\nkept, bad = 1, R()\nbad").ok()
    assert "SystemExit: 4" in notebook.run("mesh['bad']").text
    loads = "class H:\n    def __getstate__(self): return 1\n    def __setstate__(self, state): raise SystemExit(3)\n"
    cell = notebook.run(f"{loads}mesh['h'] = H()")
    assert cell.status == "error" and "SystemExit: 3 (while its arguments were unpickled)" in cell.text
    notebook.mesh("class H:\n    def __setstate__(self, s): raise SystemExit(5)\nh = H(); h.x = 1; h").ok()
    assert "SystemExit: 5" in notebook.run("_mesh.values()").text
    # In the notebook, where IPython takes it for the end of the session.
    cell = notebook.run("class R:\n    def __reduce__(self): raise SystemExit(6)\nmesh['r'] = R()")
    assert "SystemExit: 6" in cell.text and "To exit" not in cell.text
    assert notebook.mesh("kept").ok().shown == "[ranks 0-3] 1"


@pytest.mark.parametrize(
    ("body", "line", "shown", "message"),
    [
        ("x = 1\nprint(x", 2, "    print(x\n         ^", "SyntaxError: '(' was never closed"),
        ("return 1", 1, "    return 1\n    ^", "SyntaxError: 'return' outside function"),
        ("!true \\\n  true\ny = = 3", 3, "    y = = 3\n        ^", "SyntaxError: invalid syntax"),
        ("%%time\n\nx = (", 3, "    x = (\n        ^", "SyntaxError: '(' was never closed"),
        ("if rank:\nx = 1", 2, "    x = 1\n    ^", "IndentationError: expected an indented block"),
        ("!true\nif 1:\n    x = 1\n  y = 2", 4, "    y = 2\n", "IndentationError: unindent does not match any outer"),
        ('x = """y', 1, '    x = """y\n        ^', "SyntaxError: unterminated triple-quoted string literal"),
    ],
)
def test_syntax_error_shows_line_and_caret(notebook: Notebook, body: str, line: int, shown: str, message: str) -> None:
    cell = notebook.mesh(body)
    assert cell.reply["ename"] == message.partition(":")[0]
    text = re.sub(r"\x1b\[[0-9;]*m", "", failed(cell))
    # Below the header.
    assert re.match(rf"\s*Cell In\[\d+\], line {line + 1}\n", text) and shown in text and f"\n{message}" in text
    # Nothing else, and nothing twice.
    assert len(text.strip().splitlines()) == 4 and cell.stream() == "" and cell.bundles == []


@pytest.mark.parametrize("code", ["x = (", "if True:\nx = 1", "x = 1\n  y = 2", "x = '\0'"])
def test_plain_cell_that_cannot_be_compiled_shows_no_frames(notebook: Notebook, code: str) -> None:
    cell = notebook.run(code)
    assert cell.status == "error" and "Error" in cell.text
    assert "interactiveshell" not in cell.text and "compilerop" not in cell.text


def test_later_cells_do_not_run_after_an_error(notebook: Notebook, tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    # Fails once the second one has arrived.
    body = f"%%mesh\nimport os, time\nwhile not os.path.exists({str(sent)!r}): time.sleep(0.01)\n1 / 0"
    cells = [notebook.send(body, stop_on_error=True), notebook.send("after = 1")]
    sent.touch()
    for cell in cells:
        cell.wait()
    assert [cell.status for cell in cells] in (["error", "aborted"], ["error", "error"])
    assert notebook.run("after").status == "error"


def test_nbclient_stops_at_an_error(leaks: Kit, tmp_path: Any) -> None:
    book = nbformat.v4.new_notebook()
    texts = ["%mesh up --procs 2", "%%mesh\nif rank: raise KeyError('boom')", "open('after', 'w')"]
    book.cells = [nbformat.v4.new_code_cell(text) for text in texts]
    with pytest.raises(CellExecutionError, match="boom"):
        NotebookClient(book, kernel_name="monarch", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not (tmp_path / "after").exists()
    (output,) = [each for each in book.cells[1].outputs if each.output_type == "error"]
    assert "rank 1: KeyError: 'boom'" in "\n".join(output.traceback)


@pytest.mark.parametrize("where", ["", "[0,1,3]"])
def test_error_ends_the_cell_while_others_wait(notebook: Notebook, where: str) -> None:
    cell = notebook.mesh("if rank == 1:\n    raise ValueError('bad sample 17')\ndist.barrier()", where)
    text = failed(cell)
    others = "ranks 0,3" if where else "ranks 0,2-3"
    assert f"failed on rank 1; {others} waited for it in a collective" in text
    place = r"cell \[\d+\] line \d: raise ValueError\('bad sample 17'\)"
    assert re.search(rf"rank 1: ValueError: bad sample 17\n      {place}", text)
    assert (
        f"{others}: GroupError: the collective cannot complete because rank 1 failed" in text
        and "gloo" not in cell.text
    )
    # Only the traceback of the cause is shown.
    assert cell.shown.count("Traceback") == 1 and "ValueError: bad sample 17" in cell.shown
    assert notebook.mesh("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").ok().shown == "[ranks 0-3] 4.0"


def test_error_is_shown_while_others_compute(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waits = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    cell = notebook.send(f"%%mesh\nimport os, time\nif rank > 1:\n    raise ValueError('bad')\n{waits}\nrank")
    cell.until(lambda: "bad" in cell.stream("stderr"))
    said = cell.stream("stderr")
    assert not cell.idle and said.count("ValueError: bad") == 1
    assert "failed on ranks 2-3; ranks 0-1 are still running" in said and "raise ValueError('bad')" in said
    go.touch()
    cell.wait()
    assert "ranks 2-3: ValueError: bad" in failed(cell) and "[rank 1] 1" in cell.shown


@pytest.mark.parametrize("end", ["stop", "--timeout 0.2", "--nowait --out handle"])
def test_error_is_not_hidden_by_a_stop(notebook: Notebook, end: str) -> None:
    body = "if rank == 1:\n    raise ValueError('bad')\nimport time; time.sleep(600)"
    cell = notebook.send(f"%%mesh {end if end != 'stop' else ''}\n{body}")
    if end != "--timeout 0.2":
        cell.until(lambda: "bad" in cell.stream("stderr"))
    if end == "stop":
        notebook.interrupt()
    cell.wait()
    assert cell.stream("stderr").count("rank 1: ValueError: bad") == 1 and "[rank" not in cell.reply.get("evalue", "")
    if "nowait" in end:
        assert "ranks 0,2-3: interrupted" in notebook.run("handle.interrupt()").ok().shown
        assert "rank 1: ValueError: bad" in notebook.run("handle.result()").text
    else:
        name = "KeyboardInterrupt" if end == "stop" else "CallTimeoutError"
        assert cell.reply["ename"] == name and "ranks 0,2-3: interrupted" in cell.stream("stderr")
        assert "ValueError: bad" in cell.shown


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os.kill(os.getpid(), 9)", ["SIGKILL"]),
        ("import ctypes; ctypes.string_at(0)", ["SIGSEGV"]),
        ("os._exit(7)", ["7"]),
    ],
)
def test_dead_rank_is_named(own: Callable[..., Notebook], death: str, words: list[str]) -> None:
    book = own()
    book.run("%mesh up --procs 3").ok()
    book.mesh("kept = rank").ok()
    cell = book.mesh(f"import os\nprint('last words')\nif rank == 1:\n    {death}\nrank")
    text = failed(cell)
    for word in ["rank 1", *words]:
        assert word in text
    assert "last words" in cell.stream() and "[rank 2] 2" in cell.shown
    # The next cell reports it too, with a hint.
    again = failed(book.mesh("kept"))
    for word in ["rank 1", "%mesh heal", *words]:
        assert word in again
    # The others can go on.
    assert "[rank 2] 2" in book.mesh("kept", "[0,2]").ok().shown
    assert words[0] in book.run("%mesh").ok().shown
    book.run("%mesh restart").ok()
    assert book.mesh("rank * 2").ok().shown.splitlines() == [f"[rank {rank}] {rank * 2}" for rank in range(3)]
    assert "failed on all 3 ranks" in failed(book.mesh("kept"))


@pytest.mark.parametrize(
    ("body", "how", "line", "source"),
    [
        ("import os\nx = 1\nif rank == 2:\n    os._exit(3)", "exited with code 3", 4, "os._exit(3)"),
        ("def f(i):\n    import os\n    if (rank, i) == (2, 5): os.kill(os.getpid(), 9)\nfor i in range(9):\n"
         "    x = i\n    f(i)", "was killed by signal 9 (SIGKILL)", 6, "f(i)"),
        ("import ctypes\ntry:\n    if rank == 2:\n        ctypes.string_at(0)\nfinally:\n    pass",
         "was killed by signal 11 (SIGSEGV)", 4, "ctypes.string_at(0)"),
    ],
)  # fmt: skip
def test_death_names_the_line(notebook: Notebook, leaks: Kit, body: str, how: str, line: int, source: str) -> None:
    cell = notebook.mesh(body)
    assert cell.reply["ename"] == "MeshCellError"
    where = rf"\n      cell \[\d+\] line {line + 1}: {re.escape(source)}\n"
    assert re.search(rf"rank 2: SupervisionError: the process {re.escape(how)}{where}", cell.text)
    assert "ranks 0-1,3 are alive" in cell.text
    # Finished cells leave no line notes behind.
    notebook.run("%mesh restart").ok()
    leaks.rebase()


def test_line_notes_change_nothing(notebook: Notebook) -> None:
    body = (
        "from __future__ import annotations\n'''doc'''\nasync def f(x): return x\nseen = []\nfor i in range(3):\n"
        "    if i == 1: continue\n    seen.append(await f(i))\nelse:\n    seen.append('end')\nmatch seen:\n"
        "    case [0, *_]:\n        kind = 'zero'\nwith open('/dev/null') as file:\n    kind += '!'\nseen, kind"
    )
    assert notebook.mesh(body).ok().shown == "[ranks 0-3] ([0, 2, 'end'], 'zero!')"
    assert "] line 4: 1 / 0" in notebook.mesh("x = 1\nif x:\n    1 / 0").text


def test_cells_are_numbered_like_the_notebook(notebook: Notebook) -> None:
    cells = [notebook.mesh("1 / 0"), notebook.mesh("while True: pass", "--timeout 0.1"), notebook.run("%mesh int('x')")]
    for cell in cells:
        assert set(re.findall(r"cell \[(\d+)\]", cell.text)) == {str(cell.reply["execution_count"])}
