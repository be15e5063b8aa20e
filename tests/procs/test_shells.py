"""An interactive shell on a host, used through a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from monarch.actor import this_host
from monarch.exceptions import ArgumentError
from monarch.job import shell

pytestmark = pytest.mark.slow


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, *command: str, **env: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, **env}
        )
        self.text = ""

    def keys(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str) -> re.Match[str]:
        """Read up to a pattern, and forget what is in front of its end."""
        until = time.monotonic() + 60
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < until, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 4096).decode()
        self.text = self.text[found.end() :]
        return found


@pytest.fixture
def terminal(warm: None) -> Iterator[Terminal]:
    made = Terminal(sys.executable, "-m", "monarch", "shell", "--env", "PS1=ready> ", SHELL="/bin/sh", COLUMNS="5")
    yield made
    made.process.kill()
    made.process.wait()
    os.close(made.master)
    os.close(made.slave)


def test_shell_of_a_host_is_like_one_here(terminal: Terminal) -> None:
    terminal.until("ready> ")
    terminal.keys("tty; stty size; echo $((40 + 2))\r")
    # Its own terminal, of the same size.
    assert terminal.until(r"/dev/pts/\d+").group() != os.ttyname(terminal.slave)
    terminal.until("33 99\r\n42\r\n")
    terminal.until("ready> ")
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
    os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.keys("until [ \"$(stty size)\" = '20 60' ]; do :; done; echo resi''zed\r")
    terminal.until("resized\r\n")
    # Ctrl-C interrupts the command there, and not the program here. The command speaks once it has the terminal.
    terminal.keys("sh -c 'echo slee\"\"ping; exec sleep 600'\r")
    terminal.until("sleeping\r\n")
    terminal.keys("\x03")
    terminal.until("ready> ")
    terminal.keys("exit 7\r")
    assert terminal.process.wait(30) == 7
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_shell_that_does_not_answer_can_be_left(terminal: Terminal) -> None:
    terminal.until("ready> ")
    # Raw, so that the terminal keeps all keys that nobody reads.
    terminal.keys("trap '' INT; stty raw; echo no''body; sleep 600\r")
    terminal.until("nobody")
    for _ in range(30):
        terminal.keys("x" * 1000)
    terminal.keys("\r~.")
    assert terminal.process.wait(30) == 128 + signal.SIGHUP


def test_shell_is_refused_without_terminal_or_on_several_hosts(host: object) -> None:
    with pytest.raises(ArgumentError, match="no terminal; use !COMMAND in a %%mesh cell"):
        shell(this_host())
