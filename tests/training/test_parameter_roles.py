"""Which matrix, group and decay every parameter of a real denoiser has: lists by name, made without the tables."""

import jax
import pytest

from diffjax.config import MultipliersConfig, OptimizerConfig
from diffjax.parallel.mesh import paths
from diffjax.training.optimizer import describe, make_optimizer
from diffjax.training.parameter_roles import Layout, decay_mask, group_of, layouts

from .parameters import denoiser, is_layer_matrix, normal, short

ONE = denoiser(directions="separate")
PATHS = paths(ONE.abstract_params())


def flat(tree):
    return dict(zip(PATHS, jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Layout)), strict=True))


def test_layouts_of_stacked_and_fused_weights():
    found = flat(layouts(ONE.logical_axes()))
    unit, run = "layers/unit/layer_0", "layers/unit/layer_1"  # stacked once and twice
    assert found["layers/tail/layer_0/mixer/query/kernel"] == Layout(0, (0,), (1, 2))
    assert found[f"{unit}/mixer/key/kernel"] == Layout(1, (1,), (2, 3))
    assert found[f"{unit}/mixer/output/kernel"] == Layout(1, (1, 2), (3,))
    assert found[f"{unit}/mlp/up/kernel"] == Layout(1, (1,), (2,)) == found[f"{unit}/mlp/down/kernel"]
    for name in ("z", "x", "B", "C"):
        assert found[f"{run}/mixer/reverse/{name}/kernel"] == Layout(2, (2,), (3, 4))
    assert found[f"{run}/mixer/forward/dt/kernel"] == Layout(2, (2,), (3,))
    assert found[f"{run}/mixer/forward/output/kernel"] == Layout(2, (2, 3), (4,))
    assert found["embed/table"] == Layout(0, (0,), (1,), vocabulary=True) == found["head/kernel"]
    assert found[f"{run}/mixer/forward/conv_x/kernel"] == Layout(2) == found[f"{run}/mixer/forward/norm/scale"]
    assert {path for path, layout in found.items() if layout.inputs and not layout.vocabulary} == set(
        filter(is_layer_matrix, PATHS)
    )


def test_what_decays_is_what_is_a_matrix_but_the_embedding():
    decaying = {path for path, decays in flat(decay_mask(ONE.abstract_params())).items() if decays}
    assert decaying == {*filter(is_layer_matrix, PATHS), "head/kernel"}


def test_groups():
    found = {path: group_of(path) for path in PATHS}
    assert found["embed/table"] == "embedding" and found["head/kernel"] == "head" and found["norm/scale"] == "norm"
    for path, group in found.items():
        if not path.startswith("layers/"):
            continue
        want = {"mlp": "mlp", "mixer_norm": "norm", "mlp_norm": "norm"}.get(path.split("/")[3])
        want = want or ("mamba" if "/*/" in short(path) else "attention")
        assert group == want, path
    assert set(found.values()) == set(MultipliersConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    "names",
    [("experts", "embed", "mlp"), ("layers", "embed", None), ("heads", "embed", "head_dim"), ("embed", "embed")],
)
def test_axes_of_no_known_matrix_are_named(names):
    with pytest.raises(ValueError, match=r"router/kernel: axes .* are no known matrix"):
        layouts({"router": {"kernel": names}})


def test_a_parameter_without_a_group_is_named():
    with pytest.raises(ValueError, match="router/kernel: belongs to no learning-rate group"):
        group_of("router/kernel")


def test_muon_without_axes_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\.name=muon needs the parameters' logical axes"):
        make_optimizer(OptimizerConfig(name="muon"))


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_multipliers_scale_a_group_and_its_decay(name):
    """Two updates: exactly the group's are multiplied, bit for bit; moments are untouched."""
    one, factors = denoiser(), {"mamba": 2.0, "embedding": 0.5, "norm": 0.0}
    abstract = one.abstract_params()
    params = normal(abstract, 0)
    plain = OptimizerConfig(name=name)
    scaled = OptimizerConfig(name=name, learning_rate_multipliers=MultipliersConfig(**factors))
    results = []
    for config in (plain, scaled):
        optimizer = make_optimizer(config, one.logical_axes())
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for seed in (1, 2):
            updates, state = update(normal(abstract, seed), state, params)
        results.append((jax.device_get(updates), jax.device_get(state)))
    (base, state), (got, other) = results
    assert jax.tree.structure(state) == jax.tree.structure(other)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True))
    for path, a, b in zip(paths(params), jax.tree.leaves(base), jax.tree.leaves(got), strict=True):
        assert (a * factors.get(group_of(path), 1.0) == b).all() and (a != 0).any(), path


def test_the_log_says_what_each_parameter_gets():
    one = denoiser()
    multipliers = MultipliersConfig(mamba=2.0)
    config = OptimizerConfig(name="muon", weight_decay=0.2, learning_rate_multipliers=multipliers)
    lines = list(describe(config, one.abstract_params(), one.logical_axes()))
    text = "\n".join(lines)
    size = sum(leaf.size for leaf in jax.tree.leaves(one.abstract_params()))
    assert sum(int(line.split(": ")[2].split()[0].replace(",", "")) for line in lines) == size
    assert "muon, weight decay 0.2, learning rate x 2" in text and "mixer/{B,C,dt,output,x,z}/kernel" in text
    assert "muon, weight decay 0.2, learning rate x 1" in text and "mlp/{down,gate,up}/kernel" in text
    assert "adamw, weight decay 0.2, learning rate x 1: 4,096 parameters in head/kernel" in text
    assert "adamw, no weight decay, learning rate x 2" in text and "mixer/{A_log,D_skip,dt_bias}" in text
    plain = list(describe(OptimizerConfig(), one.abstract_params(), one.logical_axes()))
    assert len(plain) == 2 and "learning rate" not in "".join(plain)
