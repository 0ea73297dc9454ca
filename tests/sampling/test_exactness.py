"""Golden test g with the real denoiser: decoding with the context equals decoding that reads the whole prefix at every step."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import MambaConfig, ModelConfig
from diffjax.models.denoiser import Denoiser
from diffjax.sampling import driver
from diffjax.sampling.rules import threshold
from tests.sampling.nets import EOS, FIRST, FORBID, MASK, flags

G, V = 4, 64
TINY = ModelConfig(
    layers=2, width=32, block_size=G, heads=2, kv_heads=1, head_dim=16, mlp_width=48,
    mamba=MambaConfig(heads=2, head_dim=16, state=8, conv=4),
)  # fmt: skip
PROMPTS = [np.random.default_rng(n).integers(FIRST, V, n) for n in (1, 2 * G + 3, G)]
LIMITS = [3 * G, 5 * G, 4 * G - 1]


class Tokens(NamedTuple):
    length: jax.Array
    tokens: jax.Array


@dataclass(frozen=True)
class Uncached:
    """The same denoiser without a cache: its context is the text itself, absorbed anew by every denoise."""

    inner: Denoiser

    @property
    def block_size(self):
        return self.inner.block_size

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    def empty_context(self, batch, capacity):
        return Tokens(jnp.zeros(batch, jnp.int32), jnp.zeros((batch, capacity), jnp.int32))

    def absorb(self, params, tokens, context, count=None):
        columns = context.length[:, None] + jnp.arange(tokens.shape[1])
        columns = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], columns, context.tokens.shape[1])
        rows = jnp.arange(len(tokens))[:, None]
        return Tokens(context.length + count, context.tokens.at[rows, columns].set(tokens, mode="drop"))

    def denoise(self, params, block, context):
        fresh = self.inner.empty_context(*context.tokens.shape)
        return self.inner.denoise(params, block, self.inner.absorb(params, context.tokens, fresh, context.length))


def decode(denoiser, params, temperature, pause=None):
    rule = threshold()
    knobs = {"temperature": temperature, "top_p": 0.95, "threshold": 0.2}
    state = driver.start(denoiser, params, rule, PROMPTS, LIMITS, knobs, mask_id=MASK, seed=5)
    while np.any(state.live):
        before = jax.device_get(state.context)
        due = np.asarray(state.settled & state.live)
        state = driver.advance(denoiser, rule, params, state, flags(V, FORBID), flags(V, [EOS]), pause is not None, mask_id=MASK)
        if pause:
            pause(before, due, state)
    return state


@pytest.mark.parametrize("pattern", ["A", "M", "AM"])
@pytest.mark.parametrize("prefix", ["bidirectional", "causal"])
def test_g_cached_equals_uncached(pattern, prefix):
    denoiser = Denoiser(replace(TINY, pattern=pattern, prefix=prefix), vocab_size=V)
    params = denoiser.init(jax.random.key(1))
    params["head"]["kernel"] *= 20.0
    uncached = Uncached(denoiser)
    for temperature in (0.0, 1.0):
        kept, read = decode(denoiser, params, temperature), decode(uncached, params, temperature)
        for name in ("tokens", "masked", "length", "finish", "nfe", "commits"):
            assert np.array_equal(getattr(kept, name), getattr(read, name)), name
        assert sorted(kept.context.length.tolist()) == sorted(read.context.length.tolist())
        block = jnp.where(jnp.arange(G) < 2, jnp.take(kept.tokens, jnp.arange(G), axis=1), MASK)
        got = jax.jit(denoiser.denoise)(params, block, kept.context)
        want = jax.jit(uncached.denoise)(params, block, read.context)
        assert np.std(want) > 0.5
        assert np.abs(got - want).max() <= 1e-5 * max(1, np.abs(want).max())
    assert len({tuple(row) for row in np.asarray(kept.tokens)}) == 3


def test_I10_no_step_alters_the_context():
    """Between the start of a block and its commit the context stays bit for bit; a commit touches the due rows only."""
    denoiser = Denoiser(replace(TINY, pattern="AM"), vocab_size=V)
    params = denoiser.init(jax.random.key(1))
    seen = []

    def compare(before, due, state):
        seen.append(int(due.sum()))
        if not due.any():
            jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.context))
        assert state.context.length.tolist() == (np.asarray(before.length) + G * due).tolist()

    decode(denoiser, params, 0.0, pause=compare)
    assert seen[0] == 0 and sum(seen) > 3
