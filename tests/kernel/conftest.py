"""The kernels that these tests share."""

from __future__ import annotations

from books import installed, notebook, own

__all__ = ["installed", "notebook", "own"]
