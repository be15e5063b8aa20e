"""What this project uses of NIXL's Python interface."""

import enum
from collections.abc import Sequence
from typing import Any

class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = ...

class nixl_agent_config:
    def __init__(self, *, backends: Sequence[str], sync_mode: nixl_thread_sync_t = ...) -> None: ...

class nixl_agent:
    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
