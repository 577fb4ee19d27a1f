"""What a run can be made of: any command, any corpus, any store, any wrapping."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.process.harness import RECIPES, TEXT
from tests.waiting import wait_for

pytestmark = pytest.mark.process


def losses(folder) -> dict[int, float]:
    """What the script logged, the newest entry of an iteration counting."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def test_an_unchanged_script_runs_as_a_command_is_killed_and_comes_back(bench, tmp_path):
    out = tmp_path / "out"
    job = {
        "run_id": "command",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": [sys.executable, str(RECIPES / "nano.py"), str(out), "40"]},
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 1, "grace_s": 2},
    }
    running = bench.start(job)
    wait_for(lambda: (out / "losses.jsonl").exists() and len(losses(out)) >= 12, what=running.out)
    (script,) = [p for p in running.local.processes() if "nano.py" in " ".join(p.cmdline())]
    script.send_signal(signal.SIGKILL)
    wait_for(lambda: len(losses(out)) >= 25, what=running.out)
    assert running.local.kill_node("node-0")
    assert running.finish() == 0, running.out

    plain = tmp_path / "plain"
    psutil.Popen(
        [sys.executable, str(RECIPES / "nano.py"), str(plain), "40"],
        env={"MA_SCHEDULE_CNT": "0", "MA_PROC_START_CNT": "0", "MA_NUM_HOSTS": "0"},
    ).wait()
    assert losses(out) == losses(plain)
    assert running.rungs() == ["in_place_restart", "job_reschedule_isolated"]
    assert "completed: the command has ended well" in running.out
    assert "ETTR not known" in running.out
    starts = running.worker_lines("start ")
    assert sorted(starts) == [
        "start 1.1 hosts 1 rank False",
        "start 1.2 hosts 1 rank False",
        "start 2.1 hosts 1 rank False",
    ]
    running.leave_nothing()


@pytest.mark.long
def test_torchrun_as_the_command_is_stopped_with_everything_it_started(bench, tmp_path):
    marker = tmp_path / "alive"
    program = tmp_path / "two.py"
    program.write_text(
        "import os, time, pathlib\n"
        f"pathlib.Path({str(marker)!r} + os.environ['RANK']).touch()\n"
        "time.sleep(600)\n"
    )
    job = {
        "run_id": "torchrun",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {
            "command": [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=${MA_NUM_HOSTS}",
                "--node_rank=${VC_TASK_INDEX}", "--nproc_per_node=${MA_NUM_GPUS}",
                "--master_addr=${MASTER_ADDR}", "--master_port=${MASTER_PORT}", str(program),
            ]
        },
        "engine": {"nodes": 1, "slots_per_node": 2, "spares": 0, "grace_s": 5},
        "restart": {"in_place": False, "unconditional": False, "spare_wait_s": 0},
    }  # fmt: skip
    running = bench.start(job)
    wait_for(lambda: len(list(tmp_path.glob("alive*"))) == 2, what=running.out)
    (rank_1,) = running.local.rank(1)
    rank_1.kill()
    assert running.finish() == 1
    (attempt,) = running.history.attempts
    assert attempt.ended.fault.fault_class == "native_crash"
    assert "(exitcode: -9) local_rank: 1" in attempt.ended.fault.evidence
    running.leave_nothing()


def corpus_of_every_kind(folder) -> list[str]:
    rows = [{"text": f"{i} {TEXT}"} for i in range(120)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode() * 120))
    pq.write_table(pa.Table.from_pylist(rows), folder / "c.parquet")
    return [str(folder / name) for name in ("a.jsonl.zst", "b.txt.gz", "c.parquet")]


