"""A prepared corpus holds the text it was made from, the same bytes however it came about, and is whole or absent."""

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diffjax.data import prepare as prepare_module
from diffjax.data import tokenised
from diffjax.data.corpus import Corpus
from diffjax.data.packing import decode_row
from diffjax.data.prepare import prepare, sample_documents
from diffjax.data.tokenised import text_hash
from diffjax.data.tokenizer import Tokenizer
from diffjax.errors import UserError

from .texts import make_config, replaced, write_texts

ROOT = Path(__file__).parents[2]


def quiet(config) -> Corpus:
    return prepare(config, report=lambda line: None)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def texts_of(corpus: Corpus, split: str) -> list[str]:
    """The documents of a split of short documents, decoded from its rows."""
    tokenizer, found = corpus.tokenizer, []
    for record in corpus._splits[split].read(list(range(corpus.rows(split)))):
        for segment in decode_row(record, corpus.layout.token_dtype):
            assert segment[0] == tokenizer.bos_id and segment[-1] == tokenizer.eos_id
            found.append(tokenizer.decode(segment.tolist()))
    return found


@pytest.fixture
def copy(corpus, tmp_path):
    """A copy of the shared corpus to damage."""
    return Path(shutil.copytree(corpus.directory, tmp_path / "corpus"))


def test_the_corpus_is_the_text_split_by_hash(folder, tmp_path):
    config = make_config(data__path=str(folder), data__corpus=str(tmp_path / "c"), data__sequence_length=4096)
    corpus = quiet(config)
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    held_out = [text for text in texts if text_hash(text.encode()) < 0.2 * 2**64]
    assert 0 < len(held_out) < len(texts) / 2
    assert sorted(texts_of(corpus, "held_out")) == sorted(held_out)
    assert sorted(texts_of(corpus, "train")) == sorted(set(texts) - set(held_out))


def test_manifest_adds_up(corpus, folder):
    manifest = json.loads((corpus.directory / "manifest.json").read_text())
    assert manifest["complete"] is True and manifest["mask_ids"] == 0
    assert manifest["tokenizer"] == {
        "identity": corpus.tokenizer.identity,
        "vocab_size": 320,
        **{"pad": 0, "bos": 1, "eos": 2, "unk": 3, "mask": 4},
    }
    assert manifest["packing"] == {"sequence_length": 32, "block_size": 4, "method": "document", "tail": "mask_fill"}
    assert [source["name"] for source in manifest["sources"]] == sorted(path.name for path in folder.iterdir())
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert sum(manifest["splits"][split]["bytes"] for split in ("train", "held_out")) == size
    for split, entry in manifest["splits"].items():
        arrays = corpus.read(split, list(range(entry["rows"])))
        assert entry["tokens"] == arrays.valid.sum() == sum(shard["tokens"] for shard in entry["shards"])
        assert entry["scored"] == arrays.scored.sum() == entry["tokens"] - entry["documents"]
        assert entry["padding"] == 32 * entry["rows"] - entry["tokens"]
        assert entry["rows"] == sum(shard["rows"] for shard in entry["shards"])
        assert sum(corpus.tokenizer.byte_lengths[arrays.tokens[arrays.scored]]) == entry["bytes"]


def test_prepare_is_deterministic_and_opens_what_is_there(config, corpus, tmp_path):
    again = replaced(config, ["data", "corpus"], str(tmp_path / "again"))
    assert quiet(again).identity == corpus.identity
    assert contents(tmp_path / "again") == contents(corpus.directory)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()}
    quiet(again)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()} == stamps


def test_an_explicit_corpus_needs_no_source(config, corpus, copy):
    moved = replaced(replaced(config, ["data", "corpus"], str(copy)), ["data", "path"], "/nowhere")
    assert quiet(moved).identity == corpus.identity


