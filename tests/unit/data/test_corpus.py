from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from training.trainer.data.corpus import CorpusError, check_sources, expand_sources
from training.trainer.data.documents import ReadStats, documents_of
from training.trainer.data.source import describe
from training.trainer.data.spec import DataSpec

PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def read(path: Path, *, block_bytes: int = 1024, stats: ReadStats | None = None) -> list[str]:
    stats = stats or ReadStats()
    return list(documents_of(describe(path), "text", block_bytes=block_bytes, stats=stats))


def names(*sources: object) -> list[str]:
    return [Path(source.path).name for source in expand_sources(tuple(map(str, sources)))]


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("suffix", [".txt", ".md", ".rst", ".py"])
def test_a_text_file_is_one_document(write, suffix, packing):
    path = write(f"a{suffix}{packing}", PACKERS[packing]("Grüße\nan alle\n".encode()))
    assert read(path) == ["Grüße\nan alle\n"]


@pytest.mark.parametrize("packing", PACKERS)
def test_a_jsonl_row_is_one_document_and_blank_ones_are_left_out(write, packing):
    rows = b'{"text": "one", "id": 1}\n\n{"text": ""}\n{"text": "two\\nlines"}'
    assert read(write(f"a.jsonl{packing}", PACKERS[packing](rows))) == ["one", "two\nlines"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary("int32", "string")])
def test_a_parquet_row_is_one_document(tmp_path, kind):
    texts = [f"row {number % 7}" for number in range(1000)]
    column = pa.array(texts).cast(kind)
    pq.write_table(pa.table({"id": range(1000), "text": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == texts


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_truncated_file_is_an_error_and_not_a_shorter_corpus(write, packing):
    data = PACKERS[packing](os.urandom(5000).hex().encode())
    path = write(f"a.txt{packing}", data[:-100])
    with pytest.raises(CorpusError, match=r"a\.txt.*cannot be read as text\..*[Tt]runcated"):
        read(path)


def test_a_large_text_file_is_cut_at_line_ends_and_loses_nothing(write):
    text = "".join(f"line {number} Ü\n" for number in range(2000))
    documents = read(write("a.txt", text), block_bytes=1000)
    assert "".join(documents) == text
    assert all(len(document.encode()) <= 1000 for document in documents)
    assert all(document.endswith("\n") for document in documents)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), block=st.integers(8, 64))
def test_blocks_never_cut_a_character(tmp_path_factory, text, block):
    path = tmp_path_factory.mktemp("blocks") / "a.txt"
    path.write_bytes(text.encode())
    stats = ReadStats()
    assert "".join(read(path, block_bytes=block, stats=stats)) == text.removeprefix("\ufeff")
    assert stats.num_undecodable == 0


def test_what_is_not_utf8_is_replaced_and_counted(write, tmp_path):
    stats = ReadStats()
    assert read(write("a.txt", b"caf\xe9"), stats=stats) == ["caf\ufffd"]
    assert read(write("b.jsonl", b'{"text": "\\ud800 half"}'), stats=stats) == ["? half"]
    column = pa.array([b"\xff!"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet", stats=stats) == ["\ufffd!"]
    assert stats.num_undecodable == 3


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"text": "cut', "is not JSON"),
        ('["text"]', "is a JSON list; allowed is one object per line"),
        ('{"body": "x", "id": 1}', "no field 'text'.*it has: body, id"),
        ('{"text": 7}', "'text' is 7; allowed is a string"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(write, row, complaint):
    path = write("a.jsonl", f'{{"text": "fine"}}\n{row}\n')
    with pytest.raises(CorpusError, match=rf"a\.jsonl:2: .*{complaint}"):
        read(path)


def test_a_missing_parquet_column_is_named_with_those_there_are(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="no column 'text'.*it has: body, id"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("values", "complaint"), [([1, 2], "is int64; allowed is string"), (["x", None], "row 1.*null")]
)
def test_a_parquet_column_that_is_not_text_is_an_error(tmp_path, values, complaint):
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=complaint):
        read(tmp_path / "a.parquet")


def test_a_file_that_is_not_parquet_is_an_error(write):
    with pytest.raises(CorpusError, match="cannot be read as parquet"):
        read(write("a.parquet", "no"))


def test_folders_are_searched_recursively_in_order_without_hidden_and_unknown_files(write):
    for name in ("b/z.txt", "b/a.md", "a.jsonl.gz", ".git/c.txt", "x.csv", "b/.d.txt"):
        write(name, "x")
    folder = write("c.py", "x").parent
    assert names(folder) == ["a.jsonl.gz", "a.md", "z.txt", "c.py"]


def test_overlapping_sources_give_each_file_once_in_any_order(write):
    path = write("a.txt", "x")
    write("b.txt", "x")
    assert names(path.parent, path, path.parent / "*.txt") == ["a.txt", "b.txt"]
    assert names(path.parent / "*.txt", path) == names(path, path.parent / "*.txt")


def test_globs_may_span_folders(write):
    write("a/deep/x.txt", "x")
    folder = write("b/y.txt", "x").parent.parent
    assert names(folder / "**" / "*.txt") == ["x.txt", "y.txt"]


def test_linked_folders_are_followed_once(write):
    folder = write("a/x.txt", "x").parent
    (folder / "loop").symlink_to(folder)
    (folder.parent / "b").symlink_to(folder)
    assert names(folder.parent) == ["x.txt"]


def test_empty_files_are_left_out(write):
    write("a.txt", "")
    assert names(write("b.txt", "x").parent) == ["b.txt"]


def test_a_source_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"nowhere/\*\.txt: nothing found"):
        check_sources(DataSpec(sources=(f"{tmp_path}/nowhere/*.txt",)))


@pytest.mark.parametrize("name", ["a.csv", "a.gz", "a.parquet.gz", "noext"])
def test_an_unknown_suffix_is_named_with_those_allowed(write, name):
    with pytest.raises(CorpusError, match=r"unknown suffix; allowed are \.txt.*\.parquet"):
        check_sources(DataSpec(sources=(str(write(name, "x")),)))


def test_a_folder_without_a_usable_file_is_an_error(write):
    folder = write("a.csv", "x").parent
    with pytest.raises(CorpusError, match="no file with a known suffix"):
        check_sources(DataSpec(sources=(str(folder),)))


def test_a_corpus_of_empty_files_is_an_error(write):
    with pytest.raises(CorpusError, match="the corpus is empty"):
        check_sources(DataSpec(sources=(str(write("a.txt", "")),)))


def test_a_wrong_text_field_shows_before_anything_is_prepared(write):
    path = write("a.jsonl", json.dumps({"body": "x"}))
    with pytest.raises(CorpusError, match=r"a\.jsonl:1: has no field 'text'.*it has: body"):
        check_sources(DataSpec(sources=(str(path),)))
    check_sources(DataSpec(sources=(str(path),), text_field="body"))
