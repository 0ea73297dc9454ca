"""One training batch, as every loader hands it over and every objective reads it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Batch(NamedTuple):
    """Rows of packed documents. Validity, scoring and document membership are three separate arrays.

    tokens    [B, L] int32   the clean tokens
    segments  [B, K] int32   which document of its row a block belongs to: 1, 2, ...; 0 = a block without a valid token
    valid     [B, L] bool    the token may be read
    scored    [B, L] bool    the token may be masked and has a loss (BOS and pads: never)
    row       [B] int32      number of the row in the step's global batch (training) or in the split (evaluation)
    """

    tokens: Array
    segments: Array
    valid: Array
    scored: Array
    row: Array


def abstract_batch(rows: int, length: int, block_size: int) -> Batch:
    """The shapes and dtypes of a batch, without memory."""
    tokens, blocks = (rows, length), (rows, length // block_size)
    return Batch(
        tokens=jax.ShapeDtypeStruct(tokens, jnp.int32),
        segments=jax.ShapeDtypeStruct(blocks, jnp.int32),
        valid=jax.ShapeDtypeStruct(tokens, jnp.bool_),
        scored=jax.ShapeDtypeStruct(tokens, jnp.bool_),
        row=jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
