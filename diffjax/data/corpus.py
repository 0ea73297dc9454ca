"""A prepared corpus on disk: opening it, proving it whole, and reading its rows by number.

A corpus is a folder: manifest.json, tokenizer.model, unigram.npy and ArrayRecord shards of two splits, `train` and
`held_out`. The manifest is written last and lists the size and sha256 of every other file; a folder without one is not
a corpus.
"""

import bisect
import hashlib
import json
import os
from itertools import accumulate
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from diffjax.config import Config
from diffjax.data.packing import RowFormat, Rows, rows_to_arrays
from diffjax.data.tokenizer import Tokenizer
from diffjax.errors import UserError

FORMAT = 1
MANIFEST, TOKENIZER, UNIGRAM = "manifest.json", "tokenizer.model", "unigram.npy"
SPLITS = ("train", "held_out")
HASHED_ON_OPEN = 1 << 28  # so many bytes of shards are hashed at every opening; ArrayRecord checks each read anyway


class Corpus:
    """Rows of tokens in two splits, the tokenizer that made them, and the manifest that describes them.

    identity   sha256 (hex) of the content: tokenizer, packing and shards, not where or when it was made
    layout     the RowFormat that turns records into arrays
    """

    def __init__(self, directory: Path, manifest: dict, tokenizer: Tokenizer):
        self.directory = directory
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.identity: str = manifest["identity"]
        self.layout = row_format(tokenizer, manifest["packing"])
        self._splits = {split: _Split(directory, manifest["splits"][split]["shards"]) for split in SPLITS}

    @classmethod
    def open(cls, path: str | os.PathLike) -> "Corpus":
        """Opens a corpus folder. Raises UserError when it is none, is incomplete, or any of its files was altered."""
        directory = Path(path)
        manifest = read_manifest(directory)
        shard_bytes = 0
        for name, entry in manifest["files"].items():
            _check_file(directory / name, entry, hashed=True)
        for split in SPLITS:
            for shard in manifest["splits"][split]["shards"]:
                shard_bytes += shard["bytes"]
                _check_file(directory / shard["name"], shard, hashed=shard_bytes <= HASHED_ON_OPEN)
        tokenizer = Tokenizer.load(directory / TOKENIZER)
        if tokenizer.identity != manifest["tokenizer"]["identity"]:
            raise UserError(f"{directory / TOKENIZER} is not the tokenizer of this corpus: prepare the corpus again")
        corpus = cls(directory, manifest, tokenizer)
        for split in SPLITS:
            corpus._splits[split].check_rows()
        return corpus

    def require(self, config: Config) -> None:
        """Raises UserError, naming key and both values, when the config asks for another corpus than this one."""
        made, asked = self.manifest["request"], request_of(config)
        differences = [
            f"{key} is {asked.get(key)!r} in the config and {made.get(key)!r} in the corpus"
            for key in sorted(made.keys() | asked.keys())
            if made.get(key) != asked.get(key)
        ]
        if differences:
            raise UserError(
                f"the corpus {self.directory} was made for another config: {'; '.join(differences)}. "
                "Change the config, or give data.corpus another folder"
            )

    def rows(self, split: str) -> int:
        """The number of rows of a split."""
        return self._splits[split].rows

    def read(self, split: str, indices: list[int]) -> Rows:
        """The rows of a split with these numbers, as arrays. Raises UserError when a shard cannot be read."""
        return rows_to_arrays(self._splits[split].read(indices), self.layout)

    def unigram(self) -> np.ndarray:
        """[V] float64: how often each id is a scored token of the training split."""
        return np.load(self.directory / UNIGRAM).astype(np.float64)


