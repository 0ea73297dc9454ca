"""T3 and the proof that the tests bite: what a frontier depends on, and what it does not depend on."""

import jax
import numpy as np
import pytest

from tests.models.cases import MAIN, VOCAB, case, leaves, parametrize


def everything(model):
    """Segments, clean_valid and frontier_valid of two rows that each hold one whole document."""
    return (
        np.ones((2, model.blocks), np.int32),
        np.ones((2, model.length), bool),
        np.ones((2, model.blocks, model.config.block_size), bool),
    )


@parametrize(["M-bidirectional", "AM-causal"])
def test_T3_jacobian_is_zero_exactly_where_it_must_be(name, dtype):
    """Every token of row 0 has its own id, so that the table's gradient is a Jacobian product token by token."""
    model = case(name, dtype)
    assert not model.config.tie_embeddings  # else the table's gradient is also that of the output matrix
    size, blocks, length = model.config.block_size, model.blocks, model.length
    assert 2 * length <= VOCAB
    ids = np.random.default_rng(5).permutation(VOCAB)[: 2 * length].astype(np.int32)
    clean, frontiers = ids[:length].reshape(1, length), ids[length:].reshape(1, blocks, size)
    clean, frontiers = (np.concatenate([a, a]) for a in (clean, frontiers))  # row 1 has no cotangent
    for k in {0, 1, blocks // 2, blocks - 1}:
        cotangent = np.zeros((2, blocks, size, VOCAB))
        cotangent[0, k] = np.random.default_rng(k).standard_normal((size, VOCAB))
        _, gradient = model.gradient(cotangent, clean, frontiers, *everything(model))
        size_of = np.abs(gradient["embed"]["table"]).max(axis=1)
        of_clean = size_of[clean[0]].reshape(blocks, size)
        of_frontiers = size_of[frontiers[0]]
        assert (of_clean[:k] > 1e-12).all()
        assert (of_clean[k:] == 0).all()
        assert (of_frontiers[k] > 1e-12).all()
        assert (np.delete(of_frontiers, k, axis=0) == 0).all()


@parametrize(MAIN)
def test_T3_changed_tokens_move_no_bit_of_what_may_not_see_them(name, dtype):
    model = case(name, dtype)
    size, k = model.config.block_size, model.blocks // 2
    later, others = model.texts.copy(), np.roll(model.noisy, 1, axis=2) + 1
    later[:, k * size :] = (later[:, k * size :] + 17) % VOCAB
    others[:, k] = model.noisy[:, k]
    before = model.train(model.texts, model.noisy)
    after = model.train(later, others)
    assert np.array_equal(before[:, k], after[:, k])
    assert (np.abs(before - after).max(axis=(2, 3))[:, k + 1 :] > 1e-3).all()
    earlier = model.texts.copy()
    earlier[:, 0] = (earlier[:, 0] + 17) % VOCAB
    moved = np.abs(model.train(earlier, model.noisy) - before).max(axis=(2, 3))
    assert (moved[:, 0] == 0).all() and (moved[:, 1:] > 1e-6).all()


@parametrize(MAIN)
def test_dropping_any_parameter_moves_the_logits(name, dtype):
    """A leaf of zeros (of ones for a scale) in place of the true one is seen by the comparison with the reference."""
    model = case(name, dtype)
    paths = [path for path, _ in leaves(model.params)]
    structure = jax.tree.structure(model.params)
    arrays = jax.tree.leaves(model.params)
    for i, path in enumerate(paths):
        blank = np.ones_like(arrays[i]) if path.endswith("scale") else np.zeros_like(arrays[i])
        damaged = jax.tree.unflatten(structure, [*arrays[:i], blank, *arrays[i + 1 :]])
        moved = np.abs(model.train(model.texts, model.noisy, params=damaged) - model.expected).max()
        assert moved > 1e-3, f"{path}: {moved:.1e}"


@parametrize(MAIN)
def test_dropping_any_part_of_the_context_moves_the_logits(name, dtype):
    """Keys, values, state and conv inputs, each set to zero alone, and the whole prefix."""
    model = case(name, dtype)
    last = model.blocks - 1
    kinds = {path.rsplit("/", 1)[-1] for path, leaf in leaves(model.prefixes) if leaf.dtype.kind == "f"}
    of_mixer = {"A": {"k", "v"}, "M": {"state", "conv_x", "conv_BC"}}
    assert kinds == set().union(*map(of_mixer.get, model.config.pattern))
    for kind in kinds:

        def drop(path, leaf, kind=kind):
            name = str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1])))
            return leaf * 0 if name == kind else leaf

        with model.precision:
            damaged = jax.tree_util.tree_map_with_path(drop, model.prefixes)
        moved = np.abs(model.denoise(model.noisy[0], damaged) - model.expected[0])
        assert moved[last].max() > 1e-3, kind
    moved = np.abs(model.denoise(model.noisy[0], model.empty(model.blocks)) - model.expected[0])
    assert moved[0].max() < 1e-9 and (moved[1:].max(axis=(1, 2)) > 1e-3).all()


@pytest.mark.xdist_group("AM-bidirectional")
def test_logits_are_those_of_real_ids_only():
    model = case("AM-bidirectional")
    assert model.params["embed"]["table"].shape[0] == 128
    assert model.train(model.texts, model.noisy).shape == (2, model.blocks, model.config.block_size, VOCAB)
