"""T12: one objective, many families. The loss of the real denoiser against a loop over blocks with the reference."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
import pytest

from diffjax.config import MambaConfig, ModelConfig, ObjectiveConfig
from diffjax.diffusion.likelihood import block_nats, count_queries, oracle_queries
from diffjax.diffusion.objectives import block_diffusion
from diffjax.models.denoiser import Denoiser
from tests import reference
from tests.diffusion.stand_ins import compiled_draw, make_batch
from tests.models.cases import randomise

LENGTH, VOCAB, MASK, BOS = 12, 37, 4, 1
MODEL = ModelConfig(
    width=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_width=24,
    dtype="float64",
    mamba=MambaConfig(heads=2, head_dim=6, state=5),
)


def text_rows(block_size):
    """One full row and one that ends inside a block; the first token of each is a BOS, given and not scored."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(5, VOCAB, (2, LENGTH), np.int32)
    tokens[:, 0] = BOS
    valid = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - max(1, block_size // 2)]])
    return make_batch(np.where(valid, tokens, 0), block_size, valid, valid & (np.arange(LENGTH) > 0))


@dataclass(frozen=True)
class Family:
    """A model, an objective, and their loss and gradient on two rows."""

    block_size: int
    objective: ObjectiveConfig
    pattern: str = "A"
    prefix: str = "bidirectional"

    @cached_property
    def denoiser(self):
        shape = {"pattern": self.pattern, "layers": len(self.pattern), "prefix": self.prefix}
        return Denoiser(replace(MODEL, block_size=self.block_size, **shape), vocab_size=VOCAB)

    @cached_property
    def params(self):
        return randomise(self.denoiser.abstract_params(), 7)

    def logits(self, clean, block):
        """[r, V] of a block after the clean tokens of its document, from the definition."""
        params = reference.as_float64(self.params)
        return reference.block_logits(params, self.denoiser.config, VOCAB, np.asarray(clean), np.asarray(block))

    @cached_property
    def objective_function(self):
        return block_diffusion(self.denoiser, self.objective, MASK, "mask_fill")

    @cached_property
    def compiled(self):
        return jax.jit(self.objective_function)

    def noise(self, step, batch):
        return compiled_draw(self.objective, 0, step, batch, len(batch.row))

    def loss(self, batch, noise):
        return self.compiled(self.params, batch, noise)

    def naive_loss(self, batch, noise):
        """sum over rows of (K_b / F_b) sum over frontiers and masked tokens of w(t) CE, block by block."""
        total, size = 0.0, self.block_size
        index = noise.frontier_index
        scorable = (batch.valid & batch.scored).reshape(2, -1, size).any(-1).sum(1)
        for b in range(2):
            slots = range(LENGTH // size) if index is None else index[b]
            share = scorable[b] / min(scorable[b], len(slots))
            for f, k in enumerate(slots):
                span = slice(k * size, (k + 1) * size)
                hidden = np.asarray(noise.masked[b, f])
                if not hidden.any():
                    continue
                shown = np.where(hidden | ~batch.valid[b, span], MASK, batch.tokens[b, span])
                entropy = nats(self.logits(batch.tokens[b, : k * size], shown), batch.tokens[b, span])
                weight = 1.0 if self.objective.weighting == "uniform" else 1.0 / float(noise.rate[b, f])
                total += share * weight * entropy[hidden].sum()
        return total


def nats(logits, targets, exclude=()):
    """-log softmax(logits)[target] in plain numpy, ids in `exclude` left out of the softmax."""
    logits = np.array(logits)
    logits[:, list(exclude)] = -np.inf
    shifted = logits - logits.max(-1, keepdims=True)
    return np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(targets)), targets]


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


