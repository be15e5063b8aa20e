"""Every private name of ipykernel and IPython that the kernel uses, and its assumptions about their internals.

Tests run each of these against the installed versions; `.ci/check-versions` runs them at the lowest and newest ones.
ipykernel is not imported here: an IPython shell without a kernel loads this file too.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from glob import glob
from importlib import import_module
from inspect import currentframe
from io import StringIO
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.prefilter import PrefilterChecker

from monarch_kernel.kernel_like import Kernel, Publisher

_Kernel = TypeVar("_Kernel", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHELL: Any = InteractiveShell
_RUN_CODE: CodeType = _SHELL.run_code.__code__
_FINDERS: dict[CodeType, str] = {_SHELL.run_line_magic.__code__: "%", _SHELL.run_cell_magic.__code__: "%%"}
"""The functions that look a magic up, and the percent signs of their kind."""
_REPLACED_S = 2.0
"""Seconds in which a front end closes the input box of an earlier question to show the next one."""
_left_open: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
"""By kernel, the message that runs a cell, and the input boxes of its questions without an answer that a front end may
still show. Single operations, by the thread that asks."""
_ASKING_MS = 20
"""Milliseconds between two looks whether an answer is still of interest."""
_MOST_TRANSFORMS = 5000
"""Magics and commands of one cell."""
_AT_START = (
    *("extensions", "extra_extensions", "extra_extension", "exec_lines", "exec_files"),
    *("file_to_run", "code_to_run", "module_to_run", "gui", "matplotlib", "pylab"),
)
"""Settings by which something runs as the kernel starts."""


def line_magic(name: str) -> Callable[[_Function], _Function]:
    """Method decorator: the magic ``%name``. IPython's own is not typed, nor are the next three."""
    return import_module("IPython.core.magic").line_magic(name)


def no_var_expand(function: _Function) -> _Function:
    """Decorator: a line magic whose braces are left alone."""
    return import_module("IPython.core.magic").no_var_expand(function)


def cell_magic(name: str) -> Callable[[_Function], _Function]:
    """Method decorator: the magic ``%%name``."""
    return import_module("IPython.core.magic").cell_magic(name)


def matcher(function: _Function) -> _Function:
    """Decorator: a matcher of the shell's completer that takes the context of the cursor."""
    return import_module("IPython.core.completer").context_matcher()(function)


def display(bundle: dict[str, str], display_id: str | None = None) -> None:
    """Show a MIME bundle in the running cell; with an id, it can be updated later."""
    import_module("IPython.display").display(bundle, raw=True, display_id=display_id)


def display_line(text: str, handle: Any = None) -> Any:
    """Show a line of text in the running cell, or put it in the place of an earlier one; return its handle."""
    bundle = {"text/plain": text}
    if handle is None:
        return import_module("IPython.display").display(bundle, raw=True, display_id=True)
    handle.update(bundle, raw=True)
    return handle


def runs_cell(frame: FrameType | None) -> bool:
    """Return whether the thread with this innermost frame runs the code of a cell."""
    while frame is not None:
        if frame.f_code is _RUN_CODE:
            return True
        frame = frame.f_back
    return False


def missing_magic(shell: Any, tb: TracebackType | None) -> tuple[str, str, list[str]] | None:
    """Return the percent signs and the name of the magic that an error with this traceback misses, and the known names.

    None if the error has another reason, or if a magic of the other kind has the name, which IPython says.
    """
    frames = [frame for frame, _ in walk_tb(tb)]
    sign = _FINDERS.get(frames[-1].f_code) if frames else None
    if sign is None:
        return None
    inside, magics = frames[-1].f_locals, shell.magics_manager.lsmagic()
    name = str(inside["magic_name"])
    if inside.get("fn") is not None or name in magics["line"] or name in magics["cell"]:
        return None
    return sign, name, [known for known in magics["cell" if sign == "%%" else "line"] if known.isidentifier()]


