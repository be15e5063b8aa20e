"""The end of a host that is announced: the agent tells its controller, and stays until that lets it go."""

from __future__ import annotations

from collections.abc import Callable

from monarch._procs.agent.request import AgentConfig
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_whole

_ORDERLY_S = 3.0
"""Seconds for the end of ranks."""
NOTICE = "draining.notice"
"""The service of the controller."""


class Leaving:
    """The notice that the host is taken back.

    Args:
        config: the config of the agent.
        host: its id.
        later: calls a function after some seconds.
        tell: sends a message to the controller; returns whether there is one.
        end: ends the agent.
    """

    def __init__(
        self,
        config: AgentConfig,
        host: str,
        later: Callable[[float, Callable[[], None]], None],
        tell: Callable[[m.Ask], bool],
        end: Callable[[], None],
    ) -> None:
        self._config = config
        self._notice_pid = config.notice_pid
        self._host = host
        self._later = later
        self._tell = tell
        self._end = end
        self._told = False

    def on_term(self, *_: object) -> None:
        """Handle SIGTERM: schedulers send it some time before they kill. Also called as a signal handler."""
        if not self._config.grace:
            self._end()
        else:
            # The loop is woken by the signal.
            self._later(0.0, lambda: self._notice("SIGTERM"))

    def ended(self, pid: int, status: int) -> bool:
        """Return whether a child process is the command that waits for a notice; its success is one."""
        if not pid or pid != self._notice_pid:
            return False
        # A rank may get this pid.
        self._notice_pid = 0
        if not status:
            self._notice("notice")
        return True

    def _notice(self, reason: str) -> None:
        if self._told:
            # Some schedulers send the signal again, right before they kill.
            return
        self._told = True
        body = dumps_whole((self._host, reason, self._config.grace))
        if not self._tell(m.Ask(f"{self._host}/agent", 0, b"", NOTICE, body)):
            self._end()
        # In time to end its ranks and to remove its files.
        self._later(max(self._config.grace - _ORDERLY_S, self._config.grace * 0.7), self._end)
