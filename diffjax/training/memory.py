"""What a process holds in memory: bytes on the host and on its devices, where the system says so."""

import resource
import sys
from pathlib import Path

import jax

STATM = Path("/proc/self/statm")


def memory_metrics() -> dict[str, int]:
    """Bytes held now, for the metrics; a number that the system or the backend does not give is left out.

    memory/host_bytes         resident set of this process (Linux)
    memory/device_bytes       in use on the fullest local device
    memory/device_peak_bytes  the most that was ever in use on one of them
    """
    numbers = {}
    if STATM.exists():
        numbers["memory/host_bytes"] = int(STATM.read_text().split()[1]) * resource.getpagesize()
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name, key in (("memory/device_bytes", "bytes_in_use"), ("memory/device_peak_bytes", "peak_bytes_in_use")):
        if all(key in each for each in stats):
            numbers[name] = max(each[key] for each in stats)
    return numbers


def peak_host_bytes() -> int:
    """The largest resident set this process ever had."""
    kilobytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