def run_nested(shell: Any, cell: str) -> Any:
    """Run a cell inside a running one, without its result; return IPython's ``ExecutionResult``.

    A top-level ``await`` runs on IPython's own event loop, since that of the kernel waits for the outer cell.
    """
    outer = asyncio._get_running_loop()
    if outer is not None and shell.should_run_async(cell, transformed_cell=shell.transform_cell(cell)):
        asyncio._set_running_loop(None)
    try:
        return shell.run_cell(cell, silent=True)
    finally:
        asyncio._set_running_loop(outer)


def cancels_awaits(kernel: _Kernel) -> _Kernel:
    """Class decorator: ipykernel enters ``kernel.cancel_on_sigint(future)`` while a cell awaits something.

    Raises:
        AttributeError: this version of ipykernel lacks the hook.
    """
    before: Any = kernel
    assert callable(before._cancel_on_sigint)
    before._cancel_on_sigint = before.cancel_on_sigint
    return kernel


def show_traceback(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    lines: list[str],
    raised: BaseException | None = None,
) -> None:
    """Show an error as these lines, in the output of the cell, in the reply to it, and in the history of the shell.

    Args:
        shell: the shell of the notebook.
        kind: the type that is shown.
        error: the error that is shown.
        lines: its lines.
        raised: the error that the cell has raised, if that is another one.
    """
    shell._showtraceback(kind, error, lines)
    if not hasattr(shell, "_format_exception_for_storage"):
        # IPython stores errors from 9.0 on.
        return
    # An instance has it only from here to the next error.
    # By its identity: a cell that is not stored would keep the error here, with the variables of its frames.
    number, stored = id(raised or error), {"ename": kind.__name__, "evalue": str(error), "traceback": lines}
    usual: Callable[..., dict[str, Any]] = _SHELL._format_exception_for_storage.__get__(shell)

    def store(exception: BaseException, *args: Any, **options: Any) -> dict[str, Any]:
        shell.__dict__.pop("_format_exception_for_storage", None)
        return stored if id(exception) == number else usual(exception, *args, **options)

    # The shell would format it again, and parse the files of all its frames for that, in a second or more.
    shell._format_exception_for_storage = store


def syntax_lines(shell: Any, error: SyntaxError, number: int) -> list[str]:
    """Return the lines that IPython shows for a syntax error in a cell of this number: place, line, caret, message."""
    shell.compile._filename_map[error.filename] = number
    return shell.SyntaxTB.structured_traceback(type(error), error, [])


def cell_number(shell: Any, filename: str) -> int | None:
    """Return the number of the cell whose code has this file name; None if no cell has."""
    return shell.compile._filename_map.get(filename)


def cell_file(shell: Any, number: int) -> str:
    """Return the file name of the code of a cell; empty if none was compiled."""
    files = [file for file, each in list(shell.compile._filename_map.items()) if each == number]
    return files[-1] if files else ""


def file_of_cell(text: str) -> str:
    """Return the name of the file that the debuggers of front ends know a cell by."""
    return import_module("ipykernel.compiler").get_file_name(text)


def spare_threads(prefix: str, others: tuple[str, ...]) -> None:
    """Have the debugger of the notebook not pause some threads, nor list them, as ipykernel does with its own.

    Args:
        prefix: the prefix of the names of the threads.
        others: prefixes of those that it may pause all the same.
    """
    for thread in threading.enumerate():
        if thread.name.startswith(prefix) and not thread.name.startswith(others):
            own: Any = thread
            own.pydev_do_not_trace = own.is_pydev_daemon_thread = True


def group_skipped_files(debugger: Any, grouped: Callable[[list[str]], list[str]]) -> None:
    """Replace the files of the kernel that a debugger skips, each of which would be a rule, by patterns.

    Args:
        debugger: ipykernel's.
        grouped: returns patterns for paths.
    """
    files = getattr(debugger, "kernel_modules", None)
    if files:
        debugger.kernel_modules = grouped(files)


