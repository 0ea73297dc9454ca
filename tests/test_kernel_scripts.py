"""The kernel scripts: their figures are right, a wrong kernel fails the parity table, and a lent GPU loses no case."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_gpu  # noqa: E402
import bench_kernels  # noqa: E402
import kernel_cases as cases  # noqa: E402
import kernel_figures as figures  # noqa: E402
from kernel_cases import Sizes  # noqa: E402
from kernel_peers import Peer  # noqa: E402

from diffjax.errors import UnsupportedKernel  # noqa: E402
from diffjax.kernels import attention as attention_lib  # noqa: E402
from diffjax.kernels import ssd as ssd_lib  # noqa: E402

SEED, WIDE = Sizes(1, 256, 32, 16, 32, 64), Sizes(1, 256, 32, 8, 64, 128)
SMALL = Sizes(B=1, L=96, G=32, H=2, P=8, N=4)


@pytest.mark.parametrize(
    ("sizes", "chunk", "direction", "flop", "size"),
    [
        (SEED, 128, "forward", 17408, 216),
        (SEED, 128, "with gradients", 17408 + 39936, 216 + 336),
        (WIDE, 256, "forward", 73728, 456),
    ],
)
def test_cost_of_a_scan(sizes, chunk, direction, flop, size):
    """Per token and head, worked out by hand from the formulas in the docstring of `diffjax.kernels.ssd`."""
    cost = figures.ssd_cost(sizes, 100, chunk, 2, direction)
    assert cost == (100 * sizes.H * flop, 100 * sizes.H * size)


def test_cost_of_attention():
    sizes = Sizes(B=3, L=12, G=4, H=6, P=8, N=2)
    reads = {
        "causal": [key <= query for query in range(8) for key in range(8)],
        "blocks": [key // 4 <= query // 4 for query in range(8) for key in range(8)],
        "frontiers": [key // 4 < query // 4 for query in range(12) for key in range(8)] + 12 * 4 * [True],
        "one frontier": 4 * (8 + 4) * [True],
    }
    for operation, pairs in reads.items():
        assert figures.visible_pairs(operation, sizes) == sum(pairs)
    forward = figures.attention_cost("frontiers", sizes, 2, "forward")
    assert forward.flop == 3 * 6 * sum(reads["frontiers"]) * 2 * (2 * 8)
    assert forward.bytes == 2 * 3 * 8 * (12 * 6 + 12 * 6 + 2 * (8 + 12) * 2)  # queries, results; keys, values
    both = figures.attention_cost("frontiers", sizes, 2, "with gradients")
    assert both == (3.5 * forward.flop, 3 * forward.bytes)


def test_relative_error():
    assert figures.relative_error([1.0, 2.0], [1.0, -4.0]) == 1.5
    assert figures.relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    for bad in (math.nan, math.inf):
        assert figures.relative_error([1.0, bad], [1.0, 2.0]) == math.inf
        assert figures.relative_error([1.0, 2.0], [1.0, bad]) == math.inf
    with pytest.raises(ValueError, match="shape"):
        figures.relative_error([1.0], [[1.0], [1.0]])


def test_bars():
    assert figures.over_bars({"values": 1e-6, "x": 4e-6}, "float32") == []
    assert figures.over_bars({"values": 3e-6, "x": 4e-6, "A": math.nan}, "float32") == ["values", "A"]


def test_all_run_in_every_turn():
    seconds = {"a": itertools.count(1.0), "b": itertools.repeat(7.0)}
    order = []
    thunk = lambda name: lambda: (order.append(name), next(seconds[name]))[1]
    timed = figures.interleave({name: thunk(name) for name in seconds}, turns=3, at_least=0.0)
    assert "".join(order) == "aabb" + "ababab"
    assert timed == {"a": (4.0, 3.0, 5.0), "b": (7.0, 7.0, 7.0)}


def test_errors_are_those_of_the_computation_alone():
    """In bfloat16 the reference computes in float32: only results in bfloat16 are rounded. Inputs and cotangents are
    not, or the float32 gradients would be off by about 2e-3."""
    errors = figures.errors_of(figures.truth_of(cases.ssd_case("scan", SMALL))("bfloat16"), "reference")
    assert max(errors[name] for name in ("dt", "A", "state")) < 1e-5
    assert 1e-4 < errors["values"] < 1e-2


def only_the_scan(monkeypatch, **backends):
    kept = {name: ssd_lib.BACKENDS[name] for name in ("reference", "xla")}
    monkeypatch.setattr(ssd_lib, "BACKENDS", kept | backends)
    monkeypatch.setattr(cases, "SSD_OPERATIONS", ("scan",))
    monkeypatch.setattr(cases, "ATTENTION_OPERATIONS", ())
    monkeypatch.setattr(bench_kernels, "PARITY_SSD", SMALL)
    monkeypatch.setattr(bench_kernels, "BARS", {"float32": figures.BARS["float32"]})
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--parity"])


def backend_of(forward):
    """The XLA form with another forward pass."""
    functions = vars(ssd_lib.BACKENDS["xla"]) | {"scan_forward": forward, "refusal": lambda *_, **__: None}
    return SimpleNamespace(**functions)


def test_parity_fails_for_a_wrong_kernel(monkeypatch, capsys):
    right = ssd_lib.BACKENDS["xla"].scan_forward

    def slightly_wrong(*args, **kwargs):
        y, states = right(*args, **kwargs)
        return y.at[0, 40, 1, 3].add(1e-3), states

    only_the_scan(monkeypatch, right=backend_of(right), wrong=backend_of(slightly_wrong))
    with pytest.raises(SystemExit) as stopped:
        bench_kernels.main()
    assert "wrong" in stopped.value.code and "values" in stopped.value.code and "right" not in stopped.value.code
    table = capsys.readouterr().out.splitlines()
    assert [line for line in table if "OVER: values" in line] == [line for line in table if " wrong " in line]


def test_parity_tells_a_refusal_from_a_failure(monkeypatch, capsys):
    def refuses(*_, **__):
        raise UnsupportedKernel("kernels: shy cannot run ssd scan of [1, 2]: takes four heads")

    def breaks(*_, **__):
        raise ZeroDivisionError("no heads")

    only_the_scan(monkeypatch, shy=backend_of(refuses), broken=backend_of(breaks))
    with pytest.raises(SystemExit, match=r"(?s)^((?!shy).)*broken((?!shy).)*$"):
        bench_kernels.main()
    assert "refused: takes four heads" in (table := capsys.readouterr().out)
    assert "FAILED ZeroDivisionError: no heads" in table


@pytest.mark.parametrize(("power", "rows"), [(1, 0), (2, 10)])
def test_memory_must_grow_like_the_tokens(monkeypatch, power, rows):
    def programs(function, inputs):
        program = SimpleNamespace(temporaries=inputs[0].size ** power)
        return dict.fromkeys(figures.DIRECTIONS, program)

    monkeypatch.setattr(figures, "programs", programs)
    assert len(bench_kernels.memory((1024, 4096))) == rows


def test_a_peer_that_does_not_start_says_why():
    with Peer("no such peer", sys.executable) as peer:
        assert not peer.ready and "KeyError" in peer.about


# A lent GPU

TOY = """
import os, sys, time
from case_runner import Case, serve, supervise
def fail(lines): raise ValueError("a bad shape")
def chat(lines):
    print("loading")
    return {"before": sorted(lines)}