def test_default_place_follows_text_and_keys_and_reuses_the_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts", documents=20)
    config = make_config(data__path="texts")
    first = quiet(config)
    assert first.directory.parent == Path("corpora") and quiet(config).directory == first.directory
    moved = replaced(config, ["data", "path"], str(shutil.copytree(tmp_path / "texts", tmp_path / "moved")))
    assert quiet(moved).directory == first.directory

    monkeypatch.setattr(Tokenizer, "encode_many", lambda *_: pytest.fail("tokenised again"))
    monkeypatch.setattr(prepare_module, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    changes = [("model", "block_size", 8), ("data", "sequence_length", 64), ("data", "packing", "concat")]
    changes += [("data", "tail", "eos_fill")]
    others = [quiet(replaced(config, [section, key], value)) for section, key, value in changes]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert len({first.directory, *(other.directory for other in others)}) == 5
    assert {other.tokenizer.identity for other in others} == {first.tokenizer.identity}

    (tmp_path / "texts" / "000.txt").write_text("another text")
    assert quiet(config).directory != first.directory


def test_eos_fill_scores_the_tail(tmp_path, config, corpus):
    filled = quiet(replaced(replaced(config, ["data", "corpus"], str(tmp_path / "c")), ["data", "tail"], "eos_fill"))
    plain, entry = corpus.manifest["splits"]["train"], filled.manifest["splits"]["train"]
    assert entry["rows"] == plain["rows"]
    extra = entry["scored"] - plain["scored"]
    assert extra > 0 and entry["padding"] == plain["padding"] - extra
    eos = corpus.tokenizer.eos_id
    assert filled.unigram()[eos] == corpus.unigram()[eos] + extra


def test_skips_are_counted_and_an_empty_source_is_an_error(tmp_path):
    texts = write_texts(tmp_path / "texts", documents=20)
    (texts / "empty.txt").write_text("")
    (texts / "blank.txt").write_text(" \n")
    corpus = quiet(make_config(data__path=str(texts), data__corpus=str(tmp_path / "c")))
    assert corpus.manifest["skipped"] == {"empty": 2, "not_utf8": 0}
    for path in texts.glob("0*"):
        path.unlink()
    with pytest.raises(UserError, match="no document"):
        quiet(make_config(data__path=str(texts), data__corpus=str(tmp_path / "d")))
    given = tmp_path / "c" / "tokenizer.model"
    with pytest.raises(UserError, match="no document"):
        quiet(make_config(data__path=str(texts), data__corpus=str(tmp_path / "d"), data__tokenizer__path=str(given)))
    assert not (tmp_path / "d").exists()


def test_few_documents_hold_out_one_and_a_single_one_is_an_error(tmp_path, corpus):
    texts = write_texts(tmp_path / "texts", documents=3)
    given = str(corpus.directory / "tokenizer.model")
    config = make_config(
        data__path=str(texts), data__corpus=str(tmp_path / "c"), data__held_out=1e-9, data__tokenizer__path=given
    )
    assert quiet(config).manifest["splits"]["held_out"]["documents"] == 1
    single = replaced(
        replaced(config, ["data", "path"], str(texts / "000.txt")), ["data", "corpus"], str(tmp_path / "d")
    )
    with pytest.raises(UserError, match="all of them held out"):
        quiet(single)
    with pytest.raises(UserError, match=r"000.txt leaves no text to train a tokenizer on"):
        quiet(replaced(single, ["data", "tokenizer", "path"], None))
    assert not (tmp_path / "d").exists()


def test_a_given_tokenizer_is_used_and_another_one_is_refused(tmp_path, folder, corpus, config):
    given = tmp_path / "given.model"
    given.write_bytes(corpus.tokenizer.model_bytes)
    asked = replaced(config, ["data", "tokenizer", "path"], str(given))
    asked = replaced(asked, ["data", "corpus"], str(tmp_path / "c"))
    made = quiet(asked)
    assert made.tokenizer.identity == corpus.tokenizer.identity
    assert made.manifest["splits"] == corpus.manifest["splits"]
    with pytest.raises(UserError, match=r"data.tokenizer.path is None in the config"):
        quiet(replaced(asked, ["data", "tokenizer", "path"], None))
    other = quiet(replaced(make_config(data__path=str(folder)), ["data", "corpus"], str(tmp_path / "other")))
    assert other.identity == corpus.identity
    with pytest.raises(UserError, match=r"data.tokenizer.vocab_size is 330 in the config and 320 in the corpus"):
        quiet(
            replaced(
                replaced(config, ["data", "tokenizer", "vocab_size"], 330), ["data", "corpus"], str(tmp_path / "other")
            )
        )


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["data", "sequence_length"], 64),
        (["model", "block_size"], 8),
        (["data", "packing"], "concat"),
        (["data", "tail"], "truncate"),
        (["data", "held_out"], 0.3),
    ],
)
def test_a_corpus_of_another_config_is_refused(config, corpus, keys, value):
    with pytest.raises(UserError, match=rf"{'.'.join(keys)} is {value!r} in the config and"):
        quiet(replaced(config, keys, value))


