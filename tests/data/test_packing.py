"""Every document comes back from the rows exactly, blocks hold one document, and the three masks say what they must."""

import numpy as np
import pytest

from diffjax.data import packing
from diffjax.data.packing import RowFormat, decode_row, encode_row, pack_documents, pack_stream, rows_to_arrays

L, G, V = 32, 4, 300
PAD, BOS, EOS = 0, 1, 2


def layout(tail="mask_fill", vocab_size=V) -> RowFormat:
    return RowFormat(L, G, vocab_size, PAD, BOS, EOS, tail)


def document(generator, length: int) -> np.ndarray:
    """BOS, `length` - 2 tokens, EOS."""
    return np.concatenate([[BOS], generator.integers(5, V, length - 2), [EOS]]).astype(np.uint16)


def documents_of(lengths, seed=0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [document(generator, length) for length in lengths]


def records(rows) -> list[bytes]:
    return [encode_row(row, np.dtype("<u2")) for row in rows]


EDGES = [2, 3, G, G + 1, L - 1, L, L + 1, L + G, 2 * L, 3 * L, 3 * L + 2]
RANDOM = np.random.default_rng(7).integers(2, 3 * L, 300).tolist()


def pieces(document: np.ndarray) -> list[bytes]:
    return [document[start : start + L].tobytes() for start in range(0, len(document), L)]


@pytest.mark.parametrize("lengths", [[length] for length in EDGES] + [EDGES, EDGES[::-1], RANDOM])
def test_document_packing_keeps_every_document(lengths):
    documents = documents_of(lengths)
    rows = list(pack_documents(documents, L, G))
    found = sorted(segment.tobytes() for row in rows for segment in row)
    assert found == sorted(piece for document in documents for piece in pieces(document))
    for row in rows:
        assert 0 < sum(-(-len(segment) // G) for segment in row) <= L // G


def test_document_packing_repeats_and_leaves_its_input_alone():
    documents = documents_of(RANDOM)
    copies = [document.copy() for document in documents]
    assert records(pack_documents(documents, L, G)) == records(pack_documents(documents, L, G))
    assert all((left == right).all() for left, right in zip(documents, copies, strict=True))


def test_best_fit_takes_the_fullest_row_that_still_fits():
    a, b, c, d = documents_of([5 * G, 4 * G, 3 * G, 4 * G])  # c completes a's row, d completes b's
    rows = [[segment.tobytes() for segment in row] for row in pack_documents([a, b, c, d], L, G)]
    assert rows == [[a.tobytes(), c.tobytes()], [b.tobytes(), d.tobytes()]]


def test_document_packing_wastes_little():
    rows = list(pack_documents(documents_of(RANDOM), L, G))
    blocks = sum(-(-length // G) for length in RANDOM)
    assert len(rows) <= 1.05 * blocks * G / L


def test_a_bound_on_open_rows_loses_nothing(monkeypatch):
    documents = documents_of(RANDOM)
    monkeypatch.setattr(packing, "OPEN_ROWS", 2)
    found = sorted(segment.tobytes() for row in pack_documents(documents, L, G) for segment in row)
    assert found == sorted(piece for document in documents for piece in pieces(document))


@pytest.mark.parametrize("lengths", [[length] for length in EDGES] + [EDGES, RANDOM, []])
def test_concat_packing_is_the_stream(lengths):
    documents = documents_of(lengths)
    rows = list(pack_stream(documents, L))
    stream = np.concatenate([*documents, np.zeros(0, np.uint16)])
    assert all(len(row) == 1 and len(row[0]) == L for row in rows[:-1])
    assert len(rows) == -(-len(stream) // L)
    assert b"".join(row[0].tobytes() for row in rows) == stream.astype(np.uint16).tobytes()


def test_records_have_the_stated_layout():
    row = [np.array([1, 9, 2], np.uint16), np.array([7], np.uint16)]
    assert encode_row(row, np.dtype("<u2")) == bytes.fromhex("02000000 03000000 01000000 0100 0900 0200 0700")
    assert [segment.tolist() for segment in decode_row(encode_row(row, np.dtype("<u4")), np.dtype("<u4"))] == [
        [1, 9, 2],
        [7],
    ]
    assert layout(vocab_size=1 << 16).token_dtype == "<u2" and layout(vocab_size=(1 << 16) + 1).token_dtype == "<u4"
    with pytest.raises(ValueError, match="holds 3 tokens where 4"):
        decode_row(encode_row(row, np.dtype("<u2"))[:-2], np.dtype("<u2"))


def naive_arrays(row: list[np.ndarray], tail: str):
    """One row written token by token from the rules."""
    tokens, segments, valid, scored = [], [], [], []
    for number, segment in enumerate(row, start=1):
        for token in segment.tolist():
            tokens.append(token)
            valid.append(True)
            scored.append(token != BOS)
        while len(tokens) % G:
            tokens.append(EOS if tail == "eos_fill" else PAD)
            valid.append(tail == "eos_fill")
            scored.append(tail == "eos_fill")
        segments += [number] * (len(tokens) // G - len(segments))
    missing = L - len(tokens)
    return (
        tokens + [PAD] * missing,
        segments + [0] * (missing // G),
        valid + [False] * missing,
        scored + [False] * missing,
    )


@pytest.mark.parametrize("tail", ["mask_fill", "truncate", "eos_fill"])
@pytest.mark.parametrize("method", ["document", "concat"])
def test_arrays_follow_the_rules(tail, method):
    documents = documents_of(EDGES + RANDOM[:60])
    rows = list(pack_documents(documents, L, G) if method == "document" else pack_stream(documents, L))
    arrays = rows_to_arrays(records(rows), layout(tail))
    expected = [naive_arrays(row, tail) for row in rows]
    for name, found, wanted in zip(arrays._fields, arrays, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(found, np.array(wanted), err_msg=name)
    assert arrays.tokens.dtype == arrays.segments.dtype == np.int32
    assert arrays.valid.dtype == arrays.scored.dtype == bool


def test_only_the_first_piece_of_a_cut_document_has_bos_and_only_the_last_eos():
    (long,) = documents_of([3 * L + 2])
    rows = list(pack_documents([long], L, G))
    starts = [row[0][0] == BOS for row in rows]
    assert starts == [True, False, False, False] and [EOS in row[0] for row in rows] == [False, False, False, True]


def test_scored_tokens_are_all_tokens_but_bos():
    documents = documents_of(RANDOM)
    for rows in (pack_documents(documents, L, G), pack_stream(documents, L)):
        arrays = rows_to_arrays(records(rows), layout())
        assert arrays.scored.sum() == sum(RANDOM) - len(RANDOM)
        assert arrays.valid.sum() == sum(RANDOM)
