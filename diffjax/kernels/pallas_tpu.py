"""What the Pallas TPU kernels share: arrays with time on lanes, tiles of heads, products, VMEM.

Kernels keep time on the 128 lanes: a decay, a step size or a count is then one row that broadcasts over channels, and
a narrow head wastes no lane. A grid step takes `tile` heads, a multiple of 8 (the sublanes of a float32 tile), so heads
are padded with zeros: a head of zeros changes no sum.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from diffjax.kernels.dispatch import interpreting
from diffjax.kernels.ssd_stream import Stream

LANES, SUBLANES = 128, 8
PACKED_SUBLANES = 16  # of a bfloat16 tile
VMEM_LIMIT = 48 * 2**20  # three quarters of the smallest VMEM of the targets (64 MiB on v5p; v5e and v6e have 128)
SMALLEST_VMEM = 16 * 2**20  # what v5e grants without being asked
# Most heads of a step by (P, N). More heads share one read of Bm and Cm, and the schedule hides more: with 40 heads
# instead of 16 a head takes a quarter fewer cycles forward (P 32, N 64). Fewer compile faster and need less VMEM.
TILES = {(32, 64): 40, (64, 64): 24, (64, 128): 24}
DEFAULT_TILE = 8
# Most numbers in u and M of a group of heads in `Call.for_heads`, by dtype: with more, registers run out. Products in
# float32 take their factors apart, and run out of them anyway.
HELD = {"bfloat16": 5 * 2**16, "float32": 5 * 2**13}
TOKENS = ("channels", "heads", "heads", "count")  # what `Call.tokens` gives, in names of `Call.block`


def heads_per_step(heads: int, largest: int) -> int:
    """The multiple of 8 up to `largest` that pads `heads` least; the largest of equals."""
    sizes = range(SUBLANES, max(largest, SUBLANES) + 1, SUBLANES)
    return min(sizes, key=lambda size: (-(-heads // size) * size, -size))


def padded_heads(heads: int, tile: int) -> int:
    return -(-heads // tile) * tile


def time_on_lanes(array: Array, tile: int = 1) -> Array:
    """[B, T, H] -> [B, H', T] and [B, T, H, P] -> [B, H' P, T], with H' = H padded to whole tiles of heads."""
    heads = array.shape[2]
    widths = [(0, 0), (0, 0), (0, padded_heads(heads, tile) - heads)] + [(0, 0)] * (array.ndim - 3)
    moved = jnp.moveaxis(jnp.pad(array, widths), 1, -1)
    return moved.reshape(moved.shape[0], -1, moved.shape[-1])


