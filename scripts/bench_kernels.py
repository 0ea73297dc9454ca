"""The kernels measured and checked on this machine, everything in one run and in turns.

    python scripts/bench_kernels.py [--torch-python PATH] [--former PATH]   # time
    python scripts/bench_kernels.py --parity                                # errors of every backend
    python scripts/bench_kernels.py --memory                                # memory of training at 2k, 8k, 32k tokens

On a CPU the time table holds the XLA form at the chunk it chooses and at each fixed one, a token loop (`lax.scan`), an
associative scan over tokens, the minimal chunked form in PyTorch (by --torch-python, where this Python has no torch),
and with --former the XLA form of an older checkout of this project; in float32, forward and with all gradients, after
all of them gave the same results. All run with huge pages, as training does. On a GPU or TPU the table holds every
operation by every backend of that platform, in bfloat16; frontiers come with the scan they start from. Figures are
medians over turns. Other programs on the machine disturb them, so its load is printed; on a busy one
OMP_WAIT_POLICY=PASSIVE keeps PyTorch's threads from burning the cores while they wait for each other.

--parity gives, for each operation, dtype and backend, the largest error of values and of every gradient, relative to
the truth's largest entry; it exits 1 if one is larger than kernel_figures.BARS. Truth is the token loop (of attention:
one dense product) in float64; for bfloat16 it reads the rounded inputs. Pallas kernels run in their interpreters where
their platform is not here: that checks their mathematics, not the precision of products on a chip.

--memory compiles and does not run; it exits 1 if four times the tokens take more than 4.4 times the temporaries.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_figures as figures
from kernel_cases import Sizes
from kernel_figures import BARS, DIRECTIONS
from kernel_peers import Peer

from diffjax.errors import UnsupportedKernel
from diffjax.huge_pages import restart_with_huge_pages
from diffjax.kernels import ssd_scan
from diffjax.kernels.dispatch import local_platform
from diffjax.kernels.precision import einsum

SHAPES = {
    "P 64 N 64": Sizes(B=2, L=2048, G=32, H=8, P=64, N=64),
    "seed heads": Sizes(B=1, L=512, G=32, H=80, P=32, N=64),
}
ACCELERATOR_SSD = Sizes(B=16, L=1024, G=32, H=80, P=32, N=64), Sizes(B=8, L=2048, G=32, H=24, P=64, N=128)
ACCELERATOR_ATTENTION = Sizes(B=8, L=2048, G=32, H=16, P=128, N=16)
FIXED_CHUNKS, TORCH_CHUNKS = (32, 64, 128, 256), (32, 64, 128)
SAME = 1e-4  # largest relative difference of two float32 programs that compute the same
PARITY_SSD, PARITY_ATTENTION = Sizes(B=2, L=320, G=32, H=8, P=16, N=16), Sizes(B=2, L=160, G=32, H=4, P=64, N=2)
MEMORY_LENGTHS = (2048, 8192, 32768)
MEMORY_SSD, MEMORY_ATTENTION = Sizes(B=1, L=0, G=32, H=8, P=64, N=64), Sizes(B=1, L=0, G=32, H=4, P=64, N=4)
LINEAR = 1.1  # most growth of memory over growth of tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH", help="a Python with torch")
    parser.add_argument("--former", metavar="PATH", help="an older checkout")
    options = parser.parse_args()
    if options.former and not (Path(options.former) / "diffjax" / "kernels" / "ssd.py").is_file():
        parser.error(f"--former: no checkout of this project with an ssd_scan in {options.former}")
    timing, on_cpu = not options.parity and not options.memory, local_platform() == "cpu"
    if timing and on_cpu:
        restart_with_huge_pages()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {os.cpu_count()} cores, {load()}, ", end="")
    print(f"GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}")
    failures = parity() if options.parity else []
    if options.memory:
        failures += memory(MEMORY_LENGTHS)
    if timing and on_cpu:
        for name, sizes in SHAPES.items():
            beside_peers(name, sizes, options.turns, options.torch_python, options.former)
    elif timing:
        every_backend(options.turns)
    print(load())
    if failures:
        sys.exit("bench_kernels: more than allowed:\n" + "\n".join(failures))


def load() -> str:
    return "load averages " + " ".join(f"{value:.1f}" for value in os.getloadavg())


# Time beside other programs, on a CPU


def token_loop(x, dt, A, Bm, Cm):
    """The recurrence by `lax.scan`, one step a token."""

    def step(state, token):
        x, dt, Bm, Cm = token
        state = jnp.exp(dt * A)[..., None, None] * state + (dt[..., None] * x)[..., None] * Bm[:, None, None]
        return state, jnp.sum(state * Cm[:, None, None], axis=-1)

    tokens = tuple(jnp.moveaxis(array, 1, 0) for array in (x, dt, Bm, Cm))
    state = jnp.zeros((*x[:, 0].shape, Bm.shape[-1]), dt.dtype)
    return jnp.moveaxis(jax.lax.scan(step, state, tokens)[1], 0, 1)


def associative(x, dt, A, Bm, Cm):
    """All states of all tokens, by `lax.associative_scan` over pairs (decay, state)."""

    def combine(left, right):
        return left[0] * right[0], right[0][..., None, None] * left[1] + right[1]

    states = (dt[..., None] * x)[..., None] * Bm[:, :, None, None]
    states = jax.lax.associative_scan(combine, (jnp.exp(dt * A), states), axis=1)[1]
    return einsum("bthpn,btn->bthp", states, Cm)


def beside_peers(name: str, sizes: Sizes, turns: int, torch_python: str, former: str | None) -> None:
    case, cotangent = cases.peer_case(sizes)
    inputs, given = cases.cast(case, jnp.float32), (jnp.asarray(cotangent),)
    scan = lambda x, dt, A, Bm, Cm: ssd_scan(
        x, dt, A, Bm[:, :, None], Cm[:, :, None], block_size=sizes.G, backend="xla"
    )[1]
    automatic = jax.eval_shape(scan, *inputs).chunk
    functions = {
        f"ours, automatic chunk {automatic}": case.function("xla"),
        **{f"ours, fixed chunk {chunk}": case.function("xla", chunk) for chunk in FIXED_CHUNKS},
        "lax.scan over tokens": lambda *inputs: (token_loop(*inputs),),
        "associative scan over tokens": lambda *inputs: (associative(*inputs),),
    }
    thunks, results = {}, {}
    for label, function in functions.items():
        programs = figures.programs(function, inputs, given)
        thunks |= {(label, direction): program for direction, program in programs.items()}
        results[label] = jax.tree.leaves(programs["with gradients"]())
    with contextlib.ExitStack() as stack:
        torch = stack.enter_context(Peer("torch", torch_python))
        print(f"\nPyTorch by {torch_python}: {torch.about}")
        asked = [(f"PyTorch, chunk {chunk}", torch, {"chunk": chunk}) for chunk in TORCH_CHUNKS if torch.ready]
        if former:
            peer = stack.enter_context(Peer("former", sys.executable, former))
            print(f"former: {peer.about}")
            asked.append(("former XLA form", peer, {}))
        for label, peer, more in asked:
            request = sizes._asdict() | {"dtype": "float32"} | more
            results[label] = peer.results(request | {"backward": True})
            for direction in DIRECTIONS:
                told = request | {"backward": direction == "with gradients"}
                thunks[label, direction] = lambda peer=peer, told=told: peer.seconds(told)
        must_agree(results, truth=results["lax.scan over tokens"])
        timed = figures.interleave(thunks, turns, at_least=0.05)
    print_peers(f"{name}: {sizes}, float32, {turns} turns, {load()}", timed)


def must_agree(results: dict, truth) -> None:
    for label, arrays in results.items():
        for what, array, true in zip(("y", "dx", "ddt", "dA", "dB", "dC"), arrays, truth, strict=True):
            if not (error := figures.relative_error(array, true)) < SAME:
                sys.exit(f"bench_kernels: {what} of '{label}' differs from the token loop by {error:.1e}: no times")


def print_peers(title: str, timed: dict) -> None:
    """Every row's time over ours, then ours over the best of each family."""
    print(f"{title}\n{'median (range), and times ours':34}" + "".join(f"{name:>34}      " for name in DIRECTIONS))
    labels = list(dict.fromkeys(label for label, _ in timed))
    for label in labels:
        cells = ""
        for direction in DIRECTIONS:
            ratio = timed[label, direction].median / timed[labels[0], direction].median
            cells += f"{timed[label, direction]!s:>34} {ratio:5.2f}"
        print(f"{label:34}{cells}")
    for family in ("ours, fixed", "PyTorch", "former"):
        members = [label for label in labels if label.startswith(family)]
        for direction in DIRECTIONS if members else ():
            best = min(members, key=lambda label: timed[label, direction].median)
            ratio = timed[labels[0], direction].median / timed[best, direction].median
            print(f"{direction}: ours takes {ratio:.2f} of the time of the best '{family}', which is '{best}'")


