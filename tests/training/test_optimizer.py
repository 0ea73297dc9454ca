"""Learning rates in closed form, which parameters decay, and AdamW against a few lines of numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import OptimizerConfig
from diffjax.parallel.mesh import paths
from diffjax.training.optimizer import make_optimizer
from diffjax.training.parameter_roles import decay_mask
from diffjax.training.schedule import make_schedule


def rates(steps, count, **config):
    schedule = make_schedule(OptimizerConfig(learning_rate=2e-3, **config), steps)
    return np.asarray(jax.vmap(schedule)(jnp.arange(count)))


@pytest.mark.parametrize("schedule, extra", [("cosine", {}), ("wsd", {"decay_steps": 10}), ("constant", {})])
def test_warm_up_starts_above_zero_and_reaches_the_peak(schedule, extra):
    got = rates(50, 6, schedule=schedule, warmup_steps=5, **extra)
    np.testing.assert_allclose(got[:5], 2e-3 * np.array([1, 2, 3, 4, 5]) / 5, rtol=1e-6)
    assert got[4] == np.float32(2e-3)


def test_cosine():
    got = rates(100, 130, schedule="cosine", warmup_steps=20, final_ratio=0.1)
    want = [2e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min((s - 20) / 80, 1)))) for s in range(20, 130)]
    np.testing.assert_allclose(got[20:], want, rtol=1e-5)
    np.testing.assert_allclose(got[60], 2e-3 * 0.55, rtol=1e-5)
    np.testing.assert_allclose(got[100:], 2e-4, rtol=1e-6)


def test_wsd():
    got = rates(100, 130, schedule="wsd", warmup_steps=10, decay_steps=20, final_ratio=0.0)
    np.testing.assert_allclose(got[10:81], 2e-3, rtol=1e-6)
    np.testing.assert_allclose(got[80:101], 2e-3 * (100 - np.arange(80, 101)) / 20, atol=1e-9)
    assert (got[100:] == 0).all()


def test_constant_and_no_warm_up():
    np.testing.assert_allclose(rates(10, 30, schedule="constant", warmup_steps=0), 2e-3, rtol=1e-7)


def test_schedule_steps_fixes_the_curve_apart_from_the_run():
    short = rates(50, 200, schedule="cosine", warmup_steps=5, schedule_steps=100)
    long = rates(200, 200, schedule="cosine", warmup_steps=5, schedule_steps=100)
    np.testing.assert_array_equal(short, long)
    assert not np.allclose(short, rates(200, 200, schedule="cosine", warmup_steps=5))


def tree(*names):
    root = {}
    for path in names:
        *parents, name = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jnp.ones((2, 2))
    return root


MIXER = "layers/unit/layer_0/mixer/forward"
DECAYING = ["head/kernel", "layers/unit/layer_0/mlp/up/kernel", f"{MIXER}/x/kernel", f"{MIXER}/output/kernel"]
KEEPING = [
    "embed/table",
    "norm/scale",
    f"{MIXER}/A_log",
    f"{MIXER}/dt_bias",
    f"{MIXER}/D_skip",
    f"{MIXER}/norm/scale",
    f"{MIXER}/conv_x/kernel",
    f"{MIXER}/conv_BC/kernel",
    f"{MIXER}/conv_x/bias",
]


def test_matrices_decay_and_nothing_else():
    mask = decay_mask(tree(*DECAYING, *KEEPING))
    flat = dict(zip(paths(mask), jax.tree.leaves(mask), strict=True))
    assert {path for path, decays in flat.items() if decays} == set(DECAYING)
    assert set(flat) == {*DECAYING, *KEEPING}


def test_an_unknown_parameter_is_named():
    with pytest.raises(ValueError, match="mlp/up/gain: no decay rule for 'gain'"):
        decay_mask(tree("mlp/up/gain"))


def test_adamw_by_hand():
    """Three updates of a decaying and of a keeping parameter, at learning rate 1 (arXiv:1711.05101, algorithm 2)."""
    config = OptimizerConfig(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
    optimizer = make_optimizer(config)
    params = {"up": {"kernel": jnp.array([[0.5, -1.0]])}, "norm": {"scale": jnp.array([2.0])}}
    grads = {"up": {"kernel": jnp.array([[0.3, -0.2]])}, "norm": {"scale": jnp.array([0.7])}}
    want = {"kernel": np.array([[0.5, -1.0]]), "scale": np.array([2.0])}
    first, second = ({name: np.zeros_like(value) for name, value in want.items()} for _ in range(2))
    state = optimizer.init(params)
    for t in range(1, 4):
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + 0.01 * u, params, updates)
        for name, decay in (("kernel", 0.1), ("scale", 0.0)):
            g = np.asarray(grads["up" if name == "kernel" else "norm"][name])
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            direction = (first[name] / (1 - 0.9**t)) / (np.sqrt(second[name] / (1 - 0.95**t)) + 1e-8)
            want[name] = want[name] - 0.01 * (direction + decay * want[name])
    np.testing.assert_allclose(params["up"]["kernel"], want["kernel"], rtol=1e-5)
    np.testing.assert_allclose(params["norm"]["scale"], want["scale"], rtol=1e-5)
