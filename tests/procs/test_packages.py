"""Packages of lock files on hosts reached by real ssh, installed by pip without a network; packed environments."""

from __future__ import annotations

import base64
import hashlib
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import sshd
from leaks import Kit, processes, wait_until
from monarch._procs.launch.lock_files import packages_of
from monarch._procs.launch.reports import differences
from monarch.actor import Actor, endpoint
from monarch.exceptions import ArgumentError, SpawnError
from monarch.job import SSHJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(sshd.why_none()), reason=sshd.why_none() or "none"),
    pytest.mark.usefixtures("light"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.SSHHosts]:
    made = sshd.SSHHosts(tmp_path_factory.mktemp("ssh"))
    yield made
    made.close()


def wheel(folder: Path, version: str) -> Path:
    """A wheel of a module ``abacus``, which has its version."""
    path = folder / f"abacus-{version}-py3-none-any.whl"
    info = f"abacus-{version}.dist-info"
    files = {
        "abacus.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: abacus\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(text.encode())},{len(text)}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Uses(Actor):
    """Imports what is installed on its host, and looks for the rest."""

    @endpoint
    def version(self) -> tuple[str, str]:
        import abacus  # pyright: ignore[reportMissingImports]

        return abacus.version, _place_of("torch")


def _place_of(module: str) -> str:
    """The file of a module that can be imported; to import torch takes 2 s."""
    spec = find_spec(module)
    return str(spec and spec.origin)


def used(hosts: sshd.SSHHosts, packages: str, *nodes: str) -> tuple[list[Any], list[str]]:
    """Return the import of a rank of each host, of two if none is named, and the lines of the wait."""
    lines: list[str] = []
    job = SSHJob({"all": [*nodes] or ["node1", "node2"]}, config=hosts.config, packages=packages)
    with job.told_by(lines.append):
        actors = job.state().all.spawn_procs({"gpus": 1}).spawn("uses", Uses)
        return [*actors.version.call().get(60).values()], lines


def test_packages_are_installed_once_on_each_host(hosts: sshd.SSHHosts, tmp_path: Path, host: Any, leaks: Kit) -> None:
    """By uv on the host that has it, and by pip on the other."""
    uv = hosts.folder / "home2" / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.symlink_to(Path(sys.executable).with_name("uv"))
    (tmp_path / "dist").mkdir()
    wheel(tmp_path / "dist", "1.5")
    (tmp_path / "more.txt").write_text("./dist/abacus-1.5-py3-none-any.whl\n")
    (tmp_path / "requirements.txt").write_text("# ours\n--no-index\n-r more.txt\n")
    versions, lines = used(hosts, str(tmp_path / "requirements.txt"))
    # What the file lacks, such as torch, is that of the host's Python.
    assert versions == [("1.5", _place_of("torch"))] * 2
    assert {line for line in lines if line.startswith("installing")} == {
        "installing requirements.txt on node1 (pip)",
        "installing requirements.txt on node2 (uv)",
    }
    versions, lines = used(hosts, str(tmp_path / "requirements.txt"))
    assert versions[0][0] == "1.5" and not [line for line in lines if line.startswith("installing")]
    # Another version is another environment.
    new = wheel(tmp_path, "2.0")
    digest = hashlib.sha256(new.read_bytes()).hexdigest()
    (tmp_path / "pylock.toml").write_text(
        'lock-version = "1.0"\ncreated-by = "test"\n[[packages]]\nname = "abacus"\nversion = "2.0"\n'
        f'wheels = [{{name = "{new.name}", path = "{new.name}", hashes = {{sha256 = "{digest}"}}}}]\n'
    )
    if sys.version_info >= (3, 11):
        assert used(hosts, str(tmp_path / "pylock.toml"), "node2")[0][0][0] == "2.0"
    leaks.rebase()


def test_packed_environments_are_used(hosts: sshd.SSHHosts, tmp_path: Path, host: Any, leaks: Kit) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    (site / "base.pth").write_text(str(Path(_place_of("torch")).parents[1]) + "\n")
    (site / "abacus.py").write_text("version = 'packed'\n")
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        for each in (tmp_path / "env").iterdir():
            archive.add(each, each.name)
    versions, lines = used(hosts, str(tmp_path / "env.tar.gz"))
    assert [version for version, _ in versions] == ["packed"] * 2
    assert "installing env.tar.gz on node1 (unpacking)" in lines
    leaks.rebase()


def test_packages_that_cannot_be_installed_are_named(hosts: sshd.SSHHosts, tmp_path: Path, host: Any) -> None:
    (tmp_path / "requirements.txt").write_text("--no-index\nno-such-package==9\n")
    with pytest.raises(
        SpawnError, match=r"host node1: cannot install the packages of requirements.txt: .*no-such-package"
    ):
        used(hosts, str(tmp_path / "requirements.txt"))
    with pytest.raises(SpawnError, match=r"host node2: cannot install the packages of none.tar.gz: .*No such file"):
        used(hosts, str(tmp_path / "none.tar.gz"))
    assert not [*hosts.folder.glob("home*/.cache/monarch-kernel/packages-*/bin/python-none")]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_installers_end_with_the_program(hosts: sshd.SSHHosts, tmp_path: Path, leaks: Kit, how: signal.Signals) -> None:
    before = processes()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"--index-url http://127.0.0.1:{silent.getsockname()[1]}/simple\n"
        (tmp_path / "requirements.txt").write_text(f"{index}abacus\n")
        (tmp_path / "program.py").write_text(
            "import sys\nfrom monarch.job import SSHJob\n"
            "SSHJob({'one': 'node1'}, config=sys.argv[1], packages=sys.argv[2]).state()\n"
        )
        command = [sys.executable, str(tmp_path / "program.py"), hosts.config, str(tmp_path / "requirements.txt")]
        program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        silent.settimeout(60)
        connection, _ = silent.accept()
        program.send_signal(how)
        assert "installing requirements.txt on node1" in program.communicate()[1]
        connection.close()
    assert wait_until(lambda: not processes().keys() - before.keys(), 15), processes().keys() - before.keys()
    if how == signal.SIGKILL:
        # The folder of a killed program that has no agent goes with the user's next session.
        leaks.rebase()


def test_lock_files_are_read(tmp_path: Path) -> None:
    assert packages_of("") == {}
    for name, text, what in (
        ("requirements.txt", "-e .\n", "remove this line"),
        ("conda-lock.yml", "", "conda-pack"),
        ("other.toml", "[project]\n", "expected pylock.toml"),
        ("pylock.toml", 'lock-version = "1.0"\n[[packages]]\nname = "a"\n', "a has no version with wheels"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ArgumentError, match=what):
            packages_of(str(tmp_path / name))
    with pytest.raises(ArgumentError, match="packages: no file"):
        packages_of(str(tmp_path / "none.txt"))
    (tmp_path / "pylock.toml").write_text(
        'lock-version = "1.0"\n[[packages]]\nname = "a"\nversion = "1"\nmarker = "os_name == \'posix\'"\n'
        'wheels = [{url = "https://x/a.whl", hashes = {sha256 = "12"}}]\n'
    )
    assert packages_of(str(tmp_path / "pylock.toml"))["text"] == "a==1 ; os_name == 'posix' --hash=sha256:12\n"


def test_builds_of_torch_that_matter_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    for here, there, told in (
        ("2.4.0+cu121", "2.4.0+cpu", ["torch is 2.4.0+cpu, built without CUDA; this program's is built for CUDA 12.1"]),
        ("2.4.0+cpu", "2.4.0+cu121", []),
        ("2.4.0", "2.5.1", ["torch is 2.5.1, this program has 2.4.0"]),
    ):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, here=here: here)
        assert [*differences({"torch": there})] == told
