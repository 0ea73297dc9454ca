"""The optimizer: AdamW, which parameters decay, and the learning rate as a pure function of the step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from diffjax.config import OptimizerConfig
from diffjax.parallel.mesh import leaf_path

# Last part of a parameter's path -> does it carry weight decay. Convolution kernels are the exception below.
DECAYS = {
    "kernel": True,
    "table": False,
    "scale": False,
    "bias": False,
    "A_log": False,
    "dt_bias": False,
    "D_skip": False,
}
NO_DECAY_PARENTS = ("conv_x", "conv_BC")


def decay_mask(params):
    """Tree of bool like `params`: True for the matrices (the head's among them), by path. An unknown name raises."""

    def decays(path, _):
        *parents, name = leaf_path(path).split("/")
        if name not in DECAYS:
            raise ValueError(f"{leaf_path(path)}: no decay rule for '{name}'; add one in training/optimizer.py")
        return DECAYS[name] and not (parents and parents[-1] in NO_DECAY_PARENTS)

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) with learning rate 1: the step multiplies its updates by `schedule(state.step)`.

    So one counter drives learning rate, data and noise; the optimizer's own count serves the bias correction alone.
    """
    return optax.adamw(
        learning_rate=1.0,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def make_schedule(config: OptimizerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """The learning rate of an integer step, fp32: linear warm-up, then cosine, wsd or constant.

    The curve spans `schedule_steps` (default: `steps`), so that a longer run continues the same curve. Warm-up is
    peak * (s + 1) / warmup_steps: step 0 already learns. `wsd` (arXiv:2404.06395) stays at the peak and falls linearly
    over the last `decay_steps`; cosine and wsd end at final_ratio * peak and stay there.
    """
    total = steps if config.schedule_steps is None else config.schedule_steps
    peak, warmup, decay = config.learning_rate, config.warmup_steps, config.decay_steps

    def after_warmup(step: jax.Array) -> jax.Array:
        if config.schedule == "constant":
            return jnp.ones_like(step)
        start, length = (warmup, total - warmup) if config.schedule == "cosine" else (total - decay, decay)
        progress = jnp.clip((step - start) / max(length, 1), 0.0, 1.0)
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
        return config.final_ratio + (1.0 - config.final_ratio) * falling

    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        ramp = (step + 1.0) / max(warmup, 1)
        return peak * jnp.where(step < warmup, ramp, after_warmup(step))

    return schedule
