"""Finding out why the ranks of a mesh wait. The room of the debugger provides it."""

from __future__ import annotations

from typing import Any

from monarch._core.diagnosis.explanation import Explanation
from monarch._node.services.registry import declared


class HasReasons:
    """Mixin of process meshes: tells what their ranks wait for, at any time, from any thread of the program."""

    def why(self) -> Explanation:
        """Return why the ranks of this mesh wait: who waits where, for whom, and where those are instead.

        It takes about half a second, because it looks twice, and longer if a rank does not answer. Other ranks that
        calls of these ranks wait for are asked as well. Print it, or read its ``findings``.
        """
        return _why(self)


@declared("asking_why.why")
def _why(mesh: Any) -> Explanation:
    raise NotImplementedError
