"""What preflight says about recovery: platform entries, and what the layout allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.preflight import size_text
from perdure.storage.address import make_store, open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.manifest import Manifest
from perdure.training.config.job import Job, parse_job
from perdure.training.engines.local import LocalEngine
from perdure.training.errors import EngineError, InputError
from perdure.training.platforms.forms import Platform
from perdure.training.platforms.printing import print_platform
from perdure.training.preflight import job as job_checks
from perdure.training.preflight.job import check_job, check_without_store, recovery_notes
from perdure.training.recovery.rungs import Policy
from perdure.training.supervisor.finishing import no_replica_of
from tests.jobs import small_job

ROOT = Path(__file__).parents[3]


@pytest.fixture
def job(tmp_path):
    def build(**sections) -> Job:
        fields = {"worker": {"recipe": "mine:main"}, "batch": {"global_batch_size": 16}}
        return small_job(tmp_path, **{**fields, **sections})

    return build


def lines(job: Job, *, warnings: bool = False) -> list[str]:
    return [note.line for note in recovery_notes(job) if note.is_warning is warnings]


def test_an_engine_that_cannot_name_its_nodes_is_reported_before_anything_starts(job, monkeypatch):
    def unreachable(_engine: LocalEngine) -> None:
        raise EngineError("no answer from the cluster")

    monkeypatch.setattr(LocalEngine, "nodes", unreachable)
    with pytest.raises(InputError, match="engine: no answer from the cluster"):
        check_without_store(job())


@pytest.mark.parametrize(
    ("parallelism", "groups"),
    [
        ({"kind": "ddp"}, ((0, 1, 2, 3),)),
        ({"kind": "fsdp2"}, ((0,), (1,), (2,), (3,))),
        ({"kind": "hsdp", "replicas": 2}, ((0, 2), (1, 3))),
        ({"tensor": 2}, ((0, 2), (1, 3))),
        ({"pipeline": 2}, ((0, 1), (2, 3))),
        ({"pipeline": 2, "order": "tp-cp-ep-pp-dp"}, ((0, 2), (1, 3))),
        ({"tensor": 2, "context": 2}, ((0, 2), (1, 3))),
        ({"expert": 2}, ((0, 2), (1, 3))),
        ({"optimizer_weight_shard_size": 2}, ((0, 2), (1, 3))),
        ({"kind": "fsdp2", "tensor": 2}, ((0,), (1,), (2,), (3,))),
    ],
)
def test_the_layout_follows_from_the_wrapping_and_the_sizes(job, parallelism, groups):
    assert job(parallelism=parallelism).layout.replica_groups() == groups


def test_the_batch_is_shared_out_by_data_parallelism_alone(job):
    batch = {"global_batch_size": 6, "micro_batch_size": 3}
    assert job(parallelism={"tensor": 2}, batch=batch).layout.dp == 2
    with pytest.raises(InputError, match="divisible by world size x micro_batch_size = 4 x 3"):
        job(batch=batch)
    with pytest.raises(InputError, match="data-parallel size x micro_batch_size = 2 x 4"):
        job(parallelism={"tensor": 2}, batch={**batch, "micro_batch_size": 4})


def test_one_process_has_no_replicas(job):
    alone = job(parallelism={"kind": "data_parallel"}, engine={"nodes": 1, "slots_per_node": 1})
    assert alone.layout.copies == 1


def test_each_mechanism_has_a_line_with_the_copies(job):
    result = lines(job(parallelism={"kind": "hsdp", "replicas": 2}))
    assert "process_replace: possible, 2 copies of every shard: [0, 2] [1, 3]" in result
    assert [line.partition(":")[0] for line in result] == [
        "memory_retry",
        "process_replace",
        "end_of_life_checkpoint",
    ]


def test_without_replicas_a_default_is_a_note_and_a_request_a_warning(job):
    sharded = {"kind": "fsdp2"}
    assert lines(job(parallelism=sharded), warnings=True) == []
    requested = job(parallelism=sharded, restart={"process_replace": True, "memory_retry": False})
    (line,) = lines(requested, warnings=True)
    assert line.startswith("process_replace: not possible: ")
    assert "optimizer_weight_shard_size = 4 / 4 = 1, needs >= 2" in line
    assert "memory_retry: off (restart.memory_retry=false)" in lines(requested)


def test_a_request_in_a_platforms_form_is_a_request(job):
    requested = job(
        parallelism={"kind": "fsdp2"}, restart={"from_platform": {"HIGH_AVAILABILITY": "recover"}}
    )
    assert any(line.startswith("process_replace: not") for line in lines(requested, warnings=True))


def test_a_command_takes_no_part(job):
    result = lines(job(worker={"command": ["true"]}))
    assert all("not possible" in line for line in result)


def test_a_command_that_gives_its_layout_is_told_what_that_allows_a_recovery_of_its_own(job):
    def process_replace_line(**sizes) -> str:
        command_job = job(worker={"command": ["true"]}, parallelism=sizes)
        return next(line for line in lines(command_job) if line.startswith("process_replace"))

    assert "layout" not in process_replace_line()
    assert "(MindIO TFT) its layout allows: 2 copies of every shard: [0, 2] [1, 3]" in (
        process_replace_line(tensor=2)
    )
    sharded = process_replace_line(tensor=2, optimizer_weight_shard_size=2)
    assert "its layout does not allow: data_parallel / optimizer_weight_shard_size = 2 / 2 = 1" in (
        sharded
    )


def test_the_ladder_knows_of_a_command_only_the_replicas_that_its_sizes_show(job):
    command = {"command": ["true"]}
    assert no_replica_of(job(worker=command)) is None
    assert no_replica_of(job(worker=command, parallelism={"tensor": 2})) is None
    why = no_replica_of(job(worker=command, parallelism={"tensor": 4}))
    assert why == "no replica: data_parallel / optimizer_weight_shard_size = 1 / 1 = 1, needs >= 2"


def test_platform_entries_set_the_fields_of_the_restart_policy(job):
    entries = {"fault-tolerance/job-retry-num": "8", "MS_ENABLE_TFT": "{TTP:1,UCE:1,HCCE:1}"}
    moved = job(restart={"from_platform": entries, "delay_s": 1})
    assert (moved.restart.max_restarts, moved.restart.process_replace) == (8, False)
    assert "max_restarts=8: from fault-tolerance/job-retry-num='8'" in lines(moved)


def test_a_field_that_is_written_beats_what_a_list_leaves_out(job):
    entries = {"HIGH_AVAILABILITY": "retry"}
    moved = job(restart={"from_platform": entries, "process_replace": True})
    assert moved.restart.process_replace
    assert not any(line.startswith("process_replace=") for line in lines(moved))


def test_a_job_with_platform_entries_is_the_same_after_a_round_trip(job):
    entries = {"pod-rescheduling": "on", "recover-strategy": "dump,exit", "tor-affinity": "null"}
    moved = job(restart={"from_platform": entries})
    assert parse_job(moved.model_dump(mode="json")) == moved
    assert any("tor-affinity" in line for line in lines(moved, warnings=True))


# (restart section, words of the one line)
WRONG = [
    (
        {"max_restarts": 5, "from_platform": {"fault-tolerance/job-retry-num": "8"}},
        ["restart", "job-retry-num='8'", "max_restarts=5", "8 or 5"],
    ),
    (
        {"max_restarts": "5", "from_platform": {"fault-tolerance/job-retry-num": "8"}},
        ["job-retry-num='8'", "max_restarts=5"],
    ),
    (
        {"data_skipping": True, "from_platform": {"MS_ENABLE_TFT": "{TRE:1}"}},
        ["MS_ENABLE_TFT TRE:1", "data_skipping=true", "exclude"],
    ),
    (
        {"data_skipping": True, "numeric_retry": True},
        ["numeric_retry=true", "data_skipping=true", "exclude"],
    ),
    (
        {"max_skipped_in_a_row": 3},
        ["max_skipped_in_a_row=3", "data_skipping=false"],
    ),
    ({"from_platform": {"hang-retry": "true"}}, ["did you mean fault-tolerance/hang-retry?"]),
    ({"from_platform": {"fault-retry-times": 3}}, ["fault-retry-times", "3", "string"]),
    ({"from_platform": {3: "x"}}, ["from_platform", "3", "string"]),
    ({"from_platform": "x"}, ["from_platform", "x"]),
]


@pytest.mark.parametrize("name", ["numeric_retry", "data_skipping"])
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, "no threshold, so that only nan and inf are abnormal"),
        ({"worker": {"command": ["true"]}}, "the steps of worker.command are not known"),
        ({"limit": 3.0}, None),
    ],
    ids=["without a threshold", "a command", "with one"],
)
def test_an_answer_to_abnormal_steps_that_lacks_something_is_a_warning(job, name, sections, words):
    restart = {name: True, "abnormal_grad_norm": sections.get("limit")}
    spec = {key: value for key, value in sections.items() if key != "limit"}
    notes = recovery_notes(job(restart=restart, **spec))
    result = [note.line for note in notes if note.is_warning and note.line.startswith(f"{name}: ")]
    assert [words in line for line in result] == ([True] if words else [])


@pytest.mark.parametrize(("restart", "words"), WRONG)
def test_a_wrong_restart_section_is_refused_in_one_line(job, restart, words):
    with pytest.raises(InputError) as caught:
        job(restart=restart)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_operator_retry_is_asked_for_in_both_places_or_in_none(job):
    restart = {"from_platform": {"fault-tolerance/hccl_op_retry": "true"}}
    worker = {"command": ["true"]}
    with pytest.raises(InputError) as caught:
        check_without_store(job(worker=worker, restart=restart))
    text = str(caught.value)
    assert all(w in text for w in ("hccl_op_retry='true'", "comm.op_retry.enabled=false"))
    comm = {"op_retry": {"enabled": True}, "chip": "a3", "watchdog": False}
    check_without_store(job(worker=worker, restart=restart, comm=comm))


def test_the_ladder_s_policy_holds_every_switch_of_the_section(job):
    switches: dict[str, Any] = {
        "max_restarts": 9,
        "pod_retries": 2,
        "hang": False,
        "memory_retry": False,
        "collective_retry": False,
        "process_in_place": False,
        "pod_before_in_place": True,
        "process_replace": False,
        "end_of_life_checkpoint": False,
        "numeric_retry": True,
    }
    expected = Policy(**switches, operator_retry=True)
    assert job(restart=switches).restart.policy(operator_retry=True) == expected
    assert job().restart.policy(operator_retry=False) == Policy()


@pytest.mark.parametrize("platform", Platform)
def test_what_a_platform_prints_a_job_accepts(job, platform):
    printed = print_platform(Policy(max_restarts=7), platform)
    assert job(restart={"from_platform": dict(printed.entries)}).restart.max_restarts in (3, 7)


INIT = {"run": "taught", "step": 200}


def commit(job: Job, run_id: str, *steps: int) -> None:
    """Checkpoints without tensors, in the job's store."""
    make_store(job.storage)
    checkpoints = CheckpointStore(open_store(job.storage), run_id)
    for step in steps:
        manifest = Manifest(
            run_id=run_id, placement=1, attempt=1, step=step, world_size=1, written_at_s=0.0,
            tensors={}, shards={},
        )  # fmt: skip
        checkpoints.commit(manifest)