def publish(kernel: Publisher, kind: str, content: dict[str, Any], parent: Any, topic: str = "") -> None:
    """Send a message to all frontends, from any thread, and even after the end of its cell.

    Args:
        kernel: the sender.
        kind: type of the message, such as ``stream``.
        content: the content of the message.
        parent: the request of the cell, with its header.
        topic: for subscribers to select by; empty for the kind of the message.
    """
    kernel.session.send(kernel.iopub_socket, kind, content, parent=parent, ident=(topic or kind).encode())


def transformed(shell: Any, text: str) -> str:
    """Return a cell with IPython's syntax rewritten as Python, each statement on its own lines.

    Code that is not Python even then is returned as it is.

    Raises:
        SyntaxError: the indentation of a line matches that of no other.
    """
    manager = shell.input_transformer_manager
    lines: list[str] = text.splitlines(keepends=True)
    # IPython drops empty lines at the top.
    above = next((number for number, line in enumerate(lines) if line.strip()), 0)
    for transform in manager.cleanup_transforms + manager.line_transforms:
        lines = transform(lines)
    for _ in range(_MOST_TRANSFORMS):
        try:
            changed, after = manager.do_one_token_transform(lines)
        except SyntaxError as error:
            error.lineno = (error.lineno or 1) + above
            raise
        if not changed:
            break
        lines = _padded(lines, after)
    return "".join(["\n"] * above + lines)


def _padded(before: list[str], after: list[str]) -> list[str]:
    """Return lines with empty ones below a statement that a transform has joined into one line."""
    missing = len(before) - len(after)
    at = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after) - 1)
    return after[: at + 1] + ["\n"] * missing + after[at + 1 :]


def runs_code_first(app: Any) -> bool:
    """Return whether a configured kernel needs its magics before the first message; True if that is not known.

    It does if it runs code or loads extensions as it starts, or the event loop of a GUI, which takes no callbacks
    before that message.
    """
    try:
        if any(getattr(app, name) for name in _AT_START if hasattr(app, name)):
            return True
        if app.exec_PYTHONSTARTUP and os.environ.get("PYTHONSTARTUP"):
            return True
        application = import_module("IPython.core.application")
        shared = [*application.ENV_CONFIG_DIRS, *application.SYSTEM_CONFIG_DIRS]
        folders = [app.profile_dir.startup_dir, *(os.path.join(folder, "startup") for folder in shared)]
    except AttributeError:
        # Not a kernel's application: this kernel is part of another program.
        return True
    return any(glob(os.path.join(folder, kind)) for folder in folders for kind in ("*.py", "*.ipy"))


def keep_modules(shell: Any, names: Iterable[str]) -> None:
    """Let ``%reset --aggressive``, which unloads modules that the cells have imported, keep some."""
    kept: set[str] | None = getattr(shell, "_sys_modules_keys", None)
    if kept is not None:
        kept.update(names)


def has_automagic(shell: Any) -> bool:
    """Return whether a line may begin with the name of a magic, without the percent sign."""
    return bool(shell.automagic)


def keep_subscripts_python(shell: Any, name: str) -> Callable[[], None]:
    """Let a line such as ``mesh['x']`` be Python, though the name is a magic's and automagic would take the line.

    Returns:
        A function that undoes it.
    """
    manager = shell.prefilter_manager

    class Subscripts(PrefilterChecker):
        # Before the checker of automagic, which has 700.
        priority = 650

        def check(self, line_info: Any) -> Any:
            is_one = line_info.line.lstrip().startswith(f"{name}[")
            return manager.get_handler_by_name("normal") if is_one else None

    checker = Subscripts(shell=shell, prefilter_manager=manager, config=shell.config)
    manager.register_checker(checker)
    return lambda: manager.unregister_checker(checker)


