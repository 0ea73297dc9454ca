"""The held-out record: right numbers, right errors, right refusals, whatever the batch size."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from diffjax.config import EvaluationConfig
from diffjax.diffusion.likelihood import block_nats, count_queries, time_queries
from diffjax.errors import UserError
from diffjax.evaluation import likelihood
from diffjax.evaluation.likelihood import evaluate_likelihood, unigram_cross_entropy
from tests.diffusion.stand_ins import MarkovPosterior, TableDenoiser, make_batch

# Symbols 0 (one byte), 1 (three bytes) and 2 (the end of a text); 3 is the mask.
TOKENIZER = SimpleNamespace(byte_lengths=np.array([1, 3, 0, 0], np.int32), eos_id=2)
DENOISER = TableDenoiser(4, dtype="float32")
PARAMS = DENOISER.init()


def split(rows=7, block_size=4, seed=0):
    """Rows of 4 blocks: a document of 6 tokens, then one of 3 to 8; first tokens are given, not scored."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 3, (rows, 16))
    second = rng.integers(3, 9, rows)
    offset = np.arange(16)
    valid = (offset < 6) | ((offset >= 8) & (offset < 8 + second[:, None]))
    scored = valid & ~np.isin(offset, [0, 8])
    tokens[:, [0, 8]] = 2  # the given tokens are no text either
    segments = np.where(
        valid.reshape(rows, -1, block_size).any(-1), 1 + np.arange(16 // block_size) * block_size // 8, 0
    )
    return make_batch(tokens, block_size, valid, scored, segments)


def batches(data, size):
    """The rows of `data` in batches of `size`, the last padded by rows of pads."""
    for start in range(0, len(data.row), size):
        part = jax.tree.map(lambda leaf, start=start: leaf[start : start + size], data)
        pads = size - len(part.row)
        yield jax.tree.map(lambda leaf, pads=pads: np.pad(leaf, [(0, pads)] + [(0, 0)] * (leaf.ndim - 1)), part)


def evaluate(data, size=4, denoiser=DENOISER, params=PARAMS, packing="document", tokenizer=TOKENIZER, **options):
    config = EvaluationConfig(**{name: options.pop(name) for name in list(options) if name in FIELDS})
    return evaluate_likelihood(
        denoiser,
        params,
        batches(data, size),
        tokenizer=tokenizer,
        evaluation=config,
        mask_id=3,
        tail="mask_fill",
        packing=packing,
        **options,
    )


FIELDS = EvaluationConfig.__dataclass_fields__


def test_record_of_a_known_source_is_its_likelihood_in_nats_and_bits():
    source, data = MarkovPosterior(4), split()
    record = evaluate(data, denoiser=source, params=None, estimator="oracle")
    nats = 0.0
    for row, valid in zip(data.tokens, data.valid, strict=True):
        for text in (row[:8][valid[:8]], row[8:][valid[8:]]):
            nats -= source.log_probability(text) - source.first[text[0]]
    text = data.tokens[data.scored]
    size = int((text == 0).sum() + 3 * (text == 1).sum())
    assert record["eval/nelbo_nats_per_token"] == pytest.approx(nats / len(text), rel=1e-5)
    assert record["eval/ppl_bound"] == pytest.approx(math.exp(nats / len(text)), rel=1e-5)
    assert record["eval/bpb_bound"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert (record["tokens_scored"], record["tokens_end"]) == (len(text), (text == 2).sum())
    assert (record["tokens_real"], record["bytes"]) == ((text != 2).sum(), size)
    assert (record["bound"], record["documents"], record["mc_se"]) == ("<=", 14, 0.0)
    assert "eval/nll_nats_per_token" not in record
    json.dumps(record)  # plain numbers throughout


def test_L6_block_size_one_is_exact_and_says_so():
    source, data = MarkovPosterior(1), split(block_size=1)
    record = evaluate(data, denoiser=source, params=None)
    assert record["bound"] == "=" and record["mc_se"] == 0.0
    assert record["eval/nll_nats_per_token"] == record["eval/nelbo_nats_per_token"]
    assert record["eval/nelbo_nats_per_token"] == pytest.approx(
        evaluate(split(), denoiser=MarkovPosterior(4), params=None, estimator="oracle")["eval/nelbo_nats_per_token"],
        rel=1e-5,
    )


def test_L8_record_depends_on_neither_batch_size_nor_run():
    data = split()
    first = evaluate(data, 4, samples=2, replicates=3, seed=5)
    again = evaluate(data, 4, samples=2, replicates=3, seed=5)
    assert json.dumps(first) == json.dumps(again)
    other = evaluate(data, 7, samples=2, replicates=3, seed=5)
    for name, value in first.items():
        assert other[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
    assert evaluate(data, 4, samples=2, replicates=3, seed=6)["eval/nelbo_nats_per_token"] != pytest.approx(
        first["eval/nelbo_nats_per_token"], rel=1e-4
    )


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_errors_are_those_of_replicates_and_of_documents(packing):
    data = split()
    record = evaluate(data, replicates=3, seed=1, packing=packing)
    nats = np.array(
        [
            block_nats(DENOISER, PARAMS, data, count_queries(data, 1, replicate, 1), 3, "mask_fill")
            for replicate in range(3)
        ],
        np.float64,
    )
    tokens = data.scored.reshape(7, 4, 4).sum(-1)
    totals = nats.sum((1, 2)) / tokens.sum()
    assert record["eval/nelbo_nats_per_token"] == pytest.approx(totals.mean(), rel=1e-6)
    assert record["mc_se"] == pytest.approx(np.std(totals, ddof=1) / math.sqrt(3), rel=1e-4)
    pieces = 2 if packing == "document" else 1
    by_document = nats.mean(0).reshape(7 * pieces, -1).sum(1)
    length = tokens.reshape(7 * pieces, -1).sum(1)
    residual = by_document - totals.mean() * length
    error = math.sqrt(residual @ residual / len(length) * len(length) ** 2 / (len(length) - 1)) / length.sum()
    assert record["document_se"] == pytest.approx(error, rel=1e-4)
    assert record["documents"] == len(length)
    assert evaluate(data, replicates=1)["mc_se"] is None


def test_bits_per_byte_is_refused_where_the_scored_tokens_are_not_the_text():
    data = split()
    partial = data._replace(scored=data.scored & (np.arange(16) != 3))
    record = evaluate(partial)
    missing = int((data.scored[:, 3] & (data.tokens[:, 3] != 2)).sum())
    assert record["eval/bpb_bound"] is None
    assert record["bpb_reason"] == f"{missing} of {record['tokens_real']} tokens of text are not scored"
    unknown = SimpleNamespace(byte_lengths=np.array([0, 3, 0, 0]), eos_id=2)
    record = evaluate(data, tokenizer=unknown)
    assert record["eval/bpb_bound"] is None and "neither text nor its end" in record["bpb_reason"]
    assert evaluate(data)["bpb_reason"] is None


def test_seed_val_loss_is_the_plain_cross_entropy_of_the_masked_tokens():
    """With three equally likely symbols every masked token costs ln 3, whatever the rate."""
    data = split()
    flat = jax.tree.map(np.zeros_like, PARAMS)
    record = evaluate(data, params=flat, seed_val_loss=True, seed=2)
    masked = sum(int(time_queries(part, np.uint32(2), 0, 1).masked.sum()) for part in batches(data, 4))
    assert record["eval/seed_val_loss"] == pytest.approx(math.log(3) * masked / data.scored.sum(), rel=1e-5)
    assert record["eval/nelbo_nats_per_token"] == pytest.approx(math.log(3), rel=1e-5)


def test_unigram_is_add_one_smoothed_and_scored_on_the_same_tokens():
    data = split()
    counts = np.array([10.0, 4.0, 3.0, 0.0])
    truth = np.mean([-math.log((counts[token] + 1) / 21) for token in data.tokens[data.scored]])
    assert unigram_cross_entropy(counts, batches(data, 4)) == pytest.approx(truth, rel=1e-12)
    assert evaluate(data, unigram=counts)["eval/unigram_nats_per_token"] == pytest.approx(truth, rel=1e-12)


def test_evaluation_compiles_once_and_stops_between_batches():
    data = split()
    evaluate(data)
    compiled = likelihood._estimate._cache_size()
    evaluate(split(seed=1), params=DENOISER.init(1), seed=3)
    assert likelihood._estimate._cache_size() == compiled
    polls = iter([False, True])
    assert evaluate(data, should_stop=lambda: next(polls)) is None
    assert next(polls, "asked twice") == "asked twice"


def test_what_cannot_be_scored_is_refused_loudly():
    data = split()
    with pytest.raises(UserError, match="no scored token"):
        evaluate(data._replace(scored=np.zeros_like(data.scored)))
    broken = {**PARAMS, "frontier": np.where(np.arange(5)[:, None, None, None] == 4, np.nan, PARAMS["frontier"])}
    with pytest.raises(FloatingPointError, match="example 0 is nan in block 0"):
        evaluate(data, params=broken)
