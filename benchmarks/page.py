"""The traffic to a browser with a view of 1,024 ranks that change 10 times a second: a real kernel, server and page."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import HERE, OURS, LaneError, Measure, Options, Target, calm

RANKS = 1024
SECONDS = 8.0
"""Of one round."""
_CELL = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from page_source import Changing
source = Changing({RANKS})
get_ipython().magics_manager.registry["MeshMagics"].views._shown[source.uid] = source
"""
_OPEN = """
(() => {
    const comm = book.sessionContext.session.kernel.createComm('monarch.meshes');
    window.patches = 0;
    comm.onMsg = message => { window.patches += message.content.data.kind === 'patch' ? 1 : 0; };
    comm.open({ version: 1 });
    comm.send({ kind: 'open', version: 1, uid: 'made-up' });
    setInterval(() => comm.send({ kind: 'alive', uid: 'made-up' }), 10000);
})()
"""


def run(options: Options) -> list[Measure]:
    """Megabytes a second of all messages of the kernel."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    try:
        from playwright.sync_api import sync_playwright

        from browser.lab import FLAGS, Book, Lab, find_browser, write_notebook
    except ImportError as error:
        raise LaneError(f"it needs {error.name}") from error
    path = find_browser()
    if path is None:
        raise LaneError("there is no chromium")
    with tempfile.TemporaryDirectory(prefix="lab") as folder, sync_playwright() as driver:
        lab = Lab(Path(folder))
        browser = driver.chromium.launch(executable_path=path, args=[flag for flag in FLAGS if flag != "--headless"])
        try:
            write_notebook(lab.root / "book.ipynb", [_CELL, "source.states = False"])
            book = Book(browser.new_page(), lab).open("book.ipynb")
            book.run(0)
            book.idle()
            states = _measure(book, options, "state")
            book.run(1)
            book.idle()
            return [states, _measure(book, options, "line and load")]
        finally:
            browser.close()
            lab.end_kernels()
            lab.close()


def _measure(book: Any, options: Options, what: str) -> Measure:
    name = f"messages to a page that shows {RANKS:,} ranks, each changing its {what} 10 times a second"
    measure = Measure("page", name, "MB/s", "less", target=Target("≤ 1 MB/s", 1.0), worst=True)
    measure.load, measure.samples[OURS] = calm(options), []
    session = book.page.context.new_cdp_session(book.page)
    received = 0

    def frame(event: dict[str, Any]) -> None:
        nonlocal received
        response = event["response"]
        size = len(response["payloadData"])
        # Binary frames are told in base64.
        received += size * 3 // 4 if response["opcode"] == 2 else size

    session.on("Network.webSocketFrameReceived", frame)
    session.send("Network.enable")
    if not book.evaluate("window.patches"):
        book.evaluate(_OPEN)
    book.until("window.patches > 5")
    count, samples = 0.0, measure.samples[OURS]
    for _ in range(options.rounds(8)):
        received, begun, patches = 0, time.monotonic(), book.evaluate("window.patches")
        book.page.wait_for_timeout(SECONDS * 1000)
        spent = time.monotonic() - begun
        samples.append(received / spent / 1e6)
        count = (book.evaluate("window.patches") - patches) / spent
    measure.notes.append(f"{count:.1f} patches a second in the last round")
    session.detach()
    return measure
