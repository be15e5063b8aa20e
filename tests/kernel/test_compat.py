"""The private parts of ipykernel and IPython that the kernel uses exist and work as assumed.

`.ci/check-versions` runs these at the lowest and the newest supported versions.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from ipykernel import debugger
from ipykernel.comm.comm import BaseComm
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.async_helpers import get_asyncio_loop
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from jupyter_client.session import Session
from traitlets.config import Config

from monarch_kernel.compat import (
    cancels_awaits,
    capturing_streams,
    cell_number,
    group_skipped_files,
    has_automagic,
    keep_subscripts_python,
    missing_magic,
    pass_cells,
    publish,
    run_nested,
    runs_cell,
    runs_code_first,
    show_traceback,
    syntax_lines,
    transformed,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    config = Config({"HistoryManager": {"enabled": False}})
    main, hook = sys.modules["__main__"], sys.displayhook
    # Not `instance()`: other tests look for the shell of this process.
    made = InteractiveShell(config=config)
    yield made
    sys.modules["__main__"], sys.displayhook = main, hook
    made.restore_sys_module_state()
    atexit.unregister(made.atexit_operations)
    made.atexit_operations()


def test_runs_cell_is_true_only_in_cell_code(shell: InteractiveShell) -> None:
    seen: list[bool] = []
    shell.user_ns["probe"] = lambda: seen.append(runs_cell(sys._getframe()))
    shell.run_cell("probe()")
    shell.user_ns["probe"]()
    assert seen == [True, False]


def test_missing_magic_is_known_by_name_and_kind(shell: InteractiveShell) -> None:
    errors: list[Any] = []
    shell.set_custom_exc((Exception,), lambda _shell, _kind, _error, tb, **_: errors.append(missing_magic(shell, tb)))
    for code in ("%%timeti\n1", "%timeti 1", "%bash", "%%load_ext x\n1", "%%time\n", "%cd /nowhere/x\n1 / 0"):
        shell.run_cell(code)
    (cell, name, known), (line, _, others) = errors[:2]
    assert (cell, name, line) == ("%%", "timeti", "%") and "timeit" in known and "bash" in known
    assert "load_ext" in others and "bash" not in others
    assert errors[2:] == [None] * 4, "one of the other kind, an empty body, errors of other code"


def test_debugger_takes_patterns_of_the_files_that_it_skips() -> None:
    options = inspect.signature(debugger.Debugger.__init__).parameters
    if "kernel_modules" not in options:
        pytest.skip("this ipykernel skips no files")
    made: Any = cast("Any", debugger.Debugger)(
        *(["/lib/one.py"] if name == "kernel_modules" else None for name in [*options][1:])
    )
    group_skipped_files(made, lambda files: [f"{file}s" for file in files])
    forwarded: list[Any] = []

    async def forward(message: Any) -> None:
        forwarded.append(message["arguments"]["rules"])

    made.debugpy_client = SimpleNamespace(get_host_port=lambda: ("", 0))
    made.filter_internal_frames, made._forward_message = True, forward
    asyncio.run(made.attach({"arguments": {}}))
    assert forwarded == [[{"path": "/lib/one.pys", "include": False}]]


def test_nested_cell_may_await_inside_a_running_loop(shell: InteractiveShell) -> None:
    shell.user_ns["asyncio"] = asyncio

    async def outer() -> bool:
        loop = asyncio.get_running_loop()
        assert run_nested(shell, "slept = await asyncio.sleep(0, 5)").success
        assert not run_nested(shell, "await asyncio.sleep(0); 1 / 0").success
        return asyncio.get_running_loop() is loop

    try:
        assert asyncio.run(outer()) and shell.user_ns["slept"] == 5
    finally:
        get_asyncio_loop().close()


def test_ipykernel_enters_the_hook_around_an_await() -> None:
    class Kernel(IPythonKernel):
        def cancel_on_sigint(self, future: Any) -> Any:
            raise NotImplementedError

    assert cancels_awaits(Kernel)._cancel_on_sigint is Kernel.cancel_on_sigint  # pyright: ignore[reportAttributeAccessIssue]
    source = inspect.getsource(IPythonKernel.do_execute)
    assert "self._cancel_on_sigint" in source
    assert list(inspect.signature(IPythonKernel._cancel_on_sigint).parameters) == ["self", "future"]


def test_kernel_without_the_hook_is_refused() -> None:
    class Kernel:
        def cancel_on_sigint(self, future: Any) -> None: ...

    with pytest.raises(AttributeError, match="_cancel_on_sigint"):
        cancels_awaits(Kernel)


def test_show_traceback_shows_only_the_lines(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    show_traceback(shell, ValueError, ValueError("x"), ["first", "second"])
    assert capsys.readouterr().out == "first\nsecond\n"


def test_errors_are_stored_as_shown_and_not_formatted_again(shell: InteractiveShell) -> None:
    """IPython parses the files of all frames for a traceback that nobody sees, in a second or more."""

    def show(shell: InteractiveShell, kind: Any, error: Any, _tb: Any, tb_offset: Any = None) -> None:
        show_traceback(shell, kind, error, ["shown"])

    shell.set_custom_exc((LookupError,), show)
    shell.run_cell("raise LookupError('mine')", store_history=True)
    shell.run_cell("raise OSError('theirs')", store_history=True)
    stored = list(getattr(shell.history_manager, "exceptions", {}).values())
    if hasattr(type(shell), "_format_exception_for_storage"):
        assert stored[0] == {"ename": "LookupError", "evalue": "mine", "traceback": ["shown"]}
        assert stored[1]["ename"] == "OSError" and "theirs" in "".join(stored[1]["traceback"])


@pytest.mark.parametrize(
    "cell",
    [
        "!ls",
        "\n\n!ls\nx = 1",
        "!echo a \\\n  b \\\n  c\nx = 1\ny = !ls \\\n  -l\nz = 2",
        "def f():\n    %time g() \\\n        + h()\n    return 1\nlen?\nlast",
        ">>> x = 1\n>>> !ls\nx\n",
        "x = 1\n\n",
    ],
)
def test_transformed_cell_keeps_its_lines(shell: InteractiveShell, cell: str) -> None:
    code = transformed(shell, cell)
    named = {name: number for number, line in enumerate(cell.splitlines()) for name in re.findall(r"\b[a-z]+\b", line)}
    assert len(code.splitlines()) == len(cell.splitlines()) and compile(code, "cell", "exec")
    for name in {"x", "y", "z", "last"} & named.keys():
        assert name in code.splitlines()[named[name]]
    assert "".join(code.split()) == "".join(shell.input_transformer_manager.transform_cell(cell).split())


def test_cell_magic_keeps_its_line(shell: InteractiveShell) -> None:
    assert transformed(shell, "\n%%time -x\na\nb") == "\nget_ipython().run_cell_magic('time', '-x', 'a\\nb')\n"


def test_syntax_error_has_a_caret(shell: InteractiveShell) -> None:
    with pytest.raises(SyntaxError) as raised:
        compile("x = (\n", "cell [3]", "exec")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(syntax_lines(shell, raised.value, 3)))
    # In the shell of the process it is "Cell In[3], line 1".
    assert ("cell [3]:1" in lines or "Cell In[3], line 1" in lines) and "^" in lines and "never closed" in lines


def test_captured_streams_are_found(shell: InteractiveShell) -> None:
    shell.user_ns["probe"] = seen = []
    shell.user_ns["find"] = capturing_streams
    shell.run_cell("%%capture --no-stderr cap\nprobe.append(sorted(find()))")
    assert seen == [["stdout"]]


def test_subscript_of_the_name_of_a_magic_is_python(shell: InteractiveShell) -> None:
    seen: list[str] = []
    shell.register_magic_function(lambda line: seen.append(line), "line", "mesh")  # pyright: ignore[reportArgumentType]
    undo = keep_subscripts_python(shell, "mesh")
    shell.run_cell("mesh ['x']")
    assert seen == ["['x']"]
    assert isinstance(shell.run_cell("mesh['x']").error_in_exec, NameError) and len(seen) == 1
    undo()
    shell.run_cell("mesh['x']")
    assert len(seen) == 2


def test_automagic_is_read(shell: InteractiveShell) -> None:
    assert has_automagic(shell)
    shell.automagic = False
    assert not has_automagic(shell)


def test_cell_number_is_found_by_file_name(shell: InteractiveShell) -> None:
    name = shell.compile.cache("1", 7, raw_code="1")
    assert cell_number(shell, name) == 7
    assert cell_number(shell, __file__) is None


@contextmanager
def connected() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Yield two connected sockets."""
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    receiver.bind("inproc://iopub")
    sender.connect("inproc://iopub")
    try:
        yield sender, receiver
    finally:
        context.destroy(linger=0)


