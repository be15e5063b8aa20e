"""The states of the random generators of a rank, which cells may have seeded alike on all ranks."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return, by name, how the state of each generator is read and set."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {"random": (random.getstate, random.setstate)}
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if torch is not None:
        found["torch"] = torch.get_rng_state, torch.set_rng_state
    if numpy is not None and hasattr(numpy, "random"):
        found["numpy"] = numpy.random.get_state, numpy.random.set_state
    return found


def random_states(names: Collection[str]) -> dict[str, Any]:
    """Return the states of some generators, by name."""
    return {name: read() for name, (read, _) in _generators().items() if name in names}


def random_prints() -> dict[str, str]:
    """Return what tells whether generators are in the same state on another rank, by name."""
    prints: dict[str, str] = {}
    for name, state in random_states(_generators()).items():
        parts = [state.numpy().tobytes()] if hasattr(state, "numpy") else map(_bytes_of, state)
        prints[name] = str([zlib.crc32(each) for each in parts])
    return prints


def _bytes_of(part: Any) -> bytes:
    return part.tobytes() if hasattr(part, "tobytes") else repr(part).encode()


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the states of generators."""
    for name, (_, put) in _generators().items():
        if name in states:
            put(states[name])
