"""`perdure logs`: the logs of a run in its store."""

from __future__ import annotations

import gzip
import json

import pytest
from typer.testing import CliRunner

from perdure.cli import app
from perdure.storage.address import open_store
from perdure.training.agent.log_collection import COLLECTED_FILE
from perdure.training.reporting.fault_report import HANG_REPORT
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.wire.logs import Collected, CollectedFile, logs_prefix
from tests.jobs import small_job
from tests.unit.journal.histories import BEGINNING, over, started
from tests.unit.perdure.commands import append, error_line, perdure

GONE = "checkpoint-server.log: gone"


@pytest.fixture
def job(tmp_path, perdure_home):
    job = small_job(tmp_path, run_id="small", engine={"nodes": 2, "slots_per_node": 1})
    remember_job(perdure_home, job)
    return job


@pytest.fixture
def logs(job, perdure_home):
    """Two attempts on two nodes; of the second, node-1 was lost."""
    store = open_store(job.storage)
    append(RunHandle(job, home=perdure_home), *BEGINNING, over(1), started(2), over(2))
    for attempt in (1, 2):
        for rank in (0, 1) if attempt == 1 else (0,):
            prefix = f"{logs_prefix('small', 1, attempt)}node-{rank}/"
            key = f"{prefix}rank-{rank:05d}.stderr.log.gz"
            store.put(key, gzip.compress(f"rank {rank} in attempt {attempt}\n".encode()))
            file = CollectedFile(key=key, size_bytes=10, log_bytes=20, cut_bytes=2000 * rank)
            index = Collected(placement=1, attempt=attempt, is_done=True, files=(file,),
                              problems=(GONE,) if rank else ())  # fmt: skip
            store.put(prefix + COLLECTED_FILE, index.model_dump_json().encode())
    return store


def printed(*arguments):
    return perdure("logs", "small", *arguments)


def test_without_a_rank_logs_are_listed_with_what_is_missing(logs):
    text = printed()
    assert "rank-00001.stderr.log" in text
    assert "2.0 kB" in text
    assert "attempt 1.2: node-1 was lost or did not finish uploading its logs" in text
    assert "attempt 1.1: node-1: checkpoint-server.log: gone" in text


def test_a_script_gets_the_list_as_objects(logs):
    document = json.loads(printed("--json", "--attempt", "1.1"))
    assert [(row["rank"], row["node"], row["cut_bytes"]) for row in document["logs"]] == [
        (0, "node-0", 0),
        (1, "node-1", 2000),
    ]
    assert document["gaps"] == ["attempt 1.1: node-1: checkpoint-server.log: gone"]


def test_a_ranks_logs_are_those_of_the_newest_attempt_that_has_them(logs):
    assert printed("--rank", "0") == (
        "==> node-0/rank-00000.stderr.log, attempt 1.2 <==\nrank 0 in attempt 2\n\n"
    )
    assert "rank 1 in attempt 1" in printed("--rank", "1")
    assert "without its first 2.0 kB" in printed("--rank", "1")
    assert "rank 0 in attempt 1" in printed("--rank", "0", "--attempt", "1.1")
    assert "rank 0 in attempt 2" in printed("--file", "rank-00000.stderr.log")


def test_what_is_not_there_is_an_input_error(logs, capsys):
    assert "ranks: [0, 1]" in error_line(capsys, "logs", "small", "--rank", 7)
    assert "--attempt: 'two'" in error_line(capsys, "logs", "small", "--attempt", "two")


def test_the_stacks_of_a_hang_are_listed_and_printed(logs, job):
    logs.put(f"{logs_prefix('small', 1, 2)}{HANG_REPORT}", b"rank 1 on node-1: stopped\n")
    assert HANG_REPORT in printed()
    rows = json.loads(printed("--json"))["logs"]
    assert [(row["attempt"], row["node"]) for row in rows if row["file"] == HANG_REPORT] == [
        (2, None)
    ]
    assert printed("--file", HANG_REPORT) == (
        "==> hang.txt, attempt 1.2 <==\nrank 1 on node-1: stopped\n\n"
    )


def test_what_the_ranks_of_a_node_wrote_is_printed_by_its_name(logs):
    assert "rank 1 in attempt 1" in printed("--node", "node-1")
    assert "rank 0 in attempt 2" in printed("--node", "node-0")


def test_the_ranks_of_a_command_have_one_log_for_each_node(tmp_path, perdure_home, capsys):
    job = small_job(tmp_path, run_id="order", worker={"command": ["true"]})
    remember_job(perdure_home, job)
    prefix = f"{logs_prefix('order', 1, 1)}node-1/"
    open_store(job.storage).put(f"{prefix}command-00001.stdout.log.gz", gzip.compress(b"out\n"))
    open_store(job.storage).put(f"{prefix}agent.log.gz", gzip.compress(b"of the agent\n"))
    text = perdure("logs", "order", "--node", "node-1")
    assert "out" in text
    assert "of the agent" not in text
    line = error_line(capsys, "logs", "order", "--rank", "1")
    assert "share one log on each node: use --node, such as node-0" in line


def test_a_rank_that_wrote_nothing_is_no_error(logs):
    done = CliRunner().invoke(app, ["logs", "small", "--rank", "1", "--attempt", "1.2"])
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "perdure: rank 1 left no output in the logs that are kept\n"


def test_a_run_without_logs_prints_so(job):
    assert "the store has no logs" in printed()
