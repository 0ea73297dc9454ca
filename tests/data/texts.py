"""Small deterministic texts and the configs that read them."""

import dataclasses
from pathlib import Path

import numpy as np

from diffjax.config import Config

WORDS = ["def", "return", "self", "for", "in", "if", "the", "value", "of", "x", "name", "token", "=", "(", "):", "."]


def random_text(generator: np.random.Generator, words: int) -> str:
    """Words with spaces, newlines and indentation between them."""
    gaps = [" ", " ", " ", "\n", "\n    ", "\n\n"]
    return "".join(str(generator.choice(WORDS)) + str(generator.choice(gaps)) for _ in range(words))


def write_texts(folder: Path, documents: int = 40, words: int = 60, seed: int = 0) -> Path:
    """Writes documents of very different lengths as one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for number in range(documents):
        length = int(generator.integers(1, 2 * words)) * (8 if number % 10 == 0 else 1)
        (folder / f"{number:03d}.txt").write_bytes(random_text(generator, length).encode())
    return folder


def make_config(**overrides) -> Config:
    """A small config; keys are dotted names with __ for the dot, such as data__path."""
    small = {
        "data__source": "text",
        "data__sequence_length": 32,
        "data__held_out": 0.2,
        "data__tokenizer__vocab_size": 320,
        "model__block_size": 4,
        "training__batch_size": 4,
    }
    config = Config()
    for key, value in (small | overrides).items():
        config = replaced(config, key.split("__"), value)
    return config


def replaced(node, names: list[str], value):
    if len(names) > 1:
        value = replaced(getattr(node, names[0]), names[1:], value)
    return dataclasses.replace(node, **{names[0]: value})
