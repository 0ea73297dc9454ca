"""Decays of pairs of tokens for the SSD kernels on TPU, a strip of tokens j at a time.

A chunk is cut into strips of `height` tokens. With `end` the sum of decays at the last token of the strip of j, in the
order of the scan, a token i of a later strip reads j with two factors of at most 1:

    exp(reach_i - cum_j) = far_i near_j        far_i = exp(reach_i - end)        near_j = exp(end - cum_j)

`near` goes into the token's input, and `far` is one row for a strip. Own tokens are read from their own strip only, so
one tile as high as a strip holds all their decays exp(cum'_i - cum'_j): its row k is for the k-th token of the strip of
i. So a head needs Q (height + Q / height) exponentials instead of Q Q, and few of them are alive at once. Blocks of
fewer than 8 tokens, the rows of a register, share strips of 8; there far_i = exp(reach_i - cum_j) has a row for each j,
and near_j = 1. In a scan, which has one stream, clean and own tokens are the same tokens.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from diffjax.kernels.pallas_tpu import LANES, SUBLANES, Call, decay


def strip_scratch(chunk: int, block_size: int, every: bool = True) -> tuple[str, ...]:
    """What `Strips.of` fills, in names of `Call.temporary`: `near`, then `far` of every strip. No later token reads the
    last strip (the first one in reverse), and without `every` the last has no `far`, unless it is the only one: then
    products are shorter, but rows of u do not fill whole tiles."""
    strips = chunk // block_size
    return ("heads",) * (1 if block_size < SUBLANES else 1 + (strips if every else max(strips - 1, 1)))


class Strips(NamedTuple):
    """The decays of a step's heads. `times_*` multiply a tile of pairs [j, i] of one head with them, strip by strip."""

    chunk: int
    height: int
    read: int  # tokens of the strips with a `far`, the chunk's first
    later: list[Array]  # for each strip, whether i is of a later block than j: [1 or height, Q]
    far: list  # refs [h, Q]; none where blocks share strips
    columns: Array | None  # there: cum as [Q, h]
    cum_own: Array
    reach: Array

    @classmethod
    def of(cls, call: Call, block_size: int, cum, cum_own, reach, near, far: list, reverse: bool = False) -> "Strips":
        """Fills `near` and `far`; all are refs [h, Q]."""
        chunk, height, shift = call.chunk, max(block_size, SUBLANES), block_size.bit_length() - 1
        shape = (1 if far else height, chunk)
        j, i = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        later = [((j + start) >> shift) < (i >> shift) for start in range(0, chunk, height)]
        if not far:
            near[...] = jnp.ones_like(near)
            return cls(chunk, height, chunk, later, far, jnp.transpose(cum[...]), cum_own, reach)
        ends = cum[...]
        strip_of_j = jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1) >> shift
        for k, rows in enumerate(far):
            last = k * height if reverse else (k + 1) * height - 1
            end = cum[:, last : last + 1]
            rows[...] = decay(reach[...] - end)
            ends = jnp.where(strip_of_j == k, end, ends)
        near[...] = decay(ends - cum[...])
        return cls(chunk, height, len(far) * height, later, far, None, cum_own, reach)

    @property
    def same(self) -> Array:
        """Whether j and i are in one strip, [Q, Q]."""
        j, i = (jax.lax.broadcasted_iota(jnp.int32, (self.chunk, self.chunk), axis) for axis in (0, 1))
        return (j & -self.height) == (i & -self.height)

    def cut(self, pairs: Array) -> list[Array]:
        return [pairs[start : start + self.height] for start in range(0, pairs.shape[0], self.height)]

    def folded(self, pairs: Array) -> Array:
        """[Q, Q] -> [height, Q]: for every i the j of its own strip."""
        strips = self.cut(pairs)
        return functools.reduce(lambda some, k: jnp.where(self._in_strip(k), strips[k], some), range(len(strips)), 0.0)

    def spread(self, own: Array) -> list[Array]:
        """The way back, [height, Q] each: 0 where j is in another strip than i."""
        return [jnp.where(self._in_strip(k), own, 0) for k in range(self.chunk // self.height)]

    def _in_strip(self, k: int) -> Array:
        """Whether i is in strip k, [height, Q]."""
        i = jax.lax.broadcasted_iota(jnp.int32, (self.height, self.chunk), 1)
        return (i & -self.height) == k * self.height

    def far_of(self, row, k: int) -> Array:
        """Of one head and strip k, [1 or height, Q]."""
        if self.far:
            return self.far[k][row]
        return decay(self.reach[row] - self.columns[k * self.height : (k + 1) * self.height, row])

    def own(self, row) -> Array:
        """[height, Q]: one head's decays of own tokens, row k for the k-th token of the strip of i."""
        rows = min(self.height, LANES)
        k, i = (jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), axis) for axis in (0, 1))
        lane = (i & -rows) + k

        def tile(first: int, at: int) -> Array:
            start = at - at % max(self.height, LANES) + first  # rows of a strip higher than LANES read other lanes
            read = jnp.broadcast_to(self.cum_own[row, start : start + LANES], (rows, LANES))
            read = jnp.take_along_axis(read, lane, axis=1, mode="promise_in_bounds")
            return decay(self.cum_own[row, at : at + LANES] - read)

        tiles = [[tile(first, at) for at in range(0, self.chunk, LANES)] for first in range(0, self.height, rows)]
        return jnp.concatenate([jnp.concatenate(line, axis=1) for line in tiles], axis=0)

    def times_far(self, row, pairs: Array) -> list[Array]:
        """The strips with a `far`, of pairs [Q, Q]."""
        return [strip * self.far_of(row, k) for k, strip in enumerate(self.cut(pairs[: self.read]))]

    def times_either(self, row, own: Array, pairs: Array) -> Array:
        """pairs [Q + read, Q], with own j, then with clean j, as one [Q, Q]: clean where i is of a later block."""
        strips = self.cut(pairs[: self.chunk])
        for k, clean in enumerate(self.cut(pairs[self.chunk :])):
            later = self.later[k]
            strips[k] = jnp.where(later, clean, strips[k]) * jnp.where(later, self.far_of(row, k), own)
        first_unread = self.read // self.height
        return jnp.concatenate(strips[:first_unread] + [strip * own for strip in strips[first_unread:]], axis=0)