def test_publish_sends_to_the_given_cell() -> None:
    assert {"session", "iopub_socket"} <= set(IPythonKernel.class_trait_names())
    session = Session(key=b"k")
    parent = session.msg("execute_request")

    class Kernel:
        def __init__(self, socket: Any) -> None:
            self.session, self.iopub_socket = session, socket

    with connected() as (sender, receiver):
        publish(Kernel(sender), "stream", {"text": "x"}, parent, "stream.stdout")
        assert receiver.poll(10_000)
        idents, frames = session.feed_identities(receiver.recv_multipart())
    message = session.deserialize(frames)
    assert idents == [b"stream.stdout"]
    assert message["msg_type"] == "stream"
    assert message["parent_header"]["msg_id"] == parent["header"]["msg_id"]


def test_kernelspec_features_exist_in_ipykernel() -> None:
    spec = json.loads((ROOT / "monarch_kernel/kernelspec/kernel.json").read_text())
    assert spec["metadata"]["supported_features"] == ["kernel subshells"]
    assert {"create_subshell_request", "delete_subshell_request", "list_subshell_request"} <= set(
        IPythonKernel.control_msg_types
    )


def test_messages_to_a_comm_go_to_the_subshell_that_they_name(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    comm = BaseComm(target_name="views", comm_id="1", primary=False)
    # As after a message that a cell has sent.
    comm._reply_subshell_id = None
    taken: list[Any] = []
    comm.on_msg(taken.append)
    events: list[str] = []
    shell.events.register("post_execute", lambda: events.append("post_execute"))
    pass_cells(comm)
    if hasattr(BaseComm, "_reply_subshell_for"):
        assert comm._reply_subshell_for({}, "sub-1") == "sub-1"
    comm.handle_msg({"content": {"data": 1}})
    assert taken == [{"content": {"data": 1}}] and not events


def test_execute_request_takes_stream_ident_and_parent() -> None:
    assert asyncio.iscoroutinefunction(IPythonKernel.execute_request)
    assert list(inspect.signature(IPythonKernel.execute_request).parameters) == ["self", "stream", "ident", "parent"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("exec_lines", ["1"]), ("exec_files", ["a.py"]), ("extensions", ["a"]), ("extra_extensions", ["a"])),
        *(("file_to_run", "a.py"), ("code_to_run", "1"), ("module_to_run", "a")),
        *(("gui", "tk"), ("matplotlib", "auto"), ("pylab", "auto")),
    ],
)
def test_code_at_the_start_of_a_kernel_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any
) -> None:
    monkeypatch.delenv("PYTHONSTARTUP", raising=False)
    assert runs_code_first(None) and runs_code_first(object()), "not known"
    app: Any = IPKernelApp()
    app.profile_dir = ProfileDir.create_profile_dir(str(tmp_path))
    assert not runs_code_first(app)
    (tmp_path / "startup" / "first.ipy").touch()
    assert runs_code_first(app)
    (tmp_path / "startup" / "first.ipy").unlink()
    setattr(app, setting, value)
    assert runs_code_first(app)
