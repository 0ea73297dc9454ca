"""A plan for people: plain text, at most 100 columns."""

import math

from diffjax.parallel.chips import GIB
from diffjax.parallel.memory import ESTIMATE_ERROR
from diffjax.parallel.plan import Plan

WIDTH = 100


def text(plan: Plan) -> str:
    """The whole report, a section for each question it answers."""
    axes = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "1"
    lines = [f"{plan.topology}: {_count(plan.devices, 'device')} ({plan.device_kind}), mesh {axes}"]
    lines += _section("Parameters", _parameters(plan))
    lines += _section("Memory of a device", _memory(plan))
    lines += _section("Rematerialisation policies (model.remat)", _policies(plan))
    lines += _section("FLOPs", _flops(plan))
    lines += _section("Context of a sequence", _context(plan))
    if plan.collectives is not None:
        lines += _section("Collectives of a step, on each device", _collectives(plan))
    return "\n".join([*lines, "", verdict(plan)])


def verdict(plan: Plan) -> str:
    """One line: whether it fits, with need and have."""
    memory = plan.memory
    source = "compiled" if memory.compiled else "estimate"
    need = "more than the compiler would say" if memory.need is None else _gib(memory.need)
    if plan.have is None:
        return f"{plan.topology}: no limit is stated for this kind; needs {need} a device ({source})"
    if not plan.fits:
        return f"does NOT fit: needs {need}, has {plan.have / GIB:.2f} ({source})"
    if not memory.compiled and plan.margin < ESTIMATE_ERROR * memory.need:
        source = f"estimate; the compiled step may need {ESTIMATE_ERROR:.0%} more: --compile to be sure"
    return f"fits: needs {need}, has {plan.have / GIB:.2f}, margin {_gib(plan.margin)} ({source})"


def _parameters(plan: Plan):
    yield f"{plan.parameters:,}", "in all"
    for group, size in plan.parameters_by_group.items():
        yield f"{size:,}", group
    if plan.devices > 1:
        total = sum(leaf["bytes"] for leaf in plan.whole_on_each_device)
        yield _bytes(total), f"whole on every device: {_count(len(plan.whole_on_each_device), 'array')}, the largest"
        for leaf in plan.whole_on_each_device[:2]:
            yield _bytes(leaf["bytes"]), f"  {leaf['path']}"


def _memory(plan: Plan):
    for name, size in plan.memory.parts.items():
        known = name in plan.state_bytes or plan.memory.compiled
        yield _bytes(size), name.replace("_", " ") + ("" if known else "  (estimate)")
    if plan.memory.compiled:
        for name, size in plan.state_bytes.items():
            yield _bytes(size), f"  of the arguments: {name}, by shapes"


def _policies(plan: Plan):
    for memory in plan.remat:
        need = "unknown" if memory.need is None else _gib(memory.need)
        fits = "" if plan.have is None else "fits, " if memory.fits else "does not fit, "
        extra = memory.flops_per_token / plan.flops_per_token - 1
        chosen = "  <- this config" if memory.remat == plan.memory.remat else ""
        source = f"compiled in {memory.compile_seconds:.0f} s" if memory.compiled else "estimate"
        yield need, f"{memory.remat:<6} {fits}{extra:.0%} more FLOPs ({source}){chosen}"


def _flops(plan: Plan):
    yield f"{plan.flops_per_token / 1e9:.3f} G", "a token, forward and backward (what MFU counts)"
    yield f"{plan.flops_per_token_forward / 1e9:.3f} G", "a token, forward"
    yield f"{plan.flops_per_token_paper / 1e9:.3f} G", "a token, forward, by the arithmetic of arXiv 2609.11998"
    yield _scaled(plan.flops_per_step), f"a step of {plan.tokens_per_step:,} tokens"
    if plan.assumed_step_seconds is not None:
        yield f"{plan.assumed_step_seconds:.3g} s", f"a step at {plan.assumed_utilisation:.0%} MFU (an assumption)"


def _context(plan: Plan):
    yield f"{plan.context_bytes_per_token:,} B", "a token"
    fixed = (
        f"whatever its length (states in float32; {plan.context_bytes_fixed_compute_dtype:,} B in the compute dtype)"
    )
    same = plan.context_bytes_fixed == plan.context_bytes_fixed_compute_dtype
    yield f"{plan.context_bytes_fixed:,} B", "whatever its length" if same else fixed
    for tokens, size in plan.context_bytes.items():
        yield _scaled(size) + "B", f"at {tokens:,} tokens"


def _collectives(plan: Plan):
    for traffic in plan.collectives:
        unknown = f", {traffic.unknown} of them in loops of unstated length" if traffic.unknown else ""
        yield _bytes(traffic.bytes), f"{traffic.kind}, {_count(traffic.count, 'time')}{unknown}"
    if not plan.collectives:
        yield "none", ""


def _section(title: str, rows) -> list[str]:
    return ["", title, *(f"{figure:>22}  {what}".rstrip()[:WIDTH] for figure, what in rows)]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _bytes(size: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    power = min(3, int(math.log2(abs(size)) // 10)) if size else 0
    return f"{size:,} B" if power == 0 else f"{size / 1024**power:,.2f} {' KMG'[power]}iB"


def _scaled(number: float) -> str:
    """A number in thousands, millions, ...: 75161927680 -> "75.16 G"."""
    power = min(6, int(math.log10(number) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:,.2f} {' kMGTPE'[power]}".rstrip()
