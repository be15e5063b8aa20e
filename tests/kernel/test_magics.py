"""IPython's magics and shell commands in ``%%mesh`` cells."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import ALL, Notebook
from leaks import Kit
from monarch._notebook.magics.installs import pip_command, pip_line

WALL = r"CPU time: [\d.]+ \S+, wall time: [\d.]+ \S+"
LOOP = r"[\d.]+ \S+ ± [\d.]+ \S+ per loop \(mean ± std. dev. of 2 runs, 5 loops each\)"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("!echo shell-$((40+2))", "shell-42"),
        ("word = 'brace'\n!echo $word {word.upper()}", "brace BRACE"),
        ("!echo $HOME | awk '{print $1}' | wc -l", "1"),
        ("!echo out; echo err >&2", "err"),
        ("%env A_NAME=a value\nimport os; print(os.environ['A_NAME'])", "a value"),
        ("%cd /\nimport os; print(os.getcwd())", "/"),
        ("%%bash -s first\necho from $0 $1", "from bash first"),
        ("%%script python3\nprint(6 * 7)", "42"),
        ("%%python\nimport os; print('of', os.environ['RANK'] != '')", "of True"),
        ("%prun -l 3 sorted(range(9))", "{built-in method builtins.sorted}"),
        ("%%prun -s cumulative\ndef slow(): return 1\nslow()", "function calls in"),
        ("torch.nn.Bil*?", "torch.nn.Bilinear"),
        ("sorte*?", "sorted"),
        ("no_name_*?", "no name matches 'no_name_*'"),
        ("len?", "len(obj, /)"),
        ("?len", "len(obj, /)"),
        ("nothing_here?", "Object `nothing_here` not found."),
        ("ls -d /", "/"),
    ],
)
def test_magic_prints_on_all_ranks(notebook: Notebook, body: str, said: str) -> None:
    assert ALL in [ranks for text, ranks in notebook.mesh(body).ok().said().items() if said in text]


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("files = !printf 'a\\nb\\n'\nfiles, files.s", "(['a', 'b'], 'a b')"),
        ("!exit 3\n_exit_code", "3"),
        ("!kill -9 $$\n_exit_code", "-9"),
        ("here = %env USER_OF_NO_ONE=1\nhere", None),
        ("%cd -q /\n%pwd", "'/'"),
        ("%system echo a", "['a']"),
        ("%time 5 * 5", "25"),
        ("%%time\nx = 3\nx * 2", "6"),
        ("%%time\nimport asyncio\nawait asyncio.sleep(0, result=8)", "8"),
        ("t = %timeit -o -q -n 5 -r 2 pass\nt.loops, len(t.all_runs)", "(5, 2)"),
        ("%%capture cap\nprint('hidden')\n!echo alsohidden\n7", None),
        ("cap.stdout, cap.outputs[0]['text/plain']", "('hidden\\nalsohidden\\n', '7')"),
        ("pwd = 'a variable'", None),
        ("pwd", "'a variable'"),
        ("'get_ipython' in globals(), 'IPython' in __import__('sys').modules", "(True, False)"),
        ("import builtins; hasattr(builtins, 'get_ipython')", "False"),
        ("def get_ipython(): return None", None),
        ("!true\n_exit_code", "0"),
    ],
)
def test_magic_has_a_value(notebook: Notebook, body: str, shown: str | None) -> None:
    cell = notebook.mesh(body).ok()
    assert cell.shown == (f"[ranks 0-3] {shown}" if shown is not None else "")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("%time sum(range(1000))", WALL),
        ("%%time\npass", WALL),
        ("%timeit -n 5 -r 2 pass", LOOP),
        ("%%timeit -n 5 -r 2 x = 1\nx + 1", LOOP),
    ],
)
def test_times_are_those_of_each_rank(notebook: Notebook, body: str, text: str) -> None:
    said = notebook.mesh(body).ok().said()
    assert set().union(*said.values()) == ALL and all(re.fullmatch(text, each) for each in said)


def test_capture_shows_again(notebook: Notebook) -> None:
    assert notebook.mesh("%%capture seen\nprint('printed')\ndisplay(5)").ok().stream() == ""
    cell = notebook.mesh("seen.show()").ok()
    assert cell.said() == {"printed": ALL} and cell.shown == "[ranks 0-3] 5"


def test_capture_around_mesh_takes_all_output(notebook: Notebook) -> None:
    body = "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndisplay('live')\nrank > 9"
    cell = notebook.run(f"%%capture cap\n%%mesh\n{body}").ok()
    assert cell.stream() == "" and cell.bundles == []
    # More than two displays where a busy machine keeps a rank from showing its own in time.
    shown = notebook.run("'out' in cap.stdout, 'err' in cap.stdout, len(cap.outputs) >= 2").ok().shown
    assert shown == "(True, False, True)"
    again = notebook.run("cap.show()").ok()
    assert again.said("stdout") == {"out": ALL} and again.said("stderr") == {"err": ALL}
    assert "'live'" in again.shown and "[ranks 0-3] False" in again.shown
    assert notebook.mesh("print('seen')").ok().said() == {"seen": ALL}


def test_time_around_mesh_times_the_notebook(notebook: Notebook) -> None:
    cell = notebook.run("%%time\n%%mesh\nrank > 9").ok()
    assert "Wall time" in cell.stream() and cell.shown == "[ranks 0-3] False"


@pytest.mark.parametrize(
    ("body", "line", "source"),
    [
        ("!echo a \\\n   b\nx = 1\n1 / 0", 4, "1 / 0"),
        ("\n\n%env A=1\n1 / 0", 4, "1 / 0"),
        ("%%time\n\n%env A=1\n1 / 0", 4, "1 / 0"),
        ("%%capture\n%%time\n1 / 0", 3, "1 / 0"),
        ("def f():\n    !true\n    1 / 0\nf()", 3, "1 / 0"),
        ("x = 1\n%cd /nowhere/at/all", 2, "%cd /nowhere/at/all"),
        ("x = 1\n%timeit -n1 -r1 int('x')", 2, "%timeit -n1 -r1 int('x')"),
    ],
)
def test_errors_have_the_lines_as_typed(notebook: Notebook, body: str, line: int, source: str) -> None:
    cell = notebook.mesh(body)
    assert cell.status == "error"
    assert re.search(rf"\n      cell \[\d+\] line {line + 1}: {re.escape(source)}", cell.reply["evalue"])
    assert "get_ipython()" not in cell.text and "magics/" not in cell.text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("x = 1\n%zork -f f f()", "line 3: %zork is not available on ranks"),
        ("%timeti f()", "line 2: %timeti is not available on ranks; did you mean %timeit?"),
        ("%%bahs\nls", "line 2: %%bahs is not available on ranks; did you mean %%bash?"),
        ("%%time\n\n%zork x", "line 4: %zork is not available on ranks"),
        ("%mesh list", "line 2: %mesh runs in the notebook, not on ranks; put it in a cell of its own"),
        ("%%mesh\n1", "line 2: %%mesh runs in the notebook, not on ranks; put it in a cell of its own"),
    ],
)
def test_magics_that_ranks_lack_are_refused(notebook: Notebook, body: str, text: str) -> None:
    cell = notebook.mesh(f"{body}")
    assert cell.reply["ename"] == "HeaderError" and cell.reply["evalue"].endswith(text)
    assert cell.stream() == "" and cell.bundles == []


def test_background_command_is_refused(notebook: Notebook) -> None:
    cell = notebook.mesh("!sleep 1 &")
    assert "UsageError: !: background commands are not supported" in cell.reply["evalue"]


def test_plain_code_arrives_as_typed(notebook: Notebook) -> None:
    body = "\n\nx = 'a\\\nb'  # %time !ls\ndef g():\n    return '''\n%env A=1\n'''\n"
    notebook.mesh(body).ok()
    assert notebook.mesh("import linecache; ''.join(linecache.getlines(g.__code__.co_filename))").ok().shown == (
        # With a line for the header.
        f"[ranks 0-3] {chr(10) + body!r}"
    )
    assert "\n%env A=1\n" in notebook.mesh("print(g())\ng??").ok().stream().replace("[ranks 0-3] ", "")


def test_who_lists_the_variables_of_cells(notebook: Notebook) -> None:
    notebook.mesh("only_mine = torch.ones(2, 3)").ok()
    listed = notebook.mesh("%who").ok().stream()
    assert "only_mine" in listed and "get_ipython" not in listed and "rank\t" not in listed
    assert re.search(r"only_mine\s+Tensor\s+shape \(2, 3\)", notebook.mesh("%whos").ok().stream())


def test_magics_work_inside_an_actor(notebook: Notebook) -> None:
    body = "from monarch.actor import Actor\nclass Holder(Actor):\n    def __init__(self): self.n = 3"
    notebook.run(f"%%mesh spawn holders\n{body}").ok()
    assert notebook.run("%%mesh holders\n!echo n-{self.n}").ok().said() == {"n-3": ALL}
    assert notebook.run("%%mesh holders\n%%time\nself.n = 4\nself.n").ok().shown == "[ranks 0-3] 4"
    assert notebook.run("%%mesh holders\n%timeit -n 5 -r 2 self.n").ok().said()
    notebook.run("holders.stop().get()").ok()


def test_command_prints_while_it_runs(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    program = f"import os, time\nprint('begun')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('done')"
    (tmp_path / "program.py").write_text(program)
    cell = notebook.send(f"%%mesh\n!python3 {tmp_path / 'program.py'}")
    cell.until(lambda: cell.said().get("begun") == ALL)
    assert "done" not in cell.said()
    go.touch()
    assert cell.wait().ok().said() == {"begun": ALL, "done": ALL}


def running(marker: str) -> list[int]:
    """Return the processes with a marker in their command line."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "body",
    [
        "!sleep 77123",
        "x = !sleep 77123",
        "!trap '' INT TERM; sleep 77123 & sleep 77123",
        "!trap 'exit 0' INT; (trap '' INT; setsid sleep 77123 & setsid -f sleep 77123); wait; sleep 77123",
        "%%bash\nsleep 77123 &\nwait",
    ],
)
def test_stop_ends_a_command_with_its_children(notebook: Notebook, body: str) -> None:
    cell = notebook.send(f"%%mesh\n{body}")
    cell.until(lambda: len(running("77123")) >= len(ALL) * body.count("sleep"))
    notebook.interrupt()
    assert cell.wait().reply["ename"] == "KeyboardInterrupt" and "interrupted" in cell.stream()
    assert running("77123") == []
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"


