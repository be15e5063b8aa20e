"""Preloaded into a zygote, this disturbs the third fork of its fork helper, as DISTURB says."""

from __future__ import annotations

import errno
import os
import signal

_fork = os.fork
_zygote = os.getpid()
_forks = 0


def fork() -> int:
    global _forks
    if os.getpid() == _zygote:
        return _fork()
    _forks += 1
    if _forks == 3:
        how = os.environ["DISTURB"]
        if how == "fail":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        os.kill(_zygote if how == "kill the zygote" else os.getpid(), signal.SIGKILL)
    return _fork()


os.fork = fork