@pytest.mark.parametrize(
    ("steps", "init_from", "words"),
    [
        ((), INIT, "init_from.run: 'taught': the job's storage has no checkpoint of it"),
        ((100, 300), INIT, "init_from.step: 200: run taught has no such .*; it has 100, 300"),
    ],
)
def test_a_run_to_begin_from_must_be_there(job, monkeypatch, steps, init_from, words):
    monkeypatch.setattr(job_checks, "check_recipe", lambda *_: None)
    commit(job(), "taught", *steps)
    with pytest.raises(InputError, match=words):
        check_job(job(init_from=init_from))


@pytest.mark.parametrize(
    "init_from", [INIT, {"run": "taught"}, {"run": "taught", "optimizer": "reset"}]
)
def test_a_run_to_begin_from_that_is_there_is_fine(job, monkeypatch, init_from):
    monkeypatch.setattr(job_checks, "check_recipe", lambda *_: None)
    commit(job(), "taught", 100, 200)
    check_job(job(init_from=init_from))


def test_a_run_that_has_a_checkpoint_needs_the_other_one_no_more(job, monkeypatch):
    monkeypatch.setattr(job_checks, "check_recipe", lambda *_: None)
    commit(job(), "run", 50)
    check_job(job(init_from=INIT))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"init_from": {"run": "run"}}, "init_from.run=run is this run"),
        ({"init_from": INIT, "worker": {"command": ["true"]}}, "init_from is for sessions"),
        ({"init_from": {**INIT, "optimizer": "forget"}}, "'keep' or 'reset'"),
    ],
)
def test_what_cannot_be_begun_from_is_refused(job, sections, words):
    with pytest.raises(InputError, match=words):
        job(**sections)


