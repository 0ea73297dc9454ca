"""Packing: documents of tokens become rows of L tokens, and rows become the arrays of a batch. Pure numpy.

A row is a list of segments. Every segment starts at a block edge, and no two segments share a block.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

OPEN_ROWS = 1024  # rows that wait for a fitting piece; more fill better and hold more memory


class RowFormat(NamedTuple):
    """What turns a record into arrays: L, G, the special ids, and what stands behind a document's last token.

    tail   mask_fill, truncate: the rest of the last block is padding (invalid in the clean stream);
           eos_fill: it holds EOS, valid and scored
    """

    sequence_length: int
    block_size: int
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    tail: str

    @property
    def token_dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)


class Rows(NamedTuple):
    """The arrays of B rows; what they mean stands at `Batch`.

    tokens [B, L] int32, segments [B, K] int32, valid [B, L] bool, scored [B, L] bool
    """

    tokens: np.ndarray
    segments: np.ndarray
    valid: np.ndarray
    scored: np.ndarray


def token_dtype(vocab_size: int) -> np.dtype:
    """How token ids are stored: little-endian uint16 while they fit, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pack_documents(
    documents: Iterable[np.ndarray], sequence_length: int, block_size: int
) -> Iterator[list[np.ndarray]]:
    """Packing `document`: yields rows, each a list of segments, in an order that follows from the documents alone.

    A document (bos and eos included) of at most L tokens stays whole. A longer one is cut every L tokens into pieces
    that are documents of their own. A piece goes where it fits best: the open row with the fewest free blocks that
    still hold it; among equals the latest.
    """
    blocks_per_row = sequence_length // block_size
    open_rows: list[list[list[np.ndarray]]] = [[] for _ in range(blocks_per_row + 1)]  # by number of free blocks
    count = 0
    for document in documents:
        for start in range(0, len(document), sequence_length):
            piece = document[start : start + sequence_length]
            blocks = -(-len(piece) // block_size)
            free = next((free for free in range(blocks, blocks_per_row) if open_rows[free]), None)
            if free is None:
                row, free = [], blocks_per_row
                count += 1
            else:
                row = open_rows[free].pop()
            row.append(piece.copy())  # a view would keep the whole document alive
            if free == blocks:
                count -= 1
                yield row
            else:
                open_rows[free - blocks].append(row)
            if count > OPEN_ROWS:
                count -= 1
                yield next(rows.pop(0) for rows in open_rows if rows)
    for rows in open_rows:
        yield from rows


def pack_stream(documents: Iterable[np.ndarray], sequence_length: int) -> Iterator[list[np.ndarray]]:
    """Packing `concat`: the documents joined to one stream and cut every L tokens; only the last row can be shorter."""
    pending, length = [], 0
    for document in documents:
        pending.append(document)
        length += len(document)
        if length >= sequence_length:
            stream = np.concatenate(pending)
            whole = length - length % sequence_length
            for start in range(0, whole, sequence_length):
                yield [stream[start : start + sequence_length]]
            pending, length = [stream[whole:]], length - whole
    if length:
        yield [np.concatenate(pending)]


def encode_row(segments: list[np.ndarray], dtype: np.dtype) -> bytes:
    """A row as a record: uint32 n | uint32 length[n] | the token ids of all segments, little-endian."""
    header = np.array([len(segments), *(len(segment) for segment in segments)], dtype="<u4")
    return header.tobytes() + np.concatenate(segments).astype(dtype).tobytes()


def decode_row(record: bytes, dtype: np.dtype) -> list[np.ndarray]:
    """The inverse of `encode_row`: the segments, each [length] of int32."""
    count = int(np.frombuffer(record, "<u4", 1)[0])
    lengths = np.frombuffer(record, "<u4", count, offset=4)
    tokens = np.frombuffer(record, dtype, offset=4 + 4 * count).astype(np.int32)
    if count == 0 or len(tokens) != lengths.sum():
        raise ValueError(f"a row record of {count} segments holds {len(tokens)} tokens where {lengths.sum()} should be")
    return np.split(tokens, np.cumsum(lengths)[:-1])


def rows_to_arrays(records: list[bytes], layout: RowFormat) -> Rows:
    """The arrays of B records. BOS is valid and never scored, wherever it stands; padding is neither."""
    batch, length, block = len(records), layout.sequence_length, layout.block_size
    tokens = np.full((batch, length), layout.pad_id, np.int32)
    segments = np.zeros((batch, length // block), np.int32)
    valid = np.zeros((batch, length), bool)
    for row, record in enumerate(records):
        start = 0
        for number, segment in enumerate(decode_row(record, layout.token_dtype), start=1):
            stop = start + len(segment)
            edge = -(-stop // block) * block
            tokens[row, start:stop] = segment
            segments[row, start // block : edge // block] = number
            valid[row, start:stop] = True
            if layout.tail == "eos_fill":
                tokens[row, stop:edge] = layout.eos_id
                valid[row, stop:edge] = True
            start = edge
    return Rows(tokens, segments, valid, valid & (tokens != layout.bos_id))
