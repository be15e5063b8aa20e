"""Seeds of random ops: from the program's generator, which ``torch.manual_seed`` sets."""

from __future__ import annotations

import torch

from monarch._engine.issuing.observer import current

_SEEDS = 2**62


def new_seed() -> int:
    """Return a seed."""
    if current.observer is not None:
        seed = current.observer.seed()
        if seed is not None:
            return seed
    return int(torch.randint(_SEEDS, (), dtype=torch.int64).item())
