"""Where text comes from: the files of a source, and the documents in them, one at a time."""

import glob
import gzip
import hashlib
import io
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import zstandard

from diffjax.config import DataConfig
from diffjax.errors import UserError

STDLIB_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
COMPRESSED = (".gz", ".zst")
SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",)}


class SourceFile(NamedTuple):
    """A file to read. `name` is its path inside the source: the same on every machine."""

    name: str
    path: Path


def list_files(data: DataConfig) -> list[SourceFile]:
    """The files of a source, sorted by name.

    `python_stdlib`: the *.py files of the running Python, without its tests, IDLE and installed packages. Otherwise
    `data.path` is a file, a glob (`**` goes deep) or a folder, of which every file below it that is not hidden is
    taken: for `jsonl` only *.jsonl and *.ndjson, for `parquet` only *.parquet, each also as .gz or .zst (not Parquet).
    Raises UserError when there is none.
    """
    if data.source == "python_stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in STDLIB_EXCLUDED]  # site-packages can be huge
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        if not found:
            raise UserError(f"data.source python_stdlib: this Python keeps no source files in {root}")
        return _named(found, root)
    if data.path is None:
        raise UserError(f"data.source {data.source} reads data.path: give a file, a folder or a glob")
    path = Path(data.path).expanduser()
    if path.is_file():
        return [SourceFile(path.name, path)]
    if path.is_dir():
        found = [p for p in path.rglob("*") if _is_input(p, path, data.source)]
        root = path
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
        root = Path(*path.parts[: next((i for i, part in enumerate(path.parts) if glob.has_magic(part)), 0)])
    if not found:
        kind = "" if data.source == "text" else f" {' or '.join(SUFFIXES[data.source])}"
        raise UserError(f"data.path {data.path} holds no{kind} file: give a file, a folder or a glob that matches some")
    return _named(found, root)


def _is_input(path: Path, root: Path, source: str) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts) or not path.is_file():
        return False
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSED]
    return source == "text" or (bool(suffixes) and suffixes[-1] in SUFFIXES[source])


def _named(paths: list[Path], root: Path) -> list[SourceFile]:
    return sorted(SourceFile(path.relative_to(root).as_posix(), path) for path in paths)


def describe_files(files: list[SourceFile]) -> list[dict]:
    """Name, size in bytes and sha256 of each file as it lies on disk."""
    described = []
    for file in files:
        with _named_errors(file), open(file.path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            described.append({"name": file.name, "bytes": stream.tell(), "sha256": digest})
    return described


def read_documents(data: DataConfig, files: list[SourceFile], skipped: Counter) -> Iterator[str]:
    """Yields the documents of a source in order; one file (text) or one record (jsonl, parquet) is in memory at a time.

    Documents without a visible character are dropped and counted in skipped["empty"], files of `python_stdlib` that
    are not UTF-8 in skipped["not_utf8"]. In a user's own files bad UTF-8, bad JSON and a missing field raise UserError
    with file and line.
    """
    for file in files:
        with _named_errors(file):
            for text in _read_file(data, file, skipped):
                if text and not text.isspace():
                    yield text
                else:
                    skipped["empty"] += 1


def _read_file(data: DataConfig, file: SourceFile, skipped: Counter) -> Iterator[str]:
    if data.source == "jsonl":
        yield from _read_jsonl(file, data.text_field)
    elif data.source == "parquet":
        yield from _read_parquet(file, data.text_field)
    elif data.source == "python_stdlib":
        try:
            yield file.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped["not_utf8"] += 1
    elif data.documents == "blank_line":
        yield from _read_paragraphs(file)
    else:
        with _open(file.path) as stream:
            content = stream.read()
        yield _decode(content, file)


def _read_paragraphs(file: SourceFile) -> Iterator[str]:
    lines: list[str] = []
    with _open(file.path) as stream:
        for number, line in enumerate(stream, start=1):
            line = _decode(line, file, number)
            if not line.isspace():
                lines.append(line)
            elif lines:
                yield "".join(lines)
                lines = []
    if lines:
        yield "".join(lines)


def _read_jsonl(file: SourceFile, field: str) -> Iterator[str]:
    with _open(file.path) as stream:
        for number, line in enumerate(stream, start=1):
            line = _decode(line, file, number)
            if line.isspace():
                continue
            where = f"{file.path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} is not JSON: {error}") from error
            if not isinstance(record, dict) or field not in record:
                keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise UserError(f"{where} has no field {field!r} (it has: {keys}); data.text_field names the text")
            yield _as_text(record[field], where, field)


def _read_parquet(file: SourceFile, column: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("data.source parquet needs pyarrow: pip install 'diffjax[parquet]'") from error
    try:
        with parquet.ParquetFile(file.path) as table:
            if column not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise UserError(f"{file.path} has no column {column!r} (it has: {names}); data.text_field names it")
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _as_text(value, f"{file.path}, row {row}", column)
    except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} is not a readable Parquet file: {error}") from error


def _as_text(value: object, where: str, field: str) -> str:
    """The text of a field. null is an empty document; a lone surrogate (possible in JSON) is not text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: the field {field!r} is a {type(value).__name__}, not a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the field {field!r} is not valid Unicode: {error.reason}") from error
    return value


def _decode(content: bytes, file: SourceFile, line: int | None = None) -> str:
    """`content` (a line, or the whole file when `line` is None) as text; UserError names the first bad line."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = line or content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{file.path}, line {line} is not UTF-8 (byte 0x{content[error.start]:02x}): "
            "convert the file, or choose the text files with a glob in data.path"
        ) from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstandardFile(path))
    return open(path, "rb")


class _ZstandardFile(io.RawIOBase):
    """Reads all frames of a .zst file; EOFError when the last one is cut short (zstandard's own reader is silent)."""

    def __init__(self, path: Path):
        self._file = path.open("rb")
        self._chunks = self._decompressed()
        self._pending = b""

    def _decompressed(self) -> Iterator[bytes]:
        frame, compressed = None, b""
        while compressed := compressed or self._file.read(1 << 20):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(compressed)
            compressed = frame.unused_data
            frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("the last frame has no end")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._pending:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._pending = chunk
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _named_errors(file: SourceFile):
    """Turns a file that cannot be read into a UserError that names it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{file.path} is damaged or cut short: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {file.path}: {error.strerror or error}") from error
