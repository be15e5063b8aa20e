"""``python -m monarch``: the ``monarch`` command."""

from __future__ import annotations

import sys

from monarch._session.command_line import main

if __name__ == "__main__":
    sys.exit(main())
