"""The denoiser: one description, and the pure functions that training, prefill, commit and decoding share.

    train      logits [B, F, G, V] = train_logits(params, clean [B, L], frontiers [B, F, G], frontier_index [B, F])
    prefill    context             = absorb(params, tokens [B, T], context)
    decode     logits [B, G, V]    = denoise(params, block [B, G], context)

The exactness law: the logits that training computes for a frontier equal those that `denoise` computes from a context
that absorbed the blocks before it, whatever the split into absorb calls, the batch, and what stands after the block.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from diffjax.config import KernelsConfig, ModelConfig
from diffjax.kernels import dispatch
from diffjax.kernels.precision import accumulation_dtype
from diffjax.models import context_shards, streams
from diffjax.models.backbone import CLEAN, FRONTIER, Backbone, empty_context
from diffjax.models.context import Context, capacity_of, grow
from diffjax.models.layers import Projection, RMSNorm, parameter
from diffjax.models.placement import constrain

Params = dict[str, Any]

VOCABULARY_MULTIPLE = 128  # tables are padded to it, the same on every mesh


class DenoiserModule(nn.Module):
    """Owns the parameters. Tokens [.., T] in, hidden states [.., T, D] through the backbone, logits [.., T, V] out."""

    config: ModelConfig
    vocab_size: int
    kernels: KernelsConfig

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.padded = -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.embed = Embedding((self.padded, c.width), dtype, c.init_std)
        self.layers = Backbone(c, self.kernels, dtype)
        self.norm = RMSNorm((c.width,), ("embed",), c.norm_eps, dtype)
        if not c.tie_embeddings:
            logits_dtype = accumulation_dtype(dtype)
            shape, axes = (c.width, self.padded), ("embed", "vocab")
            self.head = Projection(shape, axes, dtype, c.init_std, out_dtype=logits_dtype)

    def __call__(self, clean, frontiers, clean_stream, frontier_stream, context=None, embedding=None):
        """Tokens of either stream, or None -> hidden states (clean, frontier), contexts, auxiliary."""
        hidden = self.embedded(clean, frontiers, embedding)
        hidden, contexts, auxiliary = self.backbone(*hidden, clean_stream, frontier_stream, context)
        if self.is_initializing():
            self.logits(hidden[1])  # makes the parameters of the norm and the head
        return hidden, contexts, auxiliary

    def embedded(self, clean, frontiers, embedding=None):
        """Tokens of either stream, or None -> (clean [B, T, D], frontier [B, F, G, D])."""
        clean = None if clean is None else self.embed(clean, CLEAN)
        frontier = None if frontiers is None else self.embed(frontiers, FRONTIER)
        if embedding is not None:
            frontier = frontier + embedding.astype(frontier.dtype)
        return clean, frontier

    def backbone(self, clean, frontier, clean_stream, frontier_stream, context=None):
        """Hidden states of either stream, or None -> ((clean, frontier), contexts, auxiliary)."""
        return self.layers(clean, frontier, clean_stream, frontier_stream, context)

    def logits(self, hidden: Array) -> Array:
        """[..., D] -> [..., V] in at least float32; the padded rows of the table are cut."""
        hidden = self.norm(hidden)
        logits = self.embed.attend(hidden) if self.config.tie_embeddings else self.head(hidden)
        return logits[..., : self.vocab_size]


class Embedding(nn.Module):
    shape: tuple[int, int]
    dtype: jnp.dtype
    std: float

    def setup(self):
        self.table = parameter(self, "table", nn.initializers.normal(self.std), self.shape, ("vocab", "embed"))

    def __call__(self, tokens: Array, names: tuple[str, ...]) -> Array:
        """tokens [...] int32 -> [..., D], whose dimensions have the logical `names`.

        The table's width is split by a mesh axis that splits rows too. So each device looks up its part of the width
        for the rows of all devices along that axis, and then they exchange parts for rows. Told less, the compiler
        gathers the table or the rows whole on some meshes.
        """
        _, *between, _ = names
        tokens = constrain(tokens, "lookup_batch", *between)
        rows = jnp.take(self.table, tokens, axis=0).astype(self.dtype)
        return constrain(constrain(rows, "lookup_batch", *between, "lookup_embed"), *names)

    def attend(self, hidden: Array) -> Array:
        precision = None if self.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
        table = self.table.astype(self.dtype)
        wide = accumulation_dtype(self.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, precision=precision, preferred_element_type=wide)


@dataclass(frozen=True)
class Denoiser:
    """A frozen description without arrays; every method is pure and may be jitted.

    Args:
      config: the `model` section.
      vocab_size: ids of the tokenizer, the mask among them.
      kernels: backends of the token-mixing operations.
    """

    config: ModelConfig
    vocab_size: int
    kernels: KernelsConfig = field(default_factory=KernelsConfig)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def causal(self) -> bool:
        return self.config.prefix == "causal"

    @property
    def module(self) -> DenoiserModule:
        return DenoiserModule(self.config, self.vocab_size, self.kernels)

    # Parameters

    @functools.partial(jax.jit, static_argnums=0)  # one program; operation by operation it would be hundreds
    def init(self, key: Array) -> Params:
        """Fresh parameters, float32 (float64 if model.dtype is): a nested dict with paths such as
        layers/unit/layer_0/mixer/query/kernel."""
        return nn.unbox(self._boxed(key))

    def abstract_params(self) -> Params:
        """The parameters' shapes and dtypes, without memory."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def logical_axes(self) -> Params:
        """The parameters' logical axis names: a tuple of names (or None) for each."""
        boxed = jax.eval_shape(self._boxed, jax.random.key(0))
        return jax.tree.map(lambda box: tuple(box.names), boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))

    def _boxed(self, key: Array) -> Params:
        size = self.block_size
        clean, segments = jnp.zeros((1, size), jnp.int32), jnp.ones((1, 2), jnp.int32)
        valid = jnp.ones((1, 2 * size), bool)
        clean_stream, document_start = streams.of_rows(segments, valid, size, self.causal, clean_blocks=1)
        frontiers = jnp.zeros((1, 2, size), jnp.int32)
        stream = streams.frontiers_of_rows(document_start, None, jnp.ones_like(frontiers, bool), size)
        with dispatch.shapes_only():  # of the outputs only parameters are kept
            return self.module.init(key, clean, frontiers, clean_stream, stream)["params"]

    # Training

    def train_logits(
        self,
        params: Params,
        clean: Array,
        frontiers: Array,
        frontier_index: Array | None = None,
        segments: Array | None = None,
        clean_valid: Array | None = None,
        frontier_valid: Array | None = None,
        embedding: Array | None = None,
    ) -> Array:
        """Raw finite logits of every frontier against the clean blocks before it, [B, F, G, V] in at least float32.

        Args:
          clean: [B, L] int32, the true tokens; the last block is never read.
          frontiers: [B, F, G] int32, blocks to denoise.
          frontier_index: [B, F] int32, the block each frontier stands for; None: F = K, frontier f is block f.
          segments: [B, K] int32, the document of each block; None: one document a row.
          clean_valid: [B, L] bool, tokens that may be read. frontier_valid: [B, F, G] bool, the same for frontiers.
          embedding: [B, F, G, D], added to the frontiers' embeddings.
        """
        hidden = self.train_hidden(
            params, clean, frontiers, frontier_index, segments, clean_valid, frontier_valid, embedding
        )[0]
        return self.logits(params, hidden)

    def train_hidden(
        self,
        params: Params,
        clean: Array,
        frontiers: Array,
        frontier_index: Array | None = None,
        segments: Array | None = None,
        clean_valid: Array | None = None,
        frontier_valid: Array | None = None,
        embedding: Array | None = None,
        *,
        clean_head: bool = False,
    ) -> tuple[Array, Array | None, dict]:
        """As `train_logits`, before the head: hidden states of the frontiers [B, F, G, D], those of the clean stream
        [B, L, D] if `clean_head` (causal prefix only; `logits` of j predict token j + 1) or None, and the layers'
        auxiliary outputs. All logits together may be too large to hold; `logits` takes any part of the states."""
        batch, length = clean.shape
        blocks = self._whole_blocks(length)
        if clean_head:
            self._require_causal()
        if frontier_index is None and frontiers.shape[1] != blocks:
            raise ValueError(f"frontier_index is needed for {frontiers.shape[1]} frontiers of rows of {blocks} blocks")
        segments = jnp.ones((batch, blocks), jnp.int32) if segments is None else segments
        clean_valid = jnp.ones(clean.shape, bool) if clean_valid is None else clean_valid
        frontier_valid = jnp.ones(frontiers.shape, bool) if frontier_valid is None else frontier_valid

        shards = context_shards.count()
        if blocks % shards:
            raise ValueError(f"{blocks} blocks of a row do not split evenly over the mesh axis context={shards}")
        # The last block is never a context, but shards are of one size.
        clean_blocks = blocks if clean_head or shards > 1 else blocks - 1
        clean_stream, document_start = streams.of_rows(
            segments, clean_valid, self.block_size, self.causal, clean_blocks
        )
        stream = streams.frontiers_of_rows(document_start, frontier_index, frontier_valid, self.block_size)
        tokens = clean[:, : clean_blocks * self.block_size] if clean_blocks else None
        clean_hidden, hidden = self._apply(params, tokens, frontiers, embedding, method="embedded")
        backbone = functools.partial(self._apply, method="backbone")
        if shards > 1:
            backbone = context_shards.on_shards(backbone)
        layers = {"layers": params["layers"]}
        (clean_hidden, hidden), _, auxiliary = backbone(layers, clean_hidden, hidden, clean_stream, stream)
        return hidden, clean_hidden if clean_head else None, auxiliary

    def logits(self, params: Params, hidden: Array) -> Array:
        """Raw logits of hidden states, [..., D] -> [..., V] in at least float32."""
        return self._apply(params, hidden, method=DenoiserModule.logits)

    def clean_logits(self, params: Params, tokens: Array) -> Array:
        """Next-token logits of the clean stream (causal prefix only), [B, T] -> [B, T, V]: j predicts token j + 1."""
        self._require_causal()
        batch, length = tokens.shape
        start, count = jnp.zeros((batch,), jnp.int32), jnp.full((batch,), length, jnp.int32)
        stream = streams.after_context(start, length, count, self.block_size, self.causal)
        (hidden, _), _, _ = self._apply(params, tokens, None, stream, None)
        return self.logits(params, hidden)

    # Contexts

    def empty_context(self, batch: int, capacity: int) -> Context:
        """A context that has read nothing, with room for `capacity` tokens (which Mamba layers do not need)."""
        layers = empty_context(self.config, jnp.dtype(self.config.dtype), batch, capacity)
        return Context(jnp.zeros((batch,), jnp.int32), layers)

    def grow_context(self, context: Context, capacity: int) -> Context:
        """The same context with room for `capacity` tokens."""
        return grow(context, capacity)

    def absorb(self, params: Params, tokens: Array, context: Context, count: Array | None = None) -> Context:
        """Read finished tokens [B, T] into the context; of row b only the first count[b] (None: all).

        A row with count 0 keeps its context to the bit. With a bidirectional prefix T and count are whole blocks.

        Raises:
          ValueError: T is not a whole number of blocks (bidirectional), or a context outside jit is too small. Inside
            jit a context that overflowed gives NaN logits.
        """
        batch, length = tokens.shape
        if not self.causal:
            self._whole_blocks(length)
        count = jnp.full((batch,), length, jnp.int32) if count is None else count
        after = context.length + count
        capacity = capacity_of(context)
        if capacity is not None and not isinstance(after, jax.core.Tracer) and int(after.max()) > capacity:
            raise ValueError(f"a context of capacity {capacity} cannot hold {int(after.max())} tokens; grow it first")
        stream = streams.after_context(context.length, length, count, self.block_size, self.causal)
        _, layers, _ = self._apply(params, tokens, None, stream, None, context=context.layers)
        return Context(after, layers)

    def denoise(
        self,
        params: Params,
        block: Array,
        context: Context,
        valid: Array | None = None,
        embedding: Array | None = None,
    ) -> Array:
        """Raw logits [B, G, V], in at least float32, of the frontier block [B, G] that continues the context.

        The context is not changed. `valid` [B, G] bool cuts a last block; `embedding` [B, G, D] is added to its own.
        """
        valid = jnp.ones(block.shape, bool) if valid is None else valid
        stream = streams.frontier_after_context(context.length, valid[:, None])
        embedding = None if embedding is None else embedding[:, None]
        (_, hidden), _, _ = self._apply(
            params, None, block[:, None], None, stream, context=context.layers, embedding=embedding
        )
        logits = self.logits(params, hidden)
        capacity = capacity_of(context)
        if capacity is None:
            return logits[:, 0]
        overflowed = (context.length > capacity)[:, None, None]
        return jnp.where(overflowed, jnp.nan, logits[:, 0])

    def _apply(self, params: Params, *args, **kwargs):
        return self.module.apply({"params": params}, *args, **kwargs)

    def _whole_blocks(self, length: int) -> int:
        if length % self.block_size:
            raise ValueError(f"{length} tokens are no whole number of blocks of {self.block_size}")
        return length // self.block_size

    def _require_causal(self) -> None:
        if not self.causal:
            raise ValueError("next-token logits need model.prefix=causal; a bidirectional prefix sees the next token")
