"""Other programs that save and restore: torch.save, DCP with its backends, safetensors.

Those that are not installed raise ImportError. Times are seconds.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from benchmarks.storage.measuring import BUCKET, Action, Contender, Setting, s3_client
from benchmarks.storage.state import check, clear

KEY = "peer"
REGION = "us-east-1"
THREADS = 2


def async_save(kind: AsyncCheckpointerType, *, cached: bool) -> Contender:
    """How long DCP's own asynchronous save to a local folder holds training up."""

    @contextmanager
    def contender(setting: Setting) -> Iterator[Action]:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        meeting = f"file://{setting.folder / 'group'}"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        is_process = kind is AsyncCheckpointerType.PROCESS
        options = StagingOptions(False, is_process, False, False)
        saves = _AsyncSaves(setting, kind, DefaultStager(options) if cached else None)
        yield Action(saves.save, before=saves.finish, after=saves.finish)
        dist.destroy_process_group()

    return contender


@dataclass(slots=True)
class _AsyncSaves:
    setting: Setting
    kind: AsyncCheckpointerType
    stager: DefaultStager | None
    _future: Any = None

    def save(self) -> float:
        began_s = time.perf_counter()
        self._future = async_save_state(
            dict(self.setting.state),
            checkpoint_id=str(self.setting.folder / "dcp"),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        return time.perf_counter() - began_s

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
        shutil.rmtree(self.setting.folder / "dcp", ignore_errors=True)


@contextmanager
def save_to_disk(setting: Setting) -> Iterator[Action]:
    """torch.save, while training waits."""
    path = setting.folder / "state.pt"

    def run() -> float:
        began_s = time.perf_counter()
        torch.save(dict(setting.state), path)
        return time.perf_counter() - began_s

    yield Action(run, before=lambda: path.unlink(missing_ok=True))


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to a store and back.

    Attributes:
        save: state to the store.
        load: from there into the state's tensors.
        forget: removes what was saved.
    """

    save: Callable[[], None]
    load: Callable[[], None]
    forget: Callable[[], None]


PeerOf = Callable[[Setting], Peer]


def saving(peer_of: PeerOf) -> Contender:
    """A peer's save until all of it is in the store."""

    @contextmanager
    def contender(setting: Setting) -> Iterator[Action]:
        peer = peer_of(setting)
        yield Action(_timed(peer.save), before=peer.forget)
        peer.forget()

    return contender


def loading(peer_of: PeerOf) -> Contender:
    """A peer's restore from the store into tensors that are there."""

    @contextmanager
    def contender(setting: Setting) -> Iterator[Action]:
        peer = peer_of(setting)
        peer.save()
        yield Action(
            _timed(peer.load),
            before=lambda: clear(setting.state),
            after=lambda: check(setting.state),
        )
        peer.forget()

    return contender


def torch_file(setting: Setting) -> Peer:
    """torch.save to a file, and boto3's transfer manager."""
    return _by_file(
        setting,
        lambda path: torch.save(dict(setting.state), path),
        lambda path: dict(torch.load(path, mmap=True, weights_only=True)),
    )


def safetensors_file(setting: Setting) -> Peer:
    """The safetensors library's file, and boto3's transfer manager."""
    return _by_file(
        setting,
        lambda path: safetensors.torch.save_file(dict(setting.state), path),
        safetensors.torch.load_file,
    )


def _by_file(
    setting: Setting, write: Callable[[Path], None], read: Callable[[Path], Mapping[str, Tensor]]
) -> Peer:
    client = s3_client(setting, num_threads=10)
    path = setting.folder / "state"

    def save() -> None:
        write(path)
        client.upload_file(str(path), BUCKET, KEY)
        path.unlink()

    def load() -> None:
        client.download_file(BUCKET, KEY, str(path))
        found = read(path)
        for name, tensor in setting.state.items():
            tensor.copy_(found[name])
        path.unlink()

    return Peer(save, load, lambda: client.delete_object(Bucket=BUCKET, Key=KEY))


def dcp_s3fs(setting: Setting) -> Peer:
    """DCP's fsspec backend over s3fs."""
    importlib.import_module("s3fs")
    backend = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    path = f"s3://{BUCKET}/{KEY}"
    options: dict[str, Any] = {
        "endpoint_url": setting.endpoint,
        "config_kwargs": {
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    }
    return _by_dcp(
        setting,
        lambda: backend.FsspecWriter(path, thread_count=THREADS, sync_files=False, **options),
        lambda: backend.FsspecReader(path, **options),
    )


def dcp_s3torchconnector(setting: Setting) -> Peer:
    """DCP over Amazon's connector (AWS CRT)."""
    connector = importlib.import_module("s3torchconnector")
    backend = importlib.import_module("s3torchconnector.dcp")
    uri = f"s3://{BUCKET}/{KEY}/"
    config = connector.S3ClientConfig(force_path_style=True)
    readers = connector.S3ReaderConstructor

    def at_endpoint(one: Any) -> Any:
        # Its storage classes take no endpoint; their file system takes a client that does.
        files = importlib.import_module("s3torchconnector.dcp.s3_file_system")
        clients = importlib.import_module("s3torchconnector._s3client")
        client = clients.S3Client(REGION, endpoint=setting.endpoint, s3client_config=config)
        one.fs = files.S3FileSystem(
            REGION, s3_client=client, reader_constructor=readers.sequential()
        )
        return one

    return _by_dcp(
        setting,
        lambda: at_endpoint(backend.S3StorageWriter(REGION, uri, thread_count=THREADS)),
        lambda: at_endpoint(
            backend.S3StorageReader(REGION, uri, reader_constructor=readers.sequential())
        ),
    )


def _by_dcp(setting: Setting, writer: Callable[[], Any], reader: Callable[[], Any]) -> Peer:
    def save() -> None:
        save_state(dict(setting.state), storage_writer=writer(), no_dist=True)

    def load() -> None:
        load_state(dict(setting.state), storage_reader=reader(), no_dist=True)

    return Peer(save, load, lambda: _delete_below(setting, KEY))


def _delete_below(setting: Setting, prefix: str) -> None:
    client = s3_client(setting, num_threads=1)
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    for entry in found.get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])


def _timed(action: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        began_s = time.perf_counter()
        action()
        return time.perf_counter() - began_s

    return run
