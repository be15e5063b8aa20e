"""A warning about the other package with the import name ``monarch``."""

from __future__ import annotations

import os
import sys
import warnings


def warn_of_torchmonarch() -> None:
    """Warn if torchmonarch is installed too: the first on the path is imported, or a mixture of both."""
    for folder in sys.path:
        # Only torchmonarch has this folder.
        if os.path.isdir(os.path.join(folder or ".", "monarch", "_src")):
            warnings.warn(
                f"torchmonarch in {folder!r} is also imported as monarch, so you may get a mixture of both; "
                f"keep them in separate environments (pip uninstall torchmonarch).",
                stacklevel=3,
            )
            return
