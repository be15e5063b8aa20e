"""A cell with a prompt, for tests of what asks the person at the notebook."""

from __future__ import annotations

from kernels import Notebook
from leaks import wait_until


def said(notebook: Notebook, line: str) -> str:
    """Run a line, and return its output."""
    return notebook.run(line).ok().stream("stdout")


class Dialog:
    """A running cell that asks questions."""

    def __init__(self, notebook: Notebook, code: str) -> None:
        self.notebook = notebook
        self.cell = notebook.send(code, allow_stdin=True)
        self.seen = 0

    def prompt(self) -> str:
        """Wait for the next question."""
        channel = self.notebook.client.stdin_channel
        assert wait_until(channel.msg_ready), self.cell.text
        return channel.get_msg(timeout=1)["content"]["prompt"]

    def shown(self) -> str:
        """Return the text shown since the last time; the next question tells that it is complete."""
        self.notebook.take(lambda: len(self.cell.stream()) > self.seen, "an answer")
        text = self.cell.stream()[self.seen :]
        self.seen += len(text)
        return text

    def answer(self, text: str) -> None:
        """Answer the question."""
        self.notebook.client.input(text)

    def ask(self, text: str) -> str:
        """Answer the question, and return what is shown until the next one."""
        self.answer(text)
        self.prompt()
        return self.shown()
