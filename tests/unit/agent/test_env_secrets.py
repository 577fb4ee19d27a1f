"""Secrets of a job at its agent: given to workers, and in none of their logs."""

from __future__ import annotations

from tests.unit.agent.conftest import agent_job

STDOUT = "command-00001.stdout.log"
SECRETS = {"X": "delivered-with-the-order", "Y": "read-on-the-node"}
PRINT = ("sh", "-c", "echo $$X and $$Y; sleep 0.2; echo $$PERDURE_SECRETS; exit 3")


def test_workers_print_their_secrets_and_neither_file_nor_answer_has_them(shared, tmp_path):
    mounted = tmp_path / "token"
    job = agent_job(env_from={"X": {"block": "b"}, "Y": {"file": str(mounted)}})
    start_fields = {"job": job, "secrets": {"X": SECRETS["X"]}}

    status = shared.finish(*PRINT, **start_fields)
    assert status.staging_error == f"ValueError: env_from.Y: {mounted}: No such file or directory"

    mounted.write_text(SECRETS["Y"] + "\n")
    assert shared.finish(*PRINT, **start_fields).workers[0].exit_code == 3
    assert shared.logs()[STDOUT] == "*** and ***\nX,Y\n"
    files = [path.read_bytes() for path in shared.folder.rglob("*") if path.is_file()]
    assert b"*** and ***\nX,Y\n" in files
    assert not [
        content for content in files for value in SECRETS.values() if value.encode() in content
    ]
    assert not list(shared.folder.rglob("*.pipe"))


def test_a_renewed_secret_reaches_the_next_attempt(shared, tmp_path):
    mounted = tmp_path / "token"
    job = agent_job(env_from={"Y": {"file": str(mounted)}})
    for value in ("the-first-value", "the-second-value"):
        mounted.write_text(value)
        shared.finish("sh", "-c", f"test $$Y = {value}", job=job)
        assert shared.status().workers[0].exit_code == 0
