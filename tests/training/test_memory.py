"""Memory in the metrics: what the system says, the fullest device, and nothing where nothing is known."""

import mmap

import pytest

from diffjax.training import memory
from diffjax.training.memory import memory_metrics, peak_host_bytes


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(
    "stats, want",
    [
        ([{"bytes_in_use": 5, "peak_bytes_in_use": 9}, {"bytes_in_use": 7, "peak_bytes_in_use": 8}], (7, 9)),
        ([None, {"bytes_in_use": 7, "peak_bytes_in_use": 8}], (None, None)),
        ([{"bytes_in_use": 7}], (7, None)),
        ([None], (None, None)),
    ],
)
def test_devices(monkeypatch, stats, want):
    monkeypatch.setattr("jax.local_devices", lambda: [Device(each) for each in stats])
    numbers = memory_metrics()
    assert (numbers.get("memory/device_bytes"), numbers.get("memory/device_peak_bytes")) == want
    assert None not in numbers.values()


def test_host(monkeypatch, tmp_path):
    before = memory_metrics()["memory/host_bytes"]
    block = mmap.mmap(-1, 2**26)  # fresh pages: what the allocator has kept would not grow the process
    block.write(b"\1" * 2**26)
    grown = memory_metrics()["memory/host_bytes"]
    assert grown - before > 2**25
    assert peak_host_bytes() >= grown - 2**22 and block[0] == 1  # the two counters are kept apart by the kernel
    monkeypatch.setattr(memory, "STATM", tmp_path / "none")
    assert "memory/host_bytes" not in memory_metrics()
