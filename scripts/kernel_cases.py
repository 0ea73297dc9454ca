"""The operations that the kernel benchmarks measure, as training and decoding call them, and their inputs."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from kernel_peers import ssd_inputs

from diffjax.kernels import attention as attention_lib
from diffjax.kernels import block_attention, final_state, ssd_block, ssd_frontier, ssd_scan
from diffjax.kernels import ssd as ssd_lib
from diffjax.kernels.attention import OwnBlock
from diffjax.kernels.dispatch import KERNELS, interpreted_kernels, local_platform
from diffjax.models import streams

SSD_OPERATIONS = ("scan", "reverse blocks", "frontiers", "one frontier")
ATTENTION_OPERATIONS = ("blocks", "causal", "frontiers", "one frontier")
WIDE = ("dt", "A", "state")  # inputs that stay in at least float32


class Sizes(NamedTuple):
    """B rows of L tokens in blocks of G; H heads of P; N the SSD state, or the key heads of attention."""

    B: int
    L: int
    G: int
    H: int
    P: int
    N: int

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self._asdict().items())


class Case(NamedTuple):
    """An operation: `function(backend, chunk)(*floats)` returns a tuple of arrays, differentiable in all `floats`."""

    name: str
    function: Callable
    floats: dict[str, np.ndarray]


def backends(family: str) -> list[str]:
    """Of "ssd" or "attention", the reference first."""
    return list({"ssd": ssd_lib, "attention": attention_lib}[family].BACKENDS)


def native(backend: str) -> bool:
    """Whether this process's devices run it; other backends have only their interpreters here."""
    return backend in ("reference", "xla") or KERNELS.get(local_platform()) == backend


def interpreted_unless_native(backend: str):
    return contextlib.nullcontext() if native(backend) else interpreted_kernels()


def documents(sizes: Sizes, rng, many: bool) -> tuple[np.ndarray, np.ndarray]:
    """segments [B, K] and valid [B, L]: rows of one document, or of a few that end in a pad."""
    blocks = sizes.L // sizes.G
    valid = np.ones((sizes.B, sizes.L), bool)
    if not many:
        return np.ones((sizes.B, blocks), np.int32), valid
    starts = rng.random((sizes.B, blocks)) < 0.3
    segments = 1 + np.cumsum(starts, axis=1, dtype=np.int32)
    last = np.concatenate([starts[:, 1:], np.ones((sizes.B, 1), bool)], axis=1)
    valid[:, sizes.G - 1 :: sizes.G] = ~last
    return segments, valid


def ssd_case(operation: str, sizes: Sizes, seed: int = 0, many: bool = True) -> Case:
    """One of SSD_OPERATIONS, on a clean stream of L - G tokens and frontiers of all K blocks (or of one). Frontiers
    come with the scan they start from, as in training. `many` documents in a row, or one."""
    B, L, G, H, P, N = sizes
    rng = np.random.default_rng(seed)
    segments, valid = documents(sizes, rng, many)
    T, K = L - G, L // G
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    # dt is 0 at pads, and x too, as the model makes them.
    dt = lambda valid: rng.uniform(1e-3, 0.1, (*valid.shape, H)).astype(np.float32) * valid[..., None]
    A = -rng.uniform(1, 16, H).astype(np.float32)
    reset = np.asarray(streams.of_rows(jnp.asarray(segments), jnp.asarray(valid), G, False, K - 1)[0].reset).copy()
    reset[:, 0] = False  # the first document goes on from the initial state
    by_block = valid.reshape(B, K, G)
    clean = {"x": normal(B, T, H, P), "dt": dt(valid[:, :T]), "A": A, "B": normal(B, T, 1, N), "C": normal(B, T, 1, N)}
    state = {"state": normal(B, H, P, N)}
    own = lambda F, valid: {
        "x'": normal(B, F, G, H, P), "dt'": dt(valid), "A": A, "B'": normal(B, F, G, 1, N), "C'": normal(B, F, G, 1, N)
    }  # fmt: skip
    index = rng.integers(0, K, (B, 1)).astype(np.int32)
    clean["x"] *= valid[:, :T, None, None]

    def scan(backend, chunk, x, dt, A, Bm, Cm, state):
        return ssd_scan(
            x, dt, A, Bm, Cm, block_size=G, initial_state=state, reset=reset if many else None, chunk=chunk,
            backend=backend,
        )  # fmt: skip

    def scan_all(backend="auto", chunk=None):
        def run(*floats):
            y, boundary = scan(backend, chunk, *floats)
            return y, final_state(boundary)

        return run

    def frontiers(index):
        def with_backend(backend="auto", chunk=None):
            def run(x, dt, A, Bm, Cm, state, *own):
                y, boundary = scan(backend, chunk, x, dt, A, Bm, Cm, state)
                own_x, own_dt, own_B, own_C = own
                denoised = ssd_frontier(
                    own_x, own_dt, A, own_B, own_C, boundary=boundary, frontier_index=index, backend=backend
                )
                return y, denoised, final_state(boundary)

            return run

        return with_backend

    def blocks(backend="auto", chunk=None):
        return lambda *floats: (ssd_block(*floats, reverse=True, chunk=chunk, backend=backend),)

    name = f"ssd {operation}"
    if operation == "scan":
        return Case(name, scan_all, clean | state)
    if operation == "reverse blocks":
        return Case(name, blocks, own(K, by_block))
    if operation == "frontiers":
        return Case(name, frontiers(None), clean | state | own(K, by_block))
    one = np.take_along_axis(by_block, index[..., None], axis=1)
    return Case(name, frontiers(index), clean | state | own(1, one))


