"""The arguments of commands for the ranks of a mesh and for their variables."""

from __future__ import annotations

from monarch_kernel.grammar.arguments import Parser, on_ranks, whole
from monarch_kernel.grammar.offers import Offer


def _heal() -> Parser:
    parser = Parser("heal", "replace dead ranks; restore definitions of cells")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="the mesh; with --copy-from also variables to copy",
        offers=(Offer.MESH,), then=(Offer.REMOTE,),
    )  # fmt: skip
    parser.add_argument("--bare", action="store_true", help="restore no definitions on the new ranks")
    copying = "rank to copy variables from, or 'peer' for any live rank"
    parser.add_argument("--copy-from", metavar="RANK", help=copying, offers=(Offer.RANK, "peer"))
    parser.add_argument("--all", action="store_true", help="copy to all other ranks, not only to new ones")
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
    return on_ranks("interrupt", "interrupt what is running on ranks, as Stop does")


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
    parser = Parser("definitions", "list or drop the cells that new ranks run")
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
    parser.add_argument(
        "--as", dest="target", metavar="NAME", help="name of the copy in the notebook; only with one variable"
    )
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


RANKS = [
    _heal(),
    _interrupt(),
    _kill(),
    _resize(),
    _definitions(),
]
VARIABLES = [
    _who(),
    _push(),
    _pull(),
    _checkpoint(),
    _restore(),
]
