"""The verbs of ``%mesh`` and their arguments: one parser each, which also generates ``%mesh help``."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from monarch_kernel.magics.header import HeaderError
from monarch_kernel.magics.offers import Offer, Offers
from monarch_kernel.magics.suggest import did_you_mean
from monarch_kernel.meshes.recipe import DEVICES

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
        help="its name, also of its variable (default: mesh); a number means --procs",
    )
    add("--procs", type=int, metavar="N", help="ranks per host, on an axis named procs")
    add("--gpus", type=int, metavar="N", help="ranks per host, on an axis named gpus")
    add("--hosts", default="", metavar="HOSTS", help="host agents to start here, addresses of workers, or a variable")
    add("--key", default="", metavar="FILE", help="key file of the workers", offers=(Offer.PATH,))
    add("--env", action="append", default=[], metavar="K=V", help="environment variable of the ranks; may be repeated")
    add("--device", default="", choices=("", *DEVICES), metavar="cpu|cuda", help="device of the ranks")
    add("--roles", default="", metavar="ROLES", help="roles and their ranks, as in train=4,load=2:cpu")
    restart = "replace ranks that die, at most N times a minute"
    add("--restart", nargs="?", const="on-failure", metavar="N", help=restart)
    add("--spares", type=int, default=0, metavar="N", help="spare processes per host, ready to replace a dead rank")
    add("--keep", default="", metavar="TIME", help="detach when this kernel ends, and live on for TIME, such as 2h")
    add("--silence", type=float, metavar="S", help="seconds until a silent rank counts as unresponsive, a host as lost")
    add("--check-collectives", action="store_true", help="compare shapes and dtypes before each collective; slow")
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
    copying = "copy variables from this rank, or from any: peer"
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


def _resize() -> Parser:
    parser = Parser("resize", "grow or shrink a mesh; remaining ranks keep state")
    parser.add_argument(
        "words", nargs="*", metavar="AXIS=N", help="new size, as in gpus=6 or 6, after a mesh name",
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
        "who", "list variables of ranks, and where they differ",
        "A variable has a line for the ranks on which it is the same. Compared are type, shape, dtype, device and "
        "length, and the contents of plain values on the CPU up to 64 KiB. Contents of larger values, of values on "
        "a GPU and of objects of classes are not compared. Ranks answer while they run a cell.",
    )  # fmt: skip
    place = "the mesh and slice, as in mesh[0:2]; all ranks of the one in use if omitted"
    parser.add_argument("place", nargs="?", metavar="MESH[SLICE]", help=place, offers=(Offer.MESH,))
    names = "names such as loss or w*; all variables if omitted"
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=names, offers=(Offer.REMOTE,))
    return parser


def _push() -> Parser:
    parser = Parser("push", "copy variables of the notebook to all ranks")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a variable of the notebook", offers=(Offer.LOCAL,))
    return parser


def _pull() -> Parser:
    summary = "copy a variable from the ranks to the notebook"
    parser = _named("pull", summary, "NAME", "a variable of the ranks", Offer.REMOTE)
    from_one = "from this rank only; from all if omitted"
    parser.add_argument("--rank", type=int, metavar="RANK", help=from_one, offers=(Offer.RANK,))
    parser.add_argument("--as", dest="target", metavar="NAME", help="its name in the notebook")
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


def _log() -> Parser:
    parser = Parser("log", "show what the ranks printed")
    parser.add_argument("--tail", type=int, metavar="N", help="the last N lines only")
    parser.add_argument("--rank", type=int, metavar="RANK", help="what this rank printed", offers=(Offer.RANK,))
    parser.add_argument("--cell", type=int, metavar="N", help="what cell [N] printed")
    parser.add_argument("--save", default="", metavar="FILE", help="write it to a file instead", offers=(Offer.PATH,))
    return parser


def _auto() -> Parser:
    parser = Parser("auto", "run plain cells on ranks, or in the notebook")
    parser.add_argument(
        "mode", nargs="?", metavar="on|off", help="which of both; without it, say which it is", offers=("on", "off")
    )
    parser.add_argument(
        "place",
        nargs="*",
        metavar="[MESH][SLICE]",
        help="the ranks, as in the first line of a cell",
        offers=(Offer.MESH,),
    )
    return parser


def _help() -> Parser:
    parser = Parser("help", "show this list, or the arguments of one verb")
    parser.add_argument("verb", nargs="?", metavar="VERB", help="a verb from this list", offers=(Offer.VERB,))
    return parser


SECTIONS = {
    "Meshes": [
        _up(),
        Parser("table", "show meshes and ranks, like %mesh alone"),
        _auto(),
        _named("use", "make this the default mesh of cells", "NAME", "the mesh", Offer.MESH),
        _down(),
        _one_mesh("restart", "restart a mesh with empty namespaces"),
        _list(),
        _named("attach", "attach a detached mesh with all its state", "NAME", "the detached mesh", Offer.DETACHED),
    ],
    "Ranks": [_heal(), _kill(), _resize(), _definitions()],
    "Variables": [_who(), _push(), _pull(), _checkpoint(), _restore()],
    "Programs and output": [
        _run(),
        _log(),
        _named("update", "give live actors the notebook's new class", "NAME", "the mesh of actors", Offer.ACTORS),
        _named("reload", "reload an edited module here and on all ranks", "MODULE", "the module", Offer.MODULE),
        _help(),
    ],
}
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
    expected = f": expected one of {', '.join(known)}" if known else ": it takes none"
    return f"no option {option!r}{did_you_mean(option, known) or expected}"
