"""Job files: what is accepted, what is refused and in which words."""

from __future__ import annotations

import gzip
import json
import re

import pytest
import yaml

from perdure.cli import main
from perdure.training.config.job import Job, parse_job
from perdure.training.config.job_file import load_job
from perdure.training.config.recommendations import departures
from perdure.training.errors import InputError
from perdure.training.recovery.rungs import RUNGS, Rung, Scope
from tests.jobs import job_document


@pytest.fixture
def good(tmp_path) -> dict:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a line of text\n" * 200)
    return {
        "run_id": "good",
        "storage": {"address": f"file://{tmp_path}/store"},
        "steps": 10,
        "data": {"sources": [str(corpus)]},
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_len": 16},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    }


def write(tmp_path, document) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return str(path)


def changed(document: dict, key: str, value) -> dict:
    copy = json.loads(json.dumps(document))
    *parents, leaf = key.split(".")
    target = copy
    for parent in parents:
        target = target.setdefault(parent, {})
    if value is ...:
        del target[leaf]
    else:
        target[leaf] = value
    return copy


@pytest.fixture
def error_of(capsys):
    """The one line of a command that is refused with exit code 2."""

    def error_of(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        err: str = capsys.readouterr().err
        assert (exit_.value.code, err.count("\n")) == (2, 1), err
        return err

    return error_of


# (field, value, words that the one line must hold: the field, and what is allowed)
WRONG = [
    ("run_id", ..., ["run_id", "missing"]),
    ("run_id", "Has Spaces", ["run_id", "Has Spaces", "lower-case letters, digits and hyphens"]),
    ("run_id", "x" * 64, ["run_id", "up to 63 lower-case letters"]),
    ("colour", "red", ["colour", "no such field"]),
    ("model.hiden_size", 64, ["model.hiden_size", "did you mean hidden_size?"]),
    ("num_layers", 4, ["num_layers", "no such field; did you mean model.num_layers?"]),
    ("stop", 4, ["stop: no such field; did you mean steps?"]),
    ("engine.spare", 1, ["engine.spare: no such field; did you mean spares?"]),
    ("restart", 5, ["restart", "5", "section"]),
    ("worker.command", "python x.py", ["worker.command", "python x.py", "list"]),
    ("model.depth", 4, ["model.depth", "no such field"]),
    ("steps", -5, ["steps", "-5", "greater than or equal to 1"]),
    ("steps", "many", ["steps", "many", "integer"]),
    ("steps", 0, ["steps", "0", "greater than or equal to 1"]),
    ("seed", -1, ["seed", "-1"]),
    ("storage", ..., ["storage", "missing"]),
    ("storage.address", "ftp://host/x", ["storage.address", "ftp", "file://", "s3://"]),
    ("storage.address", "file://relative", ["storage.address", "file://"]),
    ("storage.address", "s3://", ["storage.address", "bucket"]),
    ("storage.endpoint", "http://127.0.0.1:1", ["storage", "endpoint"]),
    ("storage.secret_key", "hunter2", ["storage", "key"]),
    ("data", ..., ["data", "missing"]),
    ("data.sources", [], ["data.sources", "at least 1"]),
    ("data.sources", ["/no/such/corpus.txt"], ["data.sources", "/no/such/corpus.txt"]),
    ("data.num_workers", -1, ["data.num_workers", "-1"]),
    ("data.shard_size_bytes", 10, ["data.shard_size_bytes", "10", "4096"]),
    ("tokenizer.kind", "bpe", ["tokenizer.kind", "bpe", "byte"]),
    ("tokenizer.kind", "file", ["tokenizer", "path"]),
    ("model.num_heads", 3, ["hidden_size=32", "num_heads=3", "divisible"]),
    ("model.num_kv_heads", 3, ["num_heads=2", "num_kv_heads=3"]),
    ("model.dropout", 1.5, ["model.dropout", "1.5", "less than 1"]),
    ("batch.global_batch_size", 6, ["global_batch_size=6", "divisible", "4 x 2"]),
    ("batch.micro_batch_size", 3, ["global_batch_size=8", "divisible", "4 x 3"]),
    ("engine.nodes", 3, ["divisible", "6 x 2"]),
    ("engine.nodes", 0, ["engine.nodes", "0"]),
    ("engine.kind", "magic", ["engine.kind", "magic", "local"]),
    ("parallelism.kind", "zero3", ["parallelism.kind", "zero3", "fsdp2"]),
    ("parallelism", {"kind": "hsdp"}, ["hsdp", "replicas"]),
    ("parallelism", {"kind": "hsdp", "replicas": 3}, ["replicas=3", "world size 4"]),
    ("parallelism.kind", "data_parallel", ["data_parallel", "must be 1"]),
    ("parallelism", {"kind": "fsdp2", "bucket_cap_mb": 50}, ["bucket_cap_mb=50", "kind=ddp"]),
    ("parallelism.bucket_cap_mb", 0, ["parallelism.bucket_cap_mb", "0", "greater than"]),
    (
        "data",
        {"sources": ["x"], "num_workers": 0, "persistent_workers": True},
        ["data", "persistent_workers=true", "num_workers=0"],
    ),
    ("parallelism.tensor", 0, ["parallelism.tensor", "0", "greater than or equal to 1"]),
    ("parallelism.tensor", 2, ["parallelism", "tensor", "built-in trainer", "worker.recipe"]),
    ("parallelism.tensor", 3, ["parallelism", "tensor=3 x pipeline=1", "number of ranks 4"]),
    ("parallelism", {"kind": "fsdp2", "optimizer_weight_shard_size": 2}, ["fsdp2", "kind=ddp"]),
    ("parallelism.order", "tp-cp-ep-pp-dp", ["order", "pipeline=1", "leave it out"]),
    ("precision", "fp8", ["precision", "fp8", "bf16"]),
    ("optimizer.lr", 0, ["optimizer.lr", "0", "greater than 0"]),
    ("optimizer.betas", [0.9, 1.5], ["betas", "1.5", "[0, 1)"]),
    ("optimizer.warmup_steps", 11, ["warmup_steps=11", "steps=10"]),
    ("checkpoint.every_steps", 0, ["checkpoint.every_steps", "0"]),
    ("checkpoint.keep_last", 0, ["checkpoint.keep_last", "0"]),
    ("restart.max_restarts", -1, ["restart.max_restarts", "-1", "0"]),
    ("restart.max_restarts", 129, ["restart.max_restarts", "129", "128"]),
    ("restart.pod_retries", 200, ["restart.pod_retries", "200", "128"]),
    ("restart.hang_timeout_s", -3, ["restart.hang_timeout_s", "-3"]),
    ("worker.recipe", "not a recipe", ["worker.recipe", "module:function"]),
    ("worker.recipe", "nowhere.to.find:main", ["worker.recipe", "nowhere.to.find"]),
    ("worker.recipe", "perdure:main", ["worker.recipe", "Perdure's package has no 'main'"]),
    ("model.seq_len", 3001, ["model.seq_len: 3001", "3,002 tokens", "has 3,001"]),
    ("storage.address", "/mnt/sfs", ["storage.address", "write file:///mnt/sfs"]),
    ("worker", {"recipe": "a:b", "command": ["x"]}, ["recipe", "command", "exclude"]),
    ("worker", {"script": ["a.py"], "command": ["x"]}, ["script", "command", "exclude"]),
    ("worker", {"script": ["a.py"], "per": "device"}, ["per=device", "script", "anyway"]),
    ("worker", {"script": ["no_such.py"]}, ["worker.script", "no_such.py", "no file"]),
    ("worker", {"command": ["x"], "preload": ["json"]}, ["preload", "command"]),
    ("worker", {"command": ["x"], "integration": "megatron"}, ["integration", "worker.script"]),
    ("worker", {"recipe": "a:b", "integration": "megatron"}, ["integration", "worker.script"]),
    ("worker", {"script": ["x.py"], "integration": "lightning"}, ["integration", "megatron"]),
    ("worker", {"script": ["x.py"], "python": "/usr/bin/python"}, ["integration=mindspore"]),
    ("worker", {"script": ["x.py"], "integration": "megatron", "python": "/p"}, ["mindspore"]),
    (
        "worker",
        {"recipe": None, "script": [__file__], "integration": "mindspore", "python": "/no/python"},
        ["worker.python", "/no/python", "no program"],
    ),
    ("worker.preload", ["a b"], ["worker.preload", "a b", "module"]),
    ("worker.restart_codes", [0], ["worker.restart_codes", "0", "1 to 255"]),
    ("worker.restart_codes", [85, 256], ["worker.restart_codes", "256", "1 to 255"]),
    ("worker.restart_codes", ["soon"], ["worker.restart_codes", "integer"]),
    ("worker.script", [], ["worker.script", "at least 1"]),
    ("worker.command", ["no-such-program"], ["worker.command", "no-such-program"]),
    ("worker.cwd", "/no/such/folder", ["worker.cwd", "/no/such/folder"]),
    ("comm.buffsize_mb", 209715200, ["comm.buffsize_mb", "209715200", "in MB: write 200"]),
    ("comm.connect_timeout_s", 10, ["comm.connect_timeout_s", "10", "120"]),
    ("comm.master_port", 60_010, ["master_port=60010", "60000", "60031"]),
    ("comm.op_retry", {"enabled": True}, ["op_retry", "chip", "a3"]),
    (
        "comm",
        {"op_retry": {"enabled": True}, "chip": "a3", "mc2": True, "watchdog": False},
        ["op_retry", "mc2", "exclude"],
    ),
    (
        "comm",
        {"op_retry": {"enabled": True}, "chip": "a3", "watchdog": True},
        ["op_retry", "watchdog", "exclude"],
    ),
    ("env", {"MA_JOB_DIR": "/x"}, ["env", "MA_JOB_DIR", "another name"]),
    ("env", {"RANK": "0"}, ["env", "RANK"]),
    ("env", {f"V{i}": "1" for i in range(101)}, ["env", "101", "100"]),
    ("env", {"HCCL_BUFFSIZE": "209715200"}, ["HCCL_BUFFSIZE", "209715200", "in MB: write 200"]),
    ("env", {"HCCL_CONNECT_TIMEOUT": "2m"}, ["HCCL_CONNECT_TIMEOUT", "2m", "seconds"]),
    ("env", {"HCCL_EVENT_TIMEOUT": "100"}, ["HCCL_EVENT_TIMEOUT", "100", "1836"]),
    ("env", {"MASTER_PORT": "29510"}, ["MASTER_PORT", "comm.master_port"]),
    ("env", {"MASTER_ADDR": "10.0.0.1"}, ["MASTER_ADDR", "another name"]),
    ("env", {"HCCL_OP_RETRY_ENABLE": "L1:1"}, ["HCCL_OP_RETRY_ENABLE", "comm.op_retry"]),
]


@pytest.mark.parametrize(
    ("key", "value", "words"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)]
)
def test_a_wrong_job_gives_one_line_and_exit_code_2_and_starts_nothing(
    key, value, words, good, tmp_path, error_of, perdure_home
):
    err = error_of("run", write(tmp_path, changed(good, key, value)))
    assert [word for word in words if word not in err] == [], err
    assert "hunter2" not in err
    assert not perdure_home.exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("[1, 2]", "mapping"),
        ("a: [unclosed", "not YAML"),
        ("", "mapping"),
        ("run_id: a\nsteps: 1\nsteps: 2\n", "job.yaml: steps is given twice, in lines 2 and 3"),
    ],
)
def test_a_file_that_is_no_job_gives_one_line_and_exit_code_2(content, word, tmp_path, error_of):
    assert word in error_of("run", write(tmp_path, content))


