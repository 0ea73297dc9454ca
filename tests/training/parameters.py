"""Parameters of a denoiser with one and two stacked axes, and its matrices one by one, cut by the names of modules."""

import functools

import jax
import numpy as np

from diffjax import Denoiser
from diffjax.config import MambaConfig, ModelConfig
from diffjax.parallel.mesh import leaf_path

# Module -> how many of its kernel's last axes are inputs and outputs: the shapes its Projection was given.
INPUTS_OUTPUTS = {
    **dict.fromkeys(("query", "key", "value", "z", "x", "B", "C"), (1, 2)),
    **dict.fromkeys(("gate", "up", "down", "dt"), (1, 1)),
}
# Path without the place of the layer -> its learning-rate group and whether it decays; `*` is either direction.
VECTORS = (
    *("mixer_norm/scale", "mlp_norm/scale", "mixer/query_norm/scale", "mixer/key_norm/scale", "mixer/*/norm/scale"),
    *("mixer/*/A_log", "mixer/*/dt_bias", "mixer/*/D_skip"),
    *("mixer/*/conv_x/kernel", "mixer/*/conv_x/bias", "mixer/*/conv_BC/kernel", "mixer/*/conv_BC/bias"),
)


@functools.cache
def denoiser(width: int = 32, directions: str = "shared") -> Denoiser:
    """AMM AMM A: unit stacked twice, Mamba in runs of two inside it, an attention tail."""
    mamba = MambaConfig(heads=4, head_dim=width // 4, state=6, groups=2, directions=directions)
    shape = dict(width=width, heads=4, kv_heads=2, head_dim=width // 4, mlp_width=3 * width // 2, block_size=4)
    return Denoiser(ModelConfig(pattern="AMM", layers=7, qk_norm=True, mamba=mamba, **shape), vocab_size=64)


def normal(abstract, seed: int):
    """A tree of normal numbers in these shapes, float64 in numpy."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: draws.standard_normal(leaf.shape), abstract)


def short(path: str) -> str:
    """layers/unit/layer_1/mixer/forward/x/kernel -> mixer/*/x/kernel."""
    parts = ["*" if part in ("forward", "reverse") else part for part in path.split("/")]
    return "/".join(parts[3:] if parts[0] == "layers" else parts)


def layers_of(tree) -> dict[str, np.ndarray]:
    """Every layer's own array: the 2-D matrix of a projection, other parameters in their shape. `path#number` each."""
    single = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path, leaf = leaf_path(path), np.asarray(leaf)
        stacked = {"layers/unit/layer_0": 1, "layers/unit/layer_1": 2}.get("/".join(path.split("/")[:3]), 0)
        leaf = leaf.reshape(-1, *leaf.shape[stacked:])
        module = path.split("/")[-2]
        inputs, outputs = (2, 1) if module == "output" else INPUTS_OUTPUTS.get(module, (None, None))
        for number, own in enumerate(leaf):
            if inputs is not None:
                assert own.ndim == inputs + outputs, path
                own = own.reshape(np.prod(own.shape[:inputs]), -1)
            single[f"{path}#{number}"] = own
    return single


def is_layer_matrix(path: str) -> bool:
    return path.startswith("layers/") and short(path.split("#")[0]) not in VECTORS