# Time of every backend, on an accelerator


def every_backend(turns: int) -> None:
    print(f"{'operation':24} {'sizes':36} {'backend':14} {'forward':>34} {'with gradients':>34}")
    for sizes in ACCELERATOR_SSD:
        for operation in cases.SSD_OPERATIONS:
            time_backends("ssd", cases.ssd_case(operation, sizes, many=False), sizes, turns)
    for operation in cases.ATTENTION_OPERATIONS:
        case = cases.attention_case(operation, ACCELERATOR_ATTENTION, many=False)
        time_backends("attention", case, ACCELERATOR_ATTENTION, turns)


def time_backends(family: str, case: cases.Case, sizes: Sizes, turns: int) -> None:
    """Rows of one case; what is refused or fails is said and not timed."""
    inputs, thunks, failed = cases.cast(case, jnp.bfloat16), {}, {}
    backends = [backend for backend in cases.backends(family) if cases.native(backend)]
    for backend in backends:
        try:
            programs = figures.programs(case.function(backend), inputs)
            jax.block_until_ready([program() for program in programs.values()])
        except Exception as error:
            failed[backend] = figures.reason(error)
            continue
        thunks |= {(backend, direction): program for direction, program in programs.items()}
    timed = figures.interleave(thunks, turns, at_least=0.05)
    for backend in backends:
        cells = failed.get(backend) or " ".join(f"{timed[backend, direction]!s:>34}" for direction in DIRECTIONS)
        print(f"{case.name:24} {sizes!s:36} {backend:14} {cells}", flush=True)


