"""The picture of a mesh that a saved notebook keeps, compared with files; set UPDATE_GOLDEN=1 to write them."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from monarch._core.telemetry import events as ev
from monarch_kernel.views.model import snapshot
from monarch_kernel.views.parts import narrowed
from monarch_kernel.views.picture import _ink, bundle_of, html_of, text_of
from monarch_kernel.views.protocol import DISPLAY, Snapshot
from monarch_kernel.views.states import LOOKS
from pages import Log

GOLDEN = Path(__file__).parent / "golden"
SHAPES = {1: ("procs",), 8: ("procs",), 64: ("hosts", "gpus"), 1024: ("hosts", "gpus")}


def shown(ranks: int) -> Snapshot:
    """A mesh whose ranks do different things."""
    log, hosts = Log(), max(1, ranks // 8)
    names = tuple(f"node{rank // 8:02}" for rank in range(ranks))
    sizes = (hosts, 8) if ranks > 8 else (ranks,)
    log.add(ev.MeshStarted("trainers", SHAPES[ranks], sizes, names))
    for rank in range(ranks):
        log.add(ev.RankStarted(rank, 100 + rank, 0))
    log.add(ev.CallStarted(1, "cell [3]", 3, tuple(range(ranks))), 1.0)
    for rank in range(ranks):
        state = (ev.RankState.RUNNING, ev.RankState.COLLECTIVE)[rank % 8 == 1]
        waits = ev.Collective("all_reduce", "world", 12) if rank % 8 == 1 else None
        log.add(ev.RankReport(rank, state, "cell [3] line 5", 0.0, 0, "cpu", ev.ResourceUsage(0.5), waits))
        log.add(ev.Metrics(rank, "loss <a&b>", tuple(range(50)), tuple(2.0 / (step + 1) + rank for step in range(50))))
    if ranks > 1:
        log.add(ev.CallAnswered(1, (0,), ""), 1.0)
        log.add(ev.RankDied(5, False, "exited with code 3 at cell [3] line <1>"), 61.0)
    return snapshot(log.model, "m:1", [], log.now)[0]


def test_picture_of_a_slice_has_its_ranks_only() -> None:
    part = narrowed(shown(8), [1, 4, 5], {"procs": 3})
    assert [row.rank for row in part.ranks] == [1, 4, 5] and {each.rank for each in part.points} == {1, 4, 5}
    text = text_of(part)
    assert text.startswith("mesh 'trainers[1,4:6]': procs=3\n") and "3 ranks: " in text and "rank 5: " in text
    assert "cell [3]: 1 of 3 ranks finished" in text
    # Rank 0 has answered the call.
    assert narrowed(shown(8), [2], {}).calls and not narrowed(shown(8), [0], {}).calls
    assert narrowed(shown(8), [], {}) == shown(8)


@pytest.mark.parametrize("ranks", SHAPES)
@pytest.mark.parametrize("kind", ["html", "txt"])
def test_picture_is_as_recorded(ranks: int, kind: str) -> None:
    text = (html_of if kind == "html" else text_of)(shown(ranks))
    path = GOLDEN / f"{ranks}.{kind}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text + "\n"


@pytest.mark.parametrize("ranks", SHAPES)
def test_html_is_small_well_formed_and_without_scripts(ranks: int) -> None:
    text = html_of(shown(ranks))
    stack: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: stack.append(tag) if tag not in ("polygon", "polyline") else None

    def end(tag: str) -> None:
        if tag not in ("polygon", "polyline"):
            assert stack.pop() == tag

    parser.handle_endtag = end
    parser.feed(text)
    assert stack == [] and text.count("<td") == ranks
    assert "script" not in text and " on" not in text.replace(" one", "") and "<a&b>" not in text
    assert len(text) < 60_000


def test_html_names_its_display_for_pages_that_open_later() -> None:
    bundle = bundle_of(shown(8), "a hint", "0123abcd")
    assert f'{DISPLAY}="0123abcd"' in bundle["text/html"] and bundle["text/html"].endswith("<div>a hint</div>")
    assert DISPLAY not in html_of(shown(8))


def test_one_line_counts_the_ranks() -> None:
    assert "8 ranks: 5 running cell [3], 1 idle, 1 waiting in a collective (cell [3]), 1 dead" in text_of(shown(8))


def test_signs_are_legible_on_their_colours() -> None:
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for look in LOOKS.values():
        for colour in (look.light, look.dark):
            page, ink = sorted((light(colour), {"#000": 0.0, "#fff": 1.0}[_ink(colour)]))
            assert (ink + 0.05) / (page + 0.05) >= 4.5
