"""``python -m monarch_kernel``: runs the kernel, or installs its kernelspec."""

from __future__ import annotations

import argparse
import sys
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
    """Installs the kernelspec."""
    from jupyter_client.kernelspec import KernelSpecManager

    parser = argparse.ArgumentParser("python -m monarch_kernel install")
    parser.add_argument("--user", action="store_true", help="for this user")
    parser.add_argument("--sys-prefix", action="store_true", help="into this Python environment (as usual)")
    parser.add_argument("--prefix", help="into that folder")
    parser.add_argument("--name", default="monarch", help="under another name")
    given = parser.parse_args(words)
    prefix = None if given.user else given.prefix or sys.prefix
    source = Path(__file__).parent / "kernelspec"
    where = KernelSpecManager().install_kernel_spec(str(source), given.name, user=given.user, prefix=prefix)
    print(f"the kernel {given.name!r} is installed in {where}")


if __name__ == "__main__":
    main()
