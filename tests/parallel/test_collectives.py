"""Collectives read from HLO text: hand-written lines of every printed form, and programs whose exchanges are known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diffjax.config import MeshConfig
from diffjax.parallel.collectives import ArrayType, collectives
from diffjax.parallel.mesh import make_mesh

TEXT = """\
HloModule jit_f, entry_computation_layout={(f32[4,8]{1,0})->f32[32,8]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%never_called (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-reduce.9 = f32[8]{0} all-reduce(%p), to_apply=%add
}

%fused (p: bf16[1,10,768]) -> bf16[1,2560,768] {
  %q = bf16[1,10,768]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %gather.7 = bf16[1,2560,768]{2,0,1:T(2,128)(2,1)S(1)} all-gather(%q), channel_id=298, metadata={op_name="mlp"}
}

%fused.1 (p: bf16[1,10,768]) -> bf16[1,2560,768] {
  %r = bf16[1,10,768]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.8 = bf16[1,2560,768]{2,0,1:T(2,128)(2,1)S(1)} all-gather(%r), channel_id=298, dimensions={1}
}

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %v = f32[8]{0} get-tuple-element(%carry), index=1
  %part = bf16[1,10,768]{2,1,0} bitcast(%v)
  %first = bf16[1,2560,768]{2,1,0} fusion(%part), kind=kOutput, calls=%fused
  %second = bf16[1,2560,768]{2,1,0} fusion(%part), kind=kOutput, calls=%fused.1
  %pair = (f32[8]{0}, pred[3,5]{1,0}) all-reduce(%v, %flags), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %v)
}

%condition (carry.1: (s32[], f32[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(28)
  %carry.1 = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  ROOT %lt = pred[] compare(%j, %bound), direction=LT
}

%data_condition (carry.2: (s32[], s32[])) -> pred[] {
  %carry.2 = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%carry.2), index=0
  %n = s32[] get-tuple-element(%carry.2), index=1
  ROOT %lt.1 = pred[] compare(%k, %n), direction=LT
}

%data_body (carry.3: (s32[], s32[])) -> (s32[], s32[]) {
  %carry.3 = (s32[], s32[]) parameter(0)
  %m = s32[] get-tuple-element(%carry.3), index=0
  ROOT %all-to-all.3 = s32[] all-to-all(%m), channel_id=5
}

ENTRY %main (a: f32[4,8]) -> f32[32,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %start = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%a), channel_id=2, dimensions={0}
  %loop = (s32[], f32[8]{0}) while(%zero), condition=%condition, body=%body
  %other = (s32[], s32[]) while(%zero.1), condition=%data_condition, body=%data_body
  ROOT %done = f32[32,8]{1,0} all-gather-done(%start)
}
"""


def test_forms_of_the_text():
    gather, pair, exchange, start = collectives(TEXT)
    assert gather.kind == "all-gather" and gather.times == 28 and gather.op_name == "mlp"
    assert gather.operands == (ArrayType("bf16", (1, 10, 768)),)
    assert gather.results == (ArrayType("bf16", (1, 2560, 768)),) and gather.bytes == 2560 * 768 * 2
    assert (pair.kind, pair.times, pair.bytes) == ("all-reduce", 28, 8 * 4 + 3 * 5)
    assert (exchange.kind, exchange.times) == ("all-to-all", None)
    assert (start.kind, start.times, start.bytes) == ("all-gather", 1, 32 * 8 * 4)
    assert start.results == (ArrayType("f32", (32, 8)),)


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no HLO"):
        collectives("module @jit_f {}")


def test_of_compiled_programs():
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())

    def compiled(function, argument):
        jitted = jax.jit(function, in_shardings=split, out_shardings=whole)
        return collectives(jitted.lower(argument).compile().as_text())

    x, kernels = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((24, 32, 32), jnp.float32)
    assert compiled(lambda x: x.T.T, jax.ShapeDtypeStruct((8,), jnp.float32))[0][:4] == (
        "all-gather", (ArrayType("f32", (1,)),), (ArrayType("f32", (8,)),), 1,
    )  # fmt: skip
    (total,) = compiled(lambda x: x.sum(), x)
    assert (total.kind, total.results, total.times) == ("all-reduce", (ArrayType("f32", ()),), 1)

    def gathered_in_a_loop(kernels):
        kernels = jax.lax.with_sharding_constraint(kernels, NamedSharding(mesh, PartitionSpec(None, "fsdp")))

        def body(x, kernel):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(kernel, whole)), None

        return jax.lax.scan(body, jnp.ones((4, 32)), kernels)[0]

    (inside,) = [one for one in compiled(gathered_in_a_loop, kernels) if one.times == 24]
    assert inside.kind == "all-gather"
    assert [array.bytes for array in (*inside.operands, *inside.results)] == [4 * 32 * 4, 32 * 32 * 4]


def test_exchanges_by_hand_are_told_apart():
    """Inside `jax.shard_map` all have one channel."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))

    def exchange(x, y):
        return [jax.lax.all_gather(array, "fsdp") for array in (x, x + y, y[:1])]

    split, whole = PartitionSpec("fsdp"), PartitionSpec()
    by_hand = jax.shard_map(exchange, mesh=mesh, in_specs=split, out_specs=whole, check_vma=False)
    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    found = collectives(jax.jit(by_hand).lower(x, x).compile().as_text())
    assert sum(len(one.results) for one in found) == 3 and {one.kind for one in found} == {"all-gather"}
