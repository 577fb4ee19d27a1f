from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.local import LocalStore
from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.corpus import CorpusError
from perdure.training.trainer.data.manifest import CorpusManifest, load_manifest
from perdure.training.trainer.data.prepare import PrepareResult, prepare
from perdure.training.trainer.data.tokenizer import ByteTokenizer
from tests.unit.trainer.data.conftest import RecordingStore, Write

NUM_FILES = 6
KILLED = 17

# Runs in a process of its own: dies at the given put.
WRITER = """
import os, sys
from pathlib import Path
from perdure.storage.local import LocalStore
from perdure.training.trainer.data.prepare import prepare
from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.tokenizer import ByteTokenizer

class Dying(LocalStore):
    left = int(sys.argv[3])
    def put(self, key, data, *, if_absent=False):
        if self.left == 0:
            os._exit(17)
        self.left -= 1
        super().put(key, data, if_absent=if_absent)

spec = DataSpec(sources=(sys.argv[1],), shard_size_bytes=4096)
prepare(spec, ByteTokenizer(), Dying(Path(sys.argv[2])))
"""


@pytest.fixture
def corpus(write: Write) -> Path:
    """Files that are a group each: two would overfill a shard."""
    for number in range(NUM_FILES):
        path = write(f"{number}.txt", f"file {number} ".ljust(3000, chr(ord("a") + number)))
    return path.parent


def run(corpus: Path, store: LocalStore, log: Callable[[str], None] | None = None) -> PrepareResult:
    spec = DataSpec(sources=(str(corpus),), shard_size_bytes=4096)
    return prepare(spec, ByteTokenizer(), store, log=log)


def tokens(manifest: CorpusManifest, store: LocalStore) -> list[int]:
    data = b"".join(store.get(shard.key) for shard in manifest.shards)
    return [int(token) for token in np.frombuffer(data, manifest.numpy_dtype)]


def expected(corpus: Path) -> list[int]:
    ids: list[int] = []
    for path in sorted(corpus.iterdir()):
        ids += [*path.read_bytes(), 256]
    return ids


def counts(result: PrepareResult) -> tuple[int, int, int]:
    return result.written_shards, result.reused_shards, result.damaged_shards


def test_every_document_ends_with_eos_and_the_manifest_counts_them(
    corpus: Path, store: RecordingStore
) -> None:
    result = run(corpus, store)
    manifest = load_manifest(store, result.manifest_key)
    assert manifest == result.manifest
    assert tokens(manifest, store) == expected(corpus)
    assert (manifest.num_documents, manifest.num_tokens) == (NUM_FILES, NUM_FILES * 3001)
    assert (manifest.dtype, manifest.vocab_size) == ("uint16", 257)
    assert counts(result) == (NUM_FILES, 0, 0)
    assert store.puts[-1] == result.manifest_key, "the manifest is written last"


