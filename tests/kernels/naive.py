"""The three operations of `diffjax.kernels.ssd_stream`, written from their formulas, chunk by chunk with dense masks.

Truth for the backends' values, and by `jax.vjp` for their gradients; run it in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.kernels.ssd_stream import Stream


def pairs(exponent, mask):
    """exp(exponent) where mask, else 0: [..., Q, Q, H] by mask [..., Q, Q]."""
    return jnp.exp(jnp.where(mask[..., None], exponent, -jnp.inf))


def per_head(array, heads):
    """[B, T, g, N] -> [B, T, H, N]"""
    return jnp.repeat(array, heads // array.shape[2], axis=2)


def order(size, reverse):
    i = np.arange(size)
    return i[:, None] <= i if reverse else i[:, None] >= i


def within(stream, Cm, mask):
    """One chunk's own part: [B, Q, H, P]."""
    heads = stream.x.shape[2]
    scores = jnp.einsum("bihn,bjhn->bijh", per_head(Cm, heads), per_head(stream.Bm, heads))
    decay = pairs(stream.cum[:, :, None] - stream.cum[:, None], mask)
    return jnp.einsum("bijh,bjh,bjhp->bihp", scores * decay, stream.dt, stream.x)


def from_state(state, cum, Cm, reads):
    """[B, H, P, N] read by tokens where `reads` [B, Q]."""
    decay = jnp.exp(jnp.where(reads[..., None], cum, -jnp.inf))
    return jnp.einsum("bih,bihn,bhpn->bihp", decay, per_head(Cm, cum.shape[2]), state)


def chunks(length, chunk, reverse=False):
    parts = [slice(start, start + chunk) for start in range(0, length, chunk)]
    return parts[::-1] if reverse else parts


def take(stream, part):
    return Stream(*(array[:, part] for array in stream))


def scan(stream, Cm, initial, *, chunk, reverse=False):
    states, y = [initial], []
    last = 0 if reverse else -1
    heads = stream.x.shape[2]
    for part in chunks(stream.x.shape[1], chunk, reverse):
        s, C = take(stream, part), Cm[:, part]
        same = s.count[:, :, None] == s.count[:, None]
        y.append(within(s, C, order(chunk, reverse) & same) + from_state(states[-1], s.cum, C, s.count == 0))
        end = s.cum[:, last]
        weight = jnp.exp(
            jnp.where((s.count == s.count[:, last : last + 1 or None])[..., None], end[:, None] - s.cum, -jnp.inf)
        )
        kept = jnp.where((s.count[:, last] == 0)[:, None], jnp.exp(end), 0)
        added = jnp.einsum("bjh,bjh,bjhp,bjhn->bhpn", weight, s.dt, s.x, per_head(s.Bm, heads))
        states.append(kept[..., None, None] * states[-1] + added)
    y = y[::-1] if reverse else y
    return jnp.concatenate(y, axis=1), jnp.stack(states, axis=1)


def blocks(stream, Cm, *, chunk, reverse=False):
    y = []
    for part in chunks(stream.x.shape[1], chunk):
        s = take(stream, part)
        y.append(within(s, Cm[:, part], order(chunk, reverse) & (s.count[:, :, None] == s.count[:, None])))
    return jnp.concatenate(y, axis=1)


def frontiers(own, Cm, reach, clean, states, *, chunk, block_size):
    y, heads = [], own.x.shape[2]
    block = np.arange(chunk) // block_size
    for k, part in enumerate(chunks(own.x.shape[1], chunk)):
        f, c, C, far = take(own, part), take(clean, part), Cm[:, part], reach[:, part]
        earlier = (block[:, None] > block) & (f.count[:, :, None] == c.count[:, None])
        decay = pairs(far[:, :, None] - c.cum[:, None], earlier)
        scores = jnp.einsum("bihn,bjhn->bijh", per_head(C, heads), per_head(c.Bm, heads))
        from_clean = jnp.einsum("bijh,bjh,bjhp->bihp", scores * decay, c.dt, c.x)
        mine = np.broadcast_to(order(chunk, False) & (block[:, None] == block), (len(C), chunk, chunk))
        y.append(from_clean + within(f, C, jnp.asarray(mine)) + from_state(states[:, k], far, C, f.count == 0))
    return jnp.concatenate(y, axis=1)


