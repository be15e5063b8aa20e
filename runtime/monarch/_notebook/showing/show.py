"""MIME bundles of values for a notebook, without IPython, which ranks need not have."""

from __future__ import annotations

import base64
import re
import sys
from typing import Any

from monarch._core.digests.arrays import is_array
from monarch._core.digests.digest import DIGEST
from monarch._core.digests.values import digest_of
from monarch._core.kinds import is_dict, is_tuple
from monarch._core.text.tables import value_text
from monarch._notebook.showing.bounded import bounded
from monarch._notebook.showing.figures import picture_of

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
_NUMBERS = (int, float, bool)
"""Types whose values are shown by their repr."""
_BITS = 64
"""Of an integer that needs no cut: the repr of a huge one is refused."""
_TEXT_LIMIT = 20_000
_WIDGET = "application/vnd.jupyter.widget-view+json"
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_RECURSION = re.compile(r"<Recursion on (\w+) with id=\d+>")
"""How pprint shows a container inside itself."""
NO_WIDGETS = "widgets do not work on ranks; create the widget in a cell of the notebook"


def bundle_of(value: object) -> Bundle:
    """Return the MIME bundle of a value.

    Arrays and tensors show what they are and their statistics, not their elements; data frames show a table.
    """
    if type(value) in _NUMBERS and (type(value) is not int or value.bit_length() < _BITS):
        # The most frequent values need none of the questions below.
        return {"text/plain": repr(value), DIGEST: digest_of(value)}
    if is_array(value) and not _is_table(value):
        return {"text/plain": value_text(value, 200), DIGEST: digest_of(value)}
    bundle = _rich_of(value)
    if _WIDGET in bundle:
        return {"text/plain": f"{type(value).__name__}: {NO_WIDGETS}"}
    if "text/plain" not in bundle:
        bundle["text/plain"] = _text_of(value)
    if not any(mime.startswith("image/") for mime in bundle):
        # An address names an object, so that text is not about its contents.
        bundle[DIGEST] = None if _ADDRESS.search(str(bundle["text/plain"])) else digest_of(value)
    return bundle


def _is_table(value: object) -> bool:
    return callable(getattr(type(value), "_repr_html_", None)) or _is_series(value)


def _is_series(value: object) -> bool:
    series = getattr(sys.modules.get("pandas"), "Series", None)
    return isinstance(series, type) and isinstance(value, series)


def _rich_of(value: Any) -> Bundle:
    bundle: Bundle = {}
    figure = picture_of(value)
    if figure is not None:
        bundle["image/png"] = figure
    if _is_series(value):
        bundle["text/html"] = _call(value.to_frame(), "_repr_html_")
    # As IPython calls it: rich requires both names, and methods without parameters exist.
    rich = _call(value, "_repr_mimebundle_", include=None, exclude=None) or _call(value, "_repr_mimebundle_")
    if is_tuple(rich):
        rich = rich[0]
    if is_dict(rich):
        bundle.update(rich)
    for mime, method in _METHODS.items():
        if mime in bundle or (mime == "image/jpeg" and "image/png" in bundle):
            continue
        data = _call(value, method)
        if data is not None:
            bundle[mime] = data[0] if is_tuple(data) else data
    return {mime: _portable_data(data) for mime, data in bundle.items() if data is not None}


def _portable_data(data: object) -> object:
    return base64.b64encode(data).decode() if isinstance(data, bytes) else data


def _text_of(value: object) -> str:
    import pprint

    try:
        text = pprint.pformat(bounded(value), width=100, compact=True, sort_dicts=False)
        return portable(_RECURSION.sub(r"<Recursion on \1>", text))
    except Exception as error:
        return portable(f"<{type(value).__name__} whose repr raised {type(error).__name__}: {error}>")


def portable(text: str) -> str:
    """Return a text as it can be sent and shown: not too long, and without halves of surrogate pairs."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]} … {len(text) - _TEXT_LIMIT} more characters"


def _call(value: object, method: str, **options: Any) -> Any:
    # Looked up on the class, as Jupyter does, so that objects that answer to any name are not asked.
    if isinstance(value, type) or not callable(getattr(type(value), method, None)):
        return None
    try:
        return getattr(value, method)(**options)
    except Exception:
        # A value that cannot show itself in one way may in another.
        return None
