"""The real denoiser under the step's sums: sharding and microbatches change no noise, loss or gradient (T13)."""

import jax
import numpy as np
import pytest

from diffjax.config import KernelsConfig, MambaConfig, MeshConfig, ModelConfig
from diffjax.models.denoiser import Denoiser
from diffjax.parallel import mesh as mesh_lib
from diffjax.training.step import split

from .toy import VOCAB, make_config, make_draw, make_objective, read_rows

MODEL = ModelConfig(
    pattern="AM", layers=2, width=32, block_size=4, heads=2, kv_heads=2, head_dim=16, mlp_width=32,
    mamba=MambaConfig(heads=2, head_dim=16, state=8),
)  # fmt: skip
ROWS = 8


def sums(sizes, microbatches):
    """(numerator, denominator, gradient of the numerator, masked tokens) of one step on a mesh, as host arrays."""
    config = make_config(training__batch_size=ROWS)
    denoiser = Denoiser(MODEL, vocab_size=VOCAB, kernels=KernelsConfig())
    objective, draw = make_objective(config, denoiser), make_draw(config)
    mesh = mesh_lib.make_mesh(MeshConfig(**{"data": 1, **sizes}), jax.devices()[: int(np.prod([*sizes.values(), 1]))])
    placement = mesh_lib.shardings(denoiser.abstract_params(), denoiser.logical_axes(), mesh)
    params = jax.device_put(jax.jit(denoiser.init)(jax.random.key(1)), placement)
    rows = mesh_lib.batch_sharding(mesh)
    batch = mesh_lib.global_batch(lambda numbers: read_rows(0, numbers), ROWS, rows)

    def loss(params, batch, noise):
        numerator, denominator, _ = objective(params, batch, noise)
        return numerator, (denominator, noise.masked.sum())

    def run(params, batch):
        def body(total, part):
            return jax.tree.map(jax.numpy.add, total, one(params, part)), None

        def one(params, part):
            (numerator, (denominator, masked)), gradient = jax.value_and_grad(loss, has_aux=True)(
                params, part, draw(0, part)
            )
            return numerator, denominator, gradient, masked

        parts = split(batch, microbatches, mesh)
        shapes = jax.eval_shape(one, params, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(body, zeros, parts)[0]

    quick = {"xla_backend_optimization_level": 0}  # halves the time to compile
    compiled = jax.jit(run).lower(params, batch).compile(compiler_options=quick)
    return jax.tree.map(np.asarray, compiled(params, batch))


@pytest.fixture(scope="module")
def alone():
    return sums({}, 1)


@pytest.mark.parametrize("sizes, microbatches", [({"data": 2, "fsdp": 2, "tensor": 2}, 2)])
def test_t13_denoiser(alone, sizes, microbatches):
    numerator, denominator, gradient, masked = sums(sizes, microbatches)
    assert (masked, denominator) == (alone[3], alone[1])
    np.testing.assert_allclose(numerator, alone[0], rtol=1e-5)
    for path, got, want in zip(
        mesh_lib.paths(gradient), jax.tree.leaves(gradient), jax.tree.leaves(alone[2]), strict=True
    ):
        scale = np.abs(want).max()
        assert scale > 0, path
        np.testing.assert_allclose(got, want, atol=2e-5 * scale, rtol=0, err_msg=path)
