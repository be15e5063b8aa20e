"""The arguments of commands for whole meshes."""

from __future__ import annotations

from monarch_kernel.grammar.arguments import Parser, named, number, one_mesh, whole
from monarch_kernel.grammar.offers import Offer

DEVICES = ("cpu", "cuda")


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
    add("count", nargs="?", type=whole, metavar="N", help="the same as --procs N")
    add("--procs", type=whole, metavar="N", help="ranks per host, on an axis named procs")
    add("--gpus", type=whole, metavar="N", help="ranks per host, on an axis named gpus")
    add(
        "--hosts",
        default="",
        metavar="HOSTS",
        help="number of simulated hosts to start here, worker addresses, or a variable with a host mesh",
    )
    add("--key", default="", metavar="FILE", help="key file of the workers", offers=(Offer.PATH,))
    add("--on", default="", metavar="WHERE", help="hosts from ssh:node[1-4], slurm, ray, kubernetes:IMAGE or process:2")
    add("--opt", action="append", default=[], metavar="K=V", help="option of the launcher, as in partition=gpu")
    add("--at-least", type=whole, metavar="N", help="start with N hosts; grow when others join")
    packages = "lock file to install on each host: requirements.txt, pylock.toml, uv.lock, or a packed .tar.gz"
    add("--packages", default="", metavar="FILE", help=packages)
    add("--spare-hosts", type=whole, default=0, metavar="N", help="keep N hosts of --on as spares")
    rule = "what to do when a host is taken back: heal, shrink, checkpoint[:PATH], or a function of the notebook"
    add("--on-preempt", default="", metavar="RULE", help=rule)
    add("--reverse", action="store_true", help="reach ssh hosts only through the ssh connection")
    add("--env", action="append", default=[], metavar="K=V", help="environment variable of the ranks; may be repeated")
    add("--device", default="", choices=DEVICES, metavar="cpu|cuda", help="device of the ranks")
    add("--roles", default="", metavar="ROLES", help="roles and their ranks, as in train=4,load=2:cpu")
    restart = "replace ranks that die, at most N times a minute"
    add("--restart", nargs="?", const="on-failure", metavar="N", help=restart)
    add("--spares", type=whole, default=0, metavar="N", help="spare processes per host, ready to replace a dead rank")
    add("--keep", default="", metavar="TIME", help="detach when this kernel ends; keep running for TIME, such as 2h")
    add("--silence", type=number, metavar="S", help="seconds of silence until a rank is unresponsive, or a host lost")
    add("--check-collectives", action="store_true", help="compare collectives before they begin; see check")
    add("--isolate-gpus", action="store_true", help="show each rank only its own GPU, as cuda:0")
    return parser


def _down() -> Parser:
    parser = Parser("down", "end meshes")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="the meshes; the one in use if omitted", offers=(Offer.MESH,)
    )
    parser.add_argument("--all", action="store_true", help="end all meshes of this notebook")
    return parser


def _list() -> Parser:
    parser = Parser("list", "list the meshes of this notebook")
    parser.add_argument("--all", action="store_true", help="list this user's detached meshes too")
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


MESHES = [
    _up(),
    Parser("table", "show meshes and ranks, like %mesh alone"),
    one_mesh("view", "show the ranks of a mesh live"),
    one_mesh("top", "show the ranks of a mesh live, as text"),
    _auto(),
    _config(),
    named("use", "make this the default mesh of cells", "NAME", "the mesh", Offer.MESH),
    _down(),
    one_mesh("restart", "restart a mesh with empty namespaces"),
    _list(),
    named("attach", "attach a detached mesh with all its state", "NAME", "the detached mesh", Offer.DETACHED),
]
