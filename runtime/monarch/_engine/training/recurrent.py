"""LSTMs on a mesh: on CPUs torch runs a layer as one op of oneDNN; DTensor has no rule for it, and GPUs no kernel."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from monarch._engine.dtensor_compat import onednn_is_enabled, set_onednn

_lock = threading.Lock()
_running = 0
"""LSTMs that run by steps now. Lock: ``_lock``, since torch has one switch for all threads."""
_before = True
"""Whether oneDNN was enabled before the first of them. Likewise."""


def run_by_steps(module: nn.Module) -> None:
    """Let an LSTM run as ops for each step of its input, which DTensor knows; leave other modules as they are."""
    if isinstance(module, nn.LSTM):
        # Functions, so that the module can be copied and pickled.
        module.register_forward_pre_hook(_begin)
        module.register_forward_hook(_end, always_call=True)


def _begin(*_: Any) -> None:
    global _running, _before
    with _lock:
        if not _running:
            _before = onednn_is_enabled()
            set_onednn(False)
        _running += 1


def _end(*_: Any) -> None:
    global _running
    with _lock:
        _running -= 1
        if not _running:
            set_onednn(_before)