def test_a_row_that_is_no_multiple_of_the_block_is_refused(config):
    with pytest.raises(UserError, match=r"32 is not a multiple of model.block_size 5"):
        quiet(replaced(config, ["model", "block_size"], 5))


def test_a_mask_id_in_the_text_is_refused(config, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_many", lambda self, texts: [[5, self.mask_id] for _ in texts])
    with pytest.raises(UserError, match="mask must never be a token"):
        quiet(replaced(config, ["data", "corpus"], str(tmp_path / "c")))
    assert not (tmp_path / "c").exists()


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    texts = write_texts(tmp_path / "texts", documents=20)
    original = prepare_module.tokenise

    def meanwhile(documents, *rest):
        parts = original(documents, *rest)
        with open(texts / "007.txt", "a") as file:
            file.write("more")
        return parts

    monkeypatch.setattr(prepare_module, "tokenise", meanwhile)
    with pytest.raises(UserError, match="changed while it was read"):
        quiet(make_config(data__path=str(texts), data__corpus=str(tmp_path / "c")))
    assert not (tmp_path / "c").exists()


# A folder that is no whole corpus


def test_a_folder_without_a_manifest_is_no_corpus(config, copy, tmp_path):
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest.json"):
        Corpus.open(copy)
    with pytest.raises(UserError, match="is no corpus"):
        quiet(replaced(config, ["data", "corpus"], str(copy)))
    with pytest.raises(UserError, match="is not a folder"):
        Corpus.open(tmp_path / "absent")


def first_shard(directory: Path) -> Path:
    return next(directory.glob("train-*.array_record"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": Path.unlink,
    "truncated": truncate,
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": flip_a_bit,
    "emptied": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["shard", "tokenizer.model", "unigram.npy", "manifest.json"])
def test_a_damaged_file_is_found_on_opening(copy, name, damage):
    path = first_shard(copy) if name == "shard" else copy / name
    DAMAGE[damage](path)
    with pytest.raises(UserError, match=path.name):
        Corpus.open(copy)


@pytest.mark.parametrize("key", ["format", "complete", "identity", "tokenizer", "packing", "splits"])
def test_an_edited_manifest_is_refused(copy, key):
    manifest = json.loads((copy / "manifest.json").read_text())
    edited = {"format": 99, "complete": False, "identity": "0" * 64}
    manifest[key] = edited[key] if key in edited else manifest[key] | {"more": 1}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest.json"):
        Corpus.open(copy)


def test_damage_in_a_shard_too_large_to_hash_surfaces_at_the_read(copy, monkeypatch):
    monkeypatch.setattr("diffjax.data.corpus.HASHED_ON_OPEN", 0)
    rows = Corpus.open(copy).rows("train")
    path = first_shard(copy)
    content = bytearray(path.read_bytes())
    content[1000:-1000:500] = bytes(255 - byte for byte in content[1000:-1000:500])
    path.write_bytes(content)
    with pytest.raises(UserError, match="prepare the corpus again"):
        Corpus.open(copy).read("train", list(range(rows)))


# A disk that is full


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "target",
    ["numpy.savez", "numpy.save", "os.fsync", "pathlib.Path.rename", "pathlib.Path.replace", "pathlib.Path.mkdir"],
)
def test_a_full_disk_is_an_error_and_leaves_no_corpus(config, corpus, tmp_path, monkeypatch, target):
    config = replaced(config, ["data", "corpus"], str(tmp_path / "corpora" / "c"))
    with monkeypatch.context() as patch:
        patch.setattr(target, disk_full)
        with pytest.raises(UserError, match=r"cannot write the corpus to .*No space left on device"):
            quiet(config)
    assert not (tmp_path / "corpora" / "c").exists() and not (tmp_path / "corpora" / "c.partial").exists()
    assert contents(quiet(config).directory) == contents(corpus.directory)


def test_a_full_disk_inside_a_shard(config, corpus, tmp_path):
    """ArrayRecord writes by itself: the system's own limit on file size stops it at 64 KiB."""
    config = replaced(config, ["data", "corpus"], str(tmp_path / "c"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write the corpus to .*File too large"):
            quiet(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "c").exists() and not (tmp_path / "c.partial").exists()
    assert contents(quiet(config).directory) == contents(corpus.directory)


# Interruptions and company


def run_prepare(folder: Path, corpus: Path, kill_at: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.data.killed_prepare", str(folder), str(corpus), str(kill_at)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    """(files of the corpus, number of writes) of a run that nobody killed, with many small parts and shards."""
    directory = tmp_path_factory.mktemp("whole") / "corpus"
    done = run_prepare(folder, directory, -1)
    assert done.returncode == 0, done.stderr
    return contents(directory), int(done.stdout)


@pytest.mark.multiprocess
@pytest.mark.parametrize("part", range(8))
def test_killed_at_any_write_the_next_run_ends_with_the_same_bytes(folder, tmp_path, uninterrupted, part):
    """Kills at the first writes (tokenizer, parts), the others spread over rows, shards, manifest and rename."""
    files, writes = uninterrupted
    assert len([name for name in files if name.startswith("train")]) > 1
    kill_at = [0, 2, 5, writes // 4, writes // 2, writes - 5, writes - 2, writes - 1][part]
    directory = tmp_path / "corpora" / "corpus"
    killed = run_prepare(folder, directory, kill_at)
    assert killed.returncode == -9
    assert not directory.exists() or part == 7  # the last write only makes the finished name durable
    done = run_prepare(folder, directory, -1)
    assert done.returncode == 0, done.stderr
    assert contents(directory) == files
    assert not list(directory.parent.glob("*.partial"))


def test_resuming_keeps_the_parts_that_are_there(folder, tmp_path, corpus, config, monkeypatch):
    config = replaced(config, ["data", "corpus"], str(tmp_path / "c"))
    monkeypatch.setattr(tokenised, "PART_BYTES", 4000)
    monkeypatch.setattr(tokenised, "CHUNK_BYTES", 1000)
    original, encoded = Tokenizer.encode_many, []

    def interrupted(self, texts):
        if len(encoded) == 6:
            raise KeyboardInterrupt
        encoded.append(texts)
        return original(self, texts)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_many", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quiet(config)
    parts = sorted((tmp_path / "tokenised").glob("*/part-*.npz"))
    kept = sum(len(np.load(part)["lengths"]) for part in parts)
    assert len(parts) > 1
    encoded.clear()
    monkeypatch.setattr(Tokenizer, "encode_many", lambda self, texts: encoded.append(texts) or original(self, texts))
    again = quiet(config)
    assert sum(map(len, encoded)) == 40 - kept
    assert again.identity == corpus.identity


@pytest.mark.multiprocess
def test_two_processes_at_once_make_one_corpus(folder, tmp_path, uninterrupted):
    directory = tmp_path / "corpora" / "corpus"
    command = [sys.executable, "-m", "tests.data.killed_prepare", str(folder), str(directory), "-1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert contents(directory) == uninterrupted[0]


@pytest.mark.multiprocess
def test_the_second_process_waits_for_the_lock(folder, tmp_path):
    directory = tmp_path / "corpora" / "corpus"
    directory.parent.mkdir()
    code = (
        "from tests.data.texts import make_config; from diffjax.data.prepare import prepare;"
        f"prepare(make_config(data__path={str(folder)!r}, data__corpus={str(directory)!r}),"
        " report=lambda line: print(line, flush=True))"
    )
    with open(directory.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert "waiting" in process.stdout.readline()
        assert not directory.exists()
    process.communicate(timeout=60)
    assert process.returncode == 0 and directory.is_dir()


# The tokenizer's sample


def test_the_sample_follows_from_the_set_of_documents():
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(97, 122, generator.integers(1, 40)))) for _ in range(300)]
    ranked = sorted(
        (text for text in texts if text_hash(text.encode()) >= 0.1 * 2**64), key=lambda t: text_hash(t.encode())
    )
    expected, total = [], 0
    for text in ranked:
        total += len(text)
        if total > 1000:
            break
        expected.append(text)
    assert len(expected) > 20
    for _ in range(20):
        generator.shuffle(texts)
        assert sample_documents(texts, 0.1, 1000) == expected


def test_the_sample_takes_the_beginning_of_a_long_document():
    assert sample_documents(["x" * 5000], 0.0, 1600) == ["x" * 100]


def test_preparing_imports_neither_jax_nor_grain():
    code = "import sys, diffjax.data.prepare; print({'jax', 'grain', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
