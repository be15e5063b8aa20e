"""The live view in a browser without a kernel: recorded meshes of 1 to 1,024 ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.lab import ARTEFACTS, ROOT, violations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("built")]
HERE = Path(__file__).parent
FILES = {
    "page.html": HERE / "page.html",
    "recording.js": HERE / "recording.js",
    "meshview.js": ROOT / "monarch_kernel" / "views" / "static" / "meshview.js",
}
SIZES = [1, 8, 64, 1024]
FRAMES = """
seconds => new Promise(done => {
    const stamps = [];
    const step = now => {
        stamps.push(now);
        now - stamps[0] < seconds * 1000 ? requestAnimationFrame(step) : done(stamps);
    };
    requestAnimationFrame(step);
})
"""


@pytest.fixture
def show(chromium: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a recorded mesh; a message on the console fails the test."""
    pages: list[Any] = []
    errors: list[str] = []

    def serve(route: Any) -> None:
        file = FILES.get(re.sub(r".*/|\?.*", "", route.request.url))
        kind = "text/html" if file and file.suffix == ".html" else "text/javascript"
        route.fulfill(path=file, content_type=kind) if file else route.fulfill(status=204)

    def open_one(ranks: int, theme: str = "light", every: int = 0, width: int = 1000) -> Any:
        page = chromium.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.route("**/*", serve)
        page.goto(f"http://views.test/page.html?ranks={ranks}&theme={theme}&every={every}")
        page.locator(".mk-tile").nth(ranks - 1).wait_for()
        page.wait_for_selector(".mk-timeline canvas")
        return page

    yield open_one
    for page in pages:
        page.close()
    assert not errors


def shot(page: Any, name: str) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ranks", SIZES)
def test_view_is_accessible_at_every_size(show: Callable[..., Any], ranks: int, theme: str) -> None:
    page = show(ranks, theme)
    shot(page, f"view-{ranks}-{theme}")
    assert page.locator(f".mk-view.mk-{theme}").count() == 1
    assert not violations(page)
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "nothing is wider than the page"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pinned_rank_and_confirmation_are_accessible(show: Callable[..., Any], theme: str) -> None:
    page = show(8, theme)
    page.locator(".mk-tile").nth(5).click()
    page.wait_for_selector(".mk-table")
    page.get_by_role("button", name="Kill: rank 5").click()
    page.get_by_role("alertdialog").wait_for()
    shot(page, f"view-pinned-{theme}")
    assert not violations(page)
    page.keyboard.press("Escape")
    page.get_by_role("alertdialog").wait_for(state="detached")


def test_view_fits_a_sidebar(show: Callable[..., Any]) -> None:
    page = show(64, width=340)
    shot(page, "view-64-narrow")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_keyboard_alone_pins_a_rank(show: Callable[..., Any]) -> None:
    page = show(8)
    page.locator(".mk-tile[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    rank = page.evaluate("document.activeElement.dataset.rank")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=f"Rank {rank}").wait_for()
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.match(rf"rank {rank}: .+ (for|ago)", label)
    page.keyboard.press("Escape")
    page.locator(".mk-details").wait_for(state="detached")


def test_pointer_shows_what_a_rank_does(show: Callable[..., Any]) -> None:
    page = show(64)
    page.locator(".mk-tile").nth(17).hover()
    tip = page.locator(".mk-tip")
    assert "rank 17" in tip.inner_text() and "in a C call" in tip.inner_text()
    shot(page, "view-tip")


def test_thousand_changing_ranks_allow_thirty_frames_a_second(show: Callable[..., Any]) -> None:
    """By the CPU time of the page's thread: how many frames there are depends on what else the machine does."""
    page = show(1024, every=100)
    before = page.locator(".mk-tile").nth(700).get_attribute("class")
    browser = page.context.new_cdp_session(page)
    browser.send("Performance.enable", {"timeDomain": "threadTicks"})
    begun = _busy(browser)
    frames = len(page.evaluate(FRAMES, 4))
    each = (_busy(browser) - begun) / frames
    print(f"{1000 * each:.1f} ms of CPU for each of {frames} frames")
    page.wait_for_function("before => document.querySelectorAll('.mk-tile')[700].className !== before", arg=before)
    assert 0 < each < 1 / 30


def _busy(browser: Any) -> float:
    """Return the seconds of CPU that the tasks of the page have taken."""
    metrics = browser.send("Performance.getMetrics")["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "TaskDuration")


def test_reduced_motion_stops_animations(show: Callable[..., Any]) -> None:
    page = show(8)
    page.emulate_media(reduced_motion="reduce")
    assert page.locator(".mk-tile").first.evaluate("e => getComputedStyle(e).transitionDuration") == "0s"
