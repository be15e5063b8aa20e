"""``display`` on a rank: shows values in the notebook, tagged with the rank, while the cell runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from monarch._core.kinds import class_of, is_dict
from monarch._node.current import current_node, has_node
from monarch._notebook.showing.figures import close_figures, open_figures
from monarch._notebook.showing.show import Bundle, bundle_of
from monarch._session.display_pace import Pace, pace_of

SHOW, UPDATE, CLEAR = "show", "update", "clear"


class ShownObject(NamedTuple):
    """One thing that a rank asks the notebook to show."""

    kind: str
    """``show``, ``update`` or ``clear``."""
    bundle: Bundle
    name: str = ""
    """Display id; empty for a display that is not updated."""
    wait: bool = False
    """Whether to clear only when there is something new to show."""


class DisplayHandle:
    """A display that can be updated, as ``display(..., display_id=...)`` returns it."""

    def __init__(self, display: Display, name: str) -> None:
        self._display = display
        self.display_id = name

    def display(self, value: object, **options: Any) -> None:
        """Show a value as a new display with this id."""
        self._display(value, display_id=self.display_id, **options)

    def update(self, value: object, **options: Any) -> None:
        """Replace what the display shows."""
        self._display.update(value, display_id=self.display_id, **options)

    def __repr__(self) -> str:
        return f"<DisplayHandle display_id={self.display_id}>"


class Display:
    """Shows values in the output of the cell that runs; has the arguments of IPython's ``display``."""

    def __init__(self) -> None:
        self._sink: Any = None
        self._pace: Pace | None = None
        self._count = 0
        self._pictures: set[str] = set()
        """Pictures that the current cell has shown; thread of the cell only."""

    def __call__(
        self, *values: object, display_id: str | bool | None = None, raw: bool = False, clear: bool = False, **_: Any
    ) -> DisplayHandle | None:
        """Show each value; with a display id, return a handle that updates it."""
        if clear:
            self.clear(wait=True)
        name = self._next_name() if display_id is True else display_id or ""
        for value in values:
            self._show(SHOW, value, name, raw)
        return DisplayHandle(self, name) if name else None

    def update(self, value: object, *, display_id: str, raw: bool = False, **_: Any) -> None:
        """Replace what the displays with this id show."""
        self._show(UPDATE, value, display_id, raw)

    def clear(self, wait: bool = False) -> None:
        """Remove the output of this rank from the cell."""
        self._send(ShownObject(CLEAR, {}, "", wait))

    def publish(
        self, data: Bundle, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        """Show a MIME bundle, as IPython's ``publish_display_data``."""
        name = str(transient.get("display_id", "")) if is_dict(transient) else ""
        self._show(UPDATE if update else SHOW, data, name, True)

    def note(self, bundle: Bundle | None) -> None:
        """Note a result that the cell shows, so that an open figure in it is not shown twice."""
        if bundle is not None and "image/png" in bundle:
            self._pictures.add(bundle["image/png"])

    def show_figures(self) -> None:
        """Show the open figures of pyplot that the cell has not shown as they are now, and close all."""
        for figure in open_figures():
            bundle = bundle_of(figure)
            if bundle.get("image/png") not in self._pictures:
                self.note(bundle)
                self._send(ShownObject(SHOW, bundle))
        close_figures()

    @contextmanager
    def to(self, sink: Any, figures: bool = True) -> Generator[None]:
        """Send what is shown meanwhile to a port, and with ``figures`` also those that are open at the end."""
        before, self._sink = self._sink, sink
        pace, self._pace = self._pace, None
        if before is None:
            self._pictures.clear()
            self._count = 0
        token = _current.set(self)
        try:
            yield
            if figures:
                self.show_figures()
        finally:
            self._sink, self._pace = before, pace
            # Whoever looks at the stack of an interrupted cell may end this in another thread.
            with suppress(ValueError):
                _current.reset(token)

    @property
    def sink(self) -> Any:
        """Where values are shown now; None while no cell runs."""
        return self._sink

    def _next_name(self) -> str:
        """Return a new display id, the same on all ranks that make as many in a cell."""
        self._count += 1
        return f"{self._sink.number if self._sink is not None else 0}-{self._count}"

    def _show(self, kind: str, value: Any, name: str, raw: bool) -> None:
        cls = class_of(value)
        own = getattr(cls, "_ipython_display_", None)
        if not raw and callable(own) and not hasattr(cls, "_repr_mimebundle_"):
            value._ipython_display_()
            return
        bundle = dict(value) if raw else bundle_of(value)
        self.note(bundle)
        self._send(ShownObject(kind, bundle, name))

    def _send(self, shown: ShownObject) -> None:
        if self._sink is None:
            if shown.kind != CLEAR:
                print(shown.bundle.get("text/plain", ""))
            return
        if has_node():
            # Earlier lines are shown before it.
            current_node().output.idle()
            # Most cells show nothing.
            self._pace = self._pace or pace_of(self._sink)
            if self._pace is not None:
                self._pace.wait(shown.bundle)
        self._sink.send(shown)


_current: ContextVar[Display | None] = ContextVar("monarch_display", default=None)
_usual: Display | None = None


def set_usual(display: Display) -> None:
    """Set the display for code that no cell runs directly, such as threads."""
    global _usual
    _usual = display


def current_display() -> Display:
    """Return the display of the running cell."""
    return _current.get() or _usual or Display()


# These replace functions of IPython, which need a shell.


def display(*values: object, **options: Any) -> DisplayHandle | None:
    """Show values in the notebook, tagged with this rank."""
    return current_display()(*values, **options)


def update_display(value: object, *, display_id: str, **options: Any) -> None:
    """Replace what the displays with an id show."""
    current_display().update(value, display_id=display_id, **options)


def clear_output(wait: bool = False) -> None:
    """Remove the output of this rank from the cell."""
    current_display().clear(wait)


def publish_display_data(data: Bundle, metadata: Any = None, **options: Any) -> None:
    """Show a MIME bundle in the notebook."""
    current_display().publish(data, metadata, **options)