def peer_case(sizes: Sizes) -> tuple[Case, np.ndarray]:
    """The scan that peers run too: all L tokens of one document from a zero state, y only; and y's cotangent."""

    def scan(backend="auto", chunk=None):
        def run(x, dt, A, Bm, Cm):
            Bm, Cm = Bm[:, :, None], Cm[:, :, None]
            return (ssd_scan(x, dt, A, Bm, Cm, block_size=sizes.G, chunk=chunk, backend=backend)[0],)

        return run

    *floats, cotangent = ssd_inputs(sizes.B, sizes.L, sizes.H, sizes.P, sizes.N)
    return Case("ssd scan", scan, dict(zip(("x", "dt", "A", "B", "C"), floats, strict=True))), cotangent


def attention_case(operation: str, sizes: Sizes, seed: int = 0, many: bool = True) -> Case:
    """One of ATTENTION_OPERATIONS, with the masks of the model."""
    B, L, G, H, P, key_heads = sizes
    rng = np.random.default_rng(seed)
    segments, valid = (jnp.asarray(array) for array in documents(sizes, rng, many))
    T, K = L - G, L // G
    clean, start = streams.of_rows(segments, valid, G, operation == "causal", K - 1)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    keys = {"k": normal(B, T, key_heads, P), "v": normal(B, T, key_heads, P)}
    if operation in ("blocks", "causal"):
        lo, hi = np.asarray(clean.lo), np.asarray(clean.hi)

        def attend(backend="auto", chunk=None):
            return lambda q, k, v: (
                block_attention(q, k, v, lo, hi, structure=operation, block_size=G, backend=backend),
            )

        return Case(f"attention {operation}", attend, {"q": normal(B, T, H, P)} | keys)
    F = K if operation == "frontiers" else 1
    index, own_valid = None, valid.reshape(B, K, G)
    if operation == "one frontier":  # the one with the most keys before it
        index = jnp.argmax(jnp.arange(K) * G - start, axis=1, keepdims=True).astype(jnp.int32)
        own_valid = jnp.take_along_axis(own_valid, index[..., None], axis=1)
    frontier = streams.frontiers_of_rows(start, index, own_valid, G)
    lo, hi = (np.asarray(jnp.repeat(edge, G, axis=1)) for edge in (frontier.lo, frontier.hi))

    def attend_frontiers(backend="auto", chunk=None):
        def run(q, k, v, own_k, own_v):
            structure = "frontiers" if index is None else None
            own = OwnBlock(own_k, own_v, own_valid)
            return (block_attention(q, k, v, lo, hi, own=own, structure=structure, block_size=G, backend=backend),)

        return run

    own = {"k'": normal(B, F, G, key_heads, P), "v'": normal(B, F, G, key_heads, P)}
    return Case(f"attention {operation}", attend_frontiers, {"q": normal(B, F * G, H, P)} | keys | own)


def cast(case: Case, dtype) -> list[jax.Array]:
    """The inputs as the model holds them: dt, A and states stay float32 (float64 in float64)."""
    wide = jnp.promote_types(dtype, jnp.float32)
    of = lambda name: wide if name.rstrip("'") in WIDE else dtype
    return [jnp.asarray(array, of(name)) for name, array in case.floats.items()]


def rounded(case: Case, dtype) -> Case:
    """The same case with inputs that `dtype` holds exactly, so that errors are those of the computation alone."""
    arrays = (np.asarray(array.astype(jnp.float32)) for array in cast(case, dtype))
    return case._replace(floats=dict(zip(case.floats, arrays, strict=True)))
