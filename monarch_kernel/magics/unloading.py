"""``%unload_ext monarch_kernel``: the shell as it was before."""

from __future__ import annotations

import contextlib
from typing import Any

import monarch.actor
from monarch._kernel_api import Advice, has_node, shutdown_context, use_advice
from monarch.actor import default_fault_hook
from monarch.exceptions import MonarchError
from monarch_kernel.grammar.typed_lines import arrange
from monarch_kernel.magics.mesh import MeshMagics
from monarch_kernel.views.shown import uninstall


def unload(shell: Any) -> None:
    """End the meshes, and remove all that loading has added to a shell."""
    magics: MeshMagics | None = shell.magics_manager.registry.pop("MeshMagics", None)
    if magics is None:
        return
    names = list(magics.meshes.by_name)
    for name in names:
        with contextlib.suppress(MonarchError):
            # A mesh that does not end in time ends with the session.
            magics.meshes.down(name)
    if has_node():
        shutdown_context(2).get()
    if names:
        print(f"ended {'mesh' if len(names) == 1 else 'meshes'} {', '.join(names)}")
    magics.close()
    uninstall(shell)
    for kind, name in (("line", "mesh"), ("line", "%mesh"), ("cell", "mesh")):
        shell.magics_manager.magics[kind].pop(name, None)
    with contextlib.suppress(ValueError):
        shell.Completer.custom_matchers.remove(shell.monarch_help.matcher)
    with contextlib.suppress(ValueError):
        shell.input_transformers_cleanup.remove(arrange)
    shell.set_custom_exc((), None)
    use_advice(Advice())
    monarch.actor.unhandled_fault_hook = default_fault_hook
