"""Preparing a corpus: source files -> tokenizer -> tokenised documents -> packed rows -> shards -> manifest.

All steps give the same bytes for the same text and config. What lies beside the corpus (in its parent folder) is cache:
`tokenizers/` and `tokenised/`, named after the text and the settings that made them, and `.lock`.
"""

import fcntl
import hashlib
import heapq
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from diffjax.config import Config
from diffjax.data import corpus as corpus_files
from diffjax.data.corpus import FORMAT, MANIFEST, SPLITS, TOKENIZER, UNIGRAM, Corpus, request_of
from diffjax.data.packing import RowFormat, encode_row, pack_documents, pack_stream, rows_to_arrays
from diffjax.data.sources import SourceFile, describe_files, list_files, read_documents
from diffjax.data.tokenised import read_hashes, read_tokenised, text_hash, tokenise
from diffjax.data.tokenizer import Tokenizer, train_tokenizer
from diffjax.errors import UserError

SHARD_BYTES = 1 << 28  # record bytes after which a shard is closed
SAMPLE_SHARE = 16  # one document gives the tokenizer at most this fraction of its sample

Report = Callable[[str], None]


def prepare(config: Config, report: Report = print) -> Corpus:
    """Makes the corpus that a config asks for, or opens it when it is there.

    A `data.corpus` that holds a corpus is opened without a look at `data.path`: a pod needs only the corpus. Without
    `data.corpus` it lies in `corpora/SOURCE-KEY` below the working directory, where KEY is a hash of the text itself
    and of every key that shapes the corpus: two configs never share a corpus they should not, whatever their run
    folders, and a changed file or key makes a new one. Interrupted at any point, the same command goes on and ends with
    the same bytes. Two processes at once: one prepares, the other waits and opens.
    Raises UserError for a bad config, source or tokenizer, for a folder that is no corpus or another one, and when the
    disk is full; the corpus folder then does not exist.
    """
    data, block = config.data, config.model.block_size
    if block < 1 or data.sequence_length % block:
        raise UserError(f"data.sequence_length {data.sequence_length} is not a multiple of model.block_size {block}")
    if not 0.0 <= data.held_out < 1.0:
        raise UserError(f"data.held_out is {data.held_out}: give the fraction of documents to hold out, 0 <= f < 1")
    if data.corpus is not None and _occupied(Path(data.corpus)):
        return _open(Path(data.corpus), config, report)
    files = list_files(data)
    sources = describe_files(files)
    request = request_of(config)
    directory = Path(data.corpus or Path("corpora", f"{data.source}-{_key(request, sources, FORMAT)}"))
    if _occupied(directory):
        return _open(directory, config, report)
    with _storage(directory.parent), _exclusive(directory.parent, report):
        if not _occupied(directory):
            _build(config, request, files, sources, directory, report)
    return _open(directory, config, report)


def _occupied(directory: Path) -> bool:
    """Whether a corpus lies there; UserError when something else does (a corpus appears whole, by a rename)."""
    if (directory / MANIFEST).is_file():
        return True
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(
            f"{directory} exists and is no corpus (it has no {MANIFEST}): delete it, or give data.corpus another folder"
        )
    return False


def _open(directory: Path, config: Config, report: Report) -> Corpus:
    corpus = Corpus.open(directory)
    corpus.require(config)
    train, held_out = (corpus.manifest["splits"][split] for split in SPLITS)
    report(
        f"corpus {directory}: {train['rows']:,} rows, {train['tokens']:,} tokens to train on, "
        f"{held_out['scored']:,} scored tokens held out"
    )
    return corpus


