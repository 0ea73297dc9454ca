"""Compile the Pallas TPU kernels for chips that are not here, and compare their schedules with the record.

    pip install -e '.[tpu-check]'
    python scripts/check_kernels.py                       # v5e, v5p, v6e; every shape of configs/*.yaml, and one more
    python scripts/check_kernels.py --target tpu:v5e --only "quickstart.yaml mamba"
    python scripts/check_kernels.py --record              # write tests/golden/kernel_schedules.json anew: say why

One table row for each kernel of each compiled program (an operation with its gradient): bundles of its schedule, which
are about the cycles of one pass over its code; loads and stores of spilled registers; VMEM used and asked for; seconds
to compile the program. Loop bodies and both sides of a branch count once: bundles compare versions of a kernel on a
target, they are no time.

Exits 1 if a program does not compile, or a kernel has more than 1.05 times the recorded bundles, fills or spills; 2 if
the check cannot be made: no libtpu, or other versions of jax and libtpu than those of the record.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "golden" / "kernel_schedules.json"
TOLERANCE = 1.05
TOPOLOGIES = {"tpu:v5e": "v5e:2x2", "tpu:v5p": "v5p:2x2x1", "tpu:v6e": "v6e:2x2"}
MOST_ROWS = 16  # a grid step takes one row: schedules do not depend on how many there are
OPERATIONS = {"mamba": ("scan", "reverse blocks", "frontiers"), "attention": ("clean", "frontiers")}
CHILD = "--one-shape"  # how the script calls itself: one process for each target and shape


class Shape(NamedTuple):
    """What a mixer of a config asks of the kernels on one chip. `state` is 0 for attention, whose heads are queries."""

    name: str
    mixer: str
    rows: int
    length: int
    block_size: int
    heads: int
    head_dim: int
    state: int
    key_heads: int
    causal: bool
    dtype: str

    def __str__(self) -> str:
        inner = f"N {self.state}" if self.mixer == "mamba" else f"key heads {self.key_heads}"
        sizes = f"B {self.rows} L {self.length} G {self.block_size} H {self.heads} P {self.head_dim} {inner}"
        return f"{self.name} {self.mixer}: {sizes} {self.dtype}"


class Kernel(NamedTuple):
    """The schedule of a compiled kernel: bundles, vector loads of spilled registers, stores of them, bytes of VMEM."""

    bundles: int
    fills: int
    spills: int
    vmem_used: int
    vmem_asked: int


def shapes(folder: Path) -> list[Shape]:
    """Of every config in `folder` and of the Mamba-2 heads that published models have. A schedule is that of one step
    of the grid: shapes that differ in rows and length alone, and so in the number of steps, count as one."""
    from diffjax import load_config

    found = {}
    for path in sorted(folder.glob("*.yaml")):
        config = load_config(path)
        for shape in _shapes_of(path.name, config):
            found.setdefault(shape._replace(name="", rows=0, length=0), shape)
    wide = Shape("wide heads", "mamba", 8, 2048, 32, 24, 64, 128, 0, False, "bfloat16")
    return [*found.values(), wide]


def _shapes_of(name: str, config) -> Iterator[Shape]:
    model, mamba = config.model, config.model.mamba
    chips = 1
    for size in re.findall(r"\d+", (config.mesh.topology or "").partition(":")[2]):
        chips *= int(size)
    rows = min(MOST_ROWS, max(1, config.training.batch_size // config.training.microbatches // chips))
    common = (rows, config.data.sequence_length, model.block_size)
    causal = model.prefix == "causal"
    if "M" in model.pattern:
        yield Shape(name, "mamba", *common, mamba.heads, mamba.head_dim, mamba.state, 0, causal, model.dtype)
    if "A" in model.pattern:
        yield Shape(name, "attention", *common, model.heads, model.head_dim, 0, model.kv_heads, causal, model.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TOPOLOGIES, help="repeatable; all of them if not given")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose line in the table contains TEXT")
    parser.add_argument("--record", action="store_true", help="write the record instead of comparing with it")
    parser.add_argument(CHILD, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_shape:
        target, shape, dump = options.one_shape
        return compile_shape(target, Shape(*json.loads(shape)), Path(dump))
    if importlib.util.find_spec("libtpu") is None:
        stop("the compiler for TPUs is missing: install the extra with `pip install -e '.[tpu-check]'`")
    versions = {"jax": version("jax"), "libtpu": version("libtpu")}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    targets = options.target or list(TOPOLOGIES)
    every = shapes(ROOT / "configs")
    wanted = [shape for shape in every if options.only in str(shape)]
    if not wanted:
        stop(f"no shape contains '{options.only}'")
    compiled = compile_all(targets, wanted)
    failures = [f"{name}: {result['error']}" for name, result in compiled.items() if "error" in result]
    if options.record:
        if failures:
            stop("nothing is recorded while programs fail:\n" + "\n".join(failures), code=1)
        programs = {name: kept(result) for name, result in compiled.items()}
        if {name: record.get(name) for name in versions} == versions:  # what was not compiled now stays as it was
            others = set(program_names(TOPOLOGIES, every)) - set(programs)
            programs |= {name: kernels for name, kernels in record["programs"].items() if name in others}
        write_record(versions, programs)
        return
    if not record:
        failures.append("there is no record of schedules: write one with --record")
    different = [
        f"{name} {record[name]}, here {versions[name]}"
        for name in versions
        if record and record[name] != versions[name]
    ]
    if record and not different:
        failures += compare(record["programs"], {name: kept(result) for name, result in compiled.items()})
    for failure in failures:
        print(f"FAILED {failure}")
    if failures:
        sys.exit(1)
    if different:
        stop("everything compiles, but schedules were not compared: the record has " + "; ".join(different))
    print(f"{len(compiled)} programs compile; bundles, fills and spills are within {TOLERANCE} of the record")


def program_names(targets: Iterable[str], wanted: list[Shape]) -> list[str]:
    """The record's keys."""
    return [
        program_name(target, shape, operation)
        for target in targets
        for shape in wanted
        for operation in OPERATIONS[shape.mixer]
    ]


