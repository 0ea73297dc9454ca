"""Every optimizer inside the train step: microbatches, meshes, rejects, donation, where its state lies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from diffjax.config import Config, MeshConfig, OptimizerConfig
from diffjax.parallel import mesh as mesh_lib
from diffjax.training import adafactor
from diffjax.training.step import donated_share, make_init, state_shardings

from .parameters import denoiser
from .test_step import Runner, config
from .toy import assert_same, make_objective

pytestmark = pytest.mark.xdist_group("optimizer_steps")  # one worker, so that module fixtures are made once

NAMES = ["adamw", "muon", "adafactor"]


@pytest.fixture(scope="module", autouse=True)
def small_factors():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adafactor, "FACTORED_FROM", 8)
        yield


def marked_objective(cfg):
    """The real objective, NaN in a batch whose row 0 ends in token 1."""
    real = make_objective(cfg)

    def objective(params, batch, noise):
        numerator, weight, metrics = real(params, batch, noise)
        bad = jnp.any((batch.row == 0) & (batch.tokens[:, -1] == 1))
        return numerator * jnp.where(bad, jnp.nan, 1.0), weight, metrics

    return objective


def runner(name, sizes=None, **overrides):
    cfg = config(optimizer__name=name, **overrides)
    return Runner(cfg, sizes, objective=marked_objective(cfg))


@pytest.fixture(scope="module", params=NAMES)
def one(request):
    """(runner of a whole batch, its state and metrics after three steps)."""
    made = runner(request.param)
    return made, *made.run(3)


@pytest.mark.parametrize("name", NAMES)
def test_t13_microbatches_change_nothing(name):
    """Ragged rows, clipping active, float64: the same after 1, 2 and 4 microbatches."""
    with jax.enable_x64(True):
        made = runner(name)
        want, reference = made.run(3)
        assert want["params"]["up"]["kernel"].dtype == np.float64
        assert all(step["grad_norm"] > made.config.optimizer.clip_norm for step in reference)
        assert len({float(step["weight"]) for step in reference}) == 3
        for count in (2, 4):
            state, metrics = runner(name, training__microbatches=count).run(3)
            for got, expected in zip(metrics, reference, strict=True):
                for key in ("loss", "grad_norm", "update_norm", "weight"):
                    np.testing.assert_allclose(got[key], expected[key], rtol=1e-6)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), state, want)


def test_t13_a_mesh_changes_nothing(one):
    made, want, reference = one
    other = runner(made.config.optimizer.name, {"data": 2, "fsdp": 2, "tensor": 2}, training__microbatches=2)
    assert donated_share(other.step, other.abstract, other.placement) >= 0.95
    state, metrics = other.run(3)
    for got, expected in zip(metrics, reference, strict=True):
        for key in ("loss", "grad_norm", "update_norm"):
            np.testing.assert_allclose(got[key], expected[key], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), state["params"], want["params"])


def test_a_rejected_step_leaves_the_state_as_it_was(one):
    made, *_ = one
    state, _ = made.step(made.state(), made.batch(0))
    before = jax.tree.map(np.asarray, state)
    batch = made.batch(1)
    batch = batch._replace(tokens=batch.tokens.at[0, -1].set(1))
    state, metrics = made.step(state, jax.device_put(batch, mesh_lib.batch_sharding(made.mesh)))
    after = jax.tree.map(np.asarray, state)
    assert int(metrics["reason"]) == 1 and after["step"] == 2
    for part in ("params", "opt"):
        assert_same(after[part], before[part])
    state, metrics = made.step(state, made.batch(2))
    assert int(metrics["reason"]) == 0
    moved = jax.tree.map(lambda new, old: bool((np.asarray(new) != old).any()), state["params"], before["params"])
    assert all(jax.tree.leaves(moved))


def test_the_state_is_updated_in_place(one):
    made, *_ = one
    assert donated_share(made.step, made.abstract, made.placement) >= 0.95


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_split_as_its_parameters_are(name, monkeypatch):
    """On 8 devices none holds more than 1.1 / 8 of parameters and state; counted from shapes, nothing is compiled."""
    monkeypatch.setattr(adafactor, "FACTORED_FROM", 128)
    model = denoiser(width=512, directions="separate")
    cfg = dataclasses.replace(Config(), optimizer=OptimizerConfig(name=name), mesh=MeshConfig(data=1, fsdp=8))
    abstract = jax.eval_shape(make_init(cfg, model.init, model.logical_axes()), jax.random.key(0))
    mesh = mesh_lib.make_mesh(cfg.mesh)
    params = mesh_lib.shardings(abstract["params"], model.logical_axes(), mesh)
    placement = state_shardings(cfg, abstract, params, mesh)
    sizes = lambda tree: [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    held = lambda part: sum(
        np.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(abstract[part]), jax.tree.leaves(placement[part]), strict=True)
    )
    for part in ("params", "opt"):
        assert held(part) <= 1.1 / 8 * sum(sizes(abstract[part])), part
    if name != "adafactor":
        return
    moment, where = abstract["opt"][0], placement["opt"][0]
    mixer = lambda tree: tree["layers"]["unit"]["layer_1"]["mixer"]["forward"]
    assert mixer(where.rows)["x"]["kernel"].spec == PartitionSpec(None, None, "fsdp", None, None)
    assert mixer(where.columns)["x"]["kernel"].spec == PartitionSpec(None, None, None, "tensor", None)
    assert mixer(where.columns)["output"]["kernel"].spec == PartitionSpec(None, None, None, None, "fsdp")
    whole = sum(
        leaf.size * 4
        for leaf, sharding in zip(jax.tree.leaves(moment), jax.tree.leaves(where), strict=True)
        if sharding.is_fully_replicated
    )
    assert whole < 0.01 * sum(sizes(abstract["params"]))
