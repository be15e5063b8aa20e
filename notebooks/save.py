"""Run notebooks in the real kernel, and store them with their outputs.

Run it with `make notebooks`, after a change of a notebook or of what it shows. A test compares the stored outputs with
those of a new execution.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import nbformat
from rich.console import Console

from demo import HERE, run
from stored import normalized


def save(console: Console, path: Path, timeout: float) -> int:
    """Run a notebook, and store its outputs if it succeeds; return the exit status."""
    executed = HERE / "executed" / path.name
    status = run(console, path, executed, timeout)
    if status == 0:
        nbformat.write(normalized(nbformat.read(executed, as_version=4)), path)
        console.print(f"stored {path.name} with its outputs, {path.stat().st_size / 1000:.0f} kB")
    return status


def main() -> int:
    """Store the notebooks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/")
    parser.add_argument("--timeout", type=float, default=300, help="timeout of a cell in seconds")
    arguments = parser.parse_args()
    # The kernelspec of this environment takes precedence over a user kernelspec of the same name.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    console = Console(highlight=False)
    paths = arguments.notebooks or sorted(HERE.glob("*.ipynb"))
    return max(save(console, path, arguments.timeout) for path in paths)


if __name__ == "__main__":
    sys.exit(main())
