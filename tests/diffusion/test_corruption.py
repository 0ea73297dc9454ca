"""The law of the noise: who is a frontier, at which rate, what is hidden, and that nothing else has a say."""

from functools import partial

import jax
import numpy as np
import pytest

from diffjax.config import ObjectiveConfig
from diffjax.diffusion.corruption import MASK, RATE, corrupt, draw, select_frontiers
from tests.diffusion.stand_ins import compiled_draw, make_batch

BLOCKS, SIZE, ROWS = 6, 4, 8
MASK_ID = 4


def ragged_batch(rows=ROWS, seed=0):
    """Rows with blocks of pads, a BOS in the first block, partly filled last blocks and one row of pads alone."""
    rng = np.random.default_rng(seed)
    length = BLOCKS * SIZE
    end = rng.integers(1, length + 1, rows)
    end[1], end[2] = 0, length
    valid = np.arange(length) < end[:, None]
    scored = valid & (np.arange(length) > 0)
    return make_batch(np.where(valid, rng.integers(5, 30, (rows, length)), 0), SIZE, valid, scored)


def drawer(rows_per_step=ROWS, **objective):
    """(seed, step, batch) -> Noise, compiled once for an objective and a shape."""
    return partial(compiled_draw, ObjectiveConfig(**objective), rows_per_step=rows_per_step)


@pytest.mark.parametrize("slots", [1, 3, 5, 8])
def test_every_scorable_block_is_a_frontier_with_exact_probability(slots):
    """Over all offsets r each of the K_b blocks is drawn F_b times in K_b, ascending, never twice and never another."""
    rng = np.random.default_rng(slots)
    available = np.repeat(np.arange(1, 9), np.arange(1, 9))  # K_b rows for each K_b, one an offset
    offset = np.concatenate([np.arange(k, dtype=np.int32) for k in range(1, 9)])
    places = [rng.permutation(8)[:k] for k in range(1, 9)]
    scorable = np.array([np.isin(np.arange(8), places[k - 1]) for k in available])
    select = jax.jit(select_frontiers, static_argnums=1)
    index, live = map(np.asarray, select(scorable, slots, offset))
    frontiers = np.minimum(available, slots)
    np.testing.assert_array_equal(live.sum(1), frontiers)
    assert (index >= 0).all() and (index < 8).all()
    assert all((np.diff(row[alive]) > 0).all() for row, alive in zip(index, live, strict=True))
    for k in range(1, 9):
        mine = available == k
        counts = np.bincount(index[mine][live[mine]], minlength=8)
        np.testing.assert_array_equal(counts, np.where(scorable[mine][0], min(k, slots), 0))


def test_offsets_are_uniform_and_rows_without_text_have_no_frontier():
    scored = np.zeros((1024, BLOCKS * SIZE), bool)
    scored[:, [0, 9, 13, 23]] = True  # blocks 0, 2, 3, 5
    scored[-1] = False
    batch = make_batch(np.full(scored.shape, 7), SIZE, np.ones_like(scored), scored)
    noise = drawer(1024, frontiers=1)(0, 0, batch)
    counts = np.bincount(np.asarray(noise.frontier_index)[:-1, 0], minlength=BLOCKS)
    assert counts[[1, 4]].sum() == 0
    expected = 1023 / 4
    assert ((counts[[0, 2, 3, 5]] - expected) ** 2 / expected).sum() < 21.1  # chi-square, 3 degrees, 1e-4
    assert noise.weight[-1, 0] == 0.0 and not noise.masked[-1].any()
    assert np.isfinite(noise.weight).all()


def naive_draw(objective, seed, step, batch, rows_per_step, frontier_index):
    """Rates and hidden tokens once more, one (row, block) at a time."""
    fold = jax.random.fold_in
    key = jax.random.key(seed, impl="threefry2x32")
    shared = float(jax.random.uniform(fold(fold(key, RATE), step)))
    slots = frontier_index.shape[1]
    low, high = objective.mask_rate
    rate = np.zeros(frontier_index.shape)
    masked = np.zeros((*frontier_index.shape, SIZE), bool)
    for b, row in enumerate(batch.row):
        for f, block in enumerate(frontier_index[b]):
            span = slice(block * SIZE, (block + 1) * SIZE)
            if objective.stratified:
                quantile = (shared + (f * rows_per_step + row) / (slots * rows_per_step)) % 1.0
            else:
                quantile = float(jax.random.uniform(fold(fold(fold(fold(key, RATE), step), row), block)))
            rate[b, f] = low + (high - low) * quantile
            draws = jax.random.uniform(fold(fold(fold(fold(key, MASK), step), row), block), (SIZE,))
            masked[b, f] = batch.valid[b, span] & batch.scored[b, span] & (np.asarray(draws) < rate[b, f])
    return rate, masked


