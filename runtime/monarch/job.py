"""Meshes that outlive their program: another program of the same user attaches them."""

from __future__ import annotations

from monarch._session.detached import DetachedMesh, attach, end, keep, records

__all__ = ["DetachedMesh", "attach", "end", "keep", "records"]
