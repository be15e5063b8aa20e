"""Displays of ranks: by any import, in order with what is printed, each figure once, equal ones once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import Cell, Notebook

PLOTS = "import matplotlib.pyplot as plt\n"


def pictures(cell: Cell) -> int:
    """Return the number of pictures in the output of a cell."""
    pages = "".join(str(bundle.get("text/html", "")) for bundle in cell.bundles)
    return pages.count("data:image/png") + sum("image/png" in bundle for bundle in cell.bundles)


@pytest.mark.parametrize(
    "get",
    [
        "from IPython.display import display, HTML",
        "import IPython.display; display, HTML = IPython.display.display, IPython.display.HTML",
        "from IPython.core.display_functions import display; from IPython.display import HTML",
    ],
)
def test_display_works_however_it_is_imported(notebook: Notebook, get: str) -> None:
    cell = notebook.mesh(f"{get}\ndisplay(HTML('<b>bold</b>'))\ndel display").ok()
    assert "<b>bold</b>" in cell.bundles[0]["text/html"] and len(cell.bundles) == 1


def test_displays_and_lines_keep_their_order(notebook: Notebook) -> None:
    cell = notebook.mesh("print('before')\ndisplay('shown')\nprint('after')").ok()
    kinds = [(each["msg_type"], str(each["content"])) for each in cell.messages]
    places = [next(at for at, (_, text) in enumerate(kinds) if word in text) for word in ("before", "shown", "after")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "body",
    ["plt.plot([1, 2]); plt.show()", "plt.plot([1, 2]);", "f = plt.figure(); plt.plot([1, 2])\nf",
     "f = plt.figure(); plt.plot([1, 2]); display(f)", "f, axes = plt.subplots(); plt.show()\nplt.show()"],
)  # fmt: skip
def test_each_figure_is_shown_once(notebook: Notebook, body: str) -> None:
    assert pictures(notebook.mesh(PLOTS + body, "[0]").ok()) == 1
    assert not pictures(notebook.mesh("None", "[0]").ok())


def test_changed_figure_is_shown_again(notebook: Notebook) -> None:
    cell = notebook.mesh(f"{PLOTS}f = plt.figure(); plt.plot([1, 2]); display(f); plt.plot([5, 1])", "[0]").ok()
    assert pictures(cell) == 2


def test_update_changes_what_one_display_shows(notebook: Notebook) -> None:
    cell = notebook.mesh("h = display('first', display_id=True)\nh.update(f'second {rank // 2}')").ok()
    assert cell.shown == "[ranks 0-1] 'second 0'\n[ranks 2-3] 'second 1'" and len(cell.bundles) == 1
    later = notebook.mesh("from IPython.display import update_display\nupdate_display('third', display_id='mine')")
    assert not later.ok().bundles
    notebook.mesh("display('by name', display_id='mine')").ok()
    cell = notebook.mesh("update_display('fourth', display_id='mine')").ok()
    (update,) = [each for each in cell.contents("update_display_data") if "fourth" in str(each)][-1:]
    assert update["transient"]["display_id"].endswith("mine")


@pytest.mark.parametrize("ranks", ["", "[1]"])
def test_cleared_displays_are_replaced(notebook: Notebook, ranks: str) -> None:
    body = "from IPython.display import clear_output\nfor i in range(4):\n    clear_output(wait=True); display(i)"
    cell = notebook.mesh(body, ranks).ok()
    assert [bundle["text/plain"].rpartition("] ")[2] for bundle in cell.bundles] == ["3"]


def test_latex_and_markdown_reach_the_front_end(notebook: Notebook) -> None:
    cell = notebook.mesh("from IPython.display import Latex, Markdown\ndisplay(Latex('$x^2$'))\nMarkdown('*m*')").ok()
    assert [bundle["text/latex"] for bundle in cell.bundles if "text/latex" in bundle] == ["$x^2$"]
    assert [bundle["text/markdown"] for bundle in cell.bundles if "text/markdown" in bundle] == ["*m*"]
    assert cell.shown.count("[all 4 ranks]") == 2


def test_bundles_of_front_end_types_are_passed_on(notebook: Notebook) -> None:
    body = """
