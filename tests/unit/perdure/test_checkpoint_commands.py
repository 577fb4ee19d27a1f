"""`perdure checkpoints`: what it prints, and what it does."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from perdure.checkpoint_commands import parse_age_s
from perdure.cli import app
from perdure.monitor import RunMonitor
from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.training.config.job import parse_job
from perdure.training.errors import InputError
from perdure.training.journal.records import CheckpointRecorded, RunCreated
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.run_handle import RunHandle
from tests.jobs import job_document
from tests.unit.journal.histories import BEGINNING, NOW
from tests.unit.perdure.commands import append, error_line, perdure
from tests.unit.storage.stores import save_directly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARD = shard_name(1, 1, 0)
WEIGHT = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.fixture
def document(tmp_path):
    return job_document(tmp_path, run_id="small")


@pytest.fixture
def checkpoints(document, perdure_home):
    """Steps 10, 20 and 30 of a run that is known on this machine."""
    job = parse_job(document)
    remember_job(perdure_home, job)
    checkpoints = CheckpointStore(open_store(job.storage), "small")
    for step in (10, 20, 30):
        state = {"model/w": WEIGHT + step, "model/n": torch.tensor(step), "optim/m": WEIGHT}
        save_directly(checkpoints, state, step=step, owner=(1, 1))
    return checkpoints


def printed(*arguments, code=0):
    return perdure("checkpoints", *arguments, code=code)


def objects(*arguments, code=0):
    return json.loads(printed(*arguments, "--json", code=code))


def damage(checkpoints, step):
    key = checkpoints.key(step, SHARD)
    data = checkpoints.store.get(key)
    checkpoints.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def test_ls_shows_every_step_newest_first_with_its_state(checkpoints):
    damage(checkpoints, 20)
    printed("verify", "small", "--step", 20, "--set-aside", code=1)
    printed("verify", "small")
    checkpoints.put_shard(40, SHARD, b"123")
    rows = objects("ls", "small")
    assert [row["step"] for row in rows] == [40, 30, 20, 10]
    states = ["incomplete", "committed", "set_aside", "committed"]
    assert [row["state"] for row in rows] == states
    assert [row["verified"] and row["verified"]["intact"] for row in rows] == [
        None, True, False, None,
    ]  # fmt: skip
    assert [row["tiers"] for row in rows] == [[], ["store"], [], ["store"]]
    assert "hash_differs" in rows[2]["reason"]
    assert (rows[0]["size_bytes"], rows[0]["world_size"]) == (3, None)
    assert (rows[1]["world_size"], rows[1]["placement"], rows[1]["attempt"]) == (1, 1, 1)
    assert all(0 <= row["age_s"] < 60 for row in rows)


def test_ls_shows_the_loss_that_a_manifest_has(checkpoints):
    for step, loss in ((40, 2.34567), (50, math.nan)):
        save_directly(checkpoints, {"w": WEIGHT}, step=step, owner=(1, 1), extra={"loss": loss})
    assert [row["loss"] for row in objects("ls", "small")] == [None, 2.34567, None, None, None]
    assert " 2.346 " in printed("ls", "small")


def test_ls_prints_a_table(checkpoints):
    checkpoints.set_aside(20, "its [shard] is lost")
    out = printed("ls", "small")
    lines = [line.split("\u2502")[1].strip() for line in out.splitlines() if "\u2502" in line]
    assert lines == ["30", "20", "10"]
    assert "step 20 was set aside: its [shard] is lost" in out
    assert "1.1" in out
    assert "never" in out


def test_ls_of_a_run_without_checkpoints(document, perdure_home):
    remember_job(perdure_home, parse_job(document))
    assert printed("ls", "small") == "small: no checkpoints\n"
    assert objects("ls", "small") == []


def test_a_job_file_names_its_run(checkpoints, document, tmp_path, monkeypatch, perdure_home):
    (perdure_home / "runs" / "small" / "job.json").unlink()
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    assert len(objects("ls", path)) == 3
    path.rename(tmp_path / "jobfile")
    monkeypatch.chdir(tmp_path)
    assert len(objects("ls", "jobfile")) == 3


def test_verify_takes_the_newest_and_keeps_the_outcome(checkpoints):
    (outcome,) = objects("verify", "small")
    assert (outcome["step"], outcome["intact"], outcome["damages"]) == (30, True, [])
    assert outcome["size_bytes"] == checkpoints.manifest(30).size_bytes
    assert objects("ls", "small")[0]["verified"] == {
        "verified_at_s": outcome["verified_at_s"], "intact": True, "damages": 0,
    }  # fmt: skip


def test_verify_all_reads_every_step_and_ends_with_1_when_one_is_damaged(checkpoints):
    damage(checkpoints, 20)
    outcomes = objects("verify", "small", "--all", code=1)
    assert [(o["step"], o["intact"]) for o in outcomes] == [(30, True), (20, False), (10, True)]
    (found,) = outcomes[1]["damages"]
    assert (found["file"], found["kind"]) == (SHARD, "hash_differs")
    assert not outcomes[1]["set_aside"]
    assert checkpoints.steps() == [10, 20, 30]
    out = printed("verify", "small", "--all", code=1)
    assert "step 20: damaged\n" in out
    assert f"  {SHARD} hash_differs: " in out
    assert "step 10: intact" in out


def test_verify_sets_damaged_ones_aside_on_request(checkpoints):
    damage(checkpoints, 30)
    out = printed("verify", "small", "--all", "--set-aside", code=1)
    assert "step 30: damaged, set aside" in out
    assert checkpoints.steps() == [10, 20]
    assert printed("verify", "small").startswith("step 20: intact")


def test_verify_holds_also_where_nothing_may_be_written(checkpoints):
    folder = checkpoints.store.local_path(checkpoints.key(30, "x")).parent
    (folder / "verified.json").mkdir()  # nothing can be written there
    (folder / "verified.json" / "x").write_text("")
    done = CliRunner().invoke(app, ["checkpoints", "verify", "small"])
    assert done.exit_code == 0
    assert "step 30: intact" in done.stdout
    assert "perdure: the outcome is not kept: " in done.stderr


def test_export_writes_the_weights_alone_under_their_own_names(checkpoints, tmp_path):
    out = printed("export", "small", "--step", 20, "-o", tmp_path / "out")
    assert out.splitlines()[0] == str(tmp_path / "out" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["n", "w"]
    assert torch.equal(found["w"], WEIGHT + 20)


def test_export_takes_the_newest_the_name_of_a_file_and_a_type(checkpoints, tmp_path):
    path = tmp_path / "mine.safetensors"
    out = objects("export", "small", "-o", path, "--dtype", "bf16")
    size_bytes = path.stat().st_size
    assert out == {"step": 30, "files": [str(path)], "num_tensors": 2, "size_bytes": size_bytes}
    found = load_file(path)
    assert torch.equal(found["w"], (WEIGHT + 30).bfloat16())
    assert found["n"] == 30


def test_export_replaces_nothing_unless_forced(checkpoints, tmp_path, capsys):
    printed("export", "small", "--step", 10, "-o", tmp_path)
    assert "--force" in error_line(capsys, "checkpoints", "export", "small", "-o", tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], WEIGHT + 10)
    printed("export", "small", "-o", tmp_path, "--force")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], WEIGHT + 30)


def test_an_export_leaves_no_files_of_another_one_that_a_loader_would_mix_in(
    checkpoints, tmp_path, capsys
):
    out = tmp_path / "out"
    printed("export", "small", "-o", out)
    several = ("export", "small", "-o", out, "--shard-size-bytes", 20)
    assert "model.safetensors is of another export" in error_line(capsys, "checkpoints", *several)
    printed(*several, "--force")
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sorted(p.name for p in out.iterdir()) == [*names, "model.safetensors.index.json"]
    printed("export", "small", "-o", out, "--force")
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]


def test_an_export_of_a_damaged_checkpoint_ends_with_1_and_leaves_nothing(
    checkpoints, tmp_path, capsys
):
    damage(checkpoints, 30)
    assert SHARD in error_line(
        capsys, "checkpoints", "export", "small", "-o", tmp_path / "out", code=1
    )
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_one_line(checkpoints, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    line = error_line(
        capsys, "checkpoints", "export", "small", "-o", tmp_path / "file" / "out", code=1
    )
    assert "Not a directory" in line


def test_gc_deletes_what_broken_saves_left_and_no_checkpoint(checkpoints):
    checkpoints.put_shard(15, SHARD, b"broken")
    checkpoints.put_shard(30, shard_name(1, 0, 5), b"stray")
    assert objects("gc", "small")["removed"] == [], "they are younger than a day"
    planned = objects("gc", "small", "--older-than", "0s", "--dry-run")
    assert planned["dry_run"]
    assert [(one["kind"], one["step"]) for one in planned["removed"]] == [
        ("broken_save", 15), ("stray_shard", 30),
    ]  # fmt: skip
    assert planned["size_bytes"] == len(b"broken") + len(b"stray")
    out = printed("gc", "small", "--older-than", "0s", "--dry-run")
    assert "would remove: 2 objects, 11 bytes" in out
    assert 15 in checkpoints.states()
    out = printed("gc", "small", "--older-than", "0s")
    assert "broken save" in out
    assert "removed: 2 objects, 11 bytes" in out
    assert list(checkpoints.states()) == checkpoints.steps() == [10, 20, 30]
    assert [one["intact"] for one in objects("verify", "small", "--all")] == [True] * 3
    assert printed("gc", "small", "--older-than", "0s") == "removed: 0 objects, 0 bytes\n"


def test_gc_leaves_the_save_alone_that_a_living_attempt_may_be_writing(checkpoints):
    checkpoints.fence(1, 1)
    checkpoints.put_shard(40, SHARD, b"under way")
    assert objects("gc", "small", "--older-than", "0s")["removed"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "unknown"], "run_id: 'unknown': no such run on this machine; known: small"),
        (["ls", "unknown.yaml"], "unknown.yaml: cannot be read: No such file or directory"),
        (["verify", "small", "--step", 7], "--step: 7 is not committed; committed: 30, 20, 10"),
        (["verify", "small", "--step", 7, "--all"], "--all: excludes --step"),
        (["export", "small", "--step", 7, "-o", "x"], "--step: 7 is not committed"),
        (["export", "small", "-o", "x.safetensors", "--shard-size-bytes", 9], "into a folder"),
        (["export", "small", "-o", "/dev/null"], "--output: /dev/null is neither a folder"),
        (["gc", "small", "--older-than", "yesterday"], "--older-than: 'yesterday': write a"),
        (["gc", "small", "--older-than", "-1h"], "--older-than: '-1h': write a"),
    ],
)
def test_a_mistake_ends_with_one_line_and_2(checkpoints, capsys, arguments, message):
    assert message in error_line(capsys, "checkpoints", *arguments)


def test_a_step_that_was_set_aside_is_not_read_and_the_reason_shown(checkpoints, capsys):
    checkpoints.set_aside(20, "lost")
    line = error_line(capsys, "checkpoints", "verify", "small", "--step", 20)
    assert line == "perdure: --step: 20 was set aside: lost"


def test_a_run_without_checkpoints_has_nothing_to_verify(document, perdure_home, capsys):
    remember_job(perdure_home, parse_job(document))
    for more in ([], ["--all"], ["--step", 3]):
        assert "'small' has no committed checkpoint" in error_line(
            capsys, "checkpoints", "verify", "small", *more
        )


@pytest.mark.parametrize(
    ("text", "age_s"), [("90s", 90), ("1.5m", 90), ("24h", 86_400), ("7d", 604_800), ("0s", 0)]
)
def test_ages_are_written_with_a_unit(text, age_s):
    assert parse_age_s(text) == age_s


@pytest.mark.parametrize("text", ["", "24", "h", "1 h", "1h30m", "nan"])
def test_other_ages_are_refused(text):
    with pytest.raises(InputError):
        parse_age_s(text)


def test_what_a_command_has_saved_itself_is_listed_with_what_is_still_there(tmp_path, perdure_home):
    out = tmp_path / "out"
    out.mkdir()
    (out / "step-20.bin").write_bytes(b"123")
    worker = {"command": ["true"], "checkpoints": {"kind": "glob", "path": f"{out}/step-*.bin"}}
    document = job_document(tmp_path, run_id="own", worker=worker, engine={"kind": "local"})
    job = parse_job(document)
    remember_job(perdure_home, job)
    assert printed("ls", "own") == "own: no checkpoints\n"
    run = RunHandle(job, home=perdure_home)
    created = RunCreated(**NOW, job=document)
    saves = [
        CheckpointRecorded(
            **NOW, placement=1, attempt=1, step=step, path=f"{out}/step-{step}.bin", size_bytes=3,
            written_s=100.0 + step,
        )
        for step in (10, 20)
    ]  # fmt: skip
    append(run, BEGINNING[0], created, *BEGINNING[2:], *saves)
    newest, gone = objects("ls", "own")
    assert newest == {
        "step": 20, "written_at_s": 120.0, "size_bytes": 3, "path": f"{out}/step-20.bin",
        "attempt": "1.1", "is_kept": True,
    }  # fmt: skip
    assert (gone["step"], gone["is_kept"]) == (10, False)
    assert "step-10.bin (gone)" in printed("ls", "own").replace("\n", "").replace(" │ ", "")
    status = RunMonitor(run).snapshot().status.document
    assert status["committed_step"] == 20
    assert status["checkpoints"] == {"program": {"newest": 20, "count": 1}}