cases = {
    "fails": Case(10, fail),
    "dies": Case(10, lambda lines: os._exit(3)),
    "chats": Case(10, chat),
    "hangs": Case(1, lambda lines: time.sleep(100)),
    "is long": Case(1000, chat),
    "is last": Case(10, lambda lines: {"process": len(lines)}),
}
serve(cases) if len(sys.argv) > 1 else supervise([sys.executable, __file__, "serve"], cases, minutes=1)
"""


def test_a_case_that_fails_costs_only_itself(tmp_path):
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    lines = {line.pop("case"): line for line in map(json.loads, result.stdout.splitlines())}
    assert list(lines) == ["fails", "dies", "chats", "hangs", "is long", "is last"]
    assert lines["fails"]["error"] == "ValueError: a bad shape"
    assert lines["dies"]["error"] == "its process died with 3"
    assert lines["chats"]["before"] == ["dies", "fails"]
    assert lines["hangs"]["error"] == "stopped after 3 s"
    assert lines["is long"]["skipped"].startswith("needs about 1000 s")
    assert lines["is last"]["process"] == 5
    assert "loading" in result.stderr


def test_gpu_plan():
    plan = bench_gpu.plan_of_cases(bench_gpu.Plan(tiny=False), "python")
    names = list(plan)
    assert names[:2] == ["device", "ceilings"]
    first_timed = next(i for i, name in enumerate(names) if name.startswith("time"))
    checked = {f"errors, {what}" for what in ("ssd frontiers", "attention blocks", "attention frontiers")}
    assert checked <= set(names[:first_timed])
    asked = sum(case.seconds for case in itertools.islice(plan.values(), names.index("denoise latency") + 1))
    assert asked < 8.5 * 60  # what the issue of a lent GPU is about always fits


def test_backends_of_a_gpu_come_from_the_tables(monkeypatch):
    assert bench_gpu.backends("attention") == ["xla", "pallas_triton"]
    monkeypatch.setattr(attention_lib, "BACKENDS", {"reference": None, "xla": None, "pallas_tpu": None})
    assert bench_gpu.backends("attention") == ["xla"]


def test_only_what_passed_its_check_is_timed():
    result = {"good bfloat16": {"errors": {}}, "bad bfloat16": {"errors": {}, "over the bars": ["A"]}}
    lines = {"errors, ssd frontiers": result | {"shy bfloat16": {"refused": "takes four heads"}}}
    assert bench_gpu.passed(lines, "ssd frontiers", "good")
    assert not any(bench_gpu.passed(lines, "ssd frontiers", name) for name in ("bad", "shy", "absent"))
    assert not bench_gpu.passed({"errors, ssd frontiers": {"skipped": "no time"}}, "ssd frontiers", "good")
    assert bench_gpu.passed({}, "ssd frontiers", "good")


def test_rates():
    ceiling = bench_gpu.ceiling({"ceilings": {"TFLOP/s": 400.0, "GB/s": 4000.0}})
    line = bench_gpu.rates({"a": figures.Timed(0.002, 0.001, 0.003)}, {"a": figures.Cost(2e11, 1e9)}, ceiling)["a"]
    assert (line["ms"], line["TFLOP/s"], line["GB/s"]) == (2.0, 100.0, 500.0)
    assert (line["of_flop_ceiling"], line["of_byte_ceiling"]) == (0.25, 0.125)
    assert math.isnan(bench_gpu.ceiling({"ceilings": {"error": "..."}}).flop)


def test_gpu_script_needs_no_data_packages(tmp_path):
    """A lent machine has jax, flax, optax and PyYAML."""
    missing = ["array_record", "grain", "pyarrow", "sentencepiece", "wandb", "zstandard"]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n")
    root = SCRIPTS.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    command = [sys.executable, str(SCRIPTS / "bench_gpu.py"), "--tiny", "--only", "2^31 elements, xla"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["case"] for line in lines] == ["device", "ceilings", "more than 2^31 elements, xla"]
    assert lines[-1]["ok"]
