"""Text in, text out: prompts and the sampling config become driver calls, tokens become (streamed) text."""

import codecs
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from diffjax.config import SamplingConfig
from diffjax.errors import UserError
from diffjax.sampling import driver
from diffjax.sampling.rules import RULES, SCORES, Rule


@dataclass(frozen=True)
class Statistics:
    """Counts of one row. Prompt tokens and pads count nowhere; seconds are of the whole call, compilation included."""

    tokens: int  # generated, the stop token included
    denoise_calls: int
    commit_calls: int  # generated blocks absorbed; the last one never is
    prefill_calls: int
    forced: bool  # a block hit the bound on steps
    seconds: float

    @property
    def tpf(self) -> float:
        """Tokens per denoise call."""
        return self.tokens / max(1, self.denoise_calls)

    @property
    def tpf_all(self) -> float:
        """Tokens per denoise or commit call."""
        return self.tokens / max(1, self.denoise_calls + self.commit_calls)


@dataclass(frozen=True)
class Generation:
    """What one prompt became. `text` and `tokens` [n] int32 are the generated part; `tokens` keeps the stop token."""

    text: str
    tokens: np.ndarray
    length: int  # tokens of the row, prompt and BOS included
    finish_reason: str  # "stop": it ended itself; "length": it reached its last block
    statistics: Statistics


def generate(
    denoiser,
    params,
    tokenizer,
    prompts: list[str],
    sampling: SamplingConfig,
    *,
    on_block: Callable[[int, str], None] | None = None,
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
) -> list[Generation]:
    """Continue every prompt by up to `sampling.blocks` blocks; results in the order of the prompts.

    The block a prompt ends in is the first of these blocks, so a row gains between (blocks - 1) * G + 1 and blocks * G
    tokens unless it stops before. Every row starts with BOS; the noise of row i depends on (seed, i) alone.
    on_block(row, text) hands out each row's text as its blocks are finished, and changes no token: the pieces of a row
    add up to its text. A UTF-8 sequence cut by a block's edge is held back until it is complete.
    fetch brings an array to the host: where parameters are split over processes, its results may be too.
    UserError: a bad key, a prompt that is not Unicode, a model that does not fit the tokenizer or gives NaN.
    """
    rule, knobs = sampler(sampling, denoiser.block_size)
    if tokenizer.vocab_size != denoiser.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model {denoiser.vocab_size}: "
            "use the tokenizer the model was trained with"
        )
    began = time.perf_counter()
    rows = [np.array([tokenizer.bos_id, *ids], np.int32) for ids in encode(tokenizer, prompts)]
    if not rows:
        return []
    G = denoiser.block_size
    limits = [(len(row) // G + sampling.blocks) * G for row in rows]
    forbid = np.zeros(denoiser.vocab_size, bool)
    forbid[[tokenizer.mask_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.unk_id]] = True
    stop = np.zeros(denoiser.vocab_size, bool)
    stop[tokenizer.eos_id] = True

    streams = [TextStream(tokenizer) for _ in rows]
    state = driver.start(denoiser, params, rule, rows, limits, knobs, mask_id=tokenizer.mask_id, seed=sampling.seed)
    live = True
    while live:
        state = driver.advance(
            denoiser, rule, params, state, forbid, stop, on_block is not None, mask_id=tokenizer.mask_id
        )
        live = bool(np.any(fetch(state.live)))
        if on_block is not None:
            _hand_out(jax.tree.map(fetch, state._replace(key=None, context=None)), streams, G, on_block)

    seconds = time.perf_counter() - began
    state = jax.tree.map(fetch, state._replace(key=None, context=None))
    _refuse_errors(state, prompts)
    results = []
    for row, (prompt, stream) in enumerate(zip(rows, streams, strict=True)):
        length = int(state.length[row])
        new = state.tokens[row, len(prompt) : length]
        stream.push(new[stream.pushed :], last=True)
        statistics = Statistics(
            tokens=len(new),
            denoise_calls=int(state.nfe[row]),
            commit_calls=int(state.commits[row]),
            prefill_calls=int(state.prefill_calls[row]),
            forced=bool(state.forced[row]),
            seconds=seconds,
        )
        finish_reason = "stop" if state.finish[row] == driver.STOP else "length"
        results.append(Generation(stream.text, new, length, finish_reason, statistics))
    return results


def summary(results: list[Generation]) -> dict[str, float]:
    """Totals of a batch: TPF is all tokens over all denoise calls, TPF_all over all denoise and commit calls."""
    rows = [result.statistics for result in results]
    tokens, denoise, commit, prefill = (
        sum(getattr(row, name) for row in rows) for name in ("tokens", "denoise_calls", "commit_calls", "prefill_calls")
    )
    return {
        "tokens": tokens,
        "denoise_calls": denoise,
        "commit_calls": commit,
        "prefill_calls": prefill,
        "tpf": tokens / max(1, denoise),
        "tpf_all": tokens / max(1, denoise + commit),
        "seconds": max((row.seconds for row in rows), default=0.0),
    }


def sampler(sampling: SamplingConfig, block_size: int) -> tuple[Rule, dict[str, float]]:
    """The rule a config names and its knobs. UserError names the key that is out of range or that the rule ignores."""
    if sampling.rule not in RULES:
        raise UserError(f"sampling.rule={sampling.rule} is not a rule; there are {', '.join(sorted(RULES))}")
    checks = {
        "temperature": (lambda x: math.isfinite(x) and x >= 0, "a number >= 0 (0 takes the most probable token)"),
        "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1 (1 cuts nothing)"),
        "threshold": (lambda x: 0 <= x <= 1, "a probability between 0 and 1"),
        "score": (lambda x: x in SCORES, f"one of {', '.join(SCORES)}"),
        "steps": (lambda x: x >= 1, "at least 1 (denoising steps per block)"),
        "blocks": (lambda x: x >= 1, "at least 1"),
        "seed": (lambda x: 0 <= x < 2**32, "an integer from 0 to 2^32 - 1"),
    }
    for key, (holds, right) in checks.items():
        value = getattr(sampling, key)
        if value is not None and not holds(value):
            raise UserError(f"sampling.{key}={value} must be {right}")

    entry = RULES[sampling.rule]
    read = {*entry.knobs, *entry.options}
    for other in RULES.values():
        for key in [*other.knobs, *other.options]:
            if key not in read and getattr(sampling, key) is not None:
                raise UserError(
                    f"sampling.{key}={getattr(sampling, key)} has no effect: rule {sampling.rule} reads "
                    f"{', '.join(sorted(read))}; leave {key} out or choose another rule"
                )

    def chosen(key, default):
        return default if getattr(sampling, key) is None else getattr(sampling, key)

    rule = entry.build(**{key: chosen(key, default) for key, default in entry.options.items()})
    knobs = {key: chosen(key, default(block_size)) for key, default in entry.knobs.items()}
    return rule, {"temperature": float(sampling.temperature), "top_p": float(sampling.top_p), **knobs}


def encode(tokenizer, prompts: list[str]) -> list[list[int]]:
    """Token ids of each prompt, without BOS; an empty prompt has none."""
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of strings, not one string")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise UserError(f"prompt {index} is {type(prompt).__name__}, not text")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt {index} is not valid Unicode: character {error.start} is a lone surrogate "
                "(bytes that are not UTF-8 become such characters)"
            ) from None
    return [tokenizer.encode(prompt) for prompt in prompts]


