"""Environment variables that take effect only in a new zygote. Pure."""

from __future__ import annotations

from collections.abc import Mapping

LOAD_TIME_KEYS: tuple[str, ...] = (
    # The dynamic loader, the allocator and the C library read theirs before main().
    "LD_*",
    "MALLOC_*",
    "GLIBC_TUNABLES",
    # Python reads these when it starts.
    "PYTHON*",
    "LANG",
    "LC_*",
    # OpenMP and BLAS read theirs when the library is loaded.
    "OMP_*",
    "GOMP_*",
    "KMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "GOTO_*",
    "BLIS_*",
    "NPY_*",
    "NUMPY_*",
    # torch and its compilers read most of theirs when they are imported.
    "TORCH*",
    "PYTORCH_*",
    "ATEN_*",
    "THP_MEM_ALLOC_ENABLE",
)
"""Variables that a program reads only when it is started or loaded; a star matches any ending."""

RUN_TIME_KEYS: tuple[str, ...] = (
    # torch.set_num_threads does the same.
    "OMP_NUM_THREADS",
    # Read on demand, or meaningless for a rank, whose streams and modules are made by this package.
    "PYTHONASYNCIODEBUG",
    "PYTHONBREAKPOINT",
    "PYTHONINSPECT",
    "PYTHONIOENCODING",
    "PYTHONSTARTUP",
    "PYTHONUNBUFFERED",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    # Read by what is imported when a model is compiled.
    "TORCHINDUCTOR_*",
    # Read when a process group is created.
    "TORCHELASTIC_*",
    "TORCH_FR_*",
    "TORCH_GLOO_*",
    "TORCH_NCCL_*",
    # Set by torchrun for its workers.
    "TORCHELASTIC_*",
)
"""Exceptions to LOAD_TIME_KEYS: these take effect in a running process."""


def needs_cold_zygote(env: Mapping[str, str | None], base: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the part of ``env`` that takes effect only in a process started with it; None removes a variable.

    Ranks that want such variables must be forks of a zygote that was started with them.

    Args:
        env: the user's variables.
        base: the environment of the current zygote; variables that ``env`` would not change there are omitted.
    """
    wanted = {key: value for key, value in env.items() if is_load_time(key)}
    if base is not None:
        wanted = {key: value for key, value in wanted.items() if base.get(key) != value}
    return wanted


def is_load_time(key: str) -> bool:
    """Return whether a program reads this variable only when it is started or loaded."""
    return _matches(key, LOAD_TIME_KEYS) and not _matches(key, RUN_TIME_KEYS)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(key.startswith(p[:-1]) if p.endswith("*") else key == p for p in patterns)