def test_a_second_preparation_is_skipped_and_neither_writes_nor_reads_shards(
    corpus: Path, store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(corpus, store)
    store.puts.clear()
    monkeypatch.setattr(store, "get_into", None)
    again = run(corpus, store)
    assert again.skipped
    assert again.manifest == first.manifest
    assert counts(again) == (0, NUM_FILES, 0)
    assert store.puts == []


def test_without_the_record_shards_are_hashed_and_the_record_is_back(
    corpus: Path, store: RecordingStore
) -> None:
    run(corpus, store)
    store.delete("data/verified.json")
    store.puts.clear()
    assert run(corpus, store).skipped
    assert store.puts == ["data/verified.json"]


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_damaged_or_missing_shard_is_redone_alone(
    corpus: Path, store: RecordingStore, damage: Callable[[Path], None], *, is_missing: bool
) -> None:
    first = run(corpus, store)
    key = first.manifest.shards[2].key
    if is_missing:
        store.delete(key)
    else:
        damage(store.path(key))
    store.puts.clear()
    lines: list[str] = []
    again = run(corpus, store, lines.append)
    assert counts(again) == (1, NUM_FILES - 1, 1)
    assert not again.skipped
    assert again.manifest == first.manifest
    assert [put for put in store.puts if "/shards/" in put] == [key]
    assert tokens(again.manifest, store) == expected(corpus)
    assert any(key in line and "damaged" in line for line in lines)
    assert run(corpus, store).skipped


def test_a_damaged_part_of_a_large_source_is_redone_alone(
    write: Write, store: RecordingStore, damage: Callable[[Path], None]
) -> None:
    rows = "".join(f'{{"text": "{number} {"x" * 500}"}}\n' for number in range(60))
    path = write("large.jsonl", rows)
    first = run(path, store)
    assert len(first.manifest.shards) == 8
    damage(store.path(first.manifest.shards[5].key))
    store.puts.clear()
    again = run(path, store)
    assert counts(again) == (1, 7, 1)
    assert again.manifest == first.manifest
    assert run(path, store).skipped


def test_large_text_is_split_at_line_ends(write: Write, store: RecordingStore) -> None:
    path = write("large.txt", "one line of text\n" * 3000)
    result = run(path, store)
    assert len(result.manifest.shards) > 10
    ids = tokens(result.manifest, store)
    assert bytes(token for token in ids if token != ByteTokenizer.eos_id) == path.read_bytes()
    ends = [i for i, token in enumerate(ids) if token == ByteTokenizer.eos_id]
    assert all(ids[end - 1] == ord("\n") for end in ends)
    assert len(ends) == result.manifest.num_documents


def change(corpus: Path) -> None:
    (corpus / "3.txt").write_text("another text " * 200)


def add_and_remove(corpus: Path) -> None:
    (corpus / "2b.txt").write_text("n" * 3000)
    (corpus / "5.txt").unlink()


def change_and_keep_the_size(corpus: Path) -> None:
    path = corpus / "1.txt"
    path.write_text(path.read_text().upper())
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("edit", [change, add_and_remove, change_and_keep_the_size])
def test_a_changed_source_redoes_its_own_shard_only(
    corpus: Path, store: RecordingStore, edit: Callable[[Path], None]
) -> None:
    first = run(corpus, store)
    edit(corpus)
    again = run(corpus, store)
    assert counts(again) == (1, NUM_FILES - 1, 0)
    assert again.manifest_key != first.manifest_key
    assert tokens(again.manifest, store) == expected(corpus)


def test_an_inserted_source_moves_few_borders(write: Write, store: RecordingStore) -> None:
    # Where borders are depends on the paths, so on the test's folder: 38 shards on average.
    for number in range(400):
        path = write(f"{number:03d}.txt", f"{number}" * 100)
    first = run(path.parent, store)
    write("010b.txt", "new" * 100)
    again = run(path.parent, store)
    assert len(first.manifest.shards) > 20
    # After each shard the borders meet again with a chance of about one half.
    assert again.written_shards <= 12
    assert tokens(again.manifest, store) == expected(path.parent)


def test_touched_sources_with_the_same_content_rewrite_no_shard(
    corpus: Path, store: RecordingStore
) -> None:
    first = run(corpus, store)
    for path in corpus.iterdir():
        os.utime(path, ns=(1, 1))
    again = run(corpus, store)
    assert counts(again) == (0, NUM_FILES, 0)
    assert again.manifest_key != first.manifest_key
    assert again.manifest.content_fingerprint == first.manifest.content_fingerprint
    assert {source.mtime_ns for shard in again.manifest.shards for source in shard.sources} == {1}
    assert run(corpus, store).skipped


def test_a_damaged_manifest_is_made_again_from_the_same_shards(
    corpus: Path, store: RecordingStore
) -> None:
    first = run(corpus, store)
    store.put(first.manifest_key, b'{"format_version": 1}')
    again = run(corpus, store)
    assert counts(again) == (0, NUM_FILES, 0)
    assert load_manifest(store, first.manifest_key) == first.manifest


@pytest.mark.process
@pytest.mark.parametrize("num_puts", [0, 1, 5, 12, 13])
def test_a_killed_preparation_leaves_no_manifest_and_a_rerun_finishes(
    corpus: Path, tmp_path: Path, num_puts: int
) -> None:
    root = tmp_path / "store"
    arguments = [str(corpus), str(root), str(num_puts)]
    done = subprocess.run([sys.executable, "-c", WRITER, *arguments], check=False, timeout=60)
    assert done.returncode == KILLED
    store = LocalStore(root)
    assert list(store.list("data/manifests/")) == []
    again = run(corpus, store)
    # One put is a shard, the next its group's receipt, and so on for six groups.
    assert counts(again) == (NUM_FILES - min(num_puts, 12) // 2, min(num_puts, 12) // 2, 0)
    assert tokens(again.manifest, store) == expected(corpus)
    assert run(corpus, store).skipped


def test_a_source_that_changes_while_it_is_read_is_an_error(
    corpus: Path, store: RecordingStore
) -> None:
    def grow(line: str) -> None:
        del line
        with (corpus / "0.txt").open("a") as file:
            file.write("more")

    with pytest.raises(CorpusError, match=r"0\.txt: changed while it was read"):
        run(corpus, store, grow)
    assert list(store.list("data/manifests/")) == []


def test_a_corpus_without_text_is_an_error(write: Write, store: RecordingStore) -> None:
    path = write("a.jsonl", '{"text": ""}\n')
    with pytest.raises(CorpusError, match="no text in any file"):
        run(path, store)


def test_ids_beyond_two_bytes_take_four(corpus: Path, store: RecordingStore) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 70_000
        eos_id = 69_999

    result = prepare(DataSpec(sources=(str(corpus),)), Wide(), store)
    assert result.manifest.dtype == "uint32"
    assert tokens(result.manifest, store)[3000] == Wide.eos_id


def test_ids_beyond_the_vocabulary_are_an_error(corpus: Path, store: RecordingStore) -> None:
    class Narrow(ByteTokenizer):
        vocab_size = 100

    with pytest.raises(ValueError, match="beyond vocab_size=100"):
        prepare(DataSpec(sources=(str(corpus),)), Narrow(), store)


def test_a_manifest_that_contradicts_itself_is_corrupt(corpus: Path, store: RecordingStore) -> None:
    result = run(corpus, store)
    bad = result.manifest.model_copy(update={"num_tokens": 5})
    store.put("bad.json", bad.model_dump_json().encode())
    with pytest.raises(Corrupt, match="num_tokens=5, but the shards' sum"):
        load_manifest(store, "bad.json")
    with pytest.raises(NotFound):
        load_manifest(store, "none.json")
