"""Checkpoints read as in a notebook, as `perdure.checkpoints` opens them."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError

import pytest
import torch
import yaml

import perdure
from perdure.storage.address import StorageSpec, open_store
from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.errors import Corrupt
from perdure.storage.retention import Retention, apply_retention
from perdure.training.config.job import parse_job
from perdure.training.errors import InputError
from perdure.training.supervisor.job_registry import remember_job
from tests.jobs import job_document
from tests.unit.storage.stores import bits, save_directly

WEIGHT = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.fixture
def document(tmp_path):
    return job_document(tmp_path, run_id="my-run")


@pytest.fixture
def job(document):
    return parse_job(document)


@pytest.fixture
def saved(job, perdure_home):
    """Steps 10, 20 and 30 of a run that is known on this machine."""
    remember_job(perdure_home, job)
    saved = CheckpointStore(open_store(job.storage), job.run_id)
    for step in (10, 20, 30):
        save_directly(saved, state_at(step), step=step, owner=(1, 2), extra={"loss": 1 / step})
    return saved


def state_at(step):
    return {
        "model/w": WEIGHT + step,
        "model/b": torch.full((3,), step, dtype=torch.bfloat16),
        "optim/w.exp_avg": WEIGHT / step,
        "optim/w.step": torch.tensor(step),
        "optim/empty": torch.empty(0, 4),
    }


def damage(saved, step):
    key = saved.key(step, shard_name(1, 2, 0))
    data = saved.store.get(key)
    saved.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def test_the_list_says_step_size_time_attempt_and_loss_of_each(saved):
    before_s = time.time()
    listed = perdure.checkpoints("my-run").list()
    assert [one.step for one in listed] == [10, 20, 30]
    assert {(one.placement, one.attempt) for one in listed} == {(1, 2)}
    assert [one.loss for one in listed] == [1 / 10, 1 / 20, 1 / 30]
    assert all(before_s - 60 < one.written_at_s <= before_s for one in listed)
    assert [one.size_bytes for one in listed] == [one.size_bytes for one in saved.list_steps()]
    with pytest.raises(FrozenInstanceError):
        listed[0].step = 11  # type: ignore[misc]


def test_the_newest_is_loaded_bit_by_bit(saved):
    reader = perdure.checkpoints("my-run")
    assert reader.latest() == reader.list()[-1]
    loaded = reader.load()
    assert list(loaded) == list(saved.manifest(30).tensors)
    assert loaded.keys() == state_at(30).keys()
    for name, tensor in state_at(30).items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(loaded[name]) == bits(tensor)


def test_a_step_and_some_of_its_tensors_are_loaded_by_name_and_pattern(saved):
    reader = perdure.checkpoints("my-run")
    weights = reader.load(step=10, names="model/*")
    assert weights.keys() == {"model/w", "model/b"}
    assert torch.equal(weights["model/w"], WEIGHT + 10)
    several = reader.load(20, ["optim/w.step", "model/?"])
    assert several.keys() == {"optim/w.step", "model/w", "model/b"}
    assert several["optim/w.step"] == 20


def test_a_run_is_given_as_job_file_job_or_store(saved, document, job, tmp_path, perdure_home):
    (perdure_home / "runs" / "my-run" / "job.json").unlink()
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    spec = StorageSpec(address=job.storage.address)
    readers = [
        perdure.checkpoints(str(path)),
        perdure.checkpoints(path),
        perdure.checkpoints(job),
        perdure.checkpoints(perdure.load_job(str(path))),
        perdure.checkpoints("my-run", store=job.storage.address),
        perdure.checkpoints("my-run", store=spec),
    ]
    for reader in readers:
        assert [one.step for one in reader.list()] == [10, 20, 30]


def test_a_run_without_checkpoints_has_no_latest_and_nothing_to_load(job):
    reader = perdure.checkpoints(job)
    assert (reader.list(), reader.latest()) == ((), None)
    with pytest.raises(InputError, match="'my-run' has no committed checkpoint"):
        reader.load()


def test_only_committed_checkpoints_are_offered(saved):
    saved.set_aside(30, "damaged")
    saved.put_shard(40, shard_name(1, 2, 0), b"123")
    reader = perdure.checkpoints("my-run")
    assert [one.step for one in reader.list()] == [10, 20]
    assert torch.equal(reader.load(names="model/w")["model/w"], WEIGHT + 20)
    for step in (30, 40):
        with pytest.raises(InputError, match=f"step: {step} is not committed; committed: 20, 10"):
            reader.load(step)


def test_a_damaged_byte_is_not_handed_out(saved):
    damage(saved, 30)
    with pytest.raises(Corrupt, match="xxh3_128"):
        perdure.checkpoints("my-run").load()
    assert torch.equal(perdure.checkpoints("my-run").load(20)["model/w"], WEIGHT + 20)


def test_a_checkpoint_whose_manifest_is_damaged_is_listed_without_its_attempt(saved):
    saved.store.put(saved.key(20, "manifest.json"), b"{")
    (_, damaged, _) = perdure.checkpoints("my-run").list()
    assert (damaged.step, damaged.placement, damaged.attempt, damaged.loss) == (
        20,
        None,
        None,
        None,
    )
    with pytest.raises(Corrupt):
        perdure.checkpoints("my-run").load(20)


def test_retention_leaves_a_step_alone_while_it_is_read(saved, monkeypatch):
    reader = perdure.checkpoints("my-run")
    left: list[list[int]] = []
    get = type(saved.store).get_scattered

    def get_while_retention_is_at_work(store, key, outs, *, start=0):
        apply_retention(saved, Retention(keep_last=1), protect=())
        left.append(saved.steps())
        get(store, key, outs, start=start)

    monkeypatch.setattr(type(saved.store), "get_scattered", get_while_retention_is_at_work)
    assert torch.equal(reader.load(10)["model/w"], WEIGHT + 10)
    assert left[-1] == [10, 30]
    apply_retention(saved, Retention(keep_last=1), protect=())
    assert saved.steps() == [30]


@pytest.mark.parametrize(
    ("run", "store", "words"),
    [
        ("nobody", None, "run_id: 'nobody': no such run on this machine"),
        ("nowhere/job.yaml", None, "nowhere/job.yaml: cannot be read"),
        ("my-run", "/plain/folder", "store: '/plain/folder' begins with neither"),
        ("my/run", "file:///nowhere", "run: 'my/run': "),
    ],
)
def test_a_run_that_is_not_there_is_refused_in_one_line(run, store, words, saved):
    with pytest.raises(InputError) as refused:
        perdure.checkpoints(run, store=store)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_job_with_a_store_beside_it_is_refused(job):
    with pytest.raises(InputError, match="name the run by its run_id"):
        perdure.checkpoints(job, store=job.storage.address)


def test_a_name_that_no_tensor_has_is_refused_with_those_there_are(saved):
    with pytest.raises(
        InputError, match=r"names: 'model/x\*' matches no tensor; there are .*model/w"
    ):
        perdure.checkpoints("my-run").load(names=["model/w", "model/x*"])


def test_the_checkpoints_of_a_command_are_its_own_files(tmp_path):
    worker = {"command": ["true"], "checkpoints": {"kind": "nanogpt", "path": "/out"}}
    with pytest.raises(InputError, match="perdure checkpoints ls run"):
        perdure.checkpoints(parse_job(job_document(tmp_path, worker=worker)))
