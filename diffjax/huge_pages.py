"""Ask for huge pages where a step is bound by page faults: on Linux, in the C library's own allocator.

XLA's CPU client takes and gives back its temporaries at every step, and each time the kernel hands them out in pages of
4 KiB. With huge pages a training step on CPU takes a quarter to a third less time (`scripts/bench_training.py` with
and without GLIBC_TUNABLES). The C library reads its settings once, before main: a process has to start again for them.
"""

import os
import platform
import sys
from pathlib import Path

SETTING = "glibc.malloc.hugetlb=1"  # madvise(MADV_HUGEPAGE) for what malloc takes from the system
FIRST_GLIBC = (2, 35)  # that knows the setting
KERNEL_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages() -> None:
    """Replace this process by the same command with huge pages (one process id, arguments, files, signals), once.

    Does nothing where GLIBC_TUNABLES is set (to anything: it is the user's), on another C library or system, or where
    the kernel offers huge pages to no one, or to everyone.
    """
    if "GLIBC_TUNABLES" in os.environ or not _kernel_asks():
        return
    library, _, release = " ".join(platform.libc_ver()).partition(" ")
    if library != "glibc" or tuple(int(n) for n in release.split(".")[:2]) < FIRST_GLIBC:
        return
    why = f"starting again with GLIBC_TUNABLES={SETTING}: huge pages make CPU steps faster"
    print(why, file=sys.stderr, flush=True)
    environment = {**os.environ, "GLIBC_TUNABLES": SETTING}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _kernel_asks() -> bool:
    """Whether the kernel gives huge pages to those who ask."""
    try:
        return sys.platform == "linux" and "[madvise]" in KERNEL_SWITCH.read_text()
    except OSError:
        return False
