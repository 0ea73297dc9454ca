"""The state-space scan of Mamba-2 (SSD, arXiv 2405.21060) over a clean stream, over blocks, and over frontiers.

Recurrence, per head with state S [P, N] and decay a_t = dt_t * A <= 0:

    S_t = exp(a_t) S_{t-1} + dt_t x_t (x) Bm_t          y_t = S_t Cm_t

Shapes: B rows, T tokens, H heads, P head dim, g groups of heads sharing Bm and Cm, N state, F frontiers of G tokens, Q
tokens in a chunk. `x`, `Bm`, `Cm` come in the compute dtype; `dt` (after softplus, 0 at pads), `A` (negative) and all
states in at least float32. A token with dt = 0 leaves every state as it is, to the bit.

Cost per token and head, m heads sharing one score matrix: forward 2 Q (N / m + P) + 4 N P FLOP and 4 P + 8 + 4 N / m +
4 N P / Q bytes (bfloat16), backward 4 Q P + 6 Q N / m + 10 N P FLOP and 6 P + 16 + 4 N P / Q + 16 N / m bytes, Q
exponentials each. Gradients are of first order, for every float input and every state.

A backend is the six functions of `ssd_stream`; here they meet autodiff (once, for all of them) and the blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from diffjax.kernels import ssd_pallas_tpu, ssd_pallas_triton, ssd_reference, ssd_xla
from diffjax.kernels.dispatch import KERNELS, SAVED, Choice, Split, choose, local_platform, mesh_platform, run
from diffjax.kernels.precision import accumulation_dtype
from diffjax.kernels.ssd_boundary import Boundary, final_state, states_at
from diffjax.kernels.ssd_stream import Stream, make_stream
from diffjax.kernels.tokens import by_chunk, pad_tokens

__all__ = ["Boundary", "final_state", "ssd_block", "ssd_frontier", "ssd_scan", "states_at"]

XLA_ONLY = (("default", "xla"),)
FOR_EVERY_CALL = ("reference", "xla")
BACKENDS = {
    "reference": ssd_reference,
    "xla": ssd_xla,
    "pallas_tpu": ssd_pallas_tpu,
    "pallas_triton": ssd_pallas_triton,
}


def ssd_scan(
    x: Array,
    dt: Array,
    A: Array,
    Bm: Array,
    Cm: Array,
    *,
    block_size: int,
    initial_state: Array | None = None,
    reset: Array | None = None,
    chunk: int | None = None,
    backend: str = "auto",
) -> tuple[Array, Boundary]:
    """Scan a clean stream; T tokens make n = T // block_size whole blocks (a rest may follow the last edge).

    Args:
      x: [B, T, H, P]; dt: [B, T, H]; A: [H]; Bm, Cm: [B, T, g, N].
      initial_state: [B, H, P, N], enters the first token; zero if None.
      reset: [B, n+1] bool, block k starts a document: its tokens see no earlier state.
      chunk: tokens per chunk, a multiple of block_size or a divisor of it; chosen by backend and shape if None.

    Returns:
      y [B, T, H, P] in x.dtype and the Boundary.

    Raises:
      ValueError: shapes do not belong together, the chunk does not fit the block size, or the backend named cannot run
        this call.
    """
    batch, length, heads, head_dim = x.shape
    if block_size < 1:
        raise ValueError(f"ssd_scan: block_size must be at least 1, not {block_size}")
    whole = length // block_size
    state = _check_shapes("ssd_scan", x, dt, A, Bm, Cm)
    _check_shape("ssd_scan", "initial_state", initial_state, (batch, heads, head_dim, state))
    _check_shape("ssd_scan", "reset", reset, (batch, whole + 1))
    if reset is not None and reset.dtype != jnp.bool_:
        raise ValueError(f"ssd_scan: reset must be bool, not {reset.dtype}")
    initial = jnp.zeros((batch, heads, head_dim, Bm.shape[-1]), dt.dtype) if initial_state is None else initial_state
    initial = initial.astype(accumulation_dtype(x.dtype))
    edges = jnp.zeros((batch, whole + 1), bool) if reset is None else reset
    if x.size == 0:
        return x, Boundary(initial[:, None], edges, block_size=block_size, chunk=block_size)
    chunk, choice = _choose("scan", backend, x, Bm, block_size, chunk)
    if choice.backend == "reference":
        return ssd_reference.scan(x, dt, A, Bm, Cm, block_size, initial, edges)
    starts = None
    if reset is not None:
        starts = jnp.repeat(reset, block_size, axis=1) & (jnp.arange((whole + 1) * block_size) % block_size == 0)
        starts = starts[:, :length]
    stream = make_stream(x, dt, A, Bm, starts, chunk)
    y, states = _scan(stream, pad_tokens(Cm, stream.x.shape[1]), initial, chunk, False, choice)
    kept = None if block_size % chunk == 0 else stream
    return y[:, :length], Boundary(states, edges, kept, block_size=block_size, chunk=chunk)


def ssd_block(
    x: Array,
    dt: Array,
    A: Array,
    Bm: Array,
    Cm: Array,
    *,
    seed: Array | None = None,
    reverse: bool = False,
    chunk: int | None = None,
    backend: str = "auto",
) -> Array:
    """Scan F blocks on their own: each starts from its `seed` [B, F, H, P, N], or from zero.

    `reverse=True` runs right to left inside each block and equals flip, scan, flip (the block-restricted reverse scan
    of arXiv 2607.02805, eq. 11-13), without flips in memory. x: [B, F, G, H, P]; dt: [B, F, G, H]; Bm, Cm:
    [B, F, G, g, N]. Returns y like x.
    """
    batch, frontiers, size, heads, head_dim = x.shape
    state = _check_shapes("ssd_block", x, dt, A, Bm, Cm)
    _check_shape("ssd_block", "seed", seed, (batch, frontiers, heads, head_dim, state))
    if x.size == 0:
        return x
    streams = [array.reshape(batch, frontiers * size, *array.shape[3:]) for array in (x, dt, Bm, Cm)]
    if seed is not None:
        seed = seed.astype(accumulation_dtype(x.dtype))
    chunk, choice = _choose("blocks" if seed is None else "seeded blocks", backend, streams[0], streams[2], size, chunk)
    if choice.backend == "reference":
        return ssd_reference.block(x, dt, A, Bm, Cm, seed, reverse)
    length = frontiers * size
    if seed is None and size <= chunk:  # whole blocks share a chunk
        stream = make_stream(*streams[:2], A, streams[2], None, chunk, segment=size, reverse=reverse)
        y = _blocks(stream, pad_tokens(streams[3], stream.x.shape[1]), chunk, reverse, choice)
    elif (
        size == chunk and not reverse and choice.backends == XLA_ONLY
    ):  # a block is a chunk, its seed the chunk's state
        stream = make_stream(*streams[:2], A, streams[2], None, chunk)
        y = _frontiers(stream, streams[3], stream.cum, None, seed, chunk, size, choice)
    else:  # blocks are rows of a scan
        rows = [array.reshape(batch * frontiers, size, *array.shape[2:]) for array in streams]
        if seed is None:
            seed = jnp.zeros((batch, frontiers, heads, head_dim, Bm.shape[-1]), accumulation_dtype(x.dtype))
        stream = make_stream(*rows[:2], A, rows[2], None, chunk, reverse=reverse)
        seed = seed.reshape(batch * frontiers, *seed.shape[2:])
        y = _scan(stream, pad_tokens(rows[3], stream.x.shape[1]), seed, chunk, reverse, choice)[0][:, :size]
        y = y.reshape(batch, length, heads, head_dim)
    return y[:, :length].reshape(x.shape)


def ssd_frontier(
    x: Array,
    dt: Array,
    A: Array,
    Bm: Array,
    Cm: Array,
    *,
    boundary: Boundary,
    frontier_index: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Scan frontiers against the finished blocks of `boundary`: frontier f starts from the state at the left edge of
    block frontier_index[b, f], or of block f when frontier_index is None. Shapes as in `ssd_block`.

    Where several blocks share a chunk and there is one frontier for each block, frontiers read the chunk's tokens and
    its one state: no state is stored for a block. Elsewhere they start from `states_at`. The boundary never changes.
    """
    batch, frontiers, size = x.shape[:3]
    _check_shapes("ssd_frontier", x, dt, A, Bm, Cm)
    _check_shape("ssd_frontier", "frontier_index", frontier_index, (batch, frontiers))
    edges = boundary.reset.shape[1]
    _check_shape("ssd_frontier", "boundary.reset", boundary.reset, (batch, edges))
    if frontier_index is None and frontiers > edges:
        raise ValueError(f"ssd_frontier: {frontiers} frontiers without frontier_index, but {edges} block edges")
    if size != boundary.block_size:
        raise ValueError(f"ssd_frontier: x has blocks of {size} tokens, the boundary of {boundary.block_size}")
    if boundary.stream is None or frontier_index is not None or backend == "reference":
        seed = states_at(boundary, frontier_index)[:, :frontiers]  # the last edge of a whole stream has no frontier
        return ssd_block(x, dt, A, Bm, Cm, seed=seed, backend=backend)
    chunk, length = boundary.chunk, frontiers * size
    x_, dt_, Bm_, Cm_ = (array.reshape(batch, length, *array.shape[3:]) for array in (x, dt, Bm, Cm))
    chunk, choice = _choose("frontiers", backend, x_, Bm_, size, chunk)
    own = make_stream(x_, dt_, A, Bm_, None, chunk, segment=size)
    padded = own.x.shape[1]
    clean = Stream(*(None if array is None else pad_tokens(array, padded) for array in boundary.stream))
    # Decays from the chunk's start, or the last reset in it, through the clean tokens before the block.
    ends = clean.cum.reshape(batch, padded // size, size, -1)[:, :, -1]
    before = pad_tokens(jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends], axis=1), padded // size)
    before = jnp.where((jnp.arange(padded // size) % (chunk // size) == 0)[:, None], 0, before)
    reach = jnp.repeat(before, size, axis=1) + own.cum
    count = jnp.cumsum(by_chunk(pad_tokens(boundary.reset.astype(jnp.int32), padded // size), chunk // size), axis=2)
    own = own._replace(count=jnp.repeat(count.reshape(batch, -1), size, axis=1))
    if clean.count is None:
        clean = clean._replace(count=jnp.zeros_like(own.count))
    y = _frontiers(own, pad_tokens(Cm_, padded), reach, clean, boundary.states, chunk, size, choice)
    return y[:, :length].reshape(x.shape)


def _check_shapes(function: str, x, dt, A, Bm, Cm) -> int:
    """The size of the state, where all shapes belong to that of x [..., H, P], and all dtypes to its dtype."""
    *lead, heads, _ = x.shape
    groups, state = Bm.shape[-2:]
    for name, array, shape in (
        ("dt", dt, (*lead, heads)), ("A", A, (heads,)), ("Bm", Bm, (*lead, groups, state)), ("Cm", Cm, Bm.shape)
    ):  # fmt: skip
        _check_shape(function, name, array, shape)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{function}: x is {x.dtype}, but must be a float")
    for name, array, dtype in (
        ("Bm", Bm, x.dtype), ("Cm", Cm, x.dtype),
        ("dt", dt, accumulation_dtype(dt.dtype)), ("A", A, accumulation_dtype(A.dtype)),
    ):  # fmt: skip
        if array.dtype != dtype:
            raise ValueError(f"{function}: {name} is {array.dtype}, but must be {dtype} beside x of {x.dtype}")
    if heads % groups:
        raise ValueError(f"{function}: {heads} heads cannot be divided among the {groups} groups of Bm")
    return state


def _check_shape(function: str, name: str, array, shape: tuple[int, ...]) -> None:
    """Shapes that broadcast or are padded would give wrong numbers in silence."""
    if array is not None and array.shape != tuple(shape):
        raise ValueError(f"{function}: {name} has shape {list(array.shape)}, but the others ask for {list(shape)}")


def _choose(operation: str, backend: str, x, Bm, block_size: int, chunk: int | None) -> tuple[int, Choice]:
    """The chunk and the backends of one call."""
    call = {"shape": x.shape, "groups": Bm.shape[2], "state": Bm.shape[3], "block_size": block_size, "dtype": x.dtype}
    size_of = lambda name: chunk or BACKENDS[name].chunk_size(operation, block_size, x.shape[3], Bm.shape[3])
    refusal = lambda name, size: _refusal(operation, name, backend == "auto", chunk=size, **call)
    if backend == "auto":
        kernel = KERNELS.get(mesh_platform() or local_platform())
        likely = kernel if kernel in BACKENDS and refusal(kernel, size_of(kernel)) is None else "xla"
    else:
        likely = backend if backend in BACKENDS and backend != "reference" else "xla"
    size = size_of(likely)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    if size % block_size and block_size % size:
        raise ValueError(f"chunk {size} must be a multiple or a divisor of block_size {block_size}")
    # A kernel that refuses its own chunk gives that reason; one that the chosen chunk does not fit gives this one.
    refusals = {name: lambda name=name: refusal(name, size_of(name)) or refusal(name, size) for name in BACKENDS}
    refusals |= {name: lambda: None for name in FOR_EVERY_CALL}
    shape = f"{x.dtype} [B T H P] {list(x.shape)}, N {Bm.shape[3]}, block {block_size}, chunk {size}"
    return size, choose(f"ssd {operation}", backend, refusals, shape)


def _refusal(operation: str, name: str, auto: bool, *, chunk: int, **call) -> str | None:
    """Why a kernel cannot run, or under `auto` should not run, a call."""
    if auto and operation == "seeded blocks" and call["block_size"] < chunk:
        return f"fills a chunk of {chunk} tokens from one seed, and blocks have {call['block_size']}"
    if auto and call["shape"][1] < chunk:
        return f"takes chunks of {chunk} tokens, and there are {call['shape'][1]}"
    seeded = operation == "seeded blocks"
    return BACKENDS[name].refusal("scan" if seeded else operation, chunk=chunk, **call)


# Rows and heads of what the six functions take and return.
_STREAM = Stream(Split(0, 2), Split(0, 2), Split(0, 2), Split(0), Split(0))
_D_STREAM = Stream(Split(0, 2), Split(0, 2), Split(0, 2), None, Split(0, None, True))
_TOKENS, _STATES, _STATE, _SHARED, _D_SHARED = Split(0, 2), Split(0, 2), Split(0, 1), Split(0), Split(0, None, True)


def _run(choice: Choice, function: str, specs, *args, **static):
    if choice.backends != XLA_ONLY:  # kernels read counts in any case
        fill = lambda arg: arg._replace(count=jnp.zeros(arg.x.shape[:2], jnp.int32)) if _counts_missing(arg) else arg
        args = tuple(fill(arg) for arg in args)
    return run(choice, BACKENDS, function, specs, *args, **static)


def _counts_missing(arg) -> bool:
    return isinstance(arg, Stream) and arg.count is None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _scan(stream: Stream, Cm, initial, chunk: int, reverse: bool, choice: Choice):
    specs = (_STREAM, _SHARED, _STATE), (_TOKENS, _STATES)
    return _run(choice, "scan_forward", specs, stream, Cm, initial, chunk=chunk, reverse=reverse)


def _scan_fwd(stream, Cm, initial, chunk, reverse, choice):
    y, states = (checkpoint_name(out, SAVED) for out in _scan(stream, Cm, initial, chunk, reverse, choice))
    return (y, states), (stream, Cm, states)


def _scan_bwd(chunk, reverse, choice, saved, cotangents):
    specs = (_STREAM, _SHARED, _STATES, _TOKENS, _STATES), (_D_STREAM, _D_SHARED, _STATE)
    return _run(choice, "scan_backward", specs, *saved, *cotangents, chunk=chunk, reverse=reverse)


_scan.defvjp(_scan_fwd, _scan_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _blocks(stream: Stream, Cm, chunk: int, reverse: bool, choice: Choice):
    return _run(choice, "blocks_forward", ((_STREAM, _SHARED), _TOKENS), stream, Cm, chunk=chunk, reverse=reverse)


def _blocks_fwd(stream, Cm, chunk, reverse, choice):
    return checkpoint_name(_blocks(stream, Cm, chunk, reverse, choice), SAVED), (stream, Cm)


def _blocks_bwd(chunk, reverse, choice, saved, dy):
    specs = (_STREAM, _SHARED, _TOKENS), (_D_STREAM, _D_SHARED)
    return _run(choice, "blocks_backward", specs, *saved, dy, chunk=chunk, reverse=reverse)


_blocks.defvjp(_blocks_fwd, _blocks_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _frontiers(own: Stream, Cm, reach, clean: Stream | None, states, chunk: int, block_size: int, choice: Choice):
    specs = (_STREAM, _SHARED, _TOKENS, _STREAM, _STATES), _TOKENS
    args = (own, Cm, reach, clean, states)
    return _run(choice, "frontiers_forward", specs, *args, chunk=chunk, block_size=block_size)


def _frontiers_fwd(own, Cm, reach, clean, states, chunk, block_size, choice):
    y = _frontiers(own, Cm, reach, clean, states, chunk, block_size, choice)
    return checkpoint_name(y, SAVED), (own, Cm, reach, clean, states)


def _frontiers_bwd(chunk, block_size, choice, saved, dy):
    specs = (_STREAM, _SHARED, _TOKENS, _STREAM, _STATES, _TOKENS), (_D_STREAM, _D_SHARED, _TOKENS, _D_STREAM, _STATES)
    return _run(choice, "frontiers_backward", specs, *saved, dy, chunk=chunk, block_size=block_size)


_frontiers.defvjp(_frontiers_fwd, _frontiers_bwd)
