"""What a mesh costs where it can gain nothing: one process with virtual CPU devices against one device, in one run.

    python scripts/bench_mesh.py                                      # the quickstart on 1 device, data 8 and fsdp 8
    python scripts/bench_mesh.py --meshes "fsdp 4 x tensor 2" model.pattern=M

All virtual devices share this machine's cores, so a perfect mesh would be as fast as one device; what is missing is
the overhead: exchanges by copying, small pieces of work, and parameters that FSDP gathers in every layer. It says
nothing about real accelerators. Rows are random tokens, steps are whole train steps, cases take turns, and figures are
medians. On few cores one step of a mesh may take many seconds; `--steps` and `training.batch_size` make it shorter.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time


def prepare_case(name: str, config_path: str, overrides: list[str]) -> dict:
    """A compiled step on the mesh, with its state and batch."""
    import jax
    import numpy as np

    from diffjax import Denoiser, load_config
    from diffjax.data.batch import Batch
    from diffjax.diffusion.corruption import draw
    from diffjax.diffusion.objectives import block_diffusion
    from diffjax.parallel import mesh as mesh_lib
    from diffjax.parallel.collectives import collectives
    from diffjax.training.step import compile_step, lay_out, make_init, make_train_step

    sizes = {"data": 1} | {axis: int(size) for axis, size in (part.split() for part in name.split(" x "))}
    config = load_config(config_path, [*overrides, *(f"mesh.{axis}={size}" for axis, size in sizes.items())])
    mesh = mesh_lib.make_mesh(config.mesh, jax.devices()[: math.prod(sizes.values())])
    vocab_size, rows, length = config.data.tokenizer.vocab_size, config.training.batch_size, config.data.sequence_length
    denoiser = Denoiser(config.model, vocab_size, config.kernels)
    axes = denoiser.logical_axes()
    abstract, places, _ = lay_out(config, denoiser, mesh)
    objective = block_diffusion(denoiser, config.objective, 4, config.data.tail)
    noise = lambda step, batch: draw(config.objective, config.run.seed, step, batch, rows)
    tokens = np.random.default_rng(0).integers(5, vocab_size, (rows, length), np.int32)
    segments, whole = np.ones((rows, length // config.model.block_size), np.int32), np.ones((rows, length), bool)
    batch = Batch(tokens, segments, whole, whole, np.arange(rows, dtype=np.int32))
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, mesh_lib.batch_sharding(mesh))
        began = time.perf_counter()
        step = make_train_step(config, objective, noise, mesh, places["params"], axes)
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)
        compiled = compile_step(step, abstract, places, shapes, mesh)
        seconds = time.perf_counter() - began
        state = jax.jit(make_init(config, denoiser.init, axes), out_shardings=places)(jax.random.key(config.run.seed))
    moved = [one.bytes * one.times for one in collectives(compiled.as_text()) if one.times is not None]
    return {
        "name": name, "step": compiled, "state": state, "batch": batch, "tokens": tokens.size, "seconds": [],
        "compile_seconds": seconds, "megabytes_exchanged": sum(moved) / 1e6, "losses": [],
    }  # fmt: skip


def run(case: dict) -> None:
    import jax

    began = time.perf_counter()
    case["state"], metrics = case["step"](case["state"], case["batch"])
    jax.block_until_ready((case["state"], metrics))
    case["seconds"].append(time.perf_counter() - began)
    case["losses"].append(float(metrics["loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--meshes", default="data 8,fsdp 8", help="compared with one device, separated by commas")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one that is not")
    options = parser.parse_args()

    names = ["data 1", *(name.strip() for name in options.meshes.split(","))]
    devices = max(math.prod(int(part.split()[1]) for part in name.split(" x ")) for name in names)
    os.environ["JAX_PLATFORMS"] = "cpu"
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()  # read when jax starts its backend

    cases = [prepare_case(name, options.config, options.overrides) for name in names]
    for _ in range(options.steps + 1):
        for case in cases:
            run(case)
    print(f"{devices} virtual devices on {os.cpu_count()} CPU cores", file=sys.stderr)
    alone = statistics.median(cases[0]["seconds"][1:])
    for case in cases:
        median = statistics.median(case["seconds"][1:])
        record = {
            "mesh": case["name"], "tokens_per_s": round(case["tokens"] / median), "step_ms": round(1000 * median),
            "times_one_device": round(median / alone, 2), "compile_s": round(case["compile_seconds"], 1),
            "exchanged_MB_a_device": round(case["megabytes_exchanged"], 1), "last_loss": round(case["losses"][-1], 6),
        }  # fmt: skip
        print(json.dumps(record))


if __name__ == "__main__":
    main()