def test_a_name_in_the_command_that_nothing_sets_is_found_before_anything_starts(job, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # of this process, not of the job's
    fields = {"env": {"MY_SIZE": "7"}, "data": None}

    def check(*arguments: str) -> None:
        command = ["echo", *arguments]
        check_without_store(job(worker={"command": command}, **fields))

    check("${NNODES}", "${NODE_RANK}", "${WORLD_SIZE}", "${MA_NUM_HOSTS}", "$MY_SIZE", "$HOME")
    for name in ("RANK", "MA_NUM_NODES"):
        with pytest.raises(InputError, match=f"worker.command: .*{name}}} is set by nothing"):
            check(f"--x=${{{name}}}")


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["torchrun", "train.py"], "torchrun"),
        (["bash", "-c", "python -m torch.distributed.run train.py"], "torch.distributed.run"),
        (["python", "train.py", "--log", "/logs/torchrun-3"], None),
        (["python", "train.py"], None),
    ],
)
def test_a_launcher_that_is_started_once_per_device_is_warned_of(command, launcher):
    def warnings(per: str) -> list[str]:
        return lines(small_job(worker={"command": command, "per": per}), warnings=True)

    said = f"worker.per=device: {launcher} starts ranks of its own: per: node is for it"
    assert warnings("device") == ([said] if launcher else [])
    assert warnings("node") == []


