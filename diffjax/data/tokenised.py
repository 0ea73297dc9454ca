"""The cache of tokenised documents: parts on disk that a new packing reads again and an interrupted run continues.

A part is an .npz file with, over its documents in order, `hashes` [n] uint64, `bytes` [n] uint64 and `lengths` [n]
uint32, and with `tokens`, their ids one after the other, without bos and eos. It appears by a rename, so it is whole.
"""

import hashlib
import itertools
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diffjax.data.packing import token_dtype
from diffjax.data.tokenizer import Tokenizer
from diffjax.errors import UserError

PART_BYTES = 1 << 25  # UTF-8 bytes of text after which a part is closed: what an interruption can cost
CHUNK_BYTES = 1 << 21  # UTF-8 bytes of text that are encoded at once


class TokenisedDocument(NamedTuple):
    """hash: `text_hash` of its text; bytes: its UTF-8 length; tokens: [n] unsigned, without bos and eos."""

    hash: int
    bytes: int
    tokens: np.ndarray


def text_hash(text: bytes) -> int:
    """The first 8 bytes of the text's sha256: they decide its split and whether the tokenizer's sample has it."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def tokenise(documents: Iterator[str], tokenizer: Tokenizer, directory: Path) -> list[Path]:
    """Encodes all documents into the parts of `directory` and returns their paths; parts that are there are kept.

    The documents must be those that the parts were made from: `directory` is named after them and the tokenizer.
    Raises UserError when a text encodes to a special id.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    while True:
        path = directory / f"part-{len(paths):05d}.npz"
        if _documents_in(path):
            for _ in itertools.islice(documents, _documents_in(path)):
                pass
        elif not _write_part(path, documents, tokenizer):
            return paths
        paths.append(path)


def read_tokenised(paths: list[Path]) -> Iterator[TokenisedDocument]:
    """The documents of the parts, in order; one part is in memory at a time."""
    for path in paths:
        part = _load(path, ("hashes", "bytes", "lengths", "tokens"))
        documents = np.split(part["tokens"], np.cumsum(part["lengths"], dtype=np.int64)[:-1])
        for digest, size, tokens in zip(part["hashes"].tolist(), part["bytes"].tolist(), documents, strict=True):
            yield TokenisedDocument(digest, size, tokens)


def read_hashes(paths: list[Path]) -> Iterator[np.ndarray]:
    """The `hashes` of each part, [n] uint64."""
    for path in paths:
        yield _load(path, ("hashes",))["hashes"]


def _documents_in(path: Path) -> int:
    """How many documents a part holds; 0 when there is no such part."""
    return len(_load(path, ("lengths",))["lengths"]) if path.exists() else 0


def _load(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as part:
            return {name: part[name] for name in names}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"the cached part {path} is damaged ({error}): delete it and run the command again") from error


def _write_part(path: Path, documents: Iterator[str], tokenizer: Tokenizer) -> bool:
    """Writes the next part; False when no document was left."""
    hashes, sizes, tokens = [], [], []
    total, dtype, special = 0, token_dtype(tokenizer.vocab_size), np.array(list(tokenizer.special_ids.values()))
    while total < PART_BYTES and (chunk := _take(documents, CHUNK_BYTES)):
        for text, ids in zip(chunk, tokenizer.encode_many(chunk), strict=True):
            encoded = text.encode()
            tokens.append(np.array(ids, dtype))
            if np.isin(tokens[-1], special).any():
                raise UserError(
                    f"the tokenizer turns text into special ids ({tokenizer.special_ids}), as in the document that "
                    f"starts {text[:60]!r}: the mask must never be a token of the corpus"
                )
            hashes.append(text_hash(encoded))
            sizes.append(len(encoded))
            total += len(encoded)
    if not hashes:
        return False
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(
            file,
            hashes=np.array(hashes, np.uint64),
            bytes=np.array(sizes, np.uint64),
            lengths=np.array([len(ids) for ids in tokens], np.uint32),
            tokens=np.concatenate(tokens),
        )
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return True


def _take(documents: Iterator[str], size: int) -> list[str]:
    """The next documents, up to the first at which they reach `size` characters."""
    chunk, total = [], 0
    for text in documents:
        chunk.append(text)
        total += len(text)
        if total >= size:
            break
    return chunk
