"""What optimizers must know of a parameter, from its path and its logical axes: does it decay, which learning-rate
group it is in, and which matrices it holds. One table a question; a parameter that no table knows raises."""

from typing import NamedTuple

import jax

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

STACKED = "layers"  # the name of a leading axis over layers: every index is a parameter of its own
# Axes that stand beside the model's width in a matrix.
BESIDE_WIDTH = {"vocab", "heads", "kv_heads", "head_dim", "mlp", "ssm_heads", "ssm_head_dim", "groups", "state"}


class Layout(NamedTuple):
    """How a leaf's axes read: [stacked..., inputs..., outputs...], one prod(inputs) x prod(outputs) matrix a layer.

    A leaf that is no matrix has neither inputs nor outputs.
    """

    stacked: int  # leading axes that count layers
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    vocabulary: bool = False  # one side is the vocabulary: an embedding or the head


def decay_mask(params):
    """Tree of bool like `params`: True for the matrices (the head's among them), by path. An unknown name raises."""

    def decays(path, _):
        *parents, name = leaf_path(path).split("/")
        if name not in DECAYS:
            raise ValueError(f"{leaf_path(path)}: no decay rule for '{name}'; add one in training/parameter_roles.py")
        return DECAYS[name] and not (parents and parents[-1] in NO_DECAY_PARENTS)

    return jax.tree_util.tree_map_with_path(decays, params)


def group_of(path: str) -> str:
    """The learning-rate group of the parameter at `path`: attention, mamba, mlp, embedding, head or norm.

    Whatever a mixer holds, norms included, is in the mixer's group; `norm` are the norms before mixers, MLPs and head.
    """
    parts = path.split("/")
    if "mixer" in parts:
        return "mamba" if parts[parts.index("mixer") + 1] in ("forward", "reverse") else "attention"
    if "mlp" in parts:
        return "mlp"
    group = {"embed": "embedding", "head": "head"}.get(parts[0], "norm" if parts[-1] == "scale" else None)
    if group is None:
        raise ValueError(f"{path}: belongs to no learning-rate group; add a rule in training/parameter_roles.py")
    return group


def layouts(logical_axes):
    """Tree of Layout like the parameters. Norms, biases, convolutions and numbers per head are no matrices.

    A matrix maps from or to the model's width: behind the stacked axes, `embed` stands first (the inputs) or last (the
    outputs), and all other axes are the other side. So q [D, H, P] is D x HP and its output [H, P, D] is HP x D.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, names: _layout(leaf_path(path), names), logical_axes, is_leaf=lambda node: isinstance(node, tuple)
    )


def _layout(path: str, names: tuple[str | None, ...]) -> Layout:
    stacked = next((axis for axis, name in enumerate(names) if name != STACKED), len(names))
    own = names[stacked:]
    if len(own) < 2 or "embed" not in own:
        return Layout(stacked)
    others = [name for name in own if name != "embed"]
    if "embed" not in (own[0], own[-1]) or len(others) != len(own) - 1 or not set(others) <= BESIDE_WIDTH:
        raise ValueError(f"{path}: axes {names} are no known matrix; add a rule in training/parameter_roles.py")
    edge = stacked + 1 if own[0] == "embed" else len(names) - 1
    return Layout(stacked, tuple(range(stacked, edge)), tuple(range(edge, len(names))), "vocab" in others)
