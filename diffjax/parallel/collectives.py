"""The collectives of a compiled program, read from its HLO text: what crosses between devices, how large, how often."""

import math
import re
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
         "ragged-all-to-all")  # fmt: skip

BY_HAND = "1"  # the channel that JAX gives to every exchange inside `jax.shard_map`

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\]")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_ORIGIN = re.compile(r'op_name="[^"]*"|stack_frame_id=\d+')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class ArrayType(NamedTuple):
    """One device's part of an array, in HLO's names: f32, bf16, pred, ..."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0])
        return math.prod(self.shape) * bits // 8


class Collective(NamedTuple):
    """One exchange of a program, as each device sees it.

    kind: one of KINDS. operands, results: what a device gives and gets (several where the compiler combined them).
    times: how often a run of the program does it; None inside a loop whose length the text does not state.
    op_name: where it comes from in the traced program, "" where the text does not say.
    """

    kind: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    times: int | None
    op_name: str

    @property
    def bytes(self) -> int:
        """Bytes on a device of one execution: of the operands or of the results, whichever is larger."""
        return max(sum(array.bytes for array in side) for side in (self.operands, self.results))


def collectives(hlo_text: str) -> list[Collective]:
    """The collectives of a compiled program, from `compiled.as_text()`, in the order of the text.

    The two halves of an asynchronous one count as one, and so do the copies that the TPU compiler spreads over the
    operations it hides it behind (they share a channel; those inside `jax.shard_map`, which share one channel among all
    of them, also share what they exchange and where in the traced program, and lie in different computations).
    """
    computations, entry = _parse(hlo_text)
    times = _times_run(computations, entry)
    found: dict = {}
    for name, instructions in computations.items():
        types, here = {instruction.name: instruction.results for instruction in instructions}, []
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or times[name] == 0:
                continue
            given = instruction.rest.split("), ")[0]
            operands = tuple(array for one in re.findall(r"%([\w.\-]+)", given) for array in types.get(one, ()))
            results = instruction.results
            if instruction.opcode in ("all-gather-start", "collective-permute-start"):  # (operands, results, ...)
                results = results[len(operands) : 2 * len(operands)]
            op_name = re.search(r'op_name="([^"]*)"', instruction.rest)
            channel = re.search(r"channel_id=(\d+)", instruction.rest)
            key = (kind, channel[1]) if channel else (name, instruction.name)
            if channel and channel[1] == BY_HAND:
                key = (*key, operands, results, *_ORIGIN.findall(instruction.rest))
                key = (*key, sum(other[:-1] == key for other in here))  # none of a computation are copies
                here.append(key)
            found.setdefault(key, Collective(kind, operands, results, times[name], op_name[1] if op_name else ""))
    return list(found.values())


class _Instruction(NamedTuple):
    name: str
    results: tuple[ArrayType, ...]
    opcode: str
    rest: str  # operands and attributes


def _parse(hlo_text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Computations by name, and the name of the entry."""
    computations, entry, current = {}, None, None
    for line in hlo_text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_Instruction(match[1], _arrays(match[2]), match[3], match[4]))
    if entry is None:
        raise ValueError("this is no HLO text: it has no ENTRY computation")
    return computations, entry


def _arrays(text: str) -> tuple[ArrayType, ...]:
    """The arrays of a type, a tuple's in order."""
    sizes = lambda dims: tuple(int(size) for size in re.findall(r"\d+", dims))
    return tuple(ArrayType(dtype, sizes(dims)) for dtype, dims in _ARRAY.findall(text) if dtype != "token")


def _times_run(computations: dict[str, list[_Instruction]], entry: str) -> dict[str, int | None]:
    """How often one run of the program runs each computation; 0 where nothing calls it, None where unknown.

    Of a conditional, every branch counts.
    """
    callers: dict[str, list] = {name: [] for name in computations}
    for name, instructions in computations.items():
        for instruction in instructions:
            called = _CALLED.findall(instruction.rest)
            for listed in _CALLED_LIST.findall(instruction.rest):
                called += [("branch", one.strip().lstrip("%")) for one in listed.split(",")]
            for role, callee in called:
                trips = _trip_count(instruction, computations) if role in ("body", "condition") else 1
                callers[callee].append((name, trips))
    times: dict[str, int | None] = {}

    def count(name: str) -> int | None:
        if name not in times:
            runs = [(count(caller), trips) for caller, trips in callers[name]]
            known = [None if None in pair else pair[0] * pair[1] for pair in runs if pair[0] != 0]
            times[name] = 1 if name == entry else None if None in known else sum(known)
        return times[name]

    for name in computations:
        count(name)
    return times


def _trip_count(loop: _Instruction, computations: dict[str, list[_Instruction]]) -> int | None:
    """A loop's stated length, or the bound that its counter is compared with (JAX's scans count up from 0)."""
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    condition = computations[dict(_CALLED.findall(loop.rest))["condition"]]
    constants = {one.name: one.rest.split(")")[0] for one in condition if one.opcode == "constant"}
    last = condition[-1]
    if last.opcode == "compare" and "direction=LT" in last.rest:
        bound = re.findall(r"%([\w.\-]+)", last.rest.split("), ")[0])[-1]
        return int(constants[bound]) if bound in constants else None
    return None
