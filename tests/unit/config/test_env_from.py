"""Variables whose values are kept elsewhere: their references, and what a node makes of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import yaml

from perdure.training.config.job import parse_job
from perdure.training.config.job_file import refuse_secrets
from perdure.training.config.secrets import SecretSource, values_on_node
from perdure.training.errors import InputError
from perdure.training.node_checks.host import check_secrets
from perdure.training.wire.agent import StartOrder
from perdure.training.wire.node import CheckOutcome
from perdure.training.wire.transport import dump_line
from tests.jobs import job_document, small_job
from tests.unit.perdure.commands import error_line, perdure

TOKEN = "hf_abcdefghijklmnopqrstuvwx"


def values(source: SecretSource, **environment: str) -> str:
    found = values_on_node({"X": source}, delivered={"X": "delivered"}, environment=environment)
    return found["X"]


def test_a_value_comes_from_the_order_a_file_or_the_agents_environment(tmp_path):
    mounted = tmp_path / "token"
    mounted.write_bytes(b"first line\nsecond line\n")
    assert values(SecretSource(block="b")) == "delivered"
    assert values(SecretSource(file=str(mounted))) == "first line\nsecond line"
    assert values(SecretSource(secret="SITE"), SITE="of-the-site") == "of-the-site"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"file": "/no/such/file"}, "env_from.X: /no/such/file: No such file or directory"),
        ({"secret": "SITE"}, "env_from.X: the container has no variable SITE"),
        ({"secret": "SHORT"}, "env_from.X: 3 bytes, 6 to 8192 can be kept out of logs"),
        ({"secret": "EMPTY"}, "env_from.X: 0 bytes"),
    ],
)
def test_a_value_that_is_not_there_or_cannot_be_masked_is_refused_by_name(source, words):
    with pytest.raises(ValueError, match=words):
        values(SecretSource(**source), SHORT="abc", EMPTY="")


def test_a_block_whose_value_did_not_come_is_refused():
    with pytest.raises(ValueError, match=r"env_from\.X: the value of Prefect block b did not come"):
        values_on_node({"X": SecretSource(block="b")}, delivered={}, environment={})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"env_from": {"X": {}}}, "env_from.X: needs exactly one of block, file and secret"),
        ({"env_from": {"X": {"file": "/a", "block": "b"}}}, "needs exactly one of"),
        ({"env_from": {"X": {"file": "a"}}}, "file must be an absolute path"),
        ({"env_from": {"X": {"secret": "not a name"}}}, "must be the name of an environment"),
        ({"env_from": {"X": {"file": "/a", "field": "b"}}}, "field is of a block"),
        ({"env_from": {"X": {"secret": TOKEN}}}, "holds a secret itself"),
        ({"env_from": {"X": TOKEN}}, "must name where the value is kept"),
        ({"env_from": [{"name": "X", "value": TOKEN}]}, "env_from: must name where the value is"),
        ({"env_from": {"X": {"secret": [TOKEN]}}}, "env_from.X.secret: must be a text"),
        ({"env_from": {"X": {"secret": "A", TOKEN.replace("_", "-"): 1}}}, "no such field"),
        ({"env": [{"name": "X", "value": TOKEN}]}, "env: must be a section of variables"),
        ({"env": TOKEN}, "env: must be a section of variables"),
        ({"env": {"X": [TOKEN]}}, "env.X: must be a text, in quotes"),
        ({"env": {f"X={TOKEN}": None}}, "env: must be a text"),
        ({"env": {"X": "a"}, "env_from": {"X": {"block": TOKEN}}}, "holds a secret itself"),
        ({"env_from": {"MA_X": {"file": "/a"}}}, "MA_X is set by the node agent"),
        ({"env_from": {"X": {"file": "/a"}}, "env": {"X": "1"}}, "X is in env and in env_from"),
        ({"env_from": {"X": {"file": "/a"}}, "worker": {"command": ["a", "--key=${X}"]}},
         "worker.command has $X, and all of the node see arguments"),
    ],
)  # fmt: skip
def test_a_wrong_reference_is_refused_without_showing_what_was_given(sections, words):
    with pytest.raises(InputError) as refused:
        parse_job(job_document(**sections))
    assert words in str(refused.value)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env:\n  DB_PASSWORD: 12345678\n", "env.DB_PASSWORD: must be a text, in quotes"),
        ("env:\n  X: 12345678: 9\n", "not YAML: mapping values are not allowed here, line 8, col"),
        ("env:\n  X: *12345678\n", "not YAML: found undefined alias, line 8"),
    ],
)
def test_a_job_file_that_cannot_be_shows_no_value_of_a_variable(tmp_path, capsys, text, words):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document()) + text)
    line = error_line(capsys, "show", path)
    assert words in line
    assert "12345678" not in line


def test_an_override_that_cannot_be_shows_no_value(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document()))
    line = error_line(capsys, "show", path, "--set", "env.X=[12345678")
    assert "--set: env.X: is not YAML" in line
    assert "12345678" not in line


def test_a_shell_may_read_a_secret_by_itself():
    command = ["sh", "-c", "login $$X ${XY} $XY"]
    small_job(env_from={"X": {"file": "/a"}}, worker={"command": command})


@pytest.mark.parametrize("command", [("run",), ("show",), ("env",), ("preflight",)])
def test_a_secret_in_a_job_file_is_refused_in_one_line_that_names_the_way_out(
    tmp_path, capsys, command
):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document(tmp_path, env={"HF_TOKEN": "not-to-be-shown"})))
    line = error_line(capsys, *command, path)
    assert "env.HF_TOKEN: its name marks a secret, and a job holds no secrets" in line
    assert "env_from: {HF_TOKEN: {secret: VARIABLE}}" in line
    assert "not-to-be-shown" not in line


def test_a_key_in_a_command_is_refused(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document(worker={"command": ["a", f"--key={TOKEN}"]})))
    line = error_line(capsys, "show", path)
    assert "worker.command: holds a key" in line
    assert TOKEN not in line


def test_perdure_env_shows_where_a_secret_is_kept_and_not_more(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document(env_from={"X": {"block": "b", "field": "f"}})))
    assert '"why": "from Prefect block b, field f"' in perdure("env", path, "--json")


def test_a_node_without_a_secret_fails_its_check(tmp_path):
    mounted = tmp_path / "token"
    job = small_job(env_from={"X": {"file": str(mounted)}, "Y": {"block": "not-of-the-node"}})
    assert check_secrets(job, {}).outcome is CheckOutcome.FAILED
    mounted.write_text("the-secret")
    assert check_secrets(job, {}).outcome is CheckOutcome.OK


def test_an_order_shows_its_secrets_to_the_agent_that_it_is_sent_to_and_to_nobody_else():
    order = StartOrder.model_validate(
        {
            "placement": 1, "attempt": 1, "num_nodes": 1, "slots_per_node": 1, "hosts": ["h"],
            "master_addr": "h", "master_port": 1, "command": [], "is_command": False,
            "is_launcher": False, "cwd": "/", "grace_s": 1, "log_path": None, "variables": {},
            "job": job_document(), "data_manifest_key": None, "secrets": {"X": "the-secret"},
        }
    )  # fmt: skip
    for shown in (order.model_dump_json(), str(order), repr(order), str(order.model_dump())):
        assert "the-secret" not in shown
    sent = StartOrder.model_validate_json(dump_line(order))
    assert sent.delivered == {"X": "the-secret"}
    assert sent.without_secrets().delivered == {}


def test_a_secret_in_the_overlay_of_a_pod_is_refused_and_a_reference_is_not():
    def engine(variable: Mapping[str, object]) -> dict[str, object]:
        pod = {"spec": {"containers": [{"name": "agent", "env": [variable]}]}}
        return {"kind": "kubernetes", "image": "perdure:1", "pod": pod}

    store = {"address": "s3://bucket/runs"}
    literal = {"name": "HF_TOKEN", "value": "not-to-be-shown"}
    with pytest.raises(InputError, match=r"engine\.pod: HF_TOKEN: its name marks a secret") as seen:
        refuse_secrets(small_job(engine=engine(literal), storage=store))
    assert "not-to-be-shown" not in str(seen.value)
    named = {"secretKeyRef": {"name": "hub", "key": "token"}}
    reference = engine({"name": "HF_TOKEN", "valueFrom": named})
    refuse_secrets(small_job(engine=reference, storage=store))
