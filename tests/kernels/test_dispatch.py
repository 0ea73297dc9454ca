"""Which backend runs: explicit choices are kept or refused, `auto` follows the mesh and says so."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from diffjax.errors import UnsupportedKernel, UserError
from diffjax.kernels import dispatch, ssd_scan
from diffjax.kernels.dispatch import Choice, Split, choose, run

KERNELS = {"xla": lambda: None, "pallas_tpu": lambda: None, "pallas_triton": lambda: "takes nothing: use xla"}


class Doubles:
    """A backend module whose one function doubles, and adds up `shared` over heads."""

    @staticmethod
    def double(x, shared):
        return 2 * x, jnp.sum(x, axis=1) * shared


def mesh_of(platform, kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_an_explicit_choice_never_falls_back():
    with pytest.raises(UnsupportedKernel, match=r"pallas_triton cannot run op of \[3\]: takes nothing: use xla"):
        choose("op", "pallas_triton", KERNELS, "[3]")
    with pytest.raises(UserError, match="op has no backend 'cuda'; there are auto, xla, pallas_tpu, pallas_triton"):
        choose("op", "cuda", KERNELS, "[3]")
    assert choose("op", "pallas_tpu", KERNELS, "[3]").backends == (("default", "pallas_tpu"),)


@pytest.mark.parametrize(("platform", "kind"), [("cpu", "cpu"), ("gpu", "NVIDIA H100 80GB HBM3")])
def test_a_kernel_of_another_platform_is_refused(platform, kind):
    here = {"gpu": "cuda"}.get(platform, platform)
    with mesh_of(platform, kind):
        with pytest.raises(UnsupportedKernel, match=f"runs on tpu, and the mesh.s devices are {here}: use auto or xla"):
            choose("op", "pallas_tpu", KERNELS, "[3]")
        with dispatch.interpreted_kernels():  # whose interpreters run anywhere
            assert choose("op", "pallas_tpu", KERNELS, "[3]").backend == "pallas_tpu"


@pytest.mark.parametrize(("platform", "kind", "backend"), [("tpu", "TPU v5 lite", "pallas_tpu"), ("cpu", "cpu", "xla")])
def test_auto_follows_the_mesh(platform, kind, backend):
    with mesh_of(platform, kind):
        choice = choose("op", "auto", KERNELS, "[4]")
    assert (choice.platform, choice.backend) == (platform, backend)
    assert dispatch.decisions["op [4]"].startswith(f"{backend} (auto")


def test_auto_warns_with_the_reason_where_a_kernel_refuses(caplog):
    with mesh_of("gpu", "NVIDIA H100 80GB HBM3"), caplog.at_level(logging.INFO, "diffjax.kernels"):
        assert choose("op", "auto", KERNELS, "[5]").backend == "xla"
        choose("op", "auto", KERNELS, "[5]")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "op [5]: xla" in record.message and "takes nothing: use xla" in record.message


def test_without_a_mesh_every_candidate_is_left_open():
    choice = choose("op", "auto", KERNELS, "[6]")
    assert choice.platform is None
    assert dict(choice.backends) == {"default": "xla", "tpu": "pallas_tpu"}


def test_tracing_for_shapes_takes_no_decision():
    """A model's parameters are shaped without a kernel, even one that would refuse; two runs have two lists."""
    dispatch.forget()
    with dispatch.shapes_only():
        assert choose("op", "pallas_triton", KERNELS, "[7]").backend == "xla"
    assert not dispatch.decisions
    choose("op", "xla", KERNELS, "[7]")
    assert list(dispatch.decisions) == ["op [7]"]
    dispatch.forget()
    assert not dispatch.decisions


@pytest.mark.parametrize("heads", [4, 3])
def test_kernels_run_on_each_device_s_rows_and_heads(heads):
    """On 4 devices as on one, a gradient that all heads share summed once; heads that do not divide stay whole."""
    splits = (Split(0, 1), Split(0)), (Split(0, 1), Split(0, None, True))
    x = np.arange(4.0 * heads).reshape(4, heads)
    shared = np.arange(4.0)
    choice = Choice("cpu", (("default", "pallas_tpu"),))
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        call = jax.jit(lambda x, shared: run(choice, {"pallas_tpu": Doubles}, "double", splits, x, shared))
        doubled, summed = call(x, shared)
        split = "psum" in str(jax.make_jaxpr(call)(x, shared))
    assert np.array_equal(doubled, 2 * x) and np.array_equal(summed, x.sum(1) * shared)
    assert split == (heads == 4)


def test_a_scan_is_refused_in_one_sentence():
    x, Bm = jnp.zeros((1, 128, 2, 32)), jnp.zeros((1, 128, 2, 16))
    with pytest.raises(UnsupportedKernel, match=r"pallas_tpu cannot run ssd scan .* takes one group"):
        ssd_scan(x, jnp.zeros((1, 128, 2)), -jnp.ones(2), Bm, Bm, block_size=16, backend="pallas_tpu")


@pytest.mark.parametrize(("devices", "backend"), [(64, "pallas_tpu"), (1, "xla")])
def test_a_kernel_is_refused_by_the_size_of_one_device_s_part(devices, backend):
    """64 rows of 16,384 tokens are 2.7e9 numbers, too many for a kernel's index arithmetic; a row of them is not."""
    dispatch.forget()
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((devices,), ("fsdp",), (AxisType.Auto,), abstract_device=device)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 16384, 80, 32), (64, 16384, 1, 64))]
    dt, A = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 16384, 80), (80,)))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda x, dt, A, Bm: ssd_scan(x, dt, A, Bm, Bm, block_size=32)[0], arrays[0], dt, A, arrays[1])
    (decision,) = dispatch.decisions.values()
    assert decision.startswith(backend)


def test_inside_a_region_of_one_axis_kernels_run_on_the_others():
    """Of 4 shards of tokens taken by hand, each splits its rows and heads over the rest of the mesh."""
    splits = (Split(0, 2), Split(0)), (Split(0, 2), Split(0, None, True))
    x, shared = np.arange(16.0).reshape(2, 4, 2), np.ones((2, 1))
    seen = []

    class Shapes:
        @staticmethod
        def double(x, shared):
            seen.append(x.shape)
            return 2 * x, jnp.sum(x, axis=2) * shared

    choice = Choice("cpu", (("default", "pallas_tpu"),))
    names = ("data", "context", "tensor")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Auto,) * 3)
    tokens, whole = PartitionSpec(None, "context"), PartitionSpec()
    with jax.set_mesh(mesh):
        region = jax.shard_map(
            lambda x, shared: run(choice, {"pallas_tpu": Shapes}, "double", splits, x, shared),
            in_specs=(tokens, whole), out_specs=tokens, axis_names={"context"}, check_vma=False,
        )  # fmt: skip
        doubled, summed = jax.jit(region)(x, shared)
    assert np.array_equal(doubled, 2 * x) and np.array_equal(summed, x.sum(2))
    assert set(seen) == {(1, 2, 1)}
