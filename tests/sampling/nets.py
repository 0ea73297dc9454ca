"""Stand-in denoisers for the sampling tests: tiny nets whose answers are known by other means."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PAD, BOS, EOS, UNK, MASK = range(5)
FIRST = 5  # first ordinary id


class Context(NamedTuple):
    length: jax.Array  # [B]
    digest: jax.Array  # [B] int32, a hash of every absorbed token in order


@dataclass(frozen=True, eq=False)
class HashNet:
    """Logits read from a random table at a hash of (everything absorbed, the block with its masks, the position)."""

    block_size: int
    vocab_size: int = 24
    entries: int = 251

    def init(self, seed, sharpness=3.0, stop_bias=0.0):
        table = np.random.default_rng(seed).normal(size=(self.entries, self.vocab_size)) * sharpness
        table[:, EOS] += stop_bias
        return jnp.asarray(table, jnp.float32)

    def empty_context(self, batch, capacity):
        return Context(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def absorb(self, params, tokens, context, count=None):
        count = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32) if count is None else count
        digest = context.digest
        for column in range(tokens.shape[1]):
            digest = jnp.where(column < count, (digest * 31 + tokens[:, column] + 7) % self.entries, digest)
        return Context(context.length + count, digest)

    def denoise(self, params, block, context, valid=None):
        weights = 1 + jnp.arange(self.block_size) ** 2
        mixed = jnp.sum(block * weights, axis=-1) * 13 + context.digest * 17 + context.length
        entry = (mixed[:, None] + 5 * jnp.arange(self.block_size)) % self.entries
        return params[entry]

    def digest(self, tokens):
        """The same hash by a plain loop."""
        value = 0
        for token in tokens:
            value = (value * 31 + int(token) + 7) % self.entries
        return value

    def logits(self, params, block, absorbed):
        """One row without jax: block [G], absorbed: all tokens before it -> [G,V] numpy."""
        mixed = sum(int(t) * (1 + i**2) for i, t in enumerate(block)) * 13 + self.digest(absorbed) * 17 + len(absorbed)
        return np.asarray(params)[[(mixed + 5 * i) % self.entries for i in range(self.block_size)]]


@dataclass(frozen=True, eq=False)
class ScriptNet:
    """Logits read from a table params [blocks, 2^G, G, V] at (blocks absorbed, which positions are masks)."""

    block_size: int
    vocab_size: int = 24

    def script(self, blocks, logits=0.0):
        """A writable table, the same for every pattern: logits broadcasts to [blocks, 2^G, G, V]."""
        shape = (blocks, 2**self.block_size, self.block_size, self.vocab_size)
        return np.array(np.broadcast_to(logits, shape), np.float32)

    def saying(self, tokens):
        """A table that is sure of these tokens, whatever the masks."""
        blocks = -(-len(tokens) // self.block_size)
        wanted = np.resize(tokens, (blocks, 1, self.block_size, 1))
        return self.script(blocks, 20.0 * (wanted == np.arange(self.vocab_size)))

    def empty_context(self, batch, capacity):
        return Context(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def absorb(self, params, tokens, context, count=None):
        return context._replace(length=context.length + count)

    def denoise(self, params, block, context, valid=None):
        pattern = jnp.sum((block == MASK) << jnp.arange(self.block_size), axis=-1)
        return jnp.asarray(params)[context.length // self.block_size, pattern]


class Posterior:
    """The exact net of a joint table over one block: logits are the log marginals given the visible tokens."""

    def __init__(self, table):
        """table: [n]*G float64 of probabilities; symbol s has token id FIRST + s."""
        self.table = np.asarray(table, np.float64) / np.sum(table)
        self.block_size, self.symbols = self.table.ndim, self.table.shape[0]
        self.vocab_size = FIRST + self.symbols
        self.worlds = np.array(list(itertools.product(range(self.symbols), repeat=self.block_size)))
        self.marginals = {}  # by visible pattern

    def empty_context(self, batch, capacity):
        return Context(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def absorb(self, params, tokens, context, count=None):
        return context  # one block only: traced, never run

    def denoise(self, params, block, context, valid=None):
        worlds = jnp.asarray(self.worlds)
        symbol = block - FIRST
        agrees = jnp.all((block == MASK)[:, None] | (symbol[:, None] == worlds), axis=-1)
        weight = agrees * jnp.asarray(self.table.reshape(-1), jnp.float32)
        marginal = jnp.einsum("bw,wgs->bgs", weight, jax.nn.one_hot(worlds, self.symbols))
        logits = jnp.log(marginal / jnp.sum(marginal, axis=-1, keepdims=True))
        return jnp.concatenate([jnp.full((*block.shape, FIRST), -30.0), logits], axis=-1)

    def marginal(self, visible):
        """By numpy: visible is a tuple with a symbol or None per position -> [G, symbols]."""
        if visible not in self.marginals:
            weight = self.table.reshape(-1) * np.all(
                [[v is None or v == s for v, s in zip(visible, world, strict=True)] for world in self.worlds], axis=1
            )
            counts = np.array(
                [[weight[self.worlds[:, g] == s].sum() for s in range(self.symbols)] for g in range(self.block_size)]
            )
            self.marginals[visible] = counts / weight.sum()
        return self.marginals[visible]


FORBID = (PAD, BOS, UNK, MASK)


def flags(vocab_size, ids):
    out = np.zeros(vocab_size, bool)
    out[list(ids)] = True
    return out
