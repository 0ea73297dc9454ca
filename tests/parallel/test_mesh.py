"""The mesh, the strict rule table and the placement of batches, on 8 virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from diffjax.config import MeshConfig
from diffjax.data.batch import Batch
from diffjax.errors import UserError
from diffjax.parallel import mesh as mesh_lib

struct = jax.ShapeDtypeStruct


def make(**sizes):
    return mesh_lib.make_mesh(MeshConfig(**{"data": 1, **sizes}))


def test_minus_one_fills_and_axes_are_auto():
    mesh = make(data=-1, fsdp=2, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.size == jax.device_count()


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"data": 4, "fsdp": 4}, "mesh: data*fsdp*context*tensor = 16, but 8 devices are present; set one axis to -1"),
        ({"data": 2, "fsdp": 3}, "= 6, but 8 devices"),  # make_mesh alone would silently leave two devices unused
        ({"data": -1, "fsdp": 3}, "multiply to 3, which does not divide the 8 devices"),
        ({"data": -1, "fsdp": -1}, "only one axis can be -1, but mesh.data, mesh.fsdp are"),
        ({"tensor": 0}, "mesh.tensor=0"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(UserError) as error:
        make(**sizes)
    assert message in str(error.value)


def test_rules_place_dimensions():
    mesh = make(data=2, fsdp=2, tensor=2)
    tree = {"embed": {"table": struct((128, 32), jnp.float32)}, "norm": {"scale": struct((32,), jnp.float32)}}
    axes = {"embed": {"table": ("vocab", "embed")}, "norm": {"scale": (None,)}}
    placed = mesh_lib.shardings(tree, axes, mesh)
    assert placed["embed"]["table"].spec == PartitionSpec("tensor", "fsdp")
    assert placed["norm"]["scale"].is_fully_replicated
    assert mesh_lib.whole_leaves(tree, placed) == [("norm/scale", 128)]


@pytest.mark.parametrize(
    "shape, axes, rules, message",
    [
        ((6, 768, 3352), ("layers", "embed", "mlpp"), {}, "logical axis 'mlpp' has no rule; nearest 'mlp'"),
        ((30,), ("mlp",), {}, "w/kernel [30]: dim 0 'mlp'=30 does not divide by mesh axis 'tensor'=4; nearest 28, 32"),
        ((2,), ("kv_heads",), {}, "dim 0 'kv_heads'=2 does not divide by mesh axis 'tensor'=4; nearest 4"),
        ((32, 32), ("vocab", "embed"), {"vocab": "fsdp"}, "'vocab' and 'embed' both map to mesh axis 'fsdp'"),
        ((32, 32), ("heads", "mlp"), {}, "'heads' and 'mlp' both map to mesh axis 'tensor'"),
        ((32, 32), ("vocab",), {}, "has 2 dimensions, but 1 logical axes"),
    ],
)  # fmt: skip
def test_strict_rules(shape, axes, rules, message):
    mesh = make(fsdp=2, tensor=4)
    tree, names = {"w": {"kernel": struct(shape, jnp.float32)}}, {"w": {"kernel": axes}}
    with pytest.raises(UserError) as error:
        mesh_lib.shardings(tree, names, mesh, rules={**mesh_lib.RULES, **rules})
    assert str(error.value).startswith("w/kernel [") and message in str(error.value)


def test_large_whole_parameter_is_refused_only_where_parameters_are_split():
    config, whole = MeshConfig(max_replicated_bytes=100), [("norm/scale", 128)]
    mesh_lib.check_whole_leaves(config, make(data=8), whole)
    with pytest.raises(UserError, match=r"norm/scale: 128 bytes stay whole"):
        mesh_lib.check_whole_leaves(config, make(data=4, fsdp=2), whole)


def test_init_never_makes_a_whole_array():
    mesh = make(fsdp=8)
    tree = {"kernel": struct((64, 64), jnp.float32)}
    placed = mesh_lib.shardings(tree, {"kernel": ("embed", "mlp")}, mesh)
    params = mesh_lib.init_sharded(lambda key: {"kernel": jax.random.normal(key, (64, 64))}, placed, jax.random.key(0))
    assert {shard.data.shape for shard in params["kernel"].addressable_shards} == {(8, 64)}
    np.testing.assert_allclose(params["kernel"], jax.random.normal(jax.random.key(0), (64, 64)), atol=1e-6)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 4}])
def test_global_batch_holds_every_row_once_and_reads_each_once(sizes):
    size, length, asked = 16, 8, []
    tokens = np.arange(size * length, dtype=np.int32).reshape(size, length)

    def read_rows(numbers):
        asked.extend(numbers)
        part = tokens[numbers]
        return Batch(part, part[:, :2], part > 3, part > 5, numbers.astype(np.int32))

    batch = mesh_lib.global_batch(read_rows, size, mesh_lib.batch_sharding(make(**sizes)))
    np.testing.assert_array_equal(batch.tokens, tokens)
    np.testing.assert_array_equal(batch.row, np.arange(size))
    assert sorted(asked) == list(range(size))
    shard_rows = size // (sizes["data"] * sizes.get("fsdp", 1))
    assert {shard.data.shape for shard in batch.tokens.addressable_shards} == {(shard_rows, length)}
