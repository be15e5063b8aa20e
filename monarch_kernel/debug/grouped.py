"""Answers of ranks as text: equal ones are shown once, with all their ranks."""

from __future__ import annotations

from monarch._kernel_api import grouped, grouped_lines

__all__ = ["grouped", "grouped_lines"]