def program_name(target: str, shape: Shape, operation: str) -> str:
    return f"{target} {shape}, {operation}"


def stop(message: str, code: int = 2) -> None:
    print(f"check_kernels: {message}", file=sys.stderr)
    sys.exit(code)


def compile_all(targets: list[str], wanted: list[Shape]) -> dict[str, dict]:
    """Program -> {"kernels": {name: Kernel}, "seconds"}, {"refused": why} or {"error": what}; printed as it comes."""
    print("target   bundles  fills spills VMEM MiB used asked compile s  kernel")
    results = {}
    for target in targets:
        for shape in wanted:
            print(f"{target:8} {shape}")
            lines = run_child(target, shape)
            for operation in OPERATIONS[shape.mixer]:
                result = next(lines, {"error": "the process died before it"})
                results[program_name(target, shape, operation)] = result
                print_result(target, operation, result)
    return results


def print_result(target: str, operation: str, result: dict) -> None:
    if "kernels" not in result:
        print(
            f"{target:8} {operation}: " + ("refused, " + result["refused"] if "refused" in result else result["error"])
        )
        return
    seconds = f"{result['seconds']:.1f}"
    for name, kernel in result["kernels"].items():
        k = Kernel(**kernel)
        used, asked = (f"{size / 2**20:.1f}" if size else "-" for size in (k.vmem_used, k.vmem_asked))
        schedule = f"{k.bundles:7} {k.fills:6} {k.spills:6} {used:>13} {asked:>5} {seconds:>9}"
        print(f"{target:8} {schedule}  {operation}: {name}", flush=True)
        seconds = ""


