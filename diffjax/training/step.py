"""The train step: gradients summed over microbatches, one division, clip, guard, update. One compiled function."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from diffjax.config import Config
from diffjax.config_rules import check_context
from diffjax.data.batch import Batch
from diffjax.errors import UserError
from diffjax.parallel import mesh as mesh_lib
from diffjax.training import guard as guard_lib
from diffjax.training.optimizer import make_optimizer
from diffjax.training.schedule import make_schedule

Objective = Callable  # (params, batch, noise) -> (numerator, denominator, metrics {name: (sum, weight)})
DrawNoise = Callable  # (step, batch) -> noise, a pure function of the seed, the step and each row's number


def make_init(config: Config, init_params: Callable, logical_axes=None) -> Callable:
    """init_state(key) -> {step, params, opt, guard, ema?}. No random keys live in the state: noise is a function.

    logical_axes: what `make_optimizer` asks for.
    """
    optimizer = make_optimizer(config.optimizer, logical_axes)

    def init_state(key):
        return fresh_state(config, optimizer, init_params(key))

    return init_state


def fresh_state(config: Config, optimizer: optax.GradientTransformation, params) -> dict:
    """The state before batch 0, around given parameters."""
    state = {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "opt": optimizer.init(params),
        "guard": guard_lib.init_guard(config.guard),
    }
    if config.training.ema > 0:
        state["ema"] = jax.tree.map(jnp.copy, params)
    return state


def state_shardings(config: Config, abstract_state: dict, param_shardings, mesh: Mesh) -> dict:
    """The sharding of every leaf of the state: moments and averages lie like their parameters, the rest is whole.

    A leaf of the optimizer's state is its parameter's when its path ends in the parameter's. Where one of its
    dimensions was averaged away (length 1), that dimension is not split.
    """
    whole = mesh_lib.replicated(mesh)
    placed = jax.tree.map(lambda _: whole, abstract_state)
    placed["params"] = param_shardings
    owners = {
        mesh_lib.leaf_path(path): (leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(abstract_state["params"]), jax.tree.leaves(param_shardings), strict=True
        )
    }

    def place(path, leaf):
        words = mesh_lib.leaf_path(path).split("/")
        endings = ("/".join(words[first:]) for first in range(len(words)))
        shape, spec = next((owners[ending] for ending in endings if ending in owners), (None, ()))
        if shape is None:
            return whole
        spec = spec + (None,) * (len(shape) - len(spec))
        kept = [axis if own == length else None for own, length, axis in zip(leaf.shape, shape, spec, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*kept))

    placed["opt"] = jax.tree_util.tree_map_with_path(place, abstract_state["opt"])
    if "ema" in placed:
        placed["ema"] = param_shardings
    return placed


class Layout(NamedTuple):
    """The state without its numbers: shapes and dtypes, the sharding of each leaf, and (path, bytes) of the parameters
    that every device holds whole, largest first."""

    state: dict
    placement: dict
    whole: list[tuple[str, int]]


def lay_out(config: Config, denoiser, mesh: Mesh | AbstractMesh) -> Layout:
    """Where every part of a run's state lies on the mesh. Raises UserError where rules or mesh forbid it."""
    _check_batch(config, mesh)
    axes = denoiser.logical_axes()
    state = jax.eval_shape(make_init(config, denoiser.init, axes), jax.random.key(config.run.seed))
    of_params = mesh_lib.shardings(state["params"], axes, mesh)
    whole = mesh_lib.whole_leaves(state["params"], of_params)
    mesh_lib.check_whole_leaves(config.mesh, mesh, whole)
    return Layout(state, state_shardings(config, state, of_params, mesh), whole)


def _check_batch(config: Config, mesh: Mesh) -> None:
    parts = config.training.microbatches * mesh.shape["data"] * mesh.shape["fsdp"]
    if config.training.batch_size % parts:
        raise UserError(
            f"training.batch_size={config.training.batch_size} is not a multiple of training.microbatches * data * fsdp"
            f" = {config.training.microbatches} * {mesh.shape['data']} * {mesh.shape['fsdp']} = {parts}"
        )
    check_context(config, mesh.shape["context"])


def split(batch: Batch, count: int, mesh: Mesh | None = None) -> Batch:
    """[B, ...] -> [k, B/k, ...]; row r goes to microbatch r % k, so every device keeps its own rows and tokens."""

    def one(x):
        x = jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
        if mesh is None:
            return x
        axes = (None, mesh_lib.BATCH_AXES, mesh_lib.CONTEXT_AXIS)[: x.ndim]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(one, batch)


