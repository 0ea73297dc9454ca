"""Bytes: of the state by shapes and shardings, of contexts by their shapes, of a step's temporaries by estimate."""

import math

import jax
import jax.numpy as jnp

from diffjax.config import Config
from diffjax.models import mamba
from diffjax.models.denoiser import VOCABULARY_MULTIPLE
from diffjax.models.flops import layer_kinds

ESTIMATE_ERROR = 0.3
"""Share by which a compiled step may exceed the estimate; the seed configs on TPUs need 8 % less to 27 % more."""


def bytes_on_a_device(abstract, placement) -> int:
    """Bytes that one device holds of a tree of shapes, under a tree of shardings like it."""
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(abstract), jax.tree.leaves(placement), strict=True)
    )


def context_bytes(denoiser, capacity: int, state_dtype=None) -> int:
    """Bytes of one sequence's context with room for `capacity` tokens: keys and values, states, convolution inputs.

    state_dtype: another dtype for the states of Mamba layers, to compare with figures that store them so.
    """
    layers = jax.eval_shape(lambda: denoiser.empty_context(1, capacity).layers)
    is_mamba = lambda node: isinstance(node, mamba.MambaContext)

    def with_dtype(node):
        if not is_mamba(node) or state_dtype is None:
            return node
        return node._replace(state=jax.ShapeDtypeStruct(node.state.shape, state_dtype))

    leaves = jax.tree.leaves(jax.tree.map(with_dtype, layers, is_leaf=is_mamba))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def temporaries(config: Config, vocab_size: int, mesh_shape: dict[str, int], remat: str, gradient_bytes: int) -> dict:
    """An estimate of what a train step holds besides the state and the batch, bytes a device by part.

    Counted: the sums of gradients and one microbatch's beside them (gradient_bytes each); what the forward pass keeps
    for the backward pass under the policy `remat`; what is alive at the worst moment, either one layer computed again
    with the gradients of all that, or the logits with theirs; and tables that are gathered whole, with their gradient,
    where fsdp splits them. Fusion, padding and the compiler's order of events are not modelled.
    """
    model, objective, length = config.model, config.objective, config.data.sequence_length
    width = jnp.dtype(model.dtype).itemsize
    rows = config.training.batch_size // (config.training.microbatches * mesh_shape["data"] * mesh_shape["fsdp"])
    rows, context, tensor = max(rows, 1), mesh_shape["context"], mesh_shape["tensor"]
    blocks = length // model.block_size
    frontier = model.block_size * (blocks if objective.frontiers == "all" else objective.frontiers)
    clean = length if objective.autoregressive > 0 else length - model.block_size
    tokens = rows * (clean + frontier) / context

    kept = {kind: _kept_in_a_layer(config, kind, remat, width, tensor) for kind in "AM"}
    whole = {kind: _kept_in_a_layer(config, kind, "none", width, tensor) for kind in "AM"}
    kinds = layer_kinds(model)
    saved = tokens * sum(kept[kind] for kind in kinds)
    layer = tokens * max(whole[kind] for kind in kinds) * (1 if remat == "none" else 2)

    head_tokens = frontier + (length if objective.autoregressive > 0 else 0)
    chunk = config.kernels.cross_entropy_chunk
    head_tokens = rows * (head_tokens if chunk is None else min(chunk, head_tokens)) / context
    logits = 2 * head_tokens * vocab_size * max(4, width) / tensor
    padded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    table = padded * model.width * (width + max(4, width)) / tensor if mesh_shape["fsdp"] > 1 else 0
    parts = {
        "gradients": 2 * gradient_bytes,
        "kept_for_backward": saved,
        "alive_at_once": max(layer, logits + (0 if model.tie_embeddings else table)),
        "gathered_tables": table,
    }
    return {name: round(size) for name, size in parts.items()}


def _kept_in_a_layer(config: Config, kind: str, remat: str, width: int, tensor: int) -> float:
    """Bytes a token that one layer leaves for its backward pass."""
    model, m = config.model, config.model.mamba
    if remat == "block":
        return model.width * width
    residual = 4 * model.width * width  # both residual sums and both norms
    gated = (3 if remat == "none" else 2) * model.mlp_width / tensor * width
    if kind == "A":
        heads = 2 * (model.heads + model.kv_heads) * model.head_dim  # query, key, value and what attention gave
        return residual + gated + heads / tensor * width
    inner, pairs = m.heads * m.head_dim, min(model.block_size, 128)
    directions = 1 if m.directions == "forward" else 2
    products = 2 * inner + 2 * m.groups * m.state  # z, x, B, C
    states = 4 * inner * m.state / model.block_size
    scan = 0 if remat == "dots" else (4 * inner * width + 2 * 4 * m.heads * pairs) * directions
    return residual + gated + (products * width * directions + states + scan) / tensor
