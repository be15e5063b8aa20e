"""The current job of a folder: which job its programs use, by torchmonarch's names and files."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from monarch._meshes.host_mesh import HostMesh
from monarch._session.jobs.jobs import DEFAULT_JOB_PATH, JobTrait
from monarch.exceptions import ArgumentError

_SPEC = "spec"


def set_current_job(module_path: str) -> None:
    """Make a job the current one of this folder, for ``load_current_job`` in other programs.

    Args:
        module_path: where the job is, as ``module.name``.

    Raises:
        ArgumentError: ``module_path`` is not such a path.
    """
    _split(module_path)
    file = _spec_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(module_path, encoding="utf-8")


def load_current_job() -> JobTrait:
    """Import and return the current job of this folder; call its ``state()`` to start it.

    Raises:
        FileNotFoundError: no job was set in this folder.
        ArgumentError: the path given to ``set_current_job`` does not exist, or is not a job; a ValueError.
    """
    file = _spec_file()
    try:
        module_path = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"this folder has no current job ({file} does not exist); call set_current_job('module.name')"
        ) from None
    module, name = _split(module_path)
    try:
        job = getattr(import_module(module), name)
    except AttributeError:
        raise ArgumentError(
            f"{module_path}: module {module!r} has no attribute {name!r}; {file} names the current job, and "
            f"set_current_job('module.name') changes it"
        ) from None
    if not isinstance(job, JobTrait):
        raise ArgumentError(f"{module_path}: expected a job, got {type(job).__name__}; {file} names it")
    return job


def hosts_from_config(name: str) -> HostMesh:
    """Return a host mesh of the current job of this folder, which is started unless it runs.

    Args:
        name: the name of the host mesh in the job.

    Raises:
        FileNotFoundError: no job was set in this folder.
        ArgumentError: the current job does not exist, is not a job, or has no host mesh of this name.
        SpawnError: a host could not be started.
    """
    state = load_current_job().state()
    try:
        return getattr(state, name)
    except AttributeError as error:
        raise ArgumentError(f"hosts_from_config: {error}") from None


def _split(module_path: str) -> tuple[str, str]:
    module, _, name = module_path.rpartition(".")
    if not module or not name.isidentifier():
        raise ArgumentError(f"module_path: expected 'module.name', got {module_path!r}")
    return module, name


def _spec_file() -> Path:
    """Return the file that names the current job: next to the state that torchmonarch links to, if it does."""
    link = Path(DEFAULT_JOB_PATH)
    try:
        context = Path(os.readlink(link)).parent
    except OSError:
        context = Path("default")
    return link.parent / context / _SPEC
