"""The threads that communicate for a process group run on any core that helps the rank, not on the rank's own only.

A thread inherits the cores of the thread that starts it, and a rank's code is bound to its share of them. With gloo's
threads bound as well, two ranks on two cores make a quarter fewer training steps.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from monarch._procs.os.helpers import as_helper

_MAKER = "_new_process_group_helper"
"""The function of torch that makes each group: ``init_process_group``, ``new_group`` and DeviceMesh call it."""


def free_gloo_threads() -> None:
    """Have groups that the user's code makes in this process start their threads on any core that helps it.

    Nothing changes where torch.distributed is not imported yet, or has no such function.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    make = getattr(c10d, _MAKER, None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_as_helper(*args: Any, **kwargs: Any) -> Any:
        with as_helper():
            return make(*args, **kwargs)

    setattr(c10d, _MAKER, make_as_helper)
