"""The stack of layers that both streams pass in lock-step: one layer is `norm -> mixer -> +`, `norm -> MLP -> +`.

Training, absorb and denoise run this same code: training carries both streams, absorb only the clean one, denoise only
the frontier. Layers repeat a unit (the pattern string), scanned so that compile time does not grow with depth; a cut
last unit is the tail.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from diffjax.config import KernelsConfig, ModelConfig
from diffjax.models import attention, mamba
from diffjax.models.layers import EMBEDDING_STD, GatedMLP, RMSNorm
from diffjax.models.streams import CleanStream, FrontierStream


class Layer(nn.Module):
    kind: str
    config: ModelConfig
    kernels: KernelsConfig
    dtype: jnp.dtype

    def setup(self):
        c = self.config
        output_std = EMBEDDING_STD / (2 * c.layers) ** 0.5
        self.mixer_norm = RMSNorm((c.width,), ("embed",), c.norm_eps, self.dtype)
        self.mlp_norm = RMSNorm((c.width,), ("embed",), c.norm_eps, self.dtype)
        if self.kind == "A":
            self.mixer = attention.Attention(c, self.dtype, output_std, self.kernels.attention)
        else:
            self.mixer = mamba.Mamba(c, self.dtype, output_std, self.kernels.ssd)
        self.mlp = GatedMLP(c.width, c.mlp_width, self.dtype, output_std)

    def __call__(self, clean, frontier, clean_stream: CleanStream | None, frontier_stream: FrontierStream | None, context):
        """Pass hidden states clean [B, T, D] and frontier [B, F, G, D] (either may be None) through the layer.

        The frontier reads the boundary that the clean stream leaves in this layer, or else the context.
        Returns (clean, frontier), the context behind the clean stream (None in training), and auxiliary outputs by name
        for the objective (a mixture of experts would put its balance here).
        """
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
            frontier = frontier + self.mlp(self.mlp_norm(frontier))
        if clean is not None:
            clean = clean + out
            clean = clean + self.mlp(self.mlp_norm(clean))
        return (clean, frontier), context_after, auxiliary


class Unit(nn.Module):
    """The layers of one repeat of the pattern, or of its cut last repeat."""

    kinds: str
    config: ModelConfig
    kernels: KernelsConfig
    dtype: jnp.dtype

    def setup(self):
        layer = remat(Layer, self.config.remat)
        for i, kind in enumerate(self.kinds):
            setattr(self, f"layer_{i}", layer(kind, self.config, self.kernels, self.dtype))

    def __call__(self, hidden, context: dict | None, clean_stream, frontier_stream) -> tuple[Any, tuple[dict, dict]]:
        contexts, auxiliaries = {}, {}
        for i in range(len(self.kinds)):
            name = f"layer_{i}"
            layer, own = getattr(self, name), None if context is None else context[name]
            hidden, contexts[name], auxiliaries[name] = layer(*hidden, clean_stream, frontier_stream, own)
        return hidden, (contexts, auxiliaries)


def remat(layer: type[nn.Module], policy: str) -> type[nn.Module]:
    """The layer under a rematerialisation policy: `none` keeps all activations, `block` only the layer's inputs,
    `dots` also the results of its matrix products."""
    if policy == "none":
        return layer
    policies = {"block": None, "dots": jax.checkpoint_policies.checkpoint_dots}
    return nn.remat(layer, prevent_cse=False, policy=policies[policy])


class Backbone(nn.Module):
    config: ModelConfig
    kernels: KernelsConfig
    dtype: jnp.dtype

    def setup(self):
        pattern = self.config.pattern
        self.repeats, rest = divmod(self.config.layers, len(pattern))
        if self.repeats:
            scanned = nn.scan(
                Unit,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=self.repeats,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            self.unit = scanned(pattern, self.config, self.kernels, self.dtype)
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

    def unit(kinds: str) -> dict:
        return {
            f"layer_{i}": attention.empty_context(config, dtype, batch, capacity)
            if kind == "A"
            else mamba.empty_context(config, dtype, batch)
            for i, kind in enumerate(kinds)
        }

    repeats, rest = divmod(config.layers, len(config.pattern))
    contexts = {}
    if repeats:
        stack = lambda array: jnp.zeros((repeats, *array.shape), array.dtype)
        contexts["unit"] = jax.tree.map(stack, unit(config.pattern))
    if rest:
        contexts["tail"] = unit(config.pattern[:rest])
    return contexts
