"""The objective against plain loops and closed forms: its sums, its limits, its gradients."""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ObjectiveConfig
from diffjax.diffusion.corruption import Noise, select_frontiers
from diffjax.diffusion.objectives import block_diffusion, chunked_cross_entropy, cross_entropy
from tests.diffusion.stand_ins import MarkovPosterior, TableDenoiser, all_texts, compiled_draw, make_batch

DENOISER = TableDenoiser(3)
BLOCKS = 4


def text_batch(rows=4):
    """Rows of 4 blocks of 3 tokens: one whole, one with an unscored token, one with a half block, one of 2 blocks."""
    rng = np.random.default_rng(2)
    valid = np.ones((rows, 12), bool)
    valid[2, 10:] = False
    valid[3, 6:] = False
    scored = valid.copy()
    scored[1, 0] = False
    return make_batch(rng.integers(0, 3, (rows, 12)), 3, valid, scored)


@lru_cache
def losses(denoiser=DENOISER, **objective):
    """(params, batch, noise) -> (loss sum, denominator, metrics, gradients of the loss sum), compiled."""
    loss = block_diffusion(denoiser, ObjectiveConfig(**objective), denoiser.mask_id, "mask_fill")

    def run(params, batch, noise):
        def summed(params):
            numerator, denominator, metrics = loss(params, batch, noise)
            return numerator, (denominator, metrics)

        (numerator, (denominator, metrics)), gradient = jax.value_and_grad(summed, has_aux=True)(params)
        return numerator, denominator, metrics, gradient

    return jax.jit(run)


def float32(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


PARAMS = float32(DENOISER.init())


def all_noise(batch, **objective):
    return compiled_draw(ObjectiveConfig(**objective), 0, 4, batch, len(batch.row))


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def naive_sums(denoiser, params, batch, noise):
    """(loss sum, sum of masked cross-entropies) by a loop over blocks: each block's input is built by hand."""
    size, vocab = denoiser.block_size, denoiser.symbols + 1
    loss = masked_entropy = 0.0
    for b, tokens in enumerate(batch.tokens):
        for k in range(len(tokens) // size):
            span = slice(k * size, (k + 1) * size)
            shown = [
                denoiser.mask_id if noise.masked[b, k, g] or not batch.valid[b, k * size + g] else token
                for g, token in enumerate(tokens[span])
            ]
            code = sum(token * vocab**g for g, token in enumerate(shown))
            previous = vocab if k == 0 else tokens[k * size - 1]
            entropy = -log_softmax(params["frontier"][previous, code])
            for g in range(size):
                if noise.masked[b, k, g]:
                    loss += entropy[g, tokens[span][g]] / noise.rate[b, k]
                    masked_entropy += entropy[g, tokens[span][g]]
    return loss, masked_entropy


# The cross-entropy


def test_cross_entropy_is_exact_for_large_logits_and_so_is_its_gradient():
    rng = np.random.default_rng(0)
    logits = np.float32(rng.standard_normal((5, 7)) * [[1.0], [1e-3], [100.0], [1e4], [1e30]])
    targets = rng.integers(0, 7, 5).astype(np.int32)
    gradient = jax.grad(lambda logits: cross_entropy(logits, targets).sum())(logits)
    truth = -log_softmax(logits)[np.arange(5), targets]
    np.testing.assert_allclose(cross_entropy(logits, targets), truth, rtol=1e-5, atol=1e-5)
    expected = np.exp(log_softmax(logits)) - np.eye(7)[targets]
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert cross_entropy(jnp.asarray(logits, jnp.bfloat16), targets).dtype == jnp.float32


@pytest.mark.parametrize("chunk, largest", [(None, 24), (24, 24), (12, 12), (7, 6), (5, 4), (1, 1)])
def test_cross_entropy_in_chunks_is_that_of_the_whole_and_never_holds_more_logits(chunk, largest):
    """24 tokens a row: the largest divisor within the chunk is taken. Truth: float64 log-softmax and its gradient."""
    rng = np.random.default_rng(1)
    hidden, kernel = rng.standard_normal((2, 8, 3, 5)), rng.standard_normal((5, 11))
    targets, weight = rng.integers(0, 11, (2, 8, 3)), rng.standard_normal((2, 8, 3))
    seen = []

    def loss(hidden, kernel):
        def logits_of(part):
            seen.append(part.shape[1:-1])
            return part @ kernel

        entropy = chunked_cross_entropy(logits_of, hidden, targets, chunk)
        return (weight * entropy).sum(), entropy

    with jax.enable_x64(True):
        (_, entropy), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, kernel)
    assert {math.prod(shape) for shape in seen} == {largest}
    logits = hidden @ kernel
    truth = -np.take_along_axis(log_softmax(logits), targets[..., None], -1)[..., 0]
    d_logits = weight[..., None] * (np.exp(log_softmax(logits)) - np.eye(11)[targets])
    np.testing.assert_allclose(entropy, truth, rtol=1e-12)
    np.testing.assert_allclose(gradients[0], d_logits @ kernel.T, atol=1e-12)
    np.testing.assert_allclose(gradients[1], np.einsum("bfgd,bfgv->dv", hidden, d_logits), atol=1e-12)


# Sums and metrics


def test_loss_is_the_weighted_sum_over_masked_tokens_and_the_denominator_all_scored_ones():
    batch = text_batch()
    noise = all_noise(batch)
    numerator, denominator, metrics, _ = losses()(PARAMS, batch, noise)
    loss, masked_entropy = naive_sums(DENOISER, PARAMS, batch, noise)
    scored, masked = int((batch.scored & batch.valid).sum()), int(noise.masked.sum())
    np.testing.assert_allclose(numerator, loss, rtol=1e-5)
    assert denominator == scored == 12 + 11 + 10 + 6
    np.testing.assert_allclose(metrics["masked_ce"], (masked_entropy, masked), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], (loss, scored), rtol=1e-5)
    np.testing.assert_allclose(metrics["nelbo_nats_per_token"], (loss, scored), rtol=1e-5)
    assert metrics["masked_tokens"] == (masked, 0) and metrics["scored_tokens"] == (scored, 0)
    scorable = (batch.scored & batch.valid).reshape(4, BLOCKS, 3).any(-1)
    assert metrics["empty_frontiers"] == ((scorable & ~np.asarray(noise.masked).any(-1)).sum(), 0)


