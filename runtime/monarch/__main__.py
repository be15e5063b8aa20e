"""``python -m monarch``: the ``monarch`` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command with the arguments of this process; return the exit code."""
    if sys.argv[1:2] == ["worker"]:
        from monarch.worker import main as worker

        return worker(sys.argv[2:])
    if sys.argv[1:2] == ["top"]:
        from monarch._telemetry.top_command import main as top

        return top(sys.argv[2:])
    if sys.argv[1:2] == ["debug"]:
        from monarch._debug.attach_command import main as debug

        return debug(sys.argv[2:])
    from monarch._session.commands.command_line import main as others

    return others(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
