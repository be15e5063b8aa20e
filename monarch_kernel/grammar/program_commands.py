"""The arguments of commands for programs, code, files and output."""

from __future__ import annotations

from monarch_kernel.grammar.arguments import Parser, named, one_mesh, whole
from monarch_kernel.grammar.offers import Offer


def _run() -> Parser:
    """Return the parser of ``run``, for help only: what follows the script is the script's."""
    parser = Parser("run", "run a torchrun script on the ranks")
    parser.add_argument(
        "--on", metavar="MESH", help="the ranks to run on, such as mesh[0:4]; all if omitted", offers=(Offer.MESH,)
    )
    parser.add_argument("script", metavar="SCRIPT", help="path of the script, or -m MODULE", offers=(Offer.SCRIPT,))
    parser.add_argument("arguments", nargs="*", metavar="ARG", help="arguments of the script", offers=(Offer.PATH,))
    return parser


def _pip() -> Parser:
    """Return the parser of ``pip``, for help only: the words are those of pip."""
    parser = Parser("pip", "run pip once per host")
    parser.add_argument(
        "words", nargs="+", metavar="WORD", help="arguments of pip, such as install einops", offers=("install", "list")
    )
    return parser


def _get() -> Parser:
    parser = Parser(
        "get", "copy files of the ranks here",
        "A file that several ranks of a host share is copied once, from the lowest rank.",
    )  # fmt: skip
    parser.add_argument(
        "path", metavar="PATH", help="a file, folder or pattern on the ranks, such as out/log-{rank}.txt or *.pt"
    )
    folder = "local folder; each rank gets a subfolder such as rank-0 (default: the current folder)"
    parser.add_argument("target", nargs="?", default=".", metavar="FOLDER", help=folder, offers=(Offer.PATH,))
    return parser


def _put() -> Parser:
    parser = Parser("put", "copy a file or folder to each host")
    parser.add_argument("path", metavar="PATH", help="a local file or folder", offers=(Offer.PATH,))
    folder = "folder on the hosts; the working directory of the ranks if omitted"
    parser.add_argument("target", nargs="?", default="", metavar="FOLDER", help=folder)
    return parser


def _log() -> Parser:
    parser = Parser("log", "show what the ranks printed")
    mesh = "the output of this mesh only"
    parser.add_argument("name", nargs="?", metavar="NAME", help=mesh, offers=(Offer.MESH,))
    parser.add_argument("--tail", type=whole, metavar="N", help="the last N lines only")
    ranks = "the output of these ranks only, such as 2 or 0-3,7"
    parser.add_argument("--rank", default="", metavar="RANKS", help=ranks, offers=(Offer.RANK,))
    parser.add_argument("--cell", type=whole, metavar="N", help="what cell [N] printed")
    parser.add_argument(
        "--save", default="", metavar="FILE", help="write the log to FILE instead of showing it", offers=(Offer.PATH,)
    )
    return parser


def _help() -> Parser:
    parser = Parser("help", "show this list, or the arguments of one command")
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help="a command from this list", offers=(Offer.COMMAND,)
    )
    return parser


PROGRAMS = [
    _run(),
    _log(),
    named("update", "switch live actors to the notebook's new class", "NAME", "the actor mesh", Offer.ACTORS),
    named("reload", "reload an edited module here and on all ranks", "MODULE", "the module", Offer.MODULE),
    _get(),
    _put(),
    _pip(),
    one_mesh("sync", "copy changed Python files to the hosts"),
    _help(),
]