def test_stop_while_a_command_starts_leaves_no_process(notebook: Notebook) -> None:
    for attempt in range(8):
        begin = f"import time; time.sleep({attempt} * 0.004)"
        cell = notebook.send(f"%%mesh\n{begin}\nfor _ in range(9999):\n    !sleep 0.077124")
        cell.until(lambda: len(running("0.077124")) > 0)
        notebook.interrupt()
        assert cell.wait().reply["ename"] == "KeyboardInterrupt"
        assert running("0.077124") == []


def wheel(folder: Path, version: str) -> Path:
    """Make a wheel with one module."""
    path = folder / f"tiny_of_ours-{version}-py3-none-any.whl"
    info = f"tiny_of_ours-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny_of_ours.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-of-ours\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        names = ("tiny_of_ours.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")
        file.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    return path


@pytest.mark.slow
def test_pip_runs_once_per_host(notebook: Notebook, tmp_path: Path, leaks: Kit) -> None:
    target = tmp_path / "site"
    install = "%pip install --disable-pip-version-check --no-index --no-deps --upgrade --target {} {}"
    path = f"import sys; sys.path.insert(0, {str(target)!r})"
    said = notebook.mesh(f"{path}\n{install.format(target, wheel(tmp_path, '1.0'))}\n_exit_code").ok().said()
    installed = [ranks for text, ranks in said.items() if "Successfully installed" in text]
    assert len(installed) == 1 and len(installed[0]) == 1 and not any("imported" in text for text in said)
    assert notebook.mesh("import tiny_of_ours; tiny_of_ours.version").ok().shown == "[ranks 0-3] '1.0'"
    said = notebook.mesh(install.format(target, wheel(tmp_path, "2.0"))).ok().said()
    restart = "tiny_of_ours: already imported on this rank; %mesh restart loads the installed version"
    assert said[restart] == ALL
    # The same line runs again in a later cell.
    again = notebook.mesh(install.format(target, tmp_path / "tiny_of_ours-2.0-py3-none-any.whl")).ok().said()
    assert any("Successfully installed" in text for text in again)
    assert notebook.mesh("%pip install --no-index nothing-of-this-name\n_exit_code").ok().shown == "[ranks 0-3] 1"
    # The record of installs stays until the session ends.
    leaks.rebase()