class _Split:
    """The shards of one split behind one row number. Readers open at their first use."""

    def __init__(self, directory: Path, shards: list[dict]):
        self._paths = [directory / shard["name"] for shard in shards]
        self._counts = [shard["rows"] for shard in shards]
        self._ends = list(accumulate(self._counts))
        self._readers: dict[int, ArrayRecordReader] = {}
        self.rows = sum(self._counts)

    def check_rows(self) -> None:
        for number, (path, count) in enumerate(zip(self._paths, self._counts, strict=True)):
            found = self._reader(number).num_records()
            if found != count:
                raise UserError(f"{path} holds {found} rows, the manifest says {count}: prepare the corpus again")

    def read(self, indices: list[int]) -> list[bytes]:
        places = [bisect.bisect_right(self._ends, index) for index in indices]
        records: list[bytes] = [b""] * len(indices)
        for number in sorted(set(places)):
            chosen = [position for position, place in enumerate(places) if place == number]
            start = self._ends[number] - self._counts[number]
            try:
                found = self._reader(number).read([indices[position] - start for position in chosen])
            except (RuntimeError, ValueError) as error:
                raise UserError(f"{self._paths[number]} cannot be read ({error}): prepare the corpus again") from error
            for position, record in zip(chosen, found, strict=True):
                records[position] = record
        return records

    def _reader(self, number: int) -> ArrayRecordReader:
        if number not in self._readers:
            path = self._paths[number]
            try:
                self._readers[number] = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
            except RuntimeError as error:
                raise UserError(f"{path} is not a readable shard ({error}): prepare the corpus again") from error
        return self._readers[number]


def row_format(tokenizer: Tokenizer, packing: dict) -> RowFormat:
    """The layout of rows made by this tokenizer with a manifest's `packing` entry."""
    return RowFormat(
        sequence_length=packing["sequence_length"],
        block_size=packing["block_size"],
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        tail=packing["tail"],
    )


def request_of(config: Config) -> dict:
    """The keys of a config that shape a corpus, by dotted name; where the text lies is not among them.

    A given tokenizer stands there by its identity, so that it may move; its size follows from it.
    """
    data, given = config.data, config.data.tokenizer.path
    return {
        "data.source": data.source,
        "data.text_field": data.text_field if data.source in ("jsonl", "parquet") else None,
        "data.documents": data.documents if data.source == "text" else None,
        "data.held_out": data.held_out,
        "data.sequence_length": data.sequence_length,
        "data.packing": data.packing,
        "data.tail": data.tail,
        "data.tokenizer.path": Tokenizer.load(given).identity if given else None,
        "data.tokenizer.vocab_size": None if given else data.tokenizer.vocab_size,
        "data.tokenizer.sample_bytes": None if given else data.tokenizer.sample_bytes,
        "model.block_size": config.model.block_size,
    }


def read_manifest(directory: Path) -> dict:
    """The manifest of a corpus folder, checked for format and completeness. Raises UserError."""
    path = directory / MANIFEST
    if not path.is_file():
        state = "holds no manifest.json, so it is not a (whole) corpus" if directory.is_dir() else "is not a folder"
        raise UserError(f"{directory} {state}: `diffjax prepare CONFIG` makes one")
    try:
        manifest = json.loads(path.read_text())
        version, complete, identity = manifest["format"], manifest["complete"], manifest["identity"]
        if version != FORMAT:
            raise UserError(f"{path} has format {version}, this version of diffjax reads format {FORMAT}")
        intact = complete is True and identity == content_identity(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a corpus manifest ({error!r}): prepare the corpus again") from error
    if not intact:
        raise UserError(f"{path} was altered after it was written, or is incomplete: prepare the corpus again")
    return manifest


def content_identity(manifest: dict) -> str:
    """sha256 over the parts of a manifest that say what the rows are."""
    content = {key: manifest[key] for key in ("format", "tokenizer", "packing", "files", "splits")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe_file(path: Path) -> dict:
    """Size in bytes and sha256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _check_file(path: Path, entry: dict, hashed: bool) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing from the corpus: prepare the corpus again")
    if path.stat().st_size != entry["bytes"]:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}: prepare the corpus again"
        )
    if hashed and describe_file(path)["sha256"] != entry["sha256"]:
        raise UserError(f"{path} was altered (its sha256 is not the manifest's): prepare the corpus again")
