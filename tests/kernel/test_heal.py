"""``%mesh heal`` replaces dead ranks, with the definitions of cells."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kernels import Notebook
from leaks import Kit
from monarch_kernel.source.cell import CellSource
from monarch_kernel.source.definitions import Definitions, definitions_of

KILL = "import os, signal\nif rank in {ranks}: os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def mortal(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """The notebook, for tests that replace ranks."""
    yield notebook
    leaks.rebase()


def test_definitions_of_a_cell_are_extracted() -> None:
    source = (
        '"""What it does."""\n'
        "import os; x = 1\n"
        "from math import (\n    pi,\n    tau,\n)\n"
        "@decorated\n@twice\ndef f(a):\n    return a + x\n"
        "for i in range(3): print(i)\n"
        "class C:\n    y = 2\n"
        "if x:\n    import json\n"
        "import a; import b\n"
    )
    kept = definitions_of(source).split("\n")
    assert kept[1] == "import os" and kept[2:6] == ["from math import (", "    pi,", "    tau,", ")"]
    # Each keeps its line, so that tracebacks match.
    assert kept[6:10] == ["@decorated", "@twice", "def f(a):", "    return a + x"] and kept[10] == ""
    assert kept[11:13] == ["class C:", "    y = 2"] and kept[13:15] == ["", ""] and kept[15] == "import a; import b"
    assert definitions_of("x = 1\ny = 2") == "" == definitions_of("def f(:")


def plain(text: str) -> CellSource:
    """Return a cell without magics."""
    return CellSource(text, text, text)


def test_definitions_include_folder_and_environment() -> None:
    call = "get_ipython().run_line_magic({!r}, 'x')"
    source = "\n".join(
        [call.format("cd"), call.format("env"), call.format("who"), "f('cd')", "get_ipython().system('x')"]
    )
    assert definitions_of(source) == "\n".join([call.format("cd"), call.format("env")])


def test_definitions_belong_to_their_ranks() -> None:
    definitions = Definitions()
    definitions.record("cell [1]", plain("import os"), [0, 1, 2])
    definitions.record("cell [2]", plain("def f(): return 1"), [1])
    definitions.record("cell [3]", plain("x = 1"), [0, 1, 2])
    assert [each.name for each in definitions.of(1)] == ["cell [1]", "cell [2]"]
    assert [each.name for each in definitions.of(0)] == ["cell [1]"]
    # A cell that runs again takes its new place.
    definitions.record("cell [4]", plain("import os"), [0, 1, 2])
    assert [each.name for each in definitions.of(1)] == ["cell [2]", "cell [4]"] and len(definitions) == 2


@pytest.mark.slow
def test_heal_replaces_a_dead_rank(mortal: Notebook) -> None:
    mortal.mesh("import math\n\ndef area(r):\n    return round(math.pi * r**2, 2)\n\nkept = rank * 10").ok()
    mortal.mesh("class Box:\n    size = 3", "[0,2]").ok()
    mortal.mesh("x = torch.ones(1)\ndist.all_reduce(x)").ok()
    cell = mortal.mesh(KILL.format(ranks=[2]))
    assert cell.status == "error" and "SIGKILL" in cell.text
    cell = mortal.mesh("area(rank)")
    assert cell.status == "error" and "%mesh heal replaces rank" in cell.text
    healed = mortal.run("%mesh heal").ok().stream()
    assert "rank 2 of mesh 'mesh': a new process, with the definitions of 3 cells; other variables are lost" in healed
    # Definitions are back, computed values are lost; the others keep everything.
    assert mortal.mesh("area(1), 'kept' in globals()").ok().shown.splitlines() == [
        "[ranks 0-1,3] (3.14, True)",
        "[rank 2] (3.14, False)",
    ]
    assert mortal.mesh("Box.size", "[0,2]").ok().shown == "[ranks 0,2] 3"
    # A new process group is made.
    assert mortal.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-3] 4.0"
    assert "all ranks of mesh 'mesh' are alive; nothing to heal" in mortal.run("%mesh heal mesh").ok().stream()
    # The traceback of a restored function shows its line.
    cell = mortal.mesh("area('a')", "[2]")
    assert cell.status == "error" and "math.pi * r**2" in cell.text


@pytest.mark.slow
def test_ranks_that_die_while_a_heal_begins_are_told(mortal: Notebook) -> None:
    """They get the definitions, and such a source of a copy is an error."""
    mortal.mesh("def area(r):\n    return r * r\n\nkept = rank").ok()
    mortal.mesh("import os; os.getpid()", "--out pids").ok()
    mortal.run(
        "import os, signal, time\nimport monarch_kernel.meshes.mesh as meshes\nreal = meshes.heal_mesh\n"
        "def kills(rank):\n    mesh = get_ipython().magics_manager.registry['MeshMagics'].meshes.get(None)\n"
        "    def heal_mesh(procs, **options):\n        meshes.heal_mesh = real\n"
        "        os.kill(list(pids.values())[rank], signal.SIGKILL)\n"
        "        while rank not in mesh.dead(): time.sleep(0.01)\n"
        "        return real(procs, **options)\n"
        "    meshes.heal_mesh = heal_mesh"
    ).ok()
    mortal.run("kills(3)").ok()
    healed = mortal.run("%mesh heal").ok().stream()
    assert "rank 3 of mesh 'mesh': a new process, with the definitions of" in healed, healed
    assert mortal.mesh("area(2), 'kept' in globals()", "[3]").ok().shown == "[rank 3] (4, False)"
    mortal.mesh(KILL.format(ranks=[1]))
    mortal.run("kills(2)").ok()
    cell = mortal.run("%mesh heal --copy-from 2 kept")
    assert cell.status == "error" and "rank 2 did not survive" in cell.text, cell.text
    assert "ranks 1-2 of mesh 'mesh': new processes, with the definitions of" in cell.stream(), cell.stream()
    # A peer is a rank that has its variables.
    text = mortal.run("%mesh heal --copy-from peer kept").ok().stream()
    assert "copied from rank 0 to ranks 1-3: kept" in text, text
    assert mortal.mesh("area(2), kept").ok().shown == "[ranks 0-3] (4, 0)"


@pytest.mark.slow
def test_definitions_are_listed_and_dropped(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 2").ok()
    assert "has defined anything yet" in mortal.run("%mesh definitions").ok().stream()
    mortal.mesh("import math, os.path as path\ndef f(): return table[rank]\nclass C: pass").ok()
    mortal.mesh("table = [1, 2]", "--define").ok()
    mortal.mesh("import json", "[1] --once").ok()
    mortal.mesh("def g(): return 1", "--nowait --out handle").ok()
    mortal.run("handle.result(20)").ok()
    listed = re.sub(r"cell \[\d+\]", "cell", mortal.run("%mesh definitions m").ok().stream())
    assert listed.splitlines() == [
        "  0  cell, all ranks: math, path, f, C",
        "  1  cell, all ranks: table = [1, 2]",
        "  2  cell, all ranks: g",
    ]
    assert "no longer run cell" in mortal.run("%mesh definitions drop 2").ok().stream()
    mortal.mesh(KILL.format(ranks=[1]))
    mortal.run("%mesh heal").ok()
    assert mortal.mesh("f(), 'json' in globals(), 'g' in globals()", "[1]").ok().shown == "[rank 1] (2, False, False)"
    for wrong in ("drop 9", "drop", "drop x", "other", "clear all"):
        cell = mortal.run(f"%mesh definitions {wrong}")
        assert cell.status == "error" and "%mesh definitions: expected nothing, clear, or drop N" in cell.text
    assert "give only one" in mortal.mesh("1", "--define --once").text
    mortal.run("%mesh definitions clear").ok()
    assert "defined anything yet" in mortal.run("%mesh definitions").ok().stream()
    mortal.run("%mesh down m").ok()
    mortal.run("%mesh use mesh").ok()


@pytest.mark.slow
def test_heal_replaces_several_ranks_bare(mortal: Notebook) -> None:
    mortal.mesh("import math").ok()
    mortal.mesh(KILL.format(ranks=[0, 3]))
    healed = mortal.run("%mesh heal --bare").ok().stream()
    assert "ranks 0,3 of mesh 'mesh': new processes, with an empty namespace; their variables are lost" in healed
    assert mortal.mesh("'math' in globals(), rank").ok().shown.splitlines() == [
        "[rank 0] (False, 0)",
        "[rank 1] (True, 1)",
        "[rank 2] (True, 2)",
        "[rank 3] (False, 3)",
    ]


@pytest.mark.slow
def test_heal_respawns_actors(mortal: Notebook) -> None:
    mortal.run(
        "%%mesh spawn counters\nfrom monarch.actor import Actor, endpoint\nclass Counter(Actor):\n"
        "    def __init__(self): self.value = 0\n    @endpoint\n    def add(self): self.value += 1; return self.value"
    ).ok()
    mortal.run("counters.add.call().get()").ok()
    mortal.mesh(KILL.format(ranks=[1]))
    mortal.run("%mesh heal").ok()
    assert mortal.run("print(list(counters.add.call().get().values()))").ok().stream() == "[2, 1, 2, 2]\n"


@pytest.mark.slow
def test_heal_reports_a_failing_definition(mortal: Notebook) -> None:
    mortal.mesh("limit = 7\ndef f(n=limit):\n    return n").ok()
    mortal.mesh(KILL.format(ranks=[1]))
    cell = mortal.run("%mesh heal")
    assert cell.status == "error" and "rank 1 was replaced" in cell.text and "NameError" in cell.text
    assert mortal.mesh("rank", "[1]").ok().shown == "[rank 1] 1"


def test_heal_says_which_failed_actors_it_has_recreated(notebook: Notebook) -> None:
    notebook.run(
        "%%mesh spawn brittle\nfrom monarch.actor import Actor, endpoint\nclass Brittle(Actor):\n"
        "    @endpoint\n    def fail(self): raise ValueError('broken')\n    @endpoint\n    def one(self): return 1"
    ).ok()
    notebook.run("brittle.slice(procs=slice(1, 3)).fail.broadcast()").ok()
    cell = notebook.run("brittle.one.call().get()")
    while "has already failed" not in cell.text:
        # The failure arrived in the middle of the call.
        assert cell.status == "error" and "no supervisor handled it" in cell.text
        cell = notebook.run("brittle.one.call().get()")
    assert "\n%mesh heal recreates failed actors; their state is lost\n" in cell.text
    said = notebook.run("%mesh heal").ok().stream("stdout")
    assert said == "recreated failed actors: brittle on ranks 1-2; their state is lost\n"
    assert "1" in notebook.run("brittle.one.call().get()").ok().shown
    assert "nothing to heal" in notebook.run("%mesh heal").ok().stream()
    notebook.run("brittle.stop().get()").ok()


def test_error_that_ends_an_actor_names_heal_and_the_cell(notebook: Notebook) -> None:
    number = notebook.run(
        "%%mesh spawn ending\nclass Ending(Actor):\n    @endpoint\n    def end(self):\n        raise SystemExit(4)"
    ).reply["execution_count"]
    text = notebook.run("ending.slice(procs=1).end.call_one().get()").text
    assert "raised SystemExit: 4, which ended the actor" in text and f'File "cell [{number}]", line 5, in end' in text
    assert "%mesh heal recreates failed actors; their state is lost" in text and "raise SystemExit(4)" in text
    notebook.run("%mesh heal").ok()
    notebook.run("ending.stop().get()").ok()


def test_heal_does_not_print_again_what_definitions_print(mortal: Notebook) -> None:
    mortal.run("%mesh definitions clear").ok()
    mortal.mesh("print('said at definition'); display('shown at definition')\nof_cell = rank", "--define").ok()
    mortal.mesh(KILL.format(ranks=[1]))
    healed = mortal.run("%mesh heal").ok()
    assert "said at definition" not in healed.text and "shown at definition" not in healed.text
    assert mortal.mesh("of_cell", "[1]").ok().shown == "[rank 1] 1"


def test_heal_reports_a_namespace_that_had_failed(mortal: Notebook) -> None:
    mortal.mesh("kept = rank").ok()
    mortal.mesh("from monarch.actor import context\ncontext().actor_instance.abort('on purpose')", "[1]")
    assert "already failed" in mortal.mesh("kept", "[1]").text
    text = mortal.run("%mesh heal").ok().text
    assert "rank 1 of mesh 'mesh': cells run again; their variables are kept" in text and "nothing" not in text
    assert mortal.mesh("kept", "[1]").ok().shown == "[rank 1] 1"
    assert "all ranks of mesh 'mesh' are alive; nothing to heal" in mortal.run("%mesh heal").ok().text
