"""Topology names and peaks."""

import pytest

from diffjax.errors import UserError
from diffjax.parallel.chips import CHIPS, GIB, peak_flops, topology


@pytest.mark.parametrize(
    ("name", "devices", "kind", "memory"),
    [
        ("v5e:16x16", 256, "TPU v5 lite", 15.75),
        ("v4:2x2x1", 4, "TPU v4", 30.75),
        ("v5p:4x4x8", 128, "TPU v5", 95.74),
        ("v6e:2x2", 4, "TPU v6 lite", 31.25),
        ("tpu7x:2x2x1", 8, "TPU7x", 94.75),
        ("cpu:8", 8, "cpu", None),
    ],
)
def test_topologies(name, devices, kind, memory):
    found = topology(name)
    assert (found.devices, found.chip.device_kinds[0]) == (devices, kind)
    assert found.chip.memory == (None if memory is None else int(memory * GIB))


@pytest.mark.parametrize("name", ["v5litepod-16", "v5e", "v7:2x2", "v6e-256", "", "V5E:2x2"])
def test_other_names_are_refused_with_the_right_ones(name):
    with pytest.raises(UserError) as caught:
        topology(name)
    assert all(chip.example in str(caught.value) for chip in CHIPS.values()) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["v5e:16", "v5p:4x4", "cpu:2x2", "cpu:0", "v5e:0x4", "v5e:x4", "h100:"])
def test_shapes_have_the_chips_dimensions(name):
    with pytest.raises(UserError, match="the shape of"):
        topology(name)


def test_every_example_is_a_topology():
    for chip in CHIPS.values():
        assert topology(chip.example).chip is chip


def test_peak_is_of_a_device_and_never_invented():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("TPU7x") == 2307e12 / 2  # two devices a chip
    for unknown in ("cpu", "TPU v9", "NVIDIA H100 PCIe", ""):
        assert peak_flops(unknown) is None
