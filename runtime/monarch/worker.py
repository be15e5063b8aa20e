"""A worker from a shell: it serves this machine as a host for programs that attach it.

``python -m monarch.worker --new-key cluster.key`` makes the key file that all machines need, and
``python -m monarch.worker tcp://0.0.0.0:22222 --key cluster.key`` serves one of them until it is stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from monarch._session.workers import new_key_file, run_worker_loop_forever
from monarch.exceptions import MonarchError

__all__ = ["main"]

_INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments of the command say; its exit code. Ctrl-C ends the worker, with all that runs on it."""
    parser = argparse.ArgumentParser(
        prog="python -m monarch.worker", description="Serve this machine as a host for programs that attach it."
    )
    parser.add_argument("address", nargs="?", help="where to listen, as in tcp://0.0.0.0:22222")
    parser.add_argument("--key", metavar="FILE", help="the key file; only programs that have the same one are served")
    parser.add_argument("--new-key", metavar="FILE", help="make a key file, which only its owner can read")
    parser.add_argument(
        "--silence",
        type=float,
        metavar="SECONDS",
        help="how long a program may be silent before its ranks are ended here; 5 if nothing is said",
    )
    given = parser.parse_args(argv)
    address, key, new_key = given.address, given.key, given.new_key
    try:
        if new_key is not None:
            if address is not None:
                parser.error("--new-key makes a key file, and serves nothing; start the worker by a command of its own")
            new_key_file(new_key)
            print(f"{new_key} is the key; copy it to each machine, where nobody else is to read it")
        elif address is None or key is None:
            parser.error("give an address and --key FILE to serve, or --new-key FILE to make a key file")
        else:
            run_worker_loop_forever(address=address, ca=key, silence=given.silence)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except FileExistsError:
        print(f"monarch.worker: {new_key} is there already; remove it first for a new key", file=sys.stderr)
        return 1
    except (MonarchError, OSError) as error:
        print(f"monarch.worker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
