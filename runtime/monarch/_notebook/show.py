"""MIME bundles of values for a notebook, without IPython, which ranks do not have."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
import sys
from typing import Any

from monarch._core.kinds import is_dict, is_tuple
from monarch._core.text.tables import is_array, value_text
from monarch._notebook.bounded import bounded
from monarch._wire.pickling import dumps
from monarch.exceptions import SerializationError

Bundle = dict[str, Any]
"""MIME type to data; binary data in base64."""

_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "text/latex": "_repr_latex_",
    "application/json": "_repr_json_",
}
_TEXT_LIMIT = 20_000
DIGEST = "digest"
"""Key of a bundle that is no MIME type and is not shown: the digest of a value that is only shown in part."""


def bundle_of(value: object) -> Bundle:
    """Return the MIME bundle of a value.

    Arrays and tensors show what they are and their statistics, not their elements.
    """
    if is_array(value):
        return {"text/plain": value_text(value, 200)}
    bundle: Bundle = {}
    figure = _figure(value)
    if figure is not None:
        bundle["image/png"] = figure
    rich = _call(value, "_repr_mimebundle_")
    if is_tuple(rich):
        rich = rich[0]
    if is_dict(rich):
        bundle.update(rich)
    for mime, method in _METHODS.items():
        data = _call(value, method)
        if data is not None and mime not in bundle:
            bundle[mime] = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    if "text/plain" not in bundle:
        _add_text(bundle, value)
    return bundle


def _add_text(bundle: Bundle, value: object) -> None:
    import pprint

    shown = value
    try:
        shown = bounded(value)
        text = pprint.pformat(shown, width=100, compact=True, sort_dicts=False)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}: {error}>"
    bundle["text/plain"] = portable(text)
    if shown is not value or len(text) > _TEXT_LIMIT:
        # Values that differ only in what is left out are not to be taken for equal ones.
        bundle[DIGEST] = _digest(value)


def _digest(value: object) -> str:
    try:
        body, buffers = dumps(value)
    except SerializationError:
        return secrets.token_hex(16)
    found = hashlib.sha256(body)
    for buffer in buffers:
        found.update(buffer)
    return found.hexdigest()


def portable(text: str) -> str:
    """Return a text as it can be sent and shown: not too long, and without halves of surrogate pairs."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]} … {len(text) - _TEXT_LIMIT} more characters"


def _call(value: object, method: str) -> Any:
    # Looked up on the class, as Jupyter does, so that objects that answer to any name are not asked.
    if isinstance(value, type) or not callable(getattr(type(value), method, None)):
        return None
    try:
        return getattr(value, method)()
    except Exception:
        # A value that cannot show itself in one way may in another.
        return None


def _figure(value: Any) -> str | None:
    figures = sys.modules.get("matplotlib.figure")
    if figures is None or not isinstance(value, figures.Figure):
        return None
    import io

    data = io.BytesIO()
    value.savefig(data, format="png", bbox_inches="tight")
    return base64.b64encode(data.getvalue()).decode()


class Display:
    """``display`` in cells: shows values in the notebook, tagged with the rank, while the cell runs."""

    def __init__(self) -> None:
        self._sink: Any = None

    def __call__(self, *values: object) -> None:
        """Show each value."""
        for value in values:
            self.send(bundle_of(value))

    @contextlib.contextmanager
    def to(self, sink: Any) -> Any:
        """Send what is shown meanwhile to a port, and figures that are open at the end."""
        before, self._sink = self._sink, sink
        try:
            yield
            self._show_figures()
        finally:
            self._sink = before

    @property
    def sink(self) -> Any:
        """Where values are shown now; None while no cell runs."""
        return self._sink

    def _show_figures(self) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            self(pyplot.figure(number))
        pyplot.close("all")

    def send(self, bundle: Bundle) -> None:
        """Show a bundle."""
        if self._sink is not None:
            self._sink.send(bundle)
        else:
            print(bundle.get("text/plain", ""))
