"""Kernels that are forked with their imports done, as most of these tests use, are as those that are started."""

from __future__ import annotations

import ast
import os
import select
from collections.abc import Callable
from typing import Any

import pytest

import warm_python
from kernels import Notebook
from leaks import wait_until

LOOK = """
import gc, os, resource, signal, sys, threading
from monarch._procs.zygote.identity import session_key
print(repr({
    "argv": sys.argv[:-1], "path": sys.path, "flags": str(sys.flags), "folder": os.getcwd(),
    "environ": {key: value for key, value in os.environ.items() if key != "JPY_PARENT_PID"},
    "parent": os.environ["JPY_PARENT_PID"] == str(os.getppid()), "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "output": [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)], "input": os.read(0, 1),
    "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "mask": [os.umask(0o22), os.umask(0o22)],
    "limits": [resource.getrlimit(getattr(resource, each)) for each in dir(resource) if each.startswith("RLIMIT")],
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] not in ("monarch", "encodings")),
    "main": sys.modules["__main__"].__name__,
    "threads": sorted({type(each).__qualname__ for each in threading.enumerate() if each.name[:7] != "monarch"}),
    "server": session_key([], []), "collects": (gc.isenabled(), gc.get_threshold()),
}))
"""


def test_forked_kernel_is_as_a_started_one(own: Callable[..., Notebook], monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm_python.kernels is not None
    forked = own()
    assert isinstance(process(forked), warm_python.Forked)
    monkeypatch.setattr(warm_python, "kernels", None)
    started = own()
    assert not isinstance(process(started), warm_python.Forked)
    seen: list[Any] = []
    for book in (forked, started):
        # By then, what a kernel does in the background at its start is over.
        book.run("%mesh up --procs 1").ok()
        seen.append(ast.literal_eval(book.run(LOOK).ok().stream()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("variable", ["MONARCH_READY_SECONDS", "OMP_NUM_THREADS", "HOME"])
def test_kernel_with_another_environment_is_started(own: Callable[..., Notebook], variable: str) -> None:
    assert not isinstance(process(own(**{variable: "7"})), warm_python.Forked)


def test_end_of_a_forked_kernel_is_seen(own: Callable[..., Notebook]) -> None:
    book = own()
    book.send("import os\nos._exit(7)")
    assert process(book).wait(30) == 7 and process(book).poll() == 7


def test_forked_kernel_ends_with_its_parent(own: Callable[..., Notebook]) -> None:
    with warm_python.held_for_kernels():
        book = own()
        kernel = os.pidfd_open(process(book).pid)
    with open(kernel) as ended:
        assert wait_until(lambda: select.select([ended], [], [], 0)[0])


def process(book: Notebook) -> Any:
    """Return the process of a kernel."""
    provisioner: Any = book.manager.provisioner
    return provisioner.process
