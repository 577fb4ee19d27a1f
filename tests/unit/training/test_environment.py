"""The variables that the workers of a job get, and the reasons for them."""

from __future__ import annotations

import json

import pytest
import yaml

from perdure.cli import main
from perdure.training.config.job import Job, parse_job
from perdure.training.environment import check_environment, worker_variables
from perdure.training.errors import InputError


def document(**changes) -> dict:
    return {
        "run_id": "env",
        "storage": {"address": "file:///nowhere"},
        "worker": {"command": ["true"]},
        **changes,
    }


def values(**changes) -> dict[str, str]:
    job = parse_job(document(**changes))
    check_environment(job)
    return {variable.name: variable.value for variable in worker_variables(job)}


OP_RETRY = {"chip": "a3", "watchdog": False, "op_retry": {"enabled": True, "hold_time_ms": 700}}


def test_the_limits_of_the_collectives_are_the_jobs_in_the_units_of_hccl():
    comm = {
        "connect_timeout_s": 240,
        "exec_timeout_s": 900,
        "buffsize_mb": 64,
        "if_base_port": 50_000,
    }
    variables = values(comm=comm)
    assert variables["HCCL_CONNECT_TIMEOUT"] == "240"
    assert variables["HCCL_EXEC_TIMEOUT"] == "900"
    assert variables["HCCL_BUFFSIZE"] == "64"
    assert variables["HCCL_IF_BASE_PORT"] == "50000"


def test_the_variables_that_guides_explain_otherwise_have_their_reason():
    reasons = {v.name: v.why for v in worker_variables(parse_job(document()))}
    assert "nothing to do with communication" in reasons["COMBINED_ENABLE"]
    assert "29500, as some guides have it, is torch's own default" in reasons["HCCL_IF_BASE_PORT"]
    assert values()["COMBINED_ENABLE"] == "1"
    assert values(env={"COMBINED_ENABLE": "0"})["COMBINED_ENABLE"] == "0"


@pytest.mark.parametrize("exec_timeout_s", [1, 68, 1836, 7200])
def test_the_event_wait_outlasts_the_execution_limit(exec_timeout_s):
    variables = values(comm={"exec_timeout_s": exec_timeout_s})
    assert (
        int(variables["HCCL_EVENT_TIMEOUT"]) > int(variables["HCCL_EXEC_TIMEOUT"]) == exec_timeout_s
    )


def test_operator_retry_is_off_and_has_no_parameters_unless_enabled():
    variables = values()
    assert variables["HCCL_OP_RETRY_ENABLE"] == "L1:0,L2:0"
    assert variables.keys().isdisjoint({"HCCL_OP_RETRY_PARAMS", "HCCL_OP_EXPANSION_MODE"})


def test_operator_retry_brings_its_parameters_and_its_mode():
    variables = values(comm=OP_RETRY)
    assert variables["HCCL_OP_RETRY_ENABLE"] == "L1:1,L2:1"
    assert variables["HCCL_OP_RETRY_PARAMS"] == "MaxCnt:1,HoldTime:700,IntervalTime:1000"
    assert variables["HCCL_OP_EXPANSION_MODE"] == "AI_CPU"


@pytest.mark.parametrize("watchdog", [True, False])
def test_the_watchdog_is_the_jobs_choice_on_both_kinds_of_device(watchdog):
    variables = values(comm={"watchdog": watchdog})
    for name in ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        assert variables[name] == str(int(watchdog))


@pytest.mark.parametrize(
    ("worker", "is_on"),
    [({"recipe": "train:main"}, "0"), ({"command": ["python", "train.py"]}, "1")],
    ids=["session", "command"],
)
def test_a_watchdog_nobody_chose_leaves_a_process_alive_that_recovers_by_itself(worker, is_on):
    variables = values(worker=worker)
    assert variables["TORCH_HCCL_ASYNC_ERROR_HANDLING"] == is_on
    assert variables["MULTI_STREAM_MEMORY_REUSE"] == "1", "nothing else keeps a collective's memory"


