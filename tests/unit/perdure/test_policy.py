"""`perdure policy export`: what is printed is the platform's, and is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.config.recovery import RestartSpec
from perdure.training.platforms.forms import Platform
from perdure.training.platforms.printing import EntryPlace
from perdure.training.platforms.settings import JOB_FIELDS, POLICY_FIELDS
from perdure.training.supervisor.policy_export import export_policy
from tests.jobs import job_document, small_job
from tests.unit.perdure.commands import error_line, perdure

A3 = {"chip": "a3", "watchdog": False, "op_retry": {"enabled": True}}
SWITCHES = [n for n, field in RestartSpec.model_fields.items() if field.annotation is bool]
restarts = st.fixed_dictionaries(
    {name: st.booleans() for name in SWITCHES},
    optional={
        "max_restarts": st.integers(0, 128),
        "pod_retries": st.integers(1, 128),
        "in_place_retries": st.integers(1, 128),
        "count": st.sampled_from(["without_progress", "ever"]),
        "failover_grace_s": st.integers(-1, 900),
        "unmount_after_s": st.integers(-1, 900),
        "snapshot_every_steps": st.integers(1, 1000),
        "delay_s": st.sampled_from([0.0, 5.0]),
    },
).filter(
    lambda one: (
        not (one["numeric_retry"] and one["data_skipping"])
        and (not one["pod_before_in_place"] or "pod_retries" in one)
    )
)


@given(restarts, st.sampled_from(Platform), st.booleans())
def test_an_exported_policy_reads_back_as_it_was_but_for_what_is_named(restart, platform, retry):
    comm = A3 if retry else {}
    job = small_job(restart=restart, comm=comm)
    printed = export_policy(job, platform)
    back = small_job(restart={"from_platform": dict(printed.entries)}, comm=comm).restart
    named = {line.partition("=")[0] for line in printed.warnings} | set(printed.without_entry)
    fields = {*POLICY_FIELDS, *JOB_FIELDS, "snapshot_every_steps"} & RestartSpec.model_fields.keys()
    differs = {name for name in fields if getattr(back, name) != getattr(job.restart, name)}
    if not restart["process_replace"]:
        differs -= {"process_in_place"}  # nothing that it could be about
    assert differs <= named
    assert len(printed.warnings) == len({line.partition("=")[0] for line in printed.warnings})


@pytest.fixture
def job_file(tmp_path) -> Path:
    return write(tmp_path, restart={"max_restarts": 8, "pod_retries": 3, "unmount_after_s": 10})


def write(folder: Path, **sections: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job_document(folder, **sections)), encoding="utf-8")
    return path


def test_modelarts_gets_annotations_and_a_variable_and_the_rest_is_warned_of(job_file, capsys):
    text = perdure("policy", "export", "--platform", "modelarts", job_file)
    annotations, variables = text.split("\n\n")
    assert annotations.startswith("# metadata.annotations\n")
    assert yaml.safe_load(annotations)["fault-tolerance/job-retry-num"] == "8"
    assert yaml.safe_load(annotations)["fault-tolerance/pod-retry-num"] == "3"
    assert yaml.safe_load(variables) == {"MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS": "10"}
    found = json.loads(perdure("policy", "export", "--platform", "modelarts", "--json", job_file))
    assert (
        "memory_retry=true: modelarts has no entry for it, there it is false" in found["warnings"]
    )
    assert found["by_place"][EntryPlace.ANNOTATIONS] == yaml.safe_load(annotations)


def test_mindcluster_gets_labels_an_annotation_and_its_pods_restart_policy(job_file):
    document = perdure("policy", "export", "--platform", "mindcluster", "--json", job_file)
    places = json.loads(document)["by_place"]
    assert places[EntryPlace.LABELS]["fault-retry-times"] == "8"
    assert list(places[EntryPlace.ANNOTATIONS]) == ["recover-strategy"]
    assert places[EntryPlace.POD] == {"restartPolicy": "Never"}


def test_mindformers_gets_a_line_for_the_shell_and_its_own_snapshots(tmp_path):
    path = write(tmp_path, restart={"numeric_retry": True, "snapshot_every_steps": 25})
    text = perdure("policy", "export", "--platform", "mindformers", path)
    assert text.splitlines()[-1] == (
        'export MS_ENABLE_TFT="{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:2,RSC:0,TRE_SNAPSHOT_STEPS:25}"'
    )
    skipping = write(tmp_path, restart={"data_skipping": True})
    text = perdure("policy", "export", "--platform", "mindformers", skipping)
    assert text.splitlines()[-1] == "use_skip_data_by_global_norm: True"


def test_a_setting_of_the_job_beside_the_ladder_is_named_too():
    restart = {"delay_s": 5.0, "heal": {"reset": False}, "snapshot_every_steps": 3}
    warnings = export_policy(small_job(restart=restart), Platform.MODELARTS).warnings
    assert {"delay_s=5.0", "heal.reset=false", "snapshot_every_steps=3"} <= {
        line.partition(":")[0] for line in warnings
    }


def test_a_policy_that_a_platform_has_no_entry_for_prints_nothing(tmp_path):
    off = (
        *("memory_retry", "collective_retry", "process_replace", "node_replace"),
        "end_of_life_checkpoint",
    )
    path = write(tmp_path, restart=dict.fromkeys(off, False))
    assert perdure("policy", "export", "--platform", "mindspeed", path) == ""


def test_an_unknown_platform_and_a_job_that_is_wrong_are_one_line_each(job_file, tmp_path, capsys):
    line = error_line(capsys, "policy", "export", "--platform", "slurm", job_file)
    assert line == (
        "perdure: --platform: 'slurm' must be one of modelarts, mindformers, mindspeed, mindcluster"
    )
    wrong = write(tmp_path, restart={"max_restarts": 999})
    line = error_line(capsys, "policy", "export", "--platform", "modelarts", wrong)
    assert "restart.max_restarts" in line