def make_train_step(
    config: Config,
    objective: Objective,
    draw_noise: DrawNoise,
    mesh: Mesh | None = None,
    param_shardings=None,
    logical_axes=None,
) -> Callable:
    """train_step(state, batch) -> (state, metrics); pure, not yet jitted.

    metrics: `sums` {name: (sum, weight)}, to be averaged over any number of steps, and the scalars loss (nats per
    scored token), weight (scored tokens), tokens (valid tokens), learning_rate, grad_norm (before clipping),
    update_norm, param_norm, limit, reason, consecutive and bad_leaf (first leaf whose gradient is not finite, or -1).
    """
    optimizer = make_optimizer(config.optimizer, logical_axes)
    schedule = make_schedule(config.optimizer, config.training.steps)
    count = config.training.microbatches

    def loss_fn(params, batch, noise):
        numerator, denominator, metrics = objective(params, batch, noise)
        return numerator, (denominator, metrics)

    def gradient_sums(params, batch, noise):
        (numerator, (denominator, metrics)), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, noise)
        if param_shardings is not None:
            gradients = jax.lax.with_sharding_constraint(gradients, param_shardings)
        return gradients, numerator, denominator, metrics

    def train_step(state: dict, batch: Batch):
        step, params = state["step"], state["params"]

        def body(total, part):
            noise = draw_noise(step, part)  # here, outside every rematerialised region
            return jax.tree.map(jnp.add, total, gradient_sums(params, part, noise)), None

        parts = split(batch, count, mesh)
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda p, b: gradient_sums(p, b, draw_noise(step, b)), params, first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        (gradients, numerator, weight, sums), _ = jax.lax.scan(body, zeros, parts)

        scale = 1.0 / jnp.maximum(weight, 1.0)
        gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        loss = numerator * scale
        squares = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32))))
                             for g in jax.tree.leaves(gradients)])  # fmt: skip
        grad_norm = jnp.sqrt(jnp.sum(squares))
        bad = ~jnp.isfinite(squares)
        clip = jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-30))
        clipped = jax.tree.map(lambda g: g * clip.astype(g.dtype), gradients)
        updates, opt = optimizer.update(clipped, state["opt"], params)
        learning_rate = schedule(step)
        updates = jax.tree.map(lambda u: u * learning_rate.astype(u.dtype), updates)
        changed = {"params": optax.apply_updates(params, updates), "opt": opt}
        update_norm = optax.tree.norm(updates)
        verdict, guard = guard_lib.judge(config.guard, state["guard"], loss, grad_norm, weight, update_norm)
        if "ema" in state:
            decay = config.training.ema
            mix = lambda old, new: decay * old + (1 - decay) * new
            changed["ema"] = jax.tree.map(mix, state["ema"], changed["params"])
        before = {name: state[name] for name in changed}
        kept = jax.tree.map(lambda new, old: jnp.where(verdict.accept, new, old), changed, before)

        metrics = {
            "sums": {"loss": (numerator, weight), **sums},
            "loss": loss,
            "weight": weight,
            "tokens": jnp.sum(batch.valid, dtype=jnp.int32),
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "update_norm": update_norm,
            "param_norm": optax.tree.norm(kept["params"]),
            "limit": verdict.limit,
            "reason": verdict.reason,
            "consecutive": guard.consecutive,
            "bad_leaf": jnp.where(jnp.any(bad), jnp.argmax(bad), -1),
        }
        return {"step": step + 1, "guard": guard, **kept}, metrics

    return train_step


def compile_step(train_step: Callable, abstract_state: dict, placement: dict, abstract_batch: Batch, mesh: Mesh):
    """Compile `train_step` ahead of time, the state's buffers donated. A call with another shape or sharding raises."""
    rows = mesh_lib.batch_sharding(mesh)
    placed = lambda tree, where: jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, where
    )
    jitted = jax.jit(
        train_step,
        in_shardings=(placement, rows),
        out_shardings=(placement, mesh_lib.replicated(mesh)),
        donate_argnames=("state",),
    )
    return jitted.lower(placed(abstract_state, placement), placed(abstract_batch, rows)).compile()


def donated_share(compiled, abstract_state: dict, placement: dict) -> float:
    """Bytes that the compiled step writes in place, as a share of the state's bytes on one device."""
    state_bytes = sum(
        leaf.dtype.itemsize * _size(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(jax.tree.leaves(abstract_state), jax.tree.leaves(placement), strict=True)
    )
    return compiled.memory_analysis().alias_size_in_bytes / state_bytes


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
