"""T10, T11: documents packed in a row do not meet, and pads are as if they were not there."""

import jax
import numpy as np
import pytest

from tests import reference
from tests.models.cases import MAIN, VOCAB, case, leaves, parametrize


class Packed:
    """A row of two documents, the second with a ragged last block, beside the same documents in rows of their own.

    `packed` and `apart` are arguments of `Case.gradient`; both hold the same document tokens, and the places without a
    document hold other tokens.
    """

    def __init__(self, model):
        size, blocks = model.config.block_size, model.blocks
        self.model, self.first = model, max(blocks // 2 - 1, 1)  # blocks of document 1
        self.ragged = max(size - 1, 1) if size < 8 else 3  # valid tokens of the last block of document 2
        rng = np.random.default_rng(11)
        weights = rng.standard_normal((blocks, size, VOCAB))
        valid = np.ones((blocks, size), bool)
        valid[-1, self.ragged :] = False
        weights[~valid] = 0.0
        document = [slice(0, self.first), slice(self.first, blocks)]
        text, noisy = model.texts[0].reshape(blocks, size), model.noisy[0]

        def rows(*placed):
            """Rows of (document, ...) each from its first block on; row 1 of a packed batch is all pads."""
            clean = rng.integers(5, VOCAB, (2, blocks, size)).astype(np.int32)
            frontiers = rng.integers(5, VOCAB, (2, blocks, size)).astype(np.int32)
            segments, readable = np.zeros((2, blocks), np.int32), np.zeros((2, blocks, size), bool)
            cotangent = np.zeros((2, blocks, size, VOCAB))
            for row, documents in enumerate(placed):
                start = 0
                for d in documents:
                    stop = start + document[d].stop - document[d].start
                    here = (row, slice(start, stop))
                    readable[here] = valid[document[d]]
                    clean[here] = np.where(readable[here], text[document[d]], clean[here])
                    frontiers[here] = np.where(readable[here], noisy[document[d]], frontiers[here])
                    segments[here], cotangent[here] = d + 1, weights[document[d]]
                    start = stop
            return cotangent, clean.reshape(2, -1), frontiers, segments, readable.reshape(2, -1), readable

        self.packed, self.apart = rows((0, 1), ()), rows((0,), (1,))

    def other_pads(self):
        """The packed rows with other tokens in their pads."""
        cotangent, clean, frontiers, segments, clean_valid, valid = self.packed
        clean = np.where(clean_valid, clean, (clean + 31) % VOCAB).astype(np.int32)
        frontiers = np.where(valid, frontiers, (frontiers + 31) % VOCAB).astype(np.int32)
        return cotangent, clean, frontiers, segments, clean_valid, valid

    def logits(self, arguments):
        _, clean, frontiers, segments, clean_valid, frontier_valid = arguments
        return self.model.train(
            clean, frontiers, segments=segments, clean_valid=clean_valid, frontier_valid=frontier_valid
        )

    def expected(self, arguments, params=None):
        _, clean, frontiers, segments, _, valid = arguments
        model = self.model
        params = model.reference_params if params is None else params
        return np.array(
            [
                reference.row_logits(params, model.config, VOCAB, *row, np.arange(model.blocks), seg, frontier_valid=ok)
                for *row, seg, ok in zip(clean, frontiers, segments, valid, strict=True)
            ]
        )


GRADIENTS = ["M-bidirectional", "AM-causal"]  # compiling a gradient is dear: both mixers, both prefix modes


@parametrize(MAIN)
def test_T10_T11_packed_and_ragged_rows_equal_the_documents_alone(name, dtype):
    """Logits of every valid position = the reference of that document, whose last block is cut to its valid tokens."""
    rows = Packed(case(name, dtype))
    for arguments in (rows.packed, rows.apart):
        logits = rows.logits(arguments)
        rows.model.close(logits, rows.expected(arguments))
        assert np.isfinite(logits).all()


@parametrize(GRADIENTS)
def test_T10_gradients_of_packed_rows_equal_those_of_separate_rows(name, dtype):
    model = case(name, dtype)
    rows = Packed(model)
    logits, packed = model.gradient(*rows.packed)
    model.close(logits, rows.expected(rows.packed))
    _, apart = model.gradient(*rows.apart)
    for (path, together), (_, alone) in zip(leaves(packed), leaves(apart), strict=True):
        bound = 1e-10 * max(1.0, np.abs(alone).max())
        assert np.isfinite(together).all() and np.abs(together - alone).max() <= bound, path
        assert np.abs(alone).max() > 1e-6, path


@parametrize(GRADIENTS)
def test_gradient_equals_reference(name, dtype):
    """Of sum(cotangent * logits) over a packed, ragged row, along random directions of each kind of parameter."""
    model = case(name, dtype)
    rows = Packed(model)
    _, gradient = model.gradient(*rows.packed)
    cotangent, valid = rows.packed[0], rows.packed[-1]

    def total(params):
        return (cotangent[valid] * rows.expected(rows.packed, params)[valid]).sum()

    gradient = reference.as_float64(gradient)
    paths = [path for path, _ in leaves(gradient)]
    rng = np.random.default_rng(13)
    for kinds in (("mixer",), ("embed", "mlp", "norm", "mlp_norm", "mixer_norm", "head")):
        chosen = [not set(path.split("/")).isdisjoint(kinds) for path in paths]
        assert any(chosen)
        direction = jax.tree.unflatten(
            jax.tree.structure(gradient),
            [use * rng.standard_normal(g.shape) for use, g in zip(chosen, jax.tree.leaves(gradient), strict=True)],
        )
        terms = [(g * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)]
        expected = reference.derivative(total, model.reference_params, direction)
        assert abs(sum(terms) - expected) <= 1e-9 * max(1.0, np.abs(terms).sum()), (kinds, sum(terms), expected)


@parametrize(MAIN)
def test_T10_document_1_moves_document_2_by_exactly_nothing(name, dtype):
    rows = Packed(case(name, dtype))
    cotangent, clean, frontiers, *masks = rows.packed
    before = rows.logits(rows.packed)
    clean, frontiers = clean.copy(), frontiers.copy()
    clean[0, : rows.first * rows.model.config.block_size] = 7
    frontiers[0, : rows.first] = 8
    after = rows.logits((cotangent, clean, frontiers, *masks))
    assert np.array_equal(before[0, rows.first :], after[0, rows.first :])
    assert np.abs(before[0, : rows.first] - after[0, : rows.first]).max() > 1e-3


@parametrize(MAIN)
def test_T11_what_stands_in_pads_changes_no_valid_bit(name, dtype):
    rows = Packed(case(name, dtype))
    before, after = rows.logits(rows.packed), rows.logits(rows.other_pads())
    valid = rows.packed[-1]
    assert np.array_equal(before[valid], after[valid])


@parametrize(GRADIENTS)
def test_T11_what_stands_in_pads_changes_no_bit_of_the_gradient(name, dtype):
    model = case(name, dtype)
    rows = Packed(model)
    (_, before), (_, after) = model.gradient(*rows.packed), model.gradient(*rows.other_pads())
    for (path, one), (_, other) in zip(leaves(before), leaves(after), strict=True):
        assert np.array_equal(one, other), path


@parametrize(["A-causal", "M-causal", "AM-bidirectional"])
def test_T11_denoise_of_a_ragged_block_equals_the_cut_block(name, dtype):
    model = case(name, dtype)
    size = model.config.block_size
    count = 1 + np.arange(model.blocks) % (size - 1)
    logits = model.denoise(model.noisy[0], model.prefixes, np.arange(size) < count[:, None])
    for k, r in enumerate(count):
        model.close(logits[k, :r], model.reference(model.texts[0, : k * size], model.noisy[0, k, :r]))


@pytest.mark.xdist_group("AM-causal")
def test_T11_a_row_of_pads_is_finite_in_bfloat16():
    """Forward and backward, with a cotangent on every logit, pads included."""
    model = case("AM-causal", "bfloat16")
    blocks, size = model.blocks, model.config.block_size
    segments, clean_valid = np.zeros((2, blocks), np.int32), np.zeros((2, model.length), bool)
    cotangent = np.ones((2, blocks, size, VOCAB), np.float32)
    segments[1], clean_valid[1] = 1, True  # row 0 is all pads, row 1 one whole document
    frontier_valid = clean_valid.reshape(2, blocks, size)
    logits, gradient = model.gradient(cotangent, model.texts, model.noisy, segments, clean_valid, frontier_valid)
    assert np.isfinite(logits).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
