"""Which rows a step or an evaluation sees, as batches of numpy arrays. Nothing here keeps a position."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from diffjax.config import Config
from diffjax.data.batch import Batch
from diffjax.data.corpus import Corpus
from diffjax.errors import UserError

READ_AHEAD = 2  # steps


class TrainingOrder:
    """Row `order[i]` of the corpus is example i; example i of a run is row i % batch_size of step i // batch_size.

    A pure function of (rows, seed): every epoch is a full permutation, each another one (Grain's shuffle).
    """

    def __init__(self, rows: int, seed: int):
        try:
            import grain
        except ImportError as error:
            raise UserError("training reads its rows in Grain's order and needs it: pip install grain") from error
        self._indices = grain.MapDataset.range(rows).seed(seed).shuffle().repeat()

    def __getitem__(self, example: int) -> int:
        return int(self._indices[example])


class TrainLoader:
    """The training batches of a corpus: `batch(step)` and `rows(step, row_numbers)` depend on (seed, step) alone.

    A thread reads the next two steps ahead, for the row numbers last asked for. An error while reading ahead surfaces
    when its step is asked for. `close()` (or `with`) ends the thread.
    Raises UserError when the corpus is not the config's, or a shard is damaged.
    """

    def __init__(self, corpus: Corpus, config: Config):
        corpus.require(config)
        self._corpus = corpus
        self._batch_size = config.training.batch_size
        self._order = TrainingOrder(corpus.rows("train"), config.run.seed)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._ahead: dict[tuple[int, tuple[int, ...]], Future] = {}

    def batch(self, step: int) -> Batch:
        """All rows of a step: arrays [batch_size, ...]."""
        return self.rows(step, range(self._batch_size))

    def rows(self, step: int, row_numbers: Sequence[int]) -> Batch:
        """The rows of a step with these numbers in its global batch, in this order: what one host needs."""
        numbers = tuple(int(number) for number in row_numbers)
        wanted = [(later, numbers) for later in range(step, step + 1 + READ_AHEAD)]
        for key in [key for key in self._ahead if key not in wanted]:
            self._ahead.pop(key).cancel()
        for key in wanted:
            if key not in self._ahead:
                self._ahead[key] = self._reader.submit(self._read, *key)
        return self._ahead.pop(wanted[0]).result()

    def _read(self, step: int, numbers: tuple[int, ...]) -> Batch:
        if any(not 0 <= number < self._batch_size for number in numbers):
            raise IndexError(f"rows {numbers} of a batch of {self._batch_size}")
        examples = [self._order[step * self._batch_size + number] for number in numbers]
        return Batch(*self._corpus.read("train", examples), row=np.array(numbers, np.int32))

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def held_out_indices(corpus: Corpus, rows: int | None = None) -> list[int]:
    """The numbers of the held-out rows an evaluation reads: all, or `rows` of them spread evenly over the split.

    Raises UserError when nothing is held out.
    """
    total = corpus.rows("held_out")
    if total == 0:
        raise UserError(f"the corpus {corpus.directory} holds nothing out: raise data.held_out and prepare it again")
    if rows is not None and rows < 1:
        raise UserError(f"evaluation.rows is {rows}: give at least 1, or null for all {total} held-out rows")
    count = total if rows is None else min(rows, total)
    return [index * total // count for index in range(count)]


def held_out_batches(corpus: Corpus, batch_size: int, rows: int | None = None) -> Iterator[Batch]:
    """The rows of `held_out_indices`, each once, in batches of numpy arrays; `row` is the row's number in the split.

    The last batch is filled with rows of padding (nothing valid or scored, segment 0, row 0).
    """
    indices = held_out_indices(corpus, rows)
    for start in range(0, len(indices), batch_size):
        chosen = indices[start : start + batch_size]
        arrays = corpus.read("held_out", chosen)
        batch = Batch(*arrays, row=np.array(chosen, np.int32))
        missing = batch_size - len(chosen)
        if missing:
            pad_ids = np.full((missing, corpus.layout.sequence_length), corpus.layout.pad_id, np.int32)
            padded = [np.pad(field, [(0, missing)] + [(0, 0)] * (field.ndim - 1)) for field in batch]
            padded[0][len(chosen) :] = pad_ids
            batch = Batch(*padded)
        yield batch


def unigram_cross_entropy(corpus: Corpus, rows: int | None = None) -> float:
    """Nats per scored held-out token of the unigram model fitted on the training split (add-one smoothing over all V).

    Averages over the rows that `held_out_batches` with the same `rows` yields.
    """
    counts = corpus.unigram() + 1.0
    negative_log = np.log(counts.sum()) - np.log(counts)
    total, number = 0.0, 0
    for batch in held_out_batches(corpus, batch_size=256, rows=rows):
        tokens = batch.tokens[batch.scored]
        total += float(negative_log[tokens].sum())
        number += len(tokens)
    return total / number
