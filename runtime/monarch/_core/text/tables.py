"""Text and HTML tables, and the display of values in their cells."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from reprlib import Repr
from typing import Any, cast

from monarch._core.digests.arrays import digest_array, is_array, is_nested, size_of

WIDTH = 100
"""Maximum characters of a table cell."""
_STATISTICS_LIMIT = 1 << 22
_COMPARED = 256 << 20
"""Maximum bytes of arrays that are compared for display."""
_EDGE = "rgba(128,128,128,.35)"


def text_table(headers: Sequence[str], rows: Sequence[Sequence[object]], limit: int = 40, gap: str = "  ") -> str:
    """Return a text table, numbers right-aligned and the rest left-aligned, without a final newline.

    Args:
        headers: one for each column; empty for a table without a header row.
        rows: the cells, fewer than there are columns if the last ones are empty. A single cell in a table of several
            columns spans them all.
        limit: maximum number of rows: the first and the last, with a line that counts those between.
        gap: separator of columns.
    """
    shown = [[_cell(cell) for cell in row] for row in _shorten(rows, limit)]
    columns = max([len(headers), *map(len, shown)], default=0)
    right = _numeric(rows, columns)
    heads = [[_cell(head) for head in headers]] if headers else []
    widths = [0] * columns
    for row in heads + shown:
        if len(row) > 1 or columns == 1:
            widths = [max(width, len(cell)) for width, cell in zip(widths, _padded(row, columns), strict=True)]
    lines: list[str] = []
    for row in heads + shown:
        if len(row) == 1:
            lines.append(row[0])
            continue
        cells = zip(_padded(row, columns), widths, right, strict=True)
        lines.append(gap.join(cell.rjust(width) if end else cell.ljust(width) for cell, width, end in cells))
    return "\n".join(line.rstrip() for line in lines)


def html_table(headers: Sequence[str], rows: Sequence[Sequence[object]], limit: int = 40, title: str = "") -> str:
    """Return the same table in HTML, with a title above it; it inherits the page's colors, so it suits any theme."""
    from html import escape

    shown = [[_cell(cell) for cell in row] for row in _shorten(rows, limit)]
    columns = max([len(headers), *map(len, shown)], default=0)
    sides = ["right" if end else "left" for end in _numeric(rows, columns)]
    base = "padding:2px 14px 2px 0;vertical-align:top;background:transparent;color:inherit;border:0;"

    def cell(tag: str, text: str, column: int, extra: str = "") -> str:
        style = f"{base}text-align:{sides[column]};border-bottom:1px solid {_EDGE};{extra}"
        span = f' colspan="{columns}"' if tag == "td" and extra else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope}{span} style="{style}">{escape(text)}</{tag}>'

    def line(tag: str, row: list[str]) -> str:
        if len(row) == 1 and columns > 1 and tag == "td":
            return f"<tr>{cell(tag, row[0], 0, 'opacity:.7;')}</tr>"
        return f"<tr>{''.join(cell(tag, text, at) for at, text in enumerate(_padded(row, columns)))}</tr>"

    caption = "caption-side:top;text-align:left;padding:0 0 4px 0;color:inherit;opacity:.8;white-space:nowrap;"
    parts = ['<table style="border-collapse:collapse;background:transparent;color:inherit;margin:0;">']
    if title:
        parts.append(f'<caption style="{caption}">{escape(_cell(title))}</caption>')
    if headers:
        parts.append(f"<thead>{line('th', [_cell(head) for head in headers])}</thead>")
    parts.append(f"<tbody>{''.join(line('td', row) for row in shown)}</tbody></table>")
    return "".join(parts)


def rich_table(headers: Sequence[str], rows: Sequence[Sequence[object]], limit: int = 40, title: str = "") -> Any:
    """Return the same table for rich, which fits it to the width of the terminal."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=bool(headers), box=None, pad_edge=False)
    columns = max([len(headers), *(len(row) for row in rows)], default=0)
    right = _numeric(rows, columns)
    for column in range(columns):
        head = headers[column] if column < len(headers) else ""
        table.add_column(head, justify="right" if right[column] else "left")
    for row in _shorten(rows, limit):
        table.add_row(*(_cell(cell) for cell in row))
    return table


def value_text(value: object, width: int = WIDTH) -> str:
    """Show a value in one line of at most ``width`` characters; never raises, and takes little time.

    Arrays and tensors show type, dtype, shape, device and a few statistics. ``...`` or ``…`` marks omitted parts of
    other values.
    """
    try:
        text = _short.repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}; its repr raised {type(error).__name__}>"
    return one_line(text, width)


def same_value(one: object, other: object, text: str) -> bool:
    """Return whether two values that both show as ``text`` are equal, cheaply and without running user code.

    Arrays and tensors are compared by their contents; those of more than 256 MB count as different.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_array(one):
        return _same_array(one, other)
    if "..." not in text and "…" not in text:
        return True
    return _is_plain(one) and _is_plain(other) and one == other


def _same_array(one: object, other: object) -> bool:
    if max(size_of(one), size_of(other)) > _COMPARED:
        return False
    try:
        return digest_array(one).whole == digest_array(other).whole
    except Exception:
        # Its contents cannot be read, as for some layouts and dtypes.
        return False


def one_line(text: str, width: int = WIDTH) -> str:
    """Cut a text with ``…`` to ``width`` characters; line breaks and control characters become spaces."""
    short = text[: 4 * width]
    if not short.isprintable():
        short = " ".join("".join(char if char.isprintable() else " " for char in short).split())
    return short if len(short) <= width and len(text) <= 4 * width else short[: width - 1] + "…"