def test_operator_retry_needs_no_word_about_the_watchdog_of_a_command():
    retry = {key: value for key, value in OP_RETRY.items() if key != "watchdog"}
    variables = values(worker={"command": ["python", "train.py"]}, comm=retry)
    assert variables["TORCH_HCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_own_variables_replace_ours_in_place_and_others_follow_at_the_end():
    names = list(values())
    job = parse_job(document(env={"MY_OWN": "1", "HCCL_BUFFSIZE": "300"}))
    variables = worker_variables(job)
    assert [variable.name for variable in variables] == [*names, "MY_OWN"]
    job_variables = {v.name: (v.value, v.why) for v in variables if v.why == "set by the job"}
    assert job_variables == {
        "MY_OWN": ("1", "set by the job"),
        "HCCL_BUFFSIZE": ("300", "set by the job"),
    }


def test_every_variable_is_there_once_and_has_a_reason():
    variables = worker_variables(parse_job(document(comm=OP_RETRY)))
    assert len({variable.name for variable in variables}) == len(variables)
    assert all(variable.why.strip() for variable in variables)


def test_the_event_limit_follows_an_execution_limit_of_the_jobs_own():
    variables = values(env={"HCCL_EXEC_TIMEOUT": "5000"})
    assert int(variables["HCCL_EVENT_TIMEOUT"]) > 5000


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HCCL_BUFFSIZE", "209715200", "number of bytes, HCCL_BUFFSIZE is in MB: write 200"),
        ("HCCL_BUFFSIZE", "200MB", "has a unit"),
        ("HCCL_BUFFSIZE", "5000", "MB, not bytes"),
        ("HCCL_WHITELIST_DISABLE", "0", "0 needs HCCL_WHITELIST_FILE"),
        ("HCCL_WHITELIST_DISABLE", "no", "0 or 1"),
        ("HCCL_WHITELIST_FILE", "/etc/hccl.json", "not read with HCCL_WHITELIST_DISABLE=1"),
        ("HCCL_CONNECT_TIMEOUT", "119", "120 to 7200"),
        ("HCCL_EXEC_TIMEOUT", "30min", "seconds"),
        ("HCCL_EVENT_TIMEOUT", "1836", "must exceed HCCL_EXEC_TIMEOUT=1836"),
        ("HCCL_IF_BASE_PORT", "80", "1024 to 65520"),
        ("COMBINED_ENABLE", "2", "0 to 1"),
        ("HCCL_OP_RETRY_ENABLE", "1", "must look like"),
        ("HCCL_OP_RETRY_ENABLE", "L1:1", "comm.op_retry.enabled"),
        ("OMP_NUM_THREADS", "", "1 to 4096"),
    ],
)
def test_a_wrong_unit_or_an_excluded_pair_is_refused(name, value, words):
    with pytest.raises(InputError, match=words):
        values(env={name: value})


def test_the_port_of_the_rendezvous_is_none_of_hccls():
    with pytest.raises(InputError, match=r"contain comm\.master_port=50031"):
        values(comm={"master_port": 50_031}, env={"HCCL_IF_BASE_PORT": "50000"})
    values(comm={"master_port": 50_032}, env={"HCCL_IF_BASE_PORT": "50000"})


def test_hccl_asks_for_no_white_list_unless_the_job_names_one():
    assert values()["HCCL_WHITELIST_DISABLE"] == "1"
    job_variables = {"HCCL_WHITELIST_DISABLE": "0", "HCCL_WHITELIST_FILE": "/etc/hccl.json"}
    assert job_variables.items() <= values(env=job_variables).items()
    with pytest.raises(InputError, match="absolute path"):
        values(env={**job_variables, "HCCL_WHITELIST_FILE": "hccl.json"})


def test_the_documents_limits_are_a_profile_and_a_number_of_the_jobs_own_comes_first():
    variables = values()
    assert (variables["HCCL_CONNECT_TIMEOUT"], variables["HCCL_EXEC_TIMEOUT"]) == ("600", "1836")
    variables = values(comm={"timeouts": "platform"})
    assert (variables["HCCL_CONNECT_TIMEOUT"], variables["HCCL_EXEC_TIMEOUT"]) == ("1200", "1800")
    assert int(variables["HCCL_EVENT_TIMEOUT"]) > 1800
    variables = values(comm={"timeouts": "platform", "exec_timeout_s": 900})
    assert (variables["HCCL_CONNECT_TIMEOUT"], variables["HCCL_EXEC_TIMEOUT"]) == ("1200", "900")
    with pytest.raises(InputError, match="changes nothing"):
        values(comm={"timeouts": "platform", "exec_timeout_s": 900, "connect_timeout_s": 300})


