"""One GPU, one command, under nine minutes: are the kernels right there, and how fast are they?

    python scripts/bench_gpu.py > gpu.jsonl            # jax with CUDA, flax, optax, PyYAML; torch for its scan
    python scripts/bench_gpu.py --tiny                 # toy sizes, anywhere, kernels interpreted: tests the script

A JSON line for each case, written when the case ends (`case_runner`): a cut run keeps what it has, and what does not
fit into --minutes is skipped. In order: the device and its two ceilings (bandwidth of a copy, a bfloat16 product),
errors of every backend against the token loop in float64, times of the scan beside PyTorch's chunked form, times of
block attention beside cuDNN, a training step of a 300M hybrid with its share of the ceiling (MFU), latency of a denoise
call behind 1k to 256k tokens, a scan with more than 2^31 elements, and the other shapes. A backend that fails a check
is not timed. Exits 1 if a case failed or a result was wrong.

Times: compile, two calls unmeasured, then medians over 5 turns in which all variants run for 50 ms each. FLOP and bytes
are those of the formulas in kernel_figures.py (attention counts the pairs its mask allows, not tiles); rates are also
given as shares of the measured ceilings. bfloat16 unless a line says otherwise.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the GPU

import bench_gpu_model as model
import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_figures as figures
import numpy as np
from case_runner import Case, serve, supervise
from kernel_cases import Sizes
from kernel_figures import DIRECTIONS, Cost
from kernel_peers import Peer

from diffjax.errors import UnsupportedKernel
from diffjax.kernels import ssd_scan, states_at
from diffjax.kernels.dispatch import KERNELS

CHUNKS = {"scan": (64, 128), "frontiers": (32, 64, 128)}  # frontiers in chunks of a block start from stored states


class Plan:
    """Sizes of a run: of a GPU, or tiny ones."""

    def __init__(self, tiny: bool):
        pick = lambda small, large: small if tiny else large
        self.copy, self.product = pick(2**16, 2**28), pick(256, 8192)
        self.seed_check = pick(Sizes(1, 160, 32, 2, 32, 16), Sizes(1, 1024, 32, 16, 32, 64))
        self.wide_check = pick(Sizes(1, 160, 32, 2, 32, 16), Sizes(1, 1024, 256, 8, 64, 128))
        self.attention_check = pick(Sizes(1, 160, 32, 2, 64, 1), Sizes(1, 1024, 32, 4, 128, 2))
        self.seed_heads = pick(Sizes(1, 128, 32, 2, 32, 16), Sizes(16, 1024, 32, 80, 32, 64))
        self.wide_heads = pick(Sizes(1, 128, 32, 2, 32, 16), Sizes(8, 2048, 32, 24, 64, 128))
        self.attention = pick(Sizes(1, 96, 32, 2, 64, 2), Sizes(16, 1024, 32, 20, 128, 20))
        self.long_attention = pick(Sizes(1, 128, 32, 2, 64, 2), Sizes(2, 8192, 32, 20, 128, 20))
        self.hybrid = pick(model.TINY, model.HYBRID)
        self.contexts = pick([64, 256], [2**10, 2**12, 2**14, 2**16, 2**18])
        self.large, self.tail = pick((512, 2), (860_160, 80)), pick(128, 4096)
        self.interleave = partial(figures.interleave, turns=pick(1, 5), at_least=pick(0.0, 0.05))


def backends(family: str) -> list[str]:
    """Those of a CUDA GPU, the reference left out."""
    return [name for name in cases.backends(family) if name in ("xla", KERNELS["cuda"])]


def plan_of_cases(plan: Plan, torch_python: str) -> dict[str, Case]:
    """Every case by its name; what is worth most comes first."""
    check = lambda family, operation, sizes: Case(25, lambda lines: check_backends(family, operation, sizes))
    scan = lambda operation, sizes: Case(40, lambda lines: time_ssd(plan, operation, sizes, torch_python, lines))
    attention = lambda operation, sizes: Case(30, lambda lines: time_attention(plan, operation, sizes, lines))
    wide, long = plan.wide_heads, plan.long_attention
    return {
        "device": Case(10, lambda lines: device()),
        "ceilings": Case(15, lambda lines: ceilings(plan)),
        "errors, ssd frontiers": check("ssd", "frontiers", plan.seed_check),
        "errors, ssd reverse blocks": check("ssd", "reverse blocks", plan.seed_check),
        "errors, ssd one frontier": check("ssd", "one frontier", plan.seed_check),
        "errors, attention frontiers": check("attention", "frontiers", plan.attention_check),
        "errors, attention blocks": check("attention", "blocks", plan.attention_check),
        "errors, attention one frontier": check("attention", "one frontier", plan.attention_check),
        "time, ssd scan, seed heads": scan("scan", plan.seed_heads),
        "time, ssd frontiers, seed heads": scan("frontiers", plan.seed_heads),
        "time, attention blocks": attention("blocks", plan.attention),
        "time, attention frontiers": attention("frontiers", plan.attention),
        "training step": Case(80, lambda lines: model.training_step(plan.hybrid, plan.interleave, ceiling(lines))),
        "denoise latency": Case(
            40, lambda lines: model.latency(plan.hybrid, plan.contexts, plan.interleave, ceiling(lines))
        ),
        **{
            f"more than 2^31 elements, {backend}": Case(20, lambda lines, backend=backend: large(plan, backend))
            for backend in backends("ssd")
        },
        "errors, ssd frontiers, wide heads": check("ssd", "frontiers", plan.wide_check),
        "time, ssd scan, wide heads": scan("scan", wide),
        "time, attention blocks, long rows": attention("blocks", long),
        "time, attention frontiers, long rows": attention("frontiers", long),
        "time, ssd frontiers, wide heads": scan("frontiers", wide),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="the device, its ceilings and cases with TEXT")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH", help="a Python with torch")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = plan_of_cases(Plan(options.tiny), options.torch_python)
    if options.serve:
        return serve(every)
    wanted = {name: case for name, case in every.items() if name in ("device", "ceilings") or options.only in name}
    lines = supervise([sys.executable, __file__, *sys.argv[1:], "--serve"], wanted, options.minutes)
    wrong = [name for name, line in lines.items() if "error" in line or not line.get("ok", True)]
    if wrong:
        sys.exit(f"bench_gpu: wrong or failed: {'; '.join(wrong)}")


# The machine


def device() -> dict:
    found = jax.devices()[0]
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        clocks = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        clocks = f"no nvidia-smi: {error}"
    return {"device": found.device_kind, "platform": found.platform, "jax": jax.__version__, query: clocks}


def ceilings(plan: Plan) -> dict:
    """Bytes read and written by a pass over a large array, and a large bfloat16 product of random numbers."""
    size, side = plan.copy, plan.product
    array = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
    left, right = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in (1, 2))
    negate, product = jax.jit(lambda array: -array), jax.jit(jnp.matmul)
    timed = plan.interleave({"copy": lambda: negate(array), "product": lambda: product(left, right)})
    return {
        "GB/s": figures.three(8 * size / timed["copy"].median / 1e9),
        "TFLOP/s": figures.three(2 * side**3 / timed["product"].median / 1e12),
    }


def ceiling(lines: dict) -> Cost:
    """The measured FLOP and bytes a second; NaN where the measurement is missing."""
    found = lines.get("ceilings", {})
    return Cost(1e12 * found.get("TFLOP/s", np.nan), 1e9 * found.get("GB/s", np.nan))


# Errors


def check_backends(family: str, operation: str, sizes: Sizes) -> dict:
    """Errors of every backend in float32 and bfloat16, compiled side by side; a refusal is not wrong."""
    make = {"ssd": cases.ssd_case, "attention": cases.attention_case}[family]
    truth_of = figures.truth_of(make(operation, sizes))
    truths = {dtype: truth_of(dtype) for dtype in ("float32", "bfloat16")}
    asked = [(backend, dtype) for backend in backends(family) for dtype in truths]

    def check(pair: tuple[str, str]) -> dict:
        backend, dtype = pair
        try:
            errors = figures.errors_of(truths[dtype], backend)
        except UnsupportedKernel as error:
            return {"refused": figures.reason(error)}
        except Exception as error:
            return {"failed": figures.reason(error)}
        over = figures.over_bars(errors, dtype)
        errors = {name: float(f"{error:.1e}") for name, error in errors.items()}
        return {"errors": errors} | ({"over the bars": over} if over else {})

    with cases.interpreted_unless_native(KERNELS["cuda"]), ThreadPoolExecutor() as pool:
        checked = dict(zip(asked, pool.map(check, asked), strict=True))
    ok = all("failed" not in result and "over the bars" not in result for result in checked.values())
    return {"ok": ok, "sizes": str(sizes)} | {f"{backend} {dtype}": line for (backend, dtype), line in checked.items()}


def passed(lines: dict, checked: str, backend: str) -> bool:
    """Whether this backend's bfloat16 errors were within their bars, or --only left the check out."""
    name = f"errors, {checked}"
    result = lines.get(name, {}).get(f"{backend} bfloat16", {})
    return name not in lines or ("errors" in result and "over the bars" not in result)


