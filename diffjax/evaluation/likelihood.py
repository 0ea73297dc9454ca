"""Held-out likelihood: the NELBO of a split in nats per token and bits per byte, with its errors and what it counts."""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from diffjax.config import EvaluationConfig
from diffjax.data.batch import Batch
from diffjax.diffusion.likelihood import LOWEST_RATE, block_nats, estimate_queries, time_queries
from diffjax.errors import UserError


def evaluate_likelihood(
    denoiser,
    params,
    batches: Iterable[Batch],
    *,
    tokenizer,
    evaluation: EvaluationConfig,
    mask_id: int,
    tail: str,
    packing: str,
    chunk: int | None = None,
    unigram: np.ndarray | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    place: Callable[[Batch], Batch] = lambda batch: batch,
    fetch: Callable[[Array], np.ndarray] = np.asarray,
) -> dict | None:
    """Score every example once; return one flat record of floats, integers, strings and None.

    batches      of one shape, the last padded by rows without a valid token; `row` is the example's index in the split
    tokenizer    its `byte_lengths` [V] (UTF-8 bytes of a piece, 0 for specials) and `eos_id` are read
    chunk        tokens of a row whose logits exist at one time (None: all)
    unigram      token counts [V] of the training split: adds the cross-entropy of that unigram on the same tokens
    should_stop  polled before every batch; when it answers True the evaluation is dropped and None returned
    place        puts a batch of host arrays on the devices
    fetch        brings an array [B, K], split over devices, to the host

    eval/nelbo_nats_per_token, eval/ppl_bound and eval/bpb_bound are upper bounds (`bound` "<="). With block size 1 they
    are exact (`bound` "=") and eval/nll_nats_per_token repeats the first. Standard errors, in nats per token: `mc_se`
    of the masks drawn, from the replicates (None with one replicate, 0 where nothing is drawn); `document_se` of the
    choice of documents, from their spread (pieces of documents as packed; whole rows with `concat` packing).

    Bits per byte divides the nats of all scored tokens, ends of text among them, by the UTF-8 bytes of the scored text.
    A token is real when it stands for text (`byte_lengths` above 0). Where the scored tokens are not the real ones and
    the ends of text, bpb would mislead: it is None and `bpb_reason` says why.

    Raises UserError for a split without a scored token, FloatingPointError for a NELBO that is not finite.
    """
    exact = denoiser.block_size == 1 and evaluation.estimator != "time"
    drawn = not exact and evaluation.estimator != "oracle"
    samples, replicates = (evaluation.samples, evaluation.replicates) if drawn else (1, 1)
    score = {"mask_id": mask_id, "tail": tail, "chunk": chunk}
    estimate = functools.partial(_estimate, denoiser, estimator=evaluation.estimator, samples=samples, **score)
    seed = np.uint32(evaluation.seed)
    tally = Tally(tokenizer, packing)
    seed_val_nats = 0.0
    for batch in batches:
        if should_stop():
            return None
        placed = place(batch)
        estimates = [estimate(params, placed, seed, np.uint32(replicate)) for replicate in range(replicates)]
        tally.add(batch, list(map(fetch, estimates)))
        if evaluation.seed_val_loss:
            nats = _masked_nats(denoiser, params, placed, seed, **score)
            seed_val_nats += fetch(nats).astype(np.float64).sum()
    if not tally.scored:
        raise UserError("the held-out split has no scored token: add text, or raise data.held_out or evaluation.rows")

    nelbo, bpb, bpb_reason = tally.nats_per_token(), *tally.bits_per_byte()
    record = {
        "eval/nelbo_nats_per_token": nelbo,
        "eval/ppl_bound": math.exp(nelbo),
        "eval/bpb_bound": bpb,
        "bpb_reason": bpb_reason,
        "bound": "=" if exact else "<=",
        "mc_se": tally.replicate_error() if drawn else 0.0,
        "document_se": tally.document_error(),
        "estimator": evaluation.estimator,
        "samples": samples,
        "replicates": replicates,
        "seed": evaluation.seed,
        "lowest_rate": LOWEST_RATE if evaluation.estimator == "time" else None,
        "block_size": denoiser.block_size,
        "prefix": denoiser.config.prefix,
        "packing": packing,
        "tail": tail,
        "dtype": denoiser.config.dtype,
        "documents": tally.documents,
        "tokens_scored": tally.scored,
        "tokens_real": tally.real,
        "tokens_end": tally.end,
        "bytes": tally.bytes,
    }
    if exact:
        record["eval/nll_nats_per_token"] = nelbo
    if evaluation.seed_val_loss:
        record["eval/seed_val_loss"] = float(seed_val_nats / tally.scored)
    if unigram is not None:
        record["eval/unigram_nats_per_token"] = cross_entropy_of_counts(unigram, tally.histogram)
    return record


def unigram_cross_entropy(counts: np.ndarray, batches: Iterable[Batch]) -> float:
    """Nats per scored token of `batches` under the unigram of `counts` [V] with one added to every count."""
    return cross_entropy_of_counts(counts, sum(_histogram(batch, len(counts)) for batch in batches))


