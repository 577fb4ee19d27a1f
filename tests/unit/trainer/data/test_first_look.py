"""A corpus that is too small, or no text, is found before it is prepared."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from perdure.storage.local import LocalStore
from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.corpus import CorpusError, find_sources
from perdure.training.trainer.data.first_look import (
    HEAD_CHARS,
    NUM_FILES,
    TooFewTokens,
    check_enough,
    strange_files,
)
from perdure.training.trainer.data.prepare import prepare
from perdure.training.trainer.data.tokenizer import ByteTokenizer

NOISE = random.Random(7).randbytes(1 << 20)  # noqa: S311 the same in every run
TEXT = "it is text, with an \u00e9 and a\ttab\n" * 200


def spec_of(path, **fields) -> DataSpec:
    return DataSpec(sources=(str(path),), **fields)


@pytest.mark.parametrize("shard_size_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("missing", [0, 1])
def test_the_corpus_is_as_large_as_its_preparation_makes_it(tmp_path, missing, shard_size_bytes):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": TEXT}).encode()))
    spec = spec_of(tmp_path, shard_size_bytes=shard_size_bytes)
    prepared = prepare(spec, ByteTokenizer(), LocalStore(tmp_path / "store"))
    wanted = prepared.manifest.num_tokens + missing
    look = {"tokenizer": ByteTokenizer(), "sources": find_sources(spec), "num_tokens": wanted}
    if missing:
        with pytest.raises(TooFewTokens, match=f"needs at least {wanted:,} tokens"):
            check_enough(spec, **look)
    else:
        check_enough(spec, **look)


def test_what_is_enough_is_read_and_no_more(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text("this is no JSON\n")
    spec = spec_of(tmp_path)
    sources = find_sources(spec)
    check_enough(spec, ByteTokenizer(), sources, num_tokens=len(TEXT.encode()) + 1)
    with pytest.raises(CorpusError, match="broken JSON"):
        check_enough(spec, ByteTokenizer(), sources, num_tokens=len(TEXT.encode()) + 2)


@pytest.mark.parametrize(
    "content",
    [NOISE, TEXT.encode("utf-16"), "caf\u00e9 f\u00fcr die Stra\u00dfe ".encode("latin-1") * 100],
    ids=["random bytes", "utf-16", "latin-1"],
)
def test_a_file_that_is_no_text_is_named_before_and_when_it_is_prepared(tmp_path, content):
    (tmp_path / "good.txt").write_text(TEXT)
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    (line,) = strange_files(spec_of(tmp_path))
    assert line.startswith(f"data.sources: {bad}: ")
    assert "% of its characters are not UTF-8 text" in line
    warned: list[str] = []
    logged: list[str] = []
    prepare(
        spec_of(tmp_path), ByteTokenizer(), LocalStore(tmp_path / "store"),
        log=logged.append, warn=warned.append,
    )  # fmt: skip
    assert [one.partition(": ")[0] for one in warned] == [str(bad)]
    assert not any("UTF-8" in one for one in logged)


def test_text_with_a_few_strange_characters_is_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT.encode() + b"\xff\x00")
    assert list(strange_files(spec_of(tmp_path))) == []


def test_of_a_large_corpus_some_files_are_looked_at_and_only_their_beginnings(tmp_path):
    for number in range(3 * NUM_FILES):
        (tmp_path / f"{number:04d}.txt").write_bytes(b"x" * (2 * HEAD_CHARS) + NOISE[:HEAD_CHARS])
    assert list(strange_files(spec_of(tmp_path))) == []
    for path in tmp_path.iterdir():
        path.write_bytes(NOISE[:100])
    assert len(list(strange_files(spec_of(tmp_path)))) == NUM_FILES
