"""`scripts/check_kernels.py`: it reads what the TPU compiler writes, and no kernel got a longer schedule unseen."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("check_kernels", ROOT / "scripts" / "check_kernels.py")
check_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_kernels)

UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 1
1 0 2 0 0 3 2 0 0 0
0 0 0 0 0 1 1 1 1 0
"""
CALL = (
    '  %{name} = f32[8]{{0}} custom-call(%copy.1), custom_call_target="tpu_custom_call", backend_config={{'
    '"scoped_memory_configs":[{{"memory_space":"1","offset":"1000","size":"16777216"}}],"custom_call_config":{{}},'
    '"used_scoped_memory_configs":[{{"memory_space":"1","offset":"0","size":"{end}"}}]}}\n'
)


def test_reads_bundles_fills_and_spills():
    assert check_kernels.parse_utilization(UTILIZATION) == (3, 3, 1)
    with pytest.raises(ValueError, match="another form"):
        check_kernels.parse_utilization(UTILIZATION.replace("VSTORE:SPILL", "VSTORE:OTHER"))


def test_reads_a_dump_by_the_names_of_kernels(tmp_path):
    calls = ("jvp_ssd_scan_forward_.1", "transpose_jvp_ssd_scan_backward__.2")
    for call in (*calls, "fusion.3"):
        (tmp_path / f"179-{call}-70-final_hlo-static-per-bundle-utilization.txt").write_text(UTILIZATION)
    text = "".join(CALL.format(name=name, end=end) for name, end in zip(calls, (3000, 4000), strict=True))
    assert check_kernels.read_schedules(tmp_path, "%a = f32[8] add()\n" + text) == {
        "ssd_scan_forward": check_kernels.Kernel(3, 3, 1, 2000, 16777216),
        "ssd_scan_backward": check_kernels.Kernel(3, 3, 1, 3000, 16777216),
    }


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"bundles": 105, "fills": 0, "spills": 10}, None),
        ({"bundles": 106, "fills": 0, "spills": 10}, "106 bundles, 100 recorded"),
        ({"bundles": 90, "fills": 0, "spills": 11}, "11 spills, 10 recorded"),
        ({"bundles": 90, "fills": 1, "spills": 10}, "1 fills, 0 recorded"),
        ("refused: takes less", "refused: takes less"),
        (None, "kernels"),
    ],
)
def test_compares_with_the_record(here, said):
    recorded = {"scan": {"forward": {"bundles": 100, "fills": 0, "spills": 10}}}
    programs = {"scan": here if isinstance(here, str) else {"forward" if here else "renamed": here}}
    worse = check_kernels.compare(recorded, programs)
    assert len(worse) == (said is not None)
    assert all(said in line for line in worse)
    assert check_kernels.compare({}, {"scan": {"forward": {}}})  # a program nobody recorded
    assert not check_kernels.compare(recorded, {"scan": "error"})  # reported where it failed


def test_every_config_has_its_shapes_and_a_record():
    shapes = check_kernels.shapes(ROOT / "configs")
    assert {shape.mixer for shape in shapes} == {"mamba", "attention"}
    assert all(shape.rows <= check_kernels.MOST_ROWS and shape.length % shape.block_size == 0 for shape in shapes)
    programs = json.loads(check_kernels.RECORD.read_text())["programs"]
    assert set(programs) == set(check_kernels.program_names(check_kernels.TOPOLOGIES, shapes))


def spilling(programs):
    """The programs with an SSD kernel of ours that computes in bfloat16, forward, and spills registers."""
    return [
        program
        for program, kernels in programs.items()
        if " mamba: " in program and " bfloat16, " in program and isinstance(kernels, dict)
        for name, kernel in kernels.items()
        if name.endswith("_forward") and kernel["spills"] + kernel["fills"]
    ]


def test_no_forward_kernel_of_ssd_spills_in_bfloat16():
    programs = json.loads(check_kernels.RECORD.read_text())["programs"]
    assert not spilling(programs)
    checked = [name for name in programs if " mamba: " in name and " bfloat16, " in name]
    assert len(checked) >= 2 * len(check_kernels.TOPOLOGIES) * len(check_kernels.OPERATIONS["mamba"])
    kernel = programs[checked[0]]
    worse = {name: schedule | {"spills": 1} for name, schedule in kernel.items()}
    assert spilling({checked[0]: worse}) == [checked[0]]


def test_schedules_of_the_smallest_shape_are_as_recorded():
    record = json.loads(check_kernels.RECORD.read_text())
    for package in ("jax", "libtpu"):
        try:
            here = version(package)
        except PackageNotFoundError:
            here = None
        if here != record[package]:
            pytest.skip(f"the record was made with {package} {record[package]}, here is {here}")
    command = [sys.executable, "scripts/check_kernels.py", "--target", "tpu:v5e", "--only", "quickstart.yaml mamba"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ssd_scan_backward" in result.stdout


def test_a_missing_compiler_is_a_sentence():
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is here")
    result = subprocess.run([sys.executable, "scripts/check_kernels.py"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "tpu-check" in result.stderr
