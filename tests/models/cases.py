"""The small models that the acceptance tests share: their configs, random weights and texts, compiled functions and
reference logits, each made once per process."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import jax
import numpy as np
import pytest

from diffjax.config import KernelsConfig, MambaConfig, ModelConfig
from diffjax.models.denoiser import Denoiser
from tests import reference

VOCAB = 101  # padded to 128 in the tables
MASK = 4
BASE = ModelConfig(
    width=20, heads=4, kv_heads=4, head_dim=6, mlp_width=28, mamba=MambaConfig(heads=4, head_dim=5, state=7, conv=4)
)


def small(pattern, layers, prefix, block_size, blocks, mamba=None, **model):
    """A model config and the number of blocks in its test rows."""
    mamba = replace(BASE.mamba, **(mamba or {}))
    return replace(
        BASE, pattern=pattern, layers=layers, prefix=prefix, block_size=block_size, mamba=mamba, **model
    ), blocks


# Every pattern in both prefix modes, the options spread over them; conv width 4 meets shorter blocks.
MAIN = {
    "A-bidirectional": small("A", 2, "bidirectional", 3, 5, kv_heads=2, qk_norm=True, tie_embeddings=True),
    "A-causal": small("A", 2, "causal", 8, 4),
    "M-bidirectional": small("M", 2, "bidirectional", 2, 6, mamba={"groups": 2}),
    "M-causal": small("M", 2, "causal", 3, 5, mamba={"directions": "shared"}),
    "AM-bidirectional": small("AM", 4, "bidirectional", 2, 6, kv_heads=1),
    "AM-causal": small("AM", 3, "causal", 2, 6, kv_heads=2, qk_norm=True, mamba={"groups": 2}),
    "AMMMMM-bidirectional": small("AMMMMM", 6, "bidirectional", 8, 4),
    "AMMMMM-causal": small("AMMMMM", 7, "causal", 3, 5, tie_embeddings=True),
}
# The corners: one direction only, blocks of one token, one block in all, a cut unit alone, rows of several chunks.
CORNERS = {
    "AM-forward-bidirectional": small("AM", 2, "bidirectional", 3, 5, mamba={"directions": "forward"}),
    "M-forward-causal": small("M", 2, "causal", 2, 5, mamba={"directions": "forward", "groups": 4}),
    "AM-shared-bidirectional": small("AM", 2, "bidirectional", 1, 7, mamba={"directions": "shared"}),
    "AM-one-block": small("AM", 2, "bidirectional", 8, 1),
    "AM-cut-unit": small("AMM", 2, "causal", 3, 4),  # fewer layers than the unit: only a tail
    "AM-long-bidirectional": small("AM", 2, "bidirectional", 8, 24, kv_heads=2),
    "M-long-causal": small("M", 1, "causal", 1, 80),
}
CASES = MAIN | CORNERS


def parametrize(names, *dtypes):
    """Parametrise a test over (name, dtype); all tests of one model run in the same worker, which compiles it once."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [pytest.param(n, d, marks=pytest.mark.xdist_group(n)) for n in names for d in dtypes or ("float64",)],
    )


def stacked_axes(params, names):
    """Leading axes of a leaf that count repeats and runs of its layer: those the layer's norm has beyond its width."""
    if names[0] != "layers":
        return 0
    _, place, layer, *_ = names
    return params["layers"][place][layer]["mlp_norm"]["scale"].ndim - 1


