"""The train step: sums and one division, microbatches, guard, averages, donation, one compilation; any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import monitoring

from diffjax.parallel import mesh as mesh_lib
from diffjax.training.guard import init_guard
from diffjax.training.step import compile_step, donated_share, make_init, make_train_step, split, state_shardings

from .toy import ToyDenoiser, abstract_batch, assert_same, make_config, make_draw, make_objective, read_rows

pytestmark = pytest.mark.xdist_group("step")  # one worker, so that module fixtures are made once

ROWS = 16


class Runner:
    """A compiled step on a mesh, and a fresh state for it."""

    def __init__(self, config, sizes=None, objective=None):
        self.config = config
        mesh_config = dataclasses.replace(config.mesh, **{"data": 1, **(sizes or {})})
        count = np.prod(list((sizes or {}).values())) if sizes else 1
        self.mesh = mesh_lib.make_mesh(mesh_config, jax.devices()[: int(count)])
        axes = ToyDenoiser().logical_axes()
        self.init = make_init(config, ToyDenoiser().init, axes)
        self.abstract = jax.eval_shape(self.init, jax.random.key(0))
        params = mesh_lib.shardings(self.abstract["params"], axes, self.mesh)
        self.placement = state_shardings(config, self.abstract, params, self.mesh)
        step = make_train_step(config, objective or make_objective(config), make_draw(config), self.mesh, params, axes)
        self.step = compile_step(step, self.abstract, self.placement, abstract_batch(ROWS), self.mesh)

    def state(self):
        return jax.device_put(jax.jit(self.init)(jax.random.key(0)), self.placement)

    def batch(self, number):
        read = lambda numbers: read_rows(number, numbers)
        return mesh_lib.global_batch(read, ROWS, mesh_lib.batch_sharding(self.mesh))

    def run(self, steps, state=None):
        state, metrics = self.state() if state is None else state, []
        for number in range(steps):
            state, one = self.step(state, self.batch(number))
            metrics.append(jax.device_get(one))
        return jax.tree.map(np.asarray, state), metrics


def config(**overrides):
    return make_config(training__batch_size=ROWS, **overrides)


@pytest.fixture(scope="module")
def plain():
    return Runner(config())


def test_one_step_by_hand(plain):
    """Gradient of the summed loss over all rows, divided once by the scored tokens, clipped, times the rate."""
    cfg = plain.config
    params, batch = plain.state()["params"], read_rows(0, np.arange(ROWS))
    noise = make_draw(cfg)(0, batch)
    loss = lambda p: make_objective(cfg)(p, batch, noise)[0] / batch.scored.sum()
    value, gradient = jax.value_and_grad(loss)(params)
    norm = optax.tree.norm(gradient)
    assert norm > cfg.optimizer.clip_norm  # so that clipping is seen
    state, (metrics,) = plain.run(1)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2 / 2)
    np.testing.assert_allclose(metrics["weight"], batch.scored.sum())
    assert metrics["tokens"] == batch.valid.sum() and metrics["bad_leaf"] == -1
    first = jax.tree.map(lambda g: 0.1 * g * cfg.optimizer.clip_norm / norm, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7), state["opt"][0].mu, first)
    moved = params["norm"]["scale"] - 5e-3 * jnp.sign(gradient["norm"]["scale"])  # Adam's first update is a sign
    np.testing.assert_allclose(state["params"]["norm"]["scale"], moved, atol=1e-5)


def test_split_keeps_rows_on_their_devices():
    numbers = split(read_rows(0, np.arange(8)), 4).row
    np.testing.assert_array_equal(numbers, np.arange(8).reshape(2, 4).T)


@pytest.mark.parametrize("count", [2, 4])
def test_t13_microbatches_change_nothing(plain, count):
    """Ragged rows, clipping active: same noise, loss and gradient for 1, 2 and 4 microbatches."""
    state, metrics = Runner(config(training__microbatches=count)).run(3)
    want, reference = plain.run(3)
    for one, other in zip(metrics, reference, strict=True):
        assert one["sums"]["masked_tokens"] == other["sums"]["masked_tokens"]
        for name in ("loss", "grad_norm", "weight"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state["params"], want["params"])


MESHES = [{"data": 8}, {"data": 2, "tensor": 4}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("sizes", MESHES)
def test_t13_meshes_change_nothing(plain, sizes):
    state, metrics = Runner(config(training__microbatches=2), sizes).run(3)
    want, reference = plain.run(3)
    for one, other in zip(metrics, reference, strict=True):
        assert one["sums"]["masked_tokens"] == other["sums"]["masked_tokens"]
        assert one["tokens"] == other["tokens"]
        for name in ("loss", "grad_norm", "weight"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state["params"], want["params"])


def test_noise_is_bit_equal_on_every_mesh():
    cfg = config()
    batch = read_rows(3, np.arange(ROWS))
    one = jax.jit(make_draw(cfg))(3, batch)
    for sizes in ({"data": 8}, {"data": 2, "fsdp": 4}):
        mesh = mesh_lib.make_mesh(dataclasses.replace(cfg.mesh, **{"data": 1, **sizes}))
        placed = mesh_lib.global_batch(lambda numbers: read_rows(3, numbers), ROWS, mesh_lib.batch_sharding(mesh))
        assert_same(jax.jit(make_draw(cfg))(3, placed), one)
    other = jax.jit(make_draw(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, seed=1))))(3, batch)
    assert not np.array_equal(one.masked, other.masked)


def test_state_is_updated_in_place_and_nothing_compiles_again(plain):
    assert donated_share(plain.step, plain.abstract, plain.placement) >= 0.95
    state = plain.state()
    batches = [plain.batch(number) for number in range(3)]
    compiled = []
    listener = lambda name, *_, **__: compiled.append(name)
    monitoring.register_event_duration_secs_listener(listener)
    try:
        before = state["params"]["embed"]["table"].unsafe_buffer_pointer()
        for batch in batches:
            state, _ = plain.step(state, batch)
        assert state["params"]["embed"]["table"].unsafe_buffer_pointer() == before
        assert not [name for name in compiled if "compile" in name]
        jax.jit(lambda x: x * 17.25 + 3)(jnp.ones(3))
        assert [name for name in compiled if "backend_compile" in name], "the listener hears nothing"
    finally:
        monitoring.unregister_event_duration_listener(listener)


def test_rejected_steps_leave_everything_as_it_was_but_the_step():
    """NaN at 0, 20 and 30-32 in one microbatch, a x1e4 spike at 40: exactly these are passed over."""
    cfg = config(training__microbatches=2, training__steps=45, guard__spike_window=8, optimizer__schedule="constant")
    real = make_objective(cfg)

    def objective(params, batch, noise):
        numerator, weight, metrics = real(params, batch, noise)
        marks = jnp.where(batch.row == 0, batch.tokens[:, -1], 0).sum()  # the last token of row 0 carries the order
        factor = jnp.where(marks == 1, jnp.nan, jnp.where(marks == 2, 1e4, 1.0))
        return numerator * factor, weight, metrics

    runner = Runner(cfg, objective=objective)
    state, orders = runner.state(), {0: 1, 20: 1, 30: 1, 31: 1, 32: 1, 40: 2}
    for number in range(45):
        before = jax.tree.map(np.asarray, state)
        batch = runner.batch(number)
        batch = batch._replace(tokens=batch.tokens.at[0, -1].set(orders.get(number, 0)))
        state, metrics = runner.step(state, jax.device_put(batch, mesh_lib.batch_sharding(runner.mesh)))
        after = jax.tree.map(np.asarray, state)
        assert int(metrics["reason"]) == orders.get(number, 0), number
        assert after["step"] == number + 1
        if number in orders:
            assert_same({k: after[k] for k in ("params", "opt")}, {k: before[k] for k in ("params", "opt")})
            assert int(metrics["bad_leaf"]) == (0 if orders[number] == 1 else -1)
        else:
            assert not np.array_equal(after["params"]["head"]["kernel"], before["params"]["head"]["kernel"])
    assert int(after["opt"][0].count) == 45 - len(orders)


def test_a_batch_without_a_scored_token_is_passed_over(plain):
    batch = plain.batch(0)
    empty = batch._replace(scored=jnp.zeros_like(batch.scored))
    state, metrics = plain.step(plain.state(), jax.device_put(empty, mesh_lib.batch_sharding(plain.mesh)))
    assert int(metrics["reason"]) == 3 and metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert_same(jax.tree.map(np.asarray, state["params"]), jax.tree.map(np.asarray, plain.state()["params"]))


def test_ema_in_closed_form():
    runner = Runner(config(training__ema=0.9))
    state = runner.state()
    weights = [np.asarray(state["params"]["up"]["kernel"])]
    for number in range(3):
        state, _ = runner.step(state, runner.batch(number))
        weights.append(np.asarray(state["params"]["up"]["kernel"]))
    want = 0.9**3 * weights[0] + 0.1 * (0.81 * weights[1] + 0.9 * weights[2] + weights[3])
    np.testing.assert_allclose(state["ema"]["up"]["kernel"], want, rtol=1e-5, atol=1e-7)
    assert not np.allclose(want, weights[3], atol=1e-3)


def test_the_state_holds_no_keys(plain):
    assert set(plain.abstract) == {"step", "params", "opt", "guard"}
    assert not [leaf for leaf in jax.tree.leaves(plain.abstract) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    assert jax.tree.structure(plain.abstract["guard"]) == jax.tree.structure(init_guard(plain.config.guard))
