"""Control sequences of terminals, such as colours, in the output of ranks."""

from __future__ import annotations

import re

_CODE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def without_codes(text: str) -> str:
    """Return a text as people read it, where nothing renders its control sequences."""
    return _CODE.sub("", text) if "\x1b" in text else text
