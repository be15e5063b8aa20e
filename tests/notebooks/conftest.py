"""The kernel as its command installs it, for notebooks that name it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _installed(spec: str) -> None:
    """All of these tests need the kernel."""
