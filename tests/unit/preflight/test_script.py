"""What preflight says about the scripts that a command names."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.preflight.job import start_warnings
from perdure.training.preflight.program import script_notes
from tests.jobs import small_job

PIPE, BACKGROUND, FILE = "lost behind the pipe", "in the background", "goes to a file"
EXAMPLE = Path(__file__).parents[3] / "examples" / "train.sh"


def notes(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "train.sh").write_text(text)
    return script_notes(["bash", "train.sh", "torchrun"], tmp_path)


@pytest.mark.parametrize(
    ("line", "warnings"),
    [
        ("torchrun train.py | tee train.log", [PIPE]),
        ("torchrun \\\n  --nproc_per_node 8 \\\n  train.py 2>&1 | tee train.log", [PIPE]),
        ("python -m torch.distributed.run train.py |& tee train.log", [PIPE]),
        ("nohup torchrun train.py > train.log 2>&1 &", [BACKGROUND, FILE]),
        ("msrun train.py &> train.log", [FILE]),
        ("torchrun train.py >> $OUT/train.log 2>&1", [FILE]),
        ("for i in 1 2; do deepspeed train.py & done", [BACKGROUND]),
        ("torchrun train.py &\necho started", [BACKGROUND]),
        ('RUN="torchrun --nproc_per_node 8"\n$RUN train.py | tee log', [PIPE]),
        ('RUN="torchrun x"\nexport A=1\neval ${RUN} > log', [FILE]),
        ("OMP_NUM_THREADS=1 torchrun train.py | tee log", [PIPE]),
    ],
)
def test_a_script_that_hides_how_its_launcher_ends_is_warned_of(tmp_path, line, warnings):
    said = notes(tmp_path, f"#!/bin/bash\n{line}\n")
    assert len(said) == len(warnings)
    assert all(part in note for part, note in zip(warnings, said, strict=True))
    assert all(note.startswith("train.sh, line ") for note in said)


@pytest.mark.parametrize(
    "text",
    [
        "set -o pipefail\ntorchrun train.py | tee train.log",
        "set -euo pipefail; torchrun train.py 2>&1 | tee train.log",
        "torchrun train.py",
        "torchrun train.py 2>&1",
        "torchrun train.py 2> errors.log",
        "torchrun train.py > >(tee train.log)",
        "torchrun train.py || exit 1",
        "cd /x && torchrun train.py",
        "torchrun train.py &\npid=$!\nwait $pid",
        "trap 'kill $!' TERM; torchrun train.py & wait",
        "# torchrun train.py | tee log",
        "pip install deepspeed | tail -1",
        "echo torchrun > started",
        "which torchrun > /dev/null && true",
        "python prepare.py > prepare.log\ntorchrun train.py",
        "torchrun train.py --pattern 'a|b' --mark '>x'",
    ],
)
def test_a_script_that_ends_as_its_launcher_does_is_not(tmp_path, text):
    assert notes(tmp_path, text) == []


def test_the_line_that_is_named_is_where_the_launcher_begins(tmp_path):
    (note,) = notes(tmp_path, "#!/bin/bash\n\ncd /x\ntorchrun \\\n train.py | tee log\n")
    assert note.startswith("train.sh, line 4: the exit code of torchrun")


def test_the_script_in_a_command_itself_is_read_and_one_that_is_not_there_is_not(tmp_path):
    (note,) = script_notes(["bash", "-c", "torchrun train.py | tee log"], tmp_path)
    assert note.startswith("worker.command, line 1")
    assert script_notes(["bash", "-o", "pipefail", "-c", "torchrun x | tee log"], tmp_path) == []
    assert script_notes(["bash", "missing.sh", "$HOME/other.sh"], tmp_path) == []
    assert script_notes(["bash", str(EXAMPLE)], tmp_path) == []


@pytest.mark.parametrize("option", ["--max-restarts=3", "--max_restarts 10", "--max-restarts  1"])
def test_a_launcher_that_starts_ranks_again_itself_is_warned_of(tmp_path, option):
    for note in (
        *script_notes(["torchrun", *option.split(), "train.py"], tmp_path),
        *notes(tmp_path, f"torchrun {option} \\\n  train.py"),
        *script_notes(["bash", "-c", f"torchrun {option} train.py"], tmp_path),
    ):
        assert "has torchrun start ranks again" in note
        assert option.split("=")[0].split()[0] in note


@pytest.mark.parametrize("option", ["--max-restarts=0", "--max_restarts 0", "--max-steps=3"])
def test_a_launcher_that_starts_none_again_is_not(tmp_path, option):
    assert script_notes(["torchrun", *option.split(), "train.py"], tmp_path) == []
    assert notes(tmp_path, f"# --max_restarts=3\ntorchrun {option} train.py") == []


def test_preflight_and_a_start_warn_of_the_script_of_a_job(tmp_path):
    (tmp_path / "train.sh").write_text("torchrun train.py > log")
    worker = {"command": ["bash", "train.sh"], "cwd": str(tmp_path)}
    (note,) = start_warnings(small_job(tmp_path, worker=worker))
    assert FILE in note
