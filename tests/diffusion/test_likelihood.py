"""The NELBO estimators against enumeration: sources of known likelihood, denoisers whose bound is a finite sum."""

import itertools
import math
from functools import lru_cache, partial

import jax
import numpy as np
import pytest

from diffjax.diffusion.likelihood import (
    ESTIMATORS,
    block_nats,
    count_queries,
    oracle_queries,
    order_queries,
    ranks,
)
from tests.diffusion.stand_ins import MarkovPosterior, TableDenoiser, all_texts, make_batch


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def oracle(denoiser, params, batch, tail="mask_fill"):
    """[B] nats of every row, by enumeration of all masks."""

    @jax.jit
    def nats(params, batch):
        return block_nats(denoiser, params, batch, oracle_queries(batch), denoiser.mask_id, tail).sum(-1)

    return np.asarray(nats(params, batch))


@lru_cache
def estimator(denoiser, name, samples):
    """(params, batch, seeds [n]) -> nats [n, B, K] of every block."""

    def nats(params, batch, seed):
        queries = ESTIMATORS[name](batch, seed, 0, samples)
        return block_nats(denoiser, params, batch, queries, denoiser.mask_id, "mask_fill")

    return jax.jit(jax.vmap(nats, (None, None, 0)))


# L1, L3, L6: a source whose likelihood is known


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_L1_nelbo_of_the_exact_posterior_is_the_likelihood_of_every_text(block_size):
    source = MarkovPosterior(block_size)
    texts = all_texts(3, 4)
    truth = [-source.log_probability(text) for text in texts]
    np.testing.assert_allclose(oracle(source, None, make_batch(texts, block_size)), truth, atol=1e-10)
    assert abs(np.exp(-np.array(truth)).sum() - 1.0) < 1e-10


@pytest.mark.parametrize("tail", ["mask_fill", "truncate"])
def test_L1_holds_for_unscored_first_tokens_partial_tails_and_packed_documents(tail):
    """A row: a document of 6 tokens in 2 blocks, one of 3 tokens; the first token of each is given, not scored."""
    source = MarkovPosterior(4)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, (40, 16))
    length = {0: 6, 8: 3}
    valid = np.zeros(tokens.shape, bool)
    for start, size in length.items():
        valid[:, start : start + size] = True
    scored = valid.copy()
    scored[:, list(length)] = False
    batch = make_batch(tokens, 4, valid, scored, segments=np.tile([1, 1, 2, 0], (40, 1)))
    truth = [
        -sum(source.log_probability(row[s : s + n]) - source.first[row[s]] for s, n in length.items()) for row in tokens
    ]
    np.testing.assert_allclose(oracle(source, None, batch, tail), truth, atol=1e-10)


def test_L3_expected_nelbo_is_at_least_the_entropy_for_any_denoiser():
    source = MarkovPosterior(4)
    texts = all_texts(3, 4)
    batch = make_batch(texts, 4)
    probability = np.exp([source.log_probability(text) for text in texts])
    entropy = -(probability * np.log(probability)).sum()
    denoiser = TableDenoiser(4)
    for seed, scale in [(0, 0.1), (1, 1.0), (2, 3.0)]:
        expected = probability @ oracle(denoiser, denoiser.init(seed, scale), batch)
        assert expected > entropy + 1e-3
    assert abs(probability @ oracle(source, None, batch) - entropy) < 1e-10


@pytest.mark.parametrize("name", ["count", "chain"])
def test_L6_block_size_one_is_the_exact_likelihood_for_every_draw(name):
    source = MarkovPosterior(1)
    texts = all_texts(3, 4)
    truth = [-source.log_probability(text) for text in texts]
    nats = estimator(source, name, 1)(None, make_batch(texts, 1), np.arange(3))
    np.testing.assert_allclose(nats.sum(-1), np.tile(truth, (3, 1)), atol=1e-10)


# L2, L4, L7: a denoiser without a joint distribution


def table_batch():
    rng = np.random.default_rng(5)
    valid = np.ones((3, 8), bool)
    valid[1, 6:] = False
    valid[2, 4:] = False
    scored = valid.copy()
    scored[:, 0] = False
    return make_batch(rng.integers(0, 3, (3, 8)), 4, valid, scored)


def test_L2_oracle_is_the_mean_over_all_orders():
    denoiser, batch = TableDenoiser(4), table_batch()
    params = denoiser.init()
    permutations = np.array(list(itertools.permutations(range(4))), np.float64)  # values; ranked among scored tokens
    scored = (batch.valid & batch.scored).reshape(3, 1, 2, 4)
    values = np.broadcast_to(permutations[:, None], (3, 24, 2, 4))

    @jax.jit
    def nats(params, batch):
        order = ranks(values, np.broadcast_to(scored, values.shape))
        return block_nats(denoiser, params, batch, order_queries(batch, order), denoiser.mask_id, "mask_fill").sum(-1)

    np.testing.assert_allclose(nats(params, batch), oracle(denoiser, params, batch), atol=1e-10)


