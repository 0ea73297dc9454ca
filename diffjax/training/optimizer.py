"""The optimizer by its name in the config: AdamW, Muon or Adafactor, and what it does to which parameter."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from diffjax.config import OptimizerConfig
from diffjax.parallel.mesh import leaf_path
from diffjax.training.adafactor import is_factored, scale_by_second_moment
from diffjax.training.parameter_roles import Layout, decay_mask, group_of, layouts

MUON_MOMENTUM = 0.95
MODULE_PARTS = ("kernel", "scale", "bias", "table")  # names that say nothing without their module's
MUON_RMS = 0.2  # of an update with singular values 1; AdamW's is about this (arXiv:2502.16982, section 2.2)


def make_optimizer(config: OptimizerConfig, logical_axes=None) -> optax.GradientTransformation:
    """The optimizer with learning rate 1: the step multiplies its updates by `schedule(state.step)`.

    So one counter drives learning rate, data and noise; the optimizer's own count serves bias corrections alone. All
    optimizers share learning rate, weight decay and its mask:

    adamw      arXiv:1711.05101.
    muon       matrices of the layers: orthogonalised Nesterov momentum, scaled to AdamW's RMS. All else, embedding and
               head among it: AdamW.
    adafactor  arXiv:1804.04235 with an absolute learning rate: AdamW with a factored second moment, updates cut to an
               RMS of 1, and beta1 as their momentum; beta1 = 0 stores none.

    `learning_rate_multipliers` scale the whole update of a group, weight decay included, as its own AdamW with that
    learning rate would.

    Args:
      logical_axes: the parameters' axis names, a tree of tuples; AdamW alone does without.
    """
    if config.name == "adamw":
        optimizer = _adamw(config)
    elif logical_axes is None:
        raise ValueError(f"optimizer.name={config.name} needs the parameters' logical axes")
    else:
        optimizer = {"muon": _muon, "adafactor": _adafactor}[config.name](config, layouts(logical_axes))
    return _multiplied(optimizer, dataclasses.asdict(config.learning_rate_multipliers))


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate=1.0,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def _decay_and_descend(config: OptimizerConfig) -> tuple[optax.GradientTransformation, ...]:
    return optax.add_decayed_weights(config.weight_decay, mask=decay_mask), optax.scale(-1.0)


def takes_muon(layout: Layout) -> bool:
    return bool(layout.inputs) and not layout.vocabulary


def _muon(config: OptimizerConfig, layouts) -> optax.GradientTransformation:
    def numbers(layout: Layout):
        return MuonDimensionNumbers(layout.inputs, layout.outputs) if takes_muon(layout) else optax.MaskedNode()

    is_layout = lambda node: isinstance(node, Layout)
    labels = jax.tree.map(lambda layout: "muon" if takes_muon(layout) else "adamw", layouts, is_leaf=is_layout)
    dimensions = jax.tree.map(numbers, layouts, is_leaf=is_layout)

    def to_rms(update: jax.Array, numbers: MuonDimensionNumbers) -> jax.Array:
        """Singular values 1 mean an RMS of 1 / sqrt(longer side), whatever the shorter one."""
        sides = [math.prod(update.shape[axis] for axis in side) for side in numbers]
        return update * (MUON_RMS * max(sides) ** 0.5)

    muon = optax.chain(
        scale_by_muon(beta=MUON_MOMENTUM, weight_dimension_numbers=lambda _: dimensions),
        optax.stateless(lambda updates, _: jax.tree.map(to_rms, updates, dimensions)),
        *_decay_and_descend(config),
    )
    return optax.partition({"muon": muon, "adamw": _adamw(config)}, labels)


def _adafactor(config: OptimizerConfig, layouts) -> optax.GradientTransformation:
    momentum = [optax.ema(config.beta1, debias=False)] if config.beta1 > 0 else []
    return optax.chain(
        scale_by_second_moment(layouts, config.beta2, config.epsilon), *momentum, *_decay_and_descend(config)
    )


def _multiplied(optimizer: optax.GradientTransformation, factors: dict[str, float]) -> optax.GradientTransformation:
    if set(factors.values()) == {1.0}:
        return optimizer

    def update(gradients, state, params=None):
        updates, state = optimizer.update(gradients, state, params)
        multiply = lambda path, update: update * factors[group_of(leaf_path(path))]
        return jax.tree_util.tree_map_with_path(multiply, updates), state

    return optax.GradientTransformation(optimizer.init, update)


def describe(config: OptimizerConfig, abstract_params, logical_axes) -> Iterator[str]:
    """Lines that say which parameter gets which rule, decay and learning rate; layers and directions are left out."""
    treatments: dict[str, list] = {}
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    decays = jax.tree.leaves(decay_mask(abstract_params))
    places = jax.tree.leaves(layouts(logical_axes), is_leaf=lambda node: isinstance(node, Layout))
    factors = dataclasses.asdict(config.learning_rate_multipliers)
    for (path, leaf), decaying, layout in zip(leaves, decays, places, strict=True):
        rule = config.name
        if rule == "muon" and not takes_muon(layout):
            rule = "adamw"
        if rule == "adafactor":
            rule += " factored" if is_factored(leaf.shape, layout) else " whole"
        treatment = f"{rule}, weight decay {config.weight_decay:g}" if decaying else f"{rule}, no weight decay"
        if set(factors.values()) != {1.0}:
            treatment += f", learning rate x {factors[group_of(leaf_path(path))]:g}"
        treatments.setdefault(treatment, []).append((leaf_path(path), leaf.size))
    for treatment, members in sorted(treatments.items()):
        names = ", ".join(_collapse([path for path, _ in members]))
        yield f"optimizer: {treatment}: {sum(size for _, size in members):,} parameters in {names}"


def _collapse(paths: list[str]) -> list[str]:
    """layers/unit/layer_0/mlp/up/kernel, layers/tail/layer_1/mlp/down/kernel -> mlp/{down,up}/kernel."""
    families: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        parts = [part for part in path.split("/") if part not in ("forward", "reverse")]
        if parts[0] == "layers":
            parts = parts[3:]
        tail = 1 if parts[-1] in MODULE_PARTS else 0
        *before, name = parts[: len(parts) - tail]
        after = parts[len(parts) - tail :]
        families.setdefault(("/".join(before), "/".join(after)), set()).add(name)
    spelled = []
    for (before, after), names in families.items():
        one = min(names) if len(names) == 1 else "{" + ",".join(sorted(names)) + "}"
        spelled.append("/".join(filter(None, (before, one, after))))
    return sorted(spelled)
