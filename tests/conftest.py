"""What all tests have: the kit that counts what each has left behind, and a session that most of them share."""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from types import ModuleType
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings

from leaks import SOON, Kit, Snapshot, mark_this_run, processes, session_folders, wait_until
from state import credit_lost
from tiers import LISTS, mark, rules
from warm import hold_server, own_preload, usual_preload
from warm_python import held_for_kernels

# The suite tries the same examples each time, so that a change fails for what it changed; `make chaos` draws new ones.
settings.register_profile("usual", deadline=None, derandomize=True)
settings.register_profile(
    "chaos", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("usual")

_INTERVAL = float(os.environ.get("MONARCH_TEST_SWITCH_INTERVAL", "0"))
"""Seconds after which threads take turns, here and in the ranks that ``procs`` makes; 0 leaves it as it is."""
if _INTERVAL:
    sys.setswitchinterval(_INTERVAL)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell runs in the background: tests interrupt themselves, and what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Each of the many programs that the tests start would compile all of Monarch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# jsonschema compiles 38 grammars for it, which takes a second of each process, to check addresses that no test has.
sys.modules.setdefault("rfc3987_syntax", cast("ModuleType", None))

_FOLDER = mark_this_run()
_WEDGED = 150.0
"""Seconds beyond its time limit after which a test can no longer end by itself: the process says where, and exits."""
_SLOW_COLLECTION = 0.1
"""Seconds of CPU of a garbage collection after which later ones leave out what it has looked through."""
_BROWSER = "browser"
_LATER = 6
"""Files that begin before those with a browser."""
_SLOWEST = ("engine", "procs", "notebooks", "chaos", "kernel", "tensors", "actors", "telemetry", "views")
"""Folders, by seconds per file; the rest is quick."""
_start: Snapshot | None = None
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # Here pytest captures nothing, so this is where the program's own stderr goes.
    config.stash[_stderr] = os.dup(2)


def pytest_sessionstart() -> None:
    global _start
    _start = Snapshot()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by ``tiers.txt``, before ``-m`` chooses.

    Begins with the folders whose files take longest, so that at the end no process waits long for another.
    """
    mark(items, [rule for text in LISTS for rule in rules(text.read_text())])
    rank = {name: at for at, name in enumerate(_SLOWEST)}
    browser = [item for item in items if _folder(item) == _BROWSER]
    others = sorted(
        (item for item in items if _folder(item) != _BROWSER), key=lambda item: rank.get(_folder(item), len(rank))
    )
    files = [[*each] for _, each in groupby(others, key=lambda item: item.path)]
    # Not first, when each process imports torch.
    files.insert(_LATER, browser)
    items[:] = [item for each in files for item in each]


def _folder(item: pytest.Item) -> str:
    return item.path.parent.name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives one process all files with a browser: a second server and browser take 10 s, and two slow each other."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder, _, _ = file.rpartition("/")
            return folder if folder.endswith(f"/{_BROWSER}") else file

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Imports all tests without garbage collections, which would take a fifth of the time and find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Has a thread in C look after each test: a time limit by a signal needs a main thread that can take it, once."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    tries = 1 + (item.config.getoption("reruns", None) or 0)
    faulthandler.dump_traceback_later(limit * tries + _WEDGED, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the shared session and looks whether anything at all is left."""
    assert _start is not None
    gc.unfreeze()
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        # The tests have run in other processes, each of which looks after its own.
        shutil.rmtree(_FOLDER, ignore_errors=True)
        return
    if "monarch._session.session" in sys.modules:
        try:
            sys.modules["monarch._session.session"].shutdown_context().get(timeout=30)
        except TimeoutError as error:
            print(f"\n{error}", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    kit = Kit()
    kit.before = _start
    # Torch, numpy and so on keep what they have opened; processes, threads and files of ours do not stay.
    left = kit.left(10.0, opened=False)
    # Once is enough: pytest would do it five more times, and Python at its exit, which takes seconds.
    gc.collect()
    gc.freeze()
    shutil.rmtree(_FOLDER, ignore_errors=True)
    if left:
        print("\nleft behind at the end:\n  " + "\n  ".join(left), file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Leave objects from before a module out of the checks after its tests: they would take most of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaks() -> Iterator[Kit]:
    """Looks after each test whether it has left anything behind."""
    kit = Kit()
    yield kit
    begun = time.thread_time()
    gc.collect()
    seconds = time.thread_time() - begun
    left = kit.left()
    if seconds > _SLOW_COLLECTION:
        # What this test keeps for others of its module, such as parsed files.
        gc.freeze()
    assert not left, "the test has left behind: " + ", ".join(left)


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """A fork server that outlives each test: the programs and kernels that ask for it share one import of torch."""
    connection = hold_server(usual_preload())
    yield
    connection.close()


@pytest.fixture(scope="session")
def own_server() -> Iterator[None]:
    """A fork server that outlives each test: sessions of this process, and hosts that it starts, share one import."""
    connection = hold_server(own_preload())
    yield
    connection.close()


@pytest.fixture(scope="session")
def spec(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The kernelspec as its command installs it, and folders of IPython's and Jupyter's own for these tests."""
    prefix = tmp_path_factory.mktemp("jupyter")
    subprocess.run(
        [sys.executable, "-m", "monarch_kernel", "install", "--prefix", str(prefix)], check=True, capture_output=True
    )
    mine = {
        "JUPYTER_PATH": str(prefix / "share" / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(prefix / "runtime"),
        "IPYTHONDIR": str(prefix / "ipython"),
    }
    before = {key: os.environ.get(key) for key in mine}
    os.environ.update(mine)
    with held_for_kernels():
        yield str(prefix)
    for key, value in before.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value


@pytest.fixture
def host(own_server: None, leaks: Kit) -> Any:
    """This host, in a session that tests share: its agent and zygote are warm."""
    from monarch._node.current import current_node, has_node
    from monarch._session.session import need_session
    from monarch.actor import this_host

    if not has_node() or not need_session(current_node()).agent_pid:
        this_host().spawn_procs().stop().get(timeout=60)
        leaks.rebase()
    return this_host()


@pytest.fixture
def procs(host: Any) -> Iterator[Callable[..., Any]]:
    """Makes meshes of procs, by a number or by axes, that are stopped after the test.

    Before they are, each process that lives must have given back the credit for all that it has finished.
    """
    made: list[Any] = []

    def make(count: int | Mapping[str, int] = 1, **options: Any) -> Any:
        axes = {"gpus": count} if isinstance(count, int) else dict(count)
        if _INTERVAL:
            options.setdefault("bootstrap", functools.partial(sys.setswitchinterval, _INTERVAL))
        mesh = host.spawn_procs(per_host=axes, **options)
        made.append(mesh)
        return mesh

    yield make
    lost = credit_lost(SOON)
    ends = [mesh.stop() for mesh in made]
    for end in ends:
        end.get(timeout=30)
    # Pytest keeps the function above, and a mesh keeps its events.
    made.clear()
    assert not lost, "the test has lost credit: " + ", ".join(lost)


class Program:
    """A whole program that has run: what it printed, and how it ended."""

    def __init__(self, done: subprocess.CompletedProcess[str], left: list[str]) -> None:
        self.out, self.err, self.code, self.left = done.stdout, done.stderr, done.returncode, left

    def ok(self) -> str:
        """Return its output; it must end well, and leave nothing behind."""
        assert self.code == 0, self.err
        assert not self.left
        return self.out


@pytest.fixture
def program(warm: None, leaks: Kit, tmp_path: Any) -> Callable[..., Program]:
    """Runs the text of a program in a process and a session of its own, and looks at what it leaves."""

    def run(text: str, *args: str, timeout: float = 60, **env: str) -> Program:
        path = tmp_path / "program.py"
        path.write_text(text)
        before, folders = processes(), session_folders()
        done = subprocess.run(
            [sys.executable, str(path), *args],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, **env},
        )
        left: list[str] = []

        def nothing() -> bool:
            left[:] = [f"{pid} {name}" for pid, name in processes().items() if pid not in before]
            left.extend(session_folders() - folders)
            return not left

        wait_until(nothing, 5)
        return Program(done, left)

    return run
