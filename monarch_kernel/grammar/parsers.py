"""The verbs of ``%mesh`` and their arguments: one parser each, which also generates ``%mesh help``."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.offers import Offer, Offers
from monarch_kernel.grammar.suggest import did_you_mean

DEVICES = ("cpu", "cuda")
WIDTH = 80
"""Columns of help in a terminal."""


class Usage(HeaderError):
    """A ``%mesh`` line with wrong arguments."""


class Parser(argparse.ArgumentParser):
    """The arguments of one verb. Wrong ones raise Usage.

    Args:
        verb: the word after ``%mesh``.
        summary: what the verb does, in at most 50 characters.
        details: a paragraph below the arguments.
    """

    def __init__(self, verb: str, summary: str, details: str = "") -> None:
        self.verb = verb
        self.summary = summary
        self.arguments: list[argparse.Action] = []
        self._offers: dict[str, tuple[Offers, Offers]] = {}
        """Words that completion offers for arguments, by destination: for the first word, and for later ones."""
        layout = partial(argparse.HelpFormatter, width=WIDTH, max_help_position=26)
        super().__init__(
            f"%mesh {verb}", add_help=False, allow_abbrev=False, description=summary, formatter_class=layout,
            epilog=details or None,
        )  # fmt: skip

    def add_argument(
        self, *names: Any, offers: Offers = (), then: Offers | None = None, **options: Any
    ) -> argparse.Action:
        """Add an argument, and remember it for help and completion.

        Args:
            names: of the argument, as for ``ArgumentParser``, with its options.
            offers: words that completion offers for it.
            then: words that completion offers after the first one; the same if omitted.
        """
        action = super().add_argument(*names, **options)
        if action.nargs == "*":
            # argparse names it among those that are missing, though it may be empty.
            action.required = False
        self.arguments.append(action)
        self._offers[action.dest] = (offers, offers if then is None else then)
        return action

    def offers_of(self, action: argparse.Action, later: bool = False) -> Offers:
        """Return the words that completion offers for the first word of an argument, or for a later one."""
        return (*self._offers[action.dest][later], *(each for each in action.choices or () if each))

    def option(self, name: str) -> argparse.Action | None:
        """Return the option of a name, such as ``--procs``, or None."""
        return next((each for each in self.arguments if name in each.option_strings), None)

    def synopsis(self) -> str:
        """Return the verb with its positional arguments."""
        return " ".join([self.verb, *(label(each) for each in self.arguments if not each.option_strings)])

    def error(self, message: str) -> Any:
        raise Usage(f"{self.prog}: {message}; see %mesh help {self.verb}")


def whole(text: str) -> int:
    """Return the whole number of a word."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def number(text: str) -> float:
    """Return the number of a word."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def label(action: argparse.Action) -> str:
    """Return how an argument is written, such as ``--procs N`` or ``[NAME ...]``."""
    value = str(action.metavar or action.dest)
    shapes = {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ...", 0: ""}
    shape = shapes[action.nargs] if action.nargs is not None else value
    return " ".join([*action.option_strings, shape]).strip()


def _up() -> Parser:
    parser = Parser("up", "start a mesh and use it")
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        default="mesh",
        metavar="NAME",
        help="name of the mesh and of its variable (default: mesh); a number means --procs",
    )
    add("--procs", type=whole, metavar="N", help="ranks per host, on an axis named procs")
    add("--gpus", type=whole, metavar="N", help="ranks per host, on an axis named gpus")
    add("--hosts", default="", metavar="HOSTS", help="host agents to start here, addresses of workers, or a variable")
    add("--key", default="", metavar="FILE", help="key file of the workers", offers=(Offer.PATH,))
    add("--on", default="", metavar="WHERE", help="launcher of the hosts: ssh:node[1-4], slurm, ray, kubernetes")
    add("--opt", action="append", default=[], metavar="K=V", help="option of the launcher, as in partition=gpu")
    add("--at-least", type=whole, metavar="N", help="start with N hosts; grow when the others come")
    packages = "lock file to install on each host: requirements.txt, pylock.toml, uv.lock, or a packed .tar.gz"
    add("--packages", default="", metavar="FILE", help=packages)
    add("--spare-hosts", type=whole, default=0, metavar="N", help="keep N hosts of --on to replace others")
    rule = "what to do when a host is taken back: heal, shrink, checkpoint[:PATH], or a function of the notebook"
    add("--on-preempt", default="", metavar="RULE", help=rule)
    add("--reverse", action="store_true", help="reach hosts of ssh through the ssh connection only")
    add("--env", action="append", default=[], metavar="K=V", help="environment variable of the ranks; may be repeated")
    add("--device", default="", choices=DEVICES, metavar="cpu|cuda", help="device of the ranks")
    add("--roles", default="", metavar="ROLES", help="roles and their ranks, as in train=4,load=2:cpu")
    restart = "replace ranks that die, at most N times a minute"
    add("--restart", nargs="?", const="on-failure", metavar="N", help=restart)
    add("--spares", type=whole, default=0, metavar="N", help="spare processes per host, ready to replace a dead rank")
    add("--keep", default="", metavar="TIME", help="detach when this kernel ends; keep running for TIME, such as 2h")
    add(
        "--silence", type=number, metavar="S", help="seconds until a silent rank counts as unresponsive, a host as lost"
    )
    add("--check-collectives", action="store_true", help="compare collectives before they begin; see check")
    add("--isolate-gpus", action="store_true", help="show each rank only its own GPU, as cuda:0")
    return parser


def _one_mesh(verb: str, summary: str) -> Parser:
    parser = Parser(verb, summary)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the mesh; the one in use if omitted", offers=(Offer.MESH,)
    )
    return parser


def _down() -> Parser:
    parser = Parser("down", "end meshes")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="the meshes; the one in use if omitted", offers=(Offer.MESH,)
    )
    parser.add_argument("--all", action="store_true", help="end all meshes of this notebook")
    return parser


def _named(verb: str, summary: str, metavar: str, help: str, offer: Offer) -> Parser:
    parser = Parser(verb, summary)
    parser.add_argument("name", metavar=metavar, help=help, offers=(offer,))
    return parser


def _list() -> Parser:
    parser = Parser("list", "list the meshes of this notebook")
    parser.add_argument("--all", action="store_true", help="list this user's detached meshes too")
    return parser


def _heal() -> Parser:
    parser = Parser("heal", "replace dead ranks; redefine what cells defined")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="the mesh; with --copy-from also variables to copy",
        offers=(Offer.MESH,), then=(Offer.REMOTE,),
    )  # fmt: skip
    parser.add_argument("--bare", action="store_true", help="define nothing on the new ranks")
    copying = "copy variables from this rank, or from any live one: peer"
    parser.add_argument("--copy-from", metavar="RANK", help=copying, offers=(Offer.RANK, "peer"))
    _grow_onto(parser)
    return parser


def _kill() -> Parser:
    parser = Parser("kill", "kill ranks now; new ones start in their place")
    parser.add_argument(
        "words", nargs="*", metavar="RANKS", help="such as 0,2 or [0:2]; the busy ranks if omitted",
        offers=(Offer.MESH,), then=(Offer.RANK,),
    )  # fmt: skip
    return parser


def _interrupt() -> Parser:
    return _on_ranks("interrupt", "interrupt what runs on ranks, as Stop does")


def _on_ranks(verb: str, summary: str) -> Parser:
    parser = Parser(verb, summary)
    parser.usage = f"%%mesh {verb} [MESH] [RANKS]"
    parser.add_argument(
        "words", nargs="*", metavar="RANKS",
        help="such as 0,2 or [0:2]; all ranks if omitted. MESH before them is the mesh, the current one if omitted",
        offers=(Offer.MESH,), then=(Offer.RANK,),
    )  # fmt: skip
    return parser


def _where() -> Parser:
    parser = _on_ranks("where", "show the stacks of ranks, paused or not")
    parser.usage = "%%mesh where [MESH] [RANKS] [--threads]"
    parser.add_argument("--threads", action="store_true", help="of all Python threads of each rank")
    return parser


def _print() -> Parser:
    return _expression(
        "print", "evaluate an expression where ranks are",
        "The expression sees the variables of the line that a rank is paused at, or runs. Options come first.",
    )  # fmt: skip


def _diff() -> Parser:
    return _expression(
        "diff", "compare a value across ranks",
        "It says which ranks agree, and for tensors, modules, dicts and lists the first key and index that differ. "
        "It compares hashes, so no large value is sent. Options come first.",
    )  # fmt: skip


def _expression(verb: str, summary: str, details: str) -> Parser:
    parser = Parser(verb, summary, details)
    parser.add_argument(
        "--on", metavar="MESH[SLICE]", default="", help="the ranks, as in mesh[0:2]", offers=(Offer.MESH,)
    )
    calls = "look N calls outward from the selected frame"
    parser.add_argument("--up", metavar="N", type=whole, default=0, help=calls)
    parser.add_argument("--force", action="store_true", help="also call functions that wait for other ranks")
    parser.add_argument("expression", nargs="*", metavar="EXPR", help="a Python expression", offers=(Offer.REMOTE,))
    return parser


def _frame() -> Parser:
    parser = Parser(
        "frame", "select the caller that print and vars look at",
        "Without a number, the stacks are shown. The selection of a mesh lasts until its ranks are resumed.",
    )  # fmt: skip
    chosen = "a mesh, then a number (0 is innermost), up for the caller, or down"
    parser.add_argument(
        "words", nargs="*", metavar="N|up|down", help=chosen, offers=("up", "down", Offer.MESH), then=("up", "down")
    )
    return parser


def _vars() -> Parser:
    parser = Parser(
        "vars", "list the variables where ranks are",
        "It shows the local variables of the selected frame; see frame. Ranks on which a variable is the same share a "
        "line, as in who. Idle ranks show the variables of cells.",
    )  # fmt: skip
    words = "a mesh, ranks such as 0,2 or [0:2], and names such as w*"
    parser.add_argument("words", nargs="*", metavar="WORD", help=words, offers=(Offer.MESH,), then=(Offer.RANK,))
    return parser


def _watch() -> Parser:
    parser = Parser(
        "watch", "report ranks that diverge, and NaN",
        "After each N-th step of its optimizer, fingerprints of the parameters and gradients of a module are compared "
        "across ranks, which should be equal in data-parallel training. The first step, tensor and ranks that differ, "
        "or that have NaN or Inf, are reported once. Without a name, the watches are listed.",
    )  # fmt: skip
    name = "a module or optimizer of the ranks"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name, offers=(Offer.REMOTE,))
    parser.add_argument("--every", type=whole, default=10, metavar="N", help="steps between comparisons (default: 10)")
    parser.add_argument("--on", metavar="MESH[SLICE]", default="", help="the ranks to compare", offers=(Offer.MESH,))
    parser.add_argument("--off", action="store_true", help="end this watch, or all of them")
    return parser


def _check() -> Parser:
    parser = Parser(
        "check", "compare collectives across ranks before they begin",
        "Ranks whose operation, shapes, dtypes, op or src differ raise an error with the calls and lines of all ranks, "
        "instead of hanging or computing a wrong result. It covers all process groups. When off, it costs nothing. "
        "Without on or off, it says whether it is on.",
    )  # fmt: skip
    parser.add_argument(
        "words", nargs="*", metavar="on|off", help="turn it on or off; a mesh may follow",
        offers=("on", "off", Offer.MESH), then=(Offer.MESH,),
    )  # fmt: skip
    return parser


def _until() -> Parser:
    parser = Parser("until", "run to a line below, or to the end of the function")
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
    parser.add_argument("ranks", nargs="*", metavar="on MESH[SLICE]", help="as in on mesh[0:2]; all if omitted")
    return parser


def _clear() -> Parser:
    parser = Parser("clear", "remove breakpoints")
    parser.add_argument("numbers", nargs="*", type=whole, metavar="N", help="as breaks shows them; all if omitted")
    return parser


def _resize() -> Parser:
    parser = Parser("resize", "grow or shrink a mesh; remaining ranks keep state")
    parser.add_argument(
        "words", nargs="*", metavar="AXIS=N", help="new size, such as gpus=6 or 6; a mesh name may precede it",
        offers=(Offer.MESH, Offer.SIZE), then=(Offer.SIZE,),
    )  # fmt: skip
    _grow_onto(parser)
    return parser


def _grow_onto(parser: Parser) -> None:
    parser.add_argument("--hosts", default="", metavar="HOSTS", help="hosts for the new ranks, as for up")
    parser.add_argument("--key", default="", metavar="FILE", help="key file of these hosts", offers=(Offer.PATH,))


def _definitions() -> Parser:
    parser = Parser("definitions", "list what new ranks run, or drop some of it")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the mesh; the one in use if omitted", offers=(Offer.MESH,)
    )
    parser.add_argument(
        "change", nargs="*", metavar="drop N|clear", help="drop numbered cells, or all of them",
        offers=("drop", "clear"), then=(),
    )  # fmt: skip
    return parser


def _who() -> Parser:
    parser = Parser(
        "who", "list variables and actors of ranks",
        "Ranks on which a variable is the same share a line. Type, shape, dtype, device and length are compared, and "
        "the contents of plain values on the CPU up to 64 KiB; the contents of larger values, of values on a GPU and "
        "of class instances are not. Ranks answer while they run a cell.",
    )  # fmt: skip
    place = "mesh and slice, as in mesh[0:2]; all ranks of the mesh in use if omitted"
    parser.add_argument("place", nargs="?", metavar="MESH[SLICE]", help=place, offers=(Offer.MESH,))
    names = "names such as loss or w*; all variables and actors if omitted"
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=names, offers=(Offer.REMOTE,))
    return parser


def _push() -> Parser:
    parser = Parser("push", "copy variables of the notebook to all ranks")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a variable of the notebook", offers=(Offer.LOCAL,))
    return parser


def _pull() -> Parser:
    parser = Parser("pull", "copy variables from the ranks to the notebook")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a variable of the ranks", offers=(Offer.REMOTE,))
    from_one = "from this rank only; from all if omitted"
    parser.add_argument("--rank", type=whole, metavar="RANK", help=from_one, offers=(Offer.RANK,))
    parser.add_argument("--as", dest="target", metavar="NAME", help="name of a single one in the notebook")
    return parser


def _checkpoint() -> Parser:
    parser = Parser("checkpoint", "write variables of all ranks to disk")
    _version(parser, "folder for the checkpoint", "variables to write; all if omitted")
    parser.add_argument("--wait", action="store_true", help="wait until it is written")
    return parser


def _restore() -> Parser:
    parser = Parser("restore", "read variables from the latest checkpoint")
    _version(parser, "folder of the checkpoint", "variables to read; all if omitted")
    return parser


def _version(parser: Parser, path: str, names: str) -> None:
    parser.add_argument("path", metavar="PATH", help=path, offers=(Offer.FOLDER,))
    parser.add_argument("names", nargs="*", metavar="NAME", help=names, offers=(Offer.REMOTE,))


def _run() -> Parser:
    """Return the parser of ``run``, for help only: what follows the script is the script's."""
    parser = Parser("run", "run a torchrun script on the ranks")
    parser.add_argument(
        "--on", metavar="MESH", help="mesh and slice, as in a header: --on mesh[0:4]", offers=(Offer.MESH,)
    )
    parser.add_argument("script", metavar="SCRIPT", help="path of the script, or -m MODULE", offers=(Offer.SCRIPT,))
    parser.add_argument("arguments", nargs="*", metavar="ARG", help="arguments of the script", offers=(Offer.PATH,))
    return parser