def capturing_streams() -> dict[str, Any]:
    """Return the standard streams that are in memory now, by name, as in a ``%%capture`` cell.

    Only plain ones: the thread that writes to them runs no code of users.
    """
    streams: dict[str, Any] = {"stdout": sys.stdout, "stderr": sys.stderr}
    return {name: stream for name, stream in streams.items() if type(stream) is StringIO}


def reloads_extension() -> bool:
    """Return whether ``%reload_ext`` is under way: IPython unloads an extension before it loads it again."""
    frame = currentframe()
    while frame is not None:
        if frame.f_code.co_name == "reload_extension":
            return True
        frame = frame.f_back
    return False


def captures(publisher: Any) -> bool:
    """Return whether a publisher of displays keeps them for ``%%capture``."""
    return isinstance(publisher, import_module("IPython.core.displaypub").CapturingDisplayPublisher)


def publish_packed(kernel: Publisher, kind: str, content: bytes, topic: str) -> None:
    """Send a message whose content is JSON already to all front ends, from any thread; it belongs to no cell."""
    kernel.session.send(kernel.iopub_socket, kind, content, ident=topic.encode())


def peeked(kernel: Kernel, message: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header of a raw message on the shell channel, and the content of one of a comm; empty if invalid."""
    session = kernel.session
    try:
        _, frames = session.feed_identities(message, copy=False)
        read = session.deserialize(frames, content=False, copy=False)
        is_comm = read["header"]["msg_type"] in ("comm_open", "comm_msg", "comm_close")
        return read["header"], session.unpack(read["content"]) if is_comm else {}
    except Exception:
        # ipykernel reports it.
        return {}, {}


def deserialized(kernel: Kernel, message: Any) -> tuple[Any, Any]:
    """Return the identities of a raw message, and its parts; it can be done once."""
    idents, frames = kernel.session.feed_identities(message, copy=False)
    return idents, kernel.session.deserialize(frames, content=True, copy=False)


def publish_status(kernel: Kernel, status: str, parent: Any) -> None:
    """Tell all front ends that the kernel is ``busy`` or ``idle`` with a message, from any thread."""
    inside: Any = kernel
    inside._publish_status(status, "shell", parent=parent)


async def reply_while_busy(kernel: Kernel, kind: str, message: Any) -> None:
    """Answer a question about the kernel in the thread of the shell channel, which owns the socket."""
    idents, request = deserialized(kernel, message)
    publish_status(kernel, "busy", request)
    await getattr(kernel, kind)(kernel.shell_stream, idents, request)
    publish_status(kernel, "idle", request)


def watch_output(kernel: Kernel, take: Callable[[str, dict[str, Any], dict[str, Any]], None]) -> None:
    """Call a function with each message to all front ends, in the thread that sends it.

    Args:
        kernel: ipykernel's kernel.
        take: called with the kind of the message, its content, and its parent: a request, or the header of one.
    """
    session: Any = kernel.session
    send = session.send

    def watched(stream: Any, kind: Any, content: Any = None, parent: Any = None, *args: Any, **named: Any) -> Any:
        sent = send(stream, kind, content, parent, *args, **named)
        # Printed text comes as a whole message.
        whole: Any = kind
        name, body, request = kind, content, parent
        if isinstance(kind, dict):
            name, body, request = whole["header"]["msg_type"], whole["content"], whole["parent_header"]
        if request and not isinstance(body, bytes):
            take(name, body or {}, request)
        return sent

    session.send = watched


def open_comm(kernel: Kernel, request: dict[str, Any]) -> None:
    """Open a comm as a front end asks, in this thread."""
    kernel.comm_manager.comm_open(None, None, request)


def give_to_comm(kernel: Kernel, request: dict[str, Any]) -> None:
    """Give a message to its comm in this thread, without the events of a cell, which belong to the notebook's."""
    comm = kernel.comm_manager.get_comm(request["content"]["comm_id"])
    if comm is not None and comm._msg_callback is not None:
        comm._msg_callback(request)


def pass_cells(comm: Any) -> None:
    """Have messages to a comm handled in the subshell that they name, also while a cell runs.

    Newer versions of ipykernel send them to where the kernel last used the comm: to the thread of the notebook. It also
    raises the events of a cell for each message, which belong to that thread.
    """

    def route(_data: Any, named: str | None) -> str | None:
        return named

    def handle(message: Any) -> None:
        if comm._msg_callback:
            comm._msg_callback(message)

    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = route
    comm.handle_msg = handle


def can_ask(kernel: Kernel | None, parent: Any = None) -> bool:
    """Return whether the front end of a cell answers questions.

    Args:
        kernel: ipykernel's kernel; None in a terminal.
        parent: the message that runs the cell; None for that of this thread.
    """
    if kernel is None:
        return sys.stdin is not None and sys.stdin.isatty()
    # Not the kernel's own note, which is that of the last cell, perhaps of another console.
    parent = parent or kernel.get_parent("shell") or {}
    return bool(parent.get("content", {}).get("allow_stdin"))


def ask(
    kernel: Kernel | None,
    prompt: str,
    wanted: Callable[[], bool],
    unanswered: Callable[[str, str], bool] | None = None,
) -> str | None:
    """Ask the person at the front end of the running cell, in the thread of the notebook.

    Args:
        kernel: ipykernel's kernel; None in a terminal.
        prompt: shown before the answer.
        wanted: tells whether the answer is still of interest; asked all the time.
        unanswered: called if the question ends without an answer, with the id of the message that runs the cell and
            that of the question; returns whether a page removes its input box.

    Returns:
        The answer; None if it is no longer of interest. The end of the input in a terminal is the answer ``EOF``.

    Raises:
        KeyboardInterrupt: the cell is stopped.
    """
    if kernel is None:
        try:
            return input(prompt)
        except EOFError:
            print()
            return "EOF"
    sys.stdout.flush()
    sys.stderr.flush()
    socket, session = kernel.stdin_socket, kernel.session
    inside: Any = kernel
    ident = inside._get_shell_context_var(inside._shell_parent_ident)
    parent = kernel.get_parent("shell")
    cell: str = parent.get("header", {}).get("msg_id", "")
    before, left = _left_open.get(kernel, ("", 0))
    # The end of a cell closes its boxes.
    left = left if before == cell else 0
    while socket.poll(0):
        # Late answers to earlier questions.
        socket.recv_multipart()
        left -= 1
    asked = session.send(socket, "input_request", {"prompt": prompt, "password": False}, parent, ident=ident)
    question: str = asked["header"]["msg_id"]
    begun = time.monotonic()
    answered = False
    try:
        while wanted():
            if not socket.poll(_ASKING_MS):
                continue
            _, reply = session.recv(socket)
            if reply is None:
                continue
            # Some front ends name the question that they answer, which may be an earlier one.
            header: dict[str, Any] = reply.get("parent_header") or {}
            answers: str | None = header.get("msg_id")
            value = str(reply["content"]["value"])
            if answers is None and not value and left > 0 and time.monotonic() - begun < _REPLACED_S:
                # VS Code closes the input box of an earlier question to show this one, and answers that with nothing.
                left -= 1
            elif answers in (None, question):
                answered = True
                return value
        return None
    finally:
        if not answered and not (unanswered and unanswered(cell, question)):
            left += 1
        _left_open[kernel] = cell, max(0, left)


def debugger_of(shell: Any) -> Callable[[bool], None]:
    """Return what ``%debug`` does in this shell after an error."""
    usual: Any = shell.__class__
    return lambda force: usual.debugger(shell, force)


def set_debugger(shell: Any, debugger: Callable[[bool], None] | None) -> None:
    """Set what ``%debug`` does after an error; None for IPython's own."""
    if debugger is not None:
        shell.debugger = lambda force=False: debugger(force)
    elif "debugger" in vars(shell):
        del shell.debugger
