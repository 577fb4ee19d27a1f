from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.corpus import (
    BLOCK_CHARS,
    CorpusError,
    find_sources,
    iterate_documents,
)
from tests.unit.trainer.data.conftest import Write

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


def read(path: Path) -> list[str]:
    return list(iterate_documents(path, text_field="text"))


def found(*sources: Path | str) -> list[str]:
    return [s.path.name for s in find_sources(DataSpec(sources=tuple(map(str, sources))))]


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".rst"])
def test_text_is_one_document_as_it_is(write: Write, suffix: str, packing: str) -> None:
    text = "first\r\nsecond \u00e9\n"
    assert read(write(f"a{suffix}{packing}", PACKERS[packing](text.encode()))) == [text]


@pytest.mark.parametrize("packing", PACKERS)
def test_each_jsonl_row_is_a_document(write: Write, packing: str) -> None:
    rows = "\n".join(json.dumps({"text": text}) for text in ("one", "", "two\nlines")) + "\n\n"
    assert read(write(f"a.jsonl{packing}", PACKERS[packing](rows.encode()))) == [
        "one",
        "two\nlines",
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_each_parquet_row_is_a_document(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"text {number}" for number in range(600)]
    pq.write_table(pa.table({"id": range(600), "text": pa.array(texts, kind)}), path)
    assert read(path) == texts


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_concatenated_members_are_read_to_the_end(write: Write, packing: str) -> None:
    pack = PACKERS[packing]
    assert read(write(f"a.txt{packing}", pack(b"one ") + pack(b"two"))) == ["one two"]


def test_large_text_is_cut_at_line_ends(write: Write) -> None:
    text = "".join(f"line {number}\n" for number in range(250_000))
    blocks = read(write("a.txt", text))
    assert len(blocks) == len(text) // BLOCK_CHARS + 1
    assert all(block.endswith("\n") for block in blocks)
    assert "".join(blocks) == text


def test_a_line_without_end_is_cut_too(write: Write) -> None:
    text = "x" * (3 * BLOCK_CHARS)
    blocks = read(write("a.txt", text))
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= 2 * BLOCK_CHARS


def test_what_is_not_utf8_is_replaced(write: Write) -> None:
    assert read(write("a.txt", b"caf\xe9\n")) == ["caf\ufffd\n"]
    assert read(write("a.jsonl", b'{"text": "caf\xe9"}\n')) == ["caf\ufffd"]
    assert read(write("b.jsonl", b'{"text": "half \\ud800"}\n')) == ["half ?"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{broken", "broken JSON"),
        ('{"body": "x"}', "no field 'text'; fields are 'body'"),
        ("[1]", "must be an object"),
        ('{"text": null}', "must be a string"),
        ("[" * 100_000, "broken JSON"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(write: Write, row: str, problem: str) -> None:
    path = write("a.jsonl", '{"text": "fine"}\n' + row + "\n")
    with pytest.raises(CorpusError, match="line 2") as caught:
        read(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_without_the_text_names_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"]}), path)
    with pytest.raises(CorpusError, match="no column 'text'; columns are 'body'"):
        read(path)
    pq.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(CorpusError, match="type int64, must be string"):
        read(path)
    pq.write_table(pa.table({"text": ["x", None]}), path)
    with pytest.raises(CorpusError, match="row 2"):
        read(path)


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_cut_off_file_is_not_taken_for_a_short_one(write: Write, packing: str) -> None:
    data = PACKERS[packing](os.urandom(400_000).hex().encode())
    with pytest.raises(CorpusError, match=f"a.txt{packing}: cannot be read"):
        read(write(f"a.txt{packing}", data[: len(data) // 2]))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_of_another_format_is_named(write: Write, name: str) -> None:
    with pytest.raises(CorpusError, match=name):
        read(write(name, b"neither of these at all"))


def test_files_come_in_path_order_and_once(write: Write, tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.md", "a.txt", "b/skip.csv", "b/.hidden.txt", "b/empty.txt"):
        write(name, "" if "empty" in name else "x")
    corpus = tmp_path / "corpus"
    assert found(corpus / "b", corpus / "*.txt", corpus / "b/1.md") == ["a.txt", "1.md", "2.txt"]
    assert found(corpus / "**/*.txt") == ["a.txt", "2.txt"]


def test_unusable_sources_are_named_in_one_line(write: Write, tmp_path: Path) -> None:
    write("a.csv", "x")
    write("empty.txt", "")
    corpus = tmp_path / "corpus"
    for source, problem in {
        corpus / "none": "no such file or folder",
        corpus / "a.csv": "unknown suffix; known are .txt",
        corpus / "*.pdf": "nothing usable among 0 files",
        corpus / "*.csv": "nothing usable among 1 files",
        corpus / "empty.txt": "files are empty",
        "s3://bucket/corpus": "paths of mounted files",
    }.items():
        with pytest.raises(CorpusError) as caught:
            find_sources(DataSpec(sources=(str(source),)))
        assert problem in str(caught.value)
        assert str(source) in str(caught.value)
