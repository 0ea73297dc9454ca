"""The masking schedule: how likely a token is unmasked at time t, and the weight a masked token's loss carries."""

import jax.numpy as jnp
from jax import Array


def alpha(time: Array) -> Array:
    """The linear schedule: a token is still unmasked at time t in [0, 1] with probability 1 - t."""
    return 1.0 - time


def elbo_weight(time: Array) -> Array:
    """-alpha'(t) / (1 - alpha(t)) = 1/t: with it the expected loss bounds -log p from above (arXiv 2503.09573)."""
    return 1.0 / time


def loss_weight(weighting: str, time: Array) -> Array:
    """Weight of a masked token's cross-entropy at time t: 1 for `uniform`, 1/t for `elbo`. Same shape as `time`."""
    return elbo_weight(time) if weighting == "elbo" else jnp.ones_like(time)