def run_child(target: str, shape: Shape) -> Iterator[dict]:
    """The results of one target and shape, in the order of OPERATIONS. The flags that make the compiler write its
    schedules are read once, when it is loaded; without its noise on standard error unless it dies."""
    with tempfile.TemporaryDirectory(prefix="kernel-schedules-") as folder:
        flags = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*bundle-utilization.*"
        )
        quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
        environment = os.environ | quiet | {
            "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "LIBTPU_INIT_ARGS": flags,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        environment.pop("XLA_FLAGS", None)  # of a test run, say: they may change what the compiler does
        command = [sys.executable, __file__, CHILD, target, json.dumps(shape), folder]
        process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        noise = process.stderr.read()
        if process.wait():
            yield {"error": f"the compiler's process ended with {process.returncode}: {noise.strip()[-600:]}"}


def compile_shape(target: str, shape: Shape, dump: Path) -> None:
    """In the child: print a JSON line for each operation."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(TOPOLOGIES[target], "tpu")
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    on_chip = jax.NamedSharding(mesh, jax.P())
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_chip)
    with jax.set_mesh(mesh):
        for operation in OPERATIONS[shape.mixer]:
            for path in dump.iterdir():
                path.unlink()
            try:
                function, arguments = program(shape, operation)
                lowered = jax.jit(with_gradient(function)).lower(jax.tree.map(place, arguments))
                began = time.perf_counter()
                text = lowered.compile().as_text()
                seconds = time.perf_counter() - began
                kernels = {name: kernel._asdict() for name, kernel in read_schedules(dump, text).items()}
                result = {"kernels": kernels, "seconds": seconds} if kernels else {"error": "no kernel in the program"}
            except ValueError as error:
                refusal = re.match(r"kernels: pallas_tpu cannot run .*?: (takes|needs|may|computes)(.*)", str(error))
                result = {"refused": "".join(refusal.groups())} if refusal else {"error": str(error)[:600]}
            except Exception as error:  # whatever the compiler raises is a result
                result = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
            print(json.dumps(result), flush=True)


def program(shape: Shape, operation: str) -> tuple[Callable, tuple]:
    """The function of one operation and its arguments as shapes, as training calls it: all frontiers of a row, and a
    clean stream without the row's last block."""
    import jax
    import jax.numpy as jnp

    from diffjax.kernels import block_attention, ssd_block, ssd_frontier, ssd_scan
    from diffjax.kernels.attention import OwnBlock

    B, G, H, P, N, backend = shape.rows, shape.block_size, shape.heads, shape.head_dim, shape.state, "pallas_tpu"
    K, T = shape.length // G, shape.length - G
    array = lambda *sizes, dtype=shape.dtype: jax.ShapeDtypeStruct(sizes, dtype)
    if shape.mixer == "mamba":
        heads = lambda *lead: (array(*lead, H, P), array(*lead, H, dtype="float32"), array(H, dtype="float32"))
        tokens = lambda *lead: (*heads(*lead), array(*lead, 1, N), array(*lead, 1, N))
        state, reset = array(B, H, P, N, dtype="float32"), array(B, T // G + 1, dtype="bool")
        scan = lambda *stream, initial_state, reset: ssd_scan(
            *stream, block_size=G, initial_state=initial_state, reset=reset, backend=backend
        )
        if operation == "scan":
            return lambda stream, state, reset: scan(*stream, initial_state=state, reset=reset), (
                tokens(B, T), state, reset
            )  # fmt: skip
        if operation == "reverse blocks":
            return lambda *stream: ssd_block(*stream, reverse=True, backend=backend), tokens(B, K, G)
        boundary = jax.eval_shape(scan, *tokens(B, T), initial_state=state, reset=reset)[1]
        return lambda stream, boundary: ssd_frontier(*stream, boundary=boundary, backend=backend), (
            tokens(B, K, G), boundary
        )  # fmt: skip
    frontiers = operation == "frontiers"
    S = shape.length if frontiers else T
    structure = "frontiers" if frontiers else "causal" if shape.causal else "blocks"
    keys = array(B, T, shape.key_heads, P)
    interval = array(B, S, dtype=jnp.int32)
    own_keys = array(B, K, G, shape.key_heads, P)
    own = OwnBlock(own_keys, own_keys, array(B, K, G, dtype="bool")) if frontiers else None
    attend = lambda q, k, v, lo, hi, own: block_attention(
        q, k, v, lo, hi, own=own, structure=structure, block_size=G, backend=backend
    )
    return attend, (array(B, S, H, P), keys, keys, interval, interval, own)


def with_gradient(function: Callable) -> Callable:
    """All results of `function` and the gradients of all its float arguments, under cotangents of one."""
    import jax
    import jax.numpy as jnp

    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)

    def run(arguments):
        leaves, tree = jax.tree.flatten(arguments)

        def of_floats(floats):
            rest = iter(floats)
            out = function(*tree.unflatten([next(rest) if is_float(leaf) else leaf for leaf in leaves]))
            return [leaf for leaf in jax.tree.leaves(out) if is_float(leaf)]

        out, pull = jax.vjp(of_floats, [leaf for leaf in leaves if is_float(leaf)])
        return out, pull([jnp.ones_like(leaf) for leaf in out])

    return run


def read_schedules(dump: Path, compiled: str) -> dict[str, Kernel]:
    """The kernels of the program last compiled, from the compiler's dump and the program's text."""
    vmem, kernels = vmem_of_calls(compiled), {}
    for path in sorted(dump.glob("*final_hlo-static-per-bundle-utilization.txt")):
        call = re.sub(r"^\d+-(.*)-\d+-final_hlo.*", r"\1", path.name)
        if call in vmem:
            name = kernel_name(call)
            if name in kernels:
                raise ValueError(f"two kernels of one program are called {name}")
            kernels[name] = Kernel(*parse_utilization(path.read_text()), *vmem[call])
    return kernels


def vmem_of_calls(compiled: str) -> dict[str, tuple[int, int]]:
    """Of every Pallas call in a compiled program's text: bytes of VMEM used, and the limit asked for, 0 if none. The
    compiler counts use from VMEM's first byte, and may keep other arrays of the program below the kernel's part."""
    before, *calls = compiled.split('custom_call_target="tpu_custom_call"')
    found = {}
    for call in calls:
        name = re.findall(r"%([\w.-]+) = ", before)[-1]
        (_, end), (offset, asked) = _vmem("used_scoped_memory_configs", call), _vmem("scoped_memory_configs", call)
        found[name] = (end - offset, asked)
        before = call
    return found


def _vmem(key: str, call: str) -> tuple[int, int]:
    """Offset and size in bytes."""
    found = re.search(rf'"{key}":\[\{{"memory_space":"1","offset":"(\d+)","size":"(\d+)"\}}', call)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def kernel_name(call: str) -> str:
    """`transpose_jvp_ssd_scan_backward__.1` -> `ssd_scan_backward`: without what autodiff and the compiler add."""
    name = re.sub(r"\.\d+$", "", call)
    while (inner := re.sub(r"^(?:transpose|jvp|vmap|remat|checkpoint|shard_map|jit)_(.*?)_?$", r"\1", name)) != name:
        name = inner
    return name


def parse_utilization(text: str) -> tuple[int, int, int]:
    """Bundles, fills and spills of a `static-per-bundle-utilization` file: a header with the units' names, their slots
    in a bundle, then one row for each bundle with the slots in use."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    units = [unit.strip() for unit in lines[1].split(",")]
    first = next((i for i, line in enumerate(lines) if line.startswith("== UTILIZATION")), None)
    if first is None or "VSTORE:SPILL" not in units:
        raise ValueError("the compiler's utilization file has another form than the pinned libtpu writes")
    rows = [[int(word) for word in line.split()] for line in lines[first + 1 :]]
    used = lambda unit: sum(row[units.index(unit)] for row in rows)
    return len(rows), used("VLOAD:FILL"), used("VSTORE:SPILL")


def kept(result: dict) -> dict | str:
    """What the record holds of a program: the kernels' schedules, or why there are none."""
    if "kernels" not in result:
        return "refused: " + result["refused"] if "refused" in result else "error"
    fields = ("bundles", "fills", "spills", "vmem_used")
    return {name: {field: kernel[field] for field in fields} for name, kernel in result["kernels"].items()}


def compare(recorded: dict, here: dict) -> list[str]:
    """What got worse than the record allows, a line each; programs that failed here are reported elsewhere."""
    worse = []
    for program, kernels in here.items():
        if kernels == "error":
            continue
        before = recorded.get(program)
        if before is None or isinstance(before, str) or isinstance(kernels, str):
            if before != kernels:
                worse.append(f"{program}: the record has {describe(before)}, here is {describe(kernels)}")
            continue
        if set(before) != set(kernels):
            worse.append(f"{program}: the record has the kernels {sorted(before)}, here are {sorted(kernels)}")
        for name in sorted(set(before) & set(kernels)):
            for field in ("bundles", "fills", "spills"):
                limit, value = TOLERANCE * before[name][field], kernels[name][field]
                if value > limit:
                    worse.append(f"{program}, {name}: {value} {field}, {before[name][field]} recorded")
    return worse


def describe(program_record) -> str:
    if program_record is None:
        return "nothing"
    return program_record if isinstance(program_record, str) else "kernels"


def write_record(versions: dict, programs: dict) -> None:
    RECORD.parent.mkdir(exist_ok=True)
    lines = [f"    {json.dumps(name)}: {json.dumps(programs[name])}" for name in sorted(programs)]
    head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in versions.items())
    RECORD.write_text("{\n" + head + ',\n  "programs": {\n' + ",\n".join(lines) + "\n  }\n}\n")
    print(f"recorded {len(programs)} programs in {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
