"""Meshes that outlive their program: another one of the same user attaches them."""

from __future__ import annotations

from monarch._session.detached import Kept, attach, end, keep, records

__all__ = ["Kept", "attach", "end", "keep", "records"]