@pytest.mark.long
def test_an_own_corpus_in_every_form_trains_the_reference_model(bench, tmp_path):
    job = bench.pair("own-corpus", steps=12, worker={}, env={})
    job["data"] = {"sources": corpus_of_every_kind(tmp_path), "num_workers": 1}
    job["precision"] = "bf16"
    job["batch"] = {"global_batch_size": 8, "micro_batch_size": 2}
    running = bench.start(job)
    assert running.finish() == 0, running.out
    curve = running.curve()
    assert list(curve) == list(range(1, 13))
    assert curve[12] < curve[1]
    assert "tokens/s, MFU" in running.out
    assert (running.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_damaged_token_shard_is_redone_alone_when_the_run_is_started_again(bench):
    job = bench.pair("damaged", steps=2000, env={"PACE_S": "0.2"})
    job["storage"] = {"address": f"file://{bench.home}/store-damaged"}
    first = bench.start(job)
    first.reach(2)
    first.kill_supervisor()
    for process in first.local.processes():
        process.kill()
    shards = sorted((bench.home / "store-damaged" / "data" / "shards").rglob("*"))
    shards = [path for path in shards if path.is_file()]
    assert len(shards) > 2
    before = {path: path.stat().st_mtime_ns for path in shards}
    content = bytearray(shards[1].read_bytes())
    content[7] ^= 1
    shards[1].write_bytes(content)

    second = bench.start(job)
    second.reach(first.step() + 1)
    data = second.history.data
    assert [(d.skipped, d.written_shards, d.damaged_shards) for d in data[1:]] == [(False, 1, 1)]
    changed = [path for path in shards if path.stat().st_mtime_ns != before[path]]
    assert changed == [shards[1]]
    second.process.send_signal(signal.SIGINT)
    assert second.finish(hurry=False) == 1
    second.leave_nothing()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """A real HTTP server that speaks S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.long
def test_a_run_on_an_object_store_survives_a_killed_worker(
    bench, s3, undisturbed_pair, monkeypatch
):
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-key")
    boto3.client("s3", endpoint_url=s3, region_name="us-east-1").create_bucket(Bucket="pretrain")
    storage = {"address": "s3://pretrain/team", "endpoint": s3, "region": "us-east-1"}
    storage = {**storage, "addressing_style": "path"}
    restart = {"process_replace": False}
    running = bench.start(bench.pair("object-store", storage=storage, restart=restart))
    running.reach(12)
    assert len(running.local.kill_rank(1)) == 1
    running.complete(undisturbed_pair)
    assert running.rungs() == ["in_place_restart"]
    kept = [p for p in bench.home.rglob("*") if p.is_file() and "object-store" in str(p)]
    assert [p for p in kept if b"very-secret-key" in p.read_bytes()] == []


@pytest.mark.long
def test_keys_may_come_from_a_prefect_block(bench, s3, monkeypatch):
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    client = boto3.client(
        "s3",
        endpoint_url=s3,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    client.create_bucket(Bucket="with-block")
    save = (
        "from perdure.tasks.credentials import ObjectStoreCredentials\n"
        "ObjectStoreCredentials(access_key='block-id', secret_key='block-secret').save('obs')\n"
    )
    subprocess.run([sys.executable, "-c", save], env=bench.environment, check=True, timeout=240)
    storage = {
        "address": "s3://with-block/x", "endpoint": s3, "region": "us-east-1",
        "addressing_style": "path", "credentials_block": "obs",
    }  # fmt: skip
    job = bench.pair("with-block", steps=4, storage=storage, env={"PACE_S": "0"})
    running = bench.start(job)
    assert running.finish() == 0, running.out
    found = client.list_objects_v2(Bucket="with-block", Prefix="x/runs/with-block/checkpoints/")
    assert found["KeyCount"] == 3, "two shards and their manifest"
    stored = [p for p in running.folder.rglob("*") if p.is_file()]
    assert [p for p in stored if b"block-secret" in p.read_bytes()] == []

    missing = bench.start(
        {**job, "run_id": "no-block", "storage": {**storage, "credentials_block": "nope"}}
    )
    assert missing.finish() == 2
    assert "no such Prefect block" in missing.out


DEVICE_LOG = """\
import os, pathlib
folder = pathlib.Path(os.environ["ASCEND_PROCESS_LOG_PATH"]) / "debug" / "plog"
if os.environ["MA_SCHEDULE_CNT"] == "1" and os.environ["VC_TASK_INDEX"] == "1":
    folder.mkdir(parents=True)
    (folder / "plog-1_20261121.log").write_text(
        "[ERROR] RUNTIME(1,python):2026-11-21-10:00:00.000.000 [engine.cc:1]1 Report:"
        "Device[0] lost heartbeat.\\n"
    )
    raise SystemExit("RuntimeError: NPU function error: synchronize, error code is 507011")
"""


@pytest.mark.long
def test_a_device_log_gives_the_reason_and_its_node_is_replaced(bench, tmp_path):
    program = tmp_path / "on_a_bad_device.py"
    program.write_text(DEVICE_LOG)
    job = {
        "run_id": "device-log",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": [sys.executable, str(program)]},
        "engine": {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 2},
    }
    running = bench.start(job)
    running.complete()
    (ended, _) = running.history.attempts
    fault = ended.ended.fault
    assert (fault.fault_class, fault.node, fault.rank) == ("device_lost", "node-1", None)
    assert "Device[0] lost heartbeat" in fault.evidence
    assert fault.recoverable_by == "isolate"
    assert any("507011" in other.evidence for other in ended.ended.runners_up)
    assert running.rungs() == ["job_reschedule_isolated"]
    assert running.history.isolated == ("node-1",)
