"""The state-space scan of Mamba-2 (SSD, arXiv 2405.21060) over a clean stream, over blocks, and over frontiers.

Recurrence, per head with state S [P, N] and decay a_t = dt_t * A <= 0:

    S_t = exp(a_t) S_{t-1} + dt_t x_t (x) Bm_t          y_t = S_t Cm_t

Shapes: B rows, T tokens, H heads, P head dim, g groups of heads sharing Bm and Cm, N state, F frontiers of G tokens.
`x`, `Bm`, `Cm` come in the compute dtype; `dt` (after softplus, 0 at pads), `A` (negative) and all states in at least
float32. A token with dt = 0 leaves every state as it is, to the bit.
"""

import flax.struct
import jax.numpy as jnp
from jax import Array

from diffjax.kernels import ssd_reference, ssd_xla
from diffjax.kernels.dispatch import choose

BACKENDS = {"reference": ssd_reference, "xla": ssd_xla}


@flax.struct.dataclass
class Boundary:
    """What a clean stream leaves behind for frontiers: the state at every block edge, stored or recoverable.

    states  [B, C+1, H, P, N]  at the starts of the C chunks, and after the last token
    reset   [B, n+1] bool      block k starts a document, so that the state at its left edge is 0
    u, cum, count, Bm          the chunked stream, from which `states_at` advances a chunk's state to an edge inside it:
                               u = dt x [B, C, Q, H, P], cum [B, C, Q, H] the sum of a since the chunk's start,
                               count [B, C, Q] int32 the resets since then, Bm [B, C, Q, g, N]. None when every block
                               edge is a chunk start.
    """

    states: Array
    reset: Array
    u: Array | None = None
    cum: Array | None = None
    count: Array | None = None
    Bm: Array | None = None
    block_size: int = flax.struct.field(pytree_node=False, default=1)
    chunk: int = flax.struct.field(pytree_node=False, default=1)


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
      chunk: tokens per chunk, a multiple of block_size or a divisor of it; chosen by shape if None.

    Returns:
      y [B, T, H, P] in x.dtype and the Boundary.

    Raises:
      ValueError: the chunk does not fit the block size.
    """
    batch, length, heads, head_dim = x.shape
    if reset is None:
        reset = jnp.zeros((batch, length // block_size + 1), bool)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, head_dim, Bm.shape[-1]), dt.dtype)
    module = choose("ssd", backend, BACKENDS)
    return module.scan(x, dt, A, Bm, Cm, block_size, initial_state, reset, chunk)


def ssd_block(
    x: Array,
    dt: Array,
    A: Array,
    Bm: Array,
    Cm: Array,
    *,
    seed: Array | None = None,
    reverse: bool = False,
    backend: str = "auto",
) -> Array:
    """Scan F blocks on their own: each starts from its `seed` [B, F, H, P, N], or from zero.

    `reverse=True` runs right to left inside each block and equals flip, scan, flip (the block-restricted reverse scan
    of arXiv 2607.02805, eq. 11-13). x: [B, F, G, H, P]; dt: [B, F, G, H]; Bm, Cm: [B, F, G, g, N]. Returns y like x.
    """
    return choose("ssd", backend, BACKENDS).block(x, dt, A, Bm, Cm, seed, reverse)


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
    block frontier_index[b, f], or of block f when frontier_index is None. Shapes as in `ssd_block`."""
    seed = states_at(boundary, frontier_index)[:, : x.shape[1]]  # the last edge has no frontier in a whole clean stream
    return ssd_block(x, dt, A, Bm, Cm, seed=seed, backend=backend)


def states_at(boundary: Boundary, index: Array | None = None) -> Array:
    """The states at the left edges of blocks `index` [B, F], or of all blocks 0..n. Returns [B, F, H, P, N]."""
    if index is None:
        inside = boundary.u is not None
        states = ssd_xla.all_edges(boundary) if inside else _every_chunk_per_block(boundary)
        reset = boundary.reset
    else:
        token = index * boundary.block_size
        if boundary.u is not None:
            states = ssd_xla.edges_at(boundary, token)
        else:
            states = jnp.take_along_axis(boundary.states, _expand(token // boundary.chunk, 5), axis=1)
        reset = jnp.take_along_axis(boundary.reset, index, axis=1)
    return jnp.where(_expand(reset, 5), 0, states)


def final_state(boundary: Boundary) -> Array:
    """The state after the stream's last token, [B, H, P, N]: what the next call takes as `initial_state`."""
    return boundary.states[:, -1]


def _every_chunk_per_block(boundary: Boundary) -> Array:
    return boundary.states[:, :: boundary.block_size // boundary.chunk][:, : boundary.reset.shape[1]]


def _expand(array: Array, ndim: int) -> Array:
    return array.reshape(array.shape + (1,) * (ndim - array.ndim))
