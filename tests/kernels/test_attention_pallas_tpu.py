"""K10 and K12 for splash attention: interpreted, it equals the dense softmax; it lowers for TPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from diffjax.kernels.attention import OwnBlock, block_attention
from diffjax.kernels.attention_pallas_tpu import refusal
from diffjax.kernels.dispatch import SAVED, interpreted_kernels
from tests.kernels import attention_cases as cases

pytestmark = pytest.mark.xdist_group("attention_pallas_tpu")

CASES = {
    "blocks-G3-packed": lambda: cases.clean_case("G3-packed", "bidirectional"),
    "blocks-long": lambda: cases.clean_case("long", "bidirectional"),
    "causal-G8": lambda: cases.clean_case("G8", "causal"),
    "blocks-empty-row": lambda: cases.clean_case("G4-empty-row", "bidirectional"),
    "frontiers-G1": lambda: cases.all_frontiers_case("G1"),
    "frontiers-G3-packed": lambda: cases.all_frontiers_case("G3-packed"),
    "frontiers-empty-row": lambda: cases.all_frontiers_case("G4-empty-row"),
    "frontiers-one-block": lambda: cases.all_frontiers_case("one-block"),
    "frontiers-long": lambda: cases.all_frontiers_case("long"),
}


@pytest.mark.parametrize("name", CASES)
def test_K10_interpreted(name):
    with interpreted_kernels():
        bars = {"value_bar": 2e-6, "gradient_bar": 5e-6}
        cases.check(CASES[name](), "pallas_tpu", dtype=np.float32, head_dim=64, **bars)


@pytest.mark.parametrize(
    ("structure", "dtype"), [("blocks", "bfloat16"), ("causal", "float32"), ("frontiers", "bfloat16")]
)
def test_K12_lowers_for_a_tpu(structure, dtype):
    """The seed's shape: one kernel forward, two backward, by the mesh alone; none runs twice under remat."""
    mesh = AbstractMesh(
        (1,),
        ("data",),
        (AxisType.Auto,),
        abstract_device=AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
    )
    size, length, frontiers = 32, 1024, structure == "frontiers"
    keys = length - size if frontiers else length
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((4, *shape), dtype)
    args = [array(length, 20, 128), *[array(keys, 20, 128)] * 2]
    if frontiers:
        args += [array(length // size, size, 20, 128)] * 2
    interval = array(length, dtype=jnp.int32)

    def loss(lo, hi, q, k, v, *own):
        own = OwnBlock(*own, jnp.ones((4, length // size, size), bool)) if own else None
        return block_attention(q, k, v, lo, hi, own=own, structure=structure, block_size=size).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(SAVED))
        function = jax.jit(jax.value_and_grad(kept, argnums=range(2, 2 + len(args))))
        module = export.export(function, platforms=["tpu"])(interval, interval, *args).mlir_module()
    assert module.count("stablehlo.custom_call @tpu_custom_call") == 3


def test_refusals_name_rule_and_nearest_value():
    call = {"k_shape": (1, 8, 2, 64), "own_shape": None, "block_size": 1, "dtype": jnp.dtype("bfloat16")}
    assert refusal(q_shape=(1, 8, 2, 64), structure="blocks", **call) is None
    assert "structure" in refusal(q_shape=(1, 8, 2, 64), structure=None, **call)
    assert "own keys" in refusal(q_shape=(1, 8, 2, 64), structure="frontiers", **call)
    assert "the nearest is 64" in refusal(q_shape=(1, 8, 2, 32), structure="blocks", **call)
    assert "524288" in refusal(q_shape=(1, 2**20, 2, 64), structure="blocks", **call | {"k_shape": (1, 2**20, 2, 64)})
