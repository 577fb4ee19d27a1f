"""The batch script does what the end of `perdure launch` asks for, with a stand-in for that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from perdure.training.engines.launched.slurm_script import slurm_script
from tests.jobs import small_job
from tests.slurm.lab import NODES, Lab
from tests.slurm.runs import OVER
from tests.waiting import wait_for

AWAY_S = 15.0
# Ends as the line of its restart has it: the exit code, and the nodes at fault.
STAND_IN = """\
for word; do [ "$previous" = --end-file ] && end=$word; previous=$word; done
echo "${SLURM_RESTART_COUNT:-0} $SLURMD_NODENAME" >> FOLDER/starts
while [ -e FOLDER/wait ]; do sleep 0.2; done
sed -n "$((${SLURM_RESTART_COUNT:-0} + 1))p" FOLDER/ends > "$end.$SLURMD_NODENAME"
mv "$end.$SLURMD_NODENAME" "$end"
"""


class Script:
    """A job of two nodes and a spare, of which only the script is Perdure's."""

    def __init__(self, lab: Lab, folder: Path, *ends: str) -> None:
        self.lab, self.folder = lab, folder
        (folder / "ends").write_text("".join(f"{end}\n" for end in ends))
        (folder / "stand-in").write_text(STAND_IN.replace("FOLDER", str(folder)))
        engine = {"kind": "launched", "nodes": 2, "spares": 1, "slots_per_node": 1}
        job = small_job(folder, engine=engine)
        options = (f"--output={folder}/out", f"--chdir={folder}")
        file = folder / "script"
        file.write_text(slurm_script(job, ("sh", str(folder / "stand-in")), options))
        export = f"--export=HOME={folder},PATH"
        self.job_id = lab.slurm("sbatch", "--parsable", export, str(file))

    @property
    def starts(self) -> list[set[str]]:
        """The nodes of each start."""
        starts: dict[str, set[str]] = {}
        path = self.folder / "starts"
        for line in path.read_text().splitlines() if path.exists() else ():
            restart, node = line.split()
            starts.setdefault(restart, set()).add(node)
        return list(starts.values())

    def end(self) -> str:
        """State of the job in the end, with its exit code."""
        wait_for(lambda: self.lab.field(self.job_id, "JobState") in OVER, what=self, period_s=0.5)
        fields = [self.lab.field(self.job_id, name) for name in ("JobState", "ExitCode")]
        return " ".join(fields)

    def __str__(self) -> str:
        return (self.folder / "out").read_text()


@pytest.mark.parametrize(
    ("end", "state"),
    [
        pytest.param("0", "COMPLETED 0:0", marks=pytest.mark.long),
        pytest.param("1", "FAILED 1:0", marks=pytest.mark.long),
        ("65", "FAILED 65:0"),
    ],
)
def test_a_run_that_has_ended_is_not_started_again(lab, tmp_path, end, state):
    script = Script(lab, tmp_path, end)
    assert script.end() == state, script
    assert script.starts == [{"n1", "n2", "n3"}]


def test_a_run_is_started_again_and_then_without_the_nodes_at_fault(lab, tmp_path):
    script = Script(lab, tmp_path, "75", "76 n2,n3", "0")
    assert script.end() == "COMPLETED 0:0", script
    assert script.starts == [{"n1", "n2", "n3"}, {"n1", "n2", "n3"}, {"n1", "n4"}]
    assert lab.field(script.job_id, "ExcNodeList") == "n2,n3"


@pytest.mark.long
def test_a_run_starts_without_a_spare_where_slurm_has_none(lab, tmp_path):
    for node in ("n1", "n3"):
        lab.slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=maintenance")
    script = Script(lab, tmp_path, "0")
    assert script.end() == "COMPLETED 0:0", script
    assert script.starts == [{"n2", "n4"}]


@pytest.mark.long
def test_a_run_is_started_again_once_slurmctld_is_back(lab, tmp_path):
    (tmp_path / "wait").touch()
    script = Script(lab, tmp_path, "75", "0")
    wait_for(lambda: script.starts == [set(NODES[:3])], what=script)
    lab.controller_down()
    (tmp_path / "wait").unlink()
    time.sleep(AWAY_S)
    lab.controller_up()
    assert script.end() == "COMPLETED 0:0", script
    assert len(script.starts) == 2
