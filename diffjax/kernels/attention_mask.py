"""The mask of every attention call, in one place: an interval of keys for each query, and the query's own block.

With `a` the first token of a document and blocks of G tokens, all masks of the model are intervals [lo, hi):

- a clean token of a bidirectional prefix reads [a, end of its block), of a causal prefix [a, itself];
- a frontier of block b reads [a, b G) of the clean stream (in decoding: what its row has absorbed), and its own valid
  tokens;
- pads of the clean stream read nothing, hi <= lo. Pads close a document, so an interval that ends at the last valid
  token of a block never spans one.

The functions below take arrays that broadcast, inside kernels as well as outside.
"""


def reads(lo, hi, position):
    """Whether a query with interval [lo, hi) reads the key at `position`."""
    return (lo <= position) & (position < hi)


def shares_block(query, key, block_size: int):
    """Whether query and own key, counted from the first frontier on, belong to one frontier."""
    return query // block_size == key // block_size
