"""T12, the model's part: exact parameter counts, the initial weights, and the loss at the start."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from diffjax.config import MambaConfig, ModelConfig, load_config
from diffjax.models.denoiser import Denoiser
from tests.models.cases import MASK, case, leaves

# Three 3B denoisers, arXiv 2609.11998 sections 3-5; the counts include the 57 residual norms.
SEED_COUNTS = {"A": 3_033_152_000, "AMMMMM": 3_359_858_720, "M": 3_430_881_920}
SEED = ModelConfig(
    layers=28, width=2560, block_size=32, heads=20, kv_heads=20, head_dim=128, rope_theta=5e5, mlp_width=7680,
    dtype="bfloat16", mamba=MambaConfig(heads=80, head_dim=32, state=64, conv=4, groups=1, directions="separate"),
)  # fmt: skip
SEED_VOCAB = 126_464


def count(tree):
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("pattern", SEED_COUNTS)
def test_T12_seed_parameter_counts(pattern):
    denoiser = Denoiser(replace(SEED, pattern=pattern), vocab_size=SEED_VOCAB)
    assert count(denoiser.abstract_params()) == SEED_COUNTS[pattern]


@pytest.mark.parametrize(("name", "pattern"), [("attention", "A"), ("hybrid", "AMMMMM"), ("mamba", "M")])
def test_T12_seed_config_files_state_that_geometry(name, pattern):
    config = load_config(Path(__file__).parents[2] / "configs" / f"seed_3b_{name}.yaml")
    assert config.model.pattern == pattern
    assert config.data.tokenizer.vocab_size == SEED_VOCAB and config.data.sequence_length == 1024
    same = ("layers", "width", "block_size", "heads", "kv_heads", "head_dim", "rope_theta", "mlp_width", "mamba")
    assert {key: getattr(config.model, key) for key in same} == {key: getattr(SEED, key) for key in same}
    denoiser = Denoiser(config.model, vocab_size=config.data.tokenizer.vocab_size)
    assert count(denoiser.abstract_params()) == SEED_COUNTS[pattern]


@pytest.mark.parametrize("name", ["AM-causal", "M-causal", "AM-cut-unit"])
def test_parameter_tree(name):
    """init, abstract_params and logical_axes are one tree; the tables are padded to 128 rows; no hidden leaf."""
    denoiser = case(name, "float32").denoiser
    abstract, axes = denoiser.abstract_params(), denoiser.logical_axes()
    params = jax.eval_shape(denoiser.init, jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert [p.shape for p in jax.tree.leaves(params)] == [a.shape for a in jax.tree.leaves(abstract)]
    assert all(p.dtype == a.dtype == np.float32 for p, a in zip(*map(jax.tree.leaves, (params, abstract)), strict=True))
    flat = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert [len(names) for names in flat] == [a.ndim for a in jax.tree.leaves(abstract)]
    assert count(params) == expected_count(denoiser.config)


def expected_count(config):
    """The number of parameters from the list of tensors."""
    d, m, padded = config.width, config.mamba, 128
    inner, states = m.heads * m.head_dim, 2 * m.groups * m.state
    direction = d * (2 * inner + states + m.heads) + (m.conv + 1) * (inner + states) + 3 * m.heads + inner + inner * d
    mixer = {
        "A": 2 * d * (config.heads + config.kv_heads) * config.head_dim + 2 * config.qk_norm * config.head_dim,
        "M": direction * (2 if m.directions == "separate" else 1),
    }
    kinds = (config.pattern * config.layers)[: config.layers]
    tables = padded * d * (1 if config.tie_embeddings else 2)
    return tables + d + sum(mixer[kind] + 2 * d + 3 * d * config.mlp_width for kind in kinds)


MEDIUM = ModelConfig(
    pattern="AM", layers=4, width=256, init_std=0.03, block_size=16, heads=4, kv_heads=4, head_dim=64, mlp_width=512,
    mamba=MambaConfig(heads=8, head_dim=32, state=16),
)  # fmt: skip
MEDIUM_VOCAB = 2048


@pytest.fixture(scope="module")
def initial():
    denoiser = Denoiser(MEDIUM, vocab_size=MEDIUM_VOCAB)
    return denoiser, jax.jit(denoiser.init)(jax.random.key(1))


@pytest.mark.xdist_group("medium")
def test_initial_weights_follow_their_laws(initial):
    _, params = initial
    params = dict(leaves(params))
    assert ModelConfig().init_std == 0.02
    small = MEDIUM.init_std / np.sqrt(2 * MEDIUM.layers)
    for path, leaf in params.items():
        name, parent = path.split("/")[-1], path.split("/")[-2]
        if name == "scale" or name == "D_skip":
            assert (leaf == 1).all(), path
        elif name == "A_log":
            assert (leaf >= 0).all() and (leaf <= np.log(16)).all() and leaf.std() > 0.3, path
        elif name == "dt_bias":
            dt = np.logaddexp(0.0, leaf.astype(np.float64))
            assert dt.min() >= 0.99e-3 and dt.max() <= 1.01e-1 and np.log(dt).std() > 0.8, path
        elif parent.startswith("conv"):
            assert np.abs(leaf).max() <= 0.5 and np.abs(leaf).std() > 0.1 and abs(leaf.mean()) < 0.1, path
        else:
            std = small if parent in ("output", "down") else MEDIUM.init_std
            assert abs(leaf.std() / std - 1) < 0.05 and abs(leaf.mean()) < 0.1 * std, path
    kernels = [leaf for path, leaf in params.items() if path.endswith(("gate/kernel", "up/kernel"))]
    assert not np.array_equal(kernels[0], kernels[1])
    unit = params["layers/unit/layer_0/mixer/query/kernel"]
    assert not np.array_equal(unit[0], unit[1])


@pytest.mark.xdist_group("medium")
def test_T12_loss_at_the_start(initial):
    """Mean cross-entropy of fully masked blocks = ln V + s^2/2 within 5%, s the standard deviation of the logits."""
    denoiser, params = initial
    tokens = np.random.default_rng(0).integers(5, MEDIUM_VOCAB, (4, 64)).astype(np.int32)
    blocks = tokens.reshape(4, 4, 16)
    logits = np.asarray(jax.jit(denoiser.train_logits)(params, tokens, np.full_like(blocks, MASK)), np.float64)
    target = np.take_along_axis(logits, blocks[..., None], -1)[..., 0]
    loss = (np.log(np.exp(logits).sum(-1)) - target).mean()
    assert 0.05 < logits.std() < 2
    assert abs(loss / (np.log(MEDIUM_VOCAB) + logits.std() ** 2 / 2) - 1) < 0.05