def tokens_first(array: Array, heads: int, head_dim: int | None = None) -> Array:
    """The way back: [B, H', T] -> [B, T, H], or [B, H' P, T] -> [B, T, H, P] where `head_dim` P is given."""
    batch, rows, length = array.shape
    if head_dim is None:
        return jnp.moveaxis(array[:, :heads], -1, 1)
    return jnp.moveaxis(array.reshape(batch, rows // head_dim, head_dim, length)[:, :heads], -1, 1)


def stack_states(states: Array, tile: int) -> Array:
    """[..., H, P, N] -> [..., H' P, N]"""
    *lead, heads, head_dim, state = states.shape
    widths = [(0, 0)] * len(lead) + [(0, padded_heads(heads, tile) - heads), (0, 0), (0, 0)]
    return jnp.pad(states, widths).reshape(*lead, -1, state)


def unstack_states(states: Array, heads: int, head_dim: int) -> Array:
    """[..., H' P, N] -> [..., H, P, N]"""
    *lead, rows, state = states.shape
    return states.reshape(*lead, rows // head_dim, head_dim, state)[..., :heads, :, :]


def column(row: Array) -> Array:
    """[1, Q] -> [Q, 1], float32."""
    return jnp.transpose(jnp.broadcast_to(row, (SUBLANES, row.shape[1])))[:, :1]


def visible(count: Array, reverse: bool) -> Array:
    """Whether token i sees token j, [j, i], for counts [1, Q]."""
    size = count.shape[1]
    j, i = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    counts = count.astype(jnp.float32)
    return ((j >= i) if reverse else (j <= i)) & (column(counts) == counts)


def decay(exponent: Array) -> Array:
    """exp, with the exponent cut at 0: what rounding lifts above it, and what pairs of tokens give that do not see each
    other. So a mask on what the decay multiplies is as good as one on the exponent."""
    return jnp.exp(jnp.minimum(exponent, 0))


def last_token(size: int, reverse: bool) -> Array:
    """[1, Q] bool: the chunk's last token in the order of the scan."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) == (0 if reverse else size - 1)


def to_end(cum: Array, count: Array, reverse: bool) -> tuple[Array, Array, Array]:
    """For cum [h, Q] and count [1, Q]: how much of the chunk's state a token reads [h, Q], and how much is left at the
    chunk's end of a token's input [h, Q] and of the state [h, 1]."""
    end = slice(0, 1) if reverse else slice(cum.shape[1] - 1, cum.shape[1])
    masked = lambda exponent, mask: jnp.exp(jnp.minimum(exponent, jnp.where(mask, 0.0, -jnp.inf)))
    reading = masked(cum, count == 0)
    return reading, masked(cum[:, end] - cum, count == count[:, end]), reading[:, end]


def tile_bytes(shape: tuple[int, ...], dtype) -> int:
    """Bytes of an array in VMEM, where the last two dimensions fill whole tiles."""
    size = jnp.dtype(dtype).itemsize
    *lead, rows, columns = shape
    sublanes = SUBLANES * 4 // size
    return math.prod(lead) * padded_heads(rows, sublanes) * padded_heads(columns, LANES) * size


class Call(NamedTuple):
    """The sizes of one SSD call, and by them the blocks of its arrays: names of arrays are those of `block`."""

    batch: int
    length: int
    heads: int
    P: int
    N: int
    chunk: int
    dtype: jnp.dtype
    tile: int

    @classmethod
    def of(cls, stream: Stream, chunk: int) -> "Call":
        batch, length, heads, P = stream.x.shape
        return cls.sized(batch, length, heads, P, stream.Bm.shape[-1], chunk, stream.x.dtype)

    @classmethod
    def sized(cls, batch, length, heads, P, N, chunk, dtype) -> "Call":
        tile = heads_per_step(heads, TILES.get((P, N), DEFAULT_TILE))
        return cls(batch, length, heads, P, N, chunk, jnp.dtype(dtype), tile)

    @property
    def chunks(self) -> int:
        return self.length // self.chunk

    @property
    def groups(self) -> int:
        """Tiles of heads."""
        return -(-self.heads // self.tile)

    def block(self, name: str) -> tuple[tuple, tuple[int, ...], object, Callable]:
        """(block shape, array shape, dtype, block index) of an array of the grid. The index is a function of the row,
        the tile of heads, the chunk in memory and the entry of the states; None dimensions are not seen by a kernel."""
        B, T, C, Q, N, G, tile = self.batch, self.length, self.chunks, self.chunk, self.N, self.groups, self.tile
        rows, f32 = tile * self.P, jnp.float32
        return {
            "channels": ((None, rows, Q), (B, G * rows, T), self.dtype, lambda b, h, c, s: (b, h, c)),
            "heads": ((None, tile, Q), (B, G * tile, T), f32, lambda b, h, c, s: (b, h, c)),
            "count": ((None, 1, Q), (B, 1, T), jnp.int32, lambda b, h, c, s: (b, 0, c)),
            "tokens": ((None, Q, N), (B, T, N), self.dtype, lambda b, h, c, s: (b, c, 0)),
            "lanes": ((None, N, Q), (B, N, T), self.dtype, lambda b, h, c, s: (b, 0, c)),
            "partial": ((None, None, N, Q), (G, B, N, T), f32, lambda b, h, c, s: (h, b, 0, c)),
            "state": ((None, rows, N), (B, G * rows, N), f32, lambda b, h, c, s: (b, h, 0)),
            "states": ((None, None, rows, N), (B, C + 1, G * rows, N), f32, lambda b, h, c, s: (b, s, h, 0)),
            "last state": ((None, None, rows, N), (B, C + 1, G * rows, N), f32, lambda b, h, c, s: (b, C, h, 0)),
        }[name]

    def temporary(self, name: str) -> tuple[tuple[int, ...], object]:
        """(shape, dtype) of an array of VMEM that is no block. u and M are of the heads of a group in `for_heads`."""
        rows = self.tile * self.P
        return {
            "state": ((rows, self.N), jnp.float32),
            "channels": ((rows, self.chunk), self.dtype),
            "products": ((rows, self.chunk), jnp.float32),
            "heads": ((self.tile, self.chunk), jnp.float32),
            "kept": ((self.tile, self.N), jnp.float32),
            "pairs": ((self.chunk, self.chunk), jnp.float32),
            "u": ((self.group, self.P, 2 * self.chunk), self.dtype),
            "M": ((self.group, 2 * self.chunk, self.chunk), self.dtype),
        }[name]

    def elements(self, name: str) -> int:
        return math.prod(self.block(name)[1])

    def vmem(self, blocks: Sequence[str], temporaries: Sequence[str]) -> int:
        """Bytes: blocks are double-buffered, temporaries are not; eight Q x Q tiles may be alive at once."""
        block_bytes = lambda shape, array, dtype, index: tile_bytes(tuple(n for n in shape if n is not None), dtype)
        held = [self.temporary(name) for name in (*temporaries, *["pairs"] * 8)]
        return sum(2 * block_bytes(*self.block(name)) for name in blocks) + sum(tile_bytes(*array) for array in held)

    def rows_of(self, head: int) -> slice:
        """Of the stacked channels of a step."""
        return slice(head * self.P, (head + 1) * self.P)

    @property
    def group(self) -> int:
        """Heads of which `for_heads` holds the factors of products: at most half of a step's."""
        of_head = 2 * self.chunk * (self.P + self.chunk)
        most = max(1, min(HELD[self.dtype.name] // of_head, self.tile // 2))
        return next(size for size in range(most, 0, -1) if self.tile % size == 0)

    def for_heads(self, prepare: Callable, finish: Callable, looped: bool = True) -> None:
        """prepare(slot, row, rows), then finish(slot, row, rows) for every head of a step: `prepare` leaves what
        `finish` multiplies in `slot` of scratch, row and rows are where the head is in "heads" and in stacked channels.

        As a loop over groups of heads that finishes the last group and prepares the next one: left to itself, the
        compiler starts many heads early, keeps in registers what they wait for and runs out of them. The first time
        around there is no last group: what it stores is stored anew. Not as a loop for more lanes than a tile's: there
        a load from a row known at run time has no lowering.
        """
        size, groups = self.group, self.tile // self.group
        if not looped or self.chunk > LANES:
            for head in range(self.tile):
                for part in (prepare, finish):
                    part(head % size, slice(head, head + 1), self.rows_of(head))
            return

        def of_group(part, group):
            for slot in range(size):
                rows = pl.ds(pl.multiple_of(group * size * self.P, SUBLANES) + slot * self.P, self.P)
                part(slot, pl.ds(group * size + slot, 1), rows)

        def step(group, _):
            of_group(finish, jnp.maximum(group - 1, 0))
            of_group(prepare, group)

        jax.lax.fori_loop(0, groups, step, None)
        of_group(finish, groups - 1)

    def channels(self, array: Array) -> Array:
        """[B, T, H, P] -> [B, H' P, T] in the compute dtype."""
        return time_on_lanes(array.astype(self.dtype), self.tile)

    def tokens(self, stream: Stream) -> tuple[Array, Array, Array, Array]:
        """x, dt, cum, count as kernels take them: `TOKENS`."""
        return self.channels(stream.x), self.rows(stream.dt), self.rows(stream.cum), stream.count[:, None]

    def rows(self, array: Array) -> Array:
        """[B, T, H] -> [B, H', T], float32."""
        return time_on_lanes(array.astype(jnp.float32), self.tile)

    def per_token(self, array: Array) -> Array:
        """[B, H' P, T] -> [B, T, H, P]"""
        return tokens_first(array, self.heads, self.P)

    def per_head(self, array: Array) -> Array:
        """[B, H', T] -> [B, T, H]"""
        return tokens_first(array, self.heads)

    def shared(self, partials: Array) -> Array:
        """The sum of "partial"s over tiles of heads, [B, T, 1, N] in the compute dtype."""
        return jnp.swapaxes(partials.sum(0), 1, 2)[:, :, None].astype(self.dtype)

    def stream_gradient(self, stream: Stream, d_x, d_dt, d_cum, d_Bm) -> Stream:
        """The gradient of `stream` from a kernel's "channels", "heads", "heads" and "partial"."""
        like = lambda gradient, array: self.per_head(gradient).astype(array.dtype)
        return Stream(self.per_token(d_x), like(d_dt, stream.dt), like(d_cum, stream.cum), None, self.shared(d_Bm))

    def pallas_call(
        self, kernel, name: str, inputs, outputs, temporaries, *, semantics, steps: int, memory, entry, flops: int
    ):
        """`pl.pallas_call` over (rows, tiles of heads, steps) with what every kernel here states: its name, cost, VMEM.

        inputs, outputs, temporaries: names for `block` and `temporary`; memory, entry: chunk in memory and entry of the
        states of a step; flops: of one token and head.
        """
        vmem = self.vmem((*inputs, *outputs), temporaries)
        if vmem > VMEM_LIMIT:
            raise ValueError(f"{name} needs {vmem >> 20} MiB of VMEM and may use {VMEM_LIMIT >> 20}")

        def spec(name):
            shape, _, _, index = self.block(name)
            return pl.BlockSpec(shape, lambda b, h, step: index(b, h, memory(step), entry(step)))

        arrays = [jax.ShapeDtypeStruct(*self.block(name)[1:3]) for name in (*inputs, *outputs)]
        per_head = self.batch * self.length * self.heads
        return pl.pallas_call(
            kernel,
            name=name,
            grid=(self.batch, self.groups, steps),
            in_specs=[spec(name) for name in inputs],
            out_specs=[spec(name) for name in outputs],
            out_shape=arrays[len(inputs) :],
            scratch_shapes=[pltpu.VMEM(*self.temporary(name)) for name in temporaries],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=semantics,
                vmem_limit_bytes=min(VMEM_LIMIT, max(2 * vmem, SMALLEST_VMEM)),  # the compiler needs room of its own
            ),
            cost_estimate=pl.CostEstimate(
                flops=per_head * flops,
                transcendentals=per_head * self.chunk,
                bytes_accessed=sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays),
            ),
            interpret=pltpu.InterpretParams(uninitialized_memory="nan") if interpreting() else False,
        )
