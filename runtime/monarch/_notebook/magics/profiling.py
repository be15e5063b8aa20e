"""``%prun`` on a rank: where the time of code of the cell goes, by function."""

from __future__ import annotations

import cProfile
import io
import pstats
from typing import Any

from monarch._notebook.magics.nested import names_of, this_cell
from monarch._notebook.magics.words import BadLine, options_of

_LINES = 20


def profile_code(line: str, above: int, body: str = "") -> Any:
    """Profile a statement, or the body of a cell; print the functions that took the most time.

    Args:
        line: options and the statement: ``-s KEY`` sorts as ``pstats`` does, ``-l N`` prints N functions, ``-q`` none,
            ``-r`` returns the ``pstats.Stats``.
        above: how many lines of the cell are above the code.
        body: in place of the statement.
    """
    options, rest = options_of(line, "s=l:qr")
    limit = int(options.get("l", _LINES))
    key = options.get("s", "tottime")
    if key not in pstats.Stats.sort_arg_dict_default:
        raise BadLine(f"-s: expected a key of pstats such as cumulative or tottime, got {key!r}")
    cell = this_cell()
    code = compile("\n" * above + (body or rest), cell.name, "exec", dont_inherit=True)
    names, profile = names_of(cell), cProfile.Profile()
    run: Any = profile.runctx
    try:
        run(code, names, names)
    finally:
        stats = pstats.Stats(profile, stream=(text := io.StringIO())).sort_stats(key)
        if "q" not in options:
            stats.print_stats(limit)
            print(text.getvalue().strip())
    return stats if "r" in options else None