class TextStream:
    """Token ids of one row in pieces -> text in pieces, whose sum does not depend on where the pieces were cut."""

    def __init__(self, tokenizer):
        self._to_bytes = tokenizer.to_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pushed = 0
        self.text = ""

    def push(self, tokens, last=False) -> str:
        """Take the next ids [n] and return the text they complete; `last` also lets go of an incomplete character."""
        piece = self._decoder.decode(self._to_bytes([int(token) for token in tokens]), final=last)
        self.pushed += len(tokens)
        self.text += piece
        return piece


def _hand_out(state, streams, G, on_block):
    """Call on_block for every row that finished a block since the driver was called."""
    news, live, given, tokens, length, block = (
        state.news, state.live, state.given, state.tokens, state.length, state.block
    )  # fmt: skip
    for row, stream in enumerate(streams):
        if news[row]:
            begin = int(given[row].sum()) + stream.pushed
            end = (block[row] + 1) * G if live[row] else length[row]
            piece = stream.push(tokens[row, begin:end], last=not live[row])
            if piece:
                on_block(row, piece)


def _refuse_errors(state, prompts):
    for row in np.flatnonzero(state.finish == driver.ERROR):
        raise UserError(
            f"row {row} (prompt {prompts[row][:40]!r}) failed at block {int(state.block[row])}: the model's logits "
            "hold NaN or leave no token to choose; check the checkpoint's parameters"
        )
