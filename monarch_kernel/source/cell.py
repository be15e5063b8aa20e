"""The text of a ``%%mesh`` cell as Python: magics and shell commands become calls, each on its own line."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from monarch._kernel_api import LINE_MAGICS, PYTHON_CELL_MAGICS, why_no_magic
from monarch_kernel.compat import has_automagic, transformed
from monarch_kernel.grammar.header import HeaderError

_CALLS = {"run_line_magic": False, "run_cell_magic": True}
"""Methods of get_ipython() that run magics, and whether they are of cells."""
_OTHER_LINE = re.compile(r"(\b(?:on|at) line )(\d+)")
"""In the text of a syntax error, as in: expected an indented block after 'if' statement on line 1."""
_WORD = re.compile(r"\s*(\w+)(?=\s|$)(?!\s*[=,])")


_MADE_FOR = "  # made for: "
"""Stands before the command in a line of code that a command has made."""


class CellSource(NamedTuple):
    """A cell in the three forms that are needed of it."""

    typed: str
    """As the user has typed it."""
    code: str
    """The code for the ranks; the same if it is plain Python."""
    definitions: str
    """The part whose definitions new ranks run."""

    @property
    def shown(self) -> str:
        """The text for tracebacks, if that is not the code."""
        return self.typed if self.typed != self.code else ""


class CellSyntaxError(SyntaxError):
    """A cell that is not valid Python, found before it runs."""


def _named(name: str) -> type[CellSyntaxError]:
    """Return a kind of it with the name that front ends and users know."""
    return type(name, (CellSyntaxError,), {"__doc__": CellSyntaxError.__doc__})


_KINDS = {kind: _named(kind.__name__) for kind in (SyntaxError, IndentationError, TabError)}


def read(shell: Any, typed: str, name: str, above: int = 0) -> CellSource:
    """Return the Python of a cell.

    Args:
        shell: the shell of the notebook.
        typed: the text below the header.
        name: the name of the cell in tracebacks.
        above: lines of the cell above the text; those of the result are counted with them.

    Raises:
        CellSyntaxError: it is not valid Python, also with its magics replaced.
        HeaderError: it has a magic that ranks lack.
    """
    made = (_guarded(shell, typed), typed) if _error(typed, name) is None else _python(shell, typed, name, above)
    head = "\n" * above
    return CellSource(*(f"{head}{each}" if each else "" for each in (typed, *made)))


def made_for(code: str, command: str) -> str:
    """Return a line of code that a command runs on ranks, so that ``as_typed`` returns the command."""
    return f"{code}{_MADE_FOR}{command}"


def as_typed(line: str) -> str:
    """Return a line of a cell as a person has typed it."""
    _, is_made, command = line.partition(_MADE_FOR)
    return command if is_made else line.strip()


def _guarded(shell: Any, typed: str) -> str:
    """Return valid Python that runs a magic if it is one line such as ``ls -l``, and no variable has that name."""
    if not _is_automagic(shell, typed):
        return typed
    word, _, rest = typed.strip().partition(" ")
    code = f"get_ipython().run_line_magic({word!r}, {rest!r}) if {word!r} not in globals() else ({typed.strip()}\n)"
    above = "\n" * (len(typed) - len(typed.lstrip("\n")))
    return above + code if _error(code, "") is None else typed


def _python(shell: Any, typed: str, name: str, above: int) -> tuple[str, str]:
    """Return the code of a cell, or of the body of a cell magic, and the part with its definitions."""
    try:
        code = transformed(shell, typed)
    except SyntaxError as unindented:
        raise _shifted(unindented, typed, name, above) from None
    error = _error(code, name)
    if error is not None and _is_automagic(shell, typed):
        code = transformed(shell, f"%{typed.lstrip()}")
        error = _error(code, name)
    if error is not None:
        raise _shifted(_error(typed, name) if code == typed else error, typed, name, above)
    _check(code, name, above)
    magic = _cell_magic(code)
    if magic is None:
        return code, code
    kind, line, body = magic
    if kind not in PYTHON_CELL_MAGICS:
        return code, ""
    first = code.index("get_ipython")
    inner, definitions = _python(shell, body, name, above + first + 1)
    head = "\n" * first
    made = f"{head}get_ipython().run_cell_magic({kind!r}, {line!r}, {inner!r})\n"
    return made, "" if kind == "timeit" else f"{head}\n{definitions}"


def _error(code: str, name: str) -> SyntaxError | None:
    """Return the error of a text as Python; None if it is valid."""
    try:
        with warnings.catch_warnings():
            # The ranks report them.
            warnings.simplefilter("ignore")
            compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        return error
    except ValueError as error:
        # Null bytes, before Python 3.12.
        return SyntaxError(str(error), (name, 1, 1, code.partition("\n")[0]))
    return None


def _shifted(error: SyntaxError | None, typed: str, name: str, above: int) -> CellSyntaxError:
    """Return an error with the lines of the whole cell."""
    assert error is not None
    line = error.lineno or 1
    lines = typed.splitlines()
    text = lines[line - 1] if line <= len(lines) else error.text or ""
    where = (name, line + above, error.offset, text, (error.end_lineno or line) + above, error.end_offset)
    text = _OTHER_LINE.sub(lambda found: f"{found[1]}{int(found[2]) + above}", error.msg)
    return _KINDS.get(type(error), _KINDS[SyntaxError])(text, where)


def _is_automagic(shell: Any, typed: str) -> bool:
    """Return whether a cell is one line that begins with the name of a line magic, such as ``pip install x``."""
    word = _WORD.match(typed)
    return word is not None and word[1] in LINE_MAGICS and "\n" not in typed.strip() and has_automagic(shell)


def _check(code: str, name: str, above: int) -> None:
    """Refuse magics that ranks lack before anything runs."""
    for magic, is_cell, line in _magics(code):
        missing = why_no_magic(magic, is_cell)
        if missing:
            raise HeaderError(f"{name} line {line + above}: {missing}")


def _magics(code: str) -> Iterator[tuple[str, bool, int]]:
    """Yield the magics that some code runs: name, whether it is of a cell, line."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, _CALLS[node.func.attr], node.lineno


def _cell_magic(code: str) -> tuple[str, str, str] | None:
    """Return name, line and body of the cell magic that some code is; None for other code."""
    if not code.lstrip().startswith("get_ipython().run_cell_magic("):
        return None
    body = ast.parse(code).body
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if not isinstance(call, ast.Call):
        return None
    kind, line, text = (ast.literal_eval(each) for each in call.args)
    return kind, line, text
