"""Run a notebook in the real kernel, and show its progress, its results and its timing in the terminal.

Run it with `make demo`. It needs no GPU, and leaves only the executed notebook behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from stored import cleared
from story import RAISES, Step, line_of, result_of, step_at, steps_of, text_of

HERE = Path(__file__).resolve().parent
LINES = 6
"""Most lines of a cell's output in the terminal."""


class Show:
    """The terminal output of a run.

    Args:
        console: the terminal.
        notebook: to run.
    """

    def __init__(self, console: Console, notebook: Any) -> None:
        self.console = console
        self.notebook = notebook
        self.steps = steps_of(notebook)
        self._cell = 0
        self._begun = 0.0
        self._step: Step | None = None
        self.live: Live | None = None

    def begins(self, cell: Any, cell_index: int) -> None:
        """Show the step of a cell that starts."""
        if cell.cell_type != "code":
            return
        self._cell, self._begun = cell_index, time.perf_counter()
        step = step_at(self.steps, cell_index)
        if step is not self._step:
            self._step = step
            self.console.print(f"\n[bold cyan]{self.steps.index(step) + 1}. {step.title}[/]")
        self.update()

    def update(self) -> None:
        """Show the line of the running cell."""
        if self.live is not None and self._step is not None:
            code = line_of(self.notebook.cells[self._cell].source)
            done = sum(len(step.cells) for step in self.steps[: self.steps.index(self._step)])
            total = sum(len(step.cells) for step in self.steps)
            text = Text(f" {done + self._step.cells.index(self._cell) + 1} of {total}  {code}", style="dim")
            self.live.update(Spinner("dots", text))

    def ended(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        """Show the source and the output of a finished cell."""
        taken = time.perf_counter() - self._begun
        assert self._step is not None
        self._step.seconds += taken
        code = Text(f"   >>> {line_of(cell.source)}", style="dim")
        self.console.print(code, soft_wrap=False, overflow="ellipsis", no_wrap=True)
        meant = RAISES in cell.metadata.get("tags", ())
        lines = [line for line in text_of(cell).split("\n") if line.strip()]
        for line in lines[:LINES]:
            self.console.print(Text(f"   {line}", style="yellow" if meant else ""), no_wrap=True, overflow="ellipsis")
        if len(lines) > LINES:
            self.console.print(Text(f"   … {len(lines) - LINES} more lines in the notebook", style="dim"))
        if self.live is not None:
            self.live.update(Text(""))


def run(console: Console, path: Path, executed: Path, timeout: float) -> int:
    """Run a notebook and report on it; return the exit status."""
    notebook = cleared(nbformat.read(path, as_version=4))
    show = Show(console, notebook)
    client = NotebookClient(
        notebook,
        kernel_name=notebook.metadata.kernelspec.name,
        # Hide warnings about the kernel's connection.
        extra_arguments=["--IPKernelApp.log_level=40"],
        timeout=timeout,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=show.begins,
        on_cell_executed=show.ended,
    )
    begun = time.perf_counter()
    status = 1
    console.rule(f"[bold]{path.name}[/] through the kernel {notebook.metadata.kernelspec.display_name!r}")
    try:
        if console.is_terminal:
            with Live(Text(""), console=console, refresh_per_second=10, transient=True) as show.live:
                execute(client)
        else:
            execute(client)
        status = 0
    except KeyboardInterrupt:
        console.print("\nstopped; the kernel and its ranks have ended")
        status = 130
    except CellExecutionError as error:
        where = next((cell for cell in notebook.cells if cell.cell_type == "code" and _failed(cell)), None)
        text = text_of(where) if where is not None else str(error)
        title = f"cell {where.id if where is not None else ''} failed: {error.ename}"
        console.print(Panel(Text(text.strip()), title=title, title_align="left", border_style="red"))
    except (DeadKernelError, TimeoutError) as error:
        console.print(Panel(Text(str(error).strip()), title="the kernel did not answer", border_style="red"))
    finally:
        executed.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, executed)
    _summary(console, show, executed, time.perf_counter() - begun, status)
    return status


def execute(client: NotebookClient) -> None:
    """Run the cells; a Ctrl-C ends the kernel, and the ranks with it."""
    # In a thread, since nbclient has its own handling of Ctrl-C.
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(client.execute)
        try:
            done.result()
        except KeyboardInterrupt:
            provisioner = client.km.provisioner if client.km is not None else None
            pid = getattr(provisioner, "pid", None)
            if pid is not None:
                os.kill(pid, signal.SIGTERM)
            done.exception()
            raise


def _failed(cell: Any) -> bool:
    return RAISES not in cell.metadata.get("tags", ()) and any(each.output_type == "error" for each in cell.outputs)


def _summary(console: Console, show: Show, executed: Path, seconds: float, status: int) -> None:
    table = Table(title="how long each step took", title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    table.add_column("seconds", justify="right")
    for step in show.steps:
        table.add_row(step.title, f"{step.seconds:.2f}")
    table.add_row("[bold]total, with kernel start and shutdown", f"[bold]{seconds:.2f}")
    console.print()
    console.print(table)
    result = result_of(show.notebook)
    if result and status == 0:
        console.print(f"\n[bold green]{result}[/]")
    place = os.path.relpath(executed)
    console.print(f"\nThe executed notebook is {place}. To open it in JupyterLab: [bold]make lab[/]", soft_wrap=True)


def main() -> int:
    """Run the demo with the command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", nargs="?", type=Path, default=HERE / "00_quickstart.ipynb")
    parser.add_argument("--out", type=Path, help="path of the executed notebook (default: in notebooks/executed)")
    parser.add_argument("--timeout", type=float, default=300, help="timeout of a cell in seconds")
    arguments = parser.parse_args()
    if not arguments.notebook.exists():
        parser.error(f"notebook {arguments.notebook} does not exist")
    # The kernelspec of this environment takes precedence over a user kernelspec of the same name.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    # A kill ends the kernel and its ranks, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False)
    return run(
        console, arguments.notebook, arguments.out or HERE / "executed" / arguments.notebook.name, arguments.timeout
    )


if __name__ == "__main__":
    sys.exit(main())