def test_a_job_file_that_is_not_there_gives_one_line_and_exit_code_2(tmp_path, error_of):
    assert "cannot be read" in error_of("run", str(tmp_path / "none.yaml"))


def test_an_empty_corpus_and_a_store_that_cannot_be_written_are_refused_before_anything_starts(
    good, tmp_path, error_of
):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    job = write(tmp_path, changed(good, "data.sources", [str(empty)]))
    assert "empty" in error_of("run", job)
    job = write(tmp_path, changed(good, "storage.address", f"file://{empty}/store"))
    assert "storage.address" in error_of("run", job)


def test_an_s3_store_that_no_server_serves_is_refused_in_one_line(
    good, tmp_path, error_of, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    storage = {
        "address": "s3://bucket/x",
        "endpoint": "http://127.0.0.1:9",
        "region": "r",
        "connect_timeout_s": 0.2,
        "read_timeout_s": 0.2,
    }
    err = error_of("run", write(tmp_path, changed(good, "storage", storage)))
    assert "storage.address" in err
    assert "very-secret" not in err


@pytest.mark.parametrize("override", ["steps", "=3", "model=3", "steps=[", "model={a: 1, a: 2}"])
def test_a_wrong_override_is_refused(override, good, tmp_path, error_of):
    assert error_of("preflight", write(tmp_path, good), "--set", override)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_good_job_passes_preflight_also_with_a_compressed_corpus(
    good, tmp_path, capsys, is_compressed
):
    path = tmp_path / "c.txt.gz"
    path.write_bytes(gzip.compress(b"text " * 1000))
    job = changed(good, "data.sources", [str(path)]) if is_compressed else good
    with pytest.raises(SystemExit) as exit_:
        main(["preflight", write(tmp_path, job), "--set", "preflight.nodes=false"])
    assert exit_.value.code == 0
    assert "world size 4" in capsys.readouterr().out


def test_overrides_reach_nested_fields(good, tmp_path):
    job = load_job(
        __import__("pathlib").Path(write(tmp_path, good)),
        ["steps=77", "model.num_layers=3", "checkpoint.every_steps=5"],
    )
    assert (job.steps, job.model.num_layers, job.checkpoint.every_steps) == (77, 3, 5)


def test_a_command_job_needs_neither_corpus_nor_model(tmp_path):
    job = parse_job(
        {
            "run_id": "c",
            "storage": {"address": f"file://{tmp_path}"},
            "worker": {"command": ["python", "train.py"]},
        }
    )
    assert job.world_size == 2


COPIES = {"checkpoint": {"partner_copies": 1}, "restart": {"pod_retries": 1}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"nodes": 1}}, "needs more than 1 nodes, engine.nodes=1"),
        ({"checkpoint": {"partner_copies": 2}}, "needs more than 2 nodes, engine.nodes=2"),
        ({"checkpoint": {"partner_copies": 3}}, "checkpoint.partner_copies"),
        ({"restart": {"pod_retries": 0}}, "needs restart.pod_retries of 1 or more"),
        (
            {"checkpoint": {"partner_copies": 1, "host_memory": False}},
            "partner_copies=1 needs host_memory=true",
        ),
        ({"worker": {"command": ["true"]}}, "partner_copies=1 is for sessions"),
    ],
)
def test_copies_on_partner_nodes_that_could_not_be_are_refused_in_one_line(
    changes, words, good, tmp_path, error_of
):
    assert words in error_of("run", write(tmp_path, {**good, **COPIES, **changes}))


