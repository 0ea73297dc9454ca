"""Adafactor: every layer of every stack against the same matrix alone in optax; what is stored; the decay by hand."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from diffjax.config import OptimizerConfig
from diffjax.training import adafactor
from diffjax.training.optimizer import make_optimizer
from diffjax.training.parameter_roles import layouts

from .parameters import denoiser, is_layer_matrix, layers_of, normal

CONFIG = OptimizerConfig(name="adafactor", beta1=0.9, beta2=0.999, epsilon=1e-3, weight_decay=0.1)
FACTORED_FROM = 12  # B and C of width 2 * 6 just make it, dt of width 4 does not


@pytest.fixture(autouse=True)
def small_factors(monkeypatch):
    monkeypatch.setattr(adafactor, "FACTORED_FROM", FACTORED_FROM)


def make(config):
    one = denoiser()
    return make_optimizer(config, one.logical_axes()), one.abstract_params()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_every_layer_is_what_optax_gives_it_alone(momentum):
    """optax.adafactor of one 2-D array (a vector, where it is no matrix), float64, three updates."""
    optimizer, abstract = make(dataclasses.replace(CONFIG, beta1=momentum))
    with jax.enable_x64(True):
        params, grads = normal(abstract, 0), [normal(abstract, 1 + t) for t in range(3)]
        grads[1] = jax.tree.map(lambda g: 3 * g, grads[1])  # louder than the average: cut to an RMS of 1
        state, update, updates = optimizer.init(params), jax.jit(optimizer.update), []
        for gradient in grads:
            step, state = update(gradient, state, params)
            updates.append(layers_of(step))
        grads = [layers_of(gradient) for gradient in grads]
        for path, array in layers_of(params).items():
            matrix = is_layer_matrix(path) or path in ("head/kernel#0", "embed/table#0")
            decays = matrix and path != "embed/table#0"
            shape = array.shape if matrix else (array.size,)
            single = optax.adafactor(
                min_dim_size_to_factor=FACTORED_FROM,
                multiply_by_parameter_scale=False,
                momentum=momentum or None,
                dtype_momentum=np.float64,
                weight_decay_rate=0.1 if decays else None,
                eps=1e-6,
            )
            state = single.init(array.reshape(shape))
            factored = matrix and min(shape) >= FACTORED_FROM
            assert (state[0].v.shape == (1,)) == factored, path
            for gradient, got in zip(grads, updates, strict=True):
                want, state = single.update(gradient[path].reshape(shape), state, array.reshape(shape))
                np.testing.assert_allclose(got[path].reshape(shape), want, atol=1e-6, err_msg=path)


def test_the_average_forgets_by_beta2_in_the_end():
    """min(1 - t^-0.8, beta2), from two lines of arithmetic: nothing of update 1 is left over in it."""
    one = adafactor.scale_by_second_moment(layouts({"dt_bias": ("ssm_heads",)}), 0.5, 1e-8)
    params = {"dt_bias": np.zeros(1, np.float32)}
    state, average = one.init(params), 0.0
    for t, gradient in enumerate((3.0, 1.0, 2.0, 5.0), start=1):
        _, state = one.update({"dt_bias": np.full(1, gradient, np.float32)}, state, params)
        keep = {1: 0.0, 2: 1 - 2**-0.8, 3: 0.5, 4: 0.5}[t]
        average = keep * average + (1 - keep) * gradient**2
        np.testing.assert_allclose(state.whole["dt_bias"], average, rtol=1e-6)


def test_what_is_stored():
    """A row and a column for each layer's matrix, with the averaged axes kept as 1; without momentum nothing else."""
    optimizer, abstract = make(dataclasses.replace(CONFIG, beta1=0.0))
    moment = jax.eval_shape(optimizer.init, abstract)[0]
    mixer = lambda tree: tree["layers"]["unit"]["layer_1"]["mixer"]["forward"]
    assert abstract["layers"]["unit"]["layer_1"]["mixer"]["forward"]["x"]["kernel"].shape == (2, 2, 32, 4, 8)
    assert mixer(moment.rows)["x"]["kernel"].shape == (2, 2, 32, 1, 1)
    assert mixer(moment.columns)["x"]["kernel"].shape == (2, 2, 1, 4, 8)
    assert mixer(moment.rows)["output"]["kernel"].shape == (2, 2, 4, 8, 1)
    assert mixer(moment.columns)["output"]["kernel"].shape == (2, 2, 1, 1, 32)
    assert mixer(moment.whole)["x"]["kernel"] == optax.MaskedNode() == mixer(moment.rows)["dt"]["kernel"]
    assert mixer(moment.whole)["dt"]["kernel"].shape == (2, 2, 32, 4)
    stored = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, abstract)))
    want = 1  # the count
    for path, array in layers_of(normal(abstract, 0)).items():
        matrix = is_layer_matrix(path) or path in ("head/kernel#0", "embed/table#0")
        want += sum(array.shape) if matrix and min(array.shape) >= FACTORED_FROM else array.size
    assert stored == want
