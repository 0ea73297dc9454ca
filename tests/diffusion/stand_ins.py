"""Denoisers small enough to know everything about: the exact posterior of a Markov source, a table of random logits.
Their hidden states are the logits.

Token ids: symbols 0 .. S-1, the mask S; V = S + 1. Both give the mask id a large logit, so a likelihood that leaves it
in the softmax is wrong at once.
"""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.data.batch import Batch
from diffjax.diffusion.corruption import draw

MASK_LOGIT = 3.0

compiled_draw = jax.jit(draw, static_argnames=("objective", "rows_per_step"))


def make_batch(tokens, block_size, valid=None, scored=None, segments=None, row=None):
    """A Batch of numpy arrays; everything valid and scored, one document a row, unless said otherwise."""
    tokens = np.asarray(tokens, np.int32)
    rows = len(tokens)
    valid = np.ones_like(tokens, bool) if valid is None else np.asarray(valid)
    scored = valid if scored is None else np.asarray(scored)
    if segments is None:
        segments = valid.reshape(rows, -1, block_size).any(-1)
    return Batch(
        tokens,
        np.asarray(segments, np.int32),
        valid,
        scored,
        np.arange(rows, dtype=np.int32) if row is None else np.asarray(row, np.int32),
    )


class MarkovPosterior:
    """Logits log p(x_j | the visible tokens of the block, all earlier blocks) of a first-order Markov source.

    Symbols of the block that are masked or invalid are summed out by enumerating all S^G completions.
    """

    def __init__(self, block_size, symbols=3, seed=0):
        rng = np.random.default_rng(seed)
        self.block_size, self.symbols, self.mask_id = block_size, symbols, symbols
        self.first = np.log(rng.dirichlet(np.ones(symbols)))
        self.step = np.log(rng.dirichlet(np.ones(symbols), symbols))
        self.completions = np.array(list(itertools.product(range(symbols), repeat=block_size)))
        self.config = SimpleNamespace(prefix="bidirectional", dtype="float64")

    def log_probability(self, tokens):
        """log p of one document, by the chain rule."""
        return self.first[tokens[0]] + sum(self.step[a, b] for a, b in itertools.pairwise(tokens))

    def train_hidden(self, params, clean, frontiers, frontier_index=None, *, segments, clean_valid, frontier_valid):
        rows, _, size = frontiers.shape
        blocks = segments.shape[1]
        index = jnp.broadcast_to(jnp.arange(blocks), (rows, blocks)) if frontier_index is None else frontier_index
        take = jax.vmap(lambda row, at: row[at])
        starts = (index == 0) | (take(segments, index) != take(segments, jnp.maximum(index - 1, 0)))
        previous = take(clean, jnp.maximum(index * size - 1, 0))
        completions = jnp.asarray(self.completions)
        inside = jnp.asarray(self.step)[completions[:, :-1], completions[:, 1:]].sum(-1)
        head = jnp.where(starts[..., None], jnp.asarray(self.first), jnp.asarray(self.step)[previous])
        joint = head[..., completions[:, 0]] + inside  # [B, F, completions]
        hidden = (frontiers == self.mask_id) | ~frontier_valid
        fits = (hidden[..., None, :] | (frontiers[..., None, :] == completions)).all(-1)
        joint = jnp.where(fits, joint, -jnp.inf)
        is_symbol = completions[:, :, None] == jnp.arange(self.symbols)  # [completions, G, S]
        each = jnp.where(is_symbol, joint[..., None, None], -jnp.inf)
        logits = jnp.maximum(jax.nn.logsumexp(each, axis=2), -1e4)  # [B, F, G, S], finite like a denoiser's
        return jnp.concatenate([logits, jnp.full((*logits.shape[:-1], 1), MASK_LOGIT)], -1), None, {}

    def logits(self, params, hidden):
        return hidden


class TableDenoiser:
    """Random logits for every content of the block, given the last token of the block before: params is the table.

    With clean_head, next-token logits that depend on the token read.
    """

    def __init__(self, block_size, symbols=3, prefix="bidirectional", dtype="float64"):
        self.block_size, self.symbols, self.mask_id = block_size, symbols, symbols
        self.config = SimpleNamespace(prefix=prefix, dtype=dtype)

    def init(self, seed=0, scale=1.5):
        vocab = self.symbols + 1
        rng = np.random.default_rng(seed)
        frontier = scale * rng.standard_normal((vocab + 1, vocab**self.block_size, self.block_size, vocab))
        frontier[..., self.mask_id] = MASK_LOGIT
        return {"frontier": frontier, "clean": scale * rng.standard_normal((vocab, vocab))}

    def train_hidden(
        self,
        params,
        clean,
        frontiers,
        frontier_index=None,
        *,
        segments,
        clean_valid,
        frontier_valid,
        clean_head=False,
    ):
        rows, _, size = frontiers.shape
        vocab = self.symbols + 1
        blocks = segments.shape[1]
        index = jnp.broadcast_to(jnp.arange(blocks), (rows, blocks)) if frontier_index is None else frontier_index
        previous = jax.vmap(lambda row, at: row[at])(jnp.asarray(clean), jnp.maximum(index * size - 1, 0))
        content = (frontiers * vocab ** jnp.arange(size)).sum(-1)
        logits = jnp.asarray(params["frontier"])[jnp.where(index == 0, vocab, previous), content]
        return logits, jnp.asarray(params["clean"])[clean] if clean_head else None, {}

    def logits(self, params, hidden):
        return hidden


def all_texts(symbols, length):
    """Every text of `length` symbols: [symbols^length, length]."""
    return np.array(list(itertools.product(range(symbols), repeat=length)), np.int32)
