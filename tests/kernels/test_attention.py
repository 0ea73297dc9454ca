"""K10, attention (T5): every backend equals a dense softmax under a mask that is tested key by key; here the plain and
the XLA form, in float64, and what the XLA form costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.kernels.attention import OwnBlock, block_attention
from tests.kernels import attention_cases as cases

pytestmark = pytest.mark.xdist_group("attention")
rows = pytest.mark.parametrize("name", cases.ROWS)


def check(case):
    with jax.enable_x64(True):
        for backend in ("xla", "reference") if case.mask.shape[1] <= 32 else ("xla",):
            cases.check(case, backend, dtype=np.float64, value_bar=1e-10, gradient_bar=1e-10)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [(name, "bidirectional") for name in cases.ROWS]
    + [(name, "causal") for name in ("G3-packed", "G4-empty-row", "long")],
)
def test_K10_clean_stream(name, prefix):
    check(cases.clean_case(name, prefix))


@rows
def test_K10_every_block_a_frontier(name):
    check(cases.all_frontiers_case(name))


@rows
def test_K10_some_frontiers_in_any_order(name):
    check(cases.some_frontiers_case(name))


def test_K10_one_frontier_against_long_contexts_of_several_lengths():
    """More keys than a piece holds, and no multiple of it; an empty context, a full one, edges of pieces."""
    check(cases.decoding_case(2500, (0, 1, 1024, 1025, 2500), size=3))


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("keys", [0, 5])
def test_K10_no_key_at_all_is_zero_with_finite_gradients(backend, keys):
    """In bfloat16: an empty prefix with an all-pad own block, and an empty prefix alone."""
    mask = np.zeros((1, 8, keys), bool)
    for own_valid in (np.zeros((1, 2, 4), bool), None):
        case = cases.Case(mask, own_valid, None, 4)
        args, cotangent = cases.arrays(case, jnp.bfloat16, 4, 2, 6)
        value, *gradients = cases.attend(case, args, cotangent, backend)
        assert value.dtype == jnp.bfloat16 and (np.asarray(value, np.float32) == 0).all()
        assert all((np.asarray(gradient, np.float32) == 0).all() for gradient in gradients)


@pytest.mark.parametrize("kind", ["clean", "frontiers"])
def test_xla_memory_is_linear_in_length(kind):
    """Forward and gradient, compiled for 8k and 32k tokens: four times the memory, and far from an L x L array."""
    size = 32

    def temporary_bytes(length, gradient):
        keys = length if kind == "clean" else length - size
        array = lambda *shape: jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        args = [array(length, 1, 8), array(keys, 1, 8), array(keys, 1, 8)]
        if kind == "frontiers":
            args += [array(length // size, size, 1, 8)] * 2

        def loss(q, k, v, *own):
            token = jnp.arange(length)[None]
            lo, hi = jnp.zeros_like(token), token // size * size + (size if kind == "clean" else 0)
            block = OwnBlock(*own, jnp.ones((1, length // size, size), bool)) if own else None
            structure = "blocks" if kind == "clean" else "frontiers"
            call = functools.partial(block_attention, structure=structure, block_size=size, backend="xla")
            return jnp.sum(call(q, k, v, lo, hi, own=block) ** 2)

        function = jax.grad(loss, argnums=range(len(args))) if gradient else loss
        return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes

    for gradient in (False, True):
        short, long = (temporary_bytes(length, gradient) for length in (2**13, 2**15))
        assert long < 5 * short and long < 2**15 * 2**15 / 16, (gradient, short, long)


def test_xla_reads_no_piece_behind_every_rows_context():
    """What lies there may be anything, and would reach the output of a masked product as NaN."""
    case = cases.decoding_case(4096, (5, 900), size=4)
    args, cotangent = cases.arrays(case, np.float32, 4, 2, 6)
    for array in args[1:3]:
        array[:, 1024:] = np.nan
    assert all(np.isfinite(array).all() for array in cases.attend(case, args, cotangent, "xla"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (1, 9, 2, 6)}, r"v is \[1, 9, 2, 6\], but the others ask for \[1, 5, 2, 6\]"),
        ({"k": (1, 5, 3, 6), "v": (1, 5, 3, 6), "own": (1, 2, 4, 3, 6)}, "4 query heads cannot share 3 key heads"),
        ({"lo": (1, 1)}, r"lo is \[1, 1\], but the others ask for \[1, 8\]"),
        ({"own": (1, 3, 4, 2, 6)}, r"8 queries are not the \[3, 4\] tokens of `own`"),
        ({"structure": "block"}, "structure must be one of"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(change, message):
    shapes = {"q": (1, 8, 4, 6), "k": (1, 5, 2, 6), "v": (1, 5, 2, 6), "lo": (1, 8), "hi": (1, 8)}
    shapes |= {"own": (1, 2, 4, 2, 6), "structure": None} | change
    own, structure = shapes.pop("own"), shapes.pop("structure")
    arrays = {name: jnp.zeros(shape, "int32" if name in ("lo", "hi") else None) for name, shape in shapes.items()}
    own = OwnBlock(jnp.zeros(own), jnp.zeros(own), jnp.ones(own[:3], bool))
    with pytest.raises(ValueError, match=message):
        block_attention(**arrays, own=own, structure=structure, block_size=4)
