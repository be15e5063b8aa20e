"""The arguments of commands for debugging."""

from __future__ import annotations

from monarch_kernel.grammar.arguments import Parser, on_ranks, one_mesh, whole
from monarch_kernel.grammar.offers import Offer


def _where() -> Parser:
    parser = on_ranks("where", "show the stacks of ranks, paused or not")
    parser.usage = "%%mesh where [MESH] [RANKS] [--threads]"
    parser.add_argument("--threads", action="store_true", help="show all Python threads of each rank")
    return parser


def _print() -> Parser:
    return _expression(
        "print", "evaluate an expression in the ranks' frames",
        "The expression sees the variables in scope where each rank is paused or running. Options come first.",
    )  # fmt: skip


def _diff() -> Parser:
    return _expression(
        "diff", "compare a value across ranks",
        "It says which ranks agree, and for tensors, modules, dicts and lists the first key and index that differ. "
        "It compares hashes, so no large value is sent. Options come first.",
    )  # fmt: skip


def _expression(command: str, summary: str, details: str) -> Parser:
    parser = Parser(command, summary, details)
    parser.add_argument(
        "--on", metavar="MESH[SLICE]", default="", help="the ranks, as in mesh[0:2]", offers=(Offer.MESH,)
    )
    calls = "evaluate in the N-th caller of the selected frame"
    parser.add_argument("--up", metavar="N", type=whole, default=0, help=calls)
    parser.add_argument("--force", action="store_true", help="also call functions that wait for other ranks")
    parser.add_argument("expression", nargs="*", metavar="EXPR", help="a Python expression", offers=(Offer.REMOTE,))
    return parser


def _frame() -> Parser:
    parser = Parser(
        "frame", "select the frame for print, vars and diff",
        "Without a number, it shows the stacks. The selection of a mesh lasts until its ranks are resumed.",
    )  # fmt: skip
    chosen = "a mesh, then a number (0 is innermost), up for the caller, or down"
    parser.add_argument(
        "words", nargs="*", metavar="N|up|down", help=chosen, offers=("up", "down", Offer.MESH), then=("up", "down")
    )
    return parser


def _vars() -> Parser:
    parser = Parser(
        "vars", "list the variables in the ranks' frames",
        "It shows the local variables of the selected frame; see frame. Ranks on which a variable is the same share a "
        "line, as in who. Idle ranks show the variables of cells.",
    )  # fmt: skip
    words = "a mesh, ranks such as 0,2 or [0:2], and names such as w*"
    parser.add_argument("words", nargs="*", metavar="WORD", help=words, offers=(Offer.MESH,), then=(Offer.RANK,))
    return parser


def _watch() -> Parser:
    parser = Parser(
        "watch", "report ranks that diverge, NaN and Inf",
        "Every N optimizer steps, it compares fingerprints of the parameters and gradients of a module across ranks; "
        "in data-parallel training they should be equal. It reports once the first step, tensor and ranks that differ, "
        "or that have NaN or Inf. Without a name, it lists the watches.",
    )  # fmt: skip
    name = "a module or optimizer of the ranks"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name, offers=(Offer.REMOTE,))
    parser.add_argument("--every", type=whole, default=10, metavar="N", help="steps between comparisons (default: 10)")
    parser.add_argument("--on", metavar="MESH[SLICE]", default="", help="the ranks to compare", offers=(Offer.MESH,))
    parser.add_argument("--off", action="store_true", help="stop watching NAME, or everything if it is omitted")
    return parser


def _check() -> Parser:
    parser = Parser(
        "check", "compare collectives across ranks before they begin",
        "Ranks whose operation, shapes, dtypes, op or src differ raise an error with the calls and lines of all ranks, "
        "instead of hanging or computing a wrong result. It covers all process groups. When off, it costs nothing. "
        "Without on or off, it says whether it is on.",
    )  # fmt: skip
    parser.add_argument(
        "words", nargs="*", metavar="on|off", help="on or off, then an optional mesh, as in: on trainers",
        offers=("on", "off", Offer.MESH), then=(Offer.MESH,),
    )  # fmt: skip
    return parser


def _until() -> Parser:
    parser = Parser("until", "run until a later line, for example out of a loop")
    parser.add_argument(
        "words", nargs="*", metavar="RANKS", help="such as 0,2 or [0:2]; all paused ranks if omitted",
        offers=(Offer.MESH,), then=(Offer.RANK,),
    )  # fmt: skip
    parser.add_argument("--line", type=whole, metavar="LINE", help="the first line to stop at; the next if omitted")
    return parser


def _break() -> Parser:
    parser = Parser(
        "break", "pause ranks at a line or function",
        "PLACE is file:line, cell:line such as 3:5, or a function such as Trainer.step. Ranks that have no breakpoint "
        "run at full speed. While one is at a breakpoint, the others wait, unless MONARCH_BREAK_ALONE=1 is set. "
        "breakpoint() in the code does the same.",
    )  # fmt: skip
    parser.add_argument("place", metavar="PLACE", help="as in train.py:12, 3:5 or Trainer.step")
    parser.add_argument("condition", nargs="*", metavar="if EXPR", help="stop only if this is true there")
    parser.add_argument(
        "ranks", nargs="*", metavar="on MESH[SLICE]", help="ranks, such as on mesh[0:2]; all if omitted"
    )
    return parser


def _clear() -> Parser:
    parser = Parser("clear", "remove breakpoints")
    parser.add_argument(
        "numbers",
        nargs="*",
        type=whole,
        metavar="N",
        help="breakpoint numbers, as %%mesh breaks lists them; all if omitted",
    )
    return parser


DEBUGGING = [
    on_ranks("pause", "pause ranks at their next Python line"),
    on_ranks("resume", "resume paused ranks"),
    _where(),
    _print(),
    on_ranks("why", "explain what ranks are waiting for, and why"),
    _frame(),
    _vars(),
    _diff(),
    _watch(),
    _check(),
    _break(),
    one_mesh("breaks", "list the breakpoints of a mesh"),
    _clear(),
    on_ranks("next", "step over to the next line"),
    on_ranks("step", "step into the called function"),
    _until(),
    on_ranks("finish", "run until the function returns"),
    on_ranks("continue", "resume paused ranks; the same as resume"),
    on_ranks("debug", "inspect failed or paused ranks at a prompt"),
    on_ranks("forget", "release the variables of the last error"),
]