@pytest.mark.parametrize("stratified", [True, False])
def test_noise_is_the_stated_function_of_seed_step_row_and_block(stratified):
    batch = ragged_batch()._replace(row=np.array([3, 0, 7, 1, 4, 2, 6, 5], np.int32))
    objective = ObjectiveConfig(frontiers="all", mask_rate=(0.2, 0.9), stratified=stratified)
    noise = drawer(frontiers="all", mask_rate=(0.2, 0.9), stratified=stratified)(11, 5, batch)
    every = np.tile(np.arange(BLOCKS), (ROWS, 1))
    rate, masked = naive_draw(objective, 11, 5, batch, ROWS, every)
    assert noise.frontier_index is None
    np.testing.assert_allclose(noise.rate, rate, atol=1e-6)
    np.testing.assert_array_equal(noise.masked, masked)
    scorable = (batch.scored & batch.valid).reshape(ROWS, BLOCKS, SIZE).any(-1)
    np.testing.assert_allclose(noise.weight, np.where(scorable, 1 / rate, 0.0), rtol=1e-5)


def test_few_frontiers_carry_the_weight_of_the_blocks_they_stand_for():
    batch = ragged_batch()
    objective = ObjectiveConfig(frontiers=3, weighting="uniform")
    noise = drawer(frontiers=3, weighting="uniform")(2, 9, batch)
    index = np.asarray(noise.frontier_index)
    _, masked = naive_draw(objective, 2, 9, batch, ROWS, index)
    scorable = (batch.scored & batch.valid).reshape(ROWS, BLOCKS, SIZE).any(-1)
    available = scorable.sum(1)
    live = np.arange(3) < np.minimum(available, 3)[:, None]
    np.testing.assert_array_equal(noise.masked, masked & live[..., None])
    share = available / np.maximum(np.minimum(available, 3), 1)
    np.testing.assert_allclose(noise.weight, np.where(live, share[:, None], 0.0), rtol=1e-6)
    assert np.take_along_axis(scorable, index, 1)[live].all()


@pytest.mark.parametrize("frontiers", ["all", 2])
def test_T13_noise_of_some_rows_is_that_of_the_whole_step(frontiers):
    """Bit-equal for halves, for single rows in another order, and whatever the tokens are."""
    batch = ragged_batch()
    whole = drawer(frontiers=frontiers)(0, 3, batch)
    order = np.array([6, 1, 4, 0])
    some = drawer(frontiers=frontiers)(0, 3, jax.tree.map(lambda leaf: leaf[order], batch))
    other_text = drawer(frontiers=frontiers)(0, 3, batch._replace(tokens=batch.tokens[::-1]))
    for part, all_rows, text in zip(*map(jax.tree.leaves, (some, whole, other_text)), strict=True):
        np.testing.assert_array_equal(part, np.asarray(all_rows)[order])
        np.testing.assert_array_equal(text, all_rows)


def test_T13_noise_is_the_same_on_a_mesh():
    batch = ragged_batch()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    spread = drawer(frontiers=2)(0, 3, jax.device_put(batch, rows))
    for part, whole in zip(*map(jax.tree.leaves, (spread, drawer(frontiers=2)(0, 3, batch))), strict=True):
        np.testing.assert_array_equal(part, whole)


def test_seed_and_step_change_the_noise():
    batch = ragged_batch()
    draws = [np.asarray(drawer(frontiers="all")(seed, step, batch).masked) for seed, step in [(0, 0), (0, 1), (1, 0)]]
    assert (draws[0] != draws[1]).any() and (draws[0] != draws[2]).any() and (draws[1] != draws[2]).any()


def full_batch(rows):
    return make_batch(np.full((rows, BLOCKS * SIZE), 7), SIZE)


def test_rates_of_a_step_are_an_even_grid_and_each_slot_is_uniform_over_steps():
    noise = jax.jit(jax.vmap(lambda step: draw(ObjectiveConfig(mask_rate=(0.5, 1.0)), 0, step, full_batch(4), 4)))(
        np.arange(600)
    )
    quantile = (np.asarray(noise.rate, np.float64) - 0.5) / 0.5  # [steps, 4, BLOCKS]
    ordered = np.sort(quantile.reshape(600, -1), axis=1)
    np.testing.assert_allclose(np.diff(ordered, axis=1), 1 / (4 * BLOCKS), atol=1e-6)
    own = np.sort(quantile, axis=2)  # one row: F quantiles, 1/F apart
    np.testing.assert_allclose(np.diff(own, axis=2), 1 / BLOCKS, atol=1e-6)
    for slot in quantile.reshape(600, -1).T:  # Kolmogorov-Smirnov, 1e-5 a slot
        gap = np.abs(np.sort(slot) - (np.arange(600) + 0.5) / 600).max()
        assert gap * np.sqrt(600) < 2.5


