"""The learning rate as a pure function of the integer step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from diffjax.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """The learning rate of an integer step, fp32: linear warm-up, then cosine, wsd, rsqrt or constant.

    Warm-up is peak * (s + 1) / warmup_steps: step 0 already learns. Cosine and wsd span `schedule_steps` (default:
    `steps`), so that a longer run continues the same curve; they end at final_ratio * peak and stay there. `wsd`
    (arXiv:2404.06395) stays at the peak and falls over the last `decay_steps`, with x the part of them that is over,
    as 1 - x or as 1 - sqrt(x) (arXiv:2405.18392). `rsqrt` is peak * sqrt(warmup_steps / (s + 1)); like constant it has
    no end, so a wsd branch can start from any checkpoint of either.
    """
    total = steps if config.schedule_steps is None else config.schedule_steps
    peak, warmup, decay = config.learning_rate, config.warmup_steps, config.decay_steps

    def progress(step: jax.Array, start: int, length: int) -> jax.Array:
        return jnp.clip((step - start) / max(length, 1), 0.0, 1.0)

    def after_warmup(step: jax.Array) -> jax.Array:
        if config.schedule == "constant":
            return jnp.ones_like(step)
        if config.schedule == "rsqrt":
            return jnp.sqrt(max(warmup, 1) / (step + 1.0))
        if config.schedule == "cosine":
            falling = 0.5 * (1.0 + jnp.cos(jnp.pi * progress(step, warmup, total - warmup)))
        else:
            over = progress(step, total - decay, decay)
            falling = 1.0 - (jnp.sqrt(over) if config.decay_shape == "1-sqrt" else over)
        return config.final_ratio + (1.0 - config.final_ratio) * falling

    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        ramp = (step + 1.0) / max(warmup, 1)
        return peak * jnp.where(step < warmup, ramp, after_warmup(step))

    return schedule