def test_copies_on_partner_nodes_are_off_unless_asked_for_and_told_with_their_memory(good):
    assert parse_job(good).checkpoint.partner_copies == 0
    assert parse_job(good).checkpoint.shares_in_memory == 2
    assert parse_job({**good, **COPIES}).checkpoint.shares_in_memory == 5


def test_the_schema_describes_every_field_for_a_form(capsys):
    with pytest.raises(SystemExit):
        main(["schema"])
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Job.model_fields)
    sections = [schema, *schema["$defs"].values()]
    undescribed = [
        name
        for section in sections
        for name, field in section.get("properties", {}).items()
        if "description" not in field
    ]
    assert undescribed == []


@pytest.mark.parametrize(
    ("num_parameters", "checkpoint", "departs"),
    [
        (10**6, {}, False),
        (10**6, {"every_epochs": 1}, False),
        (10**6, {"every_steps": 500}, True),
        (5 * 10**9, {"every_steps": 500}, False),
        (5 * 10**9, {"every_steps": 1000}, True),
        (2 * 10**10, {"every_steps": 150}, False),
        (2 * 10**10, {"every_steps": 250}, True),
        (10**6, {"keep_last": 2}, True),
    ],
)
def test_departures_from_the_recommended_settings_are_named(
    num_parameters, checkpoint, departs, good
):
    job = parse_job(changed(good, "checkpoint", checkpoint))
    of_saves = [one for one in departures(job, num_parameters) if one.startswith("checkpoint")]
    assert bool(of_saves) is departs


