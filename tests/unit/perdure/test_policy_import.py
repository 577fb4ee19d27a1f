"""`perdure policy import`: other platforms' documents as sections of a job."""

from __future__ import annotations

import json

import pytest
import yaml

from perdure.policy_import import import_policy
from perdure.training.config.job_file import load_job
from perdure.training.errors import InputError
from tests.unit.perdure.commands import error_line, perdure
from tests.values import not_none

CHECKLIST = """
import os

BASE = os.environ.get("BASE", "/obs")
other: dict = {"max_restarts": 1}
fault_tolerance_config = {
    "checkpoint": {"interval": 500, "keep_last": 3, "path": "/obs/ckpt"},
    "max_restarts": 8,
    "hang_detection": {"enabled": True, "timeout_minutes": 30},
    "uce": True,
    "log_level": "INFO",
    "auto_resume": True,
    "colour": "blue",
}
raise SystemExit("a file that is imported is not run")
"""
ANNOTATIONS = {"fault-tolerance/job-retry-num": "8", "fault-tolerance/hang-retry": "true"}


def imported(path) -> dict:
    return json.loads(perdure("policy", "import", path, "--json"))


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "document"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_checklist_sets_sections_and_each_field_is_answered(file):
    document = imported(file(CHECKLIST, "checklist.py"))
    assert document["job"] == {
        "checkpoint": {"every_steps": 500, "keep_last": 3},
        "restart": {
            "max_restarts": 8,
            "hang": True,
            "hang_timeout_s": 1800.0,
            "memory_retry": True,
        },
        "env": {"ASCEND_GLOBAL_LOG_LEVEL": "1"},
    }
    results = {field["name"]: (field["field"], field["result"]) for field in document["fields"]}
    assert results["log_level"] == ("env.ASCEND_GLOBAL_LOG_LEVEL", "1")
    assert results["checkpoint.path"][0] is None
    assert results["auto_resume"][1].startswith("always so")
    assert results["colour"] == (None, "has no counterpart")
    assert len(results) == 10


def test_the_text_is_yaml_with_a_comment_for_each_field(file):
    text = perdure("policy", "import", file(CHECKLIST))
    assert yaml.safe_load(text)["checkpoint"] == {"every_steps": 500, "keep_last": 3}
    assert '# log_level: "INFO" -> env.ASCEND_GLOBAL_LOG_LEVEL="1"\n' in text
    assert '# colour: "blue" -> has no counterpart\n' in text


@pytest.mark.parametrize(
    "document",
    [
        ANNOTATIONS,
        {"annotations": ANNOTATIONS},
        {"metadata": {"annotations": ANNOTATIONS}},
        {"fault_tolerance_config": ANNOTATIONS},
        {"env": [{"name": name, "value": value} for name, value in ANNOTATIONS.items()]},
        {"fault-tolerance/job-retry-num": 8, "fault-tolerance/hang-retry": True},
    ],
)
@pytest.mark.parametrize("form", [json.dumps, yaml.safe_dump])
def test_annotations_are_kept_as_they_are_in_any_frame(file, document, form):
    answer = imported(file(form(document)))
    assert answer["job"] == {"restart": {"from_platform": ANNOTATIONS}}
    assert {field["sets"] for field in answer["fields"]} == {"max_restarts", "hang"}


def test_an_annotation_of_something_else_is_named(file):
    answer = imported(file(json.dumps({**ANNOTATIONS, "jupyter-lab/enable": "false"})))
    assert answer["fields"][-1]["result"] == "is not about recovery"


