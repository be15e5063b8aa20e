"""The notebook side of Monarch: it makes a Jupyter notebook the controller of a mesh.

The runtime is the package ``monarch``, which needs no Jupyter. Importing this package imports nothing else;
``__version__`` is looked up on first use.
"""

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]

from typing import Any

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        current = version("monarch-kernel")
    except PackageNotFoundError:  # run from a source tree that is not installed
        current = "0+unknown"
    globals()["__version__"] = current
    return current


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext monarch_kernel``: register the magics in any IPython shell or kernel."""
    from monarch._kernel_api import use_advice
    from monarch_kernel.cells.advice import NotebookAdvice
    from monarch_kernel.cells.faults import install as install_hook
    from monarch_kernel.cells.tracebacks import install
    from monarch_kernel.kernel_like import kernel_of, own_kernel
    from monarch_kernel.magics.mesh import MeshMagics
    from monarch_kernel.magics.typing_help import install as install_help
    from monarch_kernel.views.shown import install as install_views

    before = shell.magics_manager.registry.get("MeshMagics")
    # Loaded again: the running meshes and the mode of plain cells stay.
    header = before.auto.header if before is not None else None
    if before is not None:
        # First, since it gives back what the new magics take.
        before.close()
    magics = MeshMagics(shell, *((before.meshes, before.front_end) if before is not None else ()))
    magics.auto.header = header
    shell.register_magics(magics)
    magics.editor.watch()
    magics.keeping.watch()
    install(shell, magics)
    advice = NotebookAdvice(shell, magics.meshes)
    use_advice(advice)
    install_hook(magics.streams, advice)
    shell.monarch_help = install_help(shell, magics)
    install_views(shell, magics.shown)
    kernel = kernel_of(shell)
    own = own_kernel(kernel)
    if kernel is not None:
        magics.views.install(kernel, own.lane if own is not None else None)
    if before is None and own is None:
        print(
            "%mesh and %%mesh are ready; %mesh help lists the commands. The Monarch kernel adds ranks to the debugger "
            "of the front end, view buttons that work in every front end while a cell runs, Shift-Tab help on rank "
            "variables, and a Stop button that interrupts a top-level await."
        )


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext monarch_kernel``: end the meshes and remove the magics; ``%reload_ext`` keeps them."""
    from monarch_kernel.compat import reloads_extension
    from monarch_kernel.magics.unloading import unload

    if not reloads_extension():
        unload(shell)
