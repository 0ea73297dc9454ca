"""The sampling driver: one jitted while_loop that denoises and commits blocks, every row at its own pace.

A row is prompt plus generated tokens from column 0, cut into blocks of G from its first token. Whole prompt blocks are
absorbed (prefill), the rest of the prompt stands as given tokens in the first frontier. A row whose block is settled
absorbs it (commit) at the next iteration and goes on; a row that is not live is frozen. What a row becomes depends on
its own tokens, its knobs and (seed, row id, block, step), and not on the other rows, their number, order or progress.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diffjax.sampling.proposals import propose
from diffjax.sampling.rules import TOKEN, View

RUNNING, STOP, LENGTH, ERROR = range(4)
"""Finish reasons as they stand in `State.finish`."""

PREFILL_TOKENS = 1024
"""Most tokens of a row that one prefill call absorbs (one block where blocks are longer)."""


class State(NamedTuple):
    """Everything the loop carries. Lmax is a multiple of G; B counts padding rows, which are never live."""

    tokens: jax.Array  # [B,Lmax] int32
    masked: jax.Array  # [B,Lmax] bool, not decided
    given: jax.Array  # [B,Lmax] bool, frozen from the start
    limit: jax.Array  # [B] int32, positions from here on are never decided
    key: jax.Array  # [B] random keys of (seed, row id)
    knobs: dict  # of scalars or [B]: temperature, top_p and what the rule reads
    context: object  # the denoiser's, capacity Lmax
    aux: object  # the rule's, leading axis B
    block: jax.Array  # [B] int32, the block being denoised
    step: jax.Array  # [B] int32, steps done inside this block
    n0: jax.Array  # [B] int32, eligible positions at block entry
    settled: jax.Array  # [B] bool, the block is finished and waits to be absorbed
    live: jax.Array  # [B] bool
    news: jax.Array  # [B] bool, a block was finished since the driver was called
    finish: jax.Array  # [B] int32
    length: jax.Array  # [B] int32, tokens of a finished row, the stop token included
    nfe: jax.Array  # [B] int32, denoise calls the row took part in
    commits: jax.Array  # [B] int32, blocks absorbed after being denoised
    prefill_calls: jax.Array  # [B] int32
    forced: jax.Array  # [B] bool, a block ran into the bound on steps


def bucket(n):
    """Smallest of 1, 2, 3 and {4, 5, 6, 7} * 2^k that is >= n: shapes come in few sizes and waste at most a fifth."""
    unit = 1 << max(0, (n - 1).bit_length() - 3)
    return -(-n // unit) * unit


def start(denoiser, params, rule, prompts, limits, knobs, *, mask_id, seed=0, row_ids=None) -> State:
    """Lay the prompts out, absorb their whole blocks and stand at each row's first frontier.

    prompts: one int array of token ids per row, any length, 0 included. limits: per row, total length in tokens that
    may not be passed; need not be a multiple of G. knobs: temperature, top_p and what the rule reads, each a number or
    one per row. row_ids: per row, the number its noise is drawn from (default: its index).
    """
    G, rows = denoiser.block_size, len(prompts)
    B = bucket(rows)
    lengths, ends = np.zeros(B, np.int32), np.zeros(B, np.int32)
    lengths[:rows], ends[:rows] = [len(prompt) for prompt in prompts], limits
    Lmax = bucket(-(-max(1, int(ends.max()), int(lengths.max())) // G)) * G
    tokens = np.full((B, Lmax), mask_id, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    given = np.arange(Lmax) < lengths[:, None]
    live = ends > lengths

    absorbed = np.where(live, lengths // G * G, 0)
    context, prefill_calls = _prefill(denoiser, params, tokens, absorbed)
    ids = np.arange(B, dtype=np.uint32)
    ids[:rows] = ids[:rows] if row_ids is None else row_ids
    key = _fold_in(jnp.broadcast_to(jax.random.key(seed, impl="threefry2x32"), B), jnp.array(ids))
    knobs = {name: jnp.array(np.resize(knob, B) if np.ndim(knob) else knob) for name, knob in knobs.items()}

    def numbers(values=0):
        return jnp.array(np.broadcast_to(values, B), jnp.int32)

    def flags(values=False):
        return jnp.array(np.broadcast_to(values, B), bool)

    state = State(
        tokens=jnp.array(tokens),
        masked=jnp.array(~given),
        given=jnp.array(given),
        limit=numbers(ends),
        key=key,
        knobs=knobs,
        context=context,
        aux=(),
        block=numbers(absorbed // G),
        step=numbers(),
        n0=numbers(),
        settled=flags(),
        live=flags(live),
        news=flags(),
        finish=numbers(np.where(live, RUNNING, LENGTH)),
        length=numbers(lengths),
        nfe=numbers(),
        commits=numbers(),
        prefill_calls=numbers(prefill_calls),
        forced=flags(),
    )
    no_stop = jnp.zeros(denoiser.vocab_size, bool)
    aux = jax.eval_shape(lambda state: rule.init_aux(state.key, _view(state, G, no_stop)[0], state.knobs), state)
    return state._replace(aux=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), aux))


def _prefill(denoiser, params, tokens, absorbed):
    """Absorb the first absorbed[b] tokens (whole blocks) of each row, in chunks of one width -> context, calls [B]."""
    G, (B, Lmax) = denoiser.block_size, tokens.shape
    context = denoiser.empty_context(B, Lmax)
    longest = int(absorbed.max())
    width = min(bucket(longest // G), max(1, PREFILL_TOKENS // G)) * G if longest else 0
    calls = np.zeros(B, np.int32)
    for begin in range(0, longest, width or 1):
        count = np.clip(absorbed - begin, 0, width)
        chunk = np.zeros((B, width), np.int32)
        piece = tokens[:, begin : begin + width]
        chunk[:, : piece.shape[1]] = piece
        context = _absorb(denoiser, params, jnp.asarray(chunk), context, jnp.asarray(count, jnp.int32))
        calls += count > 0
    return context, calls


@partial(jax.jit, static_argnums=0, donate_argnames="context")
def _absorb(denoiser, params, tokens, context, count):
    return denoiser.absorb(params, tokens, context, count)


@partial(jax.jit, static_argnums=(0, 1), static_argnames="mask_id", donate_argnames="state")
def advance(denoiser, rule, params, state, forbid, stop, pause, *, mask_id) -> State:
    """Run until no row is live or, where `pause`, until at least one row has finished a block (`State.news`).

    forbid, stop: [V] bool, ids never drawn and ids that end a row. A block that has taken 4G steps (no guarded monotone
    rule does) is forced: what is left takes its proposal. Stopping to look changes no token. `state` is donated.
    """
    G = denoiser.block_size
    max_block_steps = 4 * G

    def commit(state):
        """Rows with a settled block absorb it and move to the next."""
        due = state.settled & state.live
        count = jnp.where(due, G, 0).astype(jnp.int32)
        context = lax.cond(
            jnp.any(due),
            lambda context: denoiser.absorb(params, _window(state, G, state.tokens), context, count),
            lambda context: context,
            state.context,
        )
        return state._replace(
            context=context,
            block=state.block + due,
            step=jnp.where(due, 0, state.step),
            settled=state.settled & ~due,
            commits=state.commits + due,
        )

    def body(state):
        state = commit(state)
        view, _ = _view(state, G, stop)
        active = state.live & jnp.any(view.eligible, axis=-1)
        if not rule.monotone:
            active |= state.live & (state.step > 0)

        logits = denoiser.denoise(params, view.tokens, state.context)
        block_key = _fold_in(state.key, state.block)
        key = _fold_in(block_key, state.step)
        knobs = state.knobs
        proposal = propose(_fold_in(key, TOKEN), logits, forbid, knobs["temperature"], knobs["top_p"], rule.needs)
        bad = active & jnp.any(view.eligible & ~proposal.sound, axis=-1)
        active &= ~bad

        aux = _select(state.step == 0, rule.init_aux(block_key, view, knobs), state.aux)
        decision = rule.step(key, proposal, view, aux, knobs)
        overdue = active & (state.step + 1 >= max_block_steps)
        revocable = active[:, None] & ~view.masked & ~view.given
        taken = active[:, None] & view.eligible & (decision.commit | overdue[:, None])
        remask = revocable & decision.remask & ~overdue[:, None]
        tokens = jnp.where(taken | (revocable & decision.overwrite), decision.token, view.tokens)
        tokens = jnp.where(remask, mask_id, tokens)
        masked = (view.masked & ~taken) | remask
        rows, columns = jnp.arange(tokens.shape[0])[:, None], _positions(state, G)
        state = state._replace(
            tokens=state.tokens.at[rows, columns].set(tokens),
            masked=state.masked.at[rows, columns].set(masked),
            aux=_select(active, decision.aux, aux),
            step=state.step + active,
            n0=view.n0,
            nfe=state.nfe + active,
            forced=state.forced | overdue,
        )

        view, first_stop = _view(state, G, stop)
        finished = ~jnp.any(view.eligible, axis=-1)
        if not rule.monotone:
            finished = jnp.where(active, decision.settled | overdue, finished)
        settled = state.live & ~bad & finished
        stopped = settled & (first_stop < G)
        at_limit = settled & ~stopped & ((state.block + 1) * G >= state.limit)
        return state._replace(
            settled=settled,
            live=state.live & ~(bad | stopped | at_limit),
            news=state.news | settled,
            finish=jnp.select([bad, stopped, at_limit], [ERROR, STOP, LENGTH], state.finish).astype(jnp.int32),
            length=jnp.select([stopped, at_limit], [state.block * G + first_stop + 1, state.limit], state.length),
        )

    return lax.while_loop(
        lambda state: jnp.any(state.live) & ~(pause & jnp.any(state.news)),
        body,
        state._replace(news=jnp.zeros_like(state.news)),
    )


def _positions(state, G):
    """Columns of each row's window: [B,G] int32."""
    return state.block[:, None] * G + jnp.arange(G, dtype=jnp.int32)


def _window(state, G, array):
    """The window of a [B,Lmax] array: [B,G]."""
    return jnp.take_along_axis(array, _positions(state, G), axis=1)


def _view(state, G, stop):
    """The window as rules see it, and the index [B] int32 of its first generated stop token (G where there is none)."""
    tokens, masked, given = (_window(state, G, array) for array in (state.tokens, state.masked, state.given))
    stops = stop[tokens] & ~masked & ~given
    first_stop = jnp.where(jnp.any(stops, axis=-1), jnp.argmax(stops, axis=-1), G).astype(jnp.int32)
    inside = (_positions(state, G) < state.limit[:, None]) & (jnp.arange(G) < first_stop[:, None])
    eligible = masked & ~given & inside
    n0 = jnp.where(state.step == 0, jnp.sum(eligible, axis=-1, dtype=jnp.int32), state.n0)
    return View(tokens, masked, eligible, given, state.step, n0, state.live), first_stop


def _fold_in(key, number):
    """Fold a number (scalar or [B]) into each of [B] keys."""
    return jax.vmap(jax.random.fold_in)(key, jnp.broadcast_to(number, key.shape))


def _select(rows, new, old):
    """`new` where rows [B], else `old`, for pytrees whose leaves have leading axis B."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)
