"""Dtypes of the kernels: what accumulates in at least float32, and matrix products that keep their promise."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import Precision


def accumulation_dtype(dtype):
    """float32 for float32 and bfloat16, float64 for float64: states, decays, softmax and sums live in it."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum(equation: str, *operands: Array) -> Array:
    """A product in the dtype of its first operand that accumulates in at least float32.

    float32 operands ask for the full float32 product (accelerators would otherwise round them to bfloat16 or TF32);
    bfloat16 operands take the native product.
    """
    dtype = operands[0].dtype
    precision = full_precision(dtype)
    operands = [operand.astype(dtype) for operand in operands]
    return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=accumulation_dtype(dtype))


def dot(a: Array, b: Array, axes: tuple[int, int] = (1, 0)) -> Array:
    """Inside a kernel: two matrices over axis axes[0] of a and axes[1] of b, in the dtype of a, summed in float32."""
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b.astype(a.dtype), contract, precision=full_precision(a.dtype), preferred_element_type=jnp.float32
    )


def full_precision(dtype) -> Precision:
    """What keeps a product of `dtype` whole: 16-bit operands have one native product."""
    return Precision.DEFAULT if jnp.dtype(dtype).itemsize == 2 else Precision.HIGHEST
