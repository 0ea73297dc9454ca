"""T1, T2, T4, T7, T8, T9: training, absorb and denoise give the logits of the plain one-pass reference."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from diffjax.models.denoiser import Denoiser
from tests import reference
from tests.models.cases import CASES, CORNERS, MAIN, VOCAB, case, leaves, parametrize


@parametrize(MAIN, "float64", "float32")
def test_T1_denoise_after_absorb_equals_reference(name, dtype):
    model = case(name, dtype)
    logits = model.denoise(model.noisy[0], model.prefixes)
    assert logits.dtype == dtype and logits.std() >= 1.0
    model.close(logits, model.expected[0])


@parametrize(CORNERS)
def test_T1_corners(name, dtype):
    test_T1_denoise_after_absorb_equals_reference(name, dtype)


@parametrize(MAIN, "float64", "float32")
def test_T2_all_frontiers_equal_reference(name, dtype):
    model = case(name, dtype)
    model.close(model.train(model.texts, model.noisy), model.expected)


@parametrize(CORNERS)
def test_T2_all_frontiers_corners(name, dtype):
    test_T2_all_frontiers_equal_reference(name, dtype)


@parametrize(["A-bidirectional", "M-bidirectional", "M-causal", "AM-causal", "AMMMMM-bidirectional"])
def test_T2_some_frontiers_in_any_order_equal_reference(name, dtype):
    """F = 3 (F = K for one model), each row with its own blocks in its own order."""
    model = case(name, dtype)
    count = model.blocks if name == "M-bidirectional" else 3
    rng = np.random.default_rng(0)
    index = np.array([rng.permutation(model.blocks)[:count] for _ in range(2)], np.int32)
    index[0, 0], index[1, -1] = model.blocks - 1, 0
    logits = model.train(model.texts, np.take_along_axis(model.noisy, index[..., None], 1), index)
    model.close(logits, np.take_along_axis(model.expected, index[..., None, None], 1))


@parametrize(["A-bidirectional", "AM-bidirectional", "AM-long-bidirectional", "M-long-causal"])
def test_T2_one_frontier_equals_reference(name, dtype):
    """F = 1 for every block: K copies of the text, row k with frontier k."""
    model = case(name, dtype)
    rows = np.broadcast_to(model.texts[0], (model.blocks, model.length))
    logits = model.train(rows, model.noisy[0][:, None], np.arange(model.blocks, dtype=np.int32)[:, None])
    model.close(logits[:, 0], model.expected[0])


@parametrize(["AM-bidirectional"])
def test_T2_reference_kernels_give_the_same(name, dtype):
    model = case(name, dtype, ssd="reference", attention="reference")
    model.close(model.train(model.texts, model.noisy), case(name, dtype).expected)


@parametrize(MAIN)
def test_T4_denoise_leaves_the_context_and_repeats_its_bits(name, dtype):
    model = case(name, dtype)
    before = [(path, leaf.copy()) for path, leaf in leaves(model.prefixes)]
    first = model.denoise(model.noisy[0], model.prefixes)
    second = model.denoise(model.noisy[0], model.prefixes)
    for (path, old), (_, new) in zip(before, leaves(model.prefixes), strict=True):
        assert np.array_equal(old, new), path
    assert np.array_equal(first, second)


@parametrize([name for name in MAIN if name != "AMMMMM-bidirectional"])
def test_T7_any_split_into_absorb_calls(name, dtype):
    """Every row takes its own pieces; a causal prefix may be cut anywhere, also inside a block."""
    model = case(name, dtype)
    size = model.config.block_size
    step = 1 if model.config.prefix == "causal" else size
    window = max(2 * size, 3)
    window -= window % step
    rng = np.random.default_rng(3)
    context = model.empty(model.blocks)
    length, target = np.zeros(model.blocks, int), np.arange(model.blocks) * size
    while (length < target).any():
        count = np.minimum(step * rng.integers(0, window // step + 1, model.blocks), target - length)
        pieces = rng.integers(5, VOCAB, (model.blocks, window)).astype(np.int32)  # what is not counted is not read
        for row, taken in enumerate(count):
            pieces[row, :taken] = model.texts[0, length[row] : length[row] + taken]
        before = leaves(context)
        context = model.absorb(pieces, context, count)
        length += count
        assert np.array_equal(np.asarray(context.length), length)
        idle = count == 0
        for (path, old), (_, new) in zip(before, leaves(context), strict=True):
            rows = 0 if old.ndim == 1 else old.ndim - (5 if "conv_BC" in path else 4)  # behind repeats and runs
            assert np.array_equal(np.compress(idle, old, rows), np.compress(idle, new, rows)), path
    model.close(model.denoise(model.noisy[0], context), model.expected[0])


@parametrize([name for name in MAIN if MAIN[name][0].prefix == "causal" and MAIN[name][0].block_size > 1])
def test_T7_causal_context_of_any_length(name, dtype):
    """A causal prefix need not be whole blocks: the frontier stands right after its last token."""
    model = case(name, dtype)
    size, rows = model.config.block_size, model.blocks
    count = np.arange(rows) * (size + 1) % (model.length - size) + 1
    context = model.absorb(np.broadcast_to(model.texts[0], (rows, model.length)), model.empty(rows), count)
    logits = model.denoise(model.noisy[0], context)
    for row, taken in enumerate(count):
        model.close(logits[row], model.reference(model.texts[0, :taken], model.noisy[0, row]))


@parametrize(["A-causal", "AM-bidirectional"])
def test_T8_a_row_alone_equals_the_row_among_others(name, dtype):
    model = case(name, dtype)
    together = model.denoise(model.noisy[0], model.prefixes)
    for k in (0, model.blocks - 1):
        context = model.absorb(model.texts[:1], model.empty(1), [k * model.config.block_size])
        model.close(model.denoise(model.noisy[0, k : k + 1], context)[0], together[k])


@parametrize(["A-bidirectional", "M-causal", "AM-bidirectional"])
def test_T9_commit_in_the_other_prefix_mode_is_another_model(name, dtype):
    model = case(name, dtype)
    other = {"causal": "bidirectional", "bidirectional": "causal"}[model.config.prefix]
    denoiser = Denoiser(replace(model.config, prefix=other), vocab_size=VOCAB)
    rows = np.broadcast_to(model.texts[0], (model.blocks, model.length))
    count = np.arange(model.blocks, dtype=np.int32) * model.config.block_size
    with model.precision:
        context = jax.jit(denoiser.absorb)(model.params, rows, model.empty(model.blocks), count)
    wrong = np.abs(model.denoise(model.noisy[0], context) - model.expected[0]).max(axis=(1, 2))
    assert wrong[0] <= 1e-9 and (wrong[1:] > 1e-2).all(), wrong


@parametrize(["M-forward-causal"])
def test_forward_only_makes_both_prefix_modes_equal(name, dtype):
    model = case(name, dtype)
    other = replace(model, config=replace(model.config, prefix="bidirectional"))
    assert np.array_equal(other.texts, model.texts)
    other.close(other.train(model.texts, model.noisy), model.expected)


@parametrize(["A-causal", "M-causal", "AM-causal"])
def test_clean_logits_equal_reference(name, dtype):
    model = case(name, dtype)
    expected = np.array(
        [reference.clean_logits(model.reference_params, model.config, VOCAB, text) for text in model.texts]
    )
    with model.precision:
        logits = np.asarray(jax.jit(model.denoiser.clean_logits)(model.params, model.texts))
    model.close(logits, expected)


@parametrize(["AM-causal"])
def test_clean_head_rides_on_the_training_pass(name, dtype):
    model = case(name, dtype)
    with model.precision:
        outputs = jax.jit(lambda *a: model.denoiser.train_hidden(*a, clean_head=True))
        hidden, clean_hidden, _ = outputs(model.params, model.texts, model.noisy)
        frontier_logits, clean_logits = (model.denoiser.logits(model.params, h) for h in (hidden, clean_hidden))
        clean_only = jax.jit(model.denoiser.clean_logits)(model.params, model.texts)
    model.close(np.asarray(frontier_logits), model.expected)
    model.close(np.asarray(clean_logits), np.asarray(clean_only))


@parametrize(["M-bidirectional"])
def test_embedding_is_added_to_the_frontier(name, dtype):
    """The same in denoise and training, and adding table[b] - table[a] turns token a into token b."""
    model = case(name, dtype)
    table = model.reference_params["embed"]["table"]
    other = np.flip(model.noisy, axis=1)
    added = table[other] - table[model.noisy]
    plain = model.train(model.texts, other)
    model.close(model.train(model.texts, model.noisy, embedding=added), plain)
    assert np.abs(plain - model.expected).max() > 0.1
    model.close(model.denoise(model.noisy[0], model.prefixes, embedding=added[0]), plain[0])


@parametrize(["A-bidirectional", "AM-causal"])
def test_a_full_context_gives_nan_and_never_wrong_logits(name, dtype):
    model = case(name, dtype)
    full = model.absorb(
        np.broadcast_to(model.texts[0], (model.blocks, model.length)),
        model.prefixes,
        np.full(model.blocks, 2 * model.config.block_size),
    )
    logits = model.denoise(model.noisy[0], full)
    fits = np.arange(model.blocks) + 2 <= model.blocks
    assert np.isnan(logits[~fits]).all()
    expected = [model.reference(text, block) for text, block in zip(_twice(model), model.noisy[0], strict=False)]
    model.close(logits[fits], np.array(expected))


def _twice(model):
    """The document of each row that fits: k blocks of text 0, then its first two blocks again."""
    size = model.config.block_size
    return [np.concatenate([model.texts[0, : k * size], model.texts[0, : 2 * size]]) for k in range(model.blocks - 1)]


@parametrize(["AM-causal"])
def test_grow_context_changes_nothing(name, dtype):
    model = case(name, dtype)
    with model.precision:
        larger = model.denoiser.grow_context(model.prefixes, 2 * model.length)
    model.close(model.denoise(model.noisy[0], larger), model.expected[0])


def test_every_case_is_covered():
    """The patterns, prefix modes and block sizes that the law is stated for."""
    seen = {(config.pattern, config.prefix) for config, _ in MAIN.values()}
    assert seen == {(p, m) for p in ("A", "M", "AM", "AMMMMM") for m in ("bidirectional", "causal")}
    assert {config.block_size for config, _ in CASES.values()} >= {1, 2, 3, 8}
    assert {config.mamba.directions for config, _ in CASES.values()} == {"separate", "shared", "forward"}


@pytest.mark.xdist_group("AM-bidirectional")
def test_bfloat16_is_finite_and_near():
    half, full = case("AM-bidirectional", "bfloat16"), case("AM-bidirectional")
    logits = half.train(half.texts, half.noisy)
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    error = np.sqrt(np.mean((logits - full.expected) ** 2)) / full.expected.std()
    assert error < 0.05, error
