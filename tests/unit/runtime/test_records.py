"""Records of steps: a new first rank gets those of another one; TensorBoard's are optional."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.training.journal.attempt_log import Follower
from perdure.training.journal.events import StepRecord
from perdure.training.recovery.repair import Vote
from perdure.training.runtime.step_loop import step_records
from perdure.training.runtime.step_loop.step_records import EventFiles, StepRecords
from tests.values import not_none


def record(step: int, loss: float) -> StepRecord:
    return StepRecord(step, loss, 1.0, 1e-3, 1000.0, None, 100.0 + step, 0.5, step, 0, 1, 1)


def test_without_a_folder_there_are_none():
    assert EventFiles.of(None, "run-1") is None


def test_without_the_package_there_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert EventFiles.of(str(tmp_path), "run-1") is None
    assert "install perdure[tensorboard]" in caplog.text


def test_a_full_disk_is_logged_once_and_training_goes_on(tmp_path, caplog):
    def open_writer(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    files = EventFiles(tmp_path, open_writer)
    files.step(record(1, 1.0))
    files.step(record(2, 1.0))
    files.close()
    assert caplog.text.count("No space left") == 1


def test_a_later_attempt_goes_on_where_it_began_again(tmp_path):
    reason = "needs TensorBoard: pip install perdure[tensorboard]"
    pytest.importorskip("tensorboard", reason=reason)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, loss in ((1, 9.0), (3, 5.0)):
        files = EventFiles.of(str(tmp_path), "run-1")
        assert files is not None
        for step in range(first, first + 4):
            files.step(record(step, loss))
        files.close()
    read = EventAccumulator(str(tmp_path / "run-1"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [
        (1, 9.0), (2, 9.0), (3, 5.0), (4, 5.0), (5, 5.0), (6, 5.0),
    ]  # fmt: skip
    assert "mfu" not in read.Tags()["scalars"], "what is not known has no record"


def records_of(rank: int, folder: Any) -> StepRecords:
    """Those of one rank, whose node has this folder."""
    job = SimpleNamespace(run_id="run-1", watch=SimpleNamespace(tensorboard=None))
    context: Any = SimpleNamespace(
        rank=rank, job=job, placement=1, attempt=1, metrics_path=folder / "metrics.jsonl"
    )
    return StepRecords(context)


def complete(records: StepRecords, *steps: int) -> None:
    loader: Any = SimpleNamespace(position=0, epoch=0)
    for step in steps:
        vote = Vote(step=step, loss=1.0 / step, grad_norm=1.0)
        records.add(step, vote, loader, step_s=0.5)


def on_record(folder: Any) -> list[tuple[int, float]]:
    events = Follower.of_file(folder / "metrics.jsonl").read() or []
    return [(one.step, not_none(one.loss)) for one in events if isinstance(one, StepRecord)]


def test_a_first_rank_on_a_new_node_has_the_records_that_another_rank_has_kept(tmp_path):
    third, new = records_of(2, tmp_path), records_of(0, tmp_path)
    complete(third, 1, 2, 3, 2, 3, 3, 4)  # a recovery went back to step 1
    new.adopt(third.recent())
    assert on_record(tmp_path) == [(step, 1.0 / step) for step in (1, 2, 3, 4)]
    (text,) = new.unsaved().values()
    assert text.count("\n") == 4, "the next save takes them into the store"
    complete(new, 5)
    new.adopt(third.recent())
    assert [step for step, _ in on_record(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_last_save_has_the_step_that_the_first_rank_died_over(tmp_path):
    first, second = records_of(0, tmp_path), records_of(1, tmp_path)
    complete(first, 1, 2)
    complete(second, 1, 2, 3)
    ((key, text),) = second.surviving().items()
    assert key.endswith("00000001-00000003.jsonl")
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2, 3]
    assert first.surviving() == first.unsaved()


def test_other_ranks_write_nothing_and_keep_the_newest_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(step_records, "KEPT", 3)
    second = records_of(1, tmp_path)
    complete(second, *range(1, 8))
    assert [one["step"] for one in second.recent()] == [5, 6, 7]
    second.adopt(records_of(2, tmp_path).recent())
    assert not (tmp_path / "metrics.jsonl").exists()
