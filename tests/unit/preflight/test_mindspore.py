"""What preflight says about a MindSpore program that a command names."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.config.job import Job
from perdure.training.preflight.job import start_warnings
from perdure.training.preflight.mindspore import mindspore_notes
from tests.jobs import small_job

IMPORT = "from mindspore.communication import init, get_rank\n"
RELEASE, EVALUATES = "never mindspore.communication.release()", "counts as a hang"


def job_of(folder: Path, *command: str, **worker: object) -> Job:
    return small_job(folder, worker={"command": command, "cwd": str(folder), **worker})


def notes(folder: Path, text: str, *command: str, **worker: object) -> list[str]:
    (folder / "train.py").write_text(text)
    return mindspore_notes(job_of(folder, *(command or ("msrun", "train.py")), **worker), folder)


@pytest.mark.parametrize(
    "text",
    [
        f"{IMPORT}init()\n",
        "import mindspore as ms\nms.communication.init('hccl')\n",
        f"{IMPORT}\ndef main():\n    init()\n    print('release() comes later')\n",
        "from mindspore.communication.management import init\ninit()\n",
    ],
)
def test_a_program_that_never_leaves_its_cluster_is_warned_of(tmp_path, text):
    (note,) = notes(tmp_path, text)
    assert RELEASE in note
    assert note.startswith("train.py")


@pytest.mark.parametrize(
    "text",
    [
        "from mindspore.communication import init, release\ninit()\nrelease()\n",
        "import mindspore as ms\nms.communication.init()\nms.communication.release()\n",
        "from mindspore import nn\nnet = nn.Dense(1, 1)\n",
        "import torch\ninit()\n",
        "this is no Python",
    ],
)
def test_other_programs_are_not(tmp_path, text):
    assert notes(tmp_path, text) == []


def test_a_program_in_a_shell_script_is_read_and_one_that_is_not_there_is_not(tmp_path):
    (tmp_path / "run.sh").write_text("msrun --join=True train.py --config x.yaml\n")
    assert len(notes(tmp_path, f"{IMPORT}init()\n", "bash", "run.sh")) == 1
    assert notes(tmp_path, f"{IMPORT}init()\n", "msrun", "elsewhere.py") == []


def test_ranks_that_the_agent_starts_itself_need_no_release(tmp_path):
    command = ("python", "train.py")
    worker = {"per": "device", "integration": "mindspore"}
    assert notes(tmp_path, f"{IMPORT}init()\n", *command, **worker) == []


@pytest.mark.parametrize(
    "line",
    [
        "model.fit(2, data, valid_data)",
        "model.train(2, data, callbacks=[EvalCallBack(valid_dataset=data)])",
        "model.eval(data)",
        "trainer.train(eval_dataset=data)",
    ],
)
def test_an_evaluation_that_may_look_like_a_hang_is_warned_of(tmp_path, line):
    text = f"import mindspore\n{line}\n"
    progress = {"kind": "mindspore"}
    (note,) = notes(tmp_path, text, progress=progress)
    assert EVALUATES in note
    assert "restart.hang_timeout_s" in note
    assert notes(tmp_path, text) == [], "without steps in the output the limit is half an hour"
    assert notes(tmp_path, "import mindspore\nmodel.train(2, data)\n", progress=progress) == []


def test_the_warnings_of_a_start_have_these(tmp_path):
    notes(tmp_path, f"{IMPORT}init()\n")
    assert any(RELEASE in line for line in start_warnings(job_of(tmp_path, "msrun", "train.py")))