def _pip() -> Parser:
    """Return the parser of ``pip``, for help only: the words are those of pip."""
    parser = Parser("pip", "run pip once per host")
    parser.add_argument("words", nargs="+", metavar="WORD", help="as in install einops", offers=("install", "list"))
    return parser


def _get() -> Parser:
    parser = Parser(
        "get", "copy files of the ranks here",
        "A file that several ranks of a host have is copied once, from the lowest of them.",
    )  # fmt: skip
    parser.add_argument(
        "path", metavar="PATH", help="a file, folder or pattern there, as in out/log-{rank}.txt or *.pt"
    )
    folder = "folder here, in which each rank has one, such as rank-0 (default: this one)"
    parser.add_argument("target", nargs="?", default=".", metavar="FOLDER", help=folder, offers=(Offer.PATH,))
    return parser


def _put() -> Parser:
    parser = Parser("put", "copy a file or folder to each host")
    parser.add_argument("path", metavar="PATH", help="a file or folder here", offers=(Offer.PATH,))
    folder = "folder there; the working directory of the ranks if omitted"
    parser.add_argument("target", nargs="?", default="", metavar="FOLDER", help=folder)
    return parser


def _log() -> Parser:
    parser = Parser("log", "show what the ranks printed")
    parser.add_argument("--tail", type=whole, metavar="N", help="the last N lines only")
    ranks = "the output of these ranks only, such as 2 or 0-3,7"
    parser.add_argument("--rank", default="", metavar="RANKS", help=ranks, offers=(Offer.RANK,))
    parser.add_argument("--cell", type=whole, metavar="N", help="what cell [N] printed")
    parser.add_argument("--save", default="", metavar="FILE", help="write it to a file instead", offers=(Offer.PATH,))
    return parser