def randomise(params, seed):
    """Weights that use every parameter: no scale is 1, no bias 0, and the logits have a standard deviation above 1.

    Linear kernels are N(0, 1/fan_in), the output matrix N(0, 4/D); decays per token lie between about 0.1 and 1.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        names = [entry.key for entry in path]
        shape, name, parent = leaf.shape, names[-1], names[-2]
        inner = shape[stacked_axes(params, names) :]
        normal = rng.standard_normal(shape)
        if name == "scale":
            value = rng.uniform(0.5, 1.5, shape)
        elif name == "A_log":
            value = np.log(rng.uniform(0.05, 3.0, shape))
        elif name == "dt_bias":
            value = normal - 1.0
        elif name in ("D_skip", "table"):
            value = normal
        elif name == "bias":
            value = 0.3 * normal
        elif parent.startswith("conv"):
            value = 0.6 * normal
        elif parent == "head":
            value = 2.0 * normal / np.sqrt(inner[0])
        elif parent == "output":
            value = normal / np.sqrt(np.prod(inner[:-1]))
        else:
            value = normal / np.sqrt(inner[0])
        return value.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


@dataclass(frozen=True)
class Case:
    """One small model with its weights, two texts, noisy blocks, compiled functions and reference logits.

    Every call runs under the case's precision and returns numpy arrays (contexts stay as they are).
    """

    config: ModelConfig
    blocks: int
    seed: int
    kernels: KernelsConfig

    @property
    def precision(self):
        return jax.enable_x64(self.config.dtype == "float64")

    @property
    def tolerance(self):
        return {"float64": 1e-10, "float32": 1e-5}[self.config.dtype]

    @property
    def length(self):
        return self.blocks * self.config.block_size

    @cached_property
    def denoiser(self):
        return Denoiser(self.config, vocab_size=VOCAB, kernels=self.kernels)

    @cached_property
    def params(self):
        with self.precision:
            return randomise(self.denoiser.abstract_params(), self.seed)

    @cached_property
    def reference_params(self):
        return reference.as_float64(self.params)

    @cached_property
    def texts(self):
        """[2, L] clean tokens."""
        return np.random.default_rng(self.seed + 1).integers(5, VOCAB, (2, self.length), np.int32)

    @cached_property
    def noisy(self):
        """[2, K, G] noisy blocks: half of the tokens masked, the others drawn anew."""
        rng = np.random.default_rng(self.seed + 2)
        shape = (2, self.blocks, self.config.block_size)
        return np.where(rng.random(shape) < 0.5, MASK, rng.integers(5, VOCAB, shape)).astype(np.int32)

    @cached_property
    def expected(self):
        """[2, K, G, V] reference logits of every noisy block after the clean text before it."""
        size = self.config.block_size
        return np.array(
            [
                [self.reference(self.texts[b, : k * size], self.noisy[b, k]) for k in range(self.blocks)]
                for b in range(2)
            ]
        )

    def reference(self, clean, block, embedding=None):
        return reference.block_logits(self.reference_params, self.config, VOCAB, clean, block, embedding)

    @cached_property
    def _train(self):
        return jax.jit(self.denoiser.train_logits)

    @cached_property
    def _absorb(self):
        return jax.jit(self.denoiser.absorb)

    @cached_property
    def _denoise(self):
        return jax.jit(self.denoiser.denoise)

    @cached_property
    def _gradient(self):
        def logits_and_gradient(params, cotangent, clean, frontiers, segments, clean_valid, frontier_valid):
            def logits(params):
                return self.denoiser.train_logits(params, clean, frontiers, None, segments, clean_valid, frontier_valid)

            value, pullback = jax.vjp(logits, params)
            return value, pullback(cotangent)[0]

        return jax.jit(logits_and_gradient)

    def train(self, clean, frontiers, frontier_index=None, params=None, **arrays):
        """train_logits -> [B, F, G, V]."""
        with self.precision:
            params = self.params if params is None else params
            return np.asarray(self._train(params, clean, frontiers, frontier_index, **arrays))

    def gradient(self, cotangent, clean, frontiers, segments, clean_valid, frontier_valid):
        """(logits [B, K, G, V], gradient of sum(logits * cotangent) with respect to the parameters)."""
        with self.precision:
            dtype = np.float64 if self.config.dtype == "float64" else np.float32
            logits, gradient = self._gradient(
                self.params, cotangent.astype(dtype), clean, frontiers, segments, clean_valid, frontier_valid
            )
            return np.asarray(logits), jax.tree.map(np.asarray, gradient)

    def empty(self, batch, capacity=None):
        with self.precision:
            return self.denoiser.empty_context(batch, self.length if capacity is None else capacity)

    def absorb(self, tokens, context, count=None):
        with self.precision:
            count = None if count is None else np.asarray(count, np.int32)
            return self._absorb(self.params, tokens, context, count)

    def denoise(self, block, context, valid=None, **arrays):
        """denoise -> [B, G, V]."""
        with self.precision:
            return np.asarray(self._denoise(self.params, block, context, valid, **arrays))

    @cached_property
    def prefixes(self):
        """A context of K rows: row k has absorbed blocks 0 .. k-1 of text 0."""
        rows = np.broadcast_to(self.texts[0], (self.blocks, self.length))
        return self.absorb(rows, self.empty(self.blocks), np.arange(self.blocks) * self.config.block_size)

    def close(self, actual, expected):
        """Assert equality to the law's tolerance wherever expected is a number; returns the largest difference."""
        there = ~np.isnan(expected)
        assert there.any() and np.isfinite(actual[there]).all()
        difference = np.abs(actual - expected)[there].max()
        bound = self.tolerance * max(1.0, np.abs(expected[there]).max())
        assert difference <= bound, f"largest difference {difference:.3e} > {bound:.3e}"
        return difference


@cache
def case(name, dtype="float64", **kernels):
    """The case of that name in that compute dtype; its weights are the same in every dtype (rounded)."""
    config, blocks = CASES[name]
    return Case(replace(config, dtype=dtype), blocks, seed=sum(map(ord, name)), kernels=KernelsConfig(**kernels))


def leaves(tree):
    """[(path as text, numpy array)] of every leaf."""
    return [
        ("/".join(str(getattr(e, "key", getattr(e, "name", getattr(e, "idx", e)))) for e in path), np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