@pytest.mark.parametrize(
    ("address", "is_named"),
    [
        ("file:///tmp/store", True),
        ("file:///var/tmp/store", True),
        ("file:///dev/shm/store", True),
        ("file:///tmpfs/store", False),
        ("file:///data/tmp", False),
        ("s3://tmp/store", False),
    ],
)
@pytest.mark.parametrize("worker", [{}, {"command": ["true"]}])
def test_a_store_in_a_temporary_folder_is_named(good, address, is_named, worker):
    job = parse_job({**good, "storage": {"address": address}, "worker": worker})
    assert any("storage.address" in line for line in departures(job, 10**6)) is is_named


def test_no_interval_is_recommended_for_a_model_that_is_not_the_job_s(good, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def main(job): ...\n")
    own = changed(good, "worker", {"recipe": "mine:main", "cwd": str(tmp_path)})
    for document, is_known in ((good, True), (own, False)):
        job = write(tmp_path, changed(document, "checkpoint.every_steps", 7))
        with pytest.raises(SystemExit):
            main(["preflight", job, "--set", "preflight.nodes=false"])
        assert ("M parameters" in capsys.readouterr().err) is is_known


def test_a_corpus_that_is_no_text_is_named_before_the_run(good, tmp_path, capsys):
    noise = tmp_path / "noise.txt"
    noise.write_bytes(bytes(range(256)) * 4096)
    job = write(tmp_path, changed(good, "data.sources", [str(noise)]))
    with pytest.raises(SystemExit):
        main(["preflight", job, "--set", "preflight.nodes=false"])
    assert f"perdure: data.sources: {noise}: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["preflight", job, "--set", "preflight.nodes=false", "--json"])
    (line,) = (w for w in json.loads(capsys.readouterr().out)["warnings"] if "noise" in w)
    assert "are not UTF-8 text" in line


def test_a_command_is_started_once_per_node_or_once_per_device():
    def job(**worker):
        engine = {"nodes": 3, "slots_per_node": 4}
        return parse_job(job_document(worker=worker, engine=engine))

    assert job(command=["train"]).world_size == 3
    assert job(command=["train"], per="device").world_size == 12
    with pytest.raises(InputError, match=r"per=device is for worker\.command"):
        job(per="device")


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["pdsh", "-w", "node[1-4]", "python", "train.py"], "`pdsh`"),
        (["/usr/bin/ssh", "node-1", "python", "train.py"], "`ssh`"),
        (["deepspeed", "--hostfile=/job/hosts", "train.py"], "`deepspeed --hostfile=/job/hosts`"),
        (["mpirun", "-np", "16", "--hostfile", "hosts", "./train"], "`mpirun --hostfile`"),
        (["bash", "launch.sh"], "`ssh`"),
        (["mpirun", "-np", "8", "python", "train.py"], None),
        (["python", "train.py", "--host", "127.0.0.1", "--ssh-key", "x"], None),
        (["bash", "quiet.sh"], None),
    ],
)
def test_a_launcher_that_reaches_other_hosts_is_named(tmp_path, command, launcher):
    (tmp_path / "launch.sh").write_text('for h in $HOSTS; do ssh "$h" python train.py & done\n')
    (tmp_path / "quiet.sh").write_text("# like ssh, but here\npython train.py  # no ssh\n")
    job = parse_job(job_document(worker={"command": command, "cwd": str(tmp_path)}))
    lines = [line for line in departures(job, None) if "other hosts" in line]
    assert len(lines) == (launcher is not None)
    assert launcher is None or f"{launcher} starts processes on other hosts" in lines[0]


