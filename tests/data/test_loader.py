"""Training rows are a pure function of (seed, step); held-out rows come once each."""

import sys
from collections import Counter

import numpy as np
import pytest

from diffjax.data.loader import (
    TrainingOrder,
    TrainLoader,
    held_out_batches,
    held_out_indices,
    unigram_cross_entropy,
)
from diffjax.data.prepare import prepare
from diffjax.errors import UserError

from .texts import make_config, replaced, write_texts


def test_order_of_seed_0_and_1000_rows():
    """The order belongs to Grain; if this fails, a new Grain has changed the data of every run."""
    order = TrainingOrder(1000, 0)
    golden = [297, 371, 706, 141, 935, 215, 144, 766, 695, 836, 71, 596, 23, 854, 343, 203]
    assert [order[i] for i in range(16)] == golden


def test_every_epoch_is_another_full_permutation():
    order = TrainingOrder(37, 5)
    epochs = [[order[37 * epoch + i] for i in range(37)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [TrainingOrder(37, 6)[i] for i in range(37)] != epochs[0]


def equal(left, right) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


def test_batches_are_a_function_of_the_step(corpus, config):
    with TrainLoader(corpus, config) as first, TrainLoader(corpus, config) as second:
        forward = [first.batch(step) for step in range(8)]
        for step in (5, 0, 7, 7, 3):
            assert equal(second.batch(step), forward[step])
    order = TrainingOrder(corpus.rows("train"), 0)
    for step, batch in enumerate(forward):
        assert equal(batch[:4], corpus.read("train", [order[4 * step + row] for row in range(4)]))
        assert batch.row.tolist() == [0, 1, 2, 3]


def test_another_seed_gives_another_order(corpus, config):
    with TrainLoader(corpus, config) as first, TrainLoader(corpus, replaced(config, ["run", "seed"], 1)) as second:
        assert not equal(first.batch(0), second.batch(0))


def test_hosts_read_their_rows_only(corpus, config):
    with TrainLoader(corpus, config) as loader, TrainLoader(corpus, config) as host:
        for step in range(3):
            whole, part = loader.batch(step), host.rows(step, [3, 1])
            assert equal(part, [field[[3, 1]] for field in whole])
        with pytest.raises(IndexError):
            host.rows(0, [4])


def test_one_epoch_shows_every_row_once(corpus, config):
    rows = corpus.rows("train")
    config = replaced(config, ["training", "batch_size"], 1)
    with TrainLoader(corpus, config) as loader:
        seen = Counter(loader.batch(step).tokens.tobytes() for step in range(rows))
    assert seen == Counter(corpus.read("train", [row]).tokens.tobytes() for row in range(rows))


def test_batch_larger_than_the_corpus_repeats_it(corpus, config):
    rows = corpus.rows("train")
    with TrainLoader(corpus, replaced(config, ["training", "batch_size"], 2 * rows)) as loader:
        tokens = [row.tobytes() for row in loader.batch(0).tokens]
    assert Counter(tokens[:rows]) == Counter(tokens[rows:])


def test_an_error_while_reading_ahead_surfaces_at_its_step(corpus, config, monkeypatch):
    read = type(corpus).read
    order = TrainingOrder(corpus.rows("train"), 0)
    bad = [order[4 * 2 + row] for row in range(4)]

    def failing(self, split, indices):
        if list(indices) == bad:
            raise UserError("the disk is gone")
        return read(self, split, indices)

    monkeypatch.setattr(type(corpus), "read", failing)
    with TrainLoader(corpus, config) as loader:
        good = [loader.batch(0), loader.batch(1)]
        with pytest.raises(UserError, match="the disk is gone"):
            loader.batch(2)
        assert len(good) == 2 and equal(loader.batch(1), good[1])


def test_reading_ahead_covers_the_next_two_steps(corpus, config, monkeypatch):
    read, seen = type(corpus).read, []
    monkeypatch.setattr(type(corpus), "read", lambda self, *a: seen.append(a[1]) or read(self, *a))
    loader = TrainLoader(corpus, config)
    loader.batch(0)
    loader._reader.shutdown(wait=True)
    order = TrainingOrder(corpus.rows("train"), 0)
    assert seen == [[order[4 * step + row] for row in range(4)] for step in range(3)]


def test_without_grain_the_error_says_what_to_install(corpus, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(UserError, match="pip install grain"):
        TrainLoader(corpus, config)


def test_a_corpus_of_another_config_is_refused(corpus, config):
    with pytest.raises(UserError, match=r"model.block_size is 8 in the config and 4 in the corpus"):
        TrainLoader(corpus, replaced(config, ["model", "block_size"], 8))


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_held_out_rows_come_once_and_the_last_batch_is_padded(corpus, batch_size):
    total = corpus.rows("held_out")
    batches = list(held_out_batches(corpus, batch_size))
    assert all(len(batch.row) == batch_size for batch in batches) and len(batches) == -(-total // batch_size)
    joined = [np.concatenate(fields) for fields in zip(*batches, strict=True)]
    assert equal([field[:total] for field in joined[:4]], corpus.read("held_out", list(range(total))))
    assert joined[4][:total].tolist() == list(range(total))
    for field in joined[:4]:
        assert not field[total:].any()  # pad id 0, segment 0, neither valid nor scored
    assert joined[3].sum() == corpus.manifest["splits"]["held_out"]["scored"]


def test_a_part_of_the_held_out_rows_is_spread_over_all(corpus):
    total = corpus.rows("held_out")
    assert held_out_indices(corpus, 10 * total) == list(range(total))
    some = held_out_indices(corpus, 5)
    assert len(set(some)) == 5 and some[0] == 0 and max(np.diff([*some, total])) <= total // 5 + 1
    (batch,) = held_out_batches(corpus, 5, rows=5)
    assert batch.row.tolist() == some and equal(batch[:4], corpus.read("held_out", some))
    with pytest.raises(UserError, match=r"evaluation\.rows"):
        held_out_indices(corpus, 0)


def test_unigram_counts_and_cross_entropy_from_single_tokens(corpus):
    counts = Counter()
    for row in range(corpus.rows("train")):
        arrays = corpus.read("train", [row])
        counts.update(arrays.tokens[arrays.scored].tolist())
    unigram = corpus.unigram()
    assert unigram.dtype == np.float64 and {i: int(c) for i, c in enumerate(unigram) if c} == dict(counts)
    assert counts[corpus.tokenizer.bos_id] == counts[corpus.tokenizer.mask_id] == 0
    losses = []
    for row in range(corpus.rows("held_out")):
        arrays = corpus.read("held_out", [row])
        losses += [
            -np.log((counts[token] + 1) / (counts.total() + corpus.tokenizer.vocab_size))
            for token in arrays.tokens[arrays.scored].tolist()
        ]
    assert unigram_cross_entropy(corpus) == pytest.approx(np.mean(losses), rel=1e-12)


def test_nothing_held_out_is_an_error_at_evaluation(tmp_path):
    config = make_config(
        data__path=str(write_texts(tmp_path / "texts", documents=8)),
        data__corpus=str(tmp_path / "corpus"),
        data__held_out=0.0,
    )
    corpus = prepare(config, report=lambda line: None)
    assert corpus.rows("held_out") == 0
    with pytest.raises(UserError, match="holds nothing out"):
        next(held_out_batches(corpus, 4))
