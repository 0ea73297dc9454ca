"""The stack of layers that both streams pass in lock-step: one layer is `norm -> mixer -> +`, `norm -> MLP -> +`.

Training, absorb and denoise run this same code: training carries both streams, absorb only the clean one, denoise only
the frontier. Layers repeat a unit (the pattern string), scanned so that compile time does not grow with depth; a cut
last unit is the tail.
"""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from diffjax.config import KernelsConfig, ModelConfig
from diffjax.kernels.dispatch import SAVED
from diffjax.models import attention, mamba
from diffjax.models.layers import GatedMLP, RMSNorm
from diffjax.models.placement import constrain
from diffjax.models.streams import CleanStream, FrontierStream

# The logical names of the residual streams' dimensions.
CLEAN, FRONTIER = ("batch", "length", "embed"), ("batch", "frontier", "block", "embed")


class Layer(nn.Module):
    kind: str
    config: ModelConfig
    kernels: KernelsConfig
    dtype: jnp.dtype

    def setup(self):
        c = self.config
        output_std = c.init_std / (2 * c.layers) ** 0.5
        self.mixer_norm = RMSNorm((c.width,), ("embed",), c.norm_eps, self.dtype)
        self.mlp_norm = RMSNorm((c.width,), ("embed",), c.norm_eps, self.dtype)
        if self.kind == "A":
            self.mixer = attention.Attention(c, self.dtype, output_std, self.kernels.attention)
        else:
            self.mixer = mamba.Mamba(c, self.dtype, output_std, self.kernels.ssd)
        self.mlp = GatedMLP(c.width, c.mlp_width, self.dtype, c.init_std, output_std)

    def __call__(self, hidden, context, clean_stream: CleanStream | None, frontier_stream: FrontierStream | None):
        """Pass hidden = (clean [B, T, D], frontier [B, F, G, D]), either of them None, through the layer.

        The frontier reads the boundary that the clean stream leaves in this layer, or else the context.
        Returns hidden, and (the context behind the clean stream, None in training; auxiliary outputs by name for the
        objective, where a mixture of experts would put its balance).
        """
        clean, frontier = hidden
        out, boundary, context_after = None, None, None
        if clean is not None:
            out, boundary = self.mixer.clean(self.mixer_norm(clean), clean_stream, context)
            if frontier is None:
                context_after = self.mixer.to_context(boundary, clean_stream)
        elif context is not None:
            boundary = self.mixer.to_boundary(context)
        else:
            boundary = self.mixer.to_boundary(self.mixer.empty_context(frontier.shape[0]))

        auxiliary: dict[str, Array] = {}
        if frontier is not None:
            frontier = frontier + self.mixer.frontier(self.mixer_norm(frontier), frontier_stream, boundary)
            frontier = constrain(frontier + self.mlp(self.mlp_norm(frontier)), *FRONTIER)
        if clean is not None:
            clean = clean + out
            clean = constrain(clean + self.mlp(self.mlp_norm(clean)), *CLEAN)
        return (clean, frontier), (context_after, auxiliary)


class Unit(nn.Module):
    """The layers of one repeat of the pattern, or of its cut last repeat; equal neighbours are one scanned run, named
    after its first layer."""

    kinds: str
    config: ModelConfig
    kernels: KernelsConfig
    dtype: jnp.dtype

    def setup(self):
        layer = remat(Layer, self.config.remat)
        for name, kind, length in runs(self.kinds):
            run = layer if length == 1 else scan(layer, length)
            setattr(self, name, run(kind, self.config, self.kernels, self.dtype))

    def __call__(self, hidden, context: dict | None, clean_stream, frontier_stream):
        contexts, auxiliaries = {}, {}
        for name, _, _ in runs(self.kinds):
            own = None if context is None else context[name]
            hidden, (contexts[name], auxiliaries[name]) = getattr(self, name)(
                hidden, own, clean_stream, frontier_stream
            )
        return hidden, (contexts, auxiliaries)


def runs(kinds: str) -> list[tuple[str, str, int]]:
    """Runs of equal layers: "AMMM" -> [("layer_0", "A", 1), ("layer_1", "M", 3)]."""
    found, first = [], 0
    for kind, group in itertools.groupby(kinds):
        length = len(list(group))
        found.append((f"layer_{first}", kind, length))
        first += length
    return found


def scan(module: type[nn.Module], length: int) -> type[nn.Module]:
    """`length` of the module in a row, as one loop over stacked parameters and contexts."""
    return nn.scan(
        module,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast, nn.broadcast),
        length=length,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


def remat(layer: type[nn.Module], policy: str) -> type[nn.Module]:
    """The layer under a rematerialisation policy: `none` keeps all activations, `block` only the layer's inputs,
    `dots` also what its matrices and its attention gave."""
    if policy == "none":
        return layer
    save = jax.checkpoint_policies
    dots = save.save_from_both_policies(save.dots_with_no_batch_dims_saveable, save.save_only_these_names(SAVED))
    policies = {"block": None, "dots": dots}
    return nn.remat(layer, prevent_cse=False, policy=policies[policy])


class Backbone(nn.Module):
    config: ModelConfig
    kernels: KernelsConfig
    dtype: jnp.dtype

    def setup(self):
        pattern = self.config.pattern
        repeats, rest = divmod(self.config.layers, len(pattern))
        if repeats:
            self.unit = scan(Unit, repeats)(pattern, self.config, self.kernels, self.dtype)
        if rest:
            self.tail = Unit(pattern[:rest], self.config, self.kernels, self.dtype)

    def __call__(self, clean, frontier, clean_stream, frontier_stream, context: dict | None):
        """Returns (clean, frontier), contexts {unit: ..., tail: ...} and auxiliary outputs of the same form."""
        hidden, contexts, auxiliaries = (clean, frontier), {}, {}
        for name in ("unit", "tail"):
            if hasattr(self, name):
                own = None if context is None else context[name]
                hidden, (contexts[name], auxiliaries[name]) = getattr(self, name)(
                    hidden, own, clean_stream, frontier_stream
                )
        return hidden, contexts, auxiliaries


def empty_context(config: ModelConfig, dtype, batch: int, capacity: int) -> dict:
    """Contexts of all layers that have read nothing, in the form the backbone returns them."""

    def stack(tree, length: int):
        return jax.tree.map(lambda array: jnp.zeros((length, *array.shape), array.dtype), tree)

    def unit(kinds: str) -> dict:
        layers = {
            "A": lambda: attention.empty_context(config, dtype, batch, capacity),
            "M": lambda: mamba.empty_context(config, dtype, batch),
        }
        return {
            name: layers[kind]() if length == 1 else stack(layers[kind](), length) for name, kind, length in runs(kinds)
        }

    repeats, rest = divmod(config.layers, len(config.pattern))
    contexts = {}
    if repeats:
        contexts["unit"] = stack(unit(config.pattern), repeats)
    if rest:
        contexts["tail"] = unit(config.pattern[:rest])
    return contexts