class _Short(Repr):
    """A repr that shortens long values, and summarizes arrays at any depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 8
        self.maxdict = 8
        self.maxstring = self.maxother = self.maxlong = WIDTH

    def repr1(self, x: Any, level: int) -> str:
        if is_array(x):
            return _array_text(x)
        # The base class chooses by type name, which a user's type may share with a builtin.
        return super().repr1(x, level) if type(x).__module__ in _STANDARD else self.repr_instance(x, level)


_STANDARD = {"builtins", "array", "collections"}
_short = _Short()


def _array_text(value: Any) -> str:
    """Show an array with type, dtype, shape, device, and its few values or some statistics."""
    kind = cast("type[object]", type(value))
    if is_nested(value):
        return _nested_text(value)
    shape = tuple(value.shape)
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    text = f"{kind.__name__} {dtype}[{', '.join(map(str, shape))}]"
    device = str(getattr(value, "device", "cpu"))
    if device != "cpu":
        text += f" on {device}"
    layout = str(getattr(value, "layout", "")).removeprefix("torch.")
    if layout not in ("", "strided"):
        text += f", {layout}"
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    exact = (
        *_types(torch, "Tensor"),
        *_types(getattr(torch, "nn", None), "Parameter"),
        *_types(numpy, "ndarray"),
    )
    # A subclass may be distributed or only record operations: computing with it might do anything.
    if kind not in exact or device == "meta" or prod(shape) > _STATISTICS_LIMIT:
        return text
    try:
        return text + _statistics(value, torch if kind is not getattr(numpy, "ndarray", None) else numpy)
    except Exception:
        # Its library cannot do this for its layout or dtype: type and shape must do.
        return text


def _nested_text(value: Any) -> str:
    """Show a nested tensor with ``*`` for the sizes that differ between its members."""
    dtype = str(value.dtype).removeprefix("torch.")
    shapes = [tuple(each.shape) for each in value.detach().unbind()]
    sizes = ["*" if len(set(each)) > 1 else str(each[0]) for each in zip(*shapes, strict=True)]
    text = f"{type(value).__name__} {dtype}[{', '.join([str(len(shapes)), *sizes])}]"
    return f"{text} on {value.device}, nested" if value.device.type != "cpu" else f"{text}, nested"


def _statistics(value: Any, library: Any) -> str:
    if getattr(value, "is_quantized", False):
        value = value.dequantize()
    count = prod(value.shape)
    if count <= 6 and value.ndim <= 1:
        return f" = {plain_text(value.tolist())}" if count else ""
    if str(value.dtype).endswith("bool"):
        return f", {int(value.sum())} of {count} True"
    if "complex" in str(value.dtype) or getattr(value.dtype, "kind", "f") not in "iuf":
        return ""
    if hasattr(value, "detach"):
        # Metal has no float64.
        wide = library.float32 if value.device.type == "mps" else library.float64
        numbers = value.detach().to(wide)
    else:
        numbers = value.astype(library.float64)
    finite = library.isfinite(numbers)
    known = int(finite.sum())
    strange = f", {count - known} non-finite" if known < count else ""
    if not known:
        return strange
    numbers = numbers[finite] if strange else numbers
    mean = float(numbers.mean())
    spread = float(((numbers - mean) ** 2).mean()) ** 0.5
    low, high = float(numbers.min()), float(numbers.max())
    return f", mean {mean:.4g}, std {spread:.4g}, min {low:.4g}, max {high:.4g}{strange}"


def plain_text(value: Any, digits: int = 4) -> str:
    """Return numbers, or nested lists of them, with so many digits."""
    if isinstance(value, list):
        return f"[{', '.join(plain_text(item, digits) for item in cast('list[Any]', value))}]"
    return f"{value:.{digits}g}" if isinstance(value, float) else one_line(repr(value), 20)


def _types(module: object, name: str) -> tuple[type, ...]:
    # A module that another thread is still importing may lack the name.
    found = getattr(module, name, None)
    return (found,) if isinstance(found, type) else ()


_SCALARS = {int, float, bool, str, bytes, complex, type(None)}


def _is_plain(value: Any) -> bool:
    """Return whether comparing the value runs no user code: a scalar, or a flat container of scalars."""
    if type(value) is dict:
        items = cast("dict[Any, Any]", value)
        return set(map(type, items)) <= _SCALARS and set(map(type, items.values())) <= _SCALARS
    if type(value) in (list, tuple, set, frozenset):
        return set(map(type, value)) <= _SCALARS
    return type(value) in _SCALARS


def _cell(value: object) -> str:
    return "" if value is None else one_line(str(value))


def _padded(row: list[str], columns: int) -> list[str]:
    return row + [""] * (columns - len(row))


def _numeric(rows: Sequence[Sequence[object]], columns: int) -> list[bool]:
    """Return for each column whether it has only numbers."""
    found = [{type(row[at]) for row in rows if at < len(row) and len(row) > 1} for at in range(columns)]
    return [bool(types) and types <= {int, float, type(None)} for types in found]


def _shorten(rows: Sequence[Sequence[object]], limit: int) -> list[Sequence[object]]:
    """Return the rows, or the first and the last of them around a row that counts the omitted ones."""
    left_out = len(rows) - max(limit, 0)
    if left_out <= 0:
        return list(rows)
    first = (len(rows) - left_out + 1) // 2
    return [*rows[:first], [f"… {left_out} more rows"], *rows[first + left_out :]]
