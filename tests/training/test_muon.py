"""Muon: every layer of every stack against the same matrix alone in optax, and against Newton-Schulz by hand."""

import jax
import numpy as np
import optax
import pytest
from optax.contrib import muon

from diffjax.config import OptimizerConfig
from diffjax.training.optimizer import make_optimizer

from .parameters import denoiser, is_layer_matrix, layers_of, normal

CONFIG = OptimizerConfig(name="muon", beta1=0.8, beta2=0.9, weight_decay=0.1)


@pytest.fixture(scope="module")
def two():
    """(parameters, gradients of two steps, updates of two steps) in float64; each update moves by a hundredth."""
    one, abstract = denoiser(), denoiser().abstract_params()
    with jax.enable_x64(True):
        optimizer = make_optimizer(CONFIG, one.logical_axes())
        params, grads = normal(abstract, 0), [normal(abstract, 1 + t) for t in range(2)]
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        start, updates = params, []
        for gradient in grads:
            step, state = update(gradient, state, params)
            params = jax.tree.map(lambda p, u: p + 0.01 * u, params, step)
            updates.append(jax.device_get(step))
    return layers_of(start), [layers_of(g) for g in grads], [layers_of(u) for u in updates]


def alone(optimizer, params, gradients):
    """The updates that one array gets when it is all there is."""
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        step, state = update(gradient, state, params)
        params = params + 0.01 * step
        yield np.asarray(step)


def test_every_layer_is_what_optax_gives_it_alone(two):
    """Matrices: optax.contrib.muon of one 2-D array. All else: AdamW of this project, without Nesterov, by its mask."""
    start, grads, updates = two
    adamw = lambda decay: optax.adamw(1.0, b1=0.8, b2=0.9, eps=1e-8, weight_decay=decay)
    kinds = {"muon": muon(1.0, consistent_rms=0.2, weight_decay=0.1), "head": adamw(0.1), "rest": adamw(0.0)}
    seen = dict.fromkeys(kinds, 0)
    with jax.enable_x64(True):
        for path, array in start.items():
            kind = "muon" if is_layer_matrix(path) else "head" if path == "head/kernel#0" else "rest"
            seen[kind] += 1
            want = alone(kinds[kind], array, [gradient[path] for gradient in grads])
            for got, expected in zip(updates, want, strict=True):
                np.testing.assert_allclose(got[path], expected, atol=1e-10, err_msg=path)
    # 3 attention layers of 7 matrices, 4 Mamba layers of 9; 4 and 10 vectors a layer, the embedding, the last norm
    assert seen == {"muon": 3 * 7 + 4 * 9, "head": 1, "rest": 3 * 4 + 4 * 10 + 2}


def matrix_paths(updates):
    return [path for path in updates if is_layer_matrix(path)]


def test_newton_schulz_by_hand(two):
    """The second update in numpy: Nesterov's look-ahead of the corrected momentum, five steps of the quintic (Jordan's
    coefficients), the RMS of arXiv:2502.16982, decay."""
    start, (first, second), updates = two
    for path in matrix_paths(start):
        params = start[path] + 0.01 * updates[0][path]
        momentum = 0.95 * 0.05 * first[path] + 0.05 * second[path]
        x = 0.95 * momentum / (1 - 0.95**3) + 0.05 * second[path] / (1 - 0.95**2)
        x = x / (np.linalg.norm(x) + 1e-8)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        want = -(0.2 * max(x.shape) ** 0.5 * x + 0.1 * params)
        np.testing.assert_allclose(updates[1][path], want, atol=1e-9, err_msg=path)


def test_updates_are_nearly_orthogonal_with_the_rms_of_adamw(two):
    """By singular values: the directions are the gradient's, their sizes all near 1."""
    start, (gradient, _), (update, _) = two
    sizes = {}
    for path in matrix_paths(start):
        direction = -(update[path] + 0.1 * start[path])
        sizes[path] = np.sqrt(np.mean(direction**2))
        direction = direction / (0.2 * max(direction.shape) ** 0.5)
        left, values, right = np.linalg.svd(gradient[path], full_matrices=False)
        seen = left.T @ direction @ right.T
        clear = values > 0.1 * values[0]  # five steps lift what is not too far below the largest
        np.testing.assert_allclose(seen - np.diag(np.diag(seen)), 0, atol=1e-6, err_msg=path)
        assert (np.diag(seen)[clear] > 0.6).all() and (np.diag(seen) < 1.3).all(), path
    assert 0.17 < np.mean(list(sizes.values())) < 0.19
    assert min(sizes.values()) > 0.15 and max(sizes.values()) < 0.22
