"""Progress bars on ranks: each rank has one line, which a carriage return begins again."""

from __future__ import annotations

import sys
from copy import copy
from typing import Any

_BETWEEN = "  "


def adapt_tqdm(module: Any) -> None:
    """Show all bars of a rank in one line: nested bars move the cursor between lines, which only a terminal does."""
    bar = module.tqdm

    def display(self: Any, msg: str | None = None, pos: int | None = None) -> bool:
        """Show this bar and the others."""
        if msg is None and self not in self._instances:
            # The last state of a bar that ends.
            texts = [str(self)]
        else:
            texts = [str(each) for each in _bars(self) if each is not self or msg is None]
        self.sp(_BETWEEN.join(text for text in texts if text))
        return True

    def moveto(self: Any, n: int) -> None:
        """Stay in the line."""

    bar.display, bar.moveto = display, moveto


def _bars(bar: Any) -> list[Any]:
    shown = [each for each in bar._instances if not each.disable]
    return sorted(shown, key=lambda each: abs(getattr(each, "pos", 0)))


def adapt_tqdm_notebook(module: Any) -> None:
    """Use bars of text instead of widgets, which do not work on ranks."""
    bar: Any = sys.modules["tqdm.std"].tqdm

    class TextBar(bar):
        """A bar of text with the arguments of a widget."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:
            bar.__init__(self, *args, **options)

    def trange(*args: Any, **options: Any) -> Any:
        return TextBar(range(*args), **options)

    module.tqdm = module.tqdm_notebook = TextBar
    module.trange = module.tnrange = trange


def adapt_rich(module: Any) -> None:
    """Show a live display in one line, as it changes: a rank has no terminal whose cursor could move."""
    live = module.Live
    start: Any = live.__init__
    refresh: Any = live.refresh

    def begin(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if not self.console.is_jupyter:
            # The user's console keeps its colors, whatever the environment says of terminals.
            self.console = copy(self.console)
            self.console._force_terminal = self.console.is_interactive = False

    def refresh_line(self: Any) -> None:
        console = self.console
        if console.is_jupyter:
            refresh(self)
            return
        if not self.is_started:
            # Its last state replaces the line.
            console.file.write("\r")
            refresh(self)
            return
        with console.capture() as capture:
            console.print(self.get_renderable())
        text = _BETWEEN.join(line.strip() for line in capture.get().splitlines() if line.strip())
        console.file.write(f"\r{text}")
        console.file.flush()

    live.__init__, live.refresh = begin, refresh_line
