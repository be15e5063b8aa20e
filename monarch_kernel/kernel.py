"""The Monarch kernel: ipykernel's, with the meshes built in."""

from __future__ import annotations

import threading
from typing import Any

from ipykernel.ipkernel import IPythonKernel

import monarch_kernel


class MonarchKernel(IPythonKernel):
    """A Python kernel whose notebook is the controller of meshes of ranks."""

    implementation = "monarch"

    @property
    def banner(self) -> str:
        """What a terminal shows at the start."""
        return "Monarch: a Python kernel that is the controller of a mesh of ranks. %mesh help says more."

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        monarch_kernel.load_ipython_extension(self.shell)
        # While the person reads, the process that ranks are forked from imports torch.
        threading.Thread(target=_warm_up, name="monarch-warm-up", daemon=True).start()

    def do_shutdown(self, restart: bool) -> Any:
        """Ends the meshes with the kernel."""
        from monarch._actors.client import shutdown_context

        shutdown_context(2).get()
        return super().do_shutdown(restart)


def _warm_up() -> None:
    from monarch.actor import this_host

    this_host()
