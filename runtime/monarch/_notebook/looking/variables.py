"""The variables of a frame of a rank, as a service that answers while the rank is paused or runs."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from monarch._debug.frames import described
from monarch._node.services.registry import service
from monarch._notebook.looking.at_frame import innermost, scope_of, text_of
from monarch._notebook.looking.statistics import statistics_text
from monarch._notebook.names.user_names import user_names
from monarch._notebook.who.listing import MOST, Variable, variable_of

Packed = tuple["tuple[str, int, str, str] | str", int, list[tuple[str, str, str, int, bool, str]]]


@service("looking.variables_at", "probe")
def variables_at(level: int, patterns: list[str]) -> Packed:
    """Service: return the line of a frame, how many of its variables match, and the first of them; or an error and -1.

    Args:
        level: the level of the frame: 0 for the innermost one of the user's code, 1 for its caller.
        patterns: patterns of names; all if there are none.
    """
    try:
        scope = scope_of(level, innermost())
    except LookupError as error:
        return text_of(error), -1, []
    frame = scope.frame
    is_function = frame is not None and frame.f_code.co_name != "<module>"
    names = _locals_of(scope.local) if is_function else user_names(scope.local)
    matching = [name for name in names if not patterns or any(fnmatchcase(name, each) for each in patterns)]
    found = [_with_statistics(name, scope.local[name]) for name in matching[:MOST] if name in scope.local]
    at = described(frame)._replace(text="") if frame is not None else None
    where = (at.file, at.line, at.function, at.text) if at is not None else ""
    shown = [(each.name, each.kind, each.text, each.size, each.complete, each.mark) for each in found]
    return where, len(matching), shown


def _locals_of(local: dict[str, Any]) -> list[str]:
    return sorted(name for name in list(local) if name.isidentifier() and not name.startswith("__"))


def _with_statistics(name: str, value: object) -> Variable:
    variable = variable_of(name, value)
    statistics = "" if " = " in variable.text else statistics_text(value)
    return variable._replace(text=f"{variable.text}, {statistics}") if statistics else variable
