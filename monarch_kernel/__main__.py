"""``python -m monarch_kernel``: run the kernel, or install its kernelspec."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Install the kernelspec if the first argument is ``install``; start the kernel otherwise."""
    if sys.argv[1:2] == ["install"]:
        install(sys.argv[2:])
        return
    from ipykernel.kernelapp import IPKernelApp

    from monarch_kernel.kernel import MonarchKernel

    IPKernelApp.launch_instance(kernel_class=MonarchKernel)


def install(words: list[str]) -> None:
    """Install the kernelspec for this Python interpreter."""
    from jupyter_client.kernelspec import KernelSpecManager

    parser = argparse.ArgumentParser("python -m monarch_kernel install")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="install for this user")
    where.add_argument("--sys-prefix", action="store_true", help="install into this Python environment (default)")
    where.add_argument("--prefix", help="install under this prefix")
    parser.add_argument("--name", default="monarch", help="name of the kernel (default: monarch)")
    arguments = parser.parse_args(words)
    prefix = None if arguments.user else arguments.prefix or sys.prefix
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(Path(__file__).parent / "kernelspec", Path(folder, "kernelspec"))
        spec = json.loads((source / "kernel.json").read_text())
        # Jupyter may run in another environment, whose `python` is not this one.
        spec["argv"][0] = sys.executable
        (source / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n")
        try:
            path = KernelSpecManager().install_kernel_spec(
                str(source), arguments.name, user=arguments.user, prefix=prefix
            )
        except (OSError, ValueError) as error:
            parser.error(str(error))
    print(f"installed kernel {arguments.name!r} in {path}")


if __name__ == "__main__":
    main()