def test_pip_as_a_shell_command_runs_once_per_host(notebook: Notebook, tmp_path: Path, leaks: Kit) -> None:
    install = f"!pip install --no-index --no-deps --target {tmp_path / 'site'} {wheel(tmp_path, '3.0')}"
    said = notebook.mesh(f"{install}\n_exit_code").ok().said()
    for text in ("Successfully installed tiny-of-ours-3.0", "pip runs once per host, in the environment of its ranks"):
        assert len(said[text]) == 1
    leaks.rebase()


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("pip install x", "install x"),
        ("pip3 install 'torch>=2' -q", "install 'torch>=2' -q"),
        ("python -m pip uninstall -y x", "uninstall -y x"),
        (f"{sys.executable} -m pip install x", "install x"),
        ("/other/python -m pip install x", ""),
        ("pip list", ""),
        ("pip install x > log", ""),
        ("pip install x && y", ""),
        ("pip install $x", ""),
        ("pip install 'x", ""),
        ("", ""),
    ],
)
def test_only_a_plain_pip_command_is_run_as_the_magic(command: str, line: str) -> None:
    assert pip_line(command) == line


def test_only_a_pipe_of_pip_runs_in_a_shell() -> None:
    assert pip_command("list | head -3")[1:] == ["-c", f"{sys.executable} -m pip list | head -3"]
    for line in ("install 'a|b'", "install torch>=2", "list"):
        assert pip_command(line)[:3] == [sys.executable, "-m", "pip"]


