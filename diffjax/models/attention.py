"""The attention mixer: grouped queries, rotary positions, and a context of keys and values."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from diffjax.config import ModelConfig
from diffjax.kernels.attention import OwnBlock, block_attention
from diffjax.models import context_shards
from diffjax.models.layers import Projection, RMSNorm, rotate
from diffjax.models.streams import CleanStream, FrontierStream


class AttentionContext(NamedTuple):
    """Keys (after rotation) and values of the tokens read so far: k, v [B, S, Hkv, P] in the compute dtype.

    It is context and boundary in one: a frontier reads the keys of its own interval.
    """

    k: Array
    v: Array


class Attention(nn.Module):
    config: ModelConfig
    dtype: jnp.dtype
    output_std: float
    backend: str

    def setup(self):
        c = self.config
        inward = lambda heads, axis: Projection(
            (c.width, heads, c.head_dim), ("embed", axis, "head_dim"), self.dtype, c.init_std
        )
        self.query = inward(c.heads, "heads")
        self.key = inward(c.kv_heads, "kv_heads")
        self.value = inward(c.kv_heads, "kv_heads")
        shape, axes = (c.heads, c.head_dim, c.width), ("heads", "head_dim", "embed")
        self.output = Projection(shape, axes, self.dtype, self.output_std, contract=2)
        if c.qk_norm:
            self.query_norm = RMSNorm((c.head_dim,), ("head_dim",), c.norm_eps, self.dtype)
            self.key_norm = RMSNorm((c.head_dim,), ("head_dim",), c.norm_eps, self.dtype)

    def clean(self, u: Array, stream: CleanStream, context: AttentionContext | None):
        """u [B, T, D] -> (out [B, T, D], boundary). A context is written at each row's own length; without one the
        stream's own keys are the boundary, those of all shards where rows are split."""
        q, k, v = self._project(u, stream.positions)
        if context is None:
            boundary = AttentionContext(context_shards.gather_tokens(k), context_shards.gather_tokens(v))
        else:
            boundary = self._write(context, k, v, stream)
        structure = None
        if context is None and context_shards.axis() is None:
            structure = "causal" if self.config.prefix == "causal" else "blocks"
        y = block_attention(
            q,
            boundary.k,
            boundary.v,
            stream.lo,
            stream.hi,
            structure=structure,
            block_size=self.config.block_size,
            backend=self.backend,
        )
        return self.output(y), boundary

    def frontier(self, u: Array, stream: FrontierStream, boundary: AttentionContext) -> Array:
        """u [B, F, G, D] -> [B, F, G, D]: every frontier reads its interval of the boundary's keys, and itself."""
        batch, frontiers, size, _ = u.shape
        q, k, v = self._project(u, stream.positions)
        y = block_attention(
            q.reshape(batch, frontiers * size, *q.shape[3:]),
            boundary.k,
            boundary.v,
            jnp.repeat(stream.lo, size, axis=1),
            jnp.repeat(stream.hi, size, axis=1),
            own=OwnBlock(k, v, stream.valid),
            structure="frontiers" if stream.index is None and context_shards.axis() is None else None,
            block_size=size,
            backend=self.backend,
        )
        return self.output(y.reshape(q.shape))

    def empty_context(self, batch: int) -> AttentionContext:
        return empty_context(self.config, self.dtype, batch, capacity=0)

    def to_context(self, boundary: AttentionContext, stream: CleanStream) -> AttentionContext:
        return boundary

    def to_boundary(self, context: AttentionContext) -> AttentionContext:
        return context

    def _project(self, u: Array, positions: Array) -> tuple[Array, Array, Array]:
        q, k, v = self.query(u), self.key(u), self.value(u)
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        theta = self.config.rope_theta
        return rotate(q, positions, theta), rotate(k, positions, theta), v

    def _write(self, context: AttentionContext, k: Array, v: Array, stream: CleanStream) -> AttentionContext:
        row = jnp.arange(k.shape[0])[:, None]
        slot = jnp.where(stream.valid, stream.positions, context.k.shape[1])  # a slot out of bounds is dropped
        put = lambda old, new: old.at[row, slot].set(new.astype(old.dtype), mode="drop")
        return AttentionContext(put(context.k, k), put(context.v, v))


def empty_context(config: ModelConfig, dtype, batch: int, capacity: int) -> AttentionContext:
    """A context that has read nothing, with room for `capacity` tokens."""
    shape = (batch, capacity, config.kv_heads, config.head_dim)
    return AttentionContext(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
