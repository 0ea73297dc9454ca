"""The guard: decides before the optimizer whether a step's gradient may change the model. Pure and jitted.

The spike rule follows the skip-step optimizer of allenai/OLMo-core; it looks at gradient norms alone, because losses
weighted by 1/t have heavy tails.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffjax.config import GuardConfig

ACCEPTED, NOT_FINITE, SPIKE, EMPTY = range(4)
REASONS = ("accepted", "not finite", "spike", "empty batch")


class GuardState(NamedTuple):
    """norms [W] f32: ring of the last accepted gradient norms; the rest are int32 scalars."""

    norms: jax.Array
    accepted: jax.Array  # steps accepted so far
    consecutive: jax.Array  # rejects since the last accepted step, empty batches not counted
    rejected: jax.Array  # rejects so far


class Verdict(NamedTuple):
    accept: jax.Array  # bool
    reason: jax.Array  # int32, an index into REASONS
    limit: jax.Array  # f32, the norm above which this step counts as a spike


def init_guard(config: GuardConfig) -> GuardState:
    zero = jnp.zeros((), jnp.int32)
    return GuardState(jnp.zeros((config.spike_window,), jnp.float32), zero, zero, zero)


def judge(
    config: GuardConfig, state: GuardState, loss, grad_norm, weight, update_norm=0.0
) -> tuple[Verdict, GuardState]:
    """Accept a step or not, from its loss, the global norm of its gradient before clipping, its scored tokens and the
    global norm of its update: a finite gradient can still send the parameters to infinity.

    The limit is mean + spike_sigma * max(std, mean / 10) over the ring; infinite until the ring is full.
    """
    window = config.spike_window
    mean, std = jnp.mean(state.norms), jnp.std(state.norms)
    limit = jnp.full((), jnp.inf, jnp.float32)
    if config.spike_sigma is not None:
        limit = jnp.where(state.accepted >= window, mean + config.spike_sigma * jnp.maximum(std, 0.1 * mean), limit)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
    reason = jnp.where(grad_norm > limit, SPIKE, ACCEPTED)
    reason = jnp.where(finite, reason, NOT_FINITE)
    reason = jnp.where(weight > 0, reason, EMPTY).astype(jnp.int32)
    accept = reason == ACCEPTED
    ring = state.norms.at[state.accepted % window].set(grad_norm.astype(jnp.float32))
    counted = jnp.where(reason == EMPTY, state.consecutive, state.consecutive + 1)
    new_state = GuardState(
        norms=jnp.where(accept, ring, state.norms),
        accepted=state.accepted + accept,
        consecutive=jnp.where(accept, 0, counted),
        rejected=state.rejected + ~accept,
    )
    return Verdict(accept, reason, limit), new_state