def cross_entropy_of_counts(model: np.ndarray, data: np.ndarray) -> float:
    """Mean nats of the tokens counted in data [V] under the add-one unigram of the counts model [V]."""
    smoothed = np.asarray(model, np.float64) + 1.0
    log_probabilities = np.log(smoothed) - np.log(smoothed.sum())
    return float(-(data * log_probabilities).sum() / data.sum())


class Tally:
    """Running sums of an evaluation, on the host in float64: nats by replicate and document, and token counts."""

    def __init__(self, tokenizer, packing: str):
        self.byte_lengths = np.asarray(tokenizer.byte_lengths, np.int64)
        self.eos_id = tokenizer.eos_id
        self.packing = packing
        self.histogram = np.zeros(len(self.byte_lengths), np.int64)
        self.real = self.unscored = 0
        self._nats: list[np.ndarray] = []  # each [replicates, documents]
        self._tokens: list[np.ndarray] = []  # each [documents]

    def add(self, batch: Batch, estimates: list[np.ndarray]) -> None:
        """Add a batch and the nats of its blocks, one [B, K] for each replicate."""
        tokens, segments, valid, scored, row = (np.asarray(array) for array in batch)
        nats = np.stack([np.asarray(estimate, np.float64) for estimate in estimates])
        if not np.isfinite(nats).all():
            replicate, at, block = np.argwhere(~np.isfinite(nats))[0]
            value = nats[replicate, at, block]
            raise FloatingPointError(
                f"the NELBO of held-out example {row[at]} is {value} in block {block}, replicate {replicate}"
            )
        scored = scored & valid
        real = valid & (self.byte_lengths[tokens] > 0)
        self.histogram += _histogram(batch, len(self.histogram))
        self.real += int(real.sum())
        self.unscored += int((real & ~scored).sum())

        rows, blocks = segments.shape
        piece = segments if self.packing == "document" else np.zeros_like(segments)
        document = (np.arange(rows)[:, None] * (blocks + 1) + piece).ravel()
        scored_tokens = scored.reshape(rows, blocks, -1).sum(-1).ravel()
        count = np.bincount(document, scored_tokens, minlength=rows * (blocks + 1))
        sums = np.stack([np.bincount(document, each.ravel(), minlength=len(count)) for each in nats])
        self._tokens.append(count[count > 0])
        self._nats.append(sums[:, count > 0])

    @property
    def scored(self) -> int:
        return int(self.histogram.sum())

    @property
    def end(self) -> int:
        return int(self.histogram[self.eos_id])

    @property
    def bytes(self) -> int:
        return int((self.histogram * self.byte_lengths).sum())

    @property
    def documents(self) -> int:
        return sum(len(count) for count in self._tokens)

    def nats_per_token(self) -> float:
        return float(np.concatenate(self._nats, axis=1).sum(1).mean() / self.scored)

    def bits_per_byte(self) -> tuple[float | None, str | None]:
        """(bits per byte, None), or (None, why the scored tokens do not stand for the whole text)."""
        strange = int(self.histogram[self.byte_lengths == 0].sum()) - self.end
        if self.unscored:
            return None, f"{self.unscored} of {self.real} tokens of text are not scored"
        if strange:
            return None, f"{strange} scored tokens are neither text nor its end: the bytes they stand for are not known"
        if not self.bytes:
            return None, "the scored tokens hold no text"
        return self.nats_per_token() * self.scored / (math.log(2.0) * self.bytes), None

    def replicate_error(self) -> float | None:
        """Standard error of the mean over replicates; the samples inside one replicate are not independent."""
        totals = np.concatenate(self._nats, axis=1).sum(1) / self.scored
        return float(totals.std(ddof=1) / math.sqrt(len(totals))) if len(totals) > 1 else None

    def document_error(self) -> float | None:
        """Standard error of a ratio of sums over documents drawn at random; None below two documents."""
        nats, tokens = np.concatenate(self._nats, axis=1).mean(0), np.concatenate(self._tokens)
        if len(tokens) < 2:
            return None
        residuals = nats - nats.sum() / tokens.sum() * tokens
        return float(math.sqrt((residuals**2).sum() * len(tokens) / (len(tokens) - 1)) / tokens.sum())


def _histogram(batch: Batch, vocab_size: int) -> np.ndarray:
    """How often each token id is scored: [V] int64."""
    scored = np.asarray(batch.scored) & np.asarray(batch.valid)
    return np.bincount(np.asarray(batch.tokens)[scored], minlength=vocab_size)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("estimator", "samples", "mask_id", "tail", "chunk"))
def _estimate(denoiser, params, batch, seed, replicate, *, estimator, samples, **score) -> Array:
    queries = estimate_queries(estimator, batch, seed, replicate, samples)
    return block_nats(denoiser, params, batch, queries, **score)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("mask_id", "tail", "chunk"))
def _masked_nats(denoiser, params, batch, seed, **score) -> Array:
    """Plain cross-entropies of the tokens masked at t ~ U(0, 1), weight 1, summed over blocks: no bound of anything."""
    queries = time_queries(batch, seed, 0, 1)
    queries = queries._replace(weight=queries.masked.astype(jnp.float32))
    return block_nats(denoiser, params, batch, queries, **score)
