"""The kernel, installed by its command."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _installed(spec: str) -> None:
    """Install the kernel for all tests."""
