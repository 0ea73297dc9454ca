"""Proposals: the token that would stand at each position of a window, and how sure the model is of it.

Tokens are drawn here, positions in `rules`: never both from one float32 categorical over {stay masked} + V, whose noise
grid loses the rare tokens (arXiv 2409.02908).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Proposal(NamedTuple):
    """One token per position. Its probabilities are of the clean law: after `forbid`, before temperature and top-p."""

    token: jax.Array  # [B,W] int32
    logp: jax.Array  # [B,W] float32, log-probability of `token`, nats
    sound: jax.Array  # [B,W] bool, False where the logits hold a NaN or leave no token to choose
    top: jax.Array | None = None  # [B,W] float32, largest probability
    margin: jax.Array | None = None  # [B,W] float32, largest minus second largest probability
    entropy: jax.Array | None = None  # [B,W] float32, nats
    full_logp: jax.Array | None = None  # [B,W,V] float32


def propose(key, logits, forbid, temperature, top_p, needs=frozenset()) -> Proposal:
    """Draw a token per position from softmax(logits / temperature), cut to its nucleus.

    key: [B] random keys. logits: [B,W,V], any float type. forbid: [V] or [B,V] bool, ids that may never be drawn.
    temperature, top_p: scalars or [B]; temperature 0 is exactly the argmax (the lowest id among equals) and reads
    neither key nor top_p. needs: which of "top", "margin", "entropy", "full_logp" to fill in; static.
    """
    logits = logits.astype(jnp.float32)
    forbid = forbid if forbid.ndim == 1 else forbid[:, None, :]
    allowed = jnp.where(forbid, -jnp.inf, logits)
    sound = jnp.isfinite(jnp.max(logits, axis=-1)) & jnp.isfinite(jnp.max(allowed, axis=-1))
    log_probs = jax.nn.log_softmax(allowed)
    temperature, top_p = (jnp.reshape(jnp.asarray(knob, jnp.float32), (-1, 1, 1)) for knob in (temperature, top_p))

    token = lax.cond(
        jnp.any(temperature > 0),
        lambda: _draw(key, allowed, temperature, top_p),
        lambda: jnp.argmax(allowed, axis=-1).astype(jnp.int32),
    )
    logp = jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0]

    optional = {}
    if needs & {"top", "margin"}:
        best = jnp.exp(lax.top_k(log_probs, 2)[0])
        optional |= {"top": best[..., 0], "margin": best[..., 0] - best[..., 1]}
    if "entropy" in needs:
        probs = jnp.exp(log_probs)
        optional["entropy"] = -jnp.sum(jnp.where(probs > 0, probs * log_probs, 0.0), axis=-1)
    if "full_logp" in needs:
        optional["full_logp"] = log_probs
    return Proposal(token, logp, sound, **optional)


def nucleus(logits, top_p):
    """Set to -inf all but the smallest set of most probable tokens with mass >= top_p.

    The token that crosses top_p is kept (inclusive nucleus); among equals the lowest id counts as more probable.
    logits: [..., V] float32. top_p: broadcasts against [..., 1], above 0. Returns logits of the same shape.
    """
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    mass = jnp.cumsum(jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1), axis=-1)
    kept = 1 + jnp.sum(mass[..., :-1] < top_p, axis=-1, keepdims=True)
    last = jnp.take_along_axis(order, kept - 1, axis=-1)
    least = jnp.take_along_axis(logits, last, axis=-1)
    ids = jnp.arange(logits.shape[-1])
    return jnp.where((logits > least) | ((logits == least) & (ids <= last)), logits, -jnp.inf)


def gumbel(key, shape):
    """Standard Gumbel noise in float32, always finite: 0 * noise is 0 and -inf + noise is -inf."""
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(-jnp.log(jax.random.uniform(key, shape, jnp.float32, minval=tiny, maxval=1.0)))


def _draw(key, allowed, temperature, top_p):
    """argmax(l + T g) is a draw from softmax(l / T): allowed [B,W,V], knobs [B or 1,1,1] -> [B,W] int32."""
    filtered = (temperature > 0) & (top_p < 1)

    def cut(logits):
        tempered = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1.0)
        return jnp.where(filtered & jnp.isneginf(nucleus(tempered, top_p)), -jnp.inf, logits)

    allowed = lax.cond(jnp.any(filtered), cut, lambda logits: logits, allowed)
    noise = jax.vmap(lambda row_key: gumbel(row_key, allowed.shape[1:]))(key)
    return jnp.argmax(allowed + temperature * noise, axis=-1).astype(jnp.int32)
