"""Training tokens/s, side by side in one run: the backbones of a config, and one frontier against all of them.

    python scripts/bench_training.py                              # A, M and AMMMMM of the quickstart, F = all and F = 1
    python scripts/bench_training.py --full-sequence              # attention at G = L, 6 layers, D 256, L 512, V 2048
    python scripts/bench_training.py --patterns M --profile model.remat=none    # the operations that take the time

Rows are random tokens, steps are whole train steps (noise, gradients, guard, AdamW), cases take turns, and figures are
medians. A sequence's tokens count once, although all frontiers read nearly every token twice.
"""

import argparse
import collections
import glob
import json
import re
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from diffjax import Denoiser, load_config
from diffjax.data.batch import Batch
from diffjax.diffusion.corruption import draw
from diffjax.diffusion.objectives import block_diffusion
from diffjax.training.step import make_init, make_train_step

MASK_ID = 4
FULL_SEQUENCE = [
    "model.pattern=A", "model.layers=6", "model.width=256", "model.heads=4", "model.kv_heads=4", "model.head_dim=64",
    "model.mlp_width=768", "model.block_size=512", "data.sequence_length=512", "training.batch_size=16",
    "objective.frontiers=1", "model.prefix=bidirectional", "objective.autoregressive=0", "model.remat=dots",
]  # fmt: skip


def prepare_case(config_path: str, overrides: list[str]) -> dict:
    """A compiled step with its state and batch."""
    config = load_config(config_path, overrides)
    vocab_size = config.data.tokenizer.vocab_size
    denoiser = Denoiser(config.model, vocab_size, config.kernels)
    rows, length = config.training.batch_size, config.data.sequence_length
    tokens = np.random.default_rng(0).integers(MASK_ID + 1, vocab_size, (rows, length)).astype(np.int32)
    whole = np.ones((rows, length), bool)
    segments = np.ones((rows, length // config.model.block_size), np.int32)
    batch = Batch(*map(jnp.asarray, (tokens, segments, whole, whole, np.arange(rows, dtype=np.int32))))
    objective = block_diffusion(denoiser, config.objective, MASK_ID, config.data.tail)
    axes = denoiser.logical_axes()
    noise = lambda step, batch: draw(config.objective, config.run.seed, step, batch, rows)
    step = make_train_step(config, objective, noise, logical_axes=axes)
    state = jax.jit(make_init(config, denoiser.init, axes))(jax.random.key(0))
    began = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    return {
        "name": f"{config.model.pattern}, F {config.objective.frontiers}",
        "step": compiled, "state": state, "batch": batch, "tokens": tokens.size, "seconds": [],
        "parameters": parameters, "compile_seconds": time.perf_counter() - began,
    }  # fmt: skip


def run(case: dict) -> None:
    began = time.perf_counter()
    case["state"], metrics = case["step"](case["state"], case["batch"])
    jax.block_until_ready((case["state"], metrics))
    case["seconds"].append(time.perf_counter() - began)


def profile(case: dict, rows: int = 15) -> None:
    """Print the operations of two steps that take the most time, with what they came from in the model."""
    origin = origins(case["step"].as_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(case)
            run(case)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
    spent = collections.Counter()
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        if event.name in origin:
            spent[event.name] += event.duration_ns
    groups = collections.Counter()
    for name, nanoseconds in spent.items():
        groups[group_of(origin[name], name)] += nanoseconds
    total = sum(groups.values())
    print(f"{case['name']}: {total / 2e6:.0f} ms of operations a step, over all threads")
    for group, nanoseconds in groups.most_common(rows):
        print(f"  {nanoseconds / total:6.1%}  {group}")


def origins(text: str) -> dict[str, str]:
    """Where each operation of a compiled module comes from: its name -> the path in the model, of its matrix product
    if it holds one. Calls and loops are left out: their operations count themselves."""
    inside, found, computation = {}, {}, ""
    for line in text.splitlines():
        if line.endswith("{"):
            computation = line.split()[0].lstrip("%")
        name, _, rest = line.strip().removeprefix("ROOT ").lstrip("%").partition(" = ")
        path = re.search(r'op_name="([^"]*)"', rest)
        called = re.search(r"calls=%?([\w.-]+)", rest)
        path = path[1] if path else ""
        if re.search(r" dot\(", rest):
            path = path if "dot_general" in path else f"{path}/dot_general"
            inside[computation] = path
        if rest and not re.search(r" (while|call|conditional|parameter|tuple|constant)\(", rest):
            found[name] = inside.get(called[1], path) if called else path
    return found


def group_of(origin: str, name: str) -> str:
    """The part of the model an operation belongs to."""
    direction = "backward" if "transpose(" in origin else "forward"
    kind = "matrix products" if "dot_general" in origin else "the rest"
    for place, part in (
        ("mlp/", "MLP"), ("_norm", "norms"), ("head", "head and loss"), ("embed", "embedding"),
        ("conv_", "convolution"), ("_project", "mixer projections"), ("output/", "mixer projections"),
        ("scan", "Mamba: scan"), ("mixer", "mixer"),
    ):  # fmt: skip
        if f"/{place}" in origin or place in origin.split("/")[-2:-1]:
            return f"{part}, {kind}, {direction}"
    if "dynamic" in name or "broadcast" in name:
        return f"stacks of saved activations, {direction}"
    return f"loss, optimizer, guard, noise: {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--patterns", default="A,M,AMMMMM")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--full-sequence", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()

    if options.full_sequence:
        cases = [prepare_case(options.config, [*FULL_SEQUENCE, *options.overrides])]
    else:
        frontiers = ("all",) if options.profile else ("all", "1")
        cases = [
            prepare_case(
                options.config, [f"model.pattern={pattern}", f"objective.frontiers={count}", *options.overrides]
            )
            for pattern in options.patterns.split(",")
            for count in frontiers
        ]
    for _ in range(options.steps + 2):
        for case in cases:
            run(case)
    for case in cases:
        median = statistics.median(case["seconds"][2:])
        record = {
            "case": case["name"], "tokens_per_s": round(case["tokens"] / median), "step_ms": round(1000 * median),
            "parameters": case["parameters"], "compile_s": round(case["compile_seconds"], 1),
        }  # fmt: skip
        print(json.dumps(record))
    if not (options.full_sequence or options.profile):
        for every, one in zip(cases[::2], cases[1::2], strict=True):
            ratio = statistics.median(every["seconds"][2:]) / statistics.median(one["seconds"][2:])
            print(f"{every['name']} costs {ratio:.2f} times F 1 a step")
    if options.profile:
        for case in cases:
            profile(case)


if __name__ == "__main__":
    main()
