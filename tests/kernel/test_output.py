"""Output of ranks: folded, shown in its cell, and never lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels import ALL, Notebook
from leaks import Kit
from monarch_kernel.output.streams import LINES_SHOWN


def test_equal_lines_are_folded(notebook: Notebook) -> None:
    cells = (notebook.mesh("print('same')\nprint('mine', rank)").ok() for _ in range(5))
    for cell in cells:
        assert cell.said("stdout") == {"same": ALL, **{f"mine {rank}": {rank} for rank in range(4)}}
        if cell.stream().count("same") == 1:
            break
    else:
        pytest.fail("five times a rank was late")


def test_stderr_stays_stderr(notebook: Notebook) -> None:
    cell = notebook.mesh("import sys\nprint('bad', file=sys.stderr)\nprint('good')").ok()
    assert cell.said("stderr") == {"bad": ALL} and cell.said("stdout") == {"good": ALL}


def test_output_of_c_code_and_programs_is_shown(notebook: Notebook) -> None:
    body = "import os, subprocess\nos.write(1, b'by descriptor\\n')\nsubprocess.run(['echo', 'by a program'])\nNone"
    cell = notebook.mesh(body).ok()
    assert list(cell.said().items()) == [("by descriptor", ALL), ("by a program", ALL)]


def test_replaced_descriptor_is_told_and_prints_arrive(notebook: Notebook) -> None:
    lost = "saved = os.dup(1); null = os.open(os.devnull, os.O_WRONLY); os.dup2(null, 1); os.close(null)"
    cell = notebook.mesh(f"import os, sys\n{lost}\nprint('lost')", "[0]").ok()
    note = "note: file descriptor 1 of this rank now points to /dev/null, which has this cell's output since then"
    assert cell.stream().count(f"{note}; later cells show what Python prints") == 1
    assert "lost" not in cell.stream()
    assert notebook.mesh("print('said')", "[0]").ok().stream() == "[rank 0] said\n"
    cell = notebook.mesh("os.dup2(saved, 1); os.close(saved); sys.stdout.close(); print('said')", "[0]").ok()
    assert cell.stream() == "[rank 0] said\n"
    assert notebook.mesh("os.close(1); print('said'); os.system('echo of sh')", "[0]").ok().said().keys() >= {"said"}
    assert notebook.mesh("_ = os.system('echo of sh')", "[0]").ok().stream() == "[rank 0] of sh\n"


def test_error_of_a_thread_has_frames_of_the_program_alone(notebook: Notebook) -> None:
    body = "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start(); thread.join()"
    text = notebook.mesh(body).ok().stream("stderr")
    assert "ZeroDivisionError" in text and "in <lambda>" in text and "run_of_call" not in text


def test_slow_import_for_a_value_is_shown_meanwhile(notebook: Notebook, tmp_path: Path) -> None:
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\nclass Value: ...\n"
    (tmp_path / "slow_to_import.py").write_text(waits)
    path = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    notebook.run(path).ok()
    made = "module = types.ModuleType('slow_to_import')\nclass Value: ...\nValue.__module__ = 'slow_to_import'\n"
    kept = "module.Value = Value\nsys.modules['slow_to_import'] = module\nvalue = Value()"
    notebook.mesh(f"import sys, types\n{made}{kept}", "[0]").ok()
    cell = notebook.send("%mesh pull value --rank 0")

    def lines() -> list[str | None]:
        displays = cell.contents("display_data", "update_display_data")
        return [each["data"].get("text/plain") for each in displays]

    told = r"importing slow_to_import to read values of ranks \(\d+ s\)"
    cell.until(lambda: any(re.fullmatch(told, str(line)) for line in lines()), "the import")
    (tmp_path / "go").touch()
    cell.wait().ok()
    assert lines()[-1] is None, "removed"
    notebook.run("del value, sys.modules['slow_to_import'], sys.path[0]").ok()
    notebook.mesh("del value, Value, module, sys.modules['slow_to_import']", "[0]").ok()


def test_output_arrives_while_the_cell_runs(notebook: Notebook, tmp_path: object) -> None:
    cell = notebook.send(
        f"%%mesh\nimport os, time\nprint('begun')\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)"
    )
    cell.until(lambda: cell.said() == {"begun": ALL})
    assert not cell.idle
    open(f"{tmp_path}/go", "w").close()
    cell.wait().ok()


def test_late_output_of_a_thread_goes_to_its_cell(notebook: Notebook, tmp_path: object, leaks: Kit) -> None:
    late = notebook.mesh(
        f"import os, threading, time\ndef wait(name):\n    while not os.path.exists('{tmp_path}/' + name):\n"
        f"        time.sleep(0.01)\n"
        f"def work():\n    wait('one'); print('late while a cell runs')\n"
        f"    wait('two'); print('late while none runs')\n"
        f"threading.Thread(target=work).start()\nprint('begun')"
    ).ok()
    assert late.said() == {"begun": ALL}
    other = notebook.send("%%mesh\nprint('other begins')\nwait('three')\nprint('other ends')")
    other.until(lambda: other.said() == {"other begins": ALL})
    (tmp_path / "one").touch()  # type: ignore[operator]
    late.until(lambda: late.said().get("late while a cell runs") == ALL)
    (tmp_path / "three").touch()  # type: ignore[operator]
    other.wait().ok()
    assert other.said() == {"other begins": ALL, "other ends": ALL}
    plain = notebook.run("1").ok()
    (tmp_path / "two").touch()  # type: ignore[operator]
    late.until(lambda: late.said().get("late while none runs") == ALL)
    assert "late" not in plain.stream()


def test_lines_of_a_thread_never_go_to_the_cell_that_runs(notebook: Notebook) -> None:
    """The receiving thread looks for output while the line is written."""
    first = notebook.mesh(
        "import sys, threading, time\nusual = sys.getswitchinterval()\nsys.setswitchinterval(1e-6)\n"
        "go = threading.Event()\ndef talk():\n    go.wait()\n"
        "    for n in range(600):\n        print('line', n)\n        time.sleep(0.0005)\n"
        "talker = threading.Thread(target=talk)\ntalker.start()"
    ).ok()
    second = notebook.mesh("go.set()\nwhile talker.is_alive(): sum(range(1000))\nsys.setswitchinterval(usual)").ok()
    first.until(lambda: first.said().get("line 599") == ALL)
    assert "line" not in second.stream()
    said = first.said()
    assert [n for n in range(600) if said.get(f"line {n}") != ALL] == []


def test_output_of_nested_threads_goes_to_its_cell(notebook: Notebook) -> None:
    cell = notebook.mesh(
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "def deep(): print('deep')\ndef first():\n    t = threading.Thread(target=deep); t.start(); t.join()\n"
        "t = threading.Thread(target=first); t.start(); t.join()\n"
        "with ThreadPoolExecutor(1) as pool: pool.submit(print, 'pooled').result()"
    ).ok()
    assert list(cell.said().items()) == [("deep", ALL), ("pooled", ALL)]


def test_empty_log_says_so(notebook: Notebook) -> None:
    silent = notebook.mesh("quiet = 1").ok().reply["execution_count"]
    assert notebook.run(f"%mesh log --cell {silent}").ok().stream("stdout") == (
        f"ranks have printed nothing in cell [{silent}]\n"
    )
    spoken = notebook.mesh("if rank == 1: print('here')").ok().reply["execution_count"]
    text = notebook.run(f"%mesh log --cell {spoken} --rank 2").ok().stream("stdout")
    assert text == f"rank 2 has printed nothing in cell [{spoken}]\n"
    text = notebook.run(f"%mesh log --cell {spoken} --rank 2-3,0").ok().stream("stdout")
    assert text == f"ranks 0,2-3 have printed nothing in cell [{spoken}]\n"
    assert notebook.run(f"%mesh log --cell {spoken} --rank 0,1").ok().stream("stdout") == "[rank 1] here\n"
    assert notebook.run(f"%mesh log mesh --cell {spoken} --rank 0,1").ok().stream("stdout") == "[rank 1] here\n"
    wrong = notebook.run("%mesh log --rank 1,x")
    assert wrong.status == "error" and "%mesh log: --rank: invalid ranks '1,x'; write them like 0-3,7" in wrong.text


def test_long_output_is_kept_and_shown_in_part(notebook: Notebook) -> None:
    cell = notebook.mesh("for i in range(26_000): print('many', rank, i)").ok()
    number = cell.reply["execution_count"]
    head, _, tail = cell.stream().partition(f"… more lines of this cell: %mesh log --cell {number} shows them")
    assert head.count("\n") == LINES_SHOWN
    # Each rank shows its first and last lines, whichever is faster, with a count of the rest.
    firsts, count, lasts = re.split(r"… not shown here: ([\d,]+) lines \([\d,]+ characters\) of this cell; .*\n", tail)
    shown, last = (re.findall(r"\[rank \d\] many (\d \d+)\n", each) for each in (head + firsts, lasts))
    assert len(shown) + len(last) + int(count.replace(",", "")) == 104_000
    assert all(f"{rank} 9" in shown and f"{rank} 25999" in last for rank in range(4))
    log = notebook.run("%mesh log --tail 200000").ok().stream()
    kept = re.findall(r"\[rank (\d)\] many (\d) (\d+)\n", log)
    assert all(rank == same for rank, same, _ in kept)
    for rank in range(4):
        # All lines, in order.
        assert [int(i) for each, _, i in kept if int(each) == rank] == list(range(26_000))


def test_unfinished_line_is_shown_at_the_end(notebook: Notebook) -> None:
    assert notebook.mesh("print('no end', end='')").ok().said() == {"no end": ALL}


def test_progress_bar_shows_its_last_state(notebook: Notebook) -> None:
    cell = notebook.mesh("for i in range(101): print(f'\\r{i} %', end='')\nprint()").ok()
    assert cell.said() == {"100 %": ALL}


def test_rank_streams_behave_like_text_streams(notebook: Notebook) -> None:
    body = (
        "import sys, io, contextlib\n"
        "sys.stdout.write('a\\n'); sys.stdout.writelines(['b\\n', 'c\\n']); sys.stdout.buffer.write(b'd\\n')\n"
        "sys.stdout.flush()\n"
        "with contextlib.redirect_stdout(io.StringIO()) as own: print('hidden')\n"
        "assert own.getvalue() == 'hidden\\n'\n"
        "sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.isatty(), isinstance(sys.stdout, io.TextIOBase)"
    )
    cell = notebook.mesh(body).ok()
    assert cell.shown == "[ranks 0-3] (1, 'utf-8', False, True)"
    assert list(cell.said().items()) == [(word, ALL) for word in "abcd"]


def test_output_goes_on_after_an_error_in_the_reports_of_a_rank(notebook: Notebook, tmp_path: Path) -> None:
    notebook.mesh(
        "import monarch._telemetry.sampler as sampler, os, time\nwhole = sampler.place_of\n"
        "def broken(frame):\n    sampler.place_of = whole\n    raise KeyError('once')\nsampler.place_of = broken"
    ).ok()
    body = f"print('begins')\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\nprint('goes on')\n"
    cell = notebook.send(f"%%mesh\n{body}while not os.path.exists('{tmp_path}/end'): time.sleep(0.01)")
    cell.until(lambda: cell.stream().count("KeyError: 'once'"))
    (tmp_path / "go").touch()
    cell.until(lambda: cell.said().get("goes on") == ALL)
    assert not cell.idle
    (tmp_path / "end").touch()
    cell.wait().ok()


def test_torch_warns_of_connections_that_user_code_cuts(notebook: Notebook) -> None:
    body = (
        "import socket\nfrom torch.distributed import TCPStore\n"
        "server = TCPStore('127.0.0.1', 0, 1, True, wait_for_workers=False)\n"
        "client = TCPStore('127.0.0.1', server.port, 1, False)\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        one = socket.socket(fileno=os.dup(int(name)))\n"
        "        if one.getpeername()[1:2] == (server.port,): one.shutdown(socket.SHUT_RD)\n"
        "    except OSError: pass\n"
        "client.get('never')"
    )
    cell = notebook.mesh(f"import os\n{body}", "[0]")
    assert "DistNetworkError" in cell.text
    assert "TCPStore.cpp" in cell.text and "C++ frames omitted" in cell.text, cell.text


def test_classes_of_cells_are_placed_in_their_cells(notebook: Notebook) -> None:
    """In what ranks print, and for errors that nobody has read: ipykernel's temporary file says nothing to a person."""
    code = """class Warns(Actor):
    @endpoint
    def warn(self):
        import warnings
        warnings.warn("here")
    @endpoint
    def fail(self):
        raise ValueError("there")"""
    notebook.mesh(code, "spawn warners").ok()
    text = notebook.run("warners.warn.call().get()").ok().text
    found = re.search(r"\] (cell \[\d+\]) line 6: UserWarning: here", text)
    assert found is not None and "ipykernel_" not in text, text
    left = notebook.run("warners.fail.call(); await warners.warn.call(); None")
    left.until(lambda: "future was dropped" in left.text)
    assert f"at {found[1]} line 9, in fail: ValueError: there" in left.text, left.text