# Parity and memory


def parity() -> list[str]:
    """Rows whose errors are over the bars, or that failed; a refusal is no failure."""
    over = []
    for family, operations, make, sizes in (
        ("ssd", cases.SSD_OPERATIONS, cases.ssd_case, PARITY_SSD),
        ("attention", cases.ATTENTION_OPERATIONS, cases.attention_case, PARITY_ATTENTION),
    ):
        print(f"{f'{family}: {sizes}':40}{'dtype':9}  {'values':>8}  gradients: largest relative errors")
        for operation in operations:
            truth_of = figures.truth_of(make(operation, sizes))
            for dtype in BARS:
                if dtype == "float64" and local_platform() == "tpu":
                    continue  # which has none
                truth = truth_of(dtype)
                for backend in cases.backends(family):
                    if (backend, dtype) != ("reference", "float64"):  # which is the truth
                        over += print_errors(truth, backend)
    return over


def print_errors(truth: figures.Truth, backend: str) -> list[str]:
    head = f"{truth.case.name:24} {backend:14} {truth.dtype:9}"
    try:
        errors = figures.errors_of(truth, backend)
    except UnsupportedKernel as error:
        print(f"{head}  {figures.reason(error)}", flush=True)
        return []
    except Exception as error:  # the other rows are still wanted
        print(f"{head}  FAILED {figures.reason(error)}", flush=True)
        return [f"{head} failed"]
    over = figures.over_bars(errors, truth.dtype)
    values = errors.pop("values")
    gradients = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
    where = "" if cases.native(backend) else ", interpreted"
    print(f"{head}  {values:8.1e}  {gradients}{where}" + (f"  OVER: {' '.join(over)}" if over else ""), flush=True)
    return [f"{head} {' '.join(over)}"] if over else []


def memory(lengths: tuple[int, ...]) -> list[str]:
    """Temporaries of the XLA form in training's two streams, all frontiers of a row at once; returns the rows that grow
    faster than their tokens."""
    print(f"{'temporaries, MiB':44}" + "".join(f"{f'L {length}':>12}" for length in lengths) + "  growth, last step")
    faster = []
    for operations, make, sizes in (
        (("scan", "reverse blocks", "frontiers"), cases.ssd_case, MEMORY_SSD),
        (("blocks", "frontiers"), cases.attention_case, MEMORY_ATTENTION),
    ):
        for operation in operations:
            by_length = []
            for length in lengths:
                case = make(operation, sizes._replace(L=length), many=False)
                by_length.append(figures.programs(case.function("xla"), cases.cast(case, jnp.float32)))
            for direction in DIRECTIONS:
                row = [programs[direction].temporaries / 2**20 for programs in by_length]
                growth = row[-1] / row[-2]
                line = f"{f'{case.name}, {direction}':44}" + "".join(f"{size:12.1f}" for size in row)
                print(f"{line}  {growth:.2f}", flush=True)
                if growth > LINEAR * lengths[-1] / lengths[-2]:
                    faster.append(line)
    L = lengths[-1]
    print(f"for comparison, one head's scores of all frontiers at L {L}, [L, 2 L] float32: {8 * L * L / 2**20:.0f} MiB")
    return faster


if __name__ == "__main__":
    main()
