"""The parts every layer shares: RMSNorm, bias-free projections, rotary positions, the gated MLP."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from diffjax.kernels.precision import accumulation_dtype


def parameter(
    module: nn.Module, name: str, init: Callable, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> Array:
    """A parameter with its logical axis names: the one place where shape, dtype, sharding and init meet."""
    dtype = accumulation_dtype(module.dtype)
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the trailing axes that `shape` names; statistics in at least float32."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    epsilon: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = parameter(self, "scale", nn.initializers.ones, self.shape, self.axes)
        return (normalise(x, tuple(range(-len(self.shape), 0)), self.epsilon) * scale).astype(self.dtype)


def normalise(x: Array, axis: tuple[int, ...], epsilon: float) -> Array:
    """x / rms(x) over `axis`, in at least float32."""
    x = x.astype(accumulation_dtype(x.dtype))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axis, keepdims=True) + epsilon)


class Projection(nn.Module):
    """A linear map without bias from the last `contract` axes of its input to `out` axes."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: jnp.dtype
    std: float
    contract: int = 1
    out_dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = parameter(self, "kernel", nn.initializers.normal(self.std), self.shape, self.axes)
        rows, columns = math.prod(self.shape[: self.contract]), math.prod(self.shape[self.contract :])
        lead = x.shape[: x.ndim - self.contract]  # not merged: the compiler would gather what lies on mesh axes
        x = x.reshape(*lead, rows).astype(self.dtype)
        y = matmul(x, kernel.reshape(rows, columns), self.out_dtype or self.dtype)
        return y.reshape(*lead, *self.shape[self.contract :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, kernel: Array, dtype) -> Array:
    """x [..., I] @ kernel [I, O] in x's dtype -> [..., O] in `dtype`, with a backward pass of two plain products.

    The kernel stays in its own dtype outside, and its gradient is summed and returned in that. Autodiff would ask for
    the kernel's gradient as dy^T x; XLA then recomputes all that is fused into dy with strided writes, which on CPU
    took half of a training step. Here dy is computed once and x is what gets transposed.
    """
    return _matmul_forward(x, kernel, dtype)[0]


def _matmul_forward(x, kernel, dtype):
    return _product(x, kernel.astype(x.dtype), ([x.ndim - 1], [0]), dtype), (x, kernel)


def _matmul_backward(dtype, saved, dy):
    x, kernel = saved
    dy = jax.lax.optimization_barrier(dy.astype(x.dtype))
    dx = _product(dy, kernel.astype(x.dtype), ([dy.ndim - 1], [1]), x.dtype)
    tokens = list(range(x.ndim - 1))
    return dx, _product(x, dy, (tokens, tokens), kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _product(x: Array, y: Array, contract: tuple[list[int], list[int]], dtype) -> Array:
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=dtype)


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding (arXiv 2104.09864) on pairs (i, i + P/2), angles in at least float32.

    x: [..., heads, P]; positions: [...] int32, the offset in the document.
    """
    half = x.shape[-1] // 2
    dtype = accumulation_dtype(x.dtype)
    frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
    angle = positions[..., None, None].astype(dtype) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), arXiv 2002.05202."""

    width: int
    hidden: int
    dtype: jnp.dtype
    std: float
    output_std: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape, axes = (self.width, self.hidden), ("embed", "mlp")
        gate = Projection(shape, axes, self.dtype, self.std, name="gate")(x)
        up = Projection(shape, axes, self.dtype, self.std, name="up")(x)
        down = Projection((self.hidden, self.width), ("mlp", "embed"), self.dtype, self.output_std, name="down")
        return down(nn.silu(gate) * up)
