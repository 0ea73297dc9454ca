"""Golden test g with the real denoiser: decoding with a context equals reading the whole prefix at every step."""

from dataclasses import replace

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


RULE, KNOBS = threshold(), {"temperature": 0.0, "top_p": 1.0, "threshold": 0.15}


def make(pattern, prefix="bidirectional"):
    """A denoiser with logits of standard deviation above 1/2, parameters by numpy."""
    denoiser = Denoiser(replace(TINY, pattern=pattern, prefix=prefix), vocab_size=V)
    rng = np.random.default_rng(3)

    def leaf(path, shape):
        mean = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(mean + 0.3 * rng.normal(size=shape.shape), shape.dtype)

    return denoiser, jax.tree_util.tree_map_with_path(leaf, denoiser.abstract_params())


def decode(denoiser, params, pause=None):
    state = driver.start(denoiser, params, RULE, PROMPTS, LIMITS, KNOBS, mask_id=MASK)
    while np.any(state.live):
        before, due = jax.device_get(state.context), np.asarray(state.settled & state.live)
        stop = pause is not None
        state = driver.advance(denoiser, RULE, params, state, flags(V, FORBID), flags(V, [EOS]), stop, mask_id=MASK)
        if pause:
            pause(before, due, state)
    return state


def decode_uncached(denoiser, params, like):
    """Row after row and step after step by loops; every step absorbs the row's whole prefix into an empty context."""
    denoise, results = jax.jit(denoiser.denoise), []
    B, width = len(PROMPTS), 2 * G  # the shapes of the driver's own prefill
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        tokens, nfe = [int(token) for token in prompt], 0
        while len(tokens) < limit and EOS not in tokens[len(prompt) :]:
            first = len(tokens) // G * G
            block = tokens[first:] + [MASK] * (first + G - len(tokens))
            open_ = [i for i in range(len(tokens) - first, G) if first + i < limit]
            while open_:
                context = denoiser.empty_context(B, like.tokens.shape[1])
                for begin in range(0, first, width):
                    chunk = np.zeros((B, width), np.int32)
                    piece = tokens[begin : min(begin + width, first)]
                    chunk[:, : len(piece)] = piece
                    context = driver._absorb(denoiser, params, chunk, context, np.full(B, len(piece), np.int32))
                logits = np.array(denoise(params, jnp.asarray([block] * B), context)[0], np.float64)
                assert logits.std() > 0.5
                nfe += 1
                logits[:, list(FORBID)] = -np.inf
                probability = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
                order = sorted(open_, key=lambda i: -probability[i].max())
                for i in [i for i in order if probability[i].max() >= KNOBS["threshold"]] or order[:1]:
                    block[i] = int(probability[i].argmax())
                    open_.remove(i)
                stops = [i for i in range(len(tokens) - first, G) if block[i] == EOS]
                open_ = [i for i in open_ if i < min(stops, default=G)]
            tokens = tokens[:first] + block[: min([i + 1 for i in stops] + [G, limit - first])]
        results.append((tokens, nfe, context))
    return results


SHARED = pytest.mark.xdist_group("sampling_hybrid")  # one worker, which compiles the loop once


@pytest.mark.parametrize(
    "pattern, prefix",
    [
        ("A", "bidirectional"),
        ("M", "causal"),
        pytest.param("AM", "bidirectional", marks=SHARED),
        ("AM", "causal"),
    ],
)
def test_g_cached_equals_uncached(pattern, prefix):
    """Tokens and calls are equal, and the driver's context is the one that absorbs the text afresh."""
    denoiser, params = make(pattern, prefix)
    state = jax.device_get(decode(denoiser, params)._replace(key=None))
    for row, (tokens, nfe, context) in enumerate(decode_uncached(denoiser, params, state)):
        assert state.tokens[row, : state.length[row]].tolist() == tokens
        assert state.nfe[row] == nfe < len(tokens)
        assert state.context.length[row] == context.length[0] == (len(tokens) - 1) // G * G
        for kept, fresh in zip(jax.tree.leaves(state.context), jax.tree.leaves(context), strict=True):
            axis = 0 if kept.ndim == 1 else kept.shape.index(len(PROMPTS))
            kept, fresh = np.take(kept, row, axis), np.take(np.asarray(fresh), 0, axis)
            assert np.abs(kept - fresh).max() <= 1e-5 * max(1, np.abs(fresh).max())


@SHARED
def test_I10_no_step_alters_the_context():
    """Between the start of a block and its commit the context stays bit for bit; a commit touches the due rows only."""
    denoiser, params = make("AM")
    seen = []

    def compare(before, due, state):
        seen.append(int(due.sum()))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.context)), strict=True):
            same = np.moveaxis(old == new, old.shape.index(len(PROMPTS)), 0).reshape(len(PROMPTS), -1).all(axis=-1)
            assert np.array_equal(same, ~due)

    decode(denoiser, params, pause=compare)
    assert seen[0] == 0 and sum(seen) >= 2
