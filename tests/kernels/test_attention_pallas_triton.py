"""K10 and K12 for the GPU kernel: interpreted, it equals the dense softmax; it lowers for GPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from diffjax.kernels.attention import OwnBlock, block_attention
from diffjax.kernels.attention_pallas_triton import refusal
from diffjax.kernels.dispatch import SAVED, interpreted_kernels
from tests.kernels import attention_cases as cases

pytestmark = pytest.mark.xdist_group("attention_pallas_triton")

CASES = {
    "clean-G8": lambda: cases.clean_case("G8", "bidirectional"),
    "causal-long": lambda: cases.clean_case("long", "causal"),
    "all-G1": lambda: cases.all_frontiers_case("G1"),
    "all-G32": lambda: cases.all_frontiers_case("G32"),
    "some-G3-packed": lambda: cases.some_frontiers_case("G3-packed"),
    "some-long": lambda: cases.some_frontiers_case("long"),
    "one-block-no-clean-key": lambda: cases.all_frontiers_case("one-block"),
    "clean-empty-row": lambda: cases.clean_case("G4-empty-row", "bidirectional"),
    "decoding": lambda: cases.decoding_case(700, (0, 65, 700), size=4),  # keys are divided among programs
}


@pytest.mark.parametrize("name", CASES)
def test_K10_interpreted(name):
    with interpreted_kernels():
        bars = {"value_bar": 2e-6, "gradient_bar": 5e-6}
        cases.check(CASES[name](), "pallas_triton", dtype=np.float32, head_dim=32, **bars)


@pytest.mark.parametrize("keys", [5, 70])
def test_an_interval_may_end_behind_the_last_key(keys):
    """What fills the last tile is no key; values and gradients are those of an interval that ends with the keys."""
    rng = np.random.default_rng(keys)
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, 2, 16)), jnp.float32) for length in (8, keys, keys))
    lo = jnp.zeros((2, 8), jnp.int32)

    def run(backend, end):
        hi = jnp.full((2, 8), end, jnp.int32)
        value, pullback = jax.vjp(lambda *args: block_attention(*args, lo, hi, backend=backend), q, k, v)
        return value, *pullback(value)

    with interpreted_kernels():
        for one, other in zip(run("pallas_triton", keys + 50), run("xla", keys), strict=True):
            np.testing.assert_allclose(one, other, rtol=5e-6, atol=5e-6)


def lowered(dtype, *, batch, queries, keys, heads, key_heads, head_dim, size):
    mesh = AbstractMesh(
        (1,),
        ("data",),
        (AxisType.Auto,),
        abstract_device=AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    )
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((batch, *shape), dtype)
    own = (queries // size, size, key_heads, head_dim)
    args = [array(queries, heads, head_dim), *[array(keys, key_heads, head_dim)] * 2, array(*own), array(*own)]
    interval = array(queries, dtype=jnp.int32)

    def loss(lo, hi, q, k, v, own_k, own_v):
        own = OwnBlock(own_k, own_v, jnp.ones((batch, queries // size, size), bool))
        return block_attention(q, k, v, lo, hi, own=own, block_size=size).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(SAVED))
        function = jax.jit(jax.value_and_grad(kept, argnums=(2, 3, 4, 5, 6)))
        check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
        return export.export(function, platforms=["cuda"], disabled_checks=[check])(interval, interval, *args)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_K12_lowers_for_a_gpu(dtype):
    """Training and decoding shapes of the seed: one kernel forward, three backward, chosen by the mesh alone; none runs
    twice under remat."""
    heads = {"heads": 20, "head_dim": 128, "size": 32}
    training = lowered(dtype, batch=4, queries=1024, keys=992, key_heads=20, **heads)
    decoding = lowered(dtype, batch=8, queries=32, keys=32768, key_heads=5, **heads)
    assert training.mlir_module().count("xla.gpu.triton") == decoding.mlir_module().count("xla.gpu.triton") == 4


def test_refusals_name_rule_and_nearest_value():
    call = {"k_shape": (1, 8, 2, 64), "own_shape": None, "structure": None, "block_size": 1}
    assert refusal(q_shape=(1, 8, 2, 64), dtype=jnp.dtype("bfloat16"), **call) is None
    assert "the nearest is 128" in refusal(q_shape=(1, 8, 2, 96), dtype=jnp.dtype("float32"), **call)
    assert "float64" in refusal(q_shape=(1, 8, 2, 64), dtype=jnp.dtype("float64"), **call)
    assert "2^31" in refusal(q_shape=(64, 2**20, 1, 64), dtype=jnp.dtype("float32"), **call)