def test_each_profile_of_limits_has_its_own_reason():
    reasons = {
        profile: [v.why for v in worker_variables(parse_job(document(comm={"timeouts": profile})))]
        for profile in ("standard", "platform")
    }
    assert sum(a != b for a, b in zip(*reasons.values(), strict=True)) == 2


@pytest.mark.parametrize(
    ("value", "words"), [(209_715_200, "write 200"), ("209715200", "write 200"), ("64M", "a unit")]
)
def test_a_size_that_is_not_in_mb_is_refused_with_the_right_unit(value, words):
    with pytest.raises(InputError, match=rf"comm\.buffsize_mb: .*{words}"):
        values(comm={"buffsize_mb": value})


def test_an_endless_event_wait_is_accepted():
    assert values(env={"HCCL_EVENT_TIMEOUT": "0"})["HCCL_EVENT_TIMEOUT"] == "0"


@pytest.fixture
def job_file(tmp_path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document(env={"MY_OWN": "1"})))
    return str(path)


def run_cli(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_perdure_env_prints_the_variables_as_json(job_file, capsys):
    assert run_cli("env", job_file, "--json", "--set", "comm.exec_timeout_s=900") == 0
    printed = json.loads(capsys.readouterr().out)
    job: Job = parse_job(document(env={"MY_OWN": "1"}, comm={"exec_timeout_s": 900}))
    assert printed == [
        {"name": v.name, "value": v.value, "why": v.why} for v in worker_variables(job)
    ]


def test_perdure_env_prints_a_table_for_people(job_file, capsys):
    assert run_cli("env", job_file) == 0
    printed = capsys.readouterr().out
    assert all(v.name in printed for v in worker_variables(parse_job(document())))


def test_perdure_env_refuses_a_wrong_unit_in_one_line(job_file, capsys):
    assert run_cli("env", job_file, "--set", "env.HCCL_BUFFSIZE='0'") == 2
    assert capsys.readouterr().err == (
        "perdure: env.HCCL_BUFFSIZE: '0' must be 1 to 4096 (MB, not bytes)\n"
    )


def test_a_rank_table_that_is_written_excludes_one_of_the_jobs_own():
    assert values(env={"RANK_TABLE_FILE": "/etc/hccl.json"})["RANK_TABLE_FILE"] == "/etc/hccl.json"
    with pytest.raises(InputError, match=r"comm.rank_table=v1.2 writes that file"):
        values(env={"RANK_TABLE_FILE": "/etc/hccl.json"}, comm={"rank_table": "v1.2"})


VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"env": {VISIBLE: "4"}},
            f"env.{VISIBLE}: {VISIBLE}=4 has fewer than 2 devices; comm.rank_table=v1.2 needs them",
        ),
        (
            {"env": {VISIBLE: "1,1"}},
            f"env.{VISIBLE}: {VISIBLE}=1,1 names a device twice; comm.rank_table=v1.2 needs them",
        ),
        (
            {"env_from": {VISIBLE: {"secret": "DEVICES"}}},
            f"env_from.{VISIBLE}: comm.rank_table=v1.2 must know the devices: give them in env",
        ),
        (
            {"comm": {"rank_table": "v1.2", "chip": "a2"}},
            "comm.rank_table: v1.2 is for chip a3, and comm.chip=a2",
        ),
        (
            {"comm": {"rank_table": "v1.0", "chip": "950"}},
            "comm.rank_table: v1.0 is for chip a2 or a3, and comm.chip=950",
        ),
    ],
)
def test_a_rank_table_that_no_node_could_write_is_refused_with_the_job(
    tmp_path, capsys, changes, words
):
    comm = {"rank_table": "v1.2"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document(**{"comm": comm, **changes})))
    for command in ("preflight", "run"):
        assert run_cli(command, str(path)) == 2
        assert capsys.readouterr().err == f"perdure: {words}\n"
    assert values(comm=comm, env={VISIBLE: "4,6"})[VISIBLE] == "4,6"


def test_devices_that_no_rank_table_names_are_the_jobs_own_affair():
    assert values(env={VISIBLE: "4"})[VISIBLE] == "4"


def test_what_a_node_imports_in_advance_is_named_to_it():
    assert "PERDURE_PRELOAD" not in values()
    worker = {"recipe": "own:main", "preload": ["json", "transformers.models.llama"]}
    variables = values(worker=worker, data={"sources": ["/corpus"]})
    assert variables["PERDURE_PRELOAD"] == "json,transformers.models.llama"