ON_CLUSTER = {"kind": "kubernetes", "image": "perdure:1"}


@pytest.mark.parametrize(
    ("engine", "restart", "pod_retries"),
    [
        (ON_CLUSTER, {}, 3),
        (ON_CLUSTER, {"node_replace": False}, 3),
        (ON_CLUSTER, {"pod_retries": 0}, 0),
        (ON_CLUSTER, {"pod_retries": 7}, 7),
        (ON_CLUSTER, {"max_restarts": 0}, 0),
        (ON_CLUSTER, {"from_platform": {"pod-rescheduling": "off"}}, 0),
        ({}, {}, 0),
    ],
    ids=str,
)
def test_a_cluster_replaces_a_lost_pod_alone_unless_the_job_says_how_often(
    tmp_path, engine, restart, pod_retries
):
    job = parse_job(job_document(tmp_path, engine=engine, restart=restart))
    assert job.restart.pod_retries == pod_retries
    assert parse_job(job.model_dump(mode="json")) == job


MINDSPORE = {"script": ["x.py"], "integration": "mindspore", "python": "/envs/ms/bin/python"}


@pytest.mark.parametrize(
    ("section", "value", "name"),
    [
        ("restart", {"numeric_retry": True}, "restart.numeric_retry"),
        ("restart", {"data_skipping": True}, "restart.data_skipping"),
        ("init_from", {"run": "another"}, "init_from"),
        (
            "drill",
            {"faults": [{"kind": "link", "rank": 0, "step": 2}]},
            "drill.faults[0].kind=link",
        ),
    ],
)
def test_ranks_without_torch_are_refused_what_needs_it(good, section, value, name):
    document = {**good, "worker": MINDSPORE, "data": None, section: value}
    with pytest.raises(InputError, match=re.escape(name) + ".*is not for worker.integration"):
        parse_job(document)


def test_no_rung_of_a_mindspore_job_is_inside_its_processes(good):
    job = parse_job({**good, "worker": MINDSPORE, "data": None})
    possible = job.possible(frozenset(Rung))
    assert possible == {rung for rung in Rung if RUNGS[rung].scope is not Scope.PROCESSES}
    assert Rung.IN_PLACE_RESTART in possible
    assert parse_job(good).possible(frozenset(Rung)) == frozenset(Rung)