def test_waiting_for_a_person_is_an_error(notebook: Notebook) -> None:
    for body, kind, text in (
        ("input('name? ')", "EOFError", "input() needs a terminal, and a rank has none"),
        ("import getpass; getpass.getpass()", "EOFError", "getpass.getpass() needs a terminal, and a rank has none"),
        ("import pdb; pdb.pm()", "RuntimeError", "pdb.pm() needs a terminal"),
        ("import pdb\npdb.run('1')", "RuntimeError", "a debugger needs a terminal"),
    ):
        cell = notebook.mesh(body)
        assert f"{kind}: {text}" in cell.reply["evalue"] and "%mesh " in cell.reply["evalue"]
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"


@pytest.mark.slow
def test_new_ranks_have_folder_and_environment(own: Callable[..., Notebook], tmp_path: Path) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    book.mesh(f"%cd {tmp_path}\n%env OF_CELL=5\nlost = 1\ndef f():\n    !echo in-{{rank}}\n    1 / 0").ok()
    book.mesh("%%time\ndef timed(): return 'timed'").ok()
    book.mesh("import os; os._exit(3) if rank == 1 else None")
    book.run("%mesh heal").ok()
    cell = book.mesh("import os\nos.getcwd(), os.environ['OF_CELL'], timed()").ok()
    assert cell.shown == f"[ranks 0-1] ('{tmp_path}', '5', 'timed')"
    cell = book.mesh("f()", "[1]")
    assert cell.said() == {"in-1": {1}} and "    !echo in-{rank}" not in cell.reply["evalue"]
    assert "line 7, in f\n    1 / 0" in cell.shown


@pytest.mark.parametrize(
    ("magic", "mime"),
    [("html", "text/html"), ("latex", "text/latex"), ("markdown", "text/markdown"), ("svg", "text/html")],
)
def test_magics_show_their_body_in_a_form(notebook: Notebook, magic: str, mime: str) -> None:
    cell = notebook.mesh(f"%%{magic}\n<b>$x$ {{y}}</b>").ok()
    assert any("<b>$x$ {y}</b>" in str(each.get(mime, "")) for each in cell.bundles), cell.bundles


def test_wrong_options_of_prun_are_named(notebook: Notebook) -> None:
    assert "%prun: -s: expected a key of pstats such as" in notebook.mesh("%prun -s zork 1").text
    assert "%prun: -l: expected a number, got 'x'" in notebook.mesh("%prun -l x 1").text


@pytest.mark.parametrize(
    ("cell", "line"), [("x = 1\n\n\n%mesh 1 / 0", 4), ("for i in [0]:\n    v = %mesh 1 / 0", 2), ("%mesh 1 / 0", 1)]
)
def test_error_of_a_line_on_the_ranks_has_its_line(notebook: Notebook, cell: str, line: int) -> None:
    failed = notebook.run(cell)
    assert re.search(rf"ZeroDivisionError: division by zero\n      cell \[\d+\] line {line}: 1 / 0", failed.text)


def test_error_of_timed_code_is_that_of_the_code(notebook: Notebook) -> None:
    assert "ranks 0-3: ValueError: invalid literal" in notebook.mesh("%timeit -n1 -r1 int('x')").text
    assert "UsageError: %timeit: unknown option -x" in notebook.mesh("%timeit -x 1").text


IN_A_FORK = """
import os
r, w = os.pipe()
if not os.fork():
    try:
        get_ipython().run_line_magic("mesh", "rank")
    except BaseException as error:
        os.write(w, f"{type(error).__name__}: {error}".encode())
    os._exit(0)
os.wait()
print(os.read(r, 1000).decode())
os.close(r), os.close(w)
"""


def test_magics_are_refused_in_a_fork_of_the_kernel(notebook: Notebook) -> None:
    said = notebook.run(IN_A_FORK).ok().stream()
    assert (
        said == "HeaderError: %mesh and %%mesh work in the process of the kernel only, and this one is a fork of it\n"
    )
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"
