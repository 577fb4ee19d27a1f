"""The batch script of a Slurm job; tests/slurm/test_script.py has it carried out."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from perdure.training.engines.launched.ends import ENDS, LaunchEnd
from perdure.training.engines.launched.platforms import Platform
from perdure.training.engines.launched.slurm_script import slurm_script
from tests.jobs import small_job

LAUNCH = ("/opt/venv/bin/python", "-m", "perdure", "launch", "/data/job.yaml")


def script_of(launch=LAUNCH, options=(), **engine: int) -> str:
    sections = {"kind": "launched", "nodes": 2, "slots_per_node": 8, **engine}
    worker = {"command": ["train"]}
    return slurm_script(small_job(engine=sections, worker=worker), launch, options)


def settings_of(script: str) -> list[str]:
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    settings = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    # Slurm reads no setting behind the first command.
    assert all(line.startswith("#SBATCH") for line in lines[1 : 1 + len(settings)])
    return settings


@pytest.mark.parametrize(
    ("engine", "nodes"),
    [
        ({"nodes": 1}, "1-2"),
        ({"nodes": 4, "spares": 0}, "4"),
        ({"nodes": 4, "spares": 1}, "4-5"),
        ({"nodes": 128, "spares": 8}, "128-136"),
    ],
)
def test_it_asks_for_spares_and_does_without_them(engine, nodes):
    assert f"--nodes={nodes}" in settings_of(script_of(**engine))


def test_the_loss_of_a_node_does_not_end_the_job():
    script = script_of()
    assert {"--no-kill", "--requeue", "--exclusive"} <= set(settings_of(script))
    (step,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert {"--no-kill", "--kill-on-bad-exit=0", "--ntasks-per-node=1"} <= set(step.split())


@pytest.mark.parametrize("option", ["--time=1-0", "--partition=npu", "-A my account"])
def test_options_of_the_user_are_settings(option):
    assert settings_of(script_of(options=("--mem=0", option)))[-2:] == ["--mem=0", option]


@pytest.mark.parametrize("word", ["/data/a job.yaml", "env.NAME=it's", "$HOME/job.yaml", "a;b"])
def test_words_of_the_command_stay_words(word):
    script = script_of((*LAUNCH, word))
    (command,) = [line for line in script.splitlines() if LAUNCH[0] in line]
    assert shlex.split(command)[: len(LAUNCH) + 1] == [*LAUNCH, word]


def test_the_shell_can_read_it_and_knows_the_codes():
    script = script_of(spares=1)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for end in (LaunchEnd.START_AGAIN, LaunchEnd.START_ELSEWHERE):
        assert f"\n  {ENDS[Platform.SLURM][end].code})\n" in script


SCONTROL = """\
#!/bin/sh
echo "$*" >> calls
[ "$1" != update ] || [ "$(grep -c ^update calls)" -gt TIMES ]
"""


@pytest.mark.parametrize(("failures", "updates"), [(0, 1), (2, 3), (9, 3)])
def test_a_held_job_is_released_though_slurm_takes_no_list_of_nodes(tmp_path, failures, updates):
    code = ENDS[Platform.SLURM][LaunchEnd.START_ELSEWHERE].code
    programs = {
        "scontrol": SCONTROL.replace("TIMES", str(failures)),
        "srun": f'#!/bin/sh\nmkdir -p .perdure\necho "{code} n2" > .perdure/launch-secret-a.end\n',
        "squeue": "#!/bin/sh\n",
        "sleep": "#!/bin/sh\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = script_of().replace(f"launch-secret-{small_job().run_id}", "launch-secret-a")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=env, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    update = "update JobId=7 ExcNodeList=n2"
    assert calls == ["requeuehold 7", *[update] * updates, "release 7"]
