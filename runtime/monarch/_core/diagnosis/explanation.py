"""The result of ``mesh.why()``."""

from __future__ import annotations

from typing import NamedTuple

from monarch._core.diagnosis.findings import Finding, Level, Standing


class Explanation(NamedTuple):
    """Why ranks wait. Its ``str()`` is ``text``."""

    findings: tuple[Finding, ...]
    """The most certain first."""
    others: tuple[Standing, ...]
    """The ranks that wait for no other one, and that none waits for."""
    text: str
    """All of it in words."""

    @property
    def is_stuck(self) -> bool:
        """Whether ranks are certain to wait forever."""
        return any(each.level is Level.STUCK for each in self.findings)

    def __str__(self) -> str:
        """Return the text."""
        return self.text
