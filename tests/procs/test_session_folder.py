"""The folder of a session: for its user only, with a short name, and swept after the end of its session."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch._procs import session_folder
from monarch._procs.os.posix import proc_start_time
from monarch._procs.session_folder import ipc_address
from monarch._wire.links import IPC_PATH_LIMIT


@pytest.fixture
def folder() -> Iterator[str]:
    made = session_folder.make_folder()
    yield made
    session_folder.remove_folder(made)


def test_session_folder_is_for_its_user_only(folder: str) -> None:
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    base = os.path.dirname(folder)
    assert stat.S_IMODE(os.stat(base).st_mode) == 0o700
    # Somebody has changed its mode: the next session restores it.
    os.chmod(base, 0o755)
    other = session_folder.make_folder()
    assert stat.S_IMODE(os.stat(base).st_mode) == 0o700
    session_folder.remove_folder(other)
    assert os.path.exists(folder)


def test_temporary_folder_with_long_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = session_folder.make_folder()
    assert len(ipc_address(made, "h/12345678.1000")) < IPC_PATH_LIMIT
    assert not made.startswith(str(long))
    session_folder.remove_folder(made)


def test_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a link, which could lead anywhere."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"monarch-{os.getuid()}").symlink_to(target)
    made = session_folder.make_folder()
    assert not os.path.realpath(made).startswith(str(target))
    session_folder.remove_folder(made)


def test_folder_of_dead_session_is_swept(folder: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "from monarch._procs.session_folder import make_folder; print(make_folder())"],
        capture_output=True,
        text=True,
        check=True,
    )
    dead = process.stdout.strip()
    assert os.path.dirname(dead) == os.path.dirname(folder)
    # The next session has swept it, and left live ones alone.
    other = session_folder.make_folder()
    assert not os.path.exists(dead)
    assert os.path.exists(folder)
    session_folder.remove_folder(other)


def test_sessions_may_begin_and_end_concurrently() -> None:
    """One removes the common folder as the last while another is about to create its own in it."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                session_folder.remove_folder(session_folder.make_folder())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_folder_that_another_process_removes_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanishes(folder: str) -> None:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(session_folder, "remove_names", vanishes)
    for name in ("s1-4194303-1", "s2-4194303-2"):
        (tmp_path / name).mkdir()
    session_folder.sweep(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_folder_of_a_process_that_is_about_to_end_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as dying:
        (tmp_path / f"s1-{dying.pid}-{proc_start_time(dying.pid)}").mkdir()
        session_folder.sweep(tmp_path)
        assert [*tmp_path.iterdir()]
        assert dying.stdin is not None
        end = threading.Timer(0.1, dying.stdin.close)
        end.start()
        session_folder.sweep(tmp_path, 60.0)
        assert not [*tmp_path.iterdir()]
        end.join()
