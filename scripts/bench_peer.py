"""Training tokens/s beside a peer: full-sequence masked diffusion with attention, the same sizes, taking turns.

    python -m venv peer && peer/bin/pip install dantinox==0.4.14
    python scripts/bench_peer.py --peer-python peer/bin/python

Both train on random tokens in float32: 6 layers, D 256, 4 heads of 64, gated MLP 768, V 2048, L 512, batch 16, AdamW
with clipping. dantinox (PyPI, JAX with Flax NNX) runs in its own process and environment; the two alternate, and the
ratio is the median over turns. G = L makes diffjax's block diffusion the peer's objective: one frontier, no context.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PEER = """
import json, statistics, time
import jax, optax
from flax import nnx
from dantinox.core.config import ModelConfig
from dantinox.paradigms.diffusion.discrete import DiscreteParadigm

vocab_size, length, rows, steps = 2048, 512, 16, {steps}
config = ModelConfig(
    dim=256, n_heads=4, head_size=64, num_blocks=6, vocab_size=vocab_size, max_context=length, causal=False,
    dropout=0.0, weight_tying=False, kv_heads=4, use_flash=False, expansion=3, use_swiglu=True,
    mask_token_id=vocab_size - 1, paradigm="discrete", noise_schedule="linear",
)
paradigm = DiscreteParadigm(config)
graph, params, rest = nnx.split(paradigm.build_model(nnx.Rngs(0)), nnx.Param, ...)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
opt = optimizer.init(params)

@jax.jit
def step(params, opt, batch, key):
    loss = lambda params: paradigm.loss_fn(nnx.merge(graph, params, rest), batch, key)[0]
    value, gradients = jax.value_and_grad(loss)(params)
    updates, opt = optimizer.update(gradients, opt, params)
    return optax.apply_updates(params, updates), opt, value

key = jax.random.key(0)
batch = jax.random.randint(key, (rows, length), 0, vocab_size - 1)
seconds = []
for i in range(steps + 2):
    began = time.perf_counter()
    params, opt, value = step(params, opt, batch, jax.random.fold_in(key, i))
    jax.block_until_ready((params, value))
    seconds.append(time.perf_counter() - began)
tokens_per_s = round(rows * length / statistics.median(seconds[2:]))
print(json.dumps({{"tokens_per_s": tokens_per_s, "parameters": sum(x.size for x in jax.tree.leaves(params))}}))
"""


def measure(command: list[str]) -> dict:
    """The JSON object on the last line of a process's standard output."""
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{command[0]} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="the interpreter of an environment with dantinox==0.4.14")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    steps = str(options.steps)
    ours = [sys.executable, str(Path(__file__).with_name("bench_training.py")), "--full-sequence", "--steps", steps]
    peer = [options.peer_python, "-c", PEER.format(steps=options.steps)]
    rates = {"diffjax": [], "dantinox": []}
    for turn in range(options.turns):
        for name, command in (("diffjax", ours), ("dantinox", peer)):
            result = measure(command)
            rates[name].append(result["tokens_per_s"])
            print(f"turn {turn + 1}: {name} {result['tokens_per_s']:,} tokens/s, {result['parameters']:,} parameters")
    ratios = [ours / peer for ours, peer in zip(rates["diffjax"], rates["dantinox"], strict=True)]
    print(f"diffjax / dantinox: {statistics.median(ratios):.2f} (turns: {', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()
