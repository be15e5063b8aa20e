"""Folders without room: /dev/shm, the disk of a checkpoint, the session's folder. No SIGBUS of ours, no hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from light import BRIEF, LIGHT
from monarch._core.causes import CellRef
from monarch._procs.os.shared_files import full_shared_memory, remove_torn
from monarch._procs.rank.cell_marker import Mark, take_mark

pytestmark = pytest.mark.slow

MOUNTED = """
import os, sys
if "MOUNTED" not in os.environ:
    os.environ["MOUNTED"] = "1"
    flags, folder, options = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    os.execvp("unshare", ["unshare", *flags.split(), "sh", "-c", mount, folder, sys.executable, *sys.argv])
from monarch.actor import Actor, current_rank, endpoint, heal_mesh, this_host
from monarch.exceptions import *
def attempt(what):
    try:
        return what().get(60)
    except MonarchError as error:
        return error
"""
"""A program with its own small file system in place of a folder."""


@pytest.fixture
def flags() -> str:
    """How a program gets mounts of its own: as root, or as root of a user namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare (util-linux), so no program can have mounts of its own")
    for flags in ("-m", "-Urm"):
        command = ["unshare", *flags.split(), "mount", "-t", "tmpfs", "none", "/dev/shm"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return flags
    pytest.skip("this machine lets this user have no mounts of their own")


SHARED = (
    MOUNTED
    + """
import torch
from monarch.distributed import Part, copy_state
from monarch.rdma import RDMABuffer
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((1 << 20,), float(index))
class A(Actor):
    def __init__(self, value):
        self.state = {"w": Part(torch.full((1 << 22,), value), [0])}
        self.data = torch.full((1 << 22,), 1.0).view(torch.uint8)
    def weights(self):
        return self.state
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def double(self, data):
        return data * 2
    @endpoint
    def export(self):
        return RDMABuffer(self.data)
    @endpoint
    def read(self, buffer):
        mine = torch.zeros_like(self.data)
        buffer.read_into(mine).get(60)
        return bool((mine == self.data).all())
    @endpoint
    def seen(self):
        return float(self.state["w"].tensor.sum())
    @endpoint
    def load(self):
        return sum(batch.numel() for batch in torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=1))
    @endpoint
    def overrun(self):
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory(create=True, size=16 << 20)
        memory.buf[:] = bytes(16 << 20)
procs, others = this_host().spawn_procs({"gpus": 2}), this_host().spawn_procs({"gpus": 1})
actors, other = procs.spawn("a", A, 1.0), others.spawn("other", A, 0.0)
pids = list(actors.pid.call().get(60).values())
one = actors.slice(gpus=0)
print([float(each.sum()) for each in actors.double.call(torch.ones(1 << 22)).get(60).values()] == [2.0 * (1 << 22)] * 2)
copy_state(one.weights, other.weights).get(60)
print(other.seen.call_one().get(60) == 1 << 22, other.read.call_one(one.export.call_one().get(60)).get(60))
error = attempt(one.load.call_one)
print("unable to allocate shared memory" in str(error), "No space left on device" in str(error))
print(list(actors.pid.call().get(60).values()) == pids)
error = attempt(one.overrun.call_one)
print(type(error).__name__, "(SIGBUS) while /dev/shm, of 1 MiB, was full; make it larger" in str(error))
heal_mesh(actors, timeout=30)
print(len(actors.pid.call().get(60)))
procs.stop().get(30)
others.stop().get(30)
# Only torch's workers may have left names; no memory is held.
print({os.stat(f"/dev/shm/{name}").st_blocks for name in os.listdir("/dev/shm")} <= {0})
"""
)


def test_full_shared_memory_is_named_in_errors(program: Callable[..., Any], flags: str) -> None:
    """Nothing of ours is there; torch and user code that use it fail with a reason."""
    done = program(BRIEF + SHARED, flags, "/dev/shm", "size=1m")
    expected = ["True", "True True", "True True", "True", "SupervisionError True", "2", "True"]
    assert done.ok().splitlines() == expected, done.err


CHECKPOINT = (
    MOUNTED
    + """
import time, torch
from monarch.actor import checkpoint, restore
folder = sys.argv[1]
class A(Actor):
    def __init__(self):
        self.value = torch.ones(1 << 18)
    @endpoint
    def put(self, size):
        self.value = torch.full((size,), 2.0)
    def state_dict(self):
        return {f"w{current_rank().rank}": self.value}
    def load_state_dict(self, state):
        (self.value,) = state.values()
    @endpoint
    def total(self):
        return float(self.value.sum())
def names():
    return sorted(os.listdir(folder))
actors = this_host().spawn_procs({"gpus": 2}).spawn("a", A)
checkpoint(actors, folder).get(60)
actors.put.call(1 << 21).get(60)
error = str(attempt(lambda: checkpoint(actors, folder)))
print("No space left on device while writing to " + folder + "/v000002" in error, "bytes are free there" in error)
print("up to 8,388,608 bytes to write" in error, names())
actors.put.call(1 << 18).get(60)
restore(actors, folder).get(60)
print(list(actors.total.call().get(60).values()) == [1 << 18] * 2)
checkpoint(actors, folder).get(60)
print(names())
"""
)


def test_full_disk_leaves_checkpoint_before(program: Callable[..., Any], flags: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = program(BRIEF + CHECKPOINT, flags, str(folder), "size=6m", str(folder))
    kept = "['.lock', 'latest', 'v000001']"
    assert done.ok().splitlines()[:2] == ["True True", f"True {kept}"], done.err
    assert done.out.splitlines()[2:] == ["True", "['.lock', 'latest', 'v000001', 'v000002']"], done.err


STARTED = (
    LIGHT
    + MOUNTED
    + """
from monarch._node.current import current_node
class A(Actor):
    @endpoint
    def pid(self):
        return os.getpid()
full = sys.argv[1]
for number in range(1000):
    try:
        open(f"{full}/{number}", "w").write("x" * 8192)
    except OSError:
        break
if len(sys.argv) > 2:
    # The other places as well.
    os.environ["TMPDIR"] = full
    import monarch._procs.session_folder as session
    session._places = lambda: [full]
try:
    actors = this_host().spawn_procs({"gpus": 2}).spawn("a", A)
    print(len(actors.pid.call().get(60)), current_node().folder.startswith(full))
except OSError as error:
    print(error)
"""
)


def test_session_folder_moves_when_its_disk_is_full(program: Callable[..., Any], flags: str, full_folder: str) -> None:
    done = program(STARTED, flags, full_folder, "size=64k", full_folder, XDG_RUNTIME_DIR=full_folder)
    assert done.ok() == "2 False\n", done.err


def test_session_without_room_names_the_places(program: Callable[..., Any], flags: str, full_folder: str) -> None:
    done = program(STARTED, flags, full_folder, "size=64k", full_folder, "all", XDG_RUNTIME_DIR=full_folder)
    assert f"cannot create the session folder: no space left in {full_folder}; free some" in done.ok(), done.err


@pytest.fixture
def full_folder() -> Iterator[str]:
    """Where a disk without room is to be; its name is short, as that of a session's folder has to be."""
    folder = tempfile.mkdtemp(prefix="mk-", dir="/tmp")
    yield folder
    os.rmdir(folder)


# The parts


def test_marker_without_room_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store to a page that a full disk has not would end a rank by SIGBUS."""

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    seen = Mark(str(tmp_path), "h/one")
    assert os.stat(tmp_path / "one.at").st_blocks
    monkeypatch.setattr(os, "posix_fallocate", full)
    unseen = Mark(str(tmp_path), "h/two")
    for mark in (seen, unseen):
        mark.slot[0] = Mark.at(3, 5)
    assert take_mark(str(tmp_path), "h/one").place == CellRef(3, 5)
    assert take_mark(str(tmp_path), "h/two").place is None


def test_only_full_folder_counts_as_full(tmp_path: Path) -> None:
    assert full_shared_memory(str(tmp_path)) == "" == full_shared_memory(str(tmp_path / "none"))


def test_names_without_memory_go_with_their_process(tmp_path: Path) -> None:
    for name in ("torch_12_3_0", "torch_123_4_0", "psm_12"):
        (tmp_path / name).touch()
    (tmp_path / "torch_12_9_1").write_bytes(bytes(10_000))
    remove_torn(12, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["psm_12", "torch_123_4_0", "torch_12_9_1"]
    remove_torn(12, str(tmp_path / "none"))
