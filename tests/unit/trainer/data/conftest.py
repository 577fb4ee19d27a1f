from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.storage.local import LocalStore
from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.manifest import CorpusManifest
from perdure.training.trainer.data.prepare import prepare
from perdure.training.trainer.data.stage import stage
from perdure.training.trainer.data.tokenizer import ByteTokenizer

Write = Callable[[str, str | bytes], Path]


class RecordingStore(LocalStore):
    """Keeps the keys that are put; `is_remote` hides the files behind it."""

    is_remote = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.puts: list[str] = []

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self.puts.append(key)
        super().put(key, data, if_absent=if_absent)

    def local_path(self, key: str) -> Path | None:
        return None if self.is_remote else super().local_path(key)

    def path(self, key: str) -> Path:
        path = super().local_path(key)
        assert path is not None
        return path


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    return RecordingStore(tmp_path / "store")


@pytest.fixture
def remote_store(tmp_path: Path) -> RecordingStore:
    made = RecordingStore(tmp_path / "bucket")
    made.is_remote = True
    return made


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a corpus file below corpus/."""

    def _write(name: str, content: str | bytes) -> Path:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return _write


@pytest.fixture
def damage() -> Callable[[Path], None]:
    """Flip a byte of a file; the size stays, the time moves on by a second."""

    def _damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        before = path.stat().st_mtime_ns
        path.write_bytes(data)
        os.utime(path, ns=(before, before + 10**9))

    return _damage


@pytest.fixture
def make_dataset(
    tmp_path: Path, write: Write, store: RecordingStore
) -> Callable[..., tuple[tuple[Path, ...], CorpusManifest]]:
    """Tokens in several shards, staged: (paths, manifest)."""

    def _make(num_lines: int = 700) -> tuple[tuple[Path, ...], CorpusManifest]:
        lines = "".join(f"{number} is followed by {number + 1}.\n" for number in range(num_lines))
        write("numbers.txt", lines)
        spec = DataSpec(sources=(str(tmp_path / "corpus"),), shard_size_bytes=4096)
        manifest = prepare(spec, ByteTokenizer(), store).manifest
        return stage(manifest, store, tmp_path / "node").paths, manifest

    return _make