# Times


def time_ssd(plan: Plan, operation: str, sizes: Sizes, torch_python: str, lines: dict) -> dict:
    """Every backend by chunks, forward and with all gradients; the scan beside PyTorch's of the same inputs."""
    case = cases.peer_case(sizes)[0] if operation == "scan" else cases.ssd_case(operation, sizes, many=False)
    tokens = sizes.L if operation == "scan" else 2 * sizes.L - sizes.G
    variants, costs, notes = {}, {}, {}
    for backend in backends("ssd"):
        if not passed(lines, "ssd frontiers", backend):  # frontiers come with the scan they start from
            notes[backend] = "not timed: it has not passed its check"
            continue
        for chunk in CHUNKS[operation]:
            variants[f"{backend}, chunk {chunk}"] = case.function(backend, chunk), cases.cast(case, jnp.bfloat16)
    for chunk in CHUNKS[operation]:
        for direction in DIRECTIONS:
            cost = figures.ssd_cost(sizes, tokens, chunk, 2, direction)
            for name in (*backends("ssd"), "PyTorch"):
                costs[f"{name}, chunk {chunk}, {direction}"] = cost
    thunks = compile_variants(variants, notes)
    with Peer("torch", torch_python) as torch:
        if operation == "scan":
            notes["PyTorch"] = torch.about
        for chunk in CHUNKS[operation] if operation == "scan" and torch.ready else ():
            for direction in DIRECTIONS:
                request = sizes._asdict() | {"dtype": "bfloat16", "chunk": chunk}
                request["backward"] = direction == "with gradients"
                try:
                    torch.seconds(request)
                except RuntimeError as error:
                    notes[f"PyTorch, chunk {chunk}, {direction}"] = str(error)
                    continue
                name = f"PyTorch, chunk {chunk}, {direction}"
                thunks[name] = lambda request=request: torch.seconds(request, calls=10)
        timed = plan.interleave(thunks)
    return {"sizes": str(sizes)} | rates(timed, costs, ceiling(lines)) | {"notes": notes}