def problem(
    rng,
    *,
    batch=2,
    length=256,
    heads=4,
    channels=32,
    groups=1,
    state=16,
    chunk=128,
    block_size=32,
    decay=1.0,
    reset_rate=0.3,
    dtype=np.float64,
):
    """Consistent inputs in float64 numpy: a clean stream with resets, frontiers of its blocks, states, cotangents."""
    tensor = lambda *shape: rng.standard_normal(shape).astype(dtype)
    A = -rng.uniform(0.1, 2.0, heads) * decay
    blocks_ = length // block_size

    def stream():
        dt = rng.uniform(0.01, 0.3, (batch, length, heads)).astype(dtype)
        return tensor(batch, length, heads, channels), dt, tensor(batch, length, groups, state)

    starts = np.zeros((batch, length), bool)
    starts[:, ::block_size] = rng.random((batch, blocks_)) < reset_rate
    count = starts.reshape(batch, -1, chunk).cumsum(-1).reshape(batch, length).astype(np.int32)

    def since(a, where, size):
        """Inclusive sums of a [B, T, H] that start anew every `size` tokens and where `where` [B, T]."""
        out, run = np.zeros_like(a), 0
        for t in range(length):
            run = np.where((where[:, t] | (t % size == 0))[:, None], 0, run) + a[:, t]
            out[:, t] = run
        return out

    x, dt, Bm = stream()
    clean = Stream(x, dt, since(dt * A, starts, chunk), count, Bm)
    fx, fdt, fB = stream()
    own_cum = since(fdt * A, np.zeros_like(starts), block_size)
    before = np.repeat(clean.cum.reshape(batch, blocks_, block_size, heads)[:, :, -1], block_size, axis=1)
    before = np.concatenate([np.zeros_like(before[:, :block_size]), before[:, :-block_size]], axis=1)
    first = (np.arange(length) % chunk < block_size)[:, None]
    own = Stream(fx, fdt, own_cum, count, fB)
    reach = np.where(first, 0, before) + own_cum
    from_right = lambda a, size: since(a[:, ::-1], np.zeros_like(starts), size)[:, ::-1]
    zero = np.zeros_like(count)
    index = np.broadcast_to(np.arange(length, dtype=np.int32) % chunk // block_size, count.shape)
    return {
        "reversed": Stream(x, dt, from_right(dt * A, chunk), zero, Bm),  # for scan, reverse=True: no resets there
        "blocks": Stream(x, dt, since(dt * A, np.zeros_like(starts), block_size), index, Bm),
        "blocks_reversed": Stream(x, dt, from_right(dt * A, block_size), index, Bm),
        "clean": clean,
        "own": own,
        "reach": reach,
        "Cm": tensor(batch, length, groups, state),
        "initial": tensor(batch, heads, channels, state),
        "states": tensor(batch, length // chunk + 1, heads, channels, state),
        "dy": tensor(batch, length, heads, channels),
        "d_states": tensor(batch, length // chunk + 1, heads, channels, state),
        "A": A,
    }


def abstract(dtype, *, batch=1, length=256, heads=12, channels=32, state=64, chunk=128):
    """Shapes alone, for lowering: a stream and states."""
    struct = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
    x, dt = struct(dtype, batch, length, heads, channels), struct("float32", batch, length, heads)
    Bm = struct(dtype, batch, length, 1, state)
    stream = Stream(x, dt, dt, struct("int32", batch, length), Bm)
    return stream, struct("float32", batch, length // chunk + 1, heads, channels, state)
