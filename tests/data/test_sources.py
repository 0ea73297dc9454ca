"""Sources yield the documents that stand in the files, and name file and line of what is wrong."""

import gzip
import json
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from diffjax.data.sources import describe_files, list_files, read_documents
from diffjax.errors import UserError

from .texts import make_config


def read(**data):
    """The documents and the skip counts of a source."""
    config = make_config(**{f"data__{key}": value for key, value in data.items()}).data
    skipped = Counter()
    return list(read_documents(config, list_files(config), skipped)), dict(skipped)


def compressed(content: bytes, suffix: str) -> bytes:
    return {"": lambda c: c, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix](content)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_file_is_one_document_kept_byte_for_byte(tmp_path, suffix):
    text = "\ufeffa\r\n\r\nb\tc\x00\n"
    (tmp_path / f"a.txt{suffix}").write_bytes(compressed(text.encode(), suffix))
    assert read(path=str(tmp_path / f"a.txt{suffix}")) == ([text], {})


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_blank_lines_separate_documents(tmp_path, suffix):
    (tmp_path / f"a.txt{suffix}").write_bytes(compressed(b"\n \none\n  two\n\n\t\n\nthree", suffix))
    assert read(path=str(tmp_path), documents="blank_line") == (["one\n  two\n", "three"], {})


def test_folder_is_read_deep_and_sorted_without_hidden_files(tmp_path):
    for name in ("b/x.txt", "a.md", "c", ".hidden/y.txt", ".z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(path=str(tmp_path))[0] == ["a.md", "b/x.txt", "c"]


def test_glob_chooses_and_names_do_not_depend_on_the_place(tmp_path):
    for name in ("one/b/x.py", "one/a.py", "one/c.txt", "two/b/x.py", "two/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name[4:])
    assert read(path=f"{tmp_path}/one/**/*.py")[0] == ["a.py", "b/x.py"]
    one, two = (
        describe_files(list_files(make_config(data__path=f"{tmp_path}/{place}/**/*.py").data))
        for place in ("one", "two")
    )
    assert one == two and [file["name"] for file in one] == ["a.py", "b/x.py"]
    digest = subprocess.run(["sha256sum", tmp_path / "one/a.py"], capture_output=True, text=True, check=True).stdout
    assert one[0] == {"name": "a.py", "bytes": 4, "sha256": digest.split()[0]}


def test_empty_documents_are_counted_and_dropped(tmp_path):
    for name, content in {"a": b"", "b": b" \n\t\r\n", "c": b"text"}.items():
        (tmp_path / name).write_bytes(content)
    assert read(path=str(tmp_path)) == (["text"], {"empty": 2})


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl(tmp_path, suffix):
    lines = [{"text": "a\nb", "n": 1}, {"text": ""}, {"text": None}, {"text": "\u4e2d"}]
    content = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compressed(content.encode(), suffix))
    (tmp_path / "notes.md").write_text("not data")
    assert read(source="jsonl", path=str(tmp_path)) == (["a\nb", "\u4e2d"], {"empty": 2})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"body": "x", "id": 3}', r"no field 'text' \(it has: body, id\)"),
        (b'["text"]', "no field 'text'"),
        (b'{"text": 5}', "is a int, not a text"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=complaint) as error:
        read(source="jsonl", path=str(path))
    assert f"{path}, line 3" in str(error.value)


@pytest.mark.parametrize("documents", ["file", "blank_line"])
def test_bad_utf8_names_file_and_line(tmp_path, documents):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nalso good\nbad \xe9 here\n")
    with pytest.raises(UserError, match=r"line 4 is not UTF-8 .byte 0xe9") as error:
        read(path=str(path), documents=documents)
    assert str(path) in str(error.value)


def test_all_frames_of_a_zst_file_are_read(tmp_path):
    compressor = zstandard.ZstdCompressor()
    (tmp_path / "a.zst").write_bytes(
        compressor.compress(b"one ") + compressor.compress(b"") + compressor.compress(b"two")
    )
    assert read(path=str(tmp_path))[0] == ["one two"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", [lambda content: content[:-5], lambda content: b"no archive" + content])
def test_damaged_compressed_file_is_refused(tmp_path, suffix, damage):
    content = compressed(bytes(range(97, 122)) * 400, suffix)
    (tmp_path / f"a.txt{suffix}").write_bytes(damage(content))
    with pytest.raises(UserError, match="damaged or cut short"):
        read(path=str(tmp_path))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = ["a", None, "", "b\nc", *(str(number) for number in range(3000))]
    parquet.write_table(pyarrow.table({"body": texts, "id": list(range(len(texts)))}), tmp_path / "a.parquet")
    documents, skipped = read(source="parquet", path=str(tmp_path), text_field="body")
    assert documents == [text for text in texts if text] and skipped == {"empty": 2}
    with pytest.raises(UserError, match=r"no column 'text' \(it has: body, id\)"):
        read(source="parquet", path=str(tmp_path))
    with pytest.raises(UserError, match="is a int, not a text"):
        read(source="parquet", path=str(tmp_path), text_field="id")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read(source="parquet", path=str(tmp_path), text_field="body")


def test_parquet_bytes_that_are_no_utf8_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    offsets, content = pyarrow.py_buffer(b"\0\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"a\xff\xfe")
    column = pyarrow.StringArray.from_buffers(1, offsets, content)  # pyarrow does not look into the bytes
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read(source="parquet", path=str(tmp_path))


def test_json_nested_beyond_reading_names_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2 is not JSON"):
        read(source="jsonl", path=str(tmp_path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'diffjax\[parquet\]'"):
        read(source="parquet", path=str(tmp_path))


def test_nothing_to_read_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "absent.txt", tmp_path / "*.txt"):
        with pytest.raises(UserError, match=r"data\.path"):
            read(path=str(path))
    with pytest.raises(UserError, match=r"data\.path"):
        read()


def test_python_stdlib_is_the_source_of_this_python():
    config = make_config(data__source="python_stdlib").data
    names = [file.name for file in list_files(config)]
    assert {"ast.py", "json/decoder.py", "email/message.py"} <= set(names) and names == sorted(names)
    parts = {part for name in names for part in Path(name).parts[:-1]}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages"}
    documents = read_documents(config, [file for file in list_files(config) if file.name == "ast.py"], Counter())
    assert list(documents) == [Path(sysconfig.get_paths()["stdlib"], "ast.py").read_bytes().decode()]


def test_python_stdlib_skips_and_counts_what_is_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes("# caf\xe9".encode("latin-1"))
    (tmp_path / "b.py").write_text("b = 1")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("c = 1")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert read(source="python_stdlib") == (["b = 1"], {"not_utf8": 1})