def time_attention(plan: Plan, operation: str, sizes: Sizes, lines: dict) -> dict:
    """Beside cuDNN's causal attention of as many tokens, and where rows are short beside our mask as a dense one."""
    case = cases.attention_case(operation, sizes, many=False)
    variants, costs, notes = {}, {}, {}
    for backend in backends("attention"):
        if passed(lines, f"attention {operation}", backend):
            variants[backend] = case.function(backend), cases.cast(case, jnp.bfloat16)
        else:
            notes[backend] = "not timed: it has not passed its check"
    variants |= cudnn_variants(operation, sizes)
    of_as_many = sizes._replace(L=sizes.L + sizes.G)  # "causal" stands for the L - G tokens of a clean stream
    for direction in DIRECTIONS:
        for name in (*backends("attention"), "cuDNN dense mask"):
            costs[f"{name}, {direction}"] = figures.attention_cost(operation, sizes, 2, direction)
        costs[f"cuDNN causal, {direction}"] = figures.attention_cost("causal", of_as_many, 2, direction)
    result = rates(plan.interleave(compile_variants(variants, notes)), costs, ceiling(lines))
    for direction in DIRECTIONS:
        peer = result.get(f"cuDNN causal, {direction}")
        for name in [name for name in result if peer and name.endswith(direction)]:
            result[name]["rate_of_cudnn_causal"] = figures.three(result[name]["TFLOP/s"] / peer["TFLOP/s"])
    return {"sizes": str(sizes)} | result | {"notes": notes}


