from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.local import LocalStore
from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.manifest import CorpusManifest
from perdure.training.trainer.data.prepare import prepare
from perdure.training.trainer.data.stage import StageResult, stage
from perdure.training.trainer.data.tokenizer import ByteTokenizer
from tests.unit.trainer.data.conftest import Write

MakeManifest = Callable[[LocalStore], CorpusManifest]


@pytest.fixture
def make_manifest(write: Write) -> MakeManifest:
    def _make(store: LocalStore) -> CorpusManifest:
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
    assert result.skipped
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


@dataclass
class Remote:
    """Shards in a store that has no paths, and a node's folder for copies of them."""

    manifest: CorpusManifest
    store: LocalStore
    folder: Path

    def stage(self) -> StageResult:
        return stage(self.manifest, self.store, self.folder)


@pytest.fixture
def remote(make_manifest: MakeManifest, remote_store: LocalStore, tmp_path: Path) -> Remote:
    return Remote(make_manifest(remote_store), remote_store, tmp_path / "node")


def test_shards_are_copied_once(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    result = remote.stage()
    for path, shard in zip(result.paths, remote.manifest.shards, strict=True):
        assert path.read_bytes() == remote.store.get(shard.key)
    assert not result.skipped
    monkeypatch.setattr(remote.store, "get_into", None)
    again = remote.stage()
    assert (again.skipped, again.paths) == (True, result.paths)


def test_a_damaged_copy_is_fetched_again_alone(
    remote: Remote, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = remote.stage().paths[2]
    damage(path)
    fetched = []

    def get_into(key: str, buffer: memoryview, *, start: int = 0) -> None:
        fetched.append(key)
        LocalStore.get_into(remote.store, key, buffer, start=start)

    monkeypatch.setattr(remote.store, "get_into", get_into)
    assert not remote.stage().skipped
    assert set(fetched) == {remote.manifest.shards[2].key}
    assert path.read_bytes() == remote.store.get(remote.manifest.shards[2].key)
    assert remote.stage().skipped


def test_copies_without_a_record_are_hashed_not_fetched(remote: Remote) -> None:
    remote.stage()
    (remote.folder / "verified.json").write_text("[]")
    assert remote.stage().skipped


def test_a_damaged_object_never_gets_its_name(remote: Remote) -> None:
    shard = remote.manifest.shards[0]
    remote.store.put(shard.key, bytes(shard.size_bytes))
    with pytest.raises(Corrupt, match="prepare the data again"):
        remote.stage()
    assert not (remote.folder / shard.key.rpartition("/")[2]).exists()


def test_what_a_killed_copy_left_is_removed(remote: Remote) -> None:
    abandoned = remote.folder / "x.tokens.partial"
    abandoned.parent.mkdir()
    abandoned.write_bytes(b"half")
    remote.stage()
    assert not abandoned.exists()
