"""`perdure support`: one archive about a run."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from perdure.storage.address import open_store
from perdure.support import end_of
from perdure.training.agent.log_collection import COLLECTED_FILE
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.wire.logs import Collected, logs_prefix
from tests.jobs import small_job
from tests.unit.journal.histories import BEGINNING, over, started
from tests.unit.perdure.commands import append, error_line, perdure
from tests.values import not_none

KEY = "hunter2hunter2"


@pytest.fixture
def job(tmp_path, perdure_home):
    job = small_job(tmp_path, run_id="small", engine={"nodes": 2, "slots_per_node": 1})
    remember_job(perdure_home, job)
    return job


@pytest.fixture
def run(job, perdure_home):
    """A run whose first attempt failed; node-1 stored no logs."""
    store = open_store(job.storage)
    append(RunHandle(job, home=perdure_home), *BEGINNING, over(1), started(2), over(2))
    prefix = f"{logs_prefix('small', 1, 1)}node-0/"
    log = f"export MY_PASSWORD={KEY}\nRuntimeError: rank 9 is not in group\n"
    store.put(f"{prefix}rank-00000.stderr.log.gz", gzip.compress(log.encode()))
    store.put(f"{prefix}npu-smi.txt.gz", gzip.compress(b"$ npu-smi info\n"))
    index = Collected(placement=1, attempt=1, is_done=True, files=())
    store.put(prefix + COLLECTED_FILE, index.model_dump_json().encode())
    return job


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            name.partition("/")[2]: not_none(archive.extractfile(name)).read().decode()
            for name in archive.getnames()
        }


def test_one_archive_has_everything_and_says_what_each_file_is(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert perdure("support", "small").startswith("small-support.tar.gz: ")
    files = contents(tmp_path / "small-support.tar.gz")
    assert files["logs/p0001-a0001/node-0/npu-smi.txt"] == "$ npu-smi info\n"
    assert json.loads(files["status.json"])["run_id"] == "small"
    assert json.loads(files["job.json"])["engine"]["nodes"] == 2
    assert "perdure " in files["versions.txt"]
    assert any(name.startswith("faults/fault-p1-a1") for name in files)
    assert "ledger/00000000.json" in files
    listed = files["CONTENTS.md"]
    assert all(f"| `{name}` |" in listed for name in files if name != "CONTENTS.md")
    assert "attempt 1.1: node-1 was lost or did not finish uploading its logs" in listed


def test_secrets_are_masked_once_more(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "of-this-machine-1234")
    store = open_store(run.storage)
    key = f"{logs_prefix('small', 1, 1)}node-0/rank-00001.stderr.log.gz"
    store.put(key, gzip.compress(b"of-this-machine-1234\n"))
    perdure("support", "small", "--output", tmp_path / "out.tar.gz")
    text = "".join(contents(tmp_path / "out.tar.gz").values())
    assert KEY not in text
    assert "of-this-machine-1234" not in text
    assert "rank 9 is not in group" in text


@pytest.mark.parametrize("damaged", [b"no gzip", gzip.compress(b"text" * 99, mtime=0)[:20]])
def test_a_damaged_log_is_named_and_the_others_are_there(run, tmp_path, damaged):
    name = "logs/p0001-a0001/node-0/rank-00001.stderr.log"
    prefix = f"{logs_prefix('small', 1, 1)}node-0/"
    open_store(run.storage).put(f"{prefix}rank-00001.stderr.log.gz", damaged)
    printed = perdure("support", "small", "--output", tmp_path / "out.tar.gz")
    files = contents(tmp_path / "out.tar.gz")
    assert f": {len(files)} files, " in printed
    assert name not in files
    assert f"| `{name}` | - | log of node-0, attempt 1.1: cannot be read: " in files["CONTENTS.md"]
    assert "logs/p0001-a0001/node-0/npu-smi.txt" in files


def test_an_archive_that_cannot_be_written_is_an_input_error(run, tmp_path, capsys):
    line = error_line(capsys, "support", "small", "--output", tmp_path / "none" / "out.tar.gz")
    assert "--output" in line
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_run_that_never_started_has_no_archive(job, capsys):
    assert "has not been started" in error_line(capsys, "support", "small")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["one ", "two"], b"one two"),
        ([], b""),
        (["a" * 9, "b" * 9, "c" * 9], b"[without the first 9 bytes]\n" + b"b" * 9 + b"c" * 9),
        (["a" * 50], b"a" * 50),
        (["a", "b" * 50], b"[without the first 1 byte]\n" + b"b" * 50),
    ],
)
def test_the_log_of_a_living_attempt_keeps_its_end_and_says_what_is_left_out(pieces, text):
    assert end_of(pieces, limit_bytes=20) == text