FULLY_MASKED = ObjectiveConfig(mask_rate=(1.0, 1.0))
FAMILIES = {
    "autoregressive": Family(1, FULLY_MASKED, "AM", "causal"),
    "full-sequence": Family(LENGTH, ObjectiveConfig(frontiers=1), "M"),
    "bd3lm": Family(4, ObjectiveConfig(frontiers="all")),
    "seed": Family(4, ObjectiveConfig(frontiers=1, weighting="uniform"), "M"),
    "two-frontiers": Family(2, ObjectiveConfig(frontiers=2), "M", "causal"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_T12_loss_is_that_of_the_plain_loop(name):
    family = FAMILIES[name]
    batch = text_rows(family.block_size)
    for step in range(3):
        noise = family.noise(step, batch)
        assert noise.masked.any()
        loss, denominator, _ = family.loss(batch, noise)
        assert float(loss) == pytest.approx(family.naive_loss(batch, noise), rel=1e-6)
        assert denominator == batch.scored.sum()


def test_T12_block_size_one_fully_masked_is_the_exact_autoregressive_likelihood():
    """Token j is read off a MASK at its own position, after the causal prefix: loss and NELBO are both -log p."""
    family = FAMILIES["autoregressive"]
    batch = text_rows(1)
    training = likelihood = 0.0
    for b in range(2):
        for j in np.flatnonzero(batch.scored[b]):
            logits = family.logits(batch.tokens[b, :j], [MASK])
            training += nats(logits, batch.tokens[b, [j]])[0]
            likelihood += nats(logits, batch.tokens[b, [j]], exclude=[MASK])[0]
    assert float(family.loss(batch, family.noise(0, batch))[0]) == pytest.approx(training, rel=1e-10)

    def nelbo(params, batch):
        return block_nats(family.denoiser, params, batch, count_queries(batch, 0, 0, 1), MASK, "mask_fill").sum()

    assert float(jax.jit(nelbo)(family.params, batch)) == pytest.approx(likelihood, rel=1e-10)


def test_T12_no_masked_token_gives_exact_zeros():
    family = FAMILIES["bd3lm"]
    batch = text_rows(4)
    noise = family.noise(0, batch)
    gradients = jax.jit(jax.value_and_grad(lambda *args: family.objective_function(*args)[0]))
    loss, gradient = gradients(family.params, batch, noise._replace(masked=np.zeros_like(noise.masked)))
    assert loss == 0.0
    assert all((np.asarray(leaf) == 0.0).all() for leaf in jax.tree.leaves(gradient))
    loss, gradient = gradients(family.params, batch, noise)
    assert loss > 0.0
    assert all(np.isfinite(leaf).all() and (np.asarray(leaf) != 0.0).any() for leaf in jax.tree.leaves(gradient))


def test_nelbo_of_the_denoiser_is_the_sum_over_all_masks():
    """The oracle, which asks for 15 frontiers a block on one clean pass, against one reference call a mask."""
    family = FAMILIES["bd3lm"]
    batch = text_rows(4)
    batch = jax.tree.map(lambda leaf: leaf[1:], batch)  # the row with a BOS and a tail

    def nelbo(params, batch):
        return block_nats(family.denoiser, params, batch, oracle_queries(batch), MASK, "mask_fill")

    truth = np.zeros(3)
    for k in range(3):
        span = slice(4 * k, 4 * k + 4)
        places = np.flatnonzero(batch.scored[0, span])
        n = len(places)
        for size in range(1, n + 1):
            weight = math.factorial(size - 1) * math.factorial(n - size) / math.factorial(n)
            for hidden in itertools.combinations(places, size):
                shown = np.where(batch.valid[0, span], batch.tokens[0, span], MASK)
                shown[list(hidden)] = MASK
                entropy = nats(family.logits(batch.tokens[0, : 4 * k], shown), batch.tokens[0, span], exclude=[MASK])
                truth[k] += weight * entropy[list(hidden)].sum()
    np.testing.assert_allclose(jax.jit(nelbo)(family.params, batch)[0], truth, rtol=1e-10)


def test_next_token_loss_is_that_of_the_causal_stream():
    family = Family(4, ObjectiveConfig(autoregressive=1.0), "AM", "causal")
    batch = text_rows(4)
    noise = family.noise(0, batch)
    loss, _, metrics = family.loss(batch, noise)
    truth = 0.0
    for tokens, scored in zip(batch.tokens, batch.scored, strict=True):
        logits = reference.clean_logits(reference.as_float64(family.params), family.denoiser.config, VOCAB, tokens)
        truth += nats(logits[:-1], tokens[1:])[scored[1:]].sum()
    assert float(metrics["next_token_ce"][0]) == pytest.approx(truth, rel=1e-8)
    assert float(loss) == pytest.approx(truth + family.naive_loss(batch, noise), rel=1e-6)