def _auto() -> Parser:
    parser = Parser("auto", "run plain cells on ranks, or in the notebook")
    parser.add_argument(
        "mode",
        nargs="?",
        metavar="on|off",
        help="turn it on or off; show the current mode if omitted",
        offers=("on", "off"),
    )
    parser.add_argument(
        "place",
        nargs="*",
        metavar="[MESH][SLICE]",
        help="the ranks, as in the first line of a cell",
        offers=(Offer.MESH,),
    )
    return parser


CELL_SETTINGS = ("mesh", "ranks", "timeout", "out", "collect")
"""Keys of ``%mesh config`` for cells: the mesh, its ranks, and options of their first lines."""
UP_SETTINGS = (
    "procs", "gpus", "hosts", "key", "device", "restart", "spares", "keep", "silence", "check-collectives",
    "isolate-gpus",
)  # fmt: skip
"""Keys of ``%mesh config`` for ``%mesh up``: its options of the same names."""


def _config() -> Parser:
    parser = Parser(
        "config", "show or set defaults of this notebook",
        "Without arguments, a table shows all keys, their values and meanings. KEY=none removes a default. An "
        "option in a line overrides its default. Defaults last until the kernel ends.",
    )  # fmt: skip
    keys = "such as timeout=60 or device=cpu; several may be set at once"
    offers = tuple(f"{key}=" for key in (*CELL_SETTINGS, *UP_SETTINGS))
    parser.add_argument("pairs", nargs="*", metavar="KEY=VALUE", help=keys, offers=offers)
    parser.add_argument("--reset", action="store_true", help="remove these defaults, or all of them")
    return parser