@pytest.mark.parametrize(("name", "samples"), [("count", 1), ("count", 5), ("time", 1), ("chain", 2)])
def test_L2_estimators_agree_with_the_oracle(name, samples):
    denoiser, batch = TableDenoiser(4), table_batch()
    params = denoiser.init()
    nats = np.asarray(estimator(denoiser, name, samples)(params, batch, np.arange(8000, dtype=np.uint32))).sum(-1)
    error = nats.std(0, ddof=1) / math.sqrt(len(nats))
    truth = oracle(denoiser, params, batch)
    assert (np.abs(nats.mean(0) - truth) < 4 * error).all()
    assert (error < 0.02 * truth).all()


def test_L4_oracle_weights_give_every_token_weight_one():
    """sum_k C(n, k) (k-1)! (n-k)! / n! k = n, for every number of scored tokens in a block of 8."""
    scored = np.arange(8) < np.arange(9)[:, None]
    queries = jax.jit(oracle_queries)(make_batch(np.zeros((9, 8)), 8, scored=scored, valid=np.ones_like(scored)))
    np.testing.assert_allclose(queries.weight.sum(1), scored, atol=1e-10)
    assert (scored[:, None] | ~np.asarray(queries.masked)).all()
    with pytest.raises(ValueError, match="block_size 9"):
        oracle_queries(make_batch(np.zeros((1, 9)), 9))


def test_L7_standard_error_covers_the_oracle_in_95_of_100_runs():
    """200 runs of 16 replicates: |mean - oracle| < 2.131 standard errors, the t quantile of 15 degrees."""
    denoiser, batch = TableDenoiser(4), table_batch()
    params = denoiser.init()
    nats = np.asarray(estimator(denoiser, "count", 1)(params, batch, np.arange(3200, dtype=np.uint32) + 9)).sum((1, 2))
    runs = nats.reshape(200, 16)
    error = runs.std(1, ddof=1) / 4.0
    covered = np.abs(runs.mean(1) - oracle(denoiser, params, batch).sum()) < 2.131 * error
    assert 0.90 < covered.mean() < 0.99


# L5: the law of the count


@lru_cache
def counts(rows, samples):
    """Masked tokens k [B, samples] of one-block rows with n = 1 .. 32 scored tokens in turn."""
    tokens = 1 + np.arange(rows) % 32
    scored = np.arange(32) < tokens[:, None]
    batch = make_batch(np.zeros((rows, 32)), 32, scored=scored, valid=np.ones_like(scored))
    queries = jax.jit(partial(count_queries, seed=3, replicate=0, samples=samples))(batch)
    masked, weight = np.asarray(queries.masked), np.asarray(queries.weight)
    assert (scored[:, None] | ~masked).all()
    hidden = masked.sum(-1)
    np.testing.assert_allclose(weight.max(-1), tokens[:, None] / (hidden * samples), rtol=1e-6)
    return tokens, hidden, masked


def test_L5_each_count_is_equally_likely():
    """Chi-square of the first sample over 200 independent rows for each n; then over all n together."""
    tokens, hidden, _ = counts(6400, 1)
    statistics, degrees = 0.0, 0
    for n in range(1, 33):
        drawn = np.bincount(hidden[tokens == n, 0], minlength=n + 1)[1:]
        assert len(drawn) == n and drawn.sum() == 200
        statistic = ((drawn - 200 / n) ** 2 / (200 / n)).sum()
        assert statistic < (n - 1) + 5 * math.sqrt(2 * (n - 1)) + 12
        statistics, degrees = statistics + statistic, degrees + n - 1
    assert abs(statistics - degrees) < 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("samples", [7, 32, 64, 128])
def test_L5_counts_of_one_row_are_spread_evenly(samples):
    """m points 1/m apart fall into each of n equal bins floor(m/n) or ceil(m/n) times: rounding favours no bin."""
    tokens, hidden, _ = counts(96, samples)
    for n, row in zip(tokens, hidden, strict=True):
        drawn = np.bincount(row, minlength=n + 1)
        assert drawn[0] == 0 and len(drawn) == n + 1
        # A point on a bin's edge may round to either side.
        assert drawn[1:].min() >= samples // n - (samples % n == 0) and drawn[1:].max() <= samples // n + 1


def test_masked_sets_of_a_count_are_uniform():
    """n = 4: each of the 4 single tokens and the 6 pairs is equally likely, given its count."""
    tokens, hidden, masked = counts(6400, 1)
    for n, k in [(4, 1), (4, 2), (5, 4)]:
        sets = masked[(tokens == n) & (hidden[:, 0] == k), 0, :n] @ (2 ** np.arange(n))
        drawn = np.unique(sets, return_counts=True)[1]
        ways = math.comb(n, k)
        assert len(drawn) == ways
        assert ((drawn - len(sets) / ways) ** 2 / (len(sets) / ways)).sum() < 30


# L8


def test_L8_a_row_keeps_its_draws_and_its_nats_in_any_batch():
    denoiser, batch = TableDenoiser(4), table_batch()
    params = denoiser.init()
    nats = estimator(denoiser, "count", 5)
    whole = nats(params, batch, np.arange(2))
    alone = nats(params, jax.tree.map(lambda leaf: leaf[[2, 1]], batch), np.arange(2))
    np.testing.assert_array_equal(np.asarray(whole)[:, [2, 1]], alone)
