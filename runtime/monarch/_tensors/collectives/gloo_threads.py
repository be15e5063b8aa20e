"""Let communication threads of process groups run on any core that helps the rank, not only on the rank's own.

A thread inherits the cores of its creator, and a rank's code is bound to its share of them. With gloo's threads bound
as well, two ranks on two cores make a quarter fewer training steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from monarch._procs.os.helpers import as_helper
from monarch._tensors.torch_compat import wrap_group_maker


def free_gloo_threads() -> None:
    """Make groups that user code creates in this process start their threads on any core that helps it.

    Does nothing if torch.distributed is not imported yet, or lacks the function.
    """
    wrap_group_maker(_as_helper)


def _as_helper(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_as_helper(*args: Any, **kwargs: Any) -> Any:
        with as_helper():
            return make(*args, **kwargs)

    return make_as_helper