@pytest.mark.parametrize("recipe", [None, "own.program:main"])
def test_a_setting_that_a_recipe_has_to_take_over_is_a_warning(job, recipe):
    worker = {"recipe": recipe} if recipe else {}
    fields = {"worker": worker, "data": {"sources": ["/corpus"]}}
    notes = recovery_notes(job(parallelism={"bucket_cap_mb": 50}, **fields))
    result = [note for note in notes if note.line.startswith("parallelism.bucket_cap_mb: ")]
    assert [note.is_warning for note in result] == [True] * (recipe is not None)


def test_what_only_a_session_reads_is_refused_of_a_command(job):
    with pytest.raises(InputError, match=r"parallelism\.bucket_cap_mb changes nothing for"):
        job(parallelism={"bucket_cap_mb": 50}, worker={"command": ["true"]})


@pytest.mark.parametrize(
    ("worker", "size"),
    [
        ({"command": ["torchrun", "train.py"]}, "the command once on each of 1 node with 2 slots"),
        ({"command": ["python3", "train.py"], "per": "device"}, "world size 2"),
        ({"recipe": "mine:main"}, "world size 2"),
    ],
)
def test_preflight_counts_the_ranks_of_a_launcher_by_slots(job, worker, size):
    engine = {"nodes": 1, "slots_per_node": 2, "spares": 0}
    assert size_text(job(worker=worker, engine=engine)) == size


def test_what_copies_on_partner_nodes_take_is_told_before_a_run(job):
    copying = {"partner_copies": 1, "partner_mb_per_s": 250}
    fields = {"restart": {"pod_retries": 1}}
    (line,) = [note for note in lines(job(checkpoint=copying, **fields)) if "partner" in note]
    assert line == (
        "partner_copies: 1 of each node's saves in the memory of other nodes, at 250 MB/s; a node "
        "needs 5 times its share of the state"
    )
    assert not [note for note in lines(job()) if "partner" in note]


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        ({"env": {"HCCL_IF_BASE_PORT": "29500"}}, 29_500),
        ({"env": {"HCCL_IF_BASE_PORT": "29470"}}, 29_470),
        ({"comm": {"if_base_port": 29_469}}, 29_469),
        ({"env": {"HCCL_IF_BASE_PORT": "29501"}}, None),
        ({"comm": {"if_base_port": 29_468}}, None),
        ({}, None),
    ],
)
def test_hccls_ports_over_torchs_own_port_are_a_warning(job, fields, base):
    warned = [note for note in lines(job(**fields), warnings=True) if "29500" in note]
    assert len(warned) == (base is not None)
    if base is not None:
        assert warned[0].startswith(f"HCCL_IF_BASE_PORT={base}: HCCL takes ports {base} to ")


def test_one_failure_domain_for_all_nodes_is_a_warning(job):
    racks = {"node-0": "rack-a", "node-1": "rack-a"}
    copying = {"partner_copies": 1, "failure_domains": racks}
    warned = lines(job(checkpoint=copying, restart={"pod_retries": 1}), warnings=True)
    assert any("all of 'rack-a'" in note for note in warned)


CLUSTER = {"kind": "kubernetes", "image": "perdure:1", "nodes": 2, "slots_per_node": 2}
ABSENT = {"sources": ["/opt/perdure/docs/*.md"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": ABSENT},
        {"data": {"sources": ["/corpus/a.txt", "/corpus/*.md"]}},
        {"data": ABSENT, "tokenizer": {"kind": "file", "path": "/opt/tokenizer.json"}},
    ],
    ids=["glob", "file", "tokenizer"],
)
def test_paths_of_an_image_are_not_looked_for_on_the_machine_of_the_caller(
    job, changes, monkeypatch
):
    monkeypatch.setattr(job_checks, "_check_engine", lambda _job: None)  # no cluster is here
    where = {"worker": {}, "engine": CLUSTER, "storage": {"address": "s3://bucket/runs"}}
    elsewhere = job(**where, **changes)
    check_without_store(elsewhere)
    (note,) = job_checks.start_warnings(elsewhere)
    assert note.startswith("data.sources: ")
    assert "the supervisor's needs them" in note
    with pytest.raises(InputError, match=r"data\.sources"):
        check_without_store(job(worker={}, **changes))


def test_the_sample_for_a_cluster_passes_and_names_its_namespace(monkeypatch):
    monkeypatch.setattr(job_checks, "_check_engine", lambda _job: None)
    text = (ROOT / "deploy/kubernetes/job.yaml").read_text()
    sample = parse_job(yaml.safe_load(text))
    check_without_store(sample)
    assert sample.engine.model_dump()["namespace"] == "perdure"