def test_masked_share_is_the_rate_and_L4_expected_weight_is_one():
    rows = 2048
    noise = drawer(rows, frontiers="all", mask_rate=(0.1, 1.0))(0, 0, full_batch(rows))
    rate, masked = np.asarray(noise.rate), np.asarray(noise.masked)
    for low in np.arange(0.1, 1.0, 0.1):
        bin_ = (rate >= low) & (rate < low + 0.1)
        tokens = bin_.sum() * SIZE
        expected, deviation = rate[bin_].mean(), 0.5 / np.sqrt(tokens)
        assert abs(masked[bin_].mean() - expected) < 5 * deviation
    by_position = masked.mean((0, 1))
    np.testing.assert_allclose(by_position, by_position.mean(), atol=0.03)
    weighted = np.asarray(noise.weight)[..., None] * masked
    assert abs(weighted.mean() - 1.0) < 5 * weighted.std() / np.sqrt(weighted.size)
    # Neighbouring blocks hide independently: their residuals do not correlate.
    residual = masked - rate[..., None]
    product = residual[:, 1:] * residual[:, :-1]
    assert abs(product.mean()) < 5 * product.std() / np.sqrt(product.size)


def test_min_one_mask_hides_one_more_token_exactly_where_none_was_hidden():
    """Closed form: with t ~ U(0, 1) a block of n tokens hides n/2 of them, forced by 1/(n + 1) more."""
    rows, objective = 2048, {"frontiers": "all", "weighting": "uniform", "mask_rate": (0.0, 1.0)}
    batch = full_batch(rows)
    plain = np.asarray(drawer(rows, **objective)(0, 0, batch).masked)
    forced = np.asarray(drawer(rows, **objective, min_one_mask=True)(0, 0, batch).masked)
    empty = ~plain.any(-1)
    np.testing.assert_array_equal(forced[~empty], plain[~empty])
    np.testing.assert_array_equal(forced[empty].sum(-1), 1)
    assert abs(empty.mean() - 1 / (SIZE + 1)) < 5 * np.sqrt(0.2 * 0.8 / empty.size)
    ragged = ragged_batch()
    noise = drawer(frontiers="all", weighting="uniform", mask_rate=(0.0, 0.0), min_one_mask=True)(0, 0, ragged)
    scored = (ragged.scored & ragged.valid).reshape(ROWS, BLOCKS, SIZE)
    np.testing.assert_array_equal(noise.masked.sum(-1), scored.any(-1))
    assert (scored | ~np.asarray(noise.masked)).all()


@pytest.mark.parametrize("tail", ["mask_fill", "truncate", "eos_fill"])
@pytest.mark.parametrize("frontiers", ["all", 2])
def test_corruption_shows_and_weighs_what_each_tail_says(tail, frontiers):
    batch = ragged_batch(seed=3)
    noise = drawer(frontiers=frontiers)(0, 0, batch)
    inputs, targets, weight, valid = map(np.asarray, corrupt(batch, noise, MASK_ID, tail))
    index = np.tile(np.arange(BLOCKS), (ROWS, 1)) if frontiers == "all" else np.asarray(noise.frontier_index)
    for b in range(ROWS):
        for f, block in enumerate(index[b]):
            occupied = batch.valid[b, block * SIZE : (block + 1) * SIZE].any()
            for g in range(SIZE):
                token, is_valid = batch.tokens[b, block * SIZE + g], batch.valid[b, block * SIZE + g]
                filled = tail == "mask_fill" and occupied and not is_valid
                hidden = bool(noise.masked[b, f, g])
                assert targets[b, f, g] == token
                assert inputs[b, f, g] == (MASK_ID if hidden or filled else token)
                assert valid[b, f, g] == (is_valid or filled)
                assert weight[b, f, g] == (noise.weight[b, f] if hidden else 0.0)


def test_a_mask_id_in_the_text_is_a_token_like_others():
    """What is hidden is told by the noise, never read off the tokens."""
    batch = make_batch(np.full((2, BLOCKS * SIZE), MASK_ID), SIZE)
    noise = drawer(2, frontiers="all", mask_rate=(0.5, 0.5))(0, 0, batch)
    weight = np.asarray(corrupt(batch, noise, MASK_ID, "mask_fill")[2])
    np.testing.assert_array_equal(weight > 0, noise.masked)
    assert 0 < (weight > 0).mean() < 1
