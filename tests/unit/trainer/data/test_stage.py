from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import Corrupt, NotFound
from storage.local import LocalStore
from training.specs.data import DataSpec
from training.trainer.data.manifest import Manifest
from training.trainer.data.prepare import prepare
from training.trainer.data.stage import stage
from training.trainer.data.tokenizer import ByteTokenizer

Write = Callable[[str, str | bytes], Path]
MakeManifest = Callable[[LocalStore], Manifest]


@pytest.fixture
def make_manifest(write: Write) -> MakeManifest:
    def _make(store: LocalStore) -> Manifest:
        for number in range(4):
            path = write(f"{number}.txt", f"{number}" * 3000)
        spec = DataSpec(sources=(str(path.parent),), shard_size_bytes=4096)
        return prepare(spec, ByteTokenizer(), store).manifest

    return _make


def test_a_store_with_paths_is_used_in_place(
    make_manifest: MakeManifest, store: LocalStore, tmp_path: Path
) -> None:
    manifest = make_manifest(store)
    result = stage(manifest, store, tmp_path / "node")
    assert result.paths == tuple(store.local_path(shard.key) for shard in manifest.shards)
    assert (result.skipped, result.copied_bytes) == (True, 0)
    assert not (tmp_path / "node").exists()


def test_a_missing_or_short_shard_in_place_is_named(
    make_manifest: MakeManifest, store: LocalStore, tmp_path: Path
) -> None:
    manifest = make_manifest(store)
    path = store.local_path(manifest.shards[1].key)
    assert path is not None
    path.write_bytes(b"short")
    with pytest.raises(Corrupt, match="size_bytes=5"):
        stage(manifest, store, tmp_path)
    path.unlink()
    with pytest.raises(NotFound, match="prepare the data again"):
        stage(manifest, store, tmp_path)


def test_shards_are_copied_once(
    make_manifest: MakeManifest,
    remote_store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = make_manifest(remote_store)
    result = stage(manifest, remote_store, tmp_path / "node")
    for path, shard in zip(result.paths, manifest.shards, strict=True):
        assert path.read_bytes() == remote_store.get(shard.key)
    assert not result.skipped
    assert result.copied_bytes == sum(shard.size_bytes for shard in manifest.shards)
    monkeypatch.setattr(remote_store, "get_into", None)
    again = stage(manifest, remote_store, tmp_path / "node")
    assert (again.skipped, again.copied_bytes, again.paths) == (True, 0, result.paths)


def test_a_damaged_copy_is_fetched_again_alone(
    make_manifest: MakeManifest,
    remote_store: LocalStore,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    manifest = make_manifest(remote_store)
    paths = stage(manifest, remote_store, tmp_path / "node").paths
    damage(paths[2])
    again = stage(manifest, remote_store, tmp_path / "node")
    assert again.copied_bytes == manifest.shards[2].size_bytes
    assert paths[2].read_bytes() == remote_store.get(manifest.shards[2].key)
    assert stage(manifest, remote_store, tmp_path / "node").skipped


def test_copies_without_a_record_are_hashed_not_fetched(
    make_manifest: MakeManifest, remote_store: LocalStore, tmp_path: Path
) -> None:
    manifest = make_manifest(remote_store)
    stage(manifest, remote_store, tmp_path / "node")
    (tmp_path / "node" / "verified.json").write_text("[]")
    assert stage(manifest, remote_store, tmp_path / "node").skipped


def test_a_damaged_object_never_gets_its_name(
    make_manifest: MakeManifest, remote_store: LocalStore, tmp_path: Path
) -> None:
    manifest = make_manifest(remote_store)
    shard = manifest.shards[0]
    remote_store.put(shard.key, bytes(shard.size_bytes))
    with pytest.raises(Corrupt, match="prepare the data again"):
        stage(manifest, remote_store, tmp_path / "node")
    assert not (tmp_path / "node" / shard.key.rpartition("/")[2]).exists()


def test_what_a_killed_copy_left_is_removed(
    make_manifest: MakeManifest, remote_store: LocalStore, tmp_path: Path
) -> None:
    manifest = make_manifest(remote_store)
    abandoned = tmp_path / "node" / "x.tokens.partial"
    abandoned.parent.mkdir()
    abandoned.write_bytes(b"half")
    stage(manifest, remote_store, tmp_path / "node")
    assert not abandoned.exists()
