"""Compiled programs kept on disk, so that a second start of the same config compiles nothing.

JAX keeps the cache; this file decides where it lies. An entry is machine code, and XLA loads one made for another CPU
with no more than a line in the log, before an illegal instruction ends the process: so programs for CPUs lie in a
folder of their own for each set of instructions.
"""

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


@contextlib.contextmanager
def compile_cache(choice: str, run_dir: Path) -> Iterator[Path | None]:
    """Keep what is compiled inside on disk: `choice` is `training.compile_cache`. Yields the folder, or None without.

    A folder that JAX was told by other means (JAX_COMPILATION_CACHE_DIR, jax.config) stays as it is. One that cannot be
    written is a line on standard error: everything is then compiled, nothing fails. Only the first process writes.
    """
    if choice == "off" or jax.config.jax_compilation_cache_dir is not None:
        yield None
        return
    folder = cache_folder(choice, run_dir, jax.default_backend(), jax.process_count())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(None, "not writable")
    except OSError as error:
        print(
            f"no compile cache: {folder}: {error.strerror}; set training.compile_cache to a folder, or to off",
            file=sys.stderr,
        )
        yield None
        return
    settings = {"jax_compilation_cache_dir": str(folder), **SETTINGS}
    before = {name: getattr(jax.config, name) for name in settings}
    _apply(settings)
    try:
        yield folder
    finally:
        _apply(before)


def _apply(settings: dict) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX opens the folder once and would stay with it


def cache_folder(choice: str, run_dir: Path, backend: str, processes: int) -> Path:
    """`auto`: the user's cache folder; with several processes the run folder, which all hosts are known to read."""
    if choice != "auto":
        folder = Path(choice).expanduser()
    elif processes > 1:
        folder = run_dir / "compile_cache"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "diffjax" / "compile"
    return (folder / f"cpu-{instruction_set()}" if backend == "cpu" else folder).absolute()


def instruction_set() -> str:
    """A short name for what this machine's processor can execute."""
    lines = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if not line.strip():
                break  # the first processor stands for all
            if line.startswith(names):
                lines.append(line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
