"""Imports before the first mesh: rarely used modules are imported later."""

from __future__ import annotations

import subprocess
import sys

import pytest

import monarch.actor

LATER = (
    "asyncio",
    "numpy",
    "psutil",
    "torch",
    "monarch._procs.agent.main",
    "monarch._procs.zygote.main",
    "monarch._state",
)


def test_importing_actors_skips_rare_modules() -> None:
    code = f"import sys, monarch.actor; print(*(name for name in {LATER!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_call_imports_no_asyncio() -> None:
    code = """
import sys
from monarch.actor import Actor, endpoint, shutdown_context, this_host

class Echo(Actor):
    @endpoint
    def echo(self, value):
        return value

mesh = this_host().spawn_procs().spawn("echo", Echo)
assert "asyncio" not in sys.modules
assert list(mesh.echo.call(1).get().values()) == [1]
assert "asyncio" not in sys.modules
shutdown_context().get(60)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_of_actors_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'monarch\.actor' has no attribute 'no_such_name'"):
        _ = monarch.actor.no_such_name  # pyright: ignore[reportAttributeAccessIssue]
