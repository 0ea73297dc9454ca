"""What the tokens of the two streams may read, as positions, key intervals and resets: the one place masks are made.

Rows hold documents that start at block edges. A clean token reads earlier tokens of its document, up to itself (causal
prefix) or to the end of its block (bidirectional prefix). A frontier of block k reads the clean blocks of its document
before k, and itself. Key intervals count keys of the row: the context's tokens first, then the stream's.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class CleanStream(NamedTuple):
    """positions [B, T] int32, offset in the document; lo, hi [B, T] int32, key interval; valid [B, T] bool;
    reset [B, T // G + 1] bool, block k starts a document; start [B] int32, tokens in the context before this stream;
    count [B] int32, tokens of the stream that are absorbed."""

    positions: Array
    lo: Array
    hi: Array
    valid: Array
    reset: Array
    start: Array
    count: Array


class FrontierStream(NamedTuple):
    """positions [B, F, G] int32; lo, hi [B, F] int32, interval of clean keys; valid [B, F, G] bool;
    index [B, F] int32, the block each frontier stands for, or None: frontier f is block f."""

    positions: Array
    lo: Array
    hi: Array
    valid: Array
    index: Array | None


def of_rows(
    segments: Array, valid: Array, block_size: int, causal: bool, clean_blocks: int
) -> tuple[CleanStream, Array]:
    """The clean stream of packed rows without a context before them, and each block's first document token.

    segments: [B, K] int, document of each block; valid: [B, L] bool. Returns the stream of the first `clean_blocks`
    blocks and document_start [B, K] int32 in tokens.
    """
    batch, blocks = segments.shape
    before = jnp.concatenate([jnp.full((batch, 1), -1, segments.dtype), segments[:, :-1]], axis=1)
    reset = segments != before  # block 0 always starts a document
    block_start = jnp.arange(blocks, dtype=jnp.int32) * block_size
    document_start = jnp.maximum.accumulate(jnp.where(reset, block_start, 0), axis=1)  # [B, K]

    length = clean_blocks * block_size
    token = jnp.arange(length, dtype=jnp.int32)
    lo = jnp.repeat(document_start[:, :clean_blocks], block_size, axis=1)
    valid = valid[:, :length]
    if causal:
        hi = jnp.broadcast_to(token + 1, lo.shape)
    else:
        valid_end = jnp.max(jnp.where(valid, token + 1, 0).reshape(batch, clean_blocks, block_size), axis=-1, initial=0)
        hi = jnp.repeat(valid_end, block_size, axis=1)
    stream = CleanStream(
        positions=token - lo,
        lo=lo,
        hi=jnp.where(valid, hi, lo),
        valid=valid,
        reset=jnp.concatenate([reset, jnp.zeros((batch, 1), bool)], axis=1)[:, : clean_blocks + 1],
        start=jnp.zeros((batch,), jnp.int32),
        count=jnp.full((batch,), length, jnp.int32),
    )
    return stream, document_start


def frontiers_of_rows(document_start: Array, index: Array | None, valid: Array, block_size: int) -> FrontierStream:
    """The frontiers of blocks `index` [B, F] (None: of all K blocks in order) of rows with `document_start` [B, K]."""
    if index is None:
        block = jnp.broadcast_to(jnp.arange(document_start.shape[1], dtype=jnp.int32), document_start.shape)
        lo = document_start
    else:
        block, lo = index, jnp.take_along_axis(document_start, index, axis=1)
    first = block * block_size
    positions = (first - lo)[..., None] + jnp.arange(block_size, dtype=jnp.int32)
    return FrontierStream(positions, lo, first, valid, index)


def after_context(length: Array, tokens: int, count: Array, block_size: int, causal: bool) -> CleanStream:
    """The clean stream of `tokens` tokens behind a context of `length` [B] tokens; the first `count` [B] count."""
    offset = jnp.arange(tokens, dtype=jnp.int32)
    valid = offset < count[:, None]
    positions = length[:, None] + offset
    hi = (
        positions + 1
        if causal
        else jnp.minimum((offset // block_size + 1) * block_size, count[:, None]) + length[:, None]
    )
    return CleanStream(
        positions=positions,
        lo=jnp.zeros_like(positions),
        hi=jnp.where(valid, hi, 0),
        valid=valid,
        reset=jnp.zeros((length.shape[0], tokens // block_size + 1), bool),
        start=length,
        count=count,
    )


def frontier_after_context(length: Array, valid: Array) -> FrontierStream:
    """The one frontier [B, 1, W] that continues a context of `length` [B] tokens."""
    positions = length[:, None, None] + jnp.arange(valid.shape[-1], dtype=jnp.int32)
    return FrontierStream(
        positions=positions,
        lo=jnp.zeros_like(length)[:, None],
        hi=length[:, None],
        valid=valid,
        index=jnp.zeros((length.shape[0], 1), jnp.int32),
    )
