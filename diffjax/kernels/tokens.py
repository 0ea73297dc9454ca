"""Token axes of kernels' arrays: whole chunks, and padding."""

import jax.numpy as jnp
from jax import Array


def by_chunk(array: Array, chunk: int) -> Array:
    """[B, T, ...] -> [B, C, Q, ...]"""
    return array.reshape(array.shape[0], array.shape[1] // chunk, chunk, *array.shape[2:])


def pad_tokens(array: Array, length: int, value: int = 0) -> Array:
    """[B, T, ...] -> [B, length, ...], `value` behind the last token or cut."""
    if array.shape[1] >= length:
        return array[:, :length]
    widths = [(0, 0), (0, length - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, widths, constant_values=value)
