"""The worker command: serve this machine as a host for programs that attach it.

``python -m monarch.worker --new-key cluster.key`` makes the key file that all machines need, and
``python -m monarch.worker tcp://0.0.0.0:22222 --key cluster.key`` serves one machine until it is stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from monarch._session.workers import new_key_file, run_worker_loop_forever, run_worker_loop_until_shutdown
from monarch.exceptions import MonarchError

__all__ = ["main"]

_INTERRUPTED = 130
"""The exit code that shells expect after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Ctrl-C ends the worker and everything that runs on it."""
    parser = argparse.ArgumentParser(
        prog="python -m monarch.worker", description="Serve this machine as a host for programs that attach it."
    )
    parser.add_argument("address", nargs="?", help="address to listen on, such as tcp://0.0.0.0:22222")
    parser.add_argument("--key", metavar="FILE", help="the key file; only programs with the same key are served")
    parser.add_argument("--new-key", metavar="FILE", help="make a key file that only its owner can read")
    parser.add_argument(
        "--silence",
        type=float,
        metavar="SECONDS",
        help="end a program's ranks after this many seconds without a heartbeat (default: 5)",
    )
    parser.add_argument(
        "--until-shutdown", action="store_true", help="exit once a program has shut the host down or has ended"
    )
    arguments = parser.parse_args(argv)
    address, key, new_key = arguments.address, arguments.key, arguments.new_key
    try:
        if new_key is not None:
            if address is not None:
                parser.error("--new-key only makes a key file; start the worker with a second command")
            new_key_file(new_key)
            print(f"wrote key file {new_key}; copy it to each machine, readable only by you")
        elif address is None or key is None:
            parser.error("expected an address and --key FILE to serve, or --new-key FILE to make a key file")
        else:
            serve = run_worker_loop_until_shutdown if arguments.until_shutdown else run_worker_loop_forever
            serve(address=address, ca=key, silence=arguments.silence)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except FileExistsError:
        print(f"monarch.worker: {new_key} already exists; remove it first to make a new key", file=sys.stderr)
        return 1
    except (MonarchError, OSError) as error:
        print(f"monarch.worker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
