"""The variables by which a launcher on several nodes becomes one gang."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.agent.preparation import rank_variables
from tests.unit.agent.conftest import agent_config, start_order

ADDRESS = {"PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29999"}


def torchrun_variables(
    *command: str, num_nodes: int = 2, is_launcher: bool = True, **env: str
) -> dict[str, str]:
    order = start_order(
        Path("/work"),
        *command,
        is_command=True,
        num_nodes=num_nodes,
        slots_per_node=8,
        hosts=tuple(f"10.0.0.{node + 1}" for node in range(num_nodes)),
        master_addr="10.0.0.1",
        master_port=29999,
        is_launcher=is_launcher,
        variables=env,
    )
    variables = rank_variables(agent_config(member=num_nodes - 1), order, num_nodes - 1, 0)
    return {name: value for name, value in variables.items() if name.startswith("PET_")}


@pytest.mark.parametrize(
    "command",
    [
        ("torchrun", "--nproc_per_node=8", "train.py"),
        ("python", "-m", "torch.distributed.launch", "--use_env", "train.py"),
        ("bash", "-c", "torchrun train.py 2>&1 | tee train.log"),
        ("torchrun", "train.py", "--standalone-eval"),
        ("torchrun", "--nnodes=1:2", "train.py"),
        ("torchrun", "--nnodes", "16", "train.py"),
    ],
)
def test_the_platforms_own_command_is_told_of_all_nodes(command):
    assert torchrun_variables(*command) == {
        "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8", **ADDRESS
    }  # fmt: skip


def test_a_variable_of_the_job_has_precedence():
    variables = torchrun_variables("torchrun", "train.py", PET_NNODES="1:2", PET_MASTER_PORT="1")
    assert variables.keys() == {"PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR"}


@pytest.mark.parametrize(
    "command",
    [
        ("torchrun", "--standalone", "train.py"),
        ("sh", "-c", "torchrun --standalone train.py"),
        ("torchrun", "--nnodes=1", "train.py"),
        ("torchrun", "--nnodes", "1:1", "train.py"),
        ("torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train.py"),
    ],
)
def test_a_launcher_that_stands_alone_does_not_wait_for_other_nodes(command):
    assert torchrun_variables(*command) == {"PET_NPROC_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("text", "is_alone"),
    [
        ("exec torchrun --standalone train.py", True),
        ("torchrun \\\n  --nnodes=1 \\\n  train.py", True),
        ("# not torchrun --standalone\ntorchrun --nproc_per_node=8 train.py", False),
        ("torchrun --nnodes=$MA_NUM_HOSTS train.py", False),
    ],
)
def test_the_script_that_a_command_names_is_read_for_it(tmp_path, text, is_alone):
    (tmp_path / "train.sh").write_text(text)
    variables = torchrun_variables("bash", str(tmp_path / "train.sh"))
    assert ("PET_NNODES" not in variables) is is_alone


def test_a_single_node_keeps_the_free_port_that_torchrun_chooses():
    assert torchrun_variables("torchrun", "t.py", num_nodes=1) == {"PET_NPROC_PER_NODE": "8"}


def test_a_command_that_is_started_once_per_device_gets_none_of_them():
    assert torchrun_variables("python", "train.py", is_launcher=False) == {}
