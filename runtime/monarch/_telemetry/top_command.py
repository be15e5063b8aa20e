"""``monarch top``: the ranks of all programs of this user on this machine, live in a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from monarch._telemetry.programs import Programs, WatchedProgram
from monarch._telemetry.top import SHOWN, picture

EVERY_S = 0.5
"""Seconds between two looks."""
_LEAST = 3
"""Ranks of a mesh that are shown in any terminal."""
_AROUND = 5
"""Lines of a mesh besides its ranks."""
_ENDED = 3
"""Programs that have ended that are named."""
_NONE = (
    "none of your programs is running a mesh on this machine; start one with %mesh up in a notebook, or with "
    "this_host().spawn_procs() in a program"
)


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit code. Ctrl-C ends it with 0."""
    parser = argparse.ArgumentParser(
        "monarch top",
        description="Show the ranks of your running notebooks and programs on this machine, live, until Ctrl-C.",
        epilog="A detached mesh is shown while a program has it attached; 'monarch list' lists all.",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the state once; the default if the output is not a terminal"
    )
    arguments = parser.parse_args(args)
    programs = Programs()
    try:
        programs.look()
        once = arguments.once or not sys.stdout.isatty()
        shown = any(program.meshes or program.trouble for program in programs.running)
        if not (shown if once else programs.running):
            print(f"monarch top: {_NONE}", file=sys.stderr)
            return 1
        _print(programs) if once else _watch(programs)
    except KeyboardInterrupt:
        # This is how it ends.
        pass
    return 0


def _print(programs: Programs) -> None:
    from rich.console import Console

    # As wide as its content where nobody has said how wide the output is.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(_picture(programs.running, (), SHOWN))


def _watch(programs: Programs) -> None:
    from rich.console import Console
    from rich.live import Live

    console, ended = Console(), deque[str](maxlen=_ENDED)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            most = _room(programs, console.height)
            live.update(_picture(programs.running, ended, most), refresh=True)
            time.sleep(EVERY_S)
            ended.extend(f"{program.name} has ended" for program in programs.look())


def _room(programs: Programs, height: int) -> int:
    """Return how many ranks of each mesh a terminal has lines for."""
    meshes = sum(len(program.meshes) for program in programs.running)
    left = height - 2 * len(programs.running) - _ENDED
    return max(_LEAST, min(SHOWN, left // max(1, meshes) - _AROUND))


def _picture(programs: Sequence[WatchedProgram], ended: Sequence[str], most: int) -> Any:
    """Return the view of programs, for rich."""
    from rich.console import Group
    from rich.text import Text

    now = time.time()
    parts: list[Any] = []
    for program in programs:
        trouble = f" {program.trouble}" if program.trouble else ""
        parts.append(Text(program.name + trouble, style="bold red" if trouble else "bold"))
        meshes = [copy.read(lambda model: picture(model, now, most)) for copy in program.meshes.values()]
        parts.extend(meshes or ([] if trouble else [Text("no mesh is running", style="dim")]))
    parts.extend(Text(text, style="dim") for text in ended)
    return Group(*parts) if parts else Text("no program is running a mesh; press Ctrl-C to quit", style="dim")