def _help() -> Parser:
    parser = Parser("help", "show this list, or the arguments of one verb")
    parser.add_argument("verb", nargs="?", metavar="VERB", help="a verb from this list", offers=(Offer.VERB,))
    return parser


SECTIONS = {
    "Meshes": [
        _up(),
        Parser("table", "show meshes and ranks, like %mesh alone"),
        _one_mesh("view", "show the ranks of a mesh live"),
        _one_mesh("top", "show the ranks of a mesh live, as text"),
        _auto(),
        _config(),
        _named("use", "make this the default mesh of cells", "NAME", "the mesh", Offer.MESH),
        _down(),
        _one_mesh("restart", "restart a mesh with empty namespaces"),
        _list(),
        _named("attach", "attach a detached mesh with all its state", "NAME", "the detached mesh", Offer.DETACHED),
    ],
    "Ranks": [_heal(), _interrupt(), _kill(), _resize(), _definitions()],
    "Debugging": [
        _on_ranks("pause", "stop ranks at their next Python line"),
        _on_ranks("resume", "let paused ranks go on"),
        _where(),
        _print(),
        _on_ranks("why", "explain what ranks wait for, and why"),
        _frame(),
        _vars(),
        _diff(),
        _watch(),
        _check(),
        _break(),
        _one_mesh("breaks", "list the breakpoints of a mesh"),
        _clear(),
        _on_ranks("next", "run to the next line of the function"),
        _on_ranks("step", "run to the next line, also in called functions"),
        _until(),
        _on_ranks("finish", "run to the end of the function"),
        _on_ranks("continue", "let paused ranks continue, like resume"),
        _on_ranks("debug", "look into failed or paused ranks, at a prompt"),
        _on_ranks("forget", "release the variables of the last error"),
    ],
    "Variables": [_who(), _push(), _pull(), _checkpoint(), _restore()],
    "Programs and output": [
        _run(),
        _log(),
        _named("update", "switch live actors to the notebook's new class", "NAME", "the actor mesh", Offer.ACTORS),
        _named("reload", "reload an edited module here and on all ranks", "MODULE", "the module", Offer.MODULE),
        _get(),
        _put(),
        _pip(),
        _one_mesh("sync", "copy changed Python files to the hosts"),
        _help(),
    ],
}
_ELSEWHERE = {
    "-n": "--procs",
    "-np": "--procs",
    "--num-processes": "--procs",
    "--nproc_per_node": "--procs",
    "--nproc-per-node": "--procs",
    "--num-gpus": "--gpus",
    "-g": "--gpus",
    "--nnodes": "--hosts",
    "--local": "--here",
    "--noblock": "--nowait",
}
"""Options of launchers and of other notebook magics, with ours."""

PARSERS = {parser.verb: parser for section in SECTIONS.values() for parser in section}


def parse(verb: str, words: list[str]) -> argparse.Namespace:
    """Parse the words after a verb; options may stand between the positional arguments.

    Raises:
        Usage: wrong arguments.
    """
    parser = PARSERS[verb]
    found, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        raise Usage(f"{parser.prog}: {_unknown(parser, unknown[0])}; see %mesh help {verb}")
    return found


def _unknown(parser: Parser, word: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    option = word.partition("=")[0]
    known = [name for each in parser.arguments for name in each.option_strings]
    if _ELSEWHERE.get(option) in known:
        return f"no option {option!r}; did you mean {_ELSEWHERE[option]!r}?"
    expected = f": expected one of {', '.join(known)}" if known else ": it takes none"
    return f"no option {option!r}{did_you_mean(option, known) or expected}"
