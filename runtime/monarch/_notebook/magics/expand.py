"""Values of variables in commands and magics: ``{expression}`` and ``$name``, as in IPython."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

_DOLLAR = re.compile(r"\$(\$(?=\w)|[A-Za-z_][\w.]*)")


class _Expander(Formatter):
    """Evaluates the fields of a text."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Return the value of an expression."""
        return eval(field_name, {}, kwargs), field_name


def expand(text: str, names: Mapping[str, Any]) -> str:
    """Return a text with values put in; a text with an invalid field, such as awk's ``{print $1}``, stays as it is.

    Args:
        text: with fields.
        names: the values.
    """
    made: list[str] = []
    expander = _Expander()
    try:
        for literal, field, spec, conversion in expander.parse(text):
            made.append(_DOLLAR.sub(lambda match: _value(match, names), literal))
            if field is not None:
                value = expander.convert_field(expander.get_field(field, (), dict(names))[0], conversion)
                made.append(expander.format_field(value, expander.vformat(spec or "", (), dict(names))))
    except Exception:
        return text
    return "".join(made)


def _value(match: re.Match[str], names: Mapping[str, Any]) -> str:
    """Return the value of a variable; variables of the shell stay as they are."""
    name = match[1]
    if name == "$":
        return "$"
    first, *rest = name.split(".")
    if first not in names:
        return match[0]
    value = names[first]
    for part in rest:
        if not hasattr(value, part):
            return match[0]
        value = getattr(value, part)
    return str(value)
