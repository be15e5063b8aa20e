"""``python -m monarch_kernel``: runs the kernel, or installs its kernelspec."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Entry point: ``install`` puts the kernelspec where Jupyter finds it; everything else starts the kernel."""
    if sys.argv[1:2] == ["install"]:
        install(sys.argv[2:])
        return
    from ipykernel.kernelapp import IPKernelApp

    from monarch_kernel.kernel import MonarchKernel

    IPKernelApp.launch_instance(kernel_class=MonarchKernel)


def install(words: list[str]) -> None:
    """Installs the kernelspec, for the interpreter that runs this."""
    from jupyter_client.kernelspec import KernelSpecManager

    parser = argparse.ArgumentParser("python -m monarch_kernel install")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="for this user")
    where.add_argument("--sys-prefix", action="store_true", help="into this Python environment (as usual)")
    where.add_argument("--prefix", help="into that folder")
    parser.add_argument("--name", default="monarch", help="under another name")
    given = parser.parse_args(words)
    prefix = None if given.user else given.prefix or sys.prefix
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(Path(__file__).parent / "kernelspec", Path(folder, "kernelspec"))
        spec = json.loads((source / "kernel.json").read_text())
        # Jupyter may run in another environment, whose `python` is not this one.
        spec["argv"][0] = sys.executable
        (source / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n")
        try:
            path = KernelSpecManager().install_kernel_spec(str(source), given.name, user=given.user, prefix=prefix)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    print(f"the kernel {given.name!r} is installed in {path}")


if __name__ == "__main__":
    main()
