"""The exactness law, checked on this machine: the logits that training computes for a block equal the logits that
`denoise` computes from the absorbed blocks before it.

    python scripts/check_exactness.py [--seed 0] [--patterns A M AMMMMM]

One line per random small model. `difference` is the largest |train - denoise| over all blocks and logits, `bound` what
the law allows (float32: 1e-5 * max(1, max|logit|), float64: 1e-10 of the same). `bites` proves that the comparison can
fail: it is the smallest movement of the logits when one parameter leaf, the whole prefix or one part of the context is
dropped. Exits 1 if a difference exceeds its bound or something can be dropped unseen.
"""

import argparse
import sys

import jax
import numpy as np

import diffjax
from diffjax.config import MambaConfig, ModelConfig

VOCAB, MASK = 101, 4
BLOCKS = 6


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patterns", nargs="+", default=["A", "M", "AMMMMM"])
    arguments = parser.parse_args()
    print("pattern  prefix         rows    dtype     G   std  difference    bound    bites")
    failed = False
    for pattern in arguments.patterns:
        for prefix in ("bidirectional", "causal"):
            for dtype in ("float32", "float64"):
                with jax.enable_x64(dtype == "float64"):
                    for line in check(pattern, prefix, dtype, arguments.seed):
                        failed |= not line["ok"]
                        print(
                            f"{pattern:8} {prefix:14} {line['rows']:7} {dtype:8} {line['size']:2} {line['std']:5.2f} "
                            f"{line['difference']:11.2e} {line['bound']:8.1e} {line['bites']:8.1e}"
                            + ("" if line["ok"] else "  FAILED"),
                            flush=True,
                        )
    sys.exit(int(failed))


def check(pattern, prefix, dtype, seed):
    """Yield the result for one document in a row and for two documents packed in a row."""
    rng = np.random.default_rng([seed, *map(ord, pattern + prefix)])
    config = random_config(rng, pattern, prefix, dtype)
    denoiser = diffjax.Denoiser(config, vocab_size=VOCAB)
    params = spread(denoiser.init(jax.random.key(seed)), rng)
    train, absorb, denoise = map(jax.jit, (denoiser.train_logits, denoiser.absorb, denoiser.denoise))
    size, length = config.block_size, BLOCKS * config.block_size
    text = rng.integers(5, VOCAB, length).astype(np.int32)
    noisy = np.where(rng.random((BLOCKS, size)) < 0.5, MASK, text.reshape(BLOCKS, size)).astype(np.int32)

    for rows, start_of in (("whole", np.zeros(BLOCKS, int)), ("packed", np.array([0, 0, 2, 2, 2, 2]))):
        segments = None if rows == "whole" else (start_of[None] + 1).astype(np.int32)

        def from_training(params, segments=segments):
            return np.asarray(train(params, text[None], noisy[None], segments=segments))[0]

        def from_context(context):
            return np.asarray(denoise(params, noisy, context))

        # Row k of the batch absorbs the blocks before block k of block k's document.
        prefixes = np.stack([np.roll(text, -start * size) for start in start_of])
        counts = ((np.arange(BLOCKS) - start_of) * size).astype(np.int32)
        empty = denoiser.empty_context(BLOCKS, length)
        context = absorb(params, prefixes, empty, counts)
        logits, expected = from_training(params), from_context(context)
        difference = np.abs(logits - expected).max()
        bound = {"float32": 1e-5, "float64": 1e-10}[dtype] * max(1.0, np.abs(expected).max())
        moves = [np.abs(from_training(damaged) - expected).max() for damaged in without_each(params)]
        moves += [np.abs(from_context(damaged) - expected).max() for damaged in without_each(context)]
        moves.append(np.abs(from_context(empty) - expected)[counts > 0].max())
        ok = difference <= bound and min(moves) > 1e-3 and expected.std() >= 1 and np.isfinite(logits).all()
        yield {
            "rows": rows,
            "size": size,
            "std": expected.std(),
            "difference": difference,
            "bound": bound,
            "bites": min(moves),
            "ok": bool(ok),
        }


def random_config(rng, pattern, prefix, dtype):
    def pick(*choices):
        return choices[rng.integers(len(choices))]

    mamba = MambaConfig(
        heads=4, head_dim=8, state=8, conv=4, groups=int(pick(1, 2)), directions=pick("separate", "shared")
    )
    return ModelConfig(
        pattern=pattern, layers=max(2, len(pattern)), width=24, block_size=int(pick(2, 3, 8)), prefix=prefix,
        heads=4, kv_heads=int(pick(1, 2, 4)), head_dim=8, qk_norm=bool(pick(False, True)), mlp_width=32,
        tie_embeddings=bool(pick(False, True)), dtype=dtype, mamba=mamba,
    )  # fmt: skip


def spread(params, rng):
    """Weights under which everything matters: matrices twelve times their initial size, every other leaf moved."""

    def change(path, leaf):
        if path[-1].key in ("kernel", "table") and "conv" not in path[-2].key:
            return 12 * leaf
        return leaf + 0.3 * rng.standard_normal(leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(change, params)


def without_each(tree):
    """The tree with one floating-point leaf at a time replaced by zeros."""
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        if np.issubdtype(leaf.dtype, np.floating):
            yield jax.tree.unflatten(structure, [*leaves[:i], np.zeros_like(leaf), *leaves[i + 1 :]])


if __name__ == "__main__":
    main()
