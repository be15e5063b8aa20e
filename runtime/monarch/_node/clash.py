"""The other package that is imported by the same name."""

from __future__ import annotations

import os
import sys
import warnings


def warn_of_torchmonarch() -> None:
    """Say so if torchmonarch is installed as well: whichever is found first is imported, or a mixture of both."""
    for folder in sys.path:
        # Only the other one has such a folder.
        if os.path.isdir(os.path.join(folder or ".", "monarch", "_src")):
            warnings.warn(
                f"torchmonarch is installed in {folder!r}, and it is imported by the name monarch too. What you get "
                f"may be a mixture of both; keep them in separate environments (pip uninstall torchmonarch).",
                stacklevel=3,
            )
            return