@pytest.mark.parametrize("objective", [{"weighting": "uniform"}, {"mask_rate": (0.3, 1.0)}, {"mask_rate": (1e-3, 0.8)}])
def test_a_loss_that_bounds_nothing_is_not_called_a_nelbo(objective):
    batch = text_batch()
    shapes = jax.eval_shape(losses(**objective), PARAMS, batch, all_noise(batch))
    assert "nelbo_nats_per_token" not in shapes[2] and "loss" in shapes[2]


def test_T13_sums_of_microbatches_are_those_of_the_batch():
    batch = text_batch()
    noise = all_noise(batch)
    whole = losses()(PARAMS, batch, noise)
    parts = [
        losses()(PARAMS, *jax.tree.map(lambda leaf, half=half: leaf[half], (batch, noise)))
        for half in (slice(0, 2), slice(2, 4))
    ]
    for total, first, second in zip(*map(jax.tree.leaves, (whole, *parts)), strict=True):
        np.testing.assert_allclose(first + second, total, rtol=2e-5, atol=1e-6)


def test_a_batch_without_a_masked_token_has_loss_and_gradients_of_exactly_zero():
    batch = text_batch()
    noise = all_noise(batch)._replace(masked=np.zeros((4, BLOCKS, 3), bool))
    numerator, denominator, metrics, gradient = losses()(PARAMS, batch, noise)
    assert numerator == 0.0 and denominator == 39.0
    assert all((np.asarray(leaf) == 0.0).all() for leaf in jax.tree.leaves(gradient))
    assert metrics["empty_frontiers"][0] == 4 + 4 + 4 + 2
    pads = jax.tree.map(np.zeros_like, batch)
    numerator, denominator, _, gradient = losses()(PARAMS, pads, all_noise(pads))
    assert numerator == 0.0 and denominator == 0.0
    assert all((np.asarray(leaf) == 0.0).all() for leaf in jax.tree.leaves(gradient))


