"""One training batch, as every loader hands it over and every objective reads it."""

from typing import NamedTuple

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
