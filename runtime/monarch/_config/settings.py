"""Time limits, counts and switches: environment variables, read at use."""

from __future__ import annotations

import math
import os
import warnings


class Seconds:
    """A time limit in seconds.

    Args:
        variable: the environment variable that overrides the default.
        default: seconds, if the variable is unset or not a positive number.
    """

    def __init__(self, variable: str, default: float) -> None:
        self.variable = variable
        self.default = default

    def __call__(self) -> float:
        """Return the current limit in seconds."""
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if seconds > 0 and math.isfinite(seconds):
            return seconds
        warnings.warn(
            f"{self.variable}: expected a positive number of seconds, got {text!r}; using {self.default:g}",
            stacklevel=2,
        )
        return self.default

    def __repr__(self) -> str:
        return f"Seconds({self.variable!r}, {self.default:g})"


def is_on(text: str | None) -> bool:
    """Return whether the text of a variable means on, as in ``Flag``."""
    return (text or "").strip().lower() not in ("", "0", "false", "no", "off")


class Flag:
    """A switch that is off unless its variable is set.

    Args:
        variable: the environment variable; empty, ``0``, ``false``, ``no`` and ``off`` mean off, any other value on.
    """

    def __init__(self, variable: str) -> None:
        self.variable = variable

    def __call__(self) -> bool:
        """Return whether it is on now."""
        return is_on(os.environ.get(self.variable))

    def __repr__(self) -> str:
        return f"Flag({self.variable!r})"


class Count:
    """A number that an environment variable overrides.

    Args:
        variable: the environment variable that overrides the default.
        default: the number, if the variable is unset or not a whole number of at least 0.
    """

    def __init__(self, variable: str, default: int) -> None:
        self.variable = variable
        self.default = default

    def __call__(self) -> int:
        """Return the current number."""
        text = os.environ.get(self.variable, "").strip()
        return int(text) if text.isdecimal() else self.default

    def __repr__(self) -> str:
        return f"Count({self.variable!r}, {self.default})"


STOP_REACT = Seconds("MONARCH_STOP_REACT_S", 3.0)
"""For a stopped process to report that it is stopping; one that does not, because C code holds the GIL, is then
killed."""
STOP_DRAIN = Seconds("MONARCH_STOP_DRAIN_S", 3.0)
"""For a stopped actor to handle earlier messages; then its calls are cancelled, or interrupted."""
STOP_CANCEL = Seconds("MONARCH_STOP_CANCEL_S", 1.0)
"""For cancelled or interrupted code to end, including its ``finally``; then the actor continues without it."""
STOP_OWNED = Seconds("MONARCH_STOP_OWNED_S", 10.0)
"""For the meshes of an actor to stop, all together, before its ``__cleanup__`` runs."""
STOP_CLEANUP = Seconds("MONARCH_STOP_CLEANUP_S", 5.0)
"""For ``__cleanup__``; then it is cancelled, or interrupted."""
COLLECTIVE_WAIT = Seconds("MONARCH_COLLECTIVE_WAIT_S", 2.0)
"""For a rank to wait in a collective for finished ranks before that is reported; this ends nothing."""
STUCK_WAIT = Seconds("MONARCH_STUCK_WAIT_S", 3.0)
"""For ranks to wait for others before a running cell says where they are and why."""
FAILED_CALL_WAIT = Seconds("MONARCH_FAILED_CALL_WAIT_S", 300.0)
"""For a call sent before a failure was known to wait for older calls to end, before it raises; read in the rank."""
ISOLATE_GPUS = Flag("MONARCH_ISOLATE_GPUS")
"""In the environment of a mesh: whether each rank sees only its own GPU, instead of all."""
BREAK_ALONE = Flag("MONARCH_BREAK_ALONE")
"""Whether the other ranks of a mesh run on while one is at a breakpoint; read in the program."""
CHECK_COLLECTIVES = Flag("MONARCH_CHECK_COLLECTIVES")
"""Whether ranks compare operation, shapes and dtypes before each collective; read when a rank starts."""
STEP_AT_ONCE = Flag("MONARCH_STEP_AT_ONCE")
"""Whether an optimizer's step is issued while the GPU still reduces gradients; read in the rank. A death during the
reduction can then leave the parameters changed by gradients that were not reduced."""
TAIL_LINES = Count("MONARCH_TAIL_LINES", 10)
"""How many lines of stderr of a dead process its report has."""
TREE_HOSTS = Count("MONARCH_TREE_HOSTS", 16)
"""The number of hosts from which on a message to many goes from host to host; 0 for never. Read in the program."""
