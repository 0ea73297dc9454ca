"""SSD in Pallas Triton for GPUs: the six functions of `ssd_stream`, token-major as the model holds its arrays.

A pass has two kernels. The first carries the state (backward: its cotangent) of one head, or of a slice of its rows,
from chunk to chunk in registers and stores it at every chunk start. The second takes one chunk of a group of heads and
needs nothing from other chunks: the scores Cm . Bm are computed once for the group, and the gradients of Bm and Cm,
which all heads read, leave as one sum for each group. Blocks have no state and need the second kernel alone; so do
frontiers, whose states are given. A frontier's token reads at each of the chunk's places a clean token or an own one,
never both, so that one [Q, Q] tile of scores, decays and their gradients serves both.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from diffjax.kernels.dispatch import LARGEST_OPERAND, interpreting
from diffjax.kernels.precision import dot
from diffjax.kernels.ssd_stream import Stream
from diffjax.kernels.tokens import pad_tokens

CHUNK, SMALLEST_TILE = 64, 16  # tokens of a chunk; the smallest side of a product in Triton
HEAD_DIMS, STATES, CHUNKS = (16, 32, 64, 128), (16, 32, 64, 128, 256), (16, 32, 64)  # legal sizes
HEADS = 8  # most heads of a program
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
LARGEST_SLICE = 4096  # elements of a state that one program carries
LARGEST_FLOAT32 = 64 * 128  # elements of a float32 state: its products are unrolled, and more take minutes to compile
# Up to this head dim and state: warps of a program of the kernel by chunks, forward and backward, and stages of its
# loads. As compiled for Hopper the smaller sizes hardly spill, and the largest have shared memory for one stage only.
TUNING = {(32, 64): (4, 8, 2), (64, 128): (8, 8, 2), (128, 256): (8, 8, 1)}
CARRYING_WARPS = {"bfloat16": 4, "float32": 8}


def chunk_size(operation: str, block_size: int, head_dim: int, state: int) -> int:
    """Tokens per chunk: 64, or the largest power of two that divides a block which 64 neither divides nor covers."""
    if CHUNK % block_size == 0 or block_size % CHUNK == 0:
        return CHUNK
    power = block_size & -block_size
    return power if power >= SMALLEST_TILE else CHUNK


def refusal(
    operation: str, *, shape: tuple[int, ...], groups: int, state: int, chunk: int, block_size: int, dtype
) -> str | None:
    """Why the kernels cannot take a call of `operation` ("scan", "blocks" or "frontiers") on x of `shape` [B, T, H, P]:
    a sentence with the rule and the nearest legal value, or None."""
    del operation  # one law for all
    batch, length, heads, head_dim = shape
    if groups != 1:
        return f"takes one group of heads sharing Bm and Cm, not {groups}: use 1"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 or bfloat16, not {jnp.dtype(dtype).name}: use float32"
    for what, size, legal in (("head dim", head_dim, HEAD_DIMS), ("state", state, STATES), ("chunk", chunk, CHUNKS)):
        if size not in legal:
            nearest = min(legal, key=lambda one: (abs(one - size), -one))
            return f"needs a {what} of {', '.join(map(str, legal))}, not {size}: use {nearest}"
    if jnp.dtype(dtype) == jnp.float32 and head_dim * state > LARGEST_FLOAT32:
        most = LARGEST_FLOAT32 // head_dim
        return f"needs a state of at most {most} in float32 where the head dim is {head_dim}, not {state}: use {most}"
    if chunk % block_size and block_size % chunk:
        return f"needs a block size that divides the chunk or is a multiple of it, not {block_size}: use {chunk}"
    length = -(-length // chunk) * chunk
    call = _Call.sized(batch, length, heads, head_dim, state, chunk, dtype)
    largest = max(math.prod(call.array(name).shape) for name in ("channels", "partial", "all states"))
    if largest >= LARGEST_OPERAND:
        rows = batch * (LARGEST_OPERAND - 1) // largest
        tokens = length * (LARGEST_OPERAND - 1) // largest // chunk * chunk
        nearest = f"{rows} rows" if rows else f"{tokens} tokens"
        return f"takes operands of fewer than 2**31 elements, not of {largest}: use at most {nearest} a call"
    return None


def scan_forward(stream: Stream, Cm: Array, initial: Array, *, chunk: int, reverse: bool):
    call = _Call.of(stream, chunk)
    states = _carry(call, "ssd_scan_states", False, reverse, stream.x, stream.dt, stream, stream.Bm, initial[:, None])
    return _forward(call, "ssd_scan_forward", reverse, chunk, stream, Cm, None, None, states), states


def scan_backward(stream: Stream, Cm: Array, states: Array, dy: Array, d_states: Array, *, chunk: int, reverse: bool):
    call = _Call.of(stream, chunk)
    d_states = _carry(call, "ssd_scan_cotangents", True, reverse, dy, None, stream, Cm, d_states)
    inputs = (stream, Cm, None, None, states, d_states, dy)
    d_stream, d_Cm, *_ = _backward(call, "ssd_scan_backward", reverse, chunk, *inputs)
    return d_stream, d_Cm, d_states[:, 0]


def blocks_forward(stream: Stream, Cm: Array, *, chunk: int, reverse: bool):
    call = _Call.of(stream, chunk)
    return _forward(call, "ssd_blocks_forward", reverse, chunk, stream, Cm, None, None, None)


def blocks_backward(stream: Stream, Cm: Array, dy: Array, *, chunk: int, reverse: bool):
    inputs = (stream, Cm, None, None, None, None, dy)
    d_stream, d_Cm, *_ = _backward(_Call.of(stream, chunk), "ssd_blocks_backward", reverse, chunk, *inputs)
    return d_stream, d_Cm


def frontiers_forward(own: Stream, Cm: Array, reach: Array, clean: Stream, states: Array, *, chunk, block_size):
    call = _Call.of(own, chunk)
    return _forward(call, "ssd_frontiers_forward", False, block_size, own, Cm, reach, clean, states)


def frontiers_backward(own: Stream, Cm: Array, reach: Array, clean: Stream, states, dy, *, chunk, block_size):
    inputs = (own, Cm, reach, clean, states, None, dy)
    gradients = _backward(_Call.of(own, chunk), "ssd_frontiers_backward", False, block_size, *inputs)
    return *gradients[:4], pad_tokens(gradients[4], states.shape[1])


class _Call(NamedTuple):
    """Sizes of one call: rows, chunks and their tokens, heads, and heads of one program of the kernel by chunks."""

    batch: int
    chunks: int
    chunk: int
    heads: int
    P: int
    N: int
    tile: int
    dtype: jnp.dtype

    @classmethod
    def sized(cls, batch, length, heads, head_dim, state, chunk, dtype) -> "_Call":
        chunks, tile = length // chunk, HEADS
        while tile > 1 and batch * chunks * pl.cdiv(heads, tile) < ENOUGH_PROGRAMS:
            tile //= 2
        return cls(batch, chunks, chunk, heads, head_dim, state, min(tile, heads), jnp.dtype(dtype))

    @classmethod
    def of(cls, stream: Stream, chunk: int) -> "_Call":
        return cls.sized(*stream.x.shape, stream.Bm.shape[3], chunk, stream.x.dtype)

    @property
    def groups(self) -> int:
        return pl.cdiv(self.heads, self.tile)

    def array(self, name: str) -> jax.ShapeDtypeStruct:
        """What the kernels write."""
        tokens = self.chunks * self.chunk
        shape = {
            "channels": (self.batch, tokens, self.heads, self.P),
            "heads": (self.batch, tokens, self.heads),
            "partial": (self.groups, self.batch, tokens, self.N),
            "states": (self.batch, self.chunks, self.heads, self.P, self.N),
            "all states": (self.batch, self.chunks + 1, self.heads, self.P, self.N),
        }[name]
        return jax.ShapeDtypeStruct(shape, self.dtype if name == "channels" else jnp.float32)

    def spec(self, name: str, reverse: bool = False) -> pl.BlockSpec:
        """One chunk, all heads: a program walks those of its group."""
        Q, H, P, N, last = self.chunk, self.heads, self.P, self.N, self.chunks - 1
        entry = lambda c: last - c if reverse else c  # states are in the order of processing
        shape, index = {
            "channels": ((None, Q, H, P), lambda g, c, b: (b, c, 0, 0)),
            "heads": ((None, Q, H), lambda g, c, b: (b, c, 0)),
            "tokens": ((None, Q), lambda g, c, b: (b, c)),
            "shared": ((None, Q, None, N), lambda g, c, b: (b, c, 0, 0)),
            "partial": ((None, None, Q, N), lambda g, c, b: (g, b, c, 0)),
            "states": ((None, None, H, P, N), lambda g, c, b: (b, entry(c), 0, 0, 0)),
            "next states": ((None, None, H, P, N), lambda g, c, b: (b, entry(c) + 1, 0, 0, 0)),
        }[name]
        return pl.BlockSpec(shape, index)

    def walk_heads(self, body, carry):
        """`body(h, carry)` for the heads of this program."""
        first = pl.program_id(0) * self.tile
        last = first + self.tile if self.heads % self.tile == 0 else jnp.minimum(first + self.tile, self.heads)
        return lax.fori_loop(first, last, body, carry)

    def run(self, kernel, name: str, backward: bool, specs, args, out_specs, out_shape):
        *warps, stages = next(tuned for (P, N), tuned in TUNING.items() if self.P <= P and self.N <= N)
        return pl.pallas_call(
            kernel,
            name=name,
            grid=(self.groups, self.chunks, self.batch),
            in_specs=specs,
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=pltriton.CompilerParams(num_warps=warps[backward], num_stages=stages),
            interpret=interpreting(),
        )(*args)


STREAM = Stream("channels", "heads", "heads", "tokens", "shared")
D_STREAM = Stream("channels", "heads", "heads", None, "partial")


def _forward(call: _Call, name: str, reverse: bool, block_size: int, own, Cm, reach, clean, states) -> Array:
    args = (own, Cm, reach, clean, states)
    names = (STREAM, "shared", "heads", STREAM, "states")
    specs = tuple(
        None if arg is None else jax.tree.map(functools.partial(call.spec, reverse=reverse), name)
        for arg, name in zip(args, names, strict=True)
    )
    kernel = functools.partial(_forward_kernel, call, reverse, block_size)
    return call.run(kernel, name, False, specs, args, call.spec("channels"), call.array("channels"))


def _forward_kernel(call: _Call, reverse: bool, block_size: int, own: Stream, Cm, reach, clean, states, y):
    pairs = _Pairs.of(call, reverse, block_size, own, Cm, clean)
    reach = own.cum if reach is None else reach

    def head(h, _):
        M = pairs.scores * pairs.decay(own, reach, clean, h)
        y_h = dot(pairs.own(M).astype(call.dtype), _inputs(own, h))
        if clean is not None:
            y_h += dot(pairs.clean(M).astype(call.dtype), _inputs(clean, h))
        if states is not None:
            reading = _reading(reach[:, h], own.count[...])
            y_h += reading[:, None] * dot(Cm[...], states[h], (1, 1))
        y[:, h, :] = y_h.astype(call.dtype)
        return _

    call.walk_heads(head, 0)


class _Pairs(NamedTuple):
    """Tokens i, j of a chunk: scores Cm_i . Bm_j, which j token i reads, and which of them are clean tokens."""

    scores: Array
    visible: Array
    earlier: Array | None

    @classmethod
    def of(cls, call: _Call, reverse: bool, block_size: int, own: Stream, Cm, clean: Stream | None) -> "_Pairs":
        i, j = (lax.broadcasted_iota(jnp.int32, (call.chunk, call.chunk), axis) for axis in (0, 1))
        in_order = i <= j if reverse else i >= j
        scores, count = dot(Cm[...], own.Bm[...], (1, 1)), own.count[...][:, None]
        if clean is None:
            return cls(scores, in_order & (count == own.count[...][None, :]), None)
        block_i, block_j = lax.div(i, block_size), lax.div(j, block_size)
        earlier = (block_i > block_j) & (count == clean.count[...][None, :])
        scores = jnp.where(earlier, dot(Cm[...], clean.Bm[...], (1, 1)), scores)
        return cls(scores, earlier | (in_order & (block_i == block_j)), earlier)

    def decay(self, own: Stream, reach, clean: Stream | None, h) -> Array:
        exponent = own.cum[:, h][:, None] - own.cum[:, h][None, :]
        if clean is not None:
            exponent = jnp.where(self.earlier, reach[:, h][:, None] - clean.cum[:, h][None, :], exponent)
        return _exp(exponent, self.visible)

    def own(self, tile: Array) -> Array:
        """The part of a tile that belongs to own tokens."""
        return tile if self.earlier is None else jnp.where(self.earlier, 0.0, tile)

    def clean(self, tile: Array) -> Array:
        return jnp.where(self.earlier, tile, 0.0)


def _exp(exponent: Array, where: Array) -> Array:
    """exp(exponent) where `where`, else 0. A difference of rounded sums may rise above 0."""
    return jnp.exp(jnp.where(where, jnp.minimum(exponent, 0.0), -jnp.inf))


def _reading(cum: Array, count: Array) -> Array:
    """How much of the chunk's state each token reads: [Q]."""
    return _exp(cum, count == 0)