def test_next_token_loss_counts_scored_tokens_with_a_left_neighbour_in_their_document():
    denoiser = TableDenoiser(3, prefix="causal")
    rng = np.random.default_rng(3)
    scored = np.ones((2, 12), bool)
    scored[0, [0, 6]] = False
    batch = make_batch(rng.integers(0, 3, (2, 12)), 3, scored=scored, valid=np.ones((2, 12), bool))
    batch = batch._replace(segments=np.array([[1, 1, 2, 2], [1, 1, 1, 2]], np.int32))
    noise = all_noise(batch)
    expected, counted = 0.0, 0
    for b in range(2):
        for j in range(1, 12):
            if scored[b, j] and batch.segments[b, j // 3] == batch.segments[b, (j - 1) // 3]:
                row = log_softmax(PARAMS["clean"][batch.tokens[b, j - 1]])
                expected -= row[batch.tokens[b, j]]
                counted += 1
    assert counted == 10 + 10  # row 0 without tokens 0 and 6, row 1 without 0 and 9
    numerator, denominator, metrics, gradient = losses(denoiser, autoregressive=0.5)(PARAMS, batch, noise)
    plain = losses(denoiser)(PARAMS, batch, noise)
    np.testing.assert_allclose(metrics["next_token_ce"], (expected, counted), rtol=1e-5)
    np.testing.assert_allclose(numerator, plain[0] + 0.5 * expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["nelbo_nats_per_token"][0], plain[0], rtol=1e-6)
    assert denominator == plain[1] == 22
    assert np.abs(gradient["clean"]).max() > 0 and np.abs(plain[3]["clean"]).max() == 0


# Limits (T12) and unbiasedness over frontiers (T6)


def test_T12_block_size_one_fully_masked_is_the_autoregressive_loss():
    source = MarkovPosterior(1)
    texts = all_texts(3, 4)
    batch = make_batch(texts, 1)
    exact = source.train_hidden
    source.train_hidden = lambda *args, clean_head, **kwargs: exact(*args, **kwargs)
    # No logit for the mask id: training keeps it in the softmax, the source does not know it.
    source.logits = lambda params, hidden: hidden.at[..., source.mask_id].set(-1e9)
    objective = ObjectiveConfig(mask_rate=(1.0, 1.0))
    numerator, denominator, _ = jax.jit(block_diffusion(source, objective, 3, "mask_fill"))(
        None, batch, all_noise(batch, mask_rate=(1.0, 1.0))
    )
    truth = -sum(source.log_probability(text) for text in texts)
    np.testing.assert_allclose(numerator, truth, rtol=1e-5)
    assert denominator == texts.size


def gradients_with(batch, noise, index, share, live=True):
    """Loss and gradient with the blocks index [B, F] of an all-frontier noise alone, weights times `share` [B, 1]."""
    take = jax.vmap(lambda row, at: row[at])
    chosen = Noise(
        jnp.asarray(index, jnp.int32),
        take(noise.rate, index),
        take(noise.masked, index) & jnp.asarray(live)[..., None],
        take(noise.weight, index) * share * live,
    )
    numerator, _, _, gradient = losses()(PARAMS, batch, chosen)
    return numerator, gradient["frontier"]


def test_T6_all_frontiers_are_the_mean_of_single_ones():
    batch = text_batch()
    batch = make_batch(batch.tokens, 3)
    noise = all_noise(batch)
    whole, _, _, gradient = losses()(PARAMS, batch, noise)
    each = [gradients_with(batch, noise, np.full((4, 1), k), float(BLOCKS)) for k in range(BLOCKS)]
    np.testing.assert_allclose(np.mean([loss for loss, _ in each]), whole, rtol=1e-5)
    np.testing.assert_allclose(np.mean([g for _, g in each], axis=0), gradient["frontier"], rtol=1e-4, atol=1e-5)


def test_T6_two_frontiers_averaged_over_all_offsets_are_all_frontiers():
    """K_b = 4, 4, 4 and 2 scorable blocks in the rows: offsets 0 .. 3, modulo K_b."""
    batch = text_batch()
    noise = all_noise(batch)
    scorable = (batch.scored & batch.valid).reshape(4, BLOCKS, 3).any(-1)
    available = scorable.sum(1)
    whole, _, _, gradient = losses()(PARAMS, batch, noise)
    each = []
    for offset in range(BLOCKS):
        index, live = select_frontiers(scorable, 2, np.int32(offset % available))
        share = (available / np.minimum(available, 2))[:, None].astype(np.float32)
        each.append(gradients_with(batch, noise, np.asarray(index), share, np.asarray(live)))
    np.testing.assert_allclose(np.mean([loss for loss, _ in each]), whole, rtol=1e-5)
    np.testing.assert_allclose(np.mean([g for _, g in each], axis=0), gradient["frontier"], rtol=1e-4, atol=1e-5)