@pytest.mark.parametrize(
    ("level", "number"),
    [("debug", "0"), ("INFO", "1"), ("Warning", "2"), ("ERROR", "3"), ("none", "4"), (2, "2")],
)
def test_the_log_level_is_that_of_cann(file, level, number):
    answer = imported(file(json.dumps({"log_level": level})))
    assert answer["job"] == {"env": {"ASCEND_GLOBAL_LOG_LEVEL": number}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"max_restarts": 500}', "restart.max_restarts: 500"),
        ('{"max_restarts": "often"}', "max_restarts: 'often' must be a number"),
        ('{"hang_detection": "maybe"}', "'maybe' must be true or false"),
        ('{"log_level": "loud"}', "'loud' must be one of debug"),
        ('{"max_restarts": 3, "max_retries": 4}', "another field sets 3"),
        ('{"fault-tolerance/job-retry-num": "0"}', "must be a number from 1 to 128"),
        ('{"fault-tolerance/job-retry-num": "8", "max_restarts": 3}', "max_restarts"),
        ("[1, 2]", "must hold a mapping"),
        ("{", "document"),
        ("", "must hold a mapping"),
    ],
)
def test_wrong_input_is_one_line(file, text, words, capsys):
    assert words in error_line(capsys, "policy", "import", file(text))


def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys):
    assert "cannot be read" in error_line(capsys, "policy", "import", tmp_path / "none")


CONFIGURATION = """
output_dir: ./out
load_checkpoint: ''
resume_training: False
use_skip_data_by_global_norm: False
runner_config: {epochs: 2, sink_mode: False}
monitor_config: {monitor_on: True, check_for_global_norm: True, global_norm_spike_threshold: 44.0}
parallel_config: {data_parallel: 2, model_parallel: 4, pipeline_stage: 2}
callbacks: [{type: CheckpointMonitor, save_checkpoint_steps: 5}]
"""


def test_a_configuration_of_mindformers_says_what_became_of_each_field(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIGURATION)
    import_policy(file, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["job"] == {
        "worker": {
            "progress": {"kind": "mindformers"},
            "checkpoints": {"kind": "mindformers", "path": "out/checkpoint"},
            "resume": {
                "args": ["--load_checkpoint", "out/checkpoint", "--resume_training", "True"]
            },
        },
        "parallelism": {"tensor": 4, "pipeline": 2},
        "restart": {
            "from_platform": {
                "use_skip_data_by_global_norm": "False", "monitor_on": "True",
                "check_for_global_norm": "True", "global_norm_spike_threshold": "44.0",
            }
        },
    }  # fmt: skip
    names = [field["name"] for field in printed["fields"]]
    assert len(names) == 13, "every field, and only these"
    assert all(field["result"] for field in printed["fields"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("parallel_config: {model_parallel: 0}", "parallel_config.model_parallel: 0 must be"),
        ("runner_config: {}\noutput_dir: [a]", "output_dir"),
        ("monitor_config: {monitor_on: perhaps}", "monitor_on"),
    ],
)
def test_a_configuration_of_mindformers_with_a_wrong_value_is_refused(line, problem, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(line)
    with pytest.raises(InputError, match=problem):
        import_policy(file)


def test_a_job_takes_from_the_configuration_of_its_program_what_it_does_not_say(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIGURATION)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"run_id: m\nstorage: {{address: file://{tmp_path}}}\n"
        f"worker: {{command: [msrun], cwd: {tmp_path}, mindformers: config.yaml}}\n"
        "parallelism: {pipeline: 1}\n"
        "engine: {slots_per_node: 8, spares: 0}\n"
    )
    job = load_job(path)
    assert (job.parallelism.tensor, job.parallelism.pipeline) == (4, 1)
    assert not_none(job.worker.checkpoints).path == "out/checkpoint"
    assert not_none(job.worker.resume).args[0] == "--load_checkpoint"
    assert job.restart.from_platform["check_for_global_norm"] == "True"
    own = load_job(path, ["worker.checkpoints={kind: glob, path: 'x-*'}"])
    assert (not_none(own.worker.checkpoints).path, own.worker.resume) == ("x-*", None)
    with pytest.raises(InputError, match=r"worker.mindformers: .* cannot be read"):
        load_job(path, ["worker.mindformers=other.yaml"])