def cudnn_variants(operation: str, sizes: Sizes) -> dict:
    """jax.nn.dot_product_attention by cuDNN: causal over L tokens, and the mask of `operation` as a dense one."""
    B, L, G, H, P, _ = sizes
    q, k, v = (jax.random.normal(jax.random.key(i), (B, L, H, P), jnp.bfloat16) for i in range(3))
    attention = partial(jax.nn.dot_product_attention, implementation="cudnn")
    variants = {"cuDNN causal": (lambda q, k, v: (attention(q, k, v, is_causal=True),), [q, k, v])}
    if L <= 1024:
        block = np.arange(L) // G
        mask = block[:, None] >= block
        if operation == "frontiers":  # keys: the clean tokens, then the frontiers' own
            mask = np.concatenate([block[:, None] > block, block[:, None] == block], axis=1)
            k, v = (jnp.concatenate([array, array], axis=1) for array in (k, v))
        dense = lambda q, k, v: (attention(q, k, v, mask=jnp.asarray(mask)[None, None]),)
        variants["cuDNN dense mask"] = dense, [q, k, v]
    return variants


def compile_variants(variants: dict, notes: dict) -> dict[str, figures.Program]:
    """Programs to time by "variant, direction" of {variant: (function, inputs)}, compiled side by side and run once by
    themselves; what fails is in the notes, with the temporaries of what does not."""

    def compiled(name: str) -> dict[str, figures.Program] | Exception:
        try:
            return figures.programs(*variants[name])
        except Exception as error:
            return error

    with cases.interpreted_unless_native(KERNELS["cuda"]), ThreadPoolExecutor() as pool:
        results = dict(zip(variants, pool.map(compiled, variants), strict=True))
    thunks = {}
    for name, programs in results.items():
        try:
            if isinstance(programs, Exception):
                raise programs
            jax.block_until_ready([program() for program in programs.values()])
        except Exception as error:
            notes[name] = figures.reason(error)
            continue
        notes[name] = {"temporaries_MiB": [figures.three(p.temporaries / 2**20) for p in programs.values()]}
        thunks |= {f"{name}, {direction}": program for direction, program in programs.items()}
    return thunks


def rates(timed: dict[str, figures.Timed], costs: dict[str, Cost], ceiling: Cost) -> dict[str, dict]:
    """Times with their FLOP and bytes a second, and the shares of the ceilings."""
    three, result = figures.three, {}
    for name, time in timed.items():
        flop, size = costs[name].flop / time.median, costs[name].bytes / time.median
        result[name] = {
            "ms": three(1e3 * time.median), "range_ms": [three(1e3 * time.low), three(1e3 * time.high)],
            "TFLOP/s": three(flop / 1e12), "GB/s": three(size / 1e9),
            "of_flop_ceiling": three(flop / ceiling.flop), "of_byte_ceiling": three(size / ceiling.bytes),
        }  # fmt: skip
    return result


# Large offsets


def large(plan: Plan, backend: str) -> dict:
    """x has more than 2^31 elements: a scan's last tokens must equal a scan that starts at the edge before them, and
    one that starts from zero so much earlier that it has forgotten; or the backend refuses."""
    (T, H), tail = plan.large, plan.tail
    P, N, G = 32, 64, 32
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    x, Bm, Cm = normal(keys[0], 1, T, H, P), normal(keys[1], 1, T, 1, N), normal(keys[2], 1, T, 1, N)
    dt = jax.random.uniform(keys[3], (1, T, H), minval=1e-3, maxval=0.1)
    A = -jax.random.uniform(keys[4], (H,), minval=1.0, maxval=4.0)
    edge = jnp.full((1, 1), (T - tail) // G, jnp.int32)
    scan = partial(ssd_scan, block_size=G, backend=backend)

    @jax.jit
    def whole(x, dt, Bm, Cm):
        y, boundary = scan(x, dt, A, Bm, Cm)
        return y[:, -tail:], states_at(boundary, edge)[:, 0]

    last = jax.jit(lambda x, dt, Bm, Cm, state: scan(x, dt, A, Bm, Cm, initial_state=state)[0])
    ending = lambda tokens: [array[:, -tokens:] for array in (x, dt, Bm, Cm)]
    with cases.interpreted_unless_native(backend):
        try:
            y, state = whole(x, dt, Bm, Cm)
        except UnsupportedKernel as error:
            return {"ok": True, "elements": x.size, "refused": figures.reason(error)}
        from_edge = last(*ending(tail), state)
        from_zero = last(*ending(2 * tail), jnp.zeros_like(state))[:, -tail:]
    errors = [figures.relative_error(y, other) for other in (from_edge, from_zero)]
    return {"ok": max(errors) < 1e-2, "elements": x.size, "errors": [figures.three(error) for error in errors]}


if __name__ == "__main__":
    main()
