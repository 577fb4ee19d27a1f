"""Names in the arguments of a command."""

from __future__ import annotations

import pytest

from perdure.training.commands.arguments import (
    fill_in,
    fill_in_variables,
    find_unknown_names,
)

KNOWN = {"NNODES": "2"}


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        (["torchrun", "--nnodes=${NNODES}", "--master=${MASTER_IP}"], ["MASTER_IP"]),
        (["$LAUNCHER", "train.py"], ["LAUNCHER"]),
        (["sh", "-c", "for i in 1; do echo $i $NNODES; done"], []),
        (["/bin/bash", "-o", "pipefail", "-ec", "echo ${i}", "${j}"], []),
        (["env", "A=$B", "bash", "-lc", "echo $C"], ["B"]),
        (["bash", "train.sh", "-c", "${CONFIG}"], ["CONFIG"]),
        (["python", "-c", "print(${x})"], ["x"]),
        (["train", "--path=${oc.env:HOME}", "$5", "end$", "$$PLAIN", "$(date)"], []),
    ],
    ids=[
        "braces", "the program", "a script", "options of a shell", "before a shell",
        "a file of a shell", "another interpreter", "no names",
    ],
)  # fmt: skip
def test_names_that_nothing_sets_are_found_but_in_the_script_of_a_shell(command, unknown):
    assert list(find_unknown_names(command, KNOWN)) == unknown
    if unknown:
        with pytest.raises(ValueError, match=f"{unknown[0]}}} is set by nothing"):
            fill_in(command, KNOWN)


def test_what_is_known_is_filled_in_for_a_shell_too():
    assert fill_in(["sh", "-c", "echo $NNODES $i $$HOME"], KNOWN) == ["sh", "-c", "echo 2 $i $HOME"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${MASTER_PORT}", "29501"),
        ("tcp://${MASTER_ADDR}:${MASTER_PORT}", "tcp://10.0.0.1:29501"),
        ("${WORLD_SIZE}", "8"),
        ("$MASTER_PORT and ${OTHER}", "$MASTER_PORT and ${OTHER}"),
        ("${SECRET}", "${SECRET}"),
        ("$${MASTER_PORT}", "$29501"),
    ],
)
def test_a_variable_of_the_job_may_name_one_that_the_agent_sets(text, value):
    variables = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501", "SECRET": "s", "A": text}
    variables |= {"MA_NUM_HOSTS": "2", "MA_NUM_GPUS": "4", "B": "${MASTER_PORT}"}
    filled = fill_in_variables(variables, ["A", "missing"])
    assert (filled["A"], filled["B"]) == (value, "${MASTER_PORT}")