def _build(
    config: Config, request: dict, files: list[SourceFile], sources: list[dict], directory: Path, report: Report
) -> None:
    data, cache = config.data, directory.parent
    reading = {key: request[key] for key in ("data.source", "data.text_field", "data.documents")}
    size = sum(source["bytes"] for source in sources)
    report(f"preparing {directory} from {len(files):,} files, {size / 1e6:,.1f} MB")

    start = time.monotonic()
    if data.tokenizer.path:
        tokenizer = Tokenizer.load(data.tokenizer.path)
    else:
        asked = {key: request[key] for key in request if key.startswith("data.tokenizer.")}
        key = _key(sources, reading, asked, data.held_out, _version("sentencepiece"))
        tokenizer = _cached_tokenizer(cache / "tokenizers" / f"{key}.model", config, files)
    report(f"tokenizer: {tokenizer.vocab_size:,} ids, {time.monotonic() - start:.1f} s")

    start, skipped = time.monotonic(), Counter(empty=0, not_utf8=0)
    key = _key(sources, reading, tokenizer.identity)
    parts = tokenise(read_documents(data, files, skipped), tokenizer, cache / "tokenised" / key)
    if describe_files(files) != sources:
        shutil.rmtree(cache / "tokenised" / key, ignore_errors=True)
        raise UserError(f"a file of {data.path or data.source} changed while it was read: run the command again")
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    report(f"documents: tokenised in {time.monotonic() - start:.1f} s (skipped: {dropped})")

    start, partial = time.monotonic(), directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run; the lock says no other is at work
    partial.mkdir(parents=True)
    try:
        manifest = _write_corpus(partial, config, request, tokenizer, parts)
        manifest |= {"sources": sources, "skipped": dict(skipped)}
        manifest["identity"] = corpus_files.content_identity(manifest)
        _write_file(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
        _sync(partial)
        partial.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(f"rows: packed in {time.monotonic() - start:.1f} s")


def _cached_tokenizer(path: Path, config: Config, files: list[SourceFile]) -> Tokenizer:
    if not path.exists():
        data = config.data
        documents = read_documents(data, files, Counter())
        sample = sample_documents(documents, data.held_out, data.tokenizer.sample_bytes)
        if not any(sample):
            raise UserError(
                f"{data.path or data.source} leaves no text to train a tokenizer on: the documents that data.held_out "
                f"sets aside (at least one) are not read for it, nor more than data.tokenizer.sample_bytes="
                f"{data.tokenizer.sample_bytes}; bring more documents, or split files with data.documents=blank_line"
            )
        tokenizer = train_tokenizer(sample, data.tokenizer.vocab_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        _write_file(partial, tokenizer.model_bytes)
        partial.replace(path)
    return Tokenizer.load(path)


def sample_documents(documents: Iterable[str], held_out: float, size: int) -> list[str]:
    """The training documents with the smallest hashes, at most `size` bytes of them, sorted by hash.

    So the sample follows from the set of documents alone, and no held-out document shapes the tokenizer. A long
    document gives its beginning. Raises UserError when there is no document.
    """
    threshold, smallest = split_threshold(held_out), None
    kept: list[tuple[int, str]] = []  # a heap with the largest hash on top
    total, bound = 0, 1 << 64
    for text in documents:
        digest = text_hash(text.encode())
        smallest = digest if smallest is None else min(smallest, digest)
        if threshold <= digest < bound:
            text = text[: max(1, size // SAMPLE_SHARE)]
            heapq.heappush(kept, (-digest, text))
            total += len(text.encode())
            while total > size:
                negated, dropped = heapq.heappop(kept)
                total -= len(dropped.encode())
                bound = min(bound, -negated)
    if smallest is None:
        raise UserError("the source holds no document with text in it")
    threshold = effective_threshold(threshold, smallest)
    return [text for negated, text in sorted(kept, reverse=True) if -negated >= threshold]


def split_threshold(held_out: float) -> int:
    """Documents whose hash lies below it are held out: about the fraction `held_out` of them."""
    return int(held_out * (1 << 64))


def effective_threshold(threshold: int, smallest: int) -> int:
    """Holds out the document with the smallest hash when `held_out` > 0 of few documents would hold out none."""
    return smallest + 1 if 0 < threshold <= smallest else threshold


def _write_corpus(directory: Path, config: Config, request: dict, tokenizer: Tokenizer, parts: list[Path]) -> dict:
    """Writes tokenizer, shards and unigram counts; returns the manifest without sources and identity."""
    data = config.data
    packing = {
        "sequence_length": data.sequence_length,
        "block_size": config.model.block_size,
        "method": data.packing,
        "tail": data.tail,
    }
    layout = corpus_files.row_format(tokenizer, packing)
    smallest = min((int(hashes.min()) for hashes in read_hashes(parts)), default=None)
    if smallest is None:
        raise UserError(f"{data.path or data.source} holds no document with text in it")
    threshold = effective_threshold(split_threshold(data.held_out), smallest)
    splits, counts = {}, {}
    for split in SPLITS:
        splits[split], counts[split] = _write_split(directory, split, parts, threshold, data.packing, layout)
    if not splits["train"]["rows"]:
        raise UserError(
            f"{data.path or data.source} holds {splits['held_out']['documents']} document(s), all of them held out: "
            "bring more documents, or split files with data.documents=blank_line"
        )
    _write_file(directory / TOKENIZER, tokenizer.model_bytes)
    with open(directory / UNIGRAM, "wb") as file:
        np.save(file, counts["train"])
    return {
        "format": FORMAT,
        "complete": True,
        "request": request,
        "tokenizer": {"identity": tokenizer.identity, "vocab_size": tokenizer.vocab_size, **tokenizer.special_ids},
        "packing": packing,
        "splits": splits,
        "mask_ids": sum(int(count[tokenizer.mask_id]) for count in counts.values()),
        "files": {name: corpus_files.describe_file(directory / name) for name in (TOKENIZER, UNIGRAM)},
        "versions": {name: _version(name) for name in ("array_record", "numpy", "sentencepiece")}
        | {"python": platform.python_version()},
    }


def _write_split(
    directory: Path, split: str, parts: list[Path], threshold: int, method: str, layout: RowFormat
) -> tuple[dict, np.ndarray]:
    """Packs one split into shards. Returns its manifest entry and the counts [V] int64 of its scored tokens."""
    totals = Counter(documents=0, bytes=0, tokens=0, rows=0, padding=0, scored=0)

    def documents() -> Iterator[np.ndarray]:
        for document in read_tokenised(parts):
            if (document.hash < threshold) == (split == "held_out"):
                totals.update(documents=1, bytes=document.bytes, tokens=len(document.tokens) + 2)
                yield np.concatenate([[layout.bos_id], document.tokens, [layout.eos_id]]).astype(layout.token_dtype)

    if method == "document":
        rows = pack_documents(documents(), layout.sequence_length, layout.block_size)
    else:
        rows = pack_stream(documents(), layout.sequence_length)
    rows_per_shard = max(1, SHARD_BYTES // (layout.sequence_length * layout.token_dtype.itemsize))
    counts = np.zeros(layout.vocab_size, np.int64)
    shards = []
    while True:
        path = directory / f"{split}-{len(shards):05d}"
        if not (shard := _write_shard(path, itertools.islice(rows, rows_per_shard), layout, totals, counts)):
            break
        shards.append(shard)
    for number, shard in enumerate(shards):
        path = directory / shard["name"]
        shard["name"] = f"{split}-{number:05d}-of-{len(shards):05d}.array_record"
        path = path.rename(directory / shard["name"])
        shard |= corpus_files.describe_file(path)
    return {**totals, "shards": shards}, counts


def _write_shard(
    path: Path, rows: Iterable[list[np.ndarray]], layout: RowFormat, totals: Counter, counts: np.ndarray
) -> dict | None:
    """Writes rows to one shard and adds them to the split's totals and counts [V]; None (and no file) without rows."""
    writer, shard = None, {"name": path.name, "rows": 0, "tokens": 0}
    for group in _groups(rows, 256):
        records = [encode_row(row, layout.token_dtype) for row in group]
        with _shard_errors(path):
            writer = writer or ArrayRecordWriter(str(path), "group_size:1")
            for record in records:
                writer.write(record)
        arrays = rows_to_arrays(records, layout)
        counts += np.bincount(arrays.tokens[arrays.scored], minlength=layout.vocab_size)
        totals.update(rows=len(records), padding=int((~arrays.valid).sum()), scored=int(arrays.scored.sum()))
        shard["rows"] += len(records)
        shard["tokens"] += sum(len(segment) for row in group for segment in row)
    if writer is None:
        return None
    with _shard_errors(path):
        writer.close()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return shard


def _groups(items: Iterable, size: int) -> Iterator[list]:
    """Lists of up to `size` items."""
    group = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


@contextmanager
def _shard_errors(path: Path):
    """Turns the RuntimeError by which ArrayRecord reports a full disk into a UserError."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"cannot write the corpus to {path.parent.parent}: {error}") from error


def _write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage(directory: Path):
    """Turns a full or unwritable disk into a UserError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write the corpus to {directory}: {error.strerror or error}") from error


@contextmanager
def _exclusive(directory: Path, report: Report):
    """Holds the folder's lock, which the system frees when the process ends in whatever way."""
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process prepares a corpus in {directory}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(*parts) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    return importlib.metadata.version(package)