class Chart:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"application/vnd.chart+json": {"rank": rank // 2}, "text/plain": f"chart {rank // 2}"}
Chart()
"""
    cell = notebook.mesh(body).ok()
    charts = [each["application/vnd.chart+json"] for each in cell.bundles if "application/vnd.chart+json" in each]
    assert charts == [{"rank": 0}, {"rank": 1}]
    assert "[ranks 0-1]" in cell.shown and "[ranks 2-3]" in cell.shown


def test_bundles_are_asked_for_as_ipython_does(notebook: Notebook) -> None:
    method = "def _repr_mimebundle_(self, include, exclude, **kwargs): return {'text/plain': 'asked'}"
    assert notebook.mesh(f"class Asked:\n    {method}\nAsked()").ok().shown == "[ranks 0-3] asked"


def test_lists_that_hold_themselves_are_shown_once(notebook: Notebook) -> None:
    assert notebook.mesh("own = [1]; own.append(own)\nown").ok().shown == "[ranks 0-3] [1, <Recursion on list>]"


def test_nested_and_quantized_tensors_are_compared(notebook: Notebook) -> None:
    nested = "import warnings; warnings.simplefilter('ignore')\n" \
        "torch.nested.nested_tensor([torch.ones(2), torch.ones(3) * (rank // 2)])"  # fmt: skip
    cell = notebook.mesh(nested).ok()
    assert "[ranks 0-1] Tensor float32[2, *], nested" in cell.shown and "[ranks 2-3]" in cell.shown
    cell = notebook.mesh("torch.quantize_per_tensor(torch.ones(2), 0.5, rank // 2, torch.qint8)").ok()
    assert "[ranks 0-1] Tensor qint8[2] = [1, 1]" in cell.shown and "[ranks 2-3]" in cell.shown


def test_widgets_say_that_they_do_not_work_on_ranks(notebook: Notebook) -> None:
    cell = notebook.mesh("import ipywidgets\nipywidgets.IntSlider()").ok()
    assert "IntSlider: widgets do not work on ranks" in cell.shown and len(cell.shown.splitlines()) == 1


def test_data_frames_show_tables_of_each_rank(notebook: Notebook) -> None:
    pytest.importorskip("pandas")
    cell = notebook.mesh("import pandas as pd\npd.DataFrame({'a': [1, 2], 'r': rank})").ok()
    assert cell.bundles[0]["text/html"].count("<table") == 4
    cell = notebook.mesh("pd.Series([1, 2], name='s')").ok()
    assert cell.bundles[0]["text/html"].count("<table") == 1 and cell.shown.startswith("[ranks 0-3]")


def test_ranks_import_no_library_for_displays(notebook: Notebook) -> None:
    body = "import sys\n[name for name in ('IPython', 'matplotlib', 'pandas', 'rich') if name in sys.modules]"
    notebook.run("%mesh up fresh --procs 1").ok()
    assert notebook.run(f"%%mesh fresh\n{body}").ok().shown == "[rank 0] []"
    notebook.run("%mesh down fresh").ok()
    notebook.run("%mesh use mesh").ok()


# Equality of what is shown


@pytest.mark.parametrize("array", ["torch.arange(100.)", "torch.arange(100.).numpy()", "torch.arange(100.).bfloat16()"])
def test_tensors_with_equal_statistics_are_shown_as_different(notebook: Notebook, array: str) -> None:
    shown = notebook.mesh(f"t = {array}\nt if rank == 0 else t[list(range(99, -1, -1))]").ok().shown
    assert "all 4 ranks" not in shown
    assert "[ranks 1-3]" in shown and "differs from rank 0 at 100 of 100 elements" in shown


def test_one_different_element_is_found(notebook: Notebook) -> None:
    shown = notebook.mesh("t = torch.zeros(1000); t[7] = -0.0 if rank == 2 else 0.0\nt").ok().shown
    assert "[ranks 0-1,3]" in shown and "[rank 2]" in shown and "differs from ranks 0-1,3 at 1 of 1,000" in shown


def test_equal_tensors_are_shown_once(notebook: Notebook) -> None:
    cell = notebook.mesh("torch.full((50, 50), float('nan'))").ok()
    assert cell.shown.startswith("[ranks 0-3]") and "all 4 ranks" in cell.bundles[0]["text/html"]


def test_models_with_different_weights_are_shown_apart(notebook: Notebook) -> None:
    body = "torch.manual_seed(0); m = torch.nn.Linear(3, 3)\n"
    assert notebook.mesh(f"{body}m").ok().shown.startswith("[ranks 0-3]")
    shown = notebook.mesh(f"{body}if rank == 3: m.bias.data[0] = 7\nm").ok().shown
    assert "[rank 3]" in shown and "prints the same as on ranks 0-2, but the contents differ" in shown


@pytest.mark.parametrize("value", ["(i for i in range(3))", "object()", "lambda: 1"])
def test_values_that_cannot_be_compared_are_not_called_equal(notebook: Notebook, value: str) -> None:
    cell = notebook.mesh(value).ok()
    assert cell.shown.startswith("[ranks 0-3, not compared]") and "all 4 ranks" not in str(cell.bundles)


def test_stop_ends_the_digest_of_a_large_value(notebook: Notebook, tmp_path: Path) -> None:
    # Each part waits, as parts of a huge tensor would.
    body = f"""
import time, monarch._core.digests.arrays as arrays
original = arrays._bytes_of
def slow(part, torch):
    open({str(tmp_path / "begun")!r} + str(rank), "w").close()
    time.sleep(0.2)
    return original(part, torch)
arrays._bytes_of = slow
torch.zeros(64 << 12)
"""
    cell = notebook.send(f"%%mesh\n{body}")
    cell.until(lambda: len(list(tmp_path.iterdir())) == 4)
    notebook.interrupt()
    cell.wait()
    assert cell.reply["ename"] == "KeyboardInterrupt" and "interrupted" in cell.stream("stderr")
    notebook.mesh("arrays._bytes_of = original").ok()


def test_sounds_of_ranks_can_be_played(notebook: Notebook) -> None:
    code = "from IPython.display import Audio\nsound = Audio(bytes([rank // 2] * 800), rate=8000, normalize=False)\n"
    for body in (f"{code}sound", f"{code}display(sound)"):
        (bundle,) = notebook.mesh(body).ok().bundles
        assert bundle["text/html"].count("<audio") == 2 and ">ranks 0-1<" in bundle["text/html"]
