"""``python -m monarch_kernel``: run the kernel, or install its kernelspec."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path[0] in ("", os.getcwd()):
    # A file of the notebook's folder named like a module, such as random.py, must not keep the kernel from starting.
    # IPython adds the folder again before the first cell.
    del sys.path[0]

import argparse
import gc
import json
import shutil
import tempfile
from pathlib import Path

_STREAM = "monarch_kernel.output.notebook_stream.NotebookStream"
_HELP = """\
usage: python -m monarch_kernel install [--user | --sys-prefix | --prefix PREFIX] [--name NAME] [--display-name TEXT]
       python -m monarch_kernel -f CONNECTION_FILE

The first command registers the kernel with Jupyter; `install --help` describes its options. The second is what
Jupyter runs to start the kernel; `--help-all` lists its other options, inherited from ipykernel.

Without Jupyter: `monarch --help`, or `from monarch.actor import this_host` in any Python program.
"""


def main() -> None:
    """Install the kernelspec if the first argument is ``install``; start the kernel otherwise."""
    if sys.argv[1:2] == ["install"]:
        install(sys.argv[2:])
        return
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(_HELP, end="")
        return
    # Nothing that an import makes is garbage, and to look for it takes a tenth of the time.
    gc.disable()
    try:
        from ipykernel.kernelapp import IPKernelApp

        from monarch_kernel.kernel import MonarchKernel
    finally:
        gc.enable()

    MonarchKernel.is_ready_first = True
    IPKernelApp.launch_instance(kernel_class=MonarchKernel, outstream_class=_STREAM)


def install(words: list[str]) -> None:
    """Install the kernelspec for this Python interpreter."""
    from jupyter_client.kernelspec import KernelSpecManager

    parser = argparse.ArgumentParser(
        "python -m monarch_kernel install",
        description="Register the kernel with Jupyter. The kernel runs with the Python that runs this command.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="install for the current user, in every Jupyter they start")
    where.add_argument("--sys-prefix", action="store_true", help="install into this Python environment (default)")
    where.add_argument("--prefix", help="install under this prefix, such as /usr/local for all users")
    parser.add_argument("--name", default="monarch", help="name of the kernel (default: monarch)")
    parser.add_argument("--display-name", metavar="TEXT", help="display name in the list of kernels (default: Monarch)")
    arguments = parser.parse_args(words)
    prefix = None if arguments.user else arguments.prefix or sys.prefix
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(Path(__file__).parent / "kernelspec", Path(folder, "kernelspec"))
        spec = json.loads((source / "kernel.json").read_text())
        # Jupyter may run in another environment, whose `python` is not this one.
        spec["argv"][0] = sys.executable
        spec["display_name"] = arguments.display_name or spec["display_name"]
        (source / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n")
        try:
            path = KernelSpecManager().install_kernel_spec(
                str(source), arguments.name, user=arguments.user, prefix=prefix
            )
        except (OSError, ValueError) as error:
            parser.error(str(error))
    print(f"installed kernel {arguments.name!r} in {path}; it starts with {sys.executable}")
    if Path(path).parent not in [Path(each) for each in KernelSpecManager().kernel_dirs]:
        data = Path(path).parent.parent
        print(f"this Jupyter does not search {data}; set JUPYTER_PATH={data}, or install with --user")


if __name__ == "__main__":
    main()