def _inputs(stream: Stream, h) -> Array:
    x = stream.x[:, h, :]
    return (x.astype(jnp.float32) * stream.dt[:, h][:, None]).astype(x.dtype)


def _carry(call: _Call, name: str, backward: bool, reverse: bool, rows, dt, stream: Stream, columns, given) -> Array:
    """States at chunk starts and after the last token, or their whole cotangents: [B, C+1, H, P, N].

    Forward rows = x, columns = Bm and given = the first state [B, 1, H, P, N]; backward rows = dy, columns = Cm, no dt,
    and given = the cotangents from outside [B, C+1, H, P, N].
    """
    tokens, P, N = call.chunks * call.chunk, call.P, call.N
    height = max(SMALLEST_TILE, min(P, LARGEST_SLICE // N))
    per_head = pl.BlockSpec((None, tokens, None), lambda p, h, b: (b, 0, h))
    states = lambda entries: pl.BlockSpec((None, entries, None, height, N), lambda p, h, b: (b, 0, h, p, 0))
    return pl.pallas_call(
        functools.partial(_carry_kernel, call, backward, reverse),
        name=name,
        grid=(P // height, call.heads, call.batch),
        in_specs=(
            pl.BlockSpec((None, tokens, None, height), lambda p, h, b: (b, 0, h, p)),
            None if dt is None else per_head,
            per_head,
            pl.BlockSpec((None, tokens), lambda p, h, b: (b, 0)),
            pl.BlockSpec((None, tokens, None, N), lambda p, h, b: (b, 0, 0, 0)),
            states(given.shape[1]),
        ),
        out_specs=states(call.chunks + 1),
        out_shape=call.array("all states"),
        compiler_params=pltriton.CompilerParams(num_warps=CARRYING_WARPS[call.dtype.name], num_stages=2),
        interpret=interpreting(),
    )(rows, dt, stream.cum, stream.count, columns, given)


def _carry_kernel(call: _Call, backward: bool, reverse: bool, rows, dt, cum, count, columns, given, states):
    Q, C = call.chunk, call.chunks

    def step(number, state):
        entry = C - 1 - number if backward else number
        states[entry + 1 if backward else entry] = state
        start = (C - 1 - entry if reverse else entry) * Q
        chunk, end = pl.ds(start, Q), start if reverse else start + Q - 1
        weight, kept = _to_end(cum[chunk], count[chunk], cum[end], count[end])
        weight = _reading(cum[chunk], count[chunk]) if backward else weight * dt[chunk]
        weighted = (rows[chunk, :].astype(jnp.float32) * weight[:, None]).astype(call.dtype)
        state = kept * state + dot(weighted, columns[chunk, :], (0, 0))
        return state + given[entry] if backward else state

    last = lax.fori_loop(0, C, step, given[C if backward else 0])
    states[0 if backward else C] = last


def _to_end(cum: Array, count: Array, cum_end, count_end) -> tuple[Array, Array]:
    """What each token's input keeps to the chunk's end [Q], and what the chunk's state keeps of itself."""
    kept = jnp.where(count_end == 0, jnp.exp(jnp.minimum(cum_end, 0.0)), 0.0)
    return _exp(cum_end - cum, count == count_end), kept


def _backward(call: _Call, name: str, reverse: bool, block_size: int, own, Cm, reach, clean, states, after, dy):
    """Gradients of own, Cm, reach, clean and, where no state is carried, of states [B, C, H, P, N]."""
    given = (own, Cm, reach, clean, states, after, dy)
    names = (STREAM, "shared", "heads", STREAM, "states", "next states", "channels")
    frontiers = clean is not None
    out = (D_STREAM, "partial", "heads" if frontiers else None, D_STREAM if frontiers else None)
    out = (*out, "states" if frontiers else None)
    specs = tuple(
        None if arg is None else jax.tree.map(functools.partial(call.spec, reverse=reverse), name)
        for arg, name in zip(given, names, strict=True)
    )
    kernel = functools.partial(_backward_kernel, call, reverse, block_size)
    out_specs, out_shape = jax.tree.map(call.spec, out), jax.tree.map(call.array, out)
    d_own, d_Cm, *others = call.run(kernel, name, True, specs, given, out_specs, out_shape)
    shared = lambda partial: jnp.sum(partial, axis=0)[:, :, None].astype(call.dtype)
    whole = lambda stream: None if stream is None else stream._replace(Bm=shared(stream.Bm))
    return whole(d_own), shared(d_Cm), others[0], whole(others[1]), others[2]


def _backward_kernel(
    call: _Call, reverse: bool, block_size: int, own: Stream, Cm, reach, clean, states, after, dy, *gradients
):
    """Two walks over the heads, so that only the sums of one are in registers: pairs of tokens, then states."""
    d_own, d_Cm, d_reach, d_clean, d_states = gradients
    pairs = _Pairs.of(call, reverse, block_size, own, Cm, clean)
    reach = own.cum if reach is None else reach
    end = 0 if reverse else call.chunk - 1
    reading = lambda h: _reading(reach[:, h], own.count[...])
    to_end = lambda h: _to_end(own.cum[:, h], own.count[...], own.cum[end, h], own.count[end])
    dots = lambda rows, columns: jnp.sum(rows.astype(jnp.float32) * columns, axis=1)

    def pairs_of_head(h, d_scores):
        dy_h, u = dy[:, h, :], _inputs(own, h)
        d_u, d_cum, d_reading = 0.0, 0.0, 0.0
        if states is not None:
            d_reading = reading(h) * dots(dy_h, dot(Cm[...], states[h], (1, 1)))
        if after is not None:
            weight, kept = to_end(h)
            d_u = weight[:, None] * dot(own.Bm[...], after[h], (1, 1))
            fell = dots(u, d_u)
            d_end = jnp.sum(fell) + kept * jnp.sum(after[h] * states[h])
            is_end = lax.broadcasted_iota(jnp.int32, (call.chunk,), 0) == end
            d_cum = d_reading - fell + jnp.where(is_end, d_end, 0.0)
        D = pairs.decay(own, reach, clean, h)
        X = dot(dy_h, u, (1, 1))
        if clean is not None:
            X = jnp.where(pairs.earlier, dot(dy_h, _inputs(clean, h), (1, 1)), X)
        X *= D
        M, R = pairs.scores * D, X * pairs.scores
        d_u += dot(pairs.own(M).astype(call.dtype), dy_h, (0, 0))
        d_cum += jnp.sum(pairs.own(R), axis=1) - jnp.sum(pairs.own(R), axis=0)
        if clean is not None:
            clean_R = pairs.clean(R)
            d_reach[:, h] = d_reading + jnp.sum(clean_R, axis=1)
            _write(d_clean, clean, h, dot(pairs.clean(M).astype(call.dtype), dy_h, (0, 0)), -jnp.sum(clean_R, axis=0))
        _write(d_own, own, h, d_u, d_cum)
        return d_scores + X

    def states_of_head(h, sums):
        d_Cm, d_Bm = sums
        dy_h, read = dy[:, h, :], reading(h)[:, None]
        d_Cm += read * dot(dy_h, states[h])
        if after is not None:
            d_Bm += to_end(h)[0][:, None] * dot(_inputs(own, h), after[h])
        else:
            d_states[h] = dot((dy_h.astype(jnp.float32) * read).astype(call.dtype), Cm[...], (0, 0))
        return d_Cm, d_Bm

    d_scores = call.walk_heads(pairs_of_head, jnp.zeros((call.chunk, call.chunk), jnp.float32))
    own_scores = pairs.own(d_scores).astype(call.dtype)
    sums = dot(own_scores, own.Bm[...]), dot(own_scores, Cm[...], (0, 0))
    if clean is not None:
        clean_scores = pairs.clean(d_scores).astype(call.dtype)
        d_clean.Bm[...] = dot(clean_scores, Cm[...], (0, 0))
        sums = sums[0] + dot(clean_scores, clean.Bm[...]), sums[1]
    d_Cm[...], d_own.Bm[...] = sums if states is None else call.walk_heads(states_of_head, sums)


def _write(gradient: Stream, stream: Stream, h, d_u: Array, d_cum: Array) -> None:
    gradient.x[:, h, :] = (stream.dt[:, h][:, None] * d_u).astype(gradient.x.dtype)
    gradient.dt[:, h] = jnp.sum(d_u * stream.x[:, h, :].astype(jnp.float32), axis=1)
    gradient.cum[:, h] = d_cum
